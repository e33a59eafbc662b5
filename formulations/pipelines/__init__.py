"""Finite pipeline schedules and partitions: makespan, job shops, SPP, BPPM."""
