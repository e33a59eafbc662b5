"""The bytes that a rank needs while it carries out its row."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stagewright.executor.programs.program import Instruction, InvalidProgram, Program, Row
from stagewright.executor.programs.verification.transfers import by_peer
from stagewright.formulations.plans.actions import Action, ActionKind, B, F, I, W
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.units import format_bytes

_AROUND = 3  # instructions shown on either side of the place where a rank hangs


class RowProgress(ABC):
    """The program run without data: a rank proceeds once the actions it waits for are done.

    Sends, receives and all-reduces are only posted. Those of a pair of ranks complete in order,
    each when both have posted it, as on a NCCL stream: the weakest guarantee of all backends.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.at = [0] * len(program.rows)
        self.done: list[Counter[Action]] = [Counter() for _ in program.rows]
        self.posted: Counter[tuple[int, int]] = Counter()
        self.turn = {
            (rank, one): i
            for rank, row in enumerate(program.rows)
            for side in by_peer(row).values()
            for i, one in enumerate(side)
        }

    @abstractmethod
    def _awaited(self, rank: int, action: Action) -> Iterator[tuple[int, str]]:
        """The actions that an action still waits for, with the rank of each."""

    def to_the_end(self) -> None:
        """Raise InvalidProgram if a rank does not reach the end of its row."""
        waiting = list(range(len(self.at)))
        while waiting:
            moved = [rank for rank in waiting if self._advance(rank)]
            waiting = [r for r in waiting if self.at[r] < len(self.program.rows[r])]
            if waiting and not moved:
                raise InvalidProgram(self._deadlock(waiting))

    def _advance(self, rank: int) -> bool:
        row, before = self.program.rows[rank], self.at[rank]
        while self.at[rank] < len(row):
            one = row[self.at[rank]]
            if next(self._awaited(rank, one.action), None) is not None:
                break
            self.done[rank][one.action] += 1
            if one.peer is not None:
                self.posted[rank, one.peer] += 1
            self.at[rank] += 1
        return self.at[rank] > before

    def _unfinished(
        self, rank: int, here: Instruction, there: Instruction
    ) -> Iterator[tuple[int, str]]:
        """The side of a transfer, seen from ``rank``, that has not been posted yet."""
        assert here.peer is not None
        peer = here.peer
        if not self.done[rank][here.action] or self.posted[rank, peer] <= self.turn[rank, here]:
            yield rank, str(here)
        elif self.posted[peer, rank] <= self.turn[rank, here]:
            yield peer, str(there)

    def _deadlock(self, waiting: list[int]) -> str:
        needs = {
            rank: next(self._awaited(rank, self.program.rows[rank][self.at[rank]].action))
            for rank in waiting
        }
        path = [waiting[0]]
        while needs[path[-1]][0] not in path:
            path.append(needs[path[-1]][0])
        cycle = path[path.index(needs[path[-1]][0]) :]
        steps = " ".join(
            f"rank {rank} at {self.program.rows[rank][self.at[rank]]} waits for {needs[rank][1]} "
            f"of rank {needs[rank][0]};"
            for rank in cycle
        )
        rows = "; ".join(f"rank {rank}: {self._place(rank)}" for rank in waiting)
        return f"deadlock: {steps} rows: {rows}"

    def _place(self, rank: int) -> str:
        row, at = self.program.rows[rank], self.at[rank]
        shown = [
            f">>{one}<<" if i == at else str(one)
            for i, one in enumerate(row)
            if abs(i - at) <= _AROUND
        ]
        head = ["..."] if at > _AROUND else []
        tail = ["..."] if at + _AROUND + 1 < len(row) else []
        return ",".join([*head, *shown, *tail])


STASH, DROP = ActionKind.STASH, ActionKind.DROP


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one stage on one of its devices.

    ``static_bytes`` are always allocated (weights, gradients, optimizer's state, buffers of
    transfers); ``version_bytes`` are one more version of the weights; ``saved_bytes`` is what a
    microbatch keeps from its forward on (its input alone, if the rest is recomputed),
    ``working_bytes`` what it keeps in addition during its backward. ``gradient_bytes`` are held
    from the end of the first backward until the update.
    """

    static_bytes: float
    version_bytes: float
    saved_bytes: float
    working_bytes: float = 0.0
    gradient_bytes: float = 0.0


def peak_bytes(
    plan: PipelinePlan, row: Row, footprints: Sequence[Footprint] | Mapping[int, Footprint]
) -> tuple[float, int]:
    """The peak of the bytes that a rank's row needs, and its position in the row.

    ``footprints`` cover at least the stages of the row.
    """
    held = 0.0
    for s in {one.action.stage for one in row}:
        held += footprints[s].static_bytes
        held += footprints[s].version_bytes * plan.weight_rule.staleness
    peak, where = held, 0
    with_gradients = set[int]()
    for position, one in enumerate(row):
        s, kind = one.action.stage, one.action.kind
        during, after = _bytes_at(kind, footprints[s])
        if kind in (B, I, W) and s not in with_gradients:
            with_gradients.add(s)
            after += footprints[s].gradient_bytes
        elif kind is ActionKind.UPDATE and s in with_gradients:
            with_gradients.remove(s)
            after -= footprints[s].gradient_bytes
        if held + max(during, after) > peak:
            peak, where = held + max(during, after), position
        held += after
    return peak, where


def _bytes_at(kind: ActionKind, footprint: Footprint) -> tuple[float, float]:
    """Bytes that an instruction needs while it runs, and bytes that it keeps."""
    saved, working, version = (
        footprint.saved_bytes,
        footprint.working_bytes,
        footprint.version_bytes,
    )
    return {
        F: (saved, saved),
        B: (working, -saved),
        I: (working, working),
        W: (0.0, -saved - working),
        STASH: (version, version),
        DROP: (0.0, -version),
    }.get(kind, (0.0, 0.0))


def require_memory(
    plan: PipelinePlan,
    program: Program,
    footprints: Sequence[Footprint],
    memory_bytes: Sequence[float],
) -> None:
    """Refuse a program that needs more bytes than a rank has."""
    for rank, row in enumerate(program.rows):
        need, where = peak_bytes(plan, row, footprints)
        if need > memory_bytes[rank]:
            raise InvalidProgram(
                f"rank {rank} ({program.devices[rank]}) needs {format_bytes(need)} at {row[where]} "
                f"and has {format_bytes(memory_bytes[rank])}: "
                f"{need - memory_bytes[rank]:.0f} bytes short"
            )
