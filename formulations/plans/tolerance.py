"""How far two computed times may differ."""

RELATIVE_TOLERANCE = 1e-9  # of the makespan: the rounding of sums of float times


def running_peak(changes: list[tuple[float, float]], slack: float) -> float:
    """The largest sum of ``changes``, rows (time, change), in the order of time.

    Starts that differ from an end by ``slack`` count as later.
    """
    moved = [(time if change < 0 else time + 2 * slack, change) for time, change in changes]
    now = most = 0.0
    for _, change in sorted(moved):
        now += change
        most = max(most, now)
    return most
