"""Optimal plans under changing prices."""
