"""Placement and order of operators: list schedules, searches, bounds, optima."""
