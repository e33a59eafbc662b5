"""Precedence of entries: the dependencies, and the order on every device and channel."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise, product

import numpy as np

from stagewright.executor.simulation.run import Entries, Run, either, joint_groups
from stagewright.formulations.plans.actions import (
    COMPUTE,
    ON_DEVICE,
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
    along_way,
)
from stagewright.formulations.plans.plan import PipelinePlan, ScheduledAction, Stage
from stagewright.graphs.documents.arrays import Floats, Ints


class Replay:
    """Every entry of a run starts as soon as its dependencies and predecessors have ended.

    Arrays of seconds have a row per entry of the run and a column per case. What runs beside
    another kernel in a sub-stream lasts as long as it is said to. ``pairs`` are the entries
    (before, after).
    """

    def __init__(self, run: Run) -> None:
        self.pairs: Ints = np.array([*edges(run)], dtype=int).reshape(-1, 2)
        self._followers: list[list[int]] = [[] for _ in run.actions]
        for before, after in self.pairs.tolist():
            self._followers[before].append(after)
        awaited = np.bincount(self.pairs[:, 1], minlength=len(run.actions)).tolist()
        self._order = [i for i, count in enumerate(awaited) if count == 0]
        for i in self._order:  # grows during the loop
            for j in self._followers[i]:
                awaited[j] -= 1
                if awaited[j] == 0:
                    self._order.append(j)

    def ends(self, seconds: Floats) -> Floats:
        """When every entry ends."""
        starts, ends = np.zeros_like(seconds), np.zeros_like(seconds)
        for i in self._order:
            np.add(starts[i], seconds[i], out=ends[i])
            for j in self._followers[i]:
                np.maximum(starts[j], ends[i], out=starts[j])
        return ends

    def ready(self, ends: Floats) -> Floats:
        """The time at which all entries that an entry waits for have ended."""
        found = np.zeros_like(ends)
        np.maximum.at(found, self.pairs[:, 1], ends[self.pairs[:, 0]])
        return found


def edges(run: Run) -> Iterator[tuple[int, int]]:
    """Pairs of entries (before, after): the dependencies, then the order on each resource."""
    # In a run every device has its own updates.
    together = _together(run.plan, run.entries, COMPUTE if run.is_periodic else ON_DEVICE)
    orders = (pairwise(queue) for queue in _queues(run))
    for before, after in chain(_dependencies(run), *orders):
        for mate in together.get(after, (after,)):
            yield before, mate


def _dependencies(run: Run) -> Iterator[tuple[int, int]]:
    """Each block of a microbatch after its predecessor, and all-reduces at the end."""
    entries, last = run.entries, len(run.plan.stages) - 1
    # The actions that make the gradient to send back, and those that end a backward. Each
    # microbatch has one of the two kinds.
    gradient, done = either(entries[B], entries[I]), either(entries[B], entries[W])
    for s in range(last):
        for m in range(run.plan.microbatches):
            forward, backward = entries[SEND_F][s][m], entries[SEND_B][s + 1][m]
            yield from _crossing(entries[F][s][m], forward, entries[F][s + 1][m])
            yield from _crossing(gradient[s + 1][m], backward, gradient[s][m])
    between_losses = run.plan.is_backward_first
    for m in range(0 if between_losses else run.plan.microbatches):
        yield from _crossing(entries[F][last][m], [], gradient[last][m])
    for s in range(last + 1):
        for one, other in zip(entries[I][s], entries[W][s], strict=True):
            yield from _crossing(one, [], other)
        reductions, updates = entries[REDUCE][s][0], entries[UPDATE][s][0]
        yield from _updates(run, done[s], reductions, updates, entries[F][s])


def _updates(
    run: Run,
    done: list[list[int]],
    reductions: list[int],
    updates: list[int],
    forwards: list[list[int]],
) -> Iterator[tuple[int, int]]:
    """A stage's all-reduces and updates at the end of every iteration, and their successors.

    ``done`` and ``forwards`` are its entries by microbatch. With two versions of the weights the
    update of iteration i makes the version of iteration i + 2 (PipeDream-2BW). All-reduces run one
    after another. Between two losses the forwards follow the update of their own stage.
    """
    m = run.iteration_microbatches
    iterations = run.plan.microbatches // m
    yield from pairwise(reductions)
    for i in range(iterations):
        ends = list(chain.from_iterable(done[i * m : (i + 1) * m]))
        if reductions:
            yield from product(ends, [reductions[i]])
            ends = [reductions[i]]
        if updates:
            own = updates[i::iterations]  # the updates of one device are consecutive
            yield from product(ends, own)
            ends = own
        if run.plan.weight_rule.staleness and (i + 2) * m < run.plan.microbatches:
            yield from product(ends, forwards[(i + 2) * m])
        elif run.plan.is_backward_first:
            yield from product(ends, chain.from_iterable(forwards))


def _crossing(
    before: Sequence[int], transfer: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Dependencies through a transfer, or else between the entries of the same device."""
    if transfer:
        yield from product(before, transfer)
        yield from product(transfer, after)
    else:
        yield from zip(before, after, strict=True)


def _together(
    plan: PipelinePlan, entries: Entries, kinds: Sequence[ActionKind]
) -> dict[int, list[int]]:
    """The entries of ``kinds`` that need an explicit common start.

    The devices that split a microbatch start it together. If they have the same lanes in all
    stages this follows from their order; else each waits until all are free. Devices that exchange
    values within an action wait for each other in any case: one of them may have been late before.
    """
    taken = {name: _turns(plan.stages, name) for stage in plan.stages for name in stage.devices}
    mates: dict[int, list[int]] = {}
    for s, stage in enumerate(plan.stages):
        apart = len({taken[name] for name in stage.devices}) > 1
        for kind, group in ((one, group) for one in kinds for group in entries[one][s]):
            parts = [group] if apart else joint_groups(plan, stage, kind, group)
            mates |= {i: part for part in parts for i in part}
    return mates


def _turns(stages: Sequence[Stage], device: str) -> tuple[tuple[int, int], ...]:
    """The stages of a device, and its lane in each."""
    return tuple(
        (s, turn)
        for s, stage in enumerate(stages)
        for turn, runners in enumerate(stage.lanes)
        if device in runners
    )


def _queues(run: Run) -> list[list[int]]:
    """Per stream of a device and per channel its entries in the order of their times in the plan.

    Zero-length actions at one instant are in the order in which a microbatch meets them.
    """
    entries = run.plan.actions
    queues: defaultdict[object, list[int]] = defaultdict(list)
    for i, (action, entry) in enumerate(zip(run.actions, entries, strict=True)):
        if action.kind in ON_DEVICE:
            queues[entry.device, entry.stream].append(i)
        elif action.kind is REDUCE:
            for name in entry.sources or ():
                queues["all-reduces", name].append(i)
        else:
            queues[_channel(run, action, entry)].append(i)

    def in_plan(i: int) -> tuple[float, float, int, int]:
        met = along_way(run.actions[i], backward_first=run.plan.is_backward_first)
        return (entries[i].start_seconds, entries[i].finish_seconds, *met)

    return [sorted(queue, key=in_plan) for queue in queues.values()]


def _channel(run: Run, action: Action, entry: ScheduledAction) -> object:
    """The resource of a transfer: a channel to the next stage, or in a run a whole link."""
    ends = (entry.sources, entry.targets)
    if action.kind is SEND_B:
        ends = ends[::-1]
    if run.is_periodic:
        return frozenset(ends)
    return (action.stage - (action.kind is SEND_B), *ends)
