"""Greedy list schedules of any finite structure, by priorities and within memory.

An idle device starts the most urgent computation that is ready and fits in memory. There is no
deadlock: on every device the first unfinished microbatch, its leader, can always continue, because
enough memory to finish it is reserved. The first unfinished microbatch of the pipeline is the
leader on every device that it has not passed, so some action can always start.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.plans.structure import Endings, Work, device_loads, ending_starts
from stagewright.formulations.plans.timing import Blocks
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.pipelines.structures.run import list_schedule
from stagewright.solvers.pipelines.structures.state import (
    BACKWARD,
    FORWARD,
    SEND_B,
    SEND_F,
    WEIGHTS,
    ListWork,
)

_ForwardOrder = Literal["oldest", "deepest", "broad", "chunks"]
_BackwardOrder = Literal["oldest", "broad", "chunks", "newest"]
_Urgency = Literal["BFW", "BWF", "WBF", "FBW"]
ROUNDING = 1e-9
FIRST_RULES = 6


@dataclass(frozen=True, slots=True)
class Priority:
    """Priorities of computations, and the limit on microbatches in flight.

    ``depth`` is a multiple of the microbatches that keep the busiest device busy; 1 is 1F1B's
    warm-up. ``urgency`` orders the kinds of computations, the most urgent first. Within a kind
    ``forward`` and ``backward`` decide: by microbatch (oldest or newest first), by stage (deepest:
    last first, broad: first first), or in rounds of one microbatch per device (chunks).
    """

    depth: float = math.inf
    urgency: _Urgency = "BFW"
    forward: _ForwardOrder = "oldest"
    backward: _BackwardOrder = "oldest"


_DEPTHS = (1.0, 1.5, 2.0, 3.0, math.inf)


def rules_for(work: Work) -> list[Priority]:
    """The rules to try for a structure.

    The first ``FIRST_RULES`` cover all types of rules: if they are far from a good schedule, so are
    the others.
    """
    shared = max(map(len, work.places)) > 1
    urgencies: list[_Urgency] = ["BFW", "BWF", "WBF"] if work.split.any() else ["BFW"]
    orders: list[tuple[_ForwardOrder, _BackwardOrder]] = [("oldest", "oldest")]
    if shared:
        orders = [("chunks", "chunks"), ("oldest", "oldest"), ("deepest", "broad"),
                  ("broad", "chunks"), ("broad", "newest")]  # fmt: skip
    first = [Priority(depth, kinds, *orders[0]) for kinds in urgencies[:2] for depth in (1.0, 1.5)]
    first += [Priority(2.0, urgencies[0], *orders[-1]), Priority(math.inf, "FBW", *orders[0])]
    rules = [
        Priority(depth, kinds, *order)
        for order in orders
        for kinds in urgencies
        for depth in _DEPTHS
    ]
    rules += [Priority(math.inf, "FBW", *order) for order in orders]
    rules.append(Priority(math.inf, "FBW", backward="newest"))
    return list(dict.fromkeys([*first, *rules]))


def flight_limits(work: Work, rule: Priority, scale: Floats) -> Ints:
    """The in-flight limit of every lane."""
    count = work.lane.shape[1]
    if rule.depth == math.inf:
        return np.full(len(work.stage), count)
    most = np.ceil(rule.depth * scale / np.bincount(work.stage) - ROUNDING)
    return np.asarray(np.clip(most, 1, count)[work.stage].astype(np.int64))


def latencies(work: Work) -> Floats:
    """Microbatches in flight at each stage when the busiest device is never idle, shape (S,)."""
    stages, microbatches = work.lane.shape
    per_stage = work.seconds[[0, 1, 3]].mean(axis=2).sum(axis=0)
    per_stage[1:] += work.seconds[4, 1:].mean(axis=1)
    latency = np.cumsum(per_stage[::-1])[::-1]
    busiest = float(device_loads(work).max()) / microbatches
    return latency / busiest if busiest > 0 else np.full(stages, float(stages))


def urgency_keys(work: Work, rule: Priority) -> Floats:
    """Priorities of F, B or I, and W, shape (3, S, M); the least value comes first."""
    round_ = max(1, len(work.lane) // max(map(len, work.places)))
    return _keys(*work.lane.shape, round_, rule.urgency, rule.forward, rule.backward)


@lru_cache(maxsize=64)  # most structures have as many stages as the one before
def _keys(
    stages: int,
    count: int,
    round_: int,
    urgency: _Urgency,
    of_forward: _ForwardOrder,
    of_backward: _BackwardOrder,
) -> Floats:
    s, m = np.arange(stages)[:, None], np.arange(count)[None, :]

    def chunks(position: Ints) -> Ints:
        return np.asarray(((m // round_) * stages + position) * round_ + m % round_)

    last = stages - 1 - s
    forward = {
        "oldest": m * stages + last, "deepest": last * count + m, "broad": s * count + m,
        "chunks": chunks(s),
    }[of_forward]  # fmt: skip
    backward = {
        "oldest": m * stages + s, "broad": s * count + m, "chunks": chunks(last),
        "newest": (count - 1 - m) * stages + last,
    }[of_backward]  # fmt: skip
    weights = m * stages + last
    size = float(2 * stages * (count + round_))
    return np.stack([
        urgency.index(kind) * size + order
        for kind, order in (("F", forward), ("B", backward), ("W", weights))
    ])  # fmt: skip


EQUAL = 1e-9  # relative; schedules that differ by less are equally long


@dataclass(frozen=True, slots=True, eq=False)
class StructureSchedule:
    """Start times of all actions, and the end of the last one."""

    starts: Blocks
    seconds: float
    fullest: float  # the largest share of its memory that a device needs
    rule: Priority


def best_schedule(
    work: Work,
    endings: Endings,
    rules: Sequence[Priority],
    ceiling: float = math.inf,
    bound: float = 0.0,
    near: float = math.inf,
    over: Callable[[int], bool] = lambda _: False,
) -> StructureSchedule | None:
    """The shortest schedule of ``rules`` if it is below ``ceiling``, else None.

    Ties are broken by the least memory. The search ends if a schedule attains ``bound``, if none of
    the first rules is below ``near``, or before rule i if ``over(i)`` returns True.
    """
    best: StructureSchedule | None = None
    lists, scale = ListWork.of(work), latencies(work)
    groups = [tuple({*lists.alike[list(group)].tolist()}) for group in endings.devices]
    endings = replace(endings, devices=tuple(groups))  # one of those with the same stages
    for i, rule in enumerate(rules):
        if over(i):
            break
        if i == FIRST_RULES and (best.seconds if best else ceiling) > near:
            break
        limits = flight_limits(work, rule, scale)
        is_short, starts, peaks = list_schedule(
            lists, urgency_keys(work, rule), limits, ceiling * (1 + EQUAL)
        )
        if not is_short:
            continue
        reduces, updates, seconds = ending_starts(work, endings, starts)
        fullest = float(((peaks[lists.alike] + work.memory - work.room) / work.memory).max())
        shorter = seconds < ceiling * (1 - EQUAL)
        equal = best is not None and seconds <= ceiling * (1 + EQUAL)
        if shorter or (best and equal and fullest < best.fullest):
            ceiling = min(ceiling, seconds)
            blocks = blocks_of_starts(work, starts, reduces, updates)
            best = StructureSchedule(blocks, seconds, fullest, rule)
            if seconds <= bound * (1 + EQUAL):
                break
    return best


def blocks_of_starts(work: Work, starts: Floats, reduces: Floats, updates: Floats) -> Blocks:
    """The starts by kind of action."""
    split = work.split[:, None]
    return {
        ActionKind.FORWARD: starts[FORWARD],
        ActionKind.BACKWARD: np.where(split, np.nan, starts[BACKWARD]),
        ActionKind.INPUT_GRADIENT: np.where(split, starts[BACKWARD], np.nan),
        ActionKind.WEIGHT_GRADIENT: np.where(split, starts[WEIGHTS], np.nan),
        ActionKind.SEND_FORWARD: starts[SEND_F],
        ActionKind.SEND_BACKWARD: starts[SEND_B],
        ActionKind.REDUCE: reduces[:, None],
        ActionKind.UPDATE: updates[:, None],
    }
