"""The schedule that is asked for in a plan: a published kind, or the optimum for a placement."""

from dataclasses import dataclass
from typing import ClassVar, Final, Literal, get_args

from pydantic import ConfigDict

from stagewright.formulations.schedules.placements import placed
from stagewright.formulations.schedules.published.kinds import KINDS, require_chunks
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_LAYERS, require_count

OPTIMAL: Final = "optimal"
USUAL_CHUNKS = 2
"""Chunks of a stage where a kind allows several and none are asked for."""

_OnePath = Literal["line", "loop", "V", "wave"]
PLACEMENTS: tuple[_OnePath, ...] = get_args(_OnePath)


@dataclass(frozen=True, slots=True)
class ScheduleChoice:
    """One of `KINDS`, or ``optimal``: the best order found, with a proved bound.

    Attributes
    ----------
    chunks
        Stages per device; by default 2 if the kind allows several.
    replicas
        Devices of each stage, for 1f1b-rr.
    placement
        For ``optimal``; by default a line, or a loop if there are several chunks.
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    kind: str = "1f1b"
    chunks: int | None = None
    replicas: tuple[int, ...] = ()
    placement: _OnePath | None = None

    def __post_init__(self) -> None:
        if self.kind not in (OPTIMAL, *KINDS):
            hint = (
                "; pe is the order of planner spp, on its own stages" if self.kind == "pe" else ""
            )
            known = ", ".join((OPTIMAL, *KINDS))
            raise InputError(f"unknown schedule {self.kind!r}; known are {known}{hint}")
        self._require_placement()
        if self.chunks is not None:
            require_count(self.chunks, "chunks", MAX_LAYERS)
            if self.kind != OPTIMAL:
                require_chunks(self.kind, self.chunks)
        if self.kind == OPTIMAL:
            placed(self.way, 1, self.count)
        if self.replicas and self.kind != "1f1b-rr":
            raise InputError(f"{self.kind} has no replicas; 1f1b-rr has")
        for count in self.replicas:
            require_count(count, "replicas", MAX_LAYERS)

    def _require_placement(self) -> None:
        if self.placement not in (None, *PLACEMENTS):
            raise InputError(
                f"placement must be one of {', '.join(PLACEMENTS)}, got {self.placement!r}"
            )
        if self.kind != OPTIMAL and self.placement is not None:
            raise InputError(
                f"{self.kind} has its own placement, {KINDS[self.kind].placement}; only "
                f"{OPTIMAL} can be placed"
            )

    @property
    def count(self) -> int:
        """Stages per device."""
        if self.chunks is not None:
            return self.chunks
        if self.kind == OPTIMAL:
            return 2 if self.placement in ("V", "wave") else 1
        allowed = KINDS[self.kind].chunks
        return allowed.step if allowed.fixed else max(allowed.step, USUAL_CHUNKS)

    @property
    def way(self) -> str:
        """The kind of placement for an ``optimal`` schedule."""
        return self.placement or ("line" if self.count == 1 else "loop")
