"""Proof that every computation uses the version of the weights that the plan asks for."""

from collections import defaultdict
from collections.abc import Mapping

from stagewright.executor.programs.program import InvalidProgram, Program, ProgramWork, Row
from stagewright.formulations.plans.actions import COMPUTE, UPDATE, Action, ActionKind, F

STASH, USE, DROP = ActionKind.STASH, ActionKind.USE, ActionKind.DROP


def require_versions(
    work: ProgramWork, rank: int, row: Row, at_first_stage: Mapping[int | None, int]
) -> None:
    """Every version that is used is held and is the right one; none is left at the end."""
    plan, buffered = work.plan, work.plan.weight_rule.staleness > 0
    stages: defaultdict[int, WeightVersions] = defaultdict(lambda: WeightVersions(buffered))
    for one in row:
        weights = stages[one.action.stage]
        try:
            weights.after(one.action)
        except InvalidProgram as error:
            raise InvalidProgram(f"rank {rank}: {one}: {error}") from None
        if one.action.kind is F:
            right = weights.held[-1]
            if not plan.weight_rule.updates_every_round:
                right = work.iteration(one.action.microbatch)
            if plan.weight_rule.follows_first_stage:
                right = at_first_stage[one.action.microbatch]
            if weights.used != right:
                raise InvalidProgram(
                    f"rank {rank}: {one} is computed on version {weights.used} of its weights, "
                    f"{plan.weights!r} asks for version {right}"
                )
    for s, weights in stages.items():
        weights.require_ready_again(f"rank {rank}: stage {s}")


def versions_at_first_stage(program: Program) -> dict[int | None, int]:
    """Per microbatch, how many updates come before the first stage's forward."""
    found = {}
    for row in program.rows:
        updates = 0
        for one in row:
            updates += one.action == Action(0, UPDATE)
            if one.action.stage == 0 and one.action.kind is F:
                found[one.action.microbatch] = updates
    return found


class WeightVersions:
    """The versions of a stage's weights on one rank."""

    def __init__(self, buffered: bool) -> None:
        self.buffered = buffered
        self.held = [0, 1] if buffered else [0]
        self.used = self.held[-1]
        self.stashed: int | None = None
        self.of_forward: dict[int | None, int] = {}

    def after(self, action: Action) -> None:
        """Apply an instruction to the versions."""
        kind, number = action.kind, action.microbatch
        newest = self.held[-1]
        if kind in (USE, STASH, DROP):
            if number not in self.held:
                raise InvalidProgram(f"there is no such version, only {self.held}")
            self._switch(kind, number)
        elif kind is UPDATE:
            if self.stashed != newest:
                self.held.pop()
            self.held.append(newest + 1)
            self.used = newest + 1
        elif kind is F:
            self.of_forward[number] = self.used
        elif kind in COMPUTE and self.used != self.of_forward[number]:
            raise InvalidProgram(
                f"it is computed on version {self.used} of the weights, "
                f"its forward on version {self.of_forward[number]}"
            )
        if kind in COMPUTE and self.used not in self.held:
            raise InvalidProgram(f"version {self.used} of the weights is not there any more")

    def _switch(self, kind: ActionKind, number: int) -> None:
        if kind is USE:
            self.used = number
        elif kind is STASH:
            if number in (self.stashed, *self.held[:-1]):
                raise InvalidProgram("only the newest version is kept, and only once")
            self.stashed = number
        elif number == self.held[-1]:
            raise InvalidProgram("the newest version cannot be dropped")
        else:
            self.held.remove(number)

    def require_ready_again(self, stage: str) -> None:
        """Require that only the newest version is left (``double-buffer``: the two newest)."""
        newest = self.held[-1]
        if self.stashed == newest:
            raise InvalidProgram(f"{stage}: no {UPDATE} follows {STASH} of version {newest}")
        if self.held != [newest - 1, newest][not self.buffered :]:
            raise InvalidProgram(f"{stage} ends with versions {self.held}")
