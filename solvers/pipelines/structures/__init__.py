"""Greedy list schedules of finite structures."""
