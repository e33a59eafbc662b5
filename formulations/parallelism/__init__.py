"""Parallel layouts of a transformer: degrees, microbatches, memory and time (PTD-P)."""
