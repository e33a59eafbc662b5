"""V-Half and V-Min: V schedules with less memory (Qi et al. 2024, "Controllable Memory").

A *building block* gives the slots of the forwards and input gradients of one microbatch. It is
repeated every six slots, the six computations of a device per microbatch. Then devices close gaps:
where the next computation is not ready, a later one runs first if the peak of memory stays (the
paper's squeezing and reordering).
"""

from collections import deque
from collections.abc import Callable
from functools import lru_cache

from stagewright.formulations.plans.actions import Action
from stagewright.formulations.schedules.backfilling import backfilled
from stagewright.formulations.schedules.order import F, I, Order, Row, W

Block = tuple[int, int, int, int]
"""The slots of F and I: first stage's F, second stage's F, second stage's I, first stage's I."""

_PERIOD = 6


@lru_cache(maxsize=8)
def v_half(devices: int, microbatches: int) -> Order:
    """V-Half: p + O(1) microbatches of a stage, half of 1F1B's activations (section 3.2).

    Device d has the stages d and 2 p - 1 - d, each half a device's layers. Forwards go down every
    second slot. With tF = tI = tW the bubble is half of 1F1B's, 3 (p - 1) such times, if m >= 2 p.
    """
    wait = 0 if devices % 2 else 3  # no two computations in one slot

    def block(d: int) -> Block:
        end = 3 * devices + wait
        return 2 * d, 3 * devices - d - 2, end + 2 * d - 1, end + 3 * devices - d - 2

    return _repeated(devices, microbatches, block)


@lru_cache(maxsize=8)
def v_min(devices: int, microbatches: int) -> Order:
    """V-Min: 2 p / 3 + O(1) microbatches of a stage, a third of 1F1B's activations (section 3.2).

    With tF = tI = tW the bubble is about two thirds of 1F1B's, 4 (p - 1) such times. With
    other times gaps between devices grow with every microbatch.
    """
    wait = 0 if devices % 3 else 2

    def block(d: int) -> Block:
        end = 2 * devices + wait
        return d, 2 * devices - 1 - d, end + d, end + 2 * devices - d - 1

    return _repeated(devices, microbatches, block)


def _repeated(devices: int, microbatches: int, block: Callable[[int], Block]) -> Order:
    rows = []
    for d in range(devices):
        stages = (d, 2 * devices - 1 - d)
        rows.append(_with_weights(stages, block(d), microbatches))
    return backfilled(rows)


def _with_weights(stages: tuple[int, int], block: Block, microbatches: int) -> Row:
    """The block repeated; weight gradients, the oldest first, take the slots that are left."""
    kinds = ((stages[0], F), (stages[1], F), (stages[1], I), (stages[0], I))
    at = sorted(
        (slot + _PERIOD * m, Action(stage, kind, m))
        for slot, (stage, kind) in zip(block, kinds, strict=True)
        for m in range(microbatches)
    )
    row: list[Action] = []
    pending: deque[Action] = deque()
    now = at[0][0]
    for slot, action in at:
        for _ in range(min(slot - now, len(pending))):
            row.append(pending.popleft())
        row.append(action)
        if action.kind is I:
            pending.append(Action(action.stage, W, action.microbatch))
        now = slot + 1
    return (*row, *pending)
