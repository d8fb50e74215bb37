"""Checkpoint folders on disk -> parameters of a model; strict, and it says what it did."""
