"""Lower bounds that memory limits prove, on the makespan and on the longest span of a device.

All are bounds on the *window* of a device: the time from its first forward to the end of its last
computation, or of its last backward (input gradient).

Notation as in :mod:`bounds`. A device has the stages s1 < ... < sv and M microbatches. Its first
computation is F(s1, 0), its first backward B(sv, 0), its last forward F(sv, M - 1), its last
backward B(s1, M - 1), since every microbatch passes the stages in order, there and back.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats, Ints

SPAN_LOAD, SPAN_PATH = "load of a device", "way of a microbatch"
WARM_UP, OVER_TIME = "warm-up and drain in memory", "memory over time"
ROUNDS = "rounds of microbatches in memory"
MEMORY_NAMES = (WARM_UP, OVER_TIME, ROUNDS)
_WINDOW_NAMES = (SPAN_LOAD, SPAN_PATH, *MEMORY_NAMES)


@dataclass(frozen=True, slots=True, eq=False)
class StagePaths:
    """Times of a single microbatch, per stage, shape (S,).

    ``head`` is the time before F(s), ``round_trip`` from the start of F(s) to the start of B(s),
    and ``tail`` after B(s), including weight gradients and all-reduces of s and earlier stages.
    ``weight_gradient`` is 0 where backwards are whole.
    """

    head: Floats
    round_trip: Floats
    tail: Floats
    weight_gradient: Floats

    @classmethod
    def of(cls, problem: MakespanProblem) -> "StagePaths":
        """The times of the stages of ``problem``."""
        stages = problem.stages
        weight = np.array(problem.weight_gradient or np.zeros(stages))
        head, round_trip, tail = np.zeros(stages), np.zeros(stages), weight + problem.reduce
        for s in range(1, stages):
            head[s] = head[s - 1] + problem.forward[s - 1] + problem.send_forward[s - 1]
            onward = problem.send_backward[s - 1] + problem.backward[s - 1] + tail[s - 1]
            tail[s] = max(tail[s], onward)
        round_trip[-1] = problem.forward[-1]
        for s in reversed(range(stages - 1)):
            sends = problem.send_forward[s] + problem.send_backward[s]
            round_trip[s] = problem.forward[s] + sends + round_trip[s + 1] + problem.backward[s + 1]
        return cls(head, round_trip, tail, weight)

    def around(self, problem: MakespanProblem, s: int) -> float:
        """The longest time before F(s) and after B(s) together in the span of an earlier stage."""
        onward, most = 0.0, 0.0
        for earlier in range(s, -1, -1):
            if earlier < s:
                onward += problem.send_backward[earlier] + problem.backward[earlier]
            last = float(self.weight_gradient[earlier]) + problem.reduce[earlier]
            most = max(most, float(self.head[s] - self.head[earlier]) + onward + last)
        return most


@dataclass(frozen=True, slots=True, eq=False)
class DeviceView:
    """The data of a device's bounds; arrays with one value per stage of the device, s1 first.

    ``taken`` is what a microbatch holds up to the end of B, ``late`` what it holds from then to the
    end of W; ``limits`` are in-flight limits, at most M. ``round_trip`` is from the start of F to
    the start of B, ``reach`` from F(s1) to F(s) of a microbatch, both with no waiting. ``pace`` is
    the longest computation, up to I, or transfer of s1 and the stages after it.
    """

    forward: Floats
    backward: Floats
    weight: Floats
    taken: Floats
    late: Floats
    limits: Ints
    round_trip: Floats
    reach: Floats
    pace: float
    memory: float
    microbatches: int

    @property
    def load(self) -> float:
        """Seconds of all computations of the device."""
        return self.microbatches * float((self.forward + self.backward + self.weight).sum())

    @property
    def there(self) -> float:
        """Seconds from a microbatch's first forward's start to its first backward's start."""
        return float(self.reach[-1] + self.round_trip[-1])

    @property
    def back(self) -> float:
        """Seconds from a microbatch's last forward's start to its last backward's start."""
        return float(self.round_trip[0] - self.reach[-1])


def _device_view(problem: MakespanProblem, d: int, paths: StagePaths) -> DeviceView:
    """The view of device d."""
    on = problem.stages_on(d)
    none = np.zeros(problem.stages)
    saved = np.array(problem.saved or [(0.0, 0.0, 0.0)] * problem.stages)
    weight = none if problem.weight_gradient is None else np.array(problem.weight_gradient)
    return DeviceView(
        forward=np.array(problem.forward)[on],
        backward=np.array(problem.backward)[on],
        weight=weight[on],
        taken=saved[on, 0],
        late=saved[on, 2] if problem.is_split else none[on],
        limits=np.minimum(problem.in_flight, problem.microbatches)[on],
        round_trip=paths.round_trip[on],
        reach=paths.head[on] - paths.head[on[0]],
        pace=max(
            *problem.forward[on[0] :],
            *problem.backward[on[0] :],
            *problem.send_forward[on[0] :],
            *problem.send_backward[on[0] :],
        ),
        memory=problem.memory[d] if problem.memory else np.inf,
        microbatches=problem.microbatches,
    )


def _one_microbatch(view: DeviceView) -> tuple[float, float]:
    """The way of a microbatch from F(s1) to the end of B(s1), and of W(s1)."""
    backward = float(view.round_trip[0] + view.backward[0])
    return backward, backward + float(view.weight[0])


def warm_up_and_drain(view: DeviceView) -> tuple[float, float]:
    """Windows to the end of the last backward and of the last computation, with idle times.

    *Warm-up.* Between F(s1, 0) and B(sv, 0) nothing is given back. So only forwards run that fit in
    memory together; the rest of the time the device is idle.

    *Drain.* When F(sv, M - 1) starts, memory holds the microbatches whose backward, or whose weight
    gradient, is still to come: one at least on each stage before its backward. Until B(s1, M - 1)
    starts, the device has this forward and no more than their work to do.

    If all forwards fit at once, the two may overlap, and one of them counts. For the last backward,
    weight gradients may be left over: at most those of the microbatches in memory at the drain.
    """
    ends = view.backward + view.weight
    warm_up = max(0.0, view.there - _most(view, [(view.forward, view.taken)]))
    left = _most(view, [(ends, view.taken), (view.weight, view.late)], one_each=True)
    drain = float(view.back - view.forward[-1] + ends[0]) - left
    unfinished = _most(view, [(view.weight, view.taken), (view.weight, view.late)], one_each=True)
    to_backward, own = drain - float(view.weight[0]), max(0.0, drain)
    if _fit_at_once(view):
        idle_to_backward, idle = max(to_backward, warm_up - unfinished), max(own, warm_up)
    else:
        idle_to_backward, idle = warm_up + max(to_backward, -unfinished), warm_up + own
    return view.load + idle_to_backward, view.load + idle


def _memory_over_time(view: DeviceView) -> float:
    """The shortest window in which the microbatches' memory, integrated over time, fits.

    Microbatch m holds ``taken`` on stage s for its round trip and B at least, then ``late`` for W.
    After the start of the window memory fills no faster than forwards take it, and before its end
    it empties no faster than backwards and weight gradients give it back. The two ramps count if
    the window is known to be no shorter than both together.
    """
    held = view.taken * (view.round_trip + view.backward) + view.late * view.weight
    area = view.microbatches * float(held.sum())
    if area <= 0 or not np.isfinite(view.memory):
        return 0.0
    given = view.taken - view.late
    up, unused = _ramp(view.memory, view.taken, view.forward)
    amounts = np.r_[given, view.late]
    down, left = _ramp(view.memory, amounts, np.r_[view.backward, view.weight])
    window = max(view.load, area / view.memory)
    return window if window < up + down else max(window, (area + unused + left) / view.memory)


def _rounds(view: DeviceView) -> tuple[float, float]:
    """Windows to the end of the last backward and of the last computation, by rounds.

    At most k microbatches are between F(s1) and the end of B(s1), or of W(s1) if B gives nothing
    back: each holds its activations of s1. So F(s1, m + k) follows microbatch m, and the last one
    follows one of its place r in every round. In the first round, that one passes the slowest stage
    or channel r times the pace later than the first. The same holds up to the end of B(sv), with
    fewer microbatches: when the first of them ends it, it holds the activations of all stages.
    """
    first, others = float(view.taken[0]), float(view.taken[1:].sum())
    backward, whole = _one_microbatch(view)
    held = whole if view.late[0] >= first else backward
    rounds = max(
        _rounds_of(view, view.memory, first, held),
        _rounds_of(view, view.memory - others, first, view.there + float(view.backward[-1])),
    )
    return rounds + backward, rounds + whole


def _rounds_of(view: DeviceView, memory: float, amount: float, held: float) -> float:
    """The earliest start of the last microbatch, of which each holds ``amount`` for a time."""
    most = view.limits[0]
    if amount > 0 and np.isfinite(memory):
        most = min(most, np.floor(memory * (1 + RELATIVE_TOLERANCE) / amount))
    rounds, place = divmod(view.microbatches - 1, max(1, int(most)))
    return rounds * held + place * view.pace


def _ramp(memory: float, amounts: Floats, seconds: Floats) -> tuple[float, float]:
    """The least time to fill memory, one computation ahead, and the memory-time unused by then."""
    moved = amounts > 0
    if not moved.any() or (seconds[moved] <= 0).any():
        return 0.0, 0.0
    left = max(0.0, memory - float(amounts.max()))
    time = left / float((amounts[moved] / seconds[moved]).max())
    return time, time * left / 2


def _fit_at_once(view: DeviceView) -> bool:
    needed = view.microbatches * float(view.taken.sum())
    return bool(
        needed <= view.memory * (1 + RELATIVE_TOLERANCE)
        and (view.limits >= view.microbatches).all()
    )


def _most(view: DeviceView, kinds: list[tuple[Floats, Floats]], one_each: bool = False) -> float:
    """An upper bound on the value of microbatches that are in memory at once.

    ``kinds`` are (value, amount) per stage; of each at most the limit in flight. With ``one_each``
    at least one of the first kind is there on each stage.
    """
    room, fixed = view.memory * (1 + RELATIVE_TOLERANCE), 0.0
    counts = defaultdict[tuple[float, float], int](int)  # in plain Python: there are few
    for kind, columns in enumerate(kinds):
        there = int(one_each and kind == 0)
        for value, amount, limit in zip(*map(Floats.tolist, (*columns, view.limits)), strict=True):
            fixed, room = fixed + there * value, room - there * amount
            if value > 0:
                counts[value, amount] += limit - there
    if not counts:
        return fixed
    types = sorted(counts)
    return fixed + _knapsack(np.array(types), np.array([float(counts[one]) for one in types]), room)


def _knapsack(types: Floats, counts: Floats, room: float) -> float:
    """The greatest value of items, (value, amount) each, that fit in the room.

    Exact for up to two types, else an upper bound: items can be divided, or there are as many as
    fit of the least amount, each of the greatest value.
    """
    values, amounts = types.T
    if len(types) == 1:
        return float(values[0] * _number(room, amounts[0], counts[0]))
    if len(types) == 2:
        some = np.arange(int(_number(room, amounts[0], counts[0])) + 1)
        others = np.full(len(some), counts[1])
        if amounts[1] > 0:
            others = np.clip(np.floor((room - some * amounts[0]) / amounts[1]), 0.0, counts[1])
        return float((some * values[0] + others * values[1]).max())
    order = np.argsort(amounts / values)
    used = (amounts * counts)[order]
    with np.errstate(divide="ignore", invalid="ignore"):
        left = (room - np.cumsum(used) + used) / amounts[order]
    share = np.clip(np.where(amounts[order] > 0, left, np.inf), 0.0, counts[order])
    number = _number(room, float(amounts.min()), counts.sum())
    return min(float(values[order] @ share), float(values.max() * number))


def _number(room: float, amount: float, count: float) -> float:
    """How many items of an amount fit, at most ``count``."""
    return min(max(float(np.floor(room / amount)), 0.0), count) if amount > 0 else count


def window_bounds(problem: MakespanProblem, paths: StagePaths) -> list[tuple[str, float]]:
    """The bounds by name: on the longest span, or on the makespan.

    The first forward of a device is preceded by those of the earlier stages, its last backward is
    followed by theirs. So its window up to there, with the way to it and from it, fits in the span
    of the device of any earlier stage.
    """
    reduce, spans = np.array(problem.reduce), problem.objective == "span"
    best = dict.fromkeys(_WINDOW_NAMES if spans else MEMORY_NAMES, 0.0)
    for d in range(1 + max(problem.device)):
        on = problem.stages_on(d)
        first, view = on[0], _device_view(problem, d, paths)
        around = paths.around(problem, first) if spans else paths.head[first] + paths.tail[first]
        head, least = 0.0 if spans else paths.head[first], reduce[on].min()
        windows = {
            SPAN_LOAD: (0.0, view.load),
            SPAN_PATH: _one_microbatch(view),
            WARM_UP: warm_up_and_drain(view),
            OVER_TIME: (0.0, _memory_over_time(view)),
            ROUNDS: _rounds(view),
        }
        for name in best:
            to_backward, whole = windows[name]
            best[name] = max(best[name], float(to_backward + around), float(head + whole + least))
    return list(best.items())
