"""Periodic plans and least periods, straight from the definitions (MadPipe, sections 3 and 4.1).

Nothing here shares code with the checker, a planner or a scheduler: a pattern is written out period
after period and every occurrence is looked at; least periods are enumerations. Only the problem's
own cost model (seconds and bytes) is taken from the library.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from math import ceil, floor, inf, isclose
from typing import NamedTuple

from stagewright.formulations.patterns.pattern import Pattern, PatternProblem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import (
    PeriodicAction,
    PeriodicSchedule,
    PipelinePlan,
    Predicted,
    Stage,
)
from stagewright.graphs.models.chain import Layer

Key = tuple[int, str]  # stage and kind: (2, "SEND_F")
TOLERANCE = 1e-9  # of an iteration's seconds
BYTE = 1e-3  # rounding of sums of bytes


# --- A pattern, written out ------------------------------------------------------------------


class Op(NamedTuple):
    """An operation: when it is done for microbatch 0, how long it takes, what it keeps busy."""

    start: float
    seconds: float
    resources: tuple[object, ...] = ()


class Load(NamedTuple):
    """What a stage keeps on a device: per microbatch in flight, and while its backward runs.

    And for every old version of its weights, where they change after every microbatch.
    """

    stage: int
    saved: float
    working: float
    version: float = 0.0


@dataclass
class Line:
    """A pattern as plain data; ``memory`` is per device its room in bytes and its stages' loads."""

    period: float
    microbatches: int
    stages: int
    ops: dict[Key, Op]
    memory: dict[object, tuple[float, list[Load]]] = field(default_factory=dict)
    pause: float = 0.0
    updates: dict[object, float] = field(default_factory=dict)  # seconds per device and iteration
    weights: str = "double-buffer"

    @property
    def stashes(self) -> bool:
        return self.weights.startswith("stash")

    @property
    def tolerance(self) -> float:
        return TOLERANCE * self.period * self.microbatches

    @property
    def count(self) -> int:
        """Microbatches until all that can be at one time is there, and two iterations more."""
        starts = [op.start for op in self.ops.values()]
        ends = [op.start + op.seconds for op in self.ops.values()]
        span = ceil((max(ends) - min(starts)) / self.period)
        # The first ones use one version; then versions are kept for those on the first stage.
        return span * (4 if self.stashes else 1) + 2 * self.microbatches + 4

    def backward(self, stage: int) -> tuple[Key, Key]:
        """The first and the last part of a stage's backward."""
        whole = (stage, "B")
        return (whole, whole) if whole in self.ops else ((stage, "I"), (stage, "W"))

    @property
    def iteration(self) -> float:
        return self.microbatches * self.period + self.pause

    def in_run(self, key: Key, k: int) -> tuple[float, float]:
        """Begin and end in a run, where a pause goes before every iteration's first period."""
        begin = self.begin(key, k)
        gone = 0
        while (gone + 1) * self.microbatches * self.period <= begin + self.tolerance:
            gone += 1
        begin += gone * self.pause
        return begin, begin + self.ops[key].seconds

    def begin(self, key: Key, k: int) -> float:
        return self.ops[key].start + k * self.period

    def end(self, key: Key, k: int) -> float:
        return self.begin(key, k) + self.ops[key].seconds


def faults(line: Line) -> list[str]:
    """Everything that the pattern does wrong when it is repeated."""
    times = [*_early(line), *_at_once(line), *_reduced_at_once(line)]
    if line.stashes:
        return [*times, *_too_much(line), *_too_late(line)]
    return [*times, *_too_much(line), *_overwritten(line), *_hurried(line)]


def chain_of(stages: int, ops: Mapping[Key, object]) -> list[Key]:
    """What is done for a microbatch one after the other; transfers where there are any."""
    there = [key for s in range(stages) for key in ((s, "F"), (s, "SEND_F"))]
    kinds = ("B", "I", "SEND_B")
    back = [(s, kind) for s in reversed(range(stages)) for kind in kinds]
    return [key for key in there + back if key in ops]


def _early(line: Line) -> Iterator[str]:
    links = list(pairwise(chain_of(line.stages, line.ops)))
    links += [(line.backward(s)[1], (s, kind)) for s, kind in line.ops if kind == "REDUCE_GRAD"]
    links += [((s, "I"), (s, kind)) for s, kind in line.ops if kind == "W"]
    for before, after in links:
        for k in range(line.count):
            if line.begin(after, k) < line.end(before, k) - line.tolerance:
                yield f"dependency: {after} of microbatch {k} before the end of {before}"
                break


def _at_once(line: Line) -> Iterator[str]:
    repeated = {key: op for key, op in line.ops.items() if key[1] != "REDUCE_GRAD"}
    for resource in {name for op in repeated.values() for name in op.resources}:
        users = [key for key, op in repeated.items() if resource in op.resources]
        spans = sorted(
            (line.begin(key, k), line.end(key, k), key, k)
            for key in users
            for k in range(line.count)
        )
        for one, other in pairwise(spans):
            if other[0] < one[1] - line.tolerance:
                yield f"overlap: {one[2:]} and {other[2:]} on {resource}"
                break


def _reduced_at_once(line: Line) -> Iterator[str]:
    """Every device takes part in one all-reduce at a time, of whatever iterations they are."""
    sums = {key: op for key, op in line.ops.items() if key[1] == "REDUCE_GRAD" and op.seconds > 0}
    for device in {name for op in sums.values() for name in op.resources}:
        spans = sorted(
            (*line.in_run(key, (i + 1) * line.microbatches - 1), key)
            for key, op in sums.items()
            if device in op.resources
            for i in range(line.count // line.microbatches)
        )
        for one, other in pairwise(spans):
            if other[0] < one[1] - line.tolerance:
                yield f"overlap: {one[2]} and {other[2]} on {device}"
                break


def held(line: Line, load: Load, instant: float) -> float:
    """Bytes that a stage keeps for its microbatches just behind ``instant``."""
    now, total = instant + line.tolerance, 0.0
    first, last = line.backward(load.stage)
    for k in range(line.count):
        if now <= line.end(last, k):
            total += load.saved * (line.begin((load.stage, "F"), k) <= now)
            total += load.working * (line.begin(first, k) <= now)
    return total + load.version * (len(old_versions(line, load.stage, now)) if load.version else 0)


def old_versions(line: Line, stage: int, now: float) -> set[int]:
    """The versions that a microbatch needs whose backward has not ended; the newest is not old.

    Version v is that after v updates, one at the end of every backward.
    """
    last, every = line.backward(stage)[1], range(line.count)
    updates = sum(line.end(last, k) < now for k in every)
    left = [k for k in every if line.end(last, k) >= now]
    used = {version_used(line, stage, k) for k in left}
    return {version for version in used if version < updates}


def version_used(line: Line, stage: int, microbatch: int) -> int:
    """The updates that are done as the forward begins, here or with vertical sync on stage 0."""
    leader = 0 if line.weights == "stash+vertical-sync" else stage
    begin, last = line.begin((leader, "F"), microbatch) + line.tolerance, line.backward(leader)[1]
    return sum(line.end(last, k) < begin for k in range(line.count))


def peak(line: Line, device: object) -> float:
    """The most that ``device`` keeps for its microbatches; it grows only as something begins."""
    loads = line.memory[device][1]
    begins = [
        line.begin(key, k)
        for load in loads
        for key in ((load.stage, "F"), line.backward(load.stage)[0])
        for k in range(line.count)
    ]
    if line.stashes:  # an update makes a version as a backward ends
        begins += [
            line.end(line.backward(load.stage)[1], k) for load in loads for k in range(line.count)
        ]
    return max(sum(held(line, load, instant) for load in loads) for instant in begins)


def in_flight(line: Line, stage: int) -> int:
    """The most microbatches that a stage keeps at a time."""
    load = Load(stage, 1.0, 0.0)
    return int(max(held(line, load, line.begin((stage, "F"), k)) for k in range(line.count)))


def _too_much(line: Line) -> Iterator[str]:
    for device, (room, _) in line.memory.items():
        need = peak(line, device)
        if need > room + BYTE:
            yield f"memory: {device} keeps {need} bytes and has room for {room}"


def _overwritten(line: Line) -> Iterator[str]:
    """Iteration i reads W(i-1), its update makes W(i+1); two versions are there at a time.

    So the update of iteration i, after all its gradients were used and reduced, must come before
    iteration i + 2, which reads W(i+1), begins; in a whole pause, if there are any.
    """
    m = line.microbatches
    for s in range(line.stages):
        before = [key for key in (line.backward(s)[1], (s, "REDUCE_GRAD")) if key in line.ops]
        for i in range(2):
            ready = max(line.in_run(key, (i + 1) * m - 1)[1] for key in before)
            needed = line.in_run((s, "F"), (i + 2) * m)[0]
            if line.pause > 0:
                length = line.iteration
                pauses = [(n * length - line.pause, n * length) for n in range(1, line.count)]
            else:
                pauses = [(needed, needed)]
            slack = line.tolerance
            if not any(ready <= a + slack and b <= needed + slack for a, b in pauses):
                yield f"versions: stage {s}, iteration {i + 2} begins before update {i}"
                break


def _too_late(line: Line) -> Iterator[str]:
    """Nothing waits in a pause, and nothing for more periods than there are operations."""
    if line.pause > 0:
        yield f"pause: {line.pause}"
    for key, op in line.ops.items():
        if floor(op.start / line.period + TOLERANCE) > 10 * line.stages:
            yield f"versions: {key} comes after {op.start / line.period} periods"


def _hurried(line: Line) -> Iterator[str]:
    """The updates of a device, one after another, have time in a pause."""
    for device, seconds in line.updates.items():
        if seconds > line.pause + line.tolerance:
            yield f"pause: {device} needs {seconds}"


# --- Plans -----------------------------------------------------------------------------------


class Expected(NamedTuple):
    """What a plan must say of an operation, apart from when it begins."""

    devices: tuple[str, ...]
    seconds: float
    resources: tuple[object, ...] = ()
    sources: tuple[str, ...] | None = None
    targets: tuple[str, ...] | None = None
    bytes: float | None = None


def naive_check(problem: PipelineProblem, plan: PipelinePlan) -> list[str]:
    """Every fault of a periodic plan, none if it is valid.

    Certificates are not read, and no stage may offload.
    """
    found = [*_wrong_frame(problem, plan)]
    if found:
        return found
    schedule = plan.schedule
    assert isinstance(schedule, PeriodicSchedule)
    expected = expected_ops(problem, plan.stages, split_stages(plan), plan.weights)
    found = [*_wrong_actions(expected, schedule.actions)]
    if found:
        return found
    line = line_of(problem, plan)
    found = [*_wrong_times(expected, schedule, line.tolerance), *faults(line)]
    if plan.predicted is not None and not _agree(plan.predicted, figures(problem, plan)):
        found.append("predicted: the figures are not those of the plan")
    return found


def _wrong_frame(problem: PipelineProblem, plan: PipelinePlan) -> Iterator[str]:
    if plan.digest != problem.digest or plan.microbatches != problem.microbatches:
        yield "digest: the plan answers another problem"
    if plan.weights == "flush":
        yield "weights: one version does not go with a pipeline that never drains"
    bounds = [0, *(stage.layers[1] for stage in plan.stages)]
    if [stage.layers[0] for stage in plan.stages] != bounds[:-1]:
        yield "layers: a stage does not begin where the one before ends"
    if bounds[-1] != len(problem.chain):
        yield "layers: the stages do not end with the model"
    for stage in plan.stages:
        known = set(stage.devices) <= set(problem.cluster.index)
        if not known or len(set(stage.devices)) < len(stage.devices):
            yield f"devices: {stage.devices}"
        if stage.replication == "round-robin" and len(stage.devices) > 1:
            yield "replication: a pattern is the same for every microbatch"


def _positions(problem: PipelineProblem, stage: Stage) -> list[int]:
    return [problem.cluster.index[name] for name in stage.devices]


def split_stages(plan: PipelinePlan) -> set[int]:
    """Stages whose backward stands as I and W, if only one of them is there."""
    schedule = plan.schedule
    assert isinstance(schedule, PeriodicSchedule)
    names = {one.action for one in schedule.actions}
    return {s for s in range(len(plan.stages)) if names & {f"{s}I", f"{s}W"}}


def _computed(problem: PipelineProblem, stage: Stage, split: bool) -> dict[str, float]:
    """Seconds of a stage's computations; what is forgotten is computed again for the gradient."""
    where = (*stage.layers, _positions(problem, stage))
    forward, backward = problem.compute_seconds(*where)
    again = 0.0 if stage.recompute == "none" else forward
    if not split:
        return {"F": forward, "B": backward + again}
    of_input, of_weights = problem.gradient_seconds(*where)
    return {"F": forward, "I": of_input + again, "W": of_weights}


def expected_ops(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    split: Collection[int] = (),
    weights: str = "double-buffer",
) -> dict[Key, Expected]:
    """Every operation of a pattern of ``stages``; the backwards of ``split`` stand as I and W.

    Weights that change after every microbatch are summed up and updated as their backward ends.
    """
    ops = {}
    for s, stage in enumerate(stages):
        computed = _computed(problem, stage, s in split)
        seconds = 0.0
        if len(stage.devices) > 1:
            seconds = problem.reduce_seconds(*stage.layers, _positions(problem, stage))
        if weights.startswith("stash"):
            computed["W" if s in split else "B"] += seconds + _updated(problem, stage)
        for kind, lasting in computed.items():
            ops[s, kind] = Expected(stage.devices, lasting, stage.devices)
        if len(stage.devices) > 1 and not weights.startswith("stash"):
            size = sum(problem.chain.layers[i].parameter_bytes for i in range(*stage.layers))
            ops[s, "REDUCE_GRAD"] = Expected(
                stage.devices[:1], seconds, stage.devices, stage.devices, stage.devices, size
            )
    for s, (left, right) in enumerate(pairwise(stages)):
        if left.devices != right.devices:
            cut, link = left.layers[1], (frozenset({left.devices, right.devices}),)
            size = problem.boundary_bytes(cut)
            there, back = problem.transfer_seconds(
                cut, _positions(problem, left), _positions(problem, right)
            )
            one, other = left.devices, right.devices
            ops[s, "SEND_F"] = Expected(one[:1], there, link, one, other, size)
            ops[s + 1, "SEND_B"] = Expected(other[:1], back, link, other, one, size)
    return ops


def _spelled(key: Key) -> str:
    return f"{key[0]}{key[1]}"


def _wrong_actions(
    expected: Mapping[Key, Expected], actions: Sequence[PeriodicAction]
) -> Iterator[str]:
    wanted = Counter((_spelled(key), name) for key, op in expected.items() for name in op.devices)
    present = Counter((one.action, one.device) for one in actions)
    yield from (f"missing: {one}" for one in wanted - present)
    yield from (f"unexpected: {one}" for one in present - wanted)
    by_name = {_spelled(key): op for key, op in expected.items()}
    for one in actions:
        op = by_name.get(one.action)
        if op is not None and (one.sources, one.targets) != (op.sources, op.targets):
            yield f"endpoints: {one}"
        if op is not None and not _same(one.bytes, op.bytes):
            yield f"bytes: {one}"


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return isclose(one, other, rel_tol=1e-9, abs_tol=BYTE)


def _wrong_times(
    expected: Mapping[Key, Expected], schedule: PeriodicSchedule, tolerance: float
) -> Iterator[str]:
    for key, op in expected.items():
        mine = [one for one in schedule.actions if one.action == _spelled(key)]
        if any(abs(one.seconds - op.seconds) > tolerance for one in mine):
            yield f"duration: {key}"
        starts = [one.shift * schedule.period_seconds + one.start_seconds for one in mine]
        if max(starts) - min(starts) > tolerance:
            yield f"replicas: {key}"


def line_of(problem: PipelineProblem, plan: PipelinePlan) -> Line:
    """The pattern of a plan that has every action once."""
    schedule = plan.schedule
    assert isinstance(schedule, PeriodicSchedule)
    period, split = schedule.period_seconds, split_stages(plan)
    ops = {}
    for key, op in expected_ops(problem, plan.stages, split, plan.weights).items():
        one = next(entry for entry in schedule.actions if entry.action == _spelled(key))
        ops[key] = Op(one.shift * period + one.start_seconds, one.seconds, op.resources)
    devices = {name for stage in plan.stages for name in stage.devices}
    memory: dict[object, tuple[float, list[Load]]] = {
        name: _memory(problem, plan.stages, name, split, plan.weights) for name in devices
    }
    updates = {name: update_seconds(problem, plan.stages, name) for name in devices}
    pause, m = schedule.pause_seconds, plan.microbatches
    return Line(period, m, len(plan.stages), ops, memory, pause, updates, plan.weights)


def update_seconds(problem: PipelineProblem, stages: Sequence[Stage], device: str) -> float:
    """What a device takes for its updates."""
    return sum(_updated(problem, stage) for stage in stages if device in stage.devices)


def _updated(problem: PipelineProblem, stage: Stage) -> float:
    """What an update takes: the slowest kind of the stage's devices decides."""
    kinds = {problem.cluster.devices[v].kind for v in _positions(problem, stage)}
    layers = problem.chain.layers[slice(*stage.layers)]
    return max(sum(_update(layer, kind) for layer in layers) for kind in kinds)


def _update(layer: Layer, kind: str) -> float:
    costs = [cost for cost in layer.costs if cost.device_kind in (kind, None)]
    own = [cost for cost in costs if cost.device_kind == kind]
    return (own or costs)[0].update_seconds or 0.0


def _memory(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    device: str,
    split: Collection[int],
    weights: str,
) -> tuple[float, list[Load]]:
    """Room and loads of a device, whose stages' static bytes are taken from the room."""
    room = problem.cluster.devices[problem.cluster.index[device]].memory_bytes
    loads = []
    for s, stage in enumerate(stages):
        if device in stage.devices:
            room -= static(problem, stage, weights)
            version = _weights(problem, stage) if weights.startswith("stash") else 0.0
            loads.append(Load(s, *_saved(problem, stage, s in split), version))
    return room, loads


def _weights(problem: PipelineProblem, stage: Stage) -> float:
    return sum(layer.parameter_bytes for layer in problem.chain.layers[slice(*stage.layers)])


def static(problem: PipelineProblem, stage: Stage, weights: str = "double-buffer") -> float:
    """Two versions, the gradient (two where one is reduced as the next grows), states, buffers.

    One of each where weights change after every microbatch.
    """
    (start, stop), replicas = stage.layers, len(stage.devices)
    updated = any(cost.update_seconds for layer in problem.chain.layers for cost in layer.costs)
    copies = 2 + problem.chain.optimizer_bytes_per_parameter_byte
    copies += 0 if weights.startswith("stash") else 1 + (replicas > 1 or updated)
    share = ceil(problem.chain.microbatch_size / replicas) / problem.chain.microbatch_size
    before = problem.boundary_bytes(start) if start > 0 else 0.0
    behind = problem.boundary_bytes(stop) if stop < len(problem.chain) else 0.0
    return copies * _weights(problem, stage) + 2 * (before + behind) * share


def _saved(problem: PipelineProblem, stage: Stage, split: bool = False) -> tuple[float, float]:
    """Bytes per microbatch in flight, and besides while its backward runs.

    A whole backward computes one layer after the other again; W needs what I has computed of all.
    """
    (start, stop), replicas = stage.layers, len(stage.devices)
    layers = [float(problem.saved_per_layer(replicas)[i]) for i in range(start, stop)]
    inputs = [float(problem.inputs_per_layer(replicas)[i]) for i in range(start, stop)]
    return {
        "none": (sum(layers), 0.0),
        "full": (inputs[0], sum(layers)),
        "layer": (sum(inputs), sum(layers) if split else max(layers)),
    }[stage.recompute]


def figures(problem: PipelineProblem, plan: PipelinePlan) -> Predicted:
    """What a valid plan's figures are: per iteration, m periods and a pause."""
    line = line_of(problem, plan)
    seconds = line.iteration
    busy = {
        name: 0.0 if line.stashes else line.updates[name]
        for stage in plan.stages
        for name in stage.devices
    }
    links: dict[str, float] = {}
    for s, stage in enumerate(plan.stages):
        if len(stage.devices) > 1:
            sums = plan.microbatches if line.stashes else 1
            links[f"{s}"] = sums * _weights(problem, stage)
    expected = expected_ops(problem, plan.stages, split_stages(plan), plan.weights)
    for (s, kind), op in expected.items():
        size = op.bytes or 0.0
        if kind in "FBIW":
            for name in op.devices:
                busy[name] += plan.microbatches * op.seconds
        elif kind != "REDUCE_GRAD":
            pair = (s, s + 1) if kind == "SEND_F" else (s - 1, s)
            link = f"{pair[0]}-{pair[1]}"
            links[link] = links.get(link, 0.0) + plan.microbatches * size
    peaks = {}
    for name in busy:
        memory = problem.cluster.devices[problem.cluster.index[name]].memory_bytes
        peaks[name] = memory - line.memory[name][0] + peak(line, name)
    bubble = 1 - sum(busy.values()) / (len(busy) * seconds)
    return Predicted(seconds, bubble, peaks, links)


def _agree(one: Predicted, other: Predicted) -> bool:
    tables = ("peak_memory_bytes", "link_bytes")
    return (
        isclose(one.iteration_seconds, other.iteration_seconds, rel_tol=1e-9)
        and isclose(one.bubble, other.bubble, rel_tol=1e-9, abs_tol=1e-9)
        and all(getattr(one, name).keys() == getattr(other, name).keys() for name in tables)
        and all(
            _same(value, getattr(other, name)[key])
            for name in tables
            for key, value in getattr(one, name).items()
        )
    )


# --- The scheduling problem ------------------------------------------------------------------


def pattern_line(problem: PatternProblem, pattern: Pattern) -> Line:
    """A pattern of a :class:`PatternProblem`; all-reduces begin as it says, or as B ends."""
    starts = {
        (job.operation.stage, str(job.operation.kind)): start
        for job, start in zip(problem.jobs, pattern.starts, strict=True)
    }
    for s, start in enumerate(problem.reduce_starts(pattern)):
        starts[s, "REDUCE_GRAD"] = start
    return _line(problem, pattern.period, starts)


def _line(problem: PatternProblem, period: float, starts: Mapping[Key, float]) -> Line:
    jobs, stages = route(problem), len(problem.devices)
    ops = {key: Op(starts[key], seconds, (where,)) for key, seconds, where in jobs}
    for s, seconds in enumerate(problem.reduce):
        if seconds > 0:
            start = starts.get((s, "REDUCE_GRAD"), sum(ops[s, "B"][:2]))
            ops[s, "REDUCE_GRAD"] = Op(start, seconds, (problem.devices[s],))
    memory: dict[object, tuple[float, list[Load]]] = {}
    for v, room in enumerate(problem.room_bytes):
        mine = [s for s in range(stages) if problem.devices[s] == v]
        kept = [(s, problem.kept[s]) for s in mine]
        versions = problem.version_bytes or (0.0,) * stages
        memory[v] = (
            room,
            [Load(s, one.saved_bytes, one.working_bytes, versions[s]) for s, one in kept],
        )
    weights = "double-buffer"
    if problem.version_bytes:
        weights = "stash+vertical-sync" if problem.follows_first_stage else "stash"
    m, pause = problem.microbatches, problem.pause_seconds
    return Line(period, m, stages, ops, memory, pause, weights=weights)


class Timed(NamedTuple):
    """An operation, its seconds, and its device or the pair of devices whose link it takes."""

    key: Key
    seconds: float
    resource: object


def route(problem: PatternProblem) -> list[Timed]:
    """The operations of a microbatch in their order."""
    devices = problem.devices
    jobs = {}
    for s, (forward, backward) in enumerate(zip(problem.forward, problem.backward, strict=True)):
        jobs[s, "F"] = Timed((s, "F"), forward, devices[s])
        jobs[s, "B"] = Timed((s, "B"), backward, devices[s])
    for s, (there, back) in enumerate(zip(problem.there, problem.back, strict=True)):
        link = frozenset(devices[s : s + 2])
        if len(link) == 2:
            jobs[s, "SEND_F"] = Timed((s, "SEND_F"), there, link)
            jobs[s + 1, "SEND_B"] = Timed((s + 1, "SEND_B"), back, link)
    return [jobs[key] for key in chain_of(len(devices), jobs)]


Edge = tuple[int, int, float, int]  # (a, b, d, h): start b - start a >= d + h T


class Enumeration:
    """The least period over all ways in which the jobs of each device and link take turns.

    For two jobs a, b (b later on the route) that exclude each other, b of microbatch 0 falls
    between a of some microbatch n and a of n + 1. All these n tell who follows whom on every
    resource, and how many microbatches are kept whenever something begins; the least period for
    given n is a greatest ratio of a cycle's seconds to its periods. No wait before an operation
    needs to be longer than a period: all that follows could be done a period earlier, at the same
    places of the pattern, with less to keep. So the n are finite in number. Where all-reduces take
    turns that would change their turns; but then all is done within the m + 1 periods of two
    versions. All-reduces count whole iterations, and leave a pause alone.
    """

    def __init__(self, problem: PatternProblem) -> None:
        assert min(*problem.forward, *problem.backward) > 0, "who comes first must be clear"
        self.problem = problem
        sums = [s for s, seconds in enumerate(problem.reduce) if seconds > 0]
        self.route = route(problem)
        self.jobs = [
            *self.route,
            *(
                Timed((s, "SUM"), problem.reduce[s], ("sums", problem.devices[s]))
                for s in sums
                if sum(problem.devices[r] == problem.devices[s] for r in sums) > 1
            ),
        ]
        self.at = {job.key: j for j, job in enumerate(self.jobs)}
        self.turns: dict[tuple[int, int], int] = {}
        self.best = inf
        loads = dict.fromkeys({job.resource for job in self.route}, 0.0)
        for job in self.route:
            loads[job.resource] += job.seconds
        reduced = dict.fromkeys(problem.devices, 0.0)
        for v, seconds in zip(problem.devices, problem.reduce, strict=True):
            reduced[v] += seconds / problem.microbatches
        self.load = max(*loads.values(), *reduced.values())
        self.eps = 1e-9 * self.load

    def least(self) -> float:
        pairs = [
            (i, j)
            for j, job in enumerate(self.jobs)
            for i in range(j)
            if self.jobs[i].resource == job.resource and self.jobs[i].seconds + job.seconds > 0
        ]
        edges = [*self._route_edges(), *self._version_edges()]
        self._branch(pairs, edges, self._least_of(edges, self.load))
        return self.best

    def _route_edges(self) -> Iterator[Edge]:
        for i, job in enumerate(self.route[:-1]):
            yield i, i + 1, job.seconds, 0
            if len(self.jobs) == len(self.route):
                yield i + 1, i, -job.seconds, -1

    def _version_edges(self) -> Iterator[Edge]:
        limit = -self.problem.microbatches - 1
        if self.problem.version_bytes:  # as many as are needed
            return
        for s, reduce in enumerate(self.problem.reduce):
            backward, forward = self.at[s, "B"], self.at[s, "F"]
            seconds = self.jobs[backward].seconds
            if self.problem.pause_seconds > 0:
                forward = 0
            if (s, "SUM") in self.at:
                yield backward, self.at[s, "SUM"], seconds, 0
                yield self.at[s, "SUM"], forward, reduce, limit
            else:
                yield backward, forward, seconds + reduce, limit

    def _branch(self, pairs: list[tuple[int, int]], edges: list[Edge], bound: float) -> None:
        if bound >= self.best - self.eps or not self._fits():
            return
        if not pairs:
            self.best = bound
            return
        (i, j), rest = pairs[0], pairs[1:]
        children = []
        m = self.problem.microbatches
        sums = i >= len(self.route)
        every = m if sums else 1
        turns = range(2 * (j - i)) if len(self.jobs) == len(self.route) else range(m + 1)
        for n in range(-2, 2) if sums else turns:
            more = [
                *edges,
                (i, j, self.jobs[i].seconds, n * every),
                (j, i, self.jobs[j].seconds, (-n - 1) * every),
            ]
            children.append((self._least_of(more, bound), n, more))
        for least, n, more in sorted(children, key=lambda child: child[:2]):
            self.turns[i, j] = n
            self._branch(rest, more, least)
            del self.turns[i, j]

    def _fits(self) -> bool:
        """Whether what is known of every device's turns leaves enough room."""
        stages = range(len(self.problem.devices))
        known = [s for s in stages if (self.at[s, "F"], self.at[s, "B"]) in self.turns]
        for v, room in enumerate(self.problem.room_bytes):
            mine = [s for s in known if self.problem.devices[s] == v]
            begins = [self.at[s, kind] for s in mine for kind in "FB"]
            room -= sum(self._old_versions(s, known) for s in mine)
            if any(self._kept(mine, begun) > room + BYTE for begun in begins):
                return False
        return True

    def _old_versions(self, stage: int, known: Collection[int]) -> float:
        """Bytes of a stage's old versions, always.

        Of the microbatches in flight on a stage as a forward has begun all but that one use an old
        version, each another: there is one update between two forwards. With vertical sync it is
        those on the first stage.
        """
        leader = 0 if self.problem.follows_first_stage else stage
        if not self.problem.version_bytes or leader not in known:
            return 0.0
        ended = self._latest(self.at[leader, "B"], self.at[leader, "F"])
        assert ended is not None
        return self.problem.version_bytes[stage] * (-ended - 1)

    def _kept(self, stages: Sequence[int], begun: int) -> float:
        """At least so much is kept as ``begun`` begins; stages not yet placed do not count."""
        total = 0.0
        for s in stages:
            forward, backward = self.at[s, "F"], self.at[s, "B"]
            begins, ends = self._latest(forward, begun), self._latest(backward, begun)
            if begins is None or ends is None:
                continue
            running = begun == backward
            total += self.problem.kept[s].saved_bytes * (begins - ends + running)
            total += self.problem.kept[s].working_bytes * running
        return total

    def _latest(self, job: int, begun: int) -> int | None:
        """The last microbatch whose ``job`` has begun when ``begun`` begins for microbatch 0."""
        if job == begun:
            return 0
        if job < begun:
            return self.turns.get((job, begun))
        later = self.turns.get((begun, job))
        return None if later is None else -later - 1

    def _least_of(self, edges: Sequence[Edge], least: float) -> float:
        """The least period that no cycle forbids, from ``least`` on; inf if there is none."""
        while (cycle := _rising_cycle(len(self.jobs), edges, least, self.eps)) is not None:
            periods = -sum(edge[3] for edge in cycle)
            if periods <= 0:
                return inf
            least = sum(edge[2] for edge in cycle) / periods
            if least >= self.best:
                return inf
        return least


def _rising_cycle(
    nodes: int, edges: Sequence[Edge], period: float, eps: float
) -> list[Edge] | None:
    """A cycle that asks an operation to begin later than itself, if there is one."""
    starts, why = [0.0] * nodes, [edges[0]] * nodes
    for _ in range(nodes + 1):
        moved = -1
        for edge in edges:
            a, b, seconds, periods = edge
            if starts[a] + seconds + periods * period > starts[b] + eps / nodes:
                starts[b] = starts[a] + seconds + periods * period
                why[b], moved = edge, b
        if moved < 0:
            return None
    for _ in range(nodes):
        moved = why[moved][0]
    cycle, node = [why[moved]], why[moved][0]
    while node != moved:
        cycle.append(why[node])
        node = why[node][0]
    return cycle


def brute_force_period(problem: PatternProblem) -> float:
    """The least period of any pattern of a few stages that all take time; inf if there is none."""
    return Enumeration(problem).least()


def first_free(
    busy: Sequence[tuple[float, float]], ready: float, seconds: float, period: float
) -> float | None:
    """The first time from ``ready`` on at which all of ``seconds`` is free in every period.

    ``busy`` are starts and seconds of what is there already.
    """
    for _ in range(2 * len(busy) + 1):
        for start, lasting in busy:
            behind = (ready - start) % period
            if behind < lasting - 1e-12:
                ready += lasting - behind
            elif period - behind < seconds - 1e-12:
                ready += period - behind + lasting
            else:
                continue
            break
        else:
            return ready if seconds <= period else None
    return None


# --- One stage per device (section 4.1) ------------------------------------------------------


def naive_groups(items: Sequence[float], period: float) -> list[int] | None:
    """The group of every item (stage or transfer, forth and back), from the last one backwards.

    None if an item alone takes longer than the period.
    """
    if max(items) > period * (1 + TOLERANCE):
        return None
    groups, total, group = [], 0.0, 1
    for item in reversed(items):
        total += item
        if total > period * (1 + TOLERANCE):
            total, group = item, group + 1
        groups.append(group)
    return groups[::-1]


def least_1f1b(items: Sequence[float], most: Sequence[float]) -> float:
    """The least period at which every item's group is at most ``most``; inf if there is none.

    Groups change only where the period is the sum of some consecutive items.
    """
    sums = [sum(items[i:j]) for i, j in combinations(range(len(items) + 1), 2)]
    for period in sorted(sums):
        groups = naive_groups(items, period)
        if groups is not None and all(g <= n for g, n in zip(groups, most, strict=True)):
            return period
    return inf


def brute_force_contiguous(problem: PipelineProblem, devices: int) -> float:
    """The least period over all partitions into at most ``devices`` stages; inf if there is none.

    Stage s is on the s-th device of the cluster alone.
    """
    layers = len(problem.chain)
    best = inf
    for count in range(1, min(layers, devices) + 1):
        for cuts in combinations(range(1, layers), count - 1):
            best = min(best, _contiguous(problem, [*pairwise((0, *cuts, layers))]))
    return best


def _contiguous(problem: PipelineProblem, parts: Sequence[tuple[int, int]]) -> float:
    items, most = [], []
    for s, (start, stop) in enumerate(parts):
        device = problem.cluster.devices[s]
        if s > 0:
            items.append(sum(problem.transfer_seconds(start, [s - 1], [s])))
            most.append(inf)
        items.append(sum(problem.compute_seconds(start, stop, [s])))
        stage = Stage((start, stop), (device.name,))
        saved, _ = _saved(problem, stage)
        room = device.memory_bytes - static(problem, stage)
        # A stage with g microbatches in flight needs g - 1 < (end B - begin F) / T <= m + 1.
        fitting = (inf if room >= 0 else -1) if saved == 0 else (room + BYTE) // saved
        most.append(min(fitting, problem.microbatches + 1))
    return least_1f1b(items, most)
