"""The bytes that a rank needs while it carries out its row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagewright.executor.programs.program import (
    Program,
    Row,
)
from stagewright.executor.programs.work import InvalidProgram
from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.units import format_bytes

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
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
