"""Every rule of a pipeline plan again, from the definitions; nothing here knows a planner.

The rules come in two parts. `structure` needs no times: the plan answers this problem, its stages
cover the layers and share no device, and every action stands once, where it belongs, with the
right endpoints and bytes. Then the times: durations, dependencies, no overlap on a device or a
channel, memory at every instant, and the figures that the plan carries about itself.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.actions import COMPUTE, Action, ActionKind, parse_action
from stagewright.formulations.makespan import RELATIVE_TOLERANCE
from stagewright.formulations.pipeline import PipelineProblem
from stagewright.formulations.plan import (
    Certificate,
    InvalidPlan,
    PipelinePlan,
    Predicted,
    ScheduledAction,
    Stage,
)
from stagewright.graphs.errors import InputError
from stagewright.graphs.units import format_bytes

Floats = NDArray[np.float64]

Blocks = dict[ActionKind, Floats]
"""One number per action: an array of shape (S, M) per kind, (S, 1) for the all-reduces.

NaN stands where there is no such action: the last stage sends nothing forward, the first nothing
back, and a stage on one device reduces nothing.
"""

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
SEND_F, SEND_B = ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD
REDUCE = ActionKind.REDUCE


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: which, where, and what was found. Prints as one line."""

    rule: str
    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.place}: {self.message}"


def check(problem: PipelineProblem, plan: PipelinePlan) -> tuple[Violation, ...]:
    """Every broken rule, none if ``plan`` is a valid answer to ``problem``.

    Times are compared with a tolerance of ``RELATIVE_TOLERANCE`` of the iteration. Rules on times
    are read only once the structure is right.
    """
    found = structure(problem, plan)
    return found or tuple(_broken_times(_read_times(problem, plan), plan))


def require_valid(problem: PipelineProblem, plan: PipelinePlan) -> float:
    """The iteration time in seconds, recomputed from the starts and the cost model.

    Raises
    ------
    InvalidPlan
        With the first broken rule.
    """
    require_structure(problem, plan)
    times = _read_times(problem, plan)
    for violation in _broken_times(times, plan):
        raise InvalidPlan(str(violation))
    return times.iteration_seconds


def predict(problem: PipelineProblem, plan: PipelinePlan) -> Predicted:
    """What the cost model says of the plan, computed from its actions.

    Raises
    ------
    InvalidPlan
        If actions are missing or misplaced. The times are taken as they are.
    """
    require_structure(problem, plan)
    return _predict(_read_times(problem, plan))


def structure(problem: PipelineProblem, plan: PipelinePlan) -> tuple[Violation, ...]:
    """The broken rules that need no times."""
    return tuple(_broken_frame(problem, plan)) or tuple(_broken_actions(problem, plan))


def require_structure(problem: PipelineProblem, plan: PipelinePlan) -> None:
    """Raise InvalidPlan with the first broken rule that needs no times."""
    for violation in structure(problem, plan):
        raise InvalidPlan(str(violation))


def expected_actions(stages: Sequence[Stage], microbatches: int) -> Iterator[Action]:
    """Every action that a schedule of ``stages`` must hold, once each."""
    last = len(stages) - 1
    for s, stage in enumerate(stages):
        for m in range(microbatches):
            yield Action(s, F, m)
            yield Action(s, B, m)
            if s < last:
                yield Action(s, SEND_F, m)
            if s > 0:
                yield Action(s, SEND_B, m)
        if len(stage.devices) > 1:
            yield Action(s, REDUCE)


def durations(problem: PipelineProblem, stages: Sequence[Stage]) -> Blocks:
    """The cost model's seconds for every action of ``stages``."""
    index = problem.cluster.index
    seconds = _no_blocks(len(stages), problem.microbatches)
    runners = [[[index[name] for name in lane] for lane in _lanes(stage)] for stage in stages]
    for s, stage in enumerate(stages):
        for lane, devices in enumerate(runners[s][: problem.microbatches]):
            every = slice(lane, None, len(runners[s]))
            forward, backward = problem.compute_seconds(*stage.layers, devices)
            seconds[F][s, every], seconds[B][s, every] = forward, backward
        if len(stage.devices) > 1:
            group = [index[name] for name in stage.devices]
            seconds[REDUCE][s] = problem.reduce_seconds(*stage.layers, group)
    for s, stage in enumerate(stages[:-1]):
        for first, cycle in _channels(stages, s, problem.microbatches):
            senders = runners[s][first % len(runners[s])]
            receivers = runners[s + 1][first % len(runners[s + 1])]
            there, back = problem.transfer_seconds(stage.layers[1], senders, receivers)
            seconds[SEND_F][s, first::cycle], seconds[SEND_B][s + 1, first::cycle] = there, back
    return seconds


@dataclass(frozen=True, eq=False)
class _Times:
    """The times in a plan of sound structure, beside the cost model's durations.

    ``finishes`` are the plan's; all rules but the one on durations use starts + durations.
    """

    problem: PipelineProblem
    stages: tuple[Stage, ...]
    starts: Blocks
    finishes: Blocks
    durations: Blocks

    def ends(self, kind: ActionKind) -> Floats:
        """When the actions of ``kind`` end by the cost model, shape (S, M)."""
        return self.starts[kind] + self.durations[kind]

    @cached_property
    def iteration_seconds(self) -> float:
        """When the last action ends."""
        return max(_largest(self.ends(kind)) for kind in ActionKind)

    @cached_property
    def tolerance(self) -> float:
        """Seconds of rounding that are forgiven.

        Never more than a share of all the work in a row: one absurdly late action must not
        excuse the others.
        """
        work = sum(float(np.nansum(seconds)) for seconds in self.durations.values())
        return RELATIVE_TOLERANCE * min(self.iteration_seconds, work)


def _read_times(problem: PipelineProblem, plan: PipelinePlan) -> _Times:
    entries = {entry.action: entry for entry in plan.schedule.actions}
    starts = _no_blocks(len(plan.stages), plan.microbatches)
    finishes = _no_blocks(len(plan.stages), plan.microbatches)
    for action in expected_actions(plan.stages, plan.microbatches):
        entry, m = entries[str(action)], action.microbatch or 0
        starts[action.kind][action.stage, m] = entry.start_seconds
        finishes[action.kind][action.stage, m] = entry.finish_seconds
    return _Times(problem, plan.stages, starts, finishes, durations(problem, plan.stages))


def _no_blocks(stages: int, microbatches: int) -> Blocks:
    return {
        kind: np.full((stages, 1 if kind is REDUCE else microbatches), np.nan)
        for kind in ActionKind
    }


def _lanes(stage: Stage) -> list[tuple[str, ...]]:
    """The groups of devices that take turns: microbatch m runs on lane m mod the number."""
    return [stage.runners(m) for m in range(_turns(stage))]


def _turns(stage: Stage) -> int:
    return 1 if stage.replication == "split" else len(stage.devices)


def _channels(stages: Sequence[Stage], s: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """The channels between stages s and s + 1, one per pair of endpoints.

    A channel carries the microbatches first, first + cycle, ...: the pairs of lanes repeat after
    the least common multiple of both stages' turns, and within it no pair stands twice.
    """
    cycle = math.lcm(_turns(stages[s]), _turns(stages[s + 1]))
    for first in range(min(cycle, microbatches)):
        yield first, cycle


def _broken_frame(problem: PipelineProblem, plan: PipelinePlan) -> Iterator[Violation]:
    """The plan answers this problem, and its stages tile the layers on devices of their own."""
    if plan.digest != problem.digest:
        yield Violation(
            "digest", "digest", "the plan answers another model, cluster or number of microbatches"
        )
    if plan.microbatches != problem.microbatches:
        yield Violation(
            "microbatches",
            "microbatches",
            f"the plan has {plan.microbatches}, the problem {problem.microbatches}",
        )
    if plan.weights != "flush":
        yield Violation("weights", "weights", f"{plan.weights!r} is not known, only 'flush'")
    yield from _broken_cover(problem, plan.stages)
    yield from _broken_placement(problem, plan.stages)


def _broken_cover(problem: PipelineProblem, stages: Sequence[Stage]) -> Iterator[Violation]:
    covered = 0
    for s, stage in enumerate(stages):
        start, stop = stage.layers
        if start != covered:
            yield Violation(
                "layers", f"stage {s}", f"starts at layer {start}, {covered} are covered before it"
            )
        covered = stop
    if covered != len(problem.chain):
        yield Violation(
            "layers",
            f"stage {len(stages) - 1}",
            f"ends at layer {covered}, the model has {len(problem.chain)}",
        )


def _broken_placement(problem: PipelineProblem, stages: Sequence[Stage]) -> Iterator[Violation]:
    owner: dict[str, int] = {}
    for s, stage in enumerate(stages):
        if stage.replication not in ("split", "round-robin"):
            yield Violation("devices", f"stage {s}", f"replication {stage.replication!r}")
        for name in stage.devices:
            if name not in problem.cluster.index:
                yield Violation("devices", f"stage {s}", f"the cluster has no device {name!r}")
            elif name in owner:
                yield Violation("devices", f"stage {s}", f"{name!r} is in stage {owner[name]} too")
            owner.setdefault(name, s)


def _broken_actions(problem: PipelineProblem, plan: PipelinePlan) -> Iterator[Violation]:
    """Every expected action stands once where it belongs, and there is no other."""
    present: defaultdict[str, dict[str, ScheduledAction]] = defaultdict(dict)
    for i, entry in enumerate(plan.schedule.actions):
        place = f"schedule.actions[{i}]"
        if not 0 <= entry.start_seconds <= entry.finish_seconds < math.inf:
            yield Violation(
                "times",
                place,
                f"{entry.action} starts at {entry.start_seconds} and finishes at "
                f"{entry.finish_seconds}; both are finite and 0 <= start <= finish",
            )
        if entry.device in present[entry.action]:
            yield Violation("twice", place, f"{entry.action} on {entry.device} stands there again")
        present[entry.action][entry.device] = entry
    for action in expected_actions(plan.stages, plan.microbatches):
        yield from _broken_entries(problem, plan.stages, action, present.pop(str(action), {}))
    for text, entries in present.items():
        message = _why_unexpected(text, len(plan.stages), plan.microbatches)
        yield Violation("unexpected", f"{text} on {', '.join(entries)}", message)


def _why_unexpected(text: str, stages: int, microbatches: int) -> str:
    try:
        action = parse_action(text)
    except InputError as error:
        return str(error)
    if action.stage >= stages:
        return f"there are only stages 0 to {stages - 1}"
    if action.microbatch is not None and action.microbatch >= microbatches:
        return f"there are only microbatches 0 to {microbatches - 1}"
    if action.kind is REDUCE:
        return "a stage on one device has nothing to reduce"
    return "there is no stage to send to"


def _broken_entries(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    action: Action,
    entries: Mapping[str, ScheduledAction],
) -> Iterator[Violation]:
    """One expected action: its devices, and what it carries from where to where."""
    sources, targets = _endpoints(stages, action)
    compute = action.kind in COMPUTE
    devices = set(sources if compute else sources[:1])
    if entries.keys() != devices:
        for name in sorted(devices - entries.keys()):
            yield Violation("missing", str(action), f"does not stand on {name}")
        for name in sorted(entries.keys() - devices):
            yield Violation("unexpected", str(action), f"stands on {name}, where it does not run")
    if compute:
        yield from _broken_computation(action, entries)
        return
    volume = _bytes(problem, stages, action)
    for entry in entries.values():
        if entry.sources != sources or entry.targets != targets:
            yield Violation(
                "endpoints",
                str(action),
                f"goes from {_names(entry.sources)} to {_names(entry.targets)}, "
                f"expected from {_names(sources)} to {_names(targets)}",
            )
        if entry.bytes is None or not math.isclose(entry.bytes, volume, rel_tol=RELATIVE_TOLERANCE):
            yield Violation("bytes", str(action), f"carries {entry.bytes} bytes, expected {volume}")


def _broken_computation(
    action: Action, entries: Mapping[str, ScheduledAction]
) -> Iterator[Violation]:
    """A computation carries nothing, and the devices that split it run it at the same time."""
    if len({(entry.start_seconds, entry.finish_seconds) for entry in entries.values()}) > 1:
        yield Violation("replicas", str(action), "its devices run it at different times")
    for name, entry in entries.items():
        if (entry.sources, entry.targets, entry.bytes) != (None, None, None):
            yield Violation("endpoints", f"{action} on {name}", "a computation has none")


def _endpoints(stages: Sequence[Stage], action: Action) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The devices that ``action`` runs on or sends from, and those that it sends to."""
    stage = stages[action.stage]
    if action.microbatch is None:
        return stage.devices, stage.devices
    receiver = action.stage + {SEND_F: 1, SEND_B: -1}.get(action.kind, 0)
    return stage.runners(action.microbatch), stages[receiver].runners(action.microbatch)


def _bytes(problem: PipelineProblem, stages: Sequence[Stage], action: Action) -> float:
    """Bytes that a transfer or an all-reduce carries."""
    start, stop = stages[action.stage].layers
    if action.kind is REDUCE:
        return problem.gradient_bytes(start, stop)
    return problem.boundary_bytes(stop if action.kind is SEND_F else start)


def _names(devices: Sequence[str] | None) -> str:
    return "nowhere" if devices is None else "(" + ", ".join(devices) + ")"


def _broken_times(times: _Times, plan: PipelinePlan) -> Iterator[Violation]:
    yield from _broken_durations(times)
    yield from _broken_dependencies(times)
    yield from _overlaps(times)
    yield from _memory_exceeded(times)
    if plan.predicted is not None:
        yield from _broken_prediction(_predict(times), plan.predicted)
    if plan.certificate is not None:
        yield from _broken_certificate(times, plan.certificate)


def _broken_durations(times: _Times) -> Iterator[Violation]:
    tolerance = times.tolerance
    for kind, seconds in times.durations.items():
        lasts = times.finishes[kind] - times.starts[kind]
        for s, m in np.argwhere(np.abs(lasts - seconds) > tolerance):
            yield Violation(
                "duration",
                _text(kind, s, m),
                f"lasts {lasts[s, m]:.9g} s, the cost model says {seconds[s, m]:.9g} s",
            )


def _broken_dependencies(times: _Times) -> Iterator[Violation]:
    """SPP's dependencies: each block of a microbatch after the one before it, sums at the end."""
    starts, tolerance = times.starts, times.tolerance
    last = len(times.stages) - 1
    head, tail, end = slice(None, last), slice(1, None), slice(last, None)
    for before, earlier, after, later in (
        (F, head, SEND_F, head), (SEND_F, head, F, tail), (F, end, B, end),
        (B, tail, SEND_B, tail), (SEND_B, tail, B, head),
    ):  # fmt: skip
        ends = times.ends(before)[earlier]
        for row, m in np.argwhere(starts[after][later] < ends - tolerance):
            first = _text(before, row + (earlier.start or 0), m)
            second = _text(after, row + (later.start or 0), m)
            start = starts[after][later][row, m]
            yield _too_early(second, start, first, ends[row, m])
    ends = times.ends(B)
    for s, start in enumerate(starts[REDUCE][:, 0]):
        m = int(ends[s].argmax())
        if start < ends[s, m] - tolerance:
            yield _too_early(_text(REDUCE, s, 0), start, _text(B, s, m), ends[s, m])


def _too_early(after: str, start: float, before: str, end: float) -> Violation:
    return Violation(
        "dependency", after, f"starts at {start:.9g} s, {before} ends only at {end:.9g} s"
    )


def _overlaps(times: _Times) -> Iterator[Violation]:
    """One computation at a time on a device, one transfer in either direction on a channel."""
    microbatches = times.problem.microbatches
    for s, stage in enumerate(times.stages):
        turns = _turns(stage)
        for lane in range(min(turns, microbatches)):
            name = f"device {stage.runners(lane)[0]}"
            yield from _overlap(times, name, ((F, s), (B, s)), lane, turns)
    for s in range(len(times.stages) - 1):
        for first, cycle in _channels(times.stages, s, microbatches):
            ends = (times.stages[s + side].runners(first)[0] for side in (0, 1))
            name = f"channel {s}-{s + 1} of {' and '.join(ends)}"
            yield from _overlap(times, name, ((SEND_F, s), (SEND_B, s + 1)), first, cycle)


def _overlap(
    times: _Times, name: str, rows: Sequence[tuple[ActionKind, int]], first: int, step: int
) -> Iterator[Violation]:
    """Overlaps among microbatches first, first + step, ... of ``rows``, which share a resource."""
    starts = np.concatenate([times.starts[kind][s, first::step] for kind, s in rows])
    ends = np.concatenate([times.ends(kind)[s, first::step] for kind, s in rows])
    order = np.lexsort((ends, starts))
    starts, busy_until = starts[order], np.maximum.accumulate(ends[order])
    for i in np.flatnonzero(starts[1:] < busy_until[:-1] - times.tolerance):
        row, place = divmod(int(order[i + 1]), len(order) // 2)
        kind, s = rows[row]
        yield Violation(
            "overlap",
            name,
            f"{_text(kind, s, first + place * step)} starts at {starts[i + 1]:.9g} s, "
            f"it is taken until {busy_until[i]:.9g} s",
        )


def _memory_exceeded(times: _Times) -> Iterator[Violation]:
    """Every device holds at its peak what the plan asks of it."""
    devices = times.problem.cluster.devices
    for name, static, saved in _peaks(times):
        memory = devices[times.problem.cluster.index[name]].memory_bytes
        # Written as `in_flight_limit` has it, so that rounding cannot tell the two apart.
        short = saved - (memory - static)
        if short > 0:
            yield Violation(
                "memory",
                f"device {name}",
                f"needs {format_bytes(static + saved)} at its peak and has "
                f"{format_bytes(memory)}: {short:.0f} bytes short",
            )


def _peaks(times: _Times) -> Iterator[tuple[str, float, float]]:
    """Per used device the static bytes, and the most that microbatches in flight keep there."""
    for s, stage in enumerate(times.stages):
        turns = _turns(stage)
        shares = len(stage.devices) // turns
        static = times.problem.static_bytes(*stage.layers, shares)
        saved = times.problem.saved_bytes(*stage.layers, shares)
        for lane in range(turns):
            most = _most_in_flight(times, s, slice(lane, None, turns))
            for name in stage.runners(lane):
                yield name, static, most * saved


def _most_in_flight(times: _Times, s: int, microbatches: slice) -> int:
    """Largest number of microbatches between the start of their F and the end of their B.

    The number grows only where a forward starts; what has ended by then is counted off.
    """
    started = np.sort(times.starts[F][s, microbatches])
    finished = np.sort(times.ends(B)[s, microbatches])
    gone = np.searchsorted(finished, started + times.tolerance, side="right")
    return int((np.arange(1, len(started) + 1) - gone).max(initial=0))


def _predict(times: _Times) -> Predicted:
    iteration = times.iteration_seconds
    devices = sum(len(stage.devices) for stage in times.stages)
    shares = np.array([len(stage.devices) // _turns(stage) for stage in times.stages])
    busy = float(shares @ (times.durations[F] + times.durations[B]).sum(axis=1))
    return Predicted(
        iteration_seconds=iteration,
        bubble=1 - busy / (devices * iteration) if iteration > 0 else 0.0,
        peak_memory_bytes={name: static + saved for name, static, saved in _peaks(times)},
        link_bytes=_link_bytes(times.problem, times.stages),
    )


def _link_bytes(problem: PipelineProblem, stages: Sequence[Stage]) -> dict[str, float]:
    """Bytes per iteration between neighbouring stages ("0-1"), and reduced in a stage ("0")."""
    # Every microbatch crosses a boundary twice: its activations, and their gradient.
    crossing = {
        f"{s}-{s + 1}": 2 * problem.microbatches * problem.boundary_bytes(stage.layers[1])
        for s, stage in enumerate(stages[:-1])
    }
    reduced = {
        str(s): problem.gradient_bytes(*stage.layers)
        for s, stage in enumerate(stages)
        if len(stage.devices) > 1
    }
    return crossing | reduced


def _broken_prediction(computed: Predicted, stated: Predicted) -> Iterator[Violation]:
    """The figures in the plan are those that follow from its actions."""
    if not math.isclose(
        stated.iteration_seconds, computed.iteration_seconds, rel_tol=RELATIVE_TOLERANCE
    ):
        yield _misstated("iteration_seconds", stated.iteration_seconds, computed.iteration_seconds)
    if not abs(stated.bubble - computed.bubble) <= RELATIVE_TOLERANCE:
        yield _misstated("bubble", stated.bubble, computed.bubble)
    for field in ("peak_memory_bytes", "link_bytes"):
        right, found = getattr(computed, field), getattr(stated, field)
        for name in sorted(right.keys() ^ found.keys()):
            yield Violation("predicted", f"predicted.{field}", f"{name} is missing or superfluous")
        for name in right:
            if name in found and not math.isclose(
                found[name], right[name], rel_tol=RELATIVE_TOLERANCE
            ):
                yield _misstated(f"{field}.{name}", found[name], right[name])


def _misstated(place: str, found: float, right: float) -> Violation:
    return Violation("predicted", f"predicted.{place}", f"says {found}, the actions give {right}")


def _broken_certificate(times: _Times, certificate: Certificate) -> Iterator[Violation]:
    """The certificate speaks of this plan's cost, and its arithmetic is right."""
    cost, tolerance = times.iteration_seconds, times.tolerance
    if not abs(certificate.cost_seconds - cost) <= tolerance:
        yield Violation(
            "certificate",
            "certificate.cost_seconds",
            f"says {certificate.cost_seconds}, the actions give {cost}",
        )
    for i, bound in enumerate(certificate.bounds):
        if not 0 <= bound.seconds <= cost + tolerance:
            yield Violation(
                "certificate",
                f"certificate.bounds[{i}]",
                f"{bound.seconds} by {bound.proved_by} is no lower bound on {cost}",
            )
    for i, guarantee in enumerate(certificate.guarantees):
        excess = guarantee.cost_seconds - guarantee.seconds
        # Within the rounding either answer is right.
        if not abs(excess) <= tolerance and guarantee.holds != (excess < 0):
            yield Violation(
                "certificate",
                f"certificate.guarantees[{i}]",
                f"holds is {guarantee.holds}, the cost is {guarantee.cost_seconds} and "
                f"{guarantee.theorem} promises {guarantee.seconds}",
            )
    yield from _broken_gaps(certificate, cost, tolerance)


def _broken_gaps(certificate: Certificate, cost: float, tolerance: float) -> Iterator[Violation]:
    """Each headline bound is the best listed of its scope, and its gap follows from it."""
    of_problem = [bound for bound in certificate.bounds if bound.scope == "problem"]
    of_schedule = [bound for bound in certificate.bounds if bound.scope == "schedule"]
    headlines = (
        # A bound on every plan of the problem also bounds every schedule of these stages.
        ("", certificate.bound_seconds, certificate.gap, certificate.proved_by,
         of_problem, of_problem),
        ("schedule_", certificate.schedule_bound_seconds, certificate.schedule_gap,
         certificate.schedule_proved_by, list(certificate.bounds), of_schedule),
    )  # fmt: skip
    for prefix, seconds, gap, proved_by, listed, rivals in headlines:
        if (seconds, proved_by) not in [(bound.seconds, bound.proved_by) for bound in listed]:
            yield Violation(
                "certificate",
                f"certificate.{prefix}bound_seconds",
                f"{seconds} by {proved_by} does not stand among the bounds of its scope",
            )
        if any(bound.seconds > seconds + tolerance for bound in rivals):
            yield Violation(
                "certificate",
                f"certificate.{prefix}bound_seconds",
                f"{seconds} is not the best of the bounds",
            )
        right = (cost - seconds) / cost if cost > 0 else 0.0
        if not abs(gap - right) <= RELATIVE_TOLERANCE:
            yield Violation(
                "certificate", f"certificate.{prefix}gap", f"says {gap}, the bound gives {right}"
            )


def _text(kind: ActionKind, stage: int, microbatch: int) -> str:
    return str(Action(stage, kind, None if kind is REDUCE else microbatch))


def _largest(values: Floats) -> float:
    """The largest of ``values`` that is a number; 0 if none is."""
    return float(np.max(values, initial=0.0, where=~np.isnan(values)))
