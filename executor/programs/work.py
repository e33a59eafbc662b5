"""The work of a program, from the plan alone."""

from collections.abc import Iterator
from dataclasses import dataclass

from stagewright.executor.programs.program import (
    Families,
)
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InvalidPlan


class InvalidProgram(InvalidPlan):
    """A program that does not carry out its plan; the message names rank and instruction."""


@dataclass(frozen=True, slots=True)
class Work:
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
