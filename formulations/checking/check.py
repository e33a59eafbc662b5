"""Every rule of a pipeline plan again, from the definitions; nothing here knows a planner.

The rules come in two parts. `structure` needs no times: the plan answers this problem, its stages
cover the layers, and every action stands once, where it belongs, with the right endpoints and
bytes. Then the times: durations, dependencies, no overlap on a device or a channel, memory at every
instant, and the figures that the plan carries about itself.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.checking.certificates import faults
from stagewright.formulations.checking.periodic_rules import broken_iterations
from stagewright.formulations.checking.proofs import Verdict, verdicts
from stagewright.formulations.checking.violations import Violation
from stagewright.formulations.plans.actions import (
    BARE,
    COMPUTE,
    ON_DEVICE,
    PLANNED,
    Action,
    ActionKind,
    parse_action,
    parse_operation,
)
from stagewright.formulations.plans.periodic import (
    from_first,
    iteration_seconds,
    keeps_gradients,
    steady_microbatches,
    unrolled,
    without_pause,
)
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import (
    PeriodicAction,
    PeriodicSchedule,
    PipelinePlan,
    Predicted,
    ScheduledAction,
    Stage,
    updates_every_round,
)
from stagewright.formulations.plans.plan_class import Weights, class_of
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.documents.units import format_bytes

Blocks = dict[ActionKind, Floats]
"""One number per action: shape (S, M) per planned kind, (S, 1) for all-reduces and updates.

NaN stands where there is no such action: a backward stands whole or in two parts, the last stage
sends nothing forward, the first nothing back, nobody sends to himself, a stage on one device
reduces nothing, and an optimizer's step that takes no time is no action. NaN is in no order with
any number, so rules on times pass over it.
"""

Turn = tuple[int, int, int]
"""A stage, and the microbatches first, first + step, ... of it."""

Row = tuple[ActionKind, Turn]

Split = NDArray[np.bool_]
"""Per stage and microbatch, shape (S, M): whether the backward stands as I and W."""

PROOF = "proof"  # the rule that a refuted bound or guarantee breaks

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
SEND_F, SEND_B = ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD
REDUCE, UPDATE = ActionKind.REDUCE, ActionKind.UPDATE


def check(problem: PipelineProblem, plan: PipelinePlan) -> tuple[Violation, ...]:
    """Every broken rule, none if ``plan`` is a valid answer to ``problem``.

    Times are compared with a tolerance of ``RELATIVE_TOLERANCE`` of the iteration. Rules on times
    are read only once the structure is right, and the proofs in the certificate only once the rest
    is. A periodic plan is unrolled for as many microbatches as it takes until everything that can
    be at one time is, a whole period long. Its pauses are left out of that, as they only part what
    is done.
    """
    found = structure(problem, plan) or tuple(_broken_times(_read_times(problem, plan), plan))
    return found or refutations(verdicts(problem, plan))


def refutations(found: Sequence[Verdict]) -> tuple[Violation, ...]:
    """The bounds and guarantees that their arguments do not give, as broken rules."""
    return tuple(
        Violation(
            PROOF,
            f"certificate.{one.place}",
            f"{one.seconds:.9g} s by {one.name!r} is refuted: {one.reason}",
        )
        for one in found
        if one.verdict == "refuted"
    )


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
    return times.cost_seconds


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
    if isinstance(plan.schedule, PeriodicSchedule):
        broken = tuple(_broken_frame(problem, plan)) or tuple(_broken_pattern(plan, plan.schedule))
        return broken or tuple(
            _broken_actions(*_unrolled(problem, plan, plan.schedule), frozenset())
        )
    broken = tuple(_broken_frame(problem, plan))
    updated = updated_stages(problem, plan.stages, plan.weights) if not broken else frozenset()
    return broken or tuple(_broken_actions(problem, plan, updated))


def require_structure(problem: PipelineProblem, plan: PipelinePlan) -> None:
    """Raise InvalidPlan with the first broken rule that needs no times."""
    for violation in structure(problem, plan):
        raise InvalidPlan(str(violation))


def split_backwards(plan: PipelinePlan) -> Split:
    """Which backwards of a plan stand as I and W: those of which either is there."""
    split = _none_split(plan.stages, plan.microbatches)
    parts = {entry.action for entry in plan.actions if I in entry.action}
    parts |= {entry.action for entry in plan.actions if W in entry.action}
    if parts:
        for s, m in np.ndindex(split.shape):
            split[s, m] = not parts.isdisjoint((str(Action(s, I, m)), str(Action(s, W, m))))
    return split


def updated_stages(
    problem: PipelineProblem, stages: Sequence[Stage], weights: Weights
) -> frozenset[int]:
    """The stages whose optimizer's step is an action at the end of the iteration.

    Where weights change after every microbatch the step belongs to the backward.
    """
    if updates_every_round(weights):
        return frozenset()
    return frozenset(s for s, stage in enumerate(stages) if _update_seconds(problem, stage) > 0)


def expected_actions(
    stages: Sequence[Stage],
    microbatches: int,
    split: Split | None = None,
    updated: Collection[int] = (),
) -> Iterator[Action]:
    """Every action that a schedule of ``stages`` must hold, once each.

    ``split`` tells the backwards that stand as I and W (default: none), ``updated`` the stages
    whose optimizer's step is an action.
    """
    parts = _none_split(stages, microbatches) if split is None else split
    sent = [_sent(stages, s, microbatches) for s in range(-1, len(stages))]
    for s, stage in enumerate(stages):
        for m, in_parts in enumerate(parts[s].tolist()):
            yield Action(s, F, m)
            for kind in (I, W) if in_parts else (B,):
                yield Action(s, kind, m)
            if sent[s + 1][m]:
                yield Action(s, SEND_F, m)
            if sent[s][m]:
                yield Action(s, SEND_B, m)
        if len(stage.devices) > 1:
            yield Action(s, REDUCE)
        if s in updated:
            yield Action(s, UPDATE)


def durations(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    split: Split | None = None,
    weights: Weights = "flush",
) -> Blocks:
    """The cost model's seconds for every action of ``stages``, ``split`` as above.

    Where weights change after every microbatch, what ends a backward takes the optimizer's step
    longer.
    """
    parts = _none_split(stages, problem.microbatches) if split is None else split
    seconds = _no_blocks(len(stages), problem.microbatches)
    for s, stage in enumerate(stages):
        step = _update_seconds(problem, stage) if updates_every_round(weights) else 0.0
        for lane, devices in enumerate(_positions(problem, stage)[: problem.microbatches]):
            every = slice(lane, None, stage.turns)
            forward, backward = problem.compute_seconds(*stage.layers, devices)
            again = 0.0 if stage.recompute == "none" else forward
            seconds[F][s, every], seconds[B][s, every] = forward, backward + again + step
            if parts[s].any():
                of_input, of_weights = problem.gradient_seconds(*stage.layers, devices)
                seconds[I][s, every], seconds[W][s, every] = of_input + again, of_weights + step
        if len(stage.devices) > 1:
            group = [problem.cluster.index[name] for name in stage.devices]
            seconds[REDUCE][s] = problem.reduce_seconds(*stage.layers, group)
    for s in updated_stages(problem, stages, weights):
        seconds[UPDATE][s] = _update_seconds(problem, stages[s])
    for kind, absent in ((B, parts), (I, ~parts), (W, ~parts)):
        seconds[kind][absent] = np.nan
    _add_transfers(problem, stages, seconds)
    return seconds


def _add_transfers(problem: PipelineProblem, stages: Sequence[Stage], seconds: Blocks) -> None:
    lanes = [_positions(problem, stage) for stage in stages]
    for s, stage in enumerate(stages[:-1]):
        for first, cycle in _channels(stages, s, problem.microbatches):
            senders, receivers = (lanes[i][first % len(lanes[i])] for i in (s, s + 1))
            there, back = problem.transfer_seconds(stage.layers[1], senders, receivers)
            seconds[SEND_F][s, first::cycle], seconds[SEND_B][s + 1, first::cycle] = there, back


def _positions(problem: PipelineProblem, stage: Stage) -> list[list[int]]:
    """The positions of the devices of every lane."""
    return [[problem.cluster.index[name] for name in lane] for lane in _lanes(stage)]


def devices_by_turns(stages: Sequence[Stage]) -> dict[tuple[Turn, ...], list[str]]:
    """The devices that take the same turns, and so do the same at the same times."""
    turns: defaultdict[str, list[Turn]] = defaultdict(list)
    for s, stage in enumerate(stages):
        lanes = _lanes(stage)
        for lane, names in enumerate(lanes):
            for name in names:
                turns[name].append((s, lane, len(lanes)))
    devices: defaultdict[tuple[Turn, ...], list[str]] = defaultdict(list)
    for name, taken in turns.items():
        devices[tuple(taken)].append(name)
    return devices


@dataclass(frozen=True, eq=False)
class _Times:
    """The times in a plan of sound structure, beside the cost model's durations.

    ``finishes`` are the plan's; all rules but the one on durations use starts + durations.
    ``problem`` has the microbatches that stand here, which for a periodic plan are other than those
    of an iteration.
    """

    problem: PipelineProblem
    iteration_microbatches: int
    stages: tuple[Stage, ...]
    weights: Weights
    starts: Blocks
    finishes: Blocks
    durations: Blocks
    schedule: PeriodicSchedule | None = None  # whose first microbatches these are, without pauses

    def ends(self, kind: ActionKind) -> Floats:
        """When the actions of ``kind`` end by the cost model, shape (S, M)."""
        return self.starts[kind] + self.durations[kind]

    @cached_property
    def done(self) -> Floats:
        """When the backwards end, whole or in parts, shape (S, M)."""
        return np.fmax(self.ends(B), self.ends(W))

    @property
    def cost_seconds(self) -> float:
        """The iteration's time: when its last action ends, or that of its periods."""
        if self.schedule is None:
            return self.iteration_seconds
        return iteration_seconds(self.schedule, self.iteration_microbatches)

    @cached_property
    def iteration_seconds(self) -> float:
        """When the last action ends."""
        return max(_largest(self.ends(kind)) for kind in PLANNED)

    @cached_property
    def tolerance(self) -> float:
        """Seconds of rounding that are forgiven.

        Never more than a share of all the work in a row: one absurdly late action must not
        excuse the others.
        """
        work = sum(float(np.nansum(seconds)) for seconds in self.durations.values())
        return RELATIVE_TOLERANCE * min(self.iteration_seconds, work)


def _unrolled(
    problem: PipelineProblem, plan: PipelinePlan, schedule: PeriodicSchedule
) -> tuple[PipelineProblem, PipelinePlan]:
    """Problem and finite plan of as many microbatches as fill a whole period."""
    first = without_pause(from_first(schedule))
    microbatches = steady_microbatches(first)
    longer = replace(problem, microbatches=microbatches)
    timed = unrolled(replace(plan, schedule=first), microbatches)
    return longer, replace(timed, digest=longer.digest)


def _read_times(problem: PipelineProblem, plan: PipelinePlan) -> _Times:
    if isinstance(plan.schedule, PeriodicSchedule):
        times = _read_finite(*_unrolled(problem, plan, plan.schedule), frozenset())
        return replace(
            times,
            iteration_microbatches=plan.microbatches,
            schedule=plan.schedule,
        )
    return _read_finite(problem, plan, updated_stages(problem, plan.stages, plan.weights))


def _read_finite(problem: PipelineProblem, plan: PipelinePlan, updated: Collection[int]) -> _Times:
    entries = {entry.action: entry for entry in plan.actions}
    starts = _no_blocks(len(plan.stages), plan.microbatches)
    finishes = _no_blocks(len(plan.stages), plan.microbatches)
    split = split_backwards(plan)
    for action in expected_actions(plan.stages, plan.microbatches, split, updated):
        entry, m = entries[str(action)], action.microbatch or 0
        starts[action.kind][action.stage, m] = entry.start_seconds
        finishes[action.kind][action.stage, m] = entry.finish_seconds
    lasting = durations(problem, plan.stages, split, plan.weights)
    return _Times(problem, plan.microbatches, plan.stages, plan.weights, starts, finishes, lasting)


def _update_seconds(problem: PipelineProblem, stage: Stage) -> float:
    """The optimizer's step of a stage on each of its devices."""
    devices = [problem.cluster.index[name] for name in stage.devices]
    return problem.update_seconds(*stage.layers, devices)


def _no_blocks(stages: int, microbatches: int) -> Blocks:
    return {
        kind: np.full((stages, 1 if kind in BARE else microbatches), np.nan) for kind in PLANNED
    }


def _none_split(stages: Sequence[Stage], microbatches: int) -> Split:
    return np.zeros((len(stages), microbatches), dtype=bool)


def _lanes(stage: Stage) -> list[tuple[str, ...]]:
    """The groups of devices that take turns: microbatch m runs on lane m mod the number."""
    return [stage.runners(m) for m in range(stage.turns)]


def _channels(stages: Sequence[Stage], s: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """The channels between stages s and s + 1, one per pair of endpoints.

    A channel carries the microbatches first, first + cycle, ...: the pairs of lanes repeat after
    the least common multiple of both stages' turns, and within it no pair stands twice. What one
    group of devices runs in both stages passes no channel.
    """
    cycle = math.lcm(stages[s].turns, stages[s + 1].turns)
    for first in range(min(cycle, microbatches)):
        if stages[s].runners(first) != stages[s + 1].runners(first):
            yield first, cycle


def _sent(stages: Sequence[Stage], s: int, microbatches: int) -> list[bool]:
    """Per microbatch whether it is sent between stages s and s + 1; False where one is missing."""
    sent = np.zeros(microbatches, dtype=bool)
    if 0 <= s < len(stages) - 1:
        for first, cycle in _channels(stages, s, microbatches):
            sent[first::cycle] = True
    return sent.tolist()


def _broken_frame(problem: PipelineProblem, plan: PipelinePlan) -> Iterator[Violation]:
    """The plan answers this problem, and its stages tile the layers on devices that there are."""
    if not plan.answers(problem.digest):
        yield Violation(
            "digest", "digest", "the plan answers another model, cluster or number of microbatches"
        )
    if plan.microbatches != problem.microbatches:
        yield Violation(
            "microbatches",
            "microbatches",
            f"the plan has {plan.microbatches}, the problem {problem.microbatches}",
        )
    yield from _broken_weights(plan)
    yield from _broken_layers(problem, plan)
    yield from _broken_cover(problem, plan.stages)
    yield from _broken_placement(problem, plan.stages)


def _broken_weights(plan: PipelinePlan) -> Iterator[Violation]:
    if plan.weights not in get_args(Weights):
        known = ", ".join(map(repr, get_args(Weights)))
        yield Violation("weights", "weights", f"{plan.weights!r} is not known, use one of {known}")
    for s, stage in enumerate(plan.stages):
        if updates_every_round(plan.weights) and len(stage.devices) > 1:
            yield Violation(
                "weights",
                f"stage {s}",
                f"{plan.weights!r} on {len(stage.devices)} devices needs an all-reduce per "
                "microbatch, which is not planned: use one device, 'flush' or 'double-buffer'",
            )


def _broken_pattern(plan: PipelinePlan, schedule: PeriodicSchedule) -> Iterator[Violation]:
    """What a periodic plan needs before its pattern can be unrolled."""
    if plan.weights != "double-buffer":
        yield Violation(
            "weights",
            "weights",
            f"{plan.weights!r} ends with the iteration or updates within it, a periodic plan needs "
            "'double-buffer'",
        )
    for s, stage in enumerate(plan.stages):
        if stage.turns > 1:
            yield Violation(
                "devices",
                f"stage {s}",
                "in a periodic plan all devices of a stage do every microbatch: use 'split'",
            )
    for i, one in enumerate(from_first(schedule).actions):
        yield from _broken_repetition(plan, one, schedule, f"schedule.actions[{i}]")


def _broken_repetition(
    plan: PipelinePlan, one: PeriodicAction, schedule: PeriodicSchedule, place: str
) -> Iterator[Violation]:
    """An operation that can be repeated: known, done before it is due again, and not too late."""
    try:
        operation = parse_operation(one.action)
    except InputError as error:
        yield Violation("unexpected", place, str(error))
        return
    most = schedule.period_seconds
    if operation.kind is REDUCE:
        most = iteration_seconds(schedule, plan.microbatches)
    if one.seconds > most * (1 + RELATIVE_TOLERANCE):
        yield Violation(
            "overlap",
            place,
            f"{one.action} takes {one.seconds:.9g} s and is due again after {most:.9g} s",
        )
    # A microbatch ends before its weights are overwritten, and an all-reduce after an iteration.
    latest = plan.microbatches * (2 if operation.kind is REDUCE else 1) + 2
    if one.shift > latest:
        yield Violation(
            "versions",
            place,
            f"{one.action} is done {one.shift} periods after its microbatch began; with two "
            f"versions of the weights and {plan.microbatches} microbatches in an iteration "
            f"{latest} is the most",
        )


def _broken_layers(problem: PipelineProblem, plan: PipelinePlan) -> Iterator[Violation]:
    """The layers that the plan names are the model's."""
    if plan.layers is None:
        return
    found = [(layer.name, layer.parameter_bytes) for layer in plan.layers]
    right = [(layer.name, layer.parameter_bytes) for layer in problem.chain.layers]
    if len(found) != len(right):
        yield Violation("layers", "layers", f"there are {len(found)}, the model has {len(right)}")
    for i, (one, other) in enumerate(zip(found, right, strict=False)):
        if one != other:
            yield Violation(
                "layers",
                f"layers[{i}]",
                f"{one[0]!r} of {one[1]} bytes, in the model {other[0]!r} of {other[1]} bytes",
            )


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
    for s, stage in enumerate(stages):
        if stage.replication not in ("split", "round-robin"):
            yield Violation("devices", f"stage {s}", f"replication {stage.replication!r}")
        if stage.recompute not in ("none", "full", "layer"):
            yield Violation("recompute", f"stage {s}", f"recompute {stage.recompute!r}")
        yield from _broken_offload(problem, s, stage)
        yield from _broken_shares(problem, s, stage)
        for name, count in Counter(stage.devices).items():
            if name not in problem.cluster.index:
                yield Violation("devices", f"stage {s}", f"the cluster has no device {name!r}")
            if count > 1:
                yield Violation("devices", f"stage {s}", f"{name!r} stands there {count} times")


def _broken_shares(problem: PipelineProblem, s: int, stage: Stage) -> Iterator[Violation]:
    """Samples are whole, and the smallest share of a microbatch does for every layer."""
    most, shares = problem.most_replicas(*stage.layers), len(stage.runners(0))
    if shares > most:
        yield Violation(
            "samples",
            f"stage {s}",
            f"splits microbatches of {problem.chain.microbatch_size} samples among {shares} "
            f"devices, {most} are the most",
        )


def _broken_offload(problem: PipelineProblem, s: int, stage: Stage) -> Iterator[Violation]:
    """What is offloaded has a link to go over, and no other way to be there again."""
    if not stage.offload:
        return
    if stage.recompute != "none":
        yield Violation("offload", f"stage {s}", "what is computed again need not be offloaded")
    for name in stage.devices:
        v = problem.cluster.index.get(name)
        if v is not None and problem.cluster.devices[v].host_bytes_per_second is None:
            yield Violation(
                "offload",
                f"stage {s}",
                f"the cluster does not tell {name!r}'s host_bytes_per_second",
            )


def _broken_actions(
    problem: PipelineProblem, plan: PipelinePlan, updated: Collection[int]
) -> Iterator[Violation]:
    """Every expected action stands once where it belongs, and there is no other."""
    present: defaultdict[str, dict[str, ScheduledAction]] = defaultdict(dict)
    for i, entry in enumerate(plan.actions):
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
    split = split_backwards(plan)
    yield from _unknown_parts(problem, plan.stages, split)
    for action in expected_actions(plan.stages, plan.microbatches, split, updated):
        yield from _broken_entries(problem, plan.stages, action, present.pop(str(action), {}))
    for text, entries in present.items():
        message = _why_unexpected(text, len(plan.stages), plan.microbatches)
        yield Violation("unexpected", f"{text} on {', '.join(entries)}", message)


def _unknown_parts(
    problem: PipelineProblem, stages: Sequence[Stage], split: Split
) -> Iterator[Violation]:
    """Where a backward stands as I and W, the profile knows the time of each."""
    for s in np.flatnonzero(split.any(axis=1)).tolist():
        if stages[s].offload:
            yield Violation("offload", f"stage {s}", "what is offloaded comes back for a whole B")
        name = problem.layer_with_whole_backward(*stages[s].layers)
        if name is not None:
            yield Violation(
                "parts",
                f"stage {s}",
                f"layer {name!r} knows only its whole backward: plan B for I and W, or give its "
                "input_gradient_seconds and weight_gradient_seconds",
            )


def _why_unexpected(text: str, stages: int, microbatches: int) -> str:
    try:
        action = parse_action(text)
    except InputError as error:
        return str(error)
    if action.kind not in PLANNED:
        return f"{action.kind} belongs to programs, not to plans"
    if action.stage >= stages:
        return f"there are only stages 0 to {stages - 1}"
    if action.microbatch is not None and action.microbatch >= microbatches:
        return f"there are only microbatches 0 to {microbatches - 1}"
    return _why_idle(action, stages)


def _why_idle(action: Action, stages: int) -> str:
    """Why a stage and microbatch that there are need no such action."""
    if action.kind is REDUCE:
        return "a stage on one device has nothing to reduce"
    if action.kind is UPDATE:
        return "the optimizer's step takes no time here, or is part of the backward"
    if action.kind is B:
        return "the backward stands as I and W"
    if action.stage == (stages - 1 if action.kind is SEND_F else 0):
        return "there is no stage to send to"
    return "the same devices run this microbatch in both stages"


def _broken_entries(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    action: Action,
    entries: Mapping[str, ScheduledAction],
) -> Iterator[Violation]:
    """One expected action: its devices, and what it carries from where to where."""
    sources, targets = _endpoints(stages, action)
    compute = action.kind in ON_DEVICE
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
    if times.schedule is not None:
        yield from broken_iterations(times.problem, plan, times.schedule, times.tolerance)
    if plan.predicted is not None:
        yield from _broken_prediction(_predict(times), plan.predicted)
    yield from _broken_certificate(times, plan)


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
    """SPP's dependencies: each block of a microbatch after the one before it, sums at the end.

    A backward is B, or I with W behind it; where nothing is sent the two stages follow directly.
    """
    last = len(times.stages) - 1
    head, tail, end, every = slice(0, last), slice(1, None), slice(last, None), slice(0, None)
    handed = np.isnan(times.starts[SEND_F][head])
    sent, always = ~handed, np.ones((1, times.problem.microbatches), dtype=bool)
    for before, earlier, after, later, where in (
        (F, head, SEND_F, head, sent), (SEND_F, head, F, tail, sent), (F, head, F, tail, handed),
        *((F, end, gradient, end, always) for gradient in (B, I)),
        *((gradient, tail, SEND_B, tail, sent) for gradient in (B, I)),
        *((SEND_B, tail, gradient, head, sent) for gradient in (B, I)),
        *((one, tail, other, head, handed) for one in (B, I) for other in (B, I)),
        (I, every, W, every, always),
    ):  # fmt: skip
        starts, ends = times.starts[after][later], times.ends(before)[earlier]
        for row, m in np.argwhere((starts < ends - times.tolerance) & where):
            first = _text(before, row + earlier.start, m)
            second = _text(after, row + later.start, m)
            yield _too_early(second, starts[row, m], first, ends[row, m])
    for s, start in enumerate(times.starts[REDUCE][:, 0]):
        m = int(times.done[s].argmax())
        if start < times.done[s, m] - times.tolerance:
            before = B if np.isnan(times.starts[W][s, m]) else W
            yield _too_early(_text(REDUCE, s, 0), start, _text(before, s, m), times.done[s, m])
    yield from _early_updates(times)


def _early_updates(times: _Times) -> Iterator[Violation]:
    """The optimizer's step comes after the all-reduce, or else after the last backward."""
    summed = times.ends(REDUCE)[:, 0]
    for s, start in enumerate(times.starts[UPDATE][:, 0]):
        if not np.isnan(summed[s]):
            before, end = _text(REDUCE, s, 0), float(summed[s])
        else:
            m = int(times.done[s].argmax())
            kind = B if np.isnan(times.starts[W][s, m]) else W
            before, end = _text(kind, s, m), float(times.done[s, m])
        if start < end - times.tolerance:
            yield _too_early(_text(UPDATE, s, 0), start, before, end)


def _too_early(after: str, start: float, before: str, end: float) -> Violation:
    return Violation(
        "dependency", after, f"starts at {start:.9g} s, {before} ends only at {end:.9g} s"
    )


def _overlaps(times: _Times) -> Iterator[Violation]:
    """One computation at a time on a device, one transfer in either direction on a channel."""
    for turns, names in devices_by_turns(times.stages).items():
        rows: list[Row] = [(kind, turn) for turn in turns for kind in COMPUTE]
        rows += [(UPDATE, (s, 0, 1)) for s, _, _ in turns]
        yield from _overlap(times, f"device {names[0]}", rows)
    yield from _host_overlaps(times)
    if times.schedule is not None:
        yield from _link_overlaps(times)
        return
    yield from _reduction_overlaps(times)
    for s in range(len(times.stages) - 1):
        for first, cycle in _channels(times.stages, s, times.problem.microbatches):
            ends = (times.stages[s + side].runners(first)[0] for side in (0, 1))
            name = f"channel {s}-{s + 1} of {' and '.join(ends)}"
            rows = [(SEND_F, (s, first, cycle)), (SEND_B, (s + 1, first, cycle))]
            yield from _overlap(times, name, rows)


def _reduction_overlaps(times: _Times) -> Iterator[Violation]:
    """A device takes part in one all-reduce at a time."""
    for turns, names in devices_by_turns(times.stages).items():
        rows = [(REDUCE, (s, 0, 1)) for s, _, _ in turns]
        yield from _overlap(times, f"all-reduces on device {names[0]}", rows)


def _host_overlaps(times: _Times) -> Iterator[Violation]:
    """A device writes one microbatch's activations to the host at a time, and reads one."""
    for turns, names in devices_by_turns(times.stages).items():
        for end, place in ((0, "to"), (1, "from")):
            parts = [_host_times(times, turn)[end] for turn in turns if _offloads(times, turn)]
            if not parts:
                continue
            starts, ends = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
            order = np.argsort(starts)
            starts, ends = starts[order], np.maximum.accumulate(ends[order])
            for i in np.flatnonzero(starts[1:] < ends[:-1] - times.tolerance):
                yield Violation(
                    "overlap",
                    f"link {place} the host of device {names[0]}",
                    f"activations follow at {starts[i + 1]:.9g} s, it is taken until "
                    f"{ends[i]:.9g} s",
                )


def _offloads(times: _Times, turn: Turn) -> bool:
    return times.stages[turn[0]].offload


def _host_times(times: _Times, turn: Turn) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
    """When a turn's activations go to the host, behind F, and come back, for B or I to begin."""
    s, first, step = turn
    every = (s, slice(first, None, step))
    devices = [times.problem.cluster.index[name] for name in times.stages[s].runners(first)]
    seconds = times.problem.offload_seconds(*times.stages[s].layers, devices)
    assert seconds is not None  # part of the plan's structure
    written = times.ends(F)[every]
    needed = np.fmin(times.starts[B][every], times.starts[I][every])
    return (written, written + seconds), (needed - seconds, needed)


def _link_overlaps(times: _Times) -> Iterator[Violation]:
    """In a periodic plan all transfers between two groups of devices share one link."""
    links: defaultdict[tuple[tuple[str, ...], ...], list[Row]] = defaultdict(list)
    for s, (one, other) in enumerate(pairwise(times.stages)):
        if one.devices != other.devices:
            ends = tuple(sorted((one.devices, other.devices)))
            links[ends] += [(SEND_F, (s, 0, 1)), (SEND_B, (s + 1, 0, 1))]
    for ends, rows in links.items():
        yield from _overlap(times, f"link of {' and '.join(names[0] for names in ends)}", rows)


def _overlap(times: _Times, name: str, rows: Sequence[Row]) -> Iterator[Violation]:
    """Overlaps among ``rows``, which share a resource."""
    starts = np.concatenate([times.starts[kind][s, m::step] for kind, (s, m, step) in rows])
    ends = np.concatenate([times.ends(kind)[s, m::step] for kind, (s, m, step) in rows])
    # What takes no time may begin with what takes some, or end with it, in whichever order.
    lasting = np.flatnonzero(ends > starts)  # not NaN
    order = lasting[np.lexsort((ends[lasting], starts[lasting]))]
    begins, busy_until = starts[order], np.maximum.accumulate(ends[order])
    late = np.flatnonzero(begins[1:] < busy_until[:-1] - times.tolerance)
    found = [(order[i + 1], busy_until[i]) for i in late]
    instants = np.flatnonzero(ends == starts)
    before = np.searchsorted(begins, starts[instants] - times.tolerance) - 1
    found += [
        (i, busy_until[k])
        for i, k in zip(instants, before, strict=True)
        if k >= 0 and starts[i] < busy_until[k] - times.tolerance
    ]
    texts = _texts(rows, times.problem.microbatches) if found else []
    for i, until in found:
        yield Violation(
            "overlap",
            name,
            f"{texts[i]} starts at {starts[i]:.9g} s, it is taken until {until:.9g} s",
        )


def _texts(rows: Sequence[Row], microbatches: int) -> list[str]:
    """The actions of ``rows``, one row after the other."""
    return [
        _text(kind, s, m)
        for kind, (s, first, step) in rows
        for m in range(first, 1 if kind in BARE else microbatches, step)
    ]


def _memory_exceeded(times: _Times) -> Iterator[Violation]:
    """Every device holds at its peak what the plan asks of it."""
    problem = times.problem
    for name, static, saved in _peaks(times):
        memory = float(problem.memory_bytes[problem.cluster.index[name]])
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
    """Per used device the static bytes, and the most that comes on top at any instant."""
    for turns, names in devices_by_turns(times.stages).items():
        static = sum(_static_bytes(times, s) for s, _, _ in turns)
        most = _most_bytes([each for turn in turns for each in _kept(times, turn)], times.tolerance)
        for name in names:
            yield name, static, most


def _static_bytes(times: _Times, s: int) -> float:
    """What a device of stage s holds all the time."""
    stage = times.stages[s]
    static = times.problem.static_bytes(*stage.layers, len(stage.runners(0)))
    if times.weights == "double-buffer":
        static += times.problem.gradient_bytes(*stage.layers)
    if times.schedule is not None and keeps_gradients(times.problem, len(stage.devices)):
        # One gradient grows while the one before is summed up, or waits for a pause.
        static += times.problem.gradient_bytes(*stage.layers)
    return static


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """The same bytes in each of some intervals of time; NaN stands for an interval that is not."""

    starts: Floats
    ends: Floats
    bytes: float


def _kept(times: _Times, turn: Turn) -> Iterator[_Kept]:
    """What a device keeps for its microbatches of a stage, beside the static bytes.

    What a stage recomputes it keeps from the start of B, or of I, to the end of the backward; with
    the input of every layer at hand, B needs no more than one layer's at a time.
    """
    s, first, step = turn
    every = (s, slice(first, None, step))
    start, stop = times.stages[s].layers
    shares = len(times.stages[s].runners(0))
    saved = times.problem.saved_bytes(start, stop, shares)
    inputs = times.problem.inputs_per_layer(shares)[start:stop]
    forward, done = times.starts[F][every], times.done[every]
    if updates_every_round(times.weights):
        yield _old_versions(times, s)
    if times.stages[s].offload:
        (_, written), (read, _) = _host_times(times, turn)
        yield _Kept(forward, written, saved)
        yield _Kept(read, done, saved)
        return
    if times.stages[s].recompute == "none":
        yield _Kept(forward, done, saved)
        return
    layerwise = times.stages[s].recompute == "layer"
    largest = float(times.problem.saved_per_layer(shares)[start:stop].max())
    yield _Kept(forward, done, float(inputs.sum() if layerwise else inputs[0]))
    yield _Kept(times.starts[B][every], done, largest if layerwise else saved)
    yield _Kept(times.starts[I][every], done, saved)


def _old_versions(times: _Times, s: int) -> _Kept:
    """Versions of a stage's weights beside the newest: from the next update to their last use.

    Version k is there after k updates, one at the end of every backward. A microbatch uses the
    newest at the start of its forward, or with vertical sync at that of its first forward.
    """
    leader = 0 if times.weights == "stash+vertical-sync" else s
    updates = np.sort(times.done[s])
    leaders_updates = np.sort(times.done[leader])
    started = times.starts[F][leader] + times.tolerance
    version = np.searchsorted(leaders_updates, started, side="right")
    last_use = np.full(len(updates) + 1, -math.inf)
    np.maximum.at(last_use, version, times.done[s])
    return _Kept(updates, last_use[:-1], times.problem.gradient_bytes(*times.stages[s].layers))


def _most_bytes(kept: Sequence[_Kept], tolerance: float) -> float:
    """The most bytes at any instant; they grow only where an interval starts.

    Intervals are counted and not added up, so that no rounding hides the last byte.
    """
    instants = np.concatenate([each.starts for each in kept])
    instants = instants[~np.isnan(instants)]
    total = np.zeros(len(instants))
    for each in kept:
        gone = np.maximum(each.ends - tolerance, each.starts)
        count = np.searchsorted(np.sort(each.starts), instants, side="right")
        count -= np.searchsorted(np.sort(gone), instants, side="right")
        total += count * each.bytes
    return float(total.max(initial=0.0))


def _predict(times: _Times) -> Predicted:
    devices = len({name for stage in times.stages for name in stage.devices})
    shares = np.array([len(stage.runners(0)) for stage in times.stages])
    busy = float(shares @ sum(np.nansum(times.durations[kind], axis=1) for kind in COMPUTE))
    problem = replace(times.problem, microbatches=times.iteration_microbatches)
    busy *= problem.microbatches / times.problem.microbatches
    every = np.array([len(stage.devices) for stage in times.stages])
    busy += float(every @ np.nansum(times.durations[UPDATE], axis=1))
    cost = times.cost_seconds
    return Predicted(
        iteration_seconds=cost,
        bubble=1 - busy / (devices * cost) if cost > 0 else 0.0,
        peak_memory_bytes={name: static + saved for name, static, saved in _peaks(times)},
        link_bytes=_link_bytes(problem, times.stages),
    )


def _link_bytes(problem: PipelineProblem, stages: Sequence[Stage]) -> dict[str, float]:
    """Bytes per iteration between neighbouring stages ("0-1"), and reduced in a stage ("0")."""
    # What is sent crosses a boundary twice: a microbatch's activations, and their gradient.
    sent = [sum(_sent(stages, s, problem.microbatches)) for s in range(len(stages) - 1)]
    crossing = {
        f"{s}-{s + 1}": 2 * count * problem.boundary_bytes(stages[s].layers[1])
        for s, count in enumerate(sent)
        if count > 0
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


def _broken_certificate(times: _Times, plan: PipelinePlan) -> Iterator[Violation]:
    """The certificate speaks of this plan's cost, and its arithmetic is right."""
    if plan.certificate is None:
        return
    for place, message in faults(
        plan.certificate, class_of(plan), times.cost_seconds, times.tolerance
    ):
        yield Violation("certificate", f"certificate.{place}", message)


def _text(kind: ActionKind, stage: int, microbatch: int) -> str:
    return str(Action(stage, kind, None if kind in BARE else microbatch))


def _largest(values: Floats) -> float:
    """The largest of ``values`` that is a number; 0 if none is."""
    return float(np.max(values, initial=0.0, where=~np.isnan(values)))
