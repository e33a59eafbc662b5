"""Periodic schedules: patterns, 1F1B*, MadPipe."""
