"""Start to finish of a pipeline, event by event, in the published order."""

import numpy as np

from stagewright.formulations.schedules.order import B, F, I, W
from stagewright.formulations.schedules.published.kinds import KINDS, Sizes

_KINDS = {"1f1b": "interleaved", "zero-bubble": "interleaved-zb"}


def order_of(schedule, ranks, chunks, microbatches):
    """The published order of a layout's schedule."""
    kind = KINDS[_KINDS.get(schedule, schedule)]
    return kind.generate(Sizes(ranks, microbatches), chunks)


def by_events(order, rank_of, forward, backward, weight, paired, hop, form):
    """When every rank is done: an action starts when the one before it is, and its input there.

    ``weight`` is the part of the backward that is weight gradients. With pairs a forward directly
    before a whole backward of another stage ends with it, but for the last rank's first one;
    ``paired`` is by the rank that ``rank_of`` has for its stage, and by chunk.
    """
    rows = [_grouped(list(row), form, rank, len(order.rows)) for rank, row in enumerate(order.rows)]
    last, ends, free = len(rank_of) - 1, {}, [0.0] * len(rows)
    lasts = {F: forward, B: backward, I: np.subtract(backward, weight), W: weight}
    while any(rows):
        before = len(ends)
        for rank, row in enumerate(rows):
            while (
                row
                and (ready := max(_ready(one, ends, rank_of, last, hop, form) for one in row[0]))
                < np.inf
            ):
                group = row.pop(0)
                seconds = lasts[group[0].kind][group[0].stage]
                if len(group) > 1:
                    seconds = _pair(paired, group[0].stage)
                free[rank] = max(free[rank], ready) + seconds
                ends.update({(one.stage, one.kind, one.microbatch): free[rank] for one in group})
        assert len(ends) > before, "the order deadlocks"
    return np.array(free)


def _pair(paired, stage):
    """Of a V on R ranks: stage s is the first chunk of rank s, or the second of 2 R - 1 - s."""
    ranks = len(paired)
    return paired[stage, 0] if stage < ranks else paired[2 * ranks - 1 - stage, 1]


def _grouped(row, form, rank, ranks):
    """The actions one by one, or in pairs."""
    places = {rank} if form.copies == 1 else {rank, ranks - 1 - rank}
    is_last = max(places) == ranks - 1 if form.copies == 1 else min(places) == ranks // 2 - 1
    groups, alone = [], is_last
    while row:
        is_pair = form.pairs and len(row) > 1 and row[0].kind == F and row[1].kind == B
        if is_pair and alone:
            is_pair = alone = False
        groups.append(tuple(row[: 1 + is_pair]))
        del row[: 1 + is_pair]
    return groups


def _ready(action, ends, rank_of, last, hop, form):
    """When the action's inputs are there; infinite as long as one has not been made."""
    stage, kind, number = action.stage, action.kind, action.microbatch

    def sent(other):
        alike = rank_of[other] == rank_of[stage] and form.copies == 1
        made = [ends.get((other, one, number), np.inf) for one in ((F,) if kind == F else (B, I))]
        return min(made) + (0.0 if alike else hop)

    if kind == F:
        return 0.0 if stage == 0 else sent(stage - 1)
    if kind == W:
        return ends.get((stage, I, number), np.inf)
    own = ends.get((stage, F, number), np.inf)
    return own if stage == last else max(own, sent(stage + 1))


def kept_by_order(order, saved):
    """The most that every rank keeps: a forward's bytes until its last gradient is done."""
    changes = {F: 1, B: -1, I: 0, W: -1}
    held = [np.cumsum([changes[one.kind] * saved[one.stage] for one in row]) for row in order.rows]
    return np.array([max(0.0, one.max()) for one in held])
