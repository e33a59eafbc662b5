"""Re-time a schedule in its order: every action as early as possible, nothing overtakes."""

from collections.abc import Iterator

import numpy as np

from stagewright.formulations.plans.structure import Endings, Work, ending_starts
from stagewright.formulations.plans.timing import Blocks
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.pipelines.structures.run import BACKWARD, FORWARD, SEND_B, SEND_F, WEIGHTS
from stagewright.solvers.pipelines.structures.scheduling import blocks_of_starts

Action = tuple[int, int, int]  # kind, stage, microbatch


def retimed(work: Work, endings: Endings, before: Floats) -> tuple[Blocks, float] | None:
    """Starts of all actions in the order of the starts ``before``, and the end of the last one.

    Both are for the same stages and microbatches; ``before`` has shape (5, S, M). None if it lacks
    an action. Memory is not checked.
    """
    actions = list(_actions(work))
    if any(np.isnan(before[one]) for one in actions):
        return None
    starts = np.full_like(work.seconds, np.nan)
    free: dict[tuple[str, int], float] = {}
    for one in sorted(actions, key=lambda one: (before[one], _position(work, one))):
        places = _places(work, one)
        ready = [starts[other] + work.seconds[other] for other in _needed(work, one)]
        starts[one] = max([*ready, *(free.get(place, 0.0) for place in places)], default=0.0)
        free |= dict.fromkeys(places, starts[one] + work.seconds[one])
    reduces, updates, seconds = ending_starts(work, endings, starts)
    return blocks_of_starts(work, starts, reduces, updates), seconds


def _actions(work: Work) -> Iterator[Action]:
    stages, count = work.lane.shape
    for s, m in np.ndindex(stages, count):
        yield FORWARD, s, m
        yield BACKWARD, s, m
        if work.split[s]:
            yield WEIGHTS, s, m
        if s < stages - 1 and work.channel[s, m] >= 0:
            yield SEND_F, s, m
            yield SEND_B, s + 1, m


def _position(work: Work, action: Action) -> int:
    """The position in a microbatch's chain of actions, for equal starts of actions of no time."""
    kind, s, _ = action
    there, back = 2 * s, 4 * len(work.split) - 2 * s
    return {FORWARD: there, SEND_F: there + 1, BACKWARD: back}.get(kind, back + 1)


def _needed(work: Work, action: Action) -> list[Action]:
    """The actions that directly precede an action in its microbatch."""
    kind, s, m = action
    if kind in (SEND_F, SEND_B, WEIGHTS):
        return [(FORWARD if kind == SEND_F else BACKWARD, s, m)]
    if kind == FORWARD:
        sent = s > 0 and work.channel[s - 1, m] >= 0
        return [(SEND_F if sent else FORWARD, s - 1, m)] if s > 0 else []
    if s == len(work.split) - 1:
        return [(FORWARD, s, m)]
    return [(SEND_B if work.channel[s, m] >= 0 else BACKWARD, s + 1, m)]


def _places(work: Work, action: Action) -> list[tuple[str, int]]:
    """The devices or the channel of an action."""
    kind, s, m = action
    if kind in (SEND_F, SEND_B):
        return [("channel", int(work.channel[s if kind == SEND_F else s - 1, m]))]
    return [("device", v) for v in work.members[work.lane[s, m]]]
