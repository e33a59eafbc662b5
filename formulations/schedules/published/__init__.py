"""Generators of the published schedules."""
