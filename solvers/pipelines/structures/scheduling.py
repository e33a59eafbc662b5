"""Greedy list schedules of any finite structure, by priorities and within memory.

An idle device starts the most urgent computation that is ready and fits in memory. There is no
deadlock: on every device the first unfinished microbatch, its leader, can always continue, because
enough memory to finish it is reserved. The first unfinished microbatch of the pipeline is the
leader on every device that it has not passed, so some action can always start.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.plans.structure import Endings, Work, ending_starts
from stagewright.formulations.plans.timing import Blocks
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.pipelines.structures.rules import (
    FIRST_RULES,
    Rule,
    flight_limits,
    latencies,
    urgency_keys,
)
from stagewright.solvers.pipelines.structures.run import (
    BACKWARD,
    FORWARD,
    SEND_B,
    SEND_F,
    WEIGHTS,
    ListRun,
    WorkLists,
)

EQUAL = 1e-9  # relative; schedules that differ by less are equally long


@dataclass(frozen=True, slots=True, eq=False)
class StructureSchedule:
    """Start times of all actions, and the end of the last one."""

    starts: Blocks
    seconds: float
    fullest: float  # the largest share of its memory that a device needs
    rule: Rule


def best_schedule(
    work: Work,
    endings: Endings,
    rules: Sequence[Rule],
    ceiling: float = math.inf,
    bound: float = 0.0,
    near: float = math.inf,
    over: Callable[[], bool] = lambda: False,
) -> StructureSchedule | None:
    """The shortest schedule of ``rules`` if it is below ``ceiling``, else None.

    Ties are broken by the least memory. The search ends if a schedule attains ``bound``, if none of
    the first rules is below ``near``, or if ``over`` returns True.
    """
    best: StructureSchedule | None = None
    lists, scale = WorkLists.of(work), latencies(work)
    for i, rule in enumerate(rules):
        if over():
            break
        if i == FIRST_RULES and (best.seconds if best else ceiling) > near:
            break
        run = ListRun(lists, urgency_keys(work, rule).tolist(), flight_limits(work, rule, scale))
        found = run.finish(ceiling * (1 + EQUAL))
        if found is None:
            continue
        starts = np.array(found)
        reduces, updates, seconds = ending_starts(work, endings, starts)
        fullest = _fullest(work, [run.peak[k] for k in lists.alike])
        shorter = seconds < ceiling * (1 - EQUAL)
        equal = best is not None and seconds <= ceiling * (1 + EQUAL)
        if shorter or (best and equal and fullest < best.fullest):
            ceiling = min(ceiling, seconds)
            blocks = blocks_of_starts(work, starts, reduces, updates)
            best = StructureSchedule(blocks, seconds, fullest, rule)
            if seconds <= bound * (1 + EQUAL):
                break
    return best


def _fullest(work: Work, peaks: Sequence[float]) -> float:
    """The largest share of its memory that a device needs."""
    return float(((np.array(peaks) + work.memory - work.room) / work.memory).max())


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
