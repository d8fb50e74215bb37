"""Layered precision: which path of a model runs in which format."""
