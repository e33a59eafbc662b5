"""The work of a program, from the plan alone.

Which samples of a microbatch each device of a stage works on.

A replicated stage (split) passes values on as in SPP, figure 3: each of k senders cuts its samples
into as many pieces as there are receivers, and every receiver takes a piece from each sender. So
every link carries the same share, as in the cost model, and the order of the samples changes from
stage to stage.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from stagewright.executor.programs.program import Families, Row
from stagewright.formulations.plans.actions import REDUCE, UPDATE, Action, B, I, W
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.plans.shards import share_count, stays
from stagewright.graphs.documents.errors import InputError, InvalidPlan

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


Rows = tuple[int, ...]


def rows(plan: PipelinePlan, samples: int) -> tuple[tuple[Rows, ...], ...]:
    """Per stage and group of ``stage.runners(m)``: the samples of a microbatch, in its order.

    Groups are single devices at tensor degree 1. Raises InputError if a stage splits a microbatch
    among more groups than it has samples.
    """
    found: list[tuple[Rows, ...]] = []
    for s, stage in enumerate(plan.stages):
        if not found:
            whole = [tuple(range(samples))]
            lanes = _dealt(whole, share_count(stage))
        elif stays(plan.stages[s - 1], stage, 0):
            lanes = found[-1]
        else:
            lanes = _dealt(found[-1], share_count(stage))
        if not all(lanes):
            raise InputError(
                f"stage {s}: a microbatch of {samples} samples cannot be split among "
                f"{len(lanes)} devices; take larger mini-batches or fewer microbatches"
            )
        found.append(lanes)
    return tuple(found)


def pieces(lengths: Sequence[int], receivers: int) -> list[list[tuple[int, int]]]:
    """Per sender and receiver, the range [start, stop) of the sender's samples that pass.

    ``lengths`` are the senders' numbers of samples. Remainders go to the receivers in
    turn, so that their shares differ by one sample at most.

    Examples
    --------
    >>> pieces([3, 3], 2)
    [[(0, 2), (2, 3)], [(0, 1), (1, 3)]]
    """
    table, turn = [], 0
    for length in lengths:
        each, more = divmod(length, receivers)
        sizes = [each + ((b - turn) % receivers < more) for b in range(receivers)]
        stops = list(accumulate(sizes))
        table.append([(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)])
        turn += more
    return table


def _dealt(senders: Sequence[Rows], receivers: int) -> tuple[Rows, ...]:
    cut = pieces([len(lane) for lane in senders], receivers)
    return tuple(
        tuple(
            row
            for lane, ranges in zip(senders, cut, strict=True)
            for row in lane[slice(*ranges[receiver])]
        )
        for receiver in range(receivers)
    )


class InvalidProgram(InvalidPlan):
    """A program that does not carry out its plan; the message names rank and instruction."""


@dataclass(frozen=True, slots=True)
class ProgramWork:
    """``iterations`` of a plan in sequence.

    In a periodic plan the gradients of ``families`` of stages are summed up like those of a stage's
    devices.
    """

    plan: PipelinePlan
    iterations: int = 1
    families: Families = ()

    @property
    def microbatches(self) -> int:
        """The number of microbatches in all iterations."""
        return self.iterations * self.plan.microbatches

    def iteration(self, microbatch: int | None) -> int:
        """The iteration of a microbatch."""
        assert microbatch is not None
        return microbatch // self.plan.microbatches

    @property
    def is_measured(self) -> bool:
        """Whether every update needs all gradients, as their norm does."""
        return any(len(one) == len(self.plan.stages) for one in self.families)

    def is_shared(self, s: int) -> bool:
        """Whether the update of a stage needs gradients of other ranks."""
        return self.plan.stages[s].reduces or any(s in one for one in self.families)

    def brings(self, s: int) -> Iterator[tuple[int, str]]:
        """Stages and devices whose gradients an update of stage ``s`` needs."""
        for other in {s}.union(*(one for one in self.families if s in one)):
            if self.is_shared(other):
                yield from ((other, name) for name in self.plan.stages[other].devices)
