"""Valid plans for training tiny models, without a cost model: every action lasts one second.

A plan is made of its stages and, per device, the order of the computations. The times are those of
a list scheduler, so transfers come in the order in which they are ready.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice, pairwise, product
from math import lcm
from typing import Any

from hypothesis import strategies as st

from stagewright.formulations.patterns.pattern import Pattern, PatternProblem
from stagewright.formulations.plans.actions import (
    COMPUTE,
    Action,
    ActionKind,
    Weights,
    parse_action,
)
from stagewright.formulations.plans.memory import Kept
from stagewright.formulations.plans.plan import (
    Begins,
    PeriodicAction,
    PeriodicSchedule,
    PipelinePlan,
    Schedule,
    ScheduledAction,
    Stage,
)
from stagewright.formulations.plans.shards import stays
from stagewright.formulations.schedules.order import Order
from stagewright.formulations.schedules.published import one_f_one_b as schedules
from stagewright.formulations.schedules.published.kinds import Sizes, schedule_of
from stagewright.graphs.documents.errors import InvalidPlan

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
SEND_F, SEND_B = ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD
REDUCE = ActionKind.REDUCE

ALL_WEIGHTS: tuple[Weights, ...] = ("flush", "stash", "stash+vertical-sync", "double-buffer")
PERIODIC_WEIGHTS = ALL_WEIGHTS[1:]
Orders = Mapping[str, Sequence[Action]]

# --- From the order of the computations to a plan ---------------------------------------------


def plan_in_order(
    stages: Sequence[Stage],
    microbatches: int,
    orders: Orders,
    weights: Weights = "flush",
    begins: Begins = "forward",
) -> PipelinePlan:
    """The plan in which every device computes in the order given for it."""
    computations = {action for order in orders.values() for action in order}
    shared = _transfers_and_reductions(stages, microbatches)
    needs = NEEDS[begins]
    waiting = {action: needs(stages, action, computations) for action in (*computations, *shared)}
    queues = {device: list(order) for device, order in orders.items()}
    finish: dict[Action, float] = {}
    free: dict[object, float] = {}
    entries: list[ScheduledAction] = []

    def earliest(action: Action) -> float:
        ends = [free.get(resource, 0.0) for resource in _resources(stages, action)]
        return max([*ends, *(finish[need] for need in waiting[action])], default=0.0)

    def may_start(action: Action) -> bool:
        turn = action.kind not in COMPUTE or all(
            queues[device][0] == action for device in stages[action.stage].runners(_m(action))
        )
        return turn and finish.keys() >= waiting[action]

    while waiting:
        ready = filter(may_start, waiting)
        action = min(ready, key=lambda a: (earliest(a), a.kind not in COMPUTE, str(a)))
        start = earliest(action)
        finish[action] = start + 1.0
        del waiting[action]
        free |= dict.fromkeys(_resources(stages, action), finish[action])
        if action.kind in COMPUTE:
            for device in stages[action.stage].runners(_m(action)):
                queues[device].pop(0)
        entries += _entries(stages, action, start)
    schedule = Schedule(tuple(entries), begins)
    return PipelinePlan(
        "", "test", "test", "test", microbatches, tuple(stages), schedule, weights=weights
    )


def with_steps(plan: PipelinePlan, seconds: float = 0.0) -> PipelinePlan:
    """``plan`` with an optimizer's step as soon as each stage may do it, beside what is done."""
    ends: dict[int, float] = {}
    for entry in plan.actions:
        action = parse_action(entry.action)
        if action.kind in (B, W, REDUCE):
            ends[action.stage] = max(ends.get(action.stage, 0.0), entry.finish_seconds)
    steps = tuple(
        ScheduledAction(device, f"{s}UPDATE", ends[s], ends[s] + seconds)
        for s, stage in enumerate(plan.stages)
        for device in stage.devices
    )
    return replace(plan, schedule=replace(plan.schedule, actions=plan.actions + steps))


def even_samples(stages: Sequence[Stage]) -> int:
    """A number of samples per microbatch that every stage can divide evenly."""
    widths = [len(stage.runners(0)) for stage in stages]
    return lcm(*widths, *(a * b for a, b in pairwise(widths)))


def _transfers_and_reductions(stages: Sequence[Stage], microbatches: int) -> list[Action]:
    found = [Action(s, REDUCE) for s, stage in enumerate(stages) if stage.reduces]
    for s, m in product(range(len(stages) - 1), range(microbatches)):
        if not stays(stages[s], stages[s + 1], m):
            found += [Action(s, SEND_F, m), Action(s + 1, SEND_B, m)]
    return found


def _needs(stages: Sequence[Stage], action: Action, computations: set[Action]) -> set[Action]:
    """What must be done before ``action``; a whole backward counts as both of its parts."""
    s, m = action.stage, action.microbatch
    if action.kind is REDUCE:
        return {a for a in computations if a.stage == s and a.kind in (B, W)}
    assert m is not None
    if action.kind is F:
        needed = {_handed(stages, s - 1, s, SEND_F, m, F)} if s > 0 else set()
    elif action.kind is W:
        needed = {Action(s, I, m)}
    elif action.kind is SEND_F:
        needed = {Action(s, F, m)}
    elif action.kind is SEND_B:
        needed = {_input_gradient(s, m, computations)}
    else:
        needed = {Action(s, F, m)}
        if s < len(stages) - 1:
            kind = _input_gradient(s + 1, m, computations).kind
            needed |= {_handed(stages, s + 1, s, SEND_B, m, kind)}
    return needed


def _needs_between_losses(
    stages: Sequence[Stage], action: Action, computations: set[Action]
) -> set[Action]:
    """Backwards need no forward, which was before the loss; a forward needs its stage's update."""
    s, needed = action.stage, set(_needs(stages, action, computations))
    if action.kind in (B, I):
        needed.discard(Action(s, F, action.microbatch))
    elif action.kind is F:
        needed |= {a for a in computations if a.stage == s and a.kind in (B, W)}
        needed |= {Action(s, REDUCE)} if len(stages[s].devices) > 1 else set()
    return needed


NEEDS = {"forward": _needs, "backward": _needs_between_losses}


def _handed(
    stages: Sequence[Stage], source: int, target: int, send: ActionKind, m: int, made: ActionKind
) -> Action:
    """The transfer, or what makes the values where they stay on their devices."""
    kept = stays(stages[source], stages[target], m)
    return Action(source, made if kept else send, m)


def _input_gradient(s: int, m: int, computations: set[Action]) -> Action:
    return Action(s, B, m) if Action(s, B, m) in computations else Action(s, I, m)


def _resources(stages: Sequence[Stage], action: Action) -> Sequence[object]:
    """Devices, or the channel (one for both directions); all-reduces have their own."""
    if action.kind is REDUCE:
        return [action]
    runners = stages[action.stage].runners(_m(action))
    if action.kind in COMPUTE:
        return runners
    left = action.stage if action.kind is SEND_F else action.stage - 1
    return [tuple((left, *stages[s].runners(_m(action))) for s in (left, left + 1))]


def _entries(stages: Sequence[Stage], action: Action, start: float) -> list[ScheduledAction]:
    text, finish = str(action), start + 1.0
    if action.kind is REDUCE:
        group = stages[action.stage].devices
        return [ScheduledAction(group[0], text, start, finish, group, group, 0.0)]
    sources = stages[action.stage].runners(_m(action))
    if action.kind in COMPUTE:
        return [ScheduledAction(device, text, start, finish) for device in sources]
    neighbour = action.stage + (1 if action.kind is SEND_F else -1)
    targets = stages[neighbour].runners(_m(action))
    return [ScheduledAction(sources[0], text, start, finish, sources, targets, 0.0)]


def _m(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch


# --- Known schedules --------------------------------------------------------------------------


def straight(layers: Sequence[int]) -> list[Stage]:
    """Stages of so many layers each, on devices d0, d1, ... of their own."""
    stops = [sum(layers[: s + 1]) for s in range(len(layers))]
    return [
        Stage((stop - count, stop), (f"d{s}",))
        for s, (count, stop) in enumerate(zip(layers, stops, strict=True))
    ]


def gpipe(stages: Sequence[Stage], microbatches: int, weights: Weights = "flush") -> PipelinePlan:
    """All forwards, then all backwards, the last microbatch first (GPipe, figure 2c)."""

    def order(s: int) -> list[Action]:
        forwards = [Action(s, F, m) for m in range(microbatches)]
        return forwards + [Action(s, B, m) for m in reversed(range(microbatches))]

    return _per_stage(stages, microbatches, [order(s) for s in range(len(stages))], weights)


def fill_and_drain(stages: Sequence[Stage], microbatches: int) -> PipelinePlan:
    """All forwards, then all backwards, of a stage after the other; stages may share devices."""
    every = range(len(stages))
    actions = [Action(s, F, m) for s in every for m in range(microbatches)]
    actions += [Action(s, B, m) for s in reversed(every) for m in range(microbatches)]
    orders: dict[str, list[Action]] = {v: [] for stage in stages for v in stage.devices}
    for action in actions:
        for device in stages[action.stage].runners(_m(action)):
            orders[device].append(action)
    return plan_in_order(stages, microbatches, orders)


def one_f_one_b(
    stages: Sequence[Stage], microbatches: int, weights: Weights = "flush"
) -> PipelinePlan:
    """Stage s of p begins with p - s forwards, then one backward and one forward alternate."""
    order = schedules.one_f_one_b(len(stages), microbatches)
    return _per_stage(stages, microbatches, order.rows, weights)


def zero_bubble_h1(
    stages: Sequence[Stage], microbatches: int, weights: Weights = "flush"
) -> PipelinePlan:
    """1F1B whose backwards are split; stage s is s weight gradients behind (ZB-H1)."""
    order = schedule_of("zb-h1", Sizes(len(stages), microbatches))
    return _per_stage(stages, microbatches, order.rows, weights)


def interleaved(stages: Sequence[Stage], microbatches: int) -> PipelinePlan:
    """Megatron-LM's interleaved 1F1B: stage s stands on the device of stage s mod p.

    ``microbatches`` is a multiple of the number p of devices.
    """
    devices = [stage.devices[0] for stage in stages]
    p = len(set(devices))
    chunks = len(stages) // p
    if devices != devices[:p] * chunks or microbatches % p:
        raise ValueError("stages must stand on devices in turn, microbatches be a multiple of p")
    rows = schedules.interleaved(p, chunks, microbatches).rows
    return plan_in_order(stages, microbatches, dict(zip(devices[:p], rows, strict=True)))


def of_order(order: Order, stops: Sequence[int], width: int = 1, **options: Any) -> PipelinePlan:
    """A published order on groups of ``width`` devices; stages end before the layers ``stops``."""
    names = iter("abcdefgh")
    groups = [tuple(islice(names, width)) for _ in order.rows]
    cuts = zip(pairwise([0, *stops]), order.device, strict=True)
    stages = [Stage(layers, groups[d], **options) for layers, d in cuts]
    rows = zip(order.rows, groups, strict=True)
    orders = {device: row for row, group in rows for device in group}
    return plan_in_order(stages, order.microbatches, orders)


def _per_stage(
    stages: Sequence[Stage], microbatches: int, orders: Sequence[Sequence[Action]], weights: Weights
) -> PipelinePlan:
    """Every stage on devices of its own; those that take turns leave out the others' actions."""
    by_device = {
        device: [action for action in order if device in stage.runners(_m(action))]
        for stage, order in zip(stages, orders, strict=True)
        for device in stage.devices
    }
    return plan_in_order(stages, microbatches, by_device, weights)


# --- Periodic plans ---------------------------------------------------------------------------


def pattern_of(
    stages: Sequence[Stage],
    microbatches: int,
    seconds: Callable[[ActionKind], float],
    weights: Weights = "double-buffer",
) -> PatternProblem:
    """The scheduling problem of ``stages`` with room for everything."""
    stashed = weights != "double-buffer"
    groups = list(dict.fromkeys(stage.devices for stage in stages))
    apart = [one.devices != other.devices for one, other in pairwise(stages)]
    return PatternProblem(
        tuple(seconds(F) for _ in stages),
        tuple(seconds(B) for _ in stages),
        tuple(seconds(SEND_F) if sent else 0.0 for sent in apart),
        tuple(seconds(SEND_B) if sent else 0.0 for sent in apart),
        tuple(groups.index(stage.devices) for stage in stages),
        (Kept(0.0),) * len(stages),
        (0.0,) * len(groups),
        tuple(
            seconds(REDUCE) if len(stage.devices) > 1 and not stashed else 0.0 for stage in stages
        ),
        microbatches,
        version_bytes=(0.0,) * len(stages) * stashed,
        follows_first_stage=weights == "stash+vertical-sync",
    )


def periodic(
    stages: Sequence[Stage],
    problem: PatternProblem,
    pattern: Pattern,
    weights: Weights = "double-buffer",
) -> PipelinePlan:
    """The plan of a pattern, which is checked; all-reduces follow their last backward at once."""
    period = problem.evaluate(pattern)
    entries: list[PeriodicAction] = []
    for job, start in zip(problem.jobs, pattern.starts, strict=True):
        shift, start = divmod(start, period)
        s, text, when = job.operation.stage, str(job.operation), (start, int(shift), job.seconds)
        sources = stages[s].devices
        if job.operation.kind in COMPUTE:
            entries += [PeriodicAction(device, text, *when) for device in sources]
        else:
            targets = stages[s + (1 if job.operation.kind is SEND_F else -1)].devices
            entries.append(PeriodicAction(sources[0], text, *when, sources, targets, 0.0))
    for s, stage in enumerate(stages):
        if len(stage.devices) > 1 and weights == "double-buffer":
            (last,) = (
                start + job.seconds
                for job, start in zip(problem.jobs, pattern.starts, strict=True)
                if (job.operation.stage, job.operation.kind) == (s, B)
            )
            shift, start = divmod(last, period)
            group, when = stage.devices, (start, int(shift), problem.reduce[s])
            entries.append(PeriodicAction(group[0], f"{s}{REDUCE}", *when, group, group, 0.0))
    schedule = PeriodicSchedule(period, tuple(entries))
    return PipelinePlan(
        "", "test", "test", "test", problem.microbatches, tuple(stages), schedule,
        weights=weights,
    )  # fmt: skip


def greedy_pattern(
    problem: PatternProblem, period: float, wait: Callable[[], float] = lambda: 0.0
) -> Pattern | None:
    """Along its way the microbatch takes the first gap that is left ``wait`` seconds later.

    None if two versions of the weights are too few, or gaps too small. All seconds are integers.
    """
    taken: dict[int, set[float]] = {}
    starts: list[float] = []
    now = 0.0
    for job in problem.jobs:
        now += wait()
        slots = taken.setdefault(job.resource, set())
        for later in range(int(period)):
            place = [(now + later + each) % period for each in range(int(job.seconds))]
            if not slots & set(place):
                break
        else:
            return None
        slots.update(place)
        starts.append(now + later)
        now += later + job.seconds
    pattern = Pattern(period, tuple(starts))
    try:
        problem.evaluate(pattern)
    except InvalidPlan:
        return None
    return pattern


def overlapping(
    stages: Sequence[Stage],
    microbatches: int,
    seconds: Callable[[ActionKind], float] = lambda kind: 2.0 if kind is B else 1.0,
    wait: Callable[[], float] = lambda: 0.0,
    weights: Weights = "double-buffer",
) -> PipelinePlan:
    """A periodic plan of the least period that the greedy pattern reaches."""
    problem = pattern_of(stages, microbatches, seconds, weights)
    for period in count(1):
        pattern = greedy_pattern(problem, float(period), wait)
        if pattern is not None:
            return periodic(stages, problem, pattern, weights)
    raise AssertionError


def in_two(plan: PipelinePlan) -> PipelinePlan:
    """A periodic plan whose backwards are split; each half takes half of the time."""
    assert isinstance(plan.schedule, PeriodicSchedule)
    period, entries = plan.schedule.period_seconds, []
    for one in plan.schedule.actions:
        if not one.action.endswith(str(B)) or not one.action[:-1].isdecimal():
            entries.append(one)
            continue
        half = one.seconds / 2
        later, start = divmod(one.start_seconds + half, period)
        s, shift = one.action[:-1], one.shift + int(later)
        entries.append(replace(one, action=f"{s}{I}", seconds=half))
        entries.append(
            replace(one, action=f"{s}{W}", seconds=half, start_seconds=start, shift=shift)
        )
    return replace(plan, schedule=PeriodicSchedule(period, tuple(entries)))


@st.composite
def periodic_plans(
    draw: st.DrawFn,
    layers: int,
    world_sizes: Sequence[int] = (2, 3, 4),
    *,
    max_stages: int = 5,
    max_microbatches: int = 4,
    weights: Sequence[Weights] = PERIODIC_WEIGHTS,
) -> PipelinePlan:
    """Any stages whose groups of devices are equal or disjoint; any overlap of iterations.

    Where weights change after every microbatch, computations take time: at one instant it would be
    open which of them come first.
    """
    how = draw(st.sampled_from(list(weights)))
    stages = draw(disjoint_stages(layers, world_sizes, max_stages))
    microbatches = draw(st.integers(1, max_microbatches))
    least = {SEND_F: 0} | dict.fromkeys((F, B), int(how != "double-buffer"))
    lasts = draw(st.fixed_dictionaries({kind: st.integers(k, 3) for kind, k in least.items()}))
    waits = [*draw(st.lists(st.integers(0, 2), min_size=1, max_size=7)), 0]
    turns = count()
    plan = overlapping(
        stages,
        microbatches,
        lambda kind: float(lasts.get(kind, 1)),
        lambda: float(waits[next(turns) % len(waits)]),
        how,
    )
    return in_two(plan) if draw(st.booleans()) else plan


@st.composite
def disjoint_stages(
    draw: st.DrawFn, layers: int, world_sizes: Sequence[int], max_stages: int
) -> list[Stage]:
    """Stages on groups of devices that are equal or disjoint."""
    world = draw(st.sampled_from(list(world_sizes)))
    names = [f"d{v}" for v in range(world)]
    pairs = draw(st.integers(0, world // 2))
    groups = [tuple(names[2 * k : 2 * k + 2]) for k in range(pairs)]
    groups += [(name,) for name in names[2 * pairs :]]
    number = draw(st.integers(min(len(groups), layers), min(max(max_stages, len(groups)), layers)))
    cuts = draw(st.permutations(range(1, layers)))[: number - 1]
    more = [draw(st.sampled_from(groups)) for _ in range(number - len(groups))]
    order = draw(st.permutations((groups + more)[:number]))
    how = st.sampled_from(("none", "full", "layer"))
    return [
        Stage(span, group, recompute=draw(how))
        for span, group in zip(pairwise([0, *sorted(cuts), layers]), order, strict=True)
    ]


# --- Random plans -----------------------------------------------------------------------------


@st.composite
def plans(
    draw: st.DrawFn,
    layers: int,
    world_sizes: Sequence[int] = (2, 3, 4),
    *,
    weights: Sequence[Weights] = ALL_WEIGHTS,
    max_stages: int = 4,
    max_microbatches: int = 5,
    begins: Begins = "forward",
) -> PipelinePlan:
    """Any stages on any devices, and any order of F and B (or I and W) that can run.

    Stages may share devices. Under stashed weights no stage takes turns (r > 1 would leave open
    which forwards see a round's update), and under vertical sync no backward is split (a late W
    may leave a version unmade that a forward needs).
    """
    how = draw(st.sampled_from(list(weights)))
    stages = draw(random_stages(layers, world_sizes, max_stages, turns=not how.startswith("stash")))
    microbatches = draw(_mostly_several(max_microbatches))
    both = list(product(range(len(stages)), range(microbatches)))
    halves = draw(st.sets(st.sampled_from(both))) if how != "stash+vertical-sync" else set()
    computations = {Action(s, F, m) for s, m in both}
    for s, m in both:
        computations |= (
            {Action(s, I, m), Action(s, W, m)} if (s, m) in halves else {Action(s, B, m)}
        )
    orders: dict[str, list[Action]] = {d: [] for stage in stages for d in stage.devices}
    done: set[Action] = set()
    while remaining := sorted(computations - done):
        before = {a: _computed_before(stages, a, computations, begins) for a in remaining}
        ready = [a for a in remaining if before[a] <= done]
        action = draw(st.sampled_from(ready))
        done.add(action)
        for device in stages[action.stage].runners(_m(action)):
            orders[device].append(action)
    return plan_in_order(stages, microbatches, orders, how, begins)


@st.composite
def random_stages(
    draw: st.DrawFn,
    layers: int,
    world_sizes: Sequence[int] = (2, 3, 4),
    max_stages: int = 4,
    turns: bool = True,
) -> list[Stage]:
    """Stages that cover the layers and use a drawn number of devices, each at least once."""
    devices = [f"d{v}" for v in range(draw(st.sampled_from(list(world_sizes))))]
    count = draw(_mostly_several(min(max_stages, layers)))
    cuts = draw(st.permutations(range(1, layers)))[: count - 1]
    bounds = [0, *sorted(cuts), layers]
    groups = [
        draw(st.lists(st.sampled_from(devices), min_size=1, max_size=2, unique=True))
        for _ in bounds[1:]
    ]
    for device in sorted(set(devices) - {d for group in groups for d in group}):
        groups[draw(st.integers(0, len(groups) - 1))].append(device)
    ways = ("split", "round-robin") if turns else ("split",)
    return [
        Stage(
            span,
            tuple(group),
            draw(st.sampled_from(ways)) if len(group) > 1 else "split",
            draw(st.sampled_from(("none", "full", "layer"))),
        )
        for span, group in zip(pairwise(bounds), groups, strict=True)
    ]


def _mostly_several(most: int) -> st.SearchStrategy[int]:
    """1..most, with few ones: a single stage or microbatch decides little."""
    return st.integers(min(2, most), most) | st.integers(1, most)


def _computed_before(
    stages: Sequence[Stage], action: Action, computations: set[Action], begins: Begins
) -> set[Action]:
    """The computations that ``action`` waits for, transfers and all-reduces passed over."""
    found = set()
    for need in NEEDS[begins](stages, action, computations):
        found |= {need} if need.kind in COMPUTE else _needs(stages, need, computations)
    return found
