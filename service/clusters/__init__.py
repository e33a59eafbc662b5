"""Shared clusters: allocations, rounds, simulations and real runs."""
