"""1F1B (PipeDream-Flush): a warm-up of forwards, then alternately one forward, one backward."""

from collections.abc import Sequence
from functools import lru_cache

from stagewright.formulations.plans.actions import Action
from stagewright.formulations.schedules.order import B, F, Order, Row


@lru_cache(maxsize=8)
def one_f_one_b(stages: int, microbatches: int, in_flight: tuple[int, ...] | None = None) -> Order:
    """1F1B with stage s on device s, S - s microbatches in flight (Narayanan's thesis, 4.2.2).

    A lower limit ``in_flight`` shortens the warm-up of its stage and of all later stages: a stage
    that waits for more forwards than its predecessor may send would deadlock.
    """
    rows, depth = [], microbatches
    for s in range(stages):
        depth = min(depth, stages - s, depth if in_flight is None else in_flight[s])
        rows.append(row_of(s, depth, range(microbatches)))
    return Order(tuple(rows))


def row_of(stage: int, depth: int, microbatches: Sequence[int]) -> Row:
    """1F1B of one stage with at most ``depth`` of its ``microbatches`` in flight."""
    forwards = [Action(stage, F, m) for m in microbatches]
    backwards = [Action(stage, B, m) for m in microbatches]
    steady = zip(backwards, forwards[depth:], strict=False)
    alternating = [action for pair in steady for action in pair]
    return (*forwards[:depth], *alternating, *backwards[max(0, len(backwards) - depth) :])
