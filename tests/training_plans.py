"""Valid plans for training tiny models, without a cost model: every action lasts one second.

A plan is made of its stages and, per device, the order of the computations. The times are those of
a list scheduler, so transfers come in the order in which they are ready.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from math import lcm

from hypothesis import strategies as st

from stagewright.formulations.actions import COMPUTE, Action, ActionKind
from stagewright.formulations.plan import (
    PipelinePlan,
    Schedule,
    ScheduledAction,
    Stage,
    Weights,
)

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
SEND_F, SEND_B = ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD
REDUCE = ActionKind.REDUCE

ALL_WEIGHTS: tuple[Weights, ...] = ("flush", "stash", "stash+vertical-sync", "double-buffer")
Orders = Mapping[str, Sequence[Action]]

# --- From the order of the computations to a plan ---------------------------------------------


def plan_in_order(
    stages: Sequence[Stage], microbatches: int, orders: Orders, weights: Weights = "flush"
) -> PipelinePlan:
    """The plan in which every device computes in the order given for it."""
    computations = {action for order in orders.values() for action in order}
    waiting = {action: _needs(stages, action, computations) for action in computations}
    for action in _transfers_and_reductions(stages, microbatches):
        waiting[action] = _needs(stages, action, computations)
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
    schedule = Schedule(tuple(entries))
    return PipelinePlan(
        "", "test", "test", "test", microbatches, tuple(stages), schedule, weights=weights
    )


def even_samples(stages: Sequence[Stage]) -> int:
    """A number of samples per microbatch that every stage can divide evenly."""
    widths = [len(stage.runners(0)) for stage in stages]
    return lcm(*widths, *(a * b for a, b in pairwise(widths)))


def _transfers_and_reductions(stages: Sequence[Stage], microbatches: int) -> list[Action]:
    found = [Action(s, REDUCE) for s, stage in enumerate(stages) if len(stage.devices) > 1]
    for s, m in product(range(len(stages) - 1), range(microbatches)):
        if stages[s].runners(m) != stages[s + 1].runners(m):
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


def _handed(
    stages: Sequence[Stage], source: int, target: int, send: ActionKind, m: int, made: ActionKind
) -> Action:
    """The transfer, or what makes the values where they stay on their devices."""
    stays = stages[source].runners(m) == stages[target].runners(m)
    return Action(source, made if stays else send, m)


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


def one_f_one_b(
    stages: Sequence[Stage], microbatches: int, weights: Weights = "flush"
) -> PipelinePlan:
    """Stage s of p begins with p - s forwards, then one backward and one forward alternate."""

    def order(s: int) -> list[Action]:
        ahead = min(len(stages) - 1 - s, microbatches)
        found = [Action(s, F, m) for m in range(ahead)]
        for m in range(microbatches):
            found += [Action(s, F, m + ahead)] if m + ahead < microbatches else []
            found += [Action(s, B, m)]
        return found

    return _per_stage(stages, microbatches, [order(s) for s in range(len(stages))], weights)


def zero_bubble_h1(
    stages: Sequence[Stage], microbatches: int, weights: Weights = "flush"
) -> PipelinePlan:
    """1F1B whose backwards are split; stage s is s weight gradients behind (ZB-H1)."""

    def order(s: int) -> list[Action]:
        ahead = min(len(stages) - 1 - s, microbatches)
        found = [Action(s, F, m) for m in range(ahead)]
        for m in range(microbatches):
            found += [Action(s, F, m + ahead)] if m + ahead < microbatches else []
            found += [Action(s, I, m)]
            found += [Action(s, W, m - s)] if m >= s else []
        late = range(max(0, microbatches - s), microbatches)
        return found + [Action(s, W, m) for m in late]

    return _per_stage(stages, microbatches, [order(s) for s in range(len(stages))], weights)


def interleaved(stages: Sequence[Stage], microbatches: int) -> PipelinePlan:
    """Megatron-LM's interleaved 1F1B: stage s stands on the device of stage s mod p.

    ``microbatches`` is a multiple of the number p of devices.
    """
    devices = [stage.devices[0] for stage in stages]
    p = len(set(devices))
    chunks, total = len(stages) // p, microbatches * len(stages) // p
    if devices != devices[:p] * chunks or microbatches % p:
        raise ValueError("stages must stand on devices in turn, microbatches be a multiple of p")

    def action(rank: int, kind: ActionKind, k: int) -> Action:
        """The k-th forward or backward of a device."""
        chunk = k // p % chunks
        chunk = chunk if kind is F else chunks - 1 - chunk
        return Action(chunk * p + rank, kind, k // (p * chunks) * p + k % p)

    def order(rank: int) -> list[Action]:
        ahead = min(2 * (p - rank - 1) + (chunks - 1) * p, total)
        found = [action(rank, F, k) for k in range(ahead)]
        for k in range(total):
            found += [action(rank, F, k + ahead)] if k + ahead < total else []
            found += [action(rank, B, k)]
        return found

    return plan_in_order(stages, microbatches, {devices[r]: order(r) for r in range(p)})


def _per_stage(
    stages: Sequence[Stage],
    microbatches: int,
    orders: Sequence[Sequence[Action]],
    weights: Weights,
) -> PipelinePlan:
    """Every stage on devices of its own; those that take turns leave out the others' actions."""
    by_device = {
        device: [action for action in order if device in stage.runners(_m(action))]
        for stage, order in zip(stages, orders, strict=True)
        for device in stage.devices
    }
    return plan_in_order(stages, microbatches, by_device, weights)


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
        ready = [a for a in remaining if _computed_before(stages, a, computations) <= done]
        action = draw(st.sampled_from(ready))
        done.add(action)
        for device in stages[action.stage].runners(_m(action)):
            orders[device].append(action)
    return plan_in_order(stages, microbatches, orders, how)


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
    stages: Sequence[Stage], action: Action, computations: set[Action]
) -> set[Action]:
    """The computations that ``action`` waits for, transfers passed over."""
    found = set()
    for need in _needs(stages, action, computations):
        found |= {need} if need.kind in COMPUTE else _needs(stages, need, computations)
    return found
