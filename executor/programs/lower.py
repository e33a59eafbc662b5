"""Lowering: a plan becomes a program per rank, by small passes.

1. `computations`: every rank's computations in the plan's order.
2. `with_transfers`: sends after the computation that makes their values, receives before the one
   that needs them. All ranks' rows are cut from one order of the whole iteration, so both ranks of
   a pair have their transfers in the same order, and no rank waits for itself.
3. `with_early_sends`, `with_early_receives`: transfers are posted before the computations that they
   may overlap.
4. `with_reductions`: the all-reduce of a stage after its last backward, in the plan's order.
5. `with_updates`: the optimizer's steps, where the plan has them.
6. `with_versions`: which version of the weights a computation uses, and which are kept for it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from stagewright.executor.programs.program import Families, Instruction, Program, Rows, plan_devices
from stagewright.executor.programs.transfers import (
    with_early_receives,
    with_early_sends,
    with_transfers,
)
from stagewright.executor.programs.updates import require_equal_turns, with_reductions, with_updates
from stagewright.executor.programs.verification.progress import PipelineProgress
from stagewright.executor.programs.verification.transfers import require_same_sides
from stagewright.executor.programs.work import ProgramWork
from stagewright.formulations.plans.actions import (
    COMPUTE,
    Action,
    ActionKind,
    along_way,
    parse_action,
)
from stagewright.formulations.plans.plan import PipelinePlan, Schedule, ScheduledAction
from stagewright.graphs.documents.errors import InvalidPlan


def forwards_of(plan: PipelinePlan, microbatches: int) -> PipelinePlan:
    """The stages of ``plan`` with a schedule of forwards, microbatch after microbatch.

    Times are counted in forwards: each takes one, and waits for none but the one before it.
    """
    actions = tuple(
        ScheduledAction(device, str(Action(s, ActionKind.FORWARD, m)), m + s, m + s + 1)
        for m in range(microbatches)
        for s, stage in enumerate(plan.stages)
        for device in stage.runners(m)
    )
    return replace(
        plan,
        microbatches=microbatches,
        schedule=Schedule(actions),
        weights="flush",
        predicted=None,
        certificate=None,
    )


def lower_forwards(plan: PipelinePlan) -> Program:
    """The program of a plan of forwards, in which no rank waits for itself.

    Raises InvalidProgram if one would, against what is said here.
    """
    rows = with_transfers(plan, computations(plan))
    rows = with_early_receives(plan, with_early_sends(plan, rows))
    program = Program(plan_devices(plan), tuple(map(tuple, rows)))
    require_same_sides(program)
    PipelineProgress(ProgramWork(plan), program).to_the_end()
    return program


F = ActionKind.FORWARD


def with_versions(plan: PipelinePlan, rows: Rows) -> Rows:
    """Add the instructions that use, keep and drop versions of the weights.

    Versions are numbered from the oldest that an iteration begins with: the only one, or for
    ``double-buffer`` the one before the last update. An update leaves the newest in use. Raises
    InvalidPlan if a stage would need a version that it does not have.
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
        walk = _RowVersions(row, uses, plan.weight_rule.staleness > 0)
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
class _RowVersions:
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


def lower(plan: PipelinePlan, families: Families = ()) -> Program:
    """The program that carries out one iteration of ``plan``.

    Raises InvalidPlan if the order in the plan contradicts its dependencies, or its weights cannot
    be kept as it asks. `verify` finds everything else.

    ``families``: stages whose updates depend on each other's gradients.
    """
    rows = computations(plan)
    rows = with_transfers(plan, rows)
    rows = with_early_sends(plan, rows)
    rows = with_early_receives(plan, rows)
    rows = with_reductions(plan, rows)
    rows = with_updates(plan, rows, families)
    rows = with_versions(plan, rows)
    return Program(plan_devices(plan), tuple(map(tuple, rows)))


def computations(plan: PipelinePlan) -> Rows:
    """Every rank's computations, by their start in the plan."""
    rank = {name: r for r, name in enumerate(plan_devices(plan))}
    rows: Rows = [[] for _ in rank]
    entries = [(parse_action(entry.action), entry) for entry in plan.actions]

    def in_time(pair: tuple[Action, ScheduledAction]) -> tuple[float, float, int, int]:
        action, entry = pair
        met = along_way(action, backward_first=plan.is_backward_first)
        return (entry.start_seconds, entry.finish_seconds, *met)

    for action, entry in sorted(entries, key=in_time):
        if action.kind in COMPUTE:
            if entry.device not in rank:
                raise InvalidPlan(f"{action} runs on {entry.device!r}, which is in no stage")
            rows[rank[entry.device]].append(Instruction(action, stream=entry.stream))
    return rows
