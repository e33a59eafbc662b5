"""How far two computed times may differ."""

RELATIVE_TOLERANCE = 1e-9  # of the makespan: the rounding of sums of float times
