"""A pass of lowering: the version of the weights for each computation, and kept versions."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stagewright.executor.programs.program import (
    Instruction,
    Rows,
)
from stagewright.executor.programs.updates import require_equal_turns
from stagewright.formulations.plans.actions import (
    COMPUTE,
    Action,
    ActionKind,
)
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InvalidPlan

F = ActionKind.FORWARD


def with_versions(plan: PipelinePlan, rows: Rows) -> Rows:
    """Add the instructions that use, keep and drop versions of the weights.

    Versions are numbered from the oldest that an iteration begins with: the only one, or for
    ``double-buffer`` the one before the last update. An update leaves the newest in use.

    Raises
    ------
    InvalidPlan
        If a stage would need a version that it does not have.
    """
    if not plan.weight_rule.keeps_versions:
        return rows
    out = []
    for rank, row in enumerate(rows):
        required = required_versions(plan, rows, rank)
        uses = {
            i: required[Action(one.action.stage, F, one.action.microbatch)]
            for i, one in enumerate(row)
            if one.action.kind in COMPUTE
        }
        walk = _Versions(row, uses, plan.weight_rule.staleness > 0)
        out.append([one for i in range(len(row)) for one in walk.around(i)])
    return out


def required_versions(plan: PipelinePlan, rows: Rows, rank: int) -> dict[Action, int]:
    """The version that each forward on ``rank`` must use under the rule ``plan.weights``."""
    if plan.weight_rule.staleness > 0:
        return {one.action: 0 for one in rows[rank] if one.action.kind is F}
    own = _newest_at_forwards(rows[rank])
    if not plan.weight_rule.follows_first_stage:
        return own
    require_equal_turns(plan)
    first: dict[int | None, int] = {}
    for row in rows[: len(plan.stages[0].devices)]:  # the first stage's ranks are the first
        for action, version in _newest_at_forwards(row).items():
            if action.stage == 0:
                first[action.microbatch] = version
    return {action: first[action.microbatch] for action in own}


def _newest_at_forwards(row: Iterable[Instruction]) -> dict[Action, int]:
    updates: Counter[int] = Counter()
    found = {}
    for one in row:
        if one.action.kind is ActionKind.UPDATE:
            updates[one.action.stage] += 1
        elif one.action.kind is F:
            found[one.action] = updates[one.action.stage]
    return found


@dataclass
class _Versions:
    """The versions of the weights of a rank's stages, instruction by instruction."""

    row: list[Instruction]
    uses: dict[int, int]
    buffered: bool

    def __post_init__(self) -> None:
        self.last_use = {(self.row[i].action.stage, v): i for i, v in self.uses.items()}
        first = int(self.buffered)
        self.newest = {one.action.stage: first for one in self.row}
        self.current = dict(self.newest)

    def around(self, i: int) -> Iterator[Instruction]:
        """Instruction ``i`` of the row with the switches around it."""
        if i in self.uses:
            yield from self._around_computation(i, self.uses[i])
        elif self.row[i].action.kind is ActionKind.UPDATE:
            yield from self._around_update(i)
        else:
            yield self.row[i]

    def _around_computation(self, i: int, version: int) -> Iterator[Instruction]:
        s = self.row[i].action.stage
        if version > self.newest[s]:
            raise InvalidPlan(
                f"{self.row[i].action} needs version {version} of its weights, "
                f"the newest that there is by then is {self.newest[s]}"
            )
        if version != self.current[s]:
            yield Instruction(Action(s, ActionKind.USE, version))
            self.current[s] = version
        yield self.row[i]
        if version != self.newest[s] and self.last_use[s, version] == i:
            yield Instruction(Action(s, ActionKind.DROP, version))

    def _around_update(self, i: int) -> Iterator[Instruction]:
        s = self.row[i].action.stage
        if self.buffered and (s, 0) not in self.last_use:  # a device without a microbatch
            yield Instruction(Action(s, ActionKind.DROP, 0))
        if self.buffered or self.last_use.get((s, self.newest[s]), -1) > i:
            yield Instruction(Action(s, ActionKind.STASH, self.newest[s]))
        yield self.row[i]
        self.newest[s] += 1
        self.current[s] = self.newest[s]
