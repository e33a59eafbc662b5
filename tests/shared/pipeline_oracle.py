"""Start to finish of a pipeline, event by event, in the published order."""

import numpy as np

from stagewright.formulations.schedules.interleaved import interleaved
from stagewright.formulations.schedules.order import F


def by_events(sizes, forward, backward, hop):
    """When every rank is done: an action starts when the one before it is, and its input there."""
    rows = [list(row) for row in interleaved(*sizes).rows]
    last, ends, free = sizes[0] * sizes[1] - 1, {}, [0.0] * len(rows)
    while any(rows):
        before = len(ends)
        for rank, row in enumerate(rows):
            while row and (ready := _ready(row[0], ends, last, hop)) < np.inf:
                stage, kind, number = row[0].stage, row[0].kind, row[0].microbatch
                seconds = (forward if kind == F else backward)[stage]
                free[rank] = ends[stage, kind, number] = max(free[rank], ready) + seconds
                row.pop(0)
        assert len(ends) > before, "the order deadlocks"
    return np.array(free)


def _ready(action, ends, last, hop):
    """When the action's inputs are there; infinite as long as one has not been made."""
    stage, kind, number = action.stage, action.kind, action.microbatch
    if kind == F:
        return 0.0 if stage == 0 else ends.get((stage - 1, kind, number), np.inf) + hop
    own = ends.get((stage, F, number), np.inf)
    return own if stage == last else max(own, ends.get((stage + 1, kind, number), np.inf) + hop)


def kept_by_order(sizes, saved):
    """The most that every rank keeps: a forward's bytes until its backward is done."""
    held = [
        np.cumsum([(1 if one.kind == F else -1) * saved[one.stage] for one in row])
        for row in interleaved(*sizes).rows
    ]
    return np.array([max(0.0, one.max()) for one in held])
