"""SPP's execution ordering, PE (Luo et al. 2022, Algorithm 1, lines 1-8)."""

from collections.abc import Iterator
from functools import lru_cache

from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.formulations.schedules.order import B, F, Order, order_of


@lru_cache(maxsize=8)
def pe(device: tuple[int, ...], microbatches: int, in_flight: tuple[int, ...]) -> Order:
    """PE's order: in every round each block with a waiting microbatch processes one.

    Stage s is on ``device[s]``. The last stage's forward and backward form one block. A forward
    that would exceed its stage's limit ``in_flight`` waits for a later round.
    """
    return order_of(device, _rounds(len(device), microbatches, in_flight))


def _rounds(stages: int, microbatches: int, in_flight: tuple[int, ...]) -> Iterator[Action]:
    # Blocks in order of dependence: F0, send, F1, ..., F+B of the last stage, send, ..., B0.
    blocks: list[tuple[int, tuple[ActionKind, ...]]] = [(s, (F,)) for s in range(stages - 1)]
    blocks += [(stages - 1, (F, B)), *((s, (B,)) for s in reversed(range(stages - 1)))]
    available = [0] * (2 * len(blocks) - 1)  # even places: blocks; odd: the transfers after them
    available[0] = microbatches
    started = {F: [0] * stages, B: [0] * stages}
    while started[B][0] < microbatches:
        for place in [j for j, count in enumerate(available) if count]:
            if place % 2 == 0:
                stage, kinds = blocks[place // 2]
                flying = started[F][stage] - started[B][stage]
                if kinds == (F,) and flying >= in_flight[stage]:
                    continue
                for kind in kinds:
                    yield Action(stage, kind, started[kind][stage])
                    started[kind][stage] += 1
            available[place] -= 1
            if place + 1 < len(available):
                available[place + 1] += 1
