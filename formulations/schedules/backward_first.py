"""Plans between two losses, from the order of the computations on each device.

The backwards of a mini-batch come first, then the forwards of the next; a stage's forward needs
only the update of its own stage (out-of-order backprop, section 2). An order says what a device
computes one after another; here everything starts as early as that allows.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise, product

import numpy as np

from stagewright.formulations.backprop.regions import co_run
from stagewright.formulations.plans.actions import (
    COMPUTE,
    FLUSH,
    REDUCE,
    SEND_B,
    SEND_F,
    UPDATE,
    Action,
    B,
    F,
    I,
    W,
)
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.timing import (
    Blocks,
    Split,
    durations,
    empty_blocks,
    expected_actions,
    kernel_shares,
    updated_stages,
    whole_backwards,
)
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.operators.opgraph import waiting_cycle

Orders = Mapping[str, Sequence[Action]]
"""Per device its computations in order: B, or I and W, then F; and, where it matters, updates."""


def earliest_starts(
    problem: PipelineProblem,
    stages: Sequence[Stage],
    orders: Orders,
    reductions: Sequence[int] | None = None,
) -> Blocks:
    """The earliest starts of all actions of `backward_first_plan`, in seconds from the loss.

    A channel carries what is ready first; a device takes part in one all-reduce at a time.
    """
    split = _splits(stages, problem.microbatches, orders)
    updated = updated_stages(problem, stages, FLUSH)
    given = {action.stage for row in orders.values() for action in row if action.kind is UPDATE}
    lasting = durations(problem, stages, split)

    def timed(rows: Orders, updated: frozenset[int]) -> tuple[Blocks, list[Action]]:
        actions = list(expected_actions(stages, problem.microbatches, split, updated))
        _require_complete(stages, actions, rows)
        edges = [
            *_dependencies(stages, set(actions)),
            *(pair for row in rows.values() for pair in pairwise(row)),
            *_in_turn(stages, reductions),
        ]
        return _timed(stages, actions, edges, lasting)

    missing = updated - given
    if not missing:
        return timed(orders, updated)[0]
    _, sequence = timed(orders, updated & given)
    return timed(_with_updates(stages, missing, orders, sequence), updated)[0]


def two_stream_starts(
    problem: PipelineProblem, stages: Sequence[Stage], main: Sequence[Action], sub: Sequence[Action]
) -> tuple[Blocks, Floats]:
    """As `earliest_starts`, for stages that are all on one device with two streams.

    ``main`` has the optimizer steps that take time, ``sub`` weight gradients. Also returns the ends
    of those, shape (S, M), NaN for the others.
    """
    split = _splits(stages, problem.microbatches, {"": [*main, *sub]})
    lasting = durations(problem, stages, split)
    actions = list(
        expected_actions(
            stages, problem.microbatches, split, updated_stages(problem, stages, FLUSH)
        )
    )
    _require_complete(stages, actions, {stages[0].devices[0]: [*main, *sub]})
    number = {action: i for i, action in enumerate(actions)}
    before: list[list[int]] = [[] for _ in actions]
    for earlier, later in _dependencies(stages, set(actions)):
        before[number[later]].append(number[earlier])
    shares = [kernel_shares(problem, stage) for stage in stages]
    places = [(action.kind, action.stage, action.microbatch or 0) for action in actions]
    starts, ends = co_run(
        [number[action] for action in main],
        [number[action] for action in sub],
        [float(lasting[kind][s, m]) for kind, s, m in places],
        [shares[s][kind] for kind, s, _ in places],
        before,
    )
    begins, sub_ends = empty_blocks(*split.shape), np.full(split.shape, np.nan)
    for (kind, s, m), start in zip(places, starts, strict=True):
        begins[kind][s, m] = start
    for action in sub:
        _, s, m = places[number[action]]
        sub_ends[s, m] = ends[number[action]]
    return begins, sub_ends


def _splits(stages: Sequence[Stage], microbatches: int, orders: Orders) -> Split:
    split = whole_backwards(stages, microbatches)
    for row in orders.values():
        for action in row:
            if action.kind in (I, W):
                split[_place(stages, microbatches, action)] = True
    return split


def _place(stages: Sequence[Stage], microbatches: int, action: Action) -> tuple[int, int]:
    m = action.microbatch or 0
    if action.stage >= len(stages) or m >= microbatches:
        raise InputError(
            f"{action}: there are only stages 0 to {len(stages) - 1} and microbatches 0 to "
            f"{microbatches - 1}"
        )
    return action.stage, m


def _with_updates(
    stages: Sequence[Stage], missing: Collection[int], orders: Orders, sequence: Sequence[Action]
) -> Orders:
    """The orders with the optimizer steps that they lack, directly before their stage's forwards.

    ``sequence`` has all actions, each after those it waits for. With a step before the first
    forward of its stage there, on all devices alike, devices do not wait for each other.
    """
    place = {action: i for i, action in enumerate(sequence)}
    first: dict[int, int] = {}
    for action in sequence:
        if action.kind is F:
            first.setdefault(action.stage, place[action])
    rows = {}
    for name, row in orders.items():
        steps = [Action(s, UPDATE) for s in missing if name in stages[s].devices]
        # Of equal places the step comes first.
        keyed = [((place[one], 1), one) for one in row]
        keyed += [((first[step.stage], 0), step) for step in steps]
        rows[name] = [one for _, one in sorted(keyed, key=lambda entry: entry[0])]
    return rows


def _require_complete(
    stages: Sequence[Stage], actions: Sequence[Action], rows: Mapping[str, Sequence[Action]]
) -> None:
    """Refuse orders that do not hold the computations and updates of their device, once each."""
    expected: defaultdict[str, Counter[Action]] = defaultdict(Counter)
    for action in actions:
        if action.kind in (*COMPUTE, UPDATE):
            for name in _devices(stages, action):
                expected[name][action] += 1
    for name in dict.fromkeys((*expected, *rows)):
        found = Counter(rows.get(name, ()))
        for word, odd in (("lacks", expected[name] - found), ("has", found - expected[name])):
            if odd:
                raise InputError(f"the order of device {name!r} {word} {min(odd)}")


def _devices(stages: Sequence[Stage], action: Action) -> tuple[str, ...]:
    stage = stages[action.stage]
    return stage.devices if action.microbatch is None else stage.runners(action.microbatch)


def _dependencies(stages: Sequence[Stage], actions: set[Action]) -> Iterator[tuple[Action, Action]]:
    """The predecessors of every action; the gradients of the losses are available at time 0."""
    microbatches = {action.microbatch for action in actions if action.kind is F}
    for s, m in product(range(len(stages)), microbatches):
        gradient = Action(s, B, m) if Action(s, B, m) in actions else Action(s, I, m)
        done = gradient if gradient.kind is B else Action(s, W, m)
        ready = next(
            (one for one in (Action(s, UPDATE), Action(s, REDUCE)) if one in actions), done
        )
        if done is not gradient:
            yield gradient, done
        for before, after in pairwise([done, Action(s, REDUCE), Action(s, UPDATE)]):
            if after in actions:
                yield before if before in actions else done, after
        # With the last backward of the stage, not only this microbatch's own.
        for other in microbatches if ready is done else {m}:
            yield ready, Action(s, F, other)
        if s > 0:
            lower = Action(s - 1, B, m) if Action(s - 1, B, m) in actions else Action(s - 1, I, m)
            yield from _handed(actions, gradient, Action(s, SEND_B, m), lower)
            forward = Action(s - 1, F, m)
            yield from _handed(actions, forward, Action(s - 1, SEND_F, m), Action(s, F, m))


def _handed(
    actions: set[Action], made: Action, sent: Action, needed: Action
) -> Iterator[tuple[Action, Action]]:
    yield from pairwise([made, sent, needed] if sent in actions else [made, needed])


def _in_turn(
    stages: Sequence[Stage], reductions: Sequence[int] | None
) -> Iterator[tuple[Action, Action]]:
    """All-reduces that share a device follow each other as given."""
    if reductions is None:
        return
    shared = [s for s, stage in enumerate(stages) if stage.replicas > 1]
    if sorted(reductions) != shared:
        raise InputError(
            f"reductions must have the stages with replicas once each, {shared}, "
            f"got {list(reductions)}"
        )
    for name in dict.fromkeys(name for stage in stages for name in stage.devices):
        own = [Action(s, REDUCE) for s in reductions if name in stages[s].devices]
        yield from pairwise(own)


def _resources(stages: Sequence[Stage], action: Action) -> tuple[object, ...]:
    """The resources of an action outside the devices' orders: a channel, or devices' links."""
    if action.kind is REDUCE:
        return stages[action.stage].devices
    if action.kind not in (SEND_F, SEND_B):
        return ()
    m, lower = action.microbatch or 0, action.stage - (action.kind is SEND_B)
    return ((lower, stages[lower].runners(m), stages[lower + 1].runners(m)),)


def _timed(
    stages: Sequence[Stage],
    actions: Sequence[Action],
    edges: Sequence[tuple[Action, Action]],
    lasting: Blocks,
) -> tuple[Blocks, list[Action]]:
    """Start, again and again, the action that can start first, at once; also their sequence."""
    number = {action: i for i, action in enumerate(actions)}
    followers: list[list[int]] = [[] for _ in actions]
    awaited = [0] * len(actions)
    for before, after in edges:
        followers[number[before]].append(number[after])
        awaited[number[after]] += 1
    ready = [0.0] * len(actions)
    waiting = _Waiting([_resources(stages, action) for action in actions], actions)
    for i in (i for i, count in enumerate(awaited) if count == 0):
        waiting.add(i, 0.0)
    starts, sequence = empty_blocks(len(stages), lasting[F].shape[1]), list[Action]()
    while (found := waiting.first()) is not None:
        i, start = found
        place = actions[i].stage, actions[i].microbatch or 0
        end = start + float(lasting[actions[i].kind][place])
        starts[actions[i].kind][place] = start
        sequence.append(actions[i])
        waiting.take(i, end)
        awaited[i] = -1
        for j in followers[i]:
            ready[j] = max(ready[j], end)
            awaited[j] -= 1
            if awaited[j] == 0:
                waiting.add(j, ready[j])
    if any(count > 0 for count in awaited):
        cycle = waiting_cycle(followers, awaited)
        names = " waits for ".join(str(actions[i]) for i in cycle)
        raise InputError(f"the devices wait for each other: {names}")
    return starts, sequence


class _Waiting:
    """Actions that wait only for resources, which ``needed`` gives for each.

    Those that need the same are in a queue by the time since when they are ready. The heap holds
    the first of every queue with a time before which it cannot start, and may hold former ones.
    """

    def __init__(self, needed: Sequence[tuple[object, ...]], actions: Sequence[Action]) -> None:
        self._needed, self._actions = needed, actions
        self._free: defaultdict[object, float] = defaultdict(float)
        self._queues: defaultdict[object, list[tuple[float, Action, int]]] = defaultdict(list)
        self._heap: list[tuple[float, float, Action, int]] = []

    def add(self, i: int, since: float) -> None:
        """An action is ready since then."""
        queue = self._queue(i)
        heapq.heappush(queue, (since, self._actions[i], i))
        if queue[0][2] == i:
            heapq.heappush(self._heap, (since, *queue[0]))

    def first(self) -> tuple[int, float] | None:
        """The action that can start first, and its start; in a tie, the longest ready action."""
        while self._heap:
            due, since, action, i = heapq.heappop(self._heap)
            queue = self._queue(i)
            if not queue or queue[0][2] != i:
                continue
            start = max([due, *(self._free[one] for one in self._needed[i])])
            if start == due:
                return i, start
            heapq.heappush(self._heap, (start, since, action, i))
        return None

    def take(self, i: int, end: float) -> None:
        """Note that the first action has started and keeps its resources busy until ``end``."""
        self._free.update(dict.fromkeys(self._needed[i], end))
        queue = self._queue(i)
        heapq.heappop(queue)
        if queue:
            heapq.heappush(self._heap, (queue[0][0], *queue[0]))

    def _queue(self, i: int) -> list[tuple[float, Action, int]]:
        # What needs nothing waits for nobody.
        return self._queues[self._needed[i] or i]
