"""Planners of periodic plans: 1F1B* and MadPipe, and the search that they share."""
