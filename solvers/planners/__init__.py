"""Planners: short, visible assemblies of solves and heuristics, one file each."""
