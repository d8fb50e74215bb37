"""Runs a Plan: one step over rows, and generation of one sequence."""
