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
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from stagewright.executor.programs.program import (
    SENDS,
    Families,
    Instruction,
    Program,
    ProgramWork,
    Rows,
    plan_devices,
    stages_on,
)
from stagewright.executor.programs.transfers import (
    starts,
    with_early_receives,
    with_early_sends,
    with_transfers,
)
from stagewright.executor.programs.verification.progress import PipelineProgress
from stagewright.executor.programs.verification.transfers import require_same_sides
from stagewright.formulations.plans.actions import (
    COMPUTE,
    Action,
    ActionKind,
    B,
    F,
    W,
    along_way,
    parse_action,
)
from stagewright.formulations.plans.plan import PipelinePlan, Schedule, ScheduledAction
from stagewright.graphs.documents.errors import InvalidPlan


def with_reductions(plan: PipelinePlan, rows: Rows) -> Rows:
    """Add the all-reduce of every stage with several replicas after its last backward on a rank.

    The sends of that backward come before it. It is in the sub-stream if a weight gradient of the
    stage is: the main stream does not wait. Ranks have the all-reduces that they share in one
    order, the plan's, and so among computations that have collectives within them: a replica whose
    last backward is early, or that has no microbatch, waits for those that the plan begins before
    the all-reduce. Where a stage's weights change within the iteration, there is one after every
    backward.
    """
    shared = {s for s, stage in enumerate(plan.stages) if stage.reduces}
    if plan.weight_rule.updates_every_round:
        return [list(_after_backwards(row, ActionKind.REDUCE, shared)) for row in rows]
    start = starts(plan)
    order = sorted(shared, key=lambda s: (start[Action(s, ActionKind.REDUCE)], s))
    out = [list(row) for row in rows]
    for device, row in zip(plan_devices(plan), out, strict=True):
        last = 0
        for s in (s for s in order if device in plan.stages[s].devices):
            begin = start[Action(s, ActionKind.REDUCE)]
            ends = [
                i + 1
                for i, one in enumerate(row)
                if _ends_backward(one, s)
                or (_is_joint(plan, one.action) and start[one.action] < begin)
            ]
            last = max([last, *ends])
            while last < len(row) and row[last].action.kind in SENDS:
                last += 1
            stream = next((one.stream for one in row if one.stream and one.action.stage == s), None)
            row.insert(last, Instruction(Action(s, ActionKind.REDUCE), stream=stream))
            last += 1
    return out


def with_updates(plan: PipelinePlan, rows: Rows, families: Families = ()) -> Rows:
    """Add the optimizer's steps: where the plan has them, or after every round of backwards.

    A round is a microbatch, or as many as the stage's devices take in turn: one for each device. A
    step that is not in the plan, or that needs the gradients of a family, is at the iteration's
    end. All-reduces that the plan begins after a step with an all-gather come after it, so that
    ranks have both in one order.
    """
    if plan.weight_rule.updates_every_round:
        _require_whole_rounds(plan)
        every = range(len(plan.stages))
        return [list(_after_backwards(row, ActionKind.UPDATE, every)) for row in rows]
    together, start = set().union(*families), starts(plan)
    planned = {
        s: inf if s in together else start.get(Action(s, ActionKind.UPDATE), inf)
        for s in range(len(plan.stages))
    }
    out = []
    for device, row in zip(plan_devices(plan), rows, strict=True):
        due = sorted(stages_on(plan, device), key=lambda s: (planned[s], s))
        before = [(position_of_update(row, s, start, planned[s]), s) for s in due]
        whole = [
            one
            for i in range(len(row) + 1)
            for one in (
                *(Instruction(Action(s, ActionKind.UPDATE)) for at, s in before if at == i),
                *row[i : i + 1],
            )
        ]
        for s in (s for s in due if plan.stages[s].joint(ActionKind.UPDATE) > 1):
            whole = _with_later_reductions(whole, Action(s, ActionKind.UPDATE), planned[s], start)
        out.append(whole)
    return out


def _with_later_reductions(
    row: list[Instruction], update: Action, seconds: float, start: Mapping[Action, float]
) -> list[Instruction]:
    """``row`` with the all-reduces that begin at ``seconds`` or later after the ``update``."""
    at = [one.action for one in row].index(update)
    late = [
        one
        for one in row[:at]
        if one.action.kind is ActionKind.REDUCE and start[one.action] >= seconds
    ]
    return [*(one for one in row[:at] if one not in late), row[at], *late, *row[at + 1 :]]


def position_of_update(
    row: list[Instruction], stage: int, start: Mapping[Action, float], seconds: float
) -> int:
    """The position in ``row`` of the first computation that an update at ``seconds`` precedes."""
    own = (i for i, one in enumerate(row) if _ends_backward(one, stage) or _reduces(one, stage))
    for i in range(max(own, default=-1) + 1, len(row)):
        if row[i].action.kind in COMPUTE and start[row[i].action] >= seconds:
            return i
    return len(row)


def _reduces(instruction: Instruction, stage: int) -> bool:
    return instruction.action == Action(stage, ActionKind.REDUCE)


def _require_whole_rounds(plan: PipelinePlan) -> None:
    for s, stage in enumerate(plan.stages):
        turns = stage.turns
        if plan.microbatches % turns:
            raise InvalidPlan(
                f"stage {s}: {turns} devices take turns and update together, so that with "
                f"{plan.weights!r} the microbatches must be a multiple of {turns}, "
                f"got {plan.microbatches}"
            )


def require_equal_turns(plan: PipelinePlan) -> None:
    """Refuse a plan whose stages update after different numbers of microbatches."""
    first = plan.stages[0].turns
    for s, stage in enumerate(plan.stages):
        if stage.turns != first:
            raise InvalidPlan(
                f"stage {s} takes turns among {stage.turns}, stage 0 among {first}: with "
                "'stash+vertical-sync' every stage must make a version as often as the first"
            )


def _is_joint(plan: PipelinePlan, action: Action) -> bool:
    return action.kind in COMPUTE and plan.stages[action.stage].joint(action.kind) > 1


def _ends_backward(instruction: Instruction, stage: int) -> bool:
    return instruction.action.stage == stage and instruction.action.kind in (B, W)


def _after_backwards(
    row: Iterable[Instruction], kind: ActionKind, stages: Container[int]
) -> Iterator[Instruction]:
    """``row`` with an action of ``kind`` after every backward of ``stages``.

    The sends of the backward, and the all-reduce for an update, come before it.
    """
    due: list[Instruction] = []
    for instruction in row:
        if instruction.action.kind not in (*SENDS, ActionKind.REDUCE):
            yield from due
            due = []
        yield instruction
        s = instruction.action.stage
        if s in stages and _ends_backward(instruction, s):
            due.append(Instruction(Action(s, kind)))
    yield from due


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
    be kept as it asks. `verify` finds everything else. ``families``: stages whose updates depend on
    each other's gradients.
    """
    rows = with_versions(plan, with_updates(plan, without_updates(plan), families))
    return Program(plan_devices(plan), tuple(map(tuple, rows)))


def without_updates(plan: PipelinePlan) -> Rows:
    """Every rank's computations, transfers and all-reduces."""
    rows = computations(plan)
    rows = with_transfers(plan, rows)
    rows = with_early_sends(plan, rows)
    rows = with_early_receives(plan, rows)
    return with_reductions(plan, rows)


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
