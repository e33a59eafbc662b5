"""Schedules of given stages: the published ones, the optimal one, and curves over memory."""
