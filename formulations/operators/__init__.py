"""Placement and order of the operators of a training step."""
