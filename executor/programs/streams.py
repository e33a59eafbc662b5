"""The events between the two streams of a rank: which instruction waits for which."""

from collections.abc import Iterator

from stagewright.executor.programs.program import Row
from stagewright.formulations.plans.actions import REDUCE, UPDATE, Action, B, I, W

_Datum = tuple[str, int, int | None]


def waits(row: Row) -> tuple[int | None, ...]:
    """The position, in the other stream, of the instruction that each instruction waits for.

    A stream runs its instructions in order, so the latest one that touches the same data stands for
    all before it. An instruction waits for nothing if its stream has waited for as much before.
    """
    latest: dict[tuple[bool, _Datum], int] = {}
    reached = {True: -1, False: -1}  # per stream, the position in the other that it waited for
    found: list[int | None] = []
    for i, one in enumerate(row):
        in_sub = one.stream is not None
        data = tuple(touched(one.action))
        needed = max((latest.get((not in_sub, datum), -1) for datum in data), default=-1)
        found.append(needed if needed > reached[in_sub] else None)
        reached[in_sub] = max(reached[in_sub], needed)
        latest |= dict.fromkeys(((in_sub, datum) for datum in data), i)
    return tuple(found)


def touched(action: Action) -> Iterator[_Datum]:
    """The data that an action shares with actions of the other stream and that one changes.

    Forwards touch nothing of it: they follow the update of their stage, in the same stream.
    """
    if action.kind in (I, W):
        yield "handed over", action.stage, action.microbatch
    if action.kind in (B, W, REDUCE, UPDATE):
        yield "gradients", action.stage, None
