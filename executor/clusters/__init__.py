"""Rounds, simulation and the Ray runtime of shared clusters."""
