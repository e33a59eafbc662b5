"""Moves of local search on the stages and devices of a plan."""
