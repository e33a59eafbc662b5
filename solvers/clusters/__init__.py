"""Allocation policies at scale."""
