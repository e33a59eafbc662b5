"""The actions of a plan's stages and their durations.

This is the time part of the cost model. Planners, the checker and the simulator share it and the
byte part in `memory`, and nothing else.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.plans.actions import (
    BARE,
    FLUSH,
    PLANNED,
    REDUCE,
    SEND_B,
    SEND_F,
    UPDATE,
    Action,
    ActionKind,
    B,
    F,
    I,
    W,
    WeightRule,
)
from stagewright.formulations.plans.pipeline import PipelineProblem, remembered
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.formulations.plans.shards import (
    crossing,
    exchange_seconds,
    of_shard,
    round_seconds,
    stays,
    update_share,
)
from stagewright.graphs.documents.arrays import Floats

Blocks = dict[ActionKind, Floats]
"""One number per action: shape (S, M) per planned kind, (S, 1) for all-reduces and updates.

NaN where there is no such action: a backward is whole or in two parts, the last stage sends nothing
forward, the first nothing back, no stage sends to itself, a stage without replicas reduces nothing,
and an optimizer step of zero seconds is not an action. Comparisons with NaN are false, so rules on
times skip it.
"""

Split = NDArray[np.bool_]
"""Per stage and microbatch, shape (S, M): whether the backward is split into I and W."""


def updated_stages(
    problem: PipelineProblem, stages: Sequence[Stage], rule: WeightRule
) -> frozenset[int]:
    """The stages whose optimizer step is an action at the end of the iteration.

    If weights change after every microbatch, the step is part of the backward.
    """
    if rule.updates_every_round:
        return frozenset()
    return frozenset(s for s, stage in enumerate(stages) if update_seconds(problem, stage) > 0)


def expected_actions(
    stages: Sequence[Stage],
    microbatches: int,
    split: Split | None = None,
    updated: Collection[int] = (),
    rule: WeightRule = FLUSH,
) -> Iterator[Action]:
    """Every action that a schedule of ``stages`` must hold, once each.

    ``split`` marks the backwards that are split into I and W (default: none), ``updated`` the
    stages whose optimizer step is an action. ``rule`` says whether all-reduces are actions.
    """
    parts = whole_backwards(stages, microbatches) if split is None else split
    sent = [are_sent(stages, s, microbatches) for s in range(-1, len(stages))]
    for s, stage in enumerate(stages):
        for m, in_parts in enumerate(parts[s].tolist()):
            yield Action(s, F, m)
            for kind in (I, W) if in_parts else (B,):
                yield Action(s, kind, m)
            if sent[s + 1][m]:
                yield Action(s, SEND_F, m)
            if sent[s][m]:
                yield Action(s, SEND_B, m)
        if stage.reduces and not rule.updates_every_round:
            yield Action(s, REDUCE)
        if s in updated:
            yield Action(s, UPDATE)


def durations(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    split: Split | None = None,
    rule: WeightRule = FLUSH,
) -> Blocks:
    """The cost model's seconds for every action of ``stages``, with ``split`` as above.

    If weights change after every microbatch, the last action of a backward includes the all-reduce
    and the optimizer step.
    """
    parts = whole_backwards(stages, problem.microbatches) if split is None else split
    seconds = empty_blocks(len(stages), problem.microbatches)
    for s, stage in enumerate(stages):
        step = _ending_seconds(problem, stage) if rule.updates_every_round else 0.0
        _add_computations(problem, stages, s, step, bool(parts[s].any()), seconds)
        if stage.reduces and not rule.updates_every_round:
            seconds[REDUCE][s] = reduce_seconds(problem, stage)
    for s in updated_stages(problem, stages, rule):
        seconds[UPDATE][s] = update_seconds(problem, stages[s])
    for kind, absent in ((B, parts), (I, ~parts), (W, ~parts)):
        seconds[kind][absent] = np.nan
    _add_transfers(problem, stages, seconds)
    if problem.cluster.message_seconds is not None:
        _add_messages(problem, stages, seconds)
    return seconds


def compute_seconds(
    problem: PipelineProblem, stage: Stage, devices: Sequence[int]
) -> tuple[float, float]:
    """Time of the forward, and of the backward with recomputation, split on ``devices``.

    The exchanges of weights and gradients that are divided among the replicas are a part of them.
    Of every tensor group among them the first counts: all of a group are of one kind.
    """
    firsts = devices[:: stage.tensor]
    forward, backward = of_shard(problem, stage).compute_seconds(*stage.layers, firsts)
    again = 0.0 if stage.recompute == "none" else forward
    there, *back = exchange_seconds(problem, stage)
    return forward + there, backward + again + sum(back)


def gradient_seconds(
    problem: PipelineProblem, stage: Stage, devices: Sequence[int]
) -> tuple[float, float]:
    """Time of the two parts of a backward, I with recomputation and W, as `compute_seconds`."""
    shard, firsts = of_shard(problem, stage), devices[:: stage.tensor]
    of_input, of_weights = shard.gradient_seconds(*stage.layers, firsts)
    if stage.recompute != "none":
        of_input += shard.compute_seconds(*stage.layers, firsts)[0]
    _, *exchanges = exchange_seconds(problem, stage)
    return of_input + exchanges[0], of_weights + exchanges[1]


def kernel_shares(problem: PipelineProblem, stage: Stage) -> dict[ActionKind, float]:
    """The share of a device that each computation of ``stage`` occupies.

    Of one after another the largest counts. An optimizer step leaves no room beside it.
    """
    shard, lanes = of_shard(problem, stage), positions(problem, stage)
    every = np.array([shard.kernel_shares(*stage.layers, it[:: stage.tensor]) for it in lanes])
    forward, of_input, of_weights = every.max(axis=0).tolist()
    if stage.recompute != "none":
        of_input = max(of_input, forward)
    whole = max(of_input, of_weights)
    return {F: forward, I: of_input, W: of_weights, B: whole, UPDATE: 1.0}


def _add_computations(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    s: int,
    step: float,
    split: bool,
    seconds: Blocks,
) -> None:
    """Set F and B of stage ``s``, if ``split`` also I and W; ``step`` extends the backward."""
    stage = stages[s]
    for lane, (forward, backward, _) in enumerate(lane_seconds(problem, stage, False)):
        every = slice(lane, None, stage.turns)
        seconds[F][s, every], seconds[B][s, every] = forward, backward + step
        if split:
            _, of_input, of_weights = lane_seconds(problem, stage, True)[lane]
            seconds[I][s, every], seconds[W][s, every] = of_input, of_weights + step


@remembered
def lane_seconds(
    problem: PipelineProblem, stage: Stage, split: bool
) -> tuple[tuple[float, float, float], ...]:
    """Seconds of F, of B or I, and of W (0: none), of a microbatch on every lane that has one."""
    return tuple(
        (compute_seconds(problem, stage, lane)[0], *gradient_seconds(problem, stage, lane))
        if split
        else (*compute_seconds(problem, stage, lane), 0.0)
        for lane in positions(problem, stage)[: problem.microbatches]
    )


def _add_transfers(problem: PipelineProblem, stages: Sequence[Stage], seconds: Blocks) -> None:
    for s, neighbours in enumerate(pairwise(stages)):
        for first, cycle, there, back in transfers(problem, *neighbours):
            seconds[SEND_F][s, first::cycle], seconds[SEND_B][s + 1, first::cycle] = there, back


@remembered
def transfers(
    problem: PipelineProblem, one: Stage, other: Stage
) -> tuple[tuple[int, int, float, float], ...]:
    """The :func:`channels` between two stages, with the seconds of `transfer_seconds` on each."""
    lanes, found = [positions(problem, stage) for stage in (one, other)], []
    for first, cycle in channels((one, other), 0, problem.microbatches):
        senders, receivers = (each[first % len(each)] for each in lanes)
        ends = transfer_seconds(problem, one, other, senders, receivers)
        found.append((first, cycle, *ends))
    return tuple(found)


def _add_messages(problem: PipelineProblem, stages: Sequence[Stage], seconds: Blocks) -> None:
    """Add the time for messages to the computations that make and take them: F, and B or I."""
    forward, backward = message_seconds(stages, problem.microbatches, problem.message_seconds)
    for kind, own in ((F, forward), (B, backward), (I, backward)):
        seconds[kind] += own


def message_seconds(
    stages: Sequence[Stage], microbatches: int, of_message: Callable[[int, int, int], float]
) -> tuple[Floats, Floats]:
    """Time for messages in a forward and in a backward, W without any; each of shape (S, M).

    Of the devices that work on a microbatch the one with the most messages counts. ``of_message``
    as `PipelineProblem.message_seconds`.
    """
    forward, backward = np.zeros((2, len(stages), microbatches))
    for s, (one, other) in enumerate(pairwise(stages)):
        for first, cycle in channels(stages, s, microbatches):
            lower, upper = one.runners(first), other.runners(first)
            each = partial(of_message, one.layers[1])
            there = _most_seconds(crossing(lower, one.tensor, upper, other.tensor), each)
            back = _most_seconds(crossing(upper, other.tensor, lower, one.tensor), each)
            forward[s : s + 2, first::cycle] += np.array(there)[:, None]
            backward[s : s + 2, first::cycle] += np.array(back[::-1])[:, None]
    return forward, backward


def _most_seconds(
    ends: Sequence[tuple[Sequence[str], Sequence[str]]], each: Callable[[int, int], float]
) -> tuple[float, float]:
    """The most time that a device needs to send, and that one needs to receive, a microbatch."""
    sent, received = defaultdict[str, float](float), defaultdict[str, float](float)
    for senders, receivers in ends:
        seconds = each(len(senders), len(receivers))
        for name in senders:
            sent[name] += len(receivers) * seconds
        for name in receivers:
            received[name] += len(senders) * seconds
    return max(sent.values()), max(received.values())


def transfer_seconds(
    problem: PipelineProblem,
    one: Stage,
    other: Stage,
    senders: Sequence[int],
    receivers: Sequence[int],
) -> tuple[float, float]:
    """Time of a microbatch's activations from ``one`` to ``other``, and of their gradients back."""
    there = crossing(senders, one.tensor, receivers, other.tensor)
    back = crossing(receivers, other.tensor, senders, one.tensor)
    border = one.layers[1]
    if one.tensor == other.tensor == 1:
        return problem.transfer_seconds(border, senders, receivers)
    return (
        max(problem.transfer_seconds(border, *ends)[0] for ends in there),
        max(problem.transfer_seconds(border, *reversed(ends))[1] for ends in back),
    )


def transfer_bytes(problem: PipelineProblem, one: Stage, other: Stage) -> float:
    """Bytes of a microbatch that ``one`` sends to ``other``, a neighbour: its receivers' copies."""
    border = max(one.layers[0], other.layers[0])
    return other.tensor * problem.boundary_bytes(border)


def split_backwards(plan: PipelinePlan) -> Split:
    """Which backwards of a plan are split: those with an I or a W."""
    split = whole_backwards(plan.stages, plan.microbatches)
    parts = {entry.action for entry in plan.actions if I in entry.action}
    parts |= {entry.action for entry in plan.actions if W in entry.action}
    if parts:
        for s, m in np.ndindex(split.shape):
            split[s, m] = not parts.isdisjoint((str(Action(s, I, m)), str(Action(s, W, m))))
    return split


def _ending_seconds(problem: PipelineProblem, stage: Stage) -> float:
    """Seconds of the all-reduce and the optimizer step of a stage, one after the other."""
    return reduce_seconds(problem, stage) + update_seconds(problem, stage)


@remembered
def reduce_seconds(problem: PipelineProblem, stage: Stage) -> float:
    """Seconds of a stage's all-reduce, all shards at once; 0 with a single replica.

    A reduce-scatter where the replicas divide the optimizer's state.
    """
    if stage.shards == "optimizer":
        return round_seconds(problem, stage)
    devices, shard = (
        [problem.cluster.index[name] for name in stage.devices],
        of_shard(problem, stage),
    )
    return max(
        shard.reduce_seconds(*stage.layers, devices[i :: stage.tensor]) for i in range(stage.tensor)
    )


def reduce_bytes(problem: PipelineProblem, stage: Stage) -> float:
    """Bytes of the gradients of all shards that a stage's all-reduce sums."""
    return stage.tensor * of_shard(problem, stage).gradient_bytes(*stage.layers)


@remembered
def update_seconds(problem: PipelineProblem, stage: Stage) -> float:
    """Seconds of the optimizer step of a stage on each of its devices.

    Of a part, where the replicas divide the optimizer's state; the new weights are then gathered.
    """
    devices = [problem.cluster.index[name] for name in stage.devices]
    step = of_shard(problem, stage).update_seconds(*stage.layers, devices)
    gather = round_seconds(problem, stage) if stage.joint(UPDATE) > 1 else 0.0
    return step * update_share(problem, stage) + gather


def offload_seconds(problem: PipelineProblem, stage: Stage, devices: Sequence[int]) -> float | None:
    """Seconds of moving a microbatch's saved activations from ``devices`` to the host, or back.

    None if some device has no ``host_bytes_per_second``.
    """
    shard = of_shard(problem, stage)
    every = [
        shard.offload_seconds(*stage.layers, devices[i :: stage.tensor])
        for i in range(stage.tensor)
    ]
    known = [seconds for seconds in every if seconds is not None]
    return max(known) if len(known) == len(every) else None


def covered_seconds(starts: Floats, ends: Floats) -> float:
    """The length of the union of intervals; NaN for missing ones."""
    order = np.argsort(starts)[: np.count_nonzero(~np.isnan(starts))]
    starts, ends = starts[order], ends[order]
    covered = np.maximum.accumulate(np.append(-np.inf, ends))[:-1]  # by those before each
    return float(np.maximum(0.0, ends - np.maximum(starts, covered)).sum())


def empty_blocks(stages: int, microbatches: int) -> Blocks:
    """Blocks without any action."""
    return {
        kind: np.full((stages, 1 if kind in BARE else microbatches), np.nan) for kind in PLANNED
    }


def whole_backwards(stages: Sequence[Stage], microbatches: int) -> Split:
    """The array of split backwards in which no backward is split."""
    return np.zeros((len(stages), microbatches), dtype=bool)


def channels(stages: Sequence[Stage], s: int, microbatches: int) -> Iterator[tuple[int, int]]:
    """The channels between stages s and s + 1, one per pair of endpoints.

    A channel carries the microbatches first, first + cycle, ...: the pairs of lanes repeat after
    the least common multiple of both stages' numbers of lanes, and within it no pair appears
    twice. A microbatch that stays on its devices needs no channel.
    """
    cycle = math.lcm(stages[s].turns, stages[s + 1].turns)
    for first in range(min(cycle, microbatches)):
        if not stays(stages[s], stages[s + 1], first):
            yield first, cycle


def are_sent(stages: Sequence[Stage], s: int, microbatches: int) -> list[bool]:
    """Per microbatch whether it is sent between stages s and s + 1; False where one is missing."""
    sent = np.zeros(microbatches, dtype=bool)
    if 0 <= s < len(stages) - 1:
        for first, cycle in channels(stages, s, microbatches):
            sent[first::cycle] = True
    return sent.tolist()


def positions(problem: PipelineProblem, stage: Stage) -> list[list[int]]:
    """The positions of the devices of every lane."""
    return _positions(problem, stage.lanes)


@remembered
def _positions(problem: PipelineProblem, lanes: tuple[tuple[str, ...], ...]) -> list[list[int]]:
    return [[problem.cluster.index[name] for name in lane] for lane in lanes]
