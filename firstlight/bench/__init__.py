"""Measurements: ours and the baseline on the same checkpoint and prompts, in turns, in one run; kept as JSON."""
