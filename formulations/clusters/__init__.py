"""Allocations of accelerators to jobs, and the policies of Gavel."""
