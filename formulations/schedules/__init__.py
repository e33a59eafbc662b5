"""Schedules as orders of computations per device, and generators of the published schedules."""
