"""Periodic patterns and the allocations under them."""
