"""Schedules of out-of-order backprop: list schedules, searches for k and groups, CP-SAT."""
