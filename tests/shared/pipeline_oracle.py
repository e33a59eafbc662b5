"""Start to finish of a pipeline, event by event, in the published order."""

import numpy as np

from stagewright.formulations.schedules.order import B, F, I, W
from stagewright.formulations.schedules.published.one_f_one_b import interleaved
from stagewright.formulations.schedules.published.zero_bubble import interleaved_zero_bubble


def order_of(sizes, split):
    """(Interleaved) 1F1B, or ZB-H1 and its interleaved form."""
    return interleaved_zero_bubble(*sizes) if split else interleaved(*sizes)


def by_events(sizes, forward, backward, weight, hop, split=False):
    """When every rank is done: an action starts when the one before it is, and its input there.

    ``weight`` is the part of the backward that is weight gradients.
    """
    rows = [list(row) for row in order_of(sizes, split).rows]
    last, ends, free = sizes[0] * sizes[1] - 1, {}, [0.0] * len(rows)
    lasts = {F: forward, B: backward, I: np.subtract(backward, weight), W: weight}
    while any(rows):
        before = len(ends)
        for rank, row in enumerate(rows):
            while row and (ready := _ready(row[0], ends, last, hop)) < np.inf:
                stage, kind, number = row[0].stage, row[0].kind, row[0].microbatch
                free[rank] = max(free[rank], ready) + lasts[kind][stage]
                ends[stage, kind, number] = free[rank]
                row.pop(0)
        assert len(ends) > before, "the order deadlocks"
    return np.array(free)


def _ready(action, ends, last, hop):
    """When the action's inputs are there; infinite as long as one has not been made."""
    stage, kind, number = action.stage, action.kind, action.microbatch
    if kind == F:
        return 0.0 if stage == 0 else ends.get((stage - 1, kind, number), np.inf) + hop
    if kind == W:
        return ends.get((stage, I, number), np.inf)
    own = ends.get((stage, F, number), np.inf)
    return own if stage == last else max(own, ends.get((stage + 1, kind, number), np.inf) + hop)


def kept_by_order(sizes, saved, split=False):
    """The most that every rank keeps: a forward's bytes until its last gradient is done."""
    changes = {F: 1, B: -1, I: 0, W: -1}
    held = [
        np.cumsum([changes[one.kind] * saved[one.stage] for one in row])
        for row in order_of(sizes, split).rows
    ]
    return np.array([max(0.0, one.max()) for one in held])
