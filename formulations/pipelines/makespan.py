"""The makespan problem of a pipeline with fixed stages (SPP section III-B2).

Resources are devices with memory, a channel per pair of neighbouring stages on different devices,
and one all-reduce per stage that runs in parallel to everything else. A *block* is one computation
or transfer of a stage: forward, backward (or input gradient and weight gradient), a transfer.

The objective is the makespan, or the longest span of a device (Qi et al. 2024, section 4).

Microbatches are identical, so in some optimal schedule every block processes them in the order of
their indices. Sort the start times of each block and assign the k-th start to microbatch k; every
constraint still holds:

* Devices and channels are busy in the same intervals, since all microbatches of a block take the
  same time. This holds for any number of blocks on a device.
* If block a precedes block b in every microbatch, then b's k-th start comes after k starts of b,
  each preceded by the end of its a, hence after the k-th end of a. This covers transfers, a weight
  gradient after its input gradient, and stages on one device, which have no transfer between them.
* The number in flight and the memory in use depend on the starts and ends only, not on the
  microbatches they belong to.
* The all-reduce waits for all backwards (weight gradients) of its stage.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.documents.units import (
    MAX_LAYERS,
    MAX_MICROBATCHES,
    require_amount,
    require_count,
)

Objective = Literal["makespan", "span"]
Duplex = Literal["half", "full"]


@dataclass(frozen=True, slots=True)
class MakespanProblem:
    """The times and limits of S stages, in any units of time and memory.

    Attributes
    ----------
    forward, backward, reduce
        One time per stage; ``reduce`` is 0 for a stage that is not replicated.
    send_forward, send_backward
        Transfer times from stage s to s + 1 and back, S - 1 values; 0 if both are on one device.
    in_flight
        Limit per stage on the microbatches in flight: those whose forward has started and whose
        backward (weight gradient) has not ended.
    device
        The device of each stage, numbered in order of first use; by default stage s is on device s.
    weight_gradient
        Time of each stage's weight gradient, if backwards are split: ``backward`` is then the time
        of the input gradient alone. None: backwards are whole.
    saved
        What a microbatch of each stage takes at the start of F, and what of it is given back at the
        end of I and at the end of W; a whole backward gives all back at its end.
    memory
        Limit per device on what all its stages hold together. Empty, as ``saved``: no limits.
    objective
        ``makespan``, or ``span``: the longest time from the first start on a device to the end of
        its last computation or all-reduce.
    duplex
        Whether the two directions of a channel share it (``half``) or not (``full``).
    """

    microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    send_forward: tuple[float, ...]
    send_backward: tuple[float, ...]
    reduce: tuple[float, ...]
    in_flight: tuple[int, ...]
    device: tuple[int, ...] = ()
    weight_gradient: tuple[float, ...] | None = None
    saved: tuple[tuple[float, float, float], ...] = ()
    memory: tuple[float, ...] = ()
    objective: Objective = "makespan"
    duplex: Duplex = "half"

    def __post_init__(self) -> None:
        stages = len(self.forward)
        require_count(self.microbatches, "microbatches", MAX_MICROBATCHES)
        require_count(stages, "stages", MAX_LAYERS)
        if not self.device:
            object.__setattr__(self, "device", tuple(range(stages)))
        sizes = {
            "forward": stages, "backward": stages, "send_forward": stages - 1,
            "send_backward": stages - 1, "reduce": stages, "in_flight": stages, "device": stages,
        }  # fmt: skip
        if self.weight_gradient is not None:
            sizes["weight_gradient"] = stages
        for name, size in sizes.items():
            values = getattr(self, name)
            if len(values) != size:
                raise InputError(f"{name} needs {size} values, got {len(values)}")
            for s, value in enumerate(values):
                require_amount(value, f"{name}[{s}]")
        times = (self.forward, self.backward, self.send_forward, self.send_backward, self.reduce)
        if not math.isfinite(self.microbatches * sum(map(sum, times))):
            raise InputError("the times are too large: their sum is not a finite number")
        if min(self.in_flight) < 1:
            raise InputError(f"in_flight must be at least 1 everywhere, got {self.in_flight}")
        _require_devices(self)
        _require_choice("objective", self.objective, get_args(Objective))
        _require_choice("duplex", self.duplex, get_args(Duplex))
        _require_room(self)

    @property
    def stages(self) -> int:
        """Number of stages S."""
        return len(self.forward)

    @property
    def is_disjoint(self) -> bool:
        """Whether every stage has its own device."""
        return len(set(self.device)) == self.stages

    @property
    def is_split(self) -> bool:
        """Whether backwards are split into input gradients and weight gradients."""
        return self.weight_gradient is not None

    @property
    def last_computation(self) -> tuple[float, ...]:
        """Time of a microbatch's last block on each stage: the weight gradient or the backward."""
        return self.backward if self.weight_gradient is None else self.weight_gradient

    def stages_on(self, device: int) -> list[int]:
        """The stages of one device."""
        return [s for s, home in enumerate(self.device) if home == device]

    def evaluate(self, timetable: "Timetable") -> float:
        """Check every constraint and return the cost of ``timetable`` by the objective.

        Raises InvalidPlan if a constraint is broken; the message names the first one.
        """
        if (timetable.weight_gradient is not None) != self.is_split:
            split = "split" if self.is_split else "whole"
            raise InvalidPlan(f"backwards are {split}, but not in the timetable")
        tolerance = RELATIVE_TOLERANCE * max(timetable.makespan(self), 0.0)
        _require_order(self, timetable, tolerance)
        for d in range(max(self.device) + 1):
            blocks = [one for s in self.stages_on(d) for one in _computations(self, timetable, s)]
            _require_exclusive(f"device {d}", blocks, tolerance)
        for s in range(self.stages):
            _require_in_flight(self, timetable, s, tolerance)
        for s in range(self.stages - 1):
            blocks = [
                ("SEND_F", timetable.send_forward[s], self.send_forward[s]),
                ("SEND_B", timetable.send_backward[s], self.send_backward[s]),
            ]
            if self.device[s] == self.device[s + 1]:
                continue
            for shared in [blocks] if self.duplex == "half" else [[one] for one in blocks]:
                _require_exclusive(f"channel {s}-{s + 1}", shared, tolerance)
        excess = memory_excess(self, timetable)
        if excess is not None:
            d, time, used = excess
            raise InvalidPlan(
                f"device {d}: {used:g} in memory at {time:g}, the limit is {self.memory[d]:g}"
            )
        return timetable.cost(self)


@dataclass(frozen=True, slots=True, eq=False)
class Timetable:
    """Start times: ``forward`` and ``backward`` (S, M), sends (S - 1, M), ``reduce`` (S,).

    ``send_backward[s]`` is the transfer from stage s + 1 back to stage s. If backwards are split,
    ``backward`` holds the input gradients, and ``weight_gradient`` has shape (S, M).
    """

    forward: Floats
    backward: Floats
    send_forward: Floats
    send_backward: Floats
    reduce: Floats
    weight_gradient: Floats | None = None

    @property
    def last_computation(self) -> Floats:
        """Starts of the weight gradients, or of the whole backwards."""
        return self.backward if self.weight_gradient is None else self.weight_gradient

    def makespan(self, problem: MakespanProblem) -> float:
        """The end of the last backward, weight gradient or all-reduce (SPP equation 2)."""
        computed = (self.last_computation + np.array(problem.last_computation)[:, None]).max()
        return float(max(computed, (self.reduce + np.array(problem.reduce)).max()))

    def span(self, problem: MakespanProblem) -> float:
        """The longest time from a device's first start to its last end, all-reduces included."""
        computed = self.last_computation.max(axis=1) + np.array(problem.last_computation)
        ends = np.maximum(computed, self.reduce + np.array(problem.reduce))
        starts = self.forward.min(axis=1)
        rows = [problem.stages_on(d) for d in range(max(problem.device) + 1)]
        return float(max(ends[row].max() - starts[row].min() for row in rows))

    def cost(self, problem: MakespanProblem) -> float:
        """The makespan or the span, as the problem asks."""
        return self.span(problem) if problem.objective == "span" else self.makespan(problem)


_Repeated = tuple[str, Floats, float]  # name, starts, duration of a block


def _computations(problem: MakespanProblem, times: Timetable, s: int) -> list[_Repeated]:
    blocks = [
        (f"{s}F", times.forward[s], problem.forward[s]),
        (f"{s}{'I' if problem.is_split else 'B'}", times.backward[s], problem.backward[s]),
    ]
    if times.weight_gradient is not None:
        blocks.append((f"{s}W", times.weight_gradient[s], problem.last_computation[s]))
    return blocks


def _require_devices(problem: MakespanProblem) -> None:
    used = 0
    for s, d in enumerate(problem.device):
        if d not in range(used + 1):
            raise InputError(
                f"device[{s}] must be an integer from 0 to {used}, got {d}: devices are numbered "
                "in order of first use"
            )
        used = max(used, d + 1)
    for s, (one, following) in enumerate(pairwise(problem.device)):
        if one == following and (problem.send_forward[s] or problem.send_backward[s]):
            raise InputError(
                f"transfers between stages {s} and {s + 1} must take no time: both are on device "
                f"{one}"
            )


def _require_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise InputError(f"{name} must be {' or '.join(known)}, got {value!r}")


def _require_room(problem: MakespanProblem) -> None:
    """Require room for a microbatch of all stages of a device: forwards precede backwards."""
    if not (problem.saved or problem.memory):
        return
    _require_saved(problem)
    devices = max(problem.device) + 1
    if len(problem.memory) != devices:
        raise InputError(f"memory needs {devices} values, got {len(problem.memory)}")
    for d, limit in enumerate(problem.memory):
        require_amount(limit, f"memory[{d}]")
        least = sum(problem.saved[s][0] for s in problem.stages_on(d))
        if limit < least:
            raise InputError(
                f"memory[{d}] must be at least {least}, one microbatch of the stages on device "
                f"{d}, got {limit}"
            )


def _require_saved(problem: MakespanProblem) -> None:
    if len(problem.saved) != problem.stages:
        raise InputError(f"saved needs {problem.stages} values, got {len(problem.saved)}")
    for s, amounts in enumerate(problem.saved):
        if len(amounts) != 3:
            raise InputError(f"saved[{s}] needs 3 values, got {len(amounts)}")
        for amount in amounts:
            require_amount(amount, f"saved[{s}]")
        taken, *given = amounts
        if not math.isclose(taken, sum(given), rel_tol=RELATIVE_TOLERANCE):
            raise InputError(
                f"saved[{s}] must give back {taken}, what F takes, in two parts, got {given}"
            )


def _require_order(problem: MakespanProblem, times: Timetable, tolerance: float) -> None:
    """Every block of a microbatch starts after the previous block ends (SPP's dependencies)."""
    last, back_name = problem.stages - 1, "I" if problem.is_split else "B"
    steps = [
        ("F", back_name, last, times.forward[last], problem.forward[last], times.backward[last])
    ]
    for s in range(last):
        there, back = times.send_forward[s], times.send_backward[s]
        steps += [
            ("F", "SEND_F", s, times.forward[s], problem.forward[s], there),
            ("SEND_F", "next F", s, there, problem.send_forward[s], times.forward[s + 1]),
            (f"next {back_name}", "SEND_B", s,
             times.backward[s + 1], problem.backward[s + 1], back),
            ("SEND_B", back_name, s, back, problem.send_backward[s], times.backward[s]),
        ]  # fmt: skip
    if times.weight_gradient is not None:
        steps += [
            ("I", "W", s, times.backward[s], problem.backward[s], times.weight_gradient[s])
            for s in range(last + 1)
        ]
    _require_starts([times.forward[0], *(start for *_, start in steps)], times.reduce, tolerance)
    for before, after, s, start, duration, following in steps:
        early = np.flatnonzero(following < start + duration - tolerance)
        if len(early):
            raise InvalidPlan(
                f"stage {s}, microbatch {early[0]}: {after} starts before {before} ends"
            )
    ends = times.last_computation.max(axis=1) + np.array(problem.last_computation)
    for s, end in enumerate(ends):
        if problem.reduce[s] > 0 and times.reduce[s] < end - tolerance:
            raise InvalidPlan(f"stage {s}: the all-reduce starts before the last backward ends")


def _require_starts(starts: Sequence[Floats], reduce: Floats, tolerance: float) -> None:
    finite = all(np.isfinite(one).all() for one in (*starts, reduce))
    if not (finite and all((one >= -tolerance).all() for one in starts)):
        raise InvalidPlan("a start time is negative or not finite")


def _require_exclusive(place: str, blocks: Sequence[_Repeated], tolerance: float) -> None:
    intervals = sorted(
        (float(start), float(start) + duration, f"{name}{m}")
        for name, starts, duration in blocks
        for m, start in enumerate(starts)
    )
    for (_, finish, name), (start, _, following) in pairwise(intervals):
        if start < finish - tolerance:
            raise InvalidPlan(f"{place}: {following} starts before {name} ends")


def _require_in_flight(
    problem: MakespanProblem, times: Timetable, s: int, tolerance: float
) -> None:
    starts = np.sort(times.forward[s])
    finished = np.sort(times.last_computation[s]) + problem.last_computation[s]
    in_flight = np.arange(1, len(starts) + 1) - np.searchsorted(
        finished, starts + tolerance, side="right"
    )
    if in_flight.max() > problem.in_flight[s]:
        raise InvalidPlan(
            f"stage {s}: {in_flight.max()} microbatches in flight, the limit is "
            f"{problem.in_flight[s]}"
        )


def memory_excess(problem: MakespanProblem, times: Timetable) -> tuple[int, float, float] | None:
    """The first device whose memory is exceeded, the time, and the use; None without any.

    What ends at some time is given back before anything that starts then is taken.
    """
    tolerance = RELATIVE_TOLERANCE * max(times.makespan(problem), 0.0)
    for d, limit in enumerate(problem.memory):
        starts, used = _memory_use(problem, times, d, tolerance)
        over = np.flatnonzero(used > limit * (1 + RELATIVE_TOLERANCE))
        if len(over):
            return d, float(starts[over[0]]), float(used[over[0]])
    return None


def _memory_use(
    problem: MakespanProblem, times: Timetable, d: int, tolerance: float
) -> tuple[Floats, Floats]:
    """The starts of a device's forwards in order, and the memory in use after each."""
    stages, count = problem.stages_on(d), problem.microbatches
    taken, early, late = np.array([problem.saved[s] for s in stages]).T
    starts = times.forward[stages].ravel()
    order = np.argsort(starts)
    used = np.cumsum(np.repeat(taken, count)[order])
    durations = np.array(problem.last_computation)[stages][:, None]
    ends, given = (times.last_computation[stages] + durations).ravel(), np.repeat(taken, count)
    if problem.is_split:
        inputs = times.backward[stages] + np.array(problem.backward)[stages][:, None]
        ends, given = np.r_[inputs.ravel(), ends], np.repeat(np.r_[early, late], count)
    by_end = np.argsort(ends)
    returned = np.r_[0.0, np.cumsum(given[by_end])]
    used -= returned[np.searchsorted(ends[by_end], starts[order] + tolerance, side="right")]
    return starts[order], used
