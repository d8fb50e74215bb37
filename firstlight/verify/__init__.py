"""Runs a checkpoint two ways, compares layer by layer, names the first divergence."""
