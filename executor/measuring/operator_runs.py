"""Compare a plan of operators with the trace of a run of it.

The first step of a trace is a warm-up, counted only if there are fewer than three steps. The
measured time of an operator or a transfer is the median over the counted steps.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from stagewright.executor.measuring.pairs import Pair, counted_steps
from stagewright.executor.programs.operators.placed import scheduled_operators
from stagewright.executor.programs.trace import Trace
from stagewright.formulations.operators.plan import OperatorPlan
from stagewright.formulations.plans.actions import ActionKind, parse_action
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.operators.cost_book import Observation, part_known_as

TRANSFER = "transfer"

Entry = tuple[str, str, str | None]
"""Device, action, and the device that a transfer goes to."""


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """Predicted and measured seconds of an operator, or of a transfer to another device."""

    operator: str
    kind: str
    device: str
    target: str | None
    seconds: Pair


@dataclass(frozen=True, slots=True)
class TotalTimes:
    """The sum of the seconds of ``count`` operators or transfers."""

    count: int
    seconds: Pair


@dataclass(frozen=True, slots=True)
class OperatorComparison:
    """Predicted and measured times of a plan of operators.

    ``iteration_seconds``: compares with the median of the ``steps`` counted steps, which took
    ``least_seconds`` to ``most_seconds``. ``kinds``: by role in the step (forward, backward,
    update), and of the transfers. ``devices``: what each device computes. ``entries``: every
    operator and transfer, in the order of the plan.
    """

    iteration_seconds: Pair
    least_seconds: float
    most_seconds: float
    steps: int
    kinds: dict[str, TotalTimes]
    devices: dict[str, TotalTimes]
    entries: tuple[OperatorTimes, ...]


def compare_operators(plan: OperatorPlan, trace: Trace) -> OperatorComparison:
    """Compare the predictions of ``plan`` with the measurements in ``trace``.

    Raises InputError if the trace is of another plan.
    """
    if trace.digest != plan.digest:
        raise InputError("the trace is not of this plan: it is of another graph or cluster")
    steps = counted_steps(trace.steps)
    measured: dict[Entry, list[float]] = defaultdict(list)
    for step in steps:
        for one in step.actions:
            entry = one.device, one.action, one.targets[0] if one.targets else None
            measured[entry].append(one.finish_seconds - one.start_seconds)
    entries = []
    for one in scheduled_operators(plan):
        target = one.targets[0] if one.targets else None
        found = measured.pop((one.device, one.action, target), ())
        if len(found) != len(steps):
            raise InputError(f"the trace is not of this plan: it lacks {one.action}")
        action = parse_action(one.action)
        placed = plan.operators[action.stage]
        kind = placed.role if action.kind is ActionKind.RUN else TRANSFER
        seconds = Pair(one.finish_seconds - one.start_seconds, median(found))
        entries.append(OperatorTimes(placed.operator, kind, one.device, target, seconds))
    if measured:
        raise InputError(f"the trace is not of this plan: it has {min(measured)[1]} besides")
    ends = [step.iteration_seconds for step in steps]
    return OperatorComparison(
        Pair(max(one.finish_seconds for one in plan.operators), median(ends)),
        min(ends),
        max(ends),
        len(steps),
        _totals((one.kind, one) for one in entries if one.kind not in ("input", "state")),
        _totals((one.device, one) for one in entries if one.kind != TRANSFER),
        tuple(entries),
    )


def _totals(entries: Iterable[tuple[str, OperatorTimes]]) -> dict[str, TotalTimes]:
    found: dict[str, TotalTimes] = {}
    for key, one in entries:
        total = found.get(key, TotalTimes(0, Pair(0.0, 0.0)))
        found[key] = TotalTimes(total.count + 1, total.seconds.plus(one.seconds))
    return found


def observe(plan: OperatorPlan, trace: Trace) -> Observation:
    """The observation from a run's counted steps: medians of operators and transfers.

    Raises InputError if the trace is of another plan.
    """
    found = compare_operators(plan, trace)
    size = {
        (one.device, one.action, one.targets[0]): one.bytes or 0.0
        for one in trace.steps[-1].actions
        if one.targets
    }
    transfers = []
    for one, action in zip(found.entries, scheduled_operators(plan), strict=True):
        if one.target is not None:
            sent = size[one.device, action.action, one.target]
            transfers.append((one.device, one.target, sent, one.seconds.measured))
    splits = {one.operator: one for one in plan.splits}

    def known(name: str) -> str:
        whole, _, part = name.partition("/")
        if not part:
            return name
        return part_known_as(whole, splits[whole].dimension, splits[whole].parts, part)

    return Observation(
        tuple(
            (known(one.operator), one.device, one.seconds.measured)
            for one in found.entries
            if one.kind not in (TRANSFER, "input", "state")
        ),
        tuple(transfers),
        found.steps,
    )
