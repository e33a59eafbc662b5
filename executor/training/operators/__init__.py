"""Execution of placed operators on ranks."""
