"""The measured schedule of a run: the trace document, and the merge of the ranks' records.

Every time is in seconds from the start of its step. The iterations of a periodic plan
between two drains are one step, as their mini-batches overlap.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from stagewright.executor.programs.program import SENDS, plan_devices
from stagewright.formulations.plans.actions import ON_DEVICE, Action, ActionKind, parse_action
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan, ScheduledAction
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount, require_positive

MemoryKind = Literal["allocated", "resident"]
"""Allocated by torch on a GPU; or resident in a process, above what it had before the model."""

SENT = {  # what a receiver's action is called in the plan, and how far away the sender's stage is
    ActionKind.RECEIVE_FORWARD: (ActionKind.SEND_FORWARD, -1),
    ActionKind.RECEIVE_BACKWARD: (ActionKind.SEND_BACKWARD, 1),
}


@documents.record
class TracedStep:
    """One training step; of a periodic plan a run, from an empty pipeline to an empty one.

    ``iteration_seconds`` is the end of the last action of the plan: the counterpart of its
    prediction. ``update_seconds`` is the time of the optimizer, on the slowest rank.
    ``actions`` are spelled and shaped as in the plan; the optimizer's steps are among them also
    where the plan has none. ``loss`` is None if it is not known or not finite.

    ``iterations`` is the number of mini-batches of a run, which the figures cover together; None in
    a step of a finite plan. ``step`` is then the first of them, microbatches are numbered
    across all of them, each has its all-reduces and updates, and ``loss`` is the mean.

    ``waited_seconds`` says of each of ``actions`` how long the thread that computed it was ready to
    run without a core; None if it is not known.
    """

    step: int
    iteration_seconds: float
    update_seconds: float
    actions: tuple[ScheduledAction, ...]
    loss: float | None = None
    iterations: int | None = None
    waited_seconds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        place = f"step {self.step}"
        if self.step < 0:
            raise InputError(f"step must be at least 0, got {self.step}")
        require_amount(self.iteration_seconds, f"{place}: iteration_seconds")
        require_amount(self.update_seconds, f"{place}: update_seconds")
        if self.iterations is not None and not 1 <= self.iterations <= len(self.actions):
            raise InputError(
                f"{place}: iterations must be from 1 to the number of actions, "
                f"{len(self.actions)}, got {self.iterations}"
            )
        self._require_waits(place)
        for timed in self.actions:
            parse_action(timed.action)  # which refuses another spelling
            if not 0 <= timed.start_seconds <= timed.finish_seconds:
                raise InputError(
                    f"{place}: {timed.action} on {timed.device!r} lasts from "
                    f"{timed.start_seconds:g} to {timed.finish_seconds:g} s: times count from the "
                    "start of the step, and nothing ends before it starts"
                )

    def _require_waits(self, place: str) -> None:
        waits = self.waited_seconds
        if waits is None:
            return
        if len(waits) != len(self.actions):
            raise InputError(
                f"{place}: waited_seconds needs a number for each of the {len(self.actions)} "
                f"actions, got {len(waits)}"
            )
        for wait, timed in zip(waits, self.actions, strict=True):
            require_amount(wait, f"{place}: waited_seconds of {timed.action} on {timed.device!r}")


@documents.record
class MeasuredMemory:
    """The most memory that each device had in a run, in bytes by name."""

    kind: MemoryKind
    peak_bytes: dict[str, float]

    def __post_init__(self) -> None:
        for name, amount in self.peak_bytes.items():
            require_amount(amount, f"memory: peak_bytes of {name!r}")


@documents.record
class Trace:
    """Steps of one run of a plan.

    ``digest`` is the plan's, ``machine`` says in words where the run was, ``backend`` is the
    library that moved the tensors ("gloo", "nccl"). ``memory`` is None if it was not measured.
    ``reference_seconds`` as of a `Chain`: the median over the steps, a mean over ranks.
    """

    digest: str
    model: str
    machine: str
    backend: str
    world_size: int
    dtype: str
    steps: tuple[TracedStep, ...]
    memory: MeasuredMemory | None = None
    reference_seconds: float | None = None
    format: Literal["stagewright-trace"] = "stagewright-trace"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        if not self.steps:
            raise InputError("a trace needs at least one step")
        if self.world_size < 1:
            raise InputError(f"world_size must be at least 1, got {self.world_size}")
        require_positive(self.reference_seconds, "reference_seconds")
        for one, other in pairwise(self.steps):
            if one.step >= other.step:
                raise InputError(f"step {other.step} comes after step {one.step}; sort the steps")


@dataclass(frozen=True, slots=True)
class RankAction:
    """One action as its own rank saw it; ``peer`` and ``bytes`` are those of a message.

    ``waited_seconds`` are those for which the computing thread had no core; None if not known.
    """

    rank: int
    action: str
    start_seconds: float
    finish_seconds: float
    peer: int | None = None
    bytes: float | None = None
    waited_seconds: float | None = None


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace document; any fault is an InputError of one line."""
    return documents.read(Trace, path)


def save_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace document atomically."""
    documents.write(Trace, trace, path, "the trace")


def traced_step(
    plan: PipelinePlan,
    step: int,
    records: Iterable[RankAction],
    loss: float | None = None,
    iterations: int | None = None,
) -> TracedStep:
    """One step from the records of all ranks, in any order.

    Between two losses, backwards are of the mini-batch before that of the forwards.
    """
    records = tuple(records)
    if plan.is_backward_first:
        records = tuple(replace(one, action=_in_mini_batch(plan, one.action)) for one in records)
    updates: dict[int, float] = defaultdict(float)
    for record in records:
        if parse_action(record.action).kind is ActionKind.UPDATE:
            updates[record.rank] += record.finish_seconds - record.start_seconds
    actions = merge(plan, records)
    held = planned_updates(plan)
    finish = max(
        (
            timed.finish_seconds
            for timed in actions
            if timed.action in held or parse_action(timed.action).kind is not ActionKind.UPDATE
        ),
        default=0.0,
    )
    known = loss if loss is not None and math.isfinite(loss) else None
    return TracedStep(
        step,
        finish,
        max(updates.values(), default=0.0),
        actions,
        known,
        iterations,
        _waits(plan, records, actions),
    )


def _waits(
    plan: PipelinePlan, records: Iterable[RankAction], actions: Iterable[ScheduledAction]
) -> tuple[float, ...] | None:
    """Seconds that each action's thread waited for a core; 0 for actions without a thread."""
    devices, waited = plan_devices(plan), dict[tuple[str, str, float], float]()
    for one in records:
        if one.waited_seconds is not None:
            waited[devices[one.rank], one.action, one.start_seconds] = one.waited_seconds
    if not waited:
        return None
    return tuple(waited.get((one.device, one.action, one.start_seconds), 0.0) for one in actions)


def _in_mini_batch(plan: PipelinePlan, text: str) -> str:
    """The action with its microbatch as numbered in a mini-batch."""
    action = parse_action(text)
    if action.microbatch is None:
        return text
    return str(replace(action, microbatch=action.microbatch % plan.microbatches))


def planned_updates(plan: PipelinePlan) -> frozenset[str]:
    """The optimizer's steps that a plan predicts."""
    if isinstance(plan.schedule, PeriodicSchedule):
        return frozenset()
    every = {timed.action for timed in plan.actions}
    return frozenset(one for one in every if parse_action(one).kind is ActionKind.UPDATE)


def merge(plan: PipelinePlan, records: Iterable[RankAction]) -> tuple[ScheduledAction, ...]:
    """The plan's actions, by ascending start, from the records of all ranks.

    A transfer lasts from the first message's sending to the last one's receipt, and its bytes are
    those of the messages; values that stay on a device are not counted. An all-reduce lasts from
    when the first of its ranks enters it to when the last leaves it, so that waiting for the
    slowest rank counts. With weights that change in every round, an all-reduce and a step of the
    optimizer are parts of the backward before them, as in the cost model. Versions of weights are
    left out. Raises InputError if only one side of a transfer was recorded.
    """
    devices = plan_devices(plan)
    actions: list[ScheduledAction] = []
    shared: dict[Action, list[RankAction]] = defaultdict(list)
    for record in _in_rounds(records) if plan.weight_rule.updates_every_round else records:
        action = _in_plan(parse_action(record.action))
        if action.kind in ON_DEVICE:
            times = (record.start_seconds, record.finish_seconds)
            actions.append(ScheduledAction(devices[record.rank], record.action, *times))
        elif action.kind is ActionKind.REDUCE or action.kind in SENDS:
            shared[action].append(record)
    for action, parts in shared.items():
        if action.kind in SENDS:
            actions.append(_joined_transfer(plan, action, parts))
        else:
            actions.extend(_joined_reduce(plan, action, one) for one in _sums(plan, parts))
    return tuple(
        sorted(actions, key=lambda a: (a.start_seconds, a.finish_seconds, a.device, a.action))
    )


def _in_rounds(records: Iterable[RankAction]) -> Iterable[RankAction]:
    """``records`` with each all-reduce and update as a part of the backward before it."""
    found: list[RankAction] = []
    backwards: dict[tuple[int, int], int] = {}  # positions by rank and stage
    for record in sorted(records, key=lambda one: one.start_seconds):
        action = parse_action(record.action)
        place = record.rank, action.stage
        if action.kind in (ActionKind.REDUCE, ActionKind.UPDATE):
            before = found[backwards[place]]
            later = before.finish_seconds + record.finish_seconds - record.start_seconds
            found[backwards[place]] = replace(before, finish_seconds=later)
            continue
        if action.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT):
            backwards[place] = len(found)
        found.append(record)
    return found


def _in_plan(action: Action) -> Action:
    """The action of the plan that ``action`` is a part of: a receipt is a part of its sending."""
    if action.kind not in SENT:
        return action
    kind, way = SENT[action.kind]
    return Action(action.stage + way, kind, action.microbatch)


def _joined_transfer(
    plan: PipelinePlan, action: Action, parts: Sequence[RankAction]
) -> ScheduledAction:
    sent = [part for part in parts if part.action == str(action)]
    received = [part for part in parts if part.action != str(action)]
    if not sent or not received:
        missing = "receipt" if sent else "sending"
        raise InputError(
            f"transfer {action} has no record of its {missing}; merge the records of all ranks"
        )
    assert action.microbatch is not None
    way = 1 if action.kind is ActionKind.SEND_FORWARD else -1
    sources = plan.runners(action.stage, action.microbatch)
    targets = plan.runners(action.stage + way, action.microbatch)
    start = min(part.start_seconds for part in sent)
    # The ranks' clocks agree to microseconds only; nothing is received before it is sent.
    finish = max(start, *(part.finish_seconds for part in received))
    return ScheduledAction(
        sources[0], str(action), start, finish, sources, targets, _sum_bytes(sent)
    )


def _sums(plan: PipelinePlan, parts: Sequence[RankAction]) -> Iterable[Sequence[RankAction]]:
    """The parts, by rank, of each all-reduce of a stage: one all-reduce in an iteration."""
    if not plan.is_periodic:
        return [parts]
    by_rank: dict[int, list[RankAction]] = defaultdict(list)
    for part in sorted(parts, key=lambda part: part.start_seconds):
        by_rank[part.rank].append(part)
    return zip(*by_rank.values(), strict=True)


def _joined_reduce(
    plan: PipelinePlan, action: Action, parts: Sequence[RankAction]
) -> ScheduledAction:
    stage, devices = plan.stages[action.stage], plan_devices(plan)
    group = stage.devices
    start = min(part.start_seconds for part in parts)
    finish = max(part.finish_seconds for part in parts)
    # Every rank with the same shard brings the same gradients; the plan counts them once.
    sizes: dict[int, float] = {}
    for part in parts:
        if part.bytes is not None:
            position = group.index(devices[part.rank]) % stage.tensor
            sizes[position] = max(part.bytes, sizes.get(position, 0.0))
    size = sum(sizes.values()) if sizes else None
    return ScheduledAction(group[0], str(action), start, finish, group, group, size)


def _sum_bytes(parts: Sequence[RankAction]) -> float | None:
    known = [part.bytes for part in parts if part.bytes is not None]
    return sum(known) if known else None
