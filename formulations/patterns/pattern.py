"""Periodic scheduling: given stages and their devices, the pattern of least period (MadPipe 4.3).

Every operation runs once per period, for consecutive microbatches. Devices and links run one
operation at a time, and the activations of the microbatches in flight must fit in the memory of
their device at every instant. The gradients of a stage are all-reduced once per iteration, and the
weights are updated in a pause between iterations. The times of a pattern leave the pauses out; a
pause delays everything after it (`PeriodicSchedule`).
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from stagewright.formulations.plans.actions import SEND_B, SEND_F, B, F, Operation
from stagewright.formulations.plans.memory import Kept
from stagewright.graphs.documents.errors import InputError, InvalidPlan

TOLERANCE = 1e-10  # of the latency: rounding of sums of float times


class PatternJob(NamedTuple):
    """An operation, its duration, and the device (from 0) or link (after the devices) it uses."""

    operation: Operation
    seconds: float
    resource: int


@dataclass(frozen=True)
class PatternProblem:
    """Schedule stages 0 to N - 1, which a microbatch passes forward and then backward.

    Attributes
    ----------
    forward, backward
        Seconds per stage, shape (N,); the backward includes recomputation.
    there, back
        Seconds of a transfer from stage s to s + 1 and of its gradient, shape (N - 1,); both 0
        where the stages are on one device, which needs no transfer.
    devices
        The device of every stage, shape (N,): numbers from 0 without gaps. A group of devices that
        splits every microbatch is one device.
    kept
        Bytes per stage, shape (N,).
    room_bytes
        Bytes per device for ``kept``: its memory without weights, gradients, optimizer state and
        buffers.
    reduce
        Seconds of the all-reduce per stage, shape (N,); once per iteration. All-reduces of stages
        on one device do not overlap.
    microbatches
        Microbatches per iteration, m. If weights have two versions, at most m + 1 periods pass
        from the start of a stage's forward to the end of its backward and of its all-reduce.
    least_seconds
        Lower bound on the period that leaves time for offloading.
    pause_seconds
        Longest time of an iteration's updates on a device. If positive, the updates start when
        iteration i + 2 starts on the first stage: at most m + 1 periods pass from the start of the
        first forward to the end of the backward and all-reduce of every stage.
    version_bytes
        Per stage the bytes of another version of its weights, shape (N,), if they change after
        every microbatch: there are as many old versions as other microbatches in flight. Empty:
        there are two versions, which are no part of ``kept``.
    follows_first_stage
        Whether the microbatches in flight on the first stage count for the old versions of all.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    there: tuple[float, ...]
    back: tuple[float, ...]
    devices: tuple[int, ...]
    kept: tuple[Kept, ...]
    room_bytes: tuple[float, ...]
    reduce: tuple[float, ...]
    microbatches: int
    least_seconds: float = 0.0
    pause_seconds: float = 0.0
    version_bytes: tuple[float, ...] = ()
    follows_first_stage: bool = False

    def __post_init__(self) -> None:
        n = len(self.forward)
        lengths = (len(self.backward), len(self.there) + 1, len(self.back) + 1, len(self.devices))
        if n == 0 or {n, *lengths, len(self.kept), len(self.reduce)} != {n}:
            raise InputError("a pattern problem needs one value per stage in every field")
        if self.version_bytes and len(self.version_bytes) != n:
            raise InputError("version_bytes must be given for every stage, or for none")
        if set(self.devices) != set(range(len(self.room_bytes))):
            raise InputError(
                "devices must be numbered from 0 without gaps, with room_bytes for each of them"
            )

    @cached_property
    def jobs(self) -> tuple[PatternJob, ...]:
        """All operations of a period, in the order in which a microbatch passes them.

        Links are numbered after the devices, one for each pair of devices that exchange data.
        """
        n, count = len(self.forward), len(self.room_bytes)
        links: dict[frozenset[int], int] = {}
        crossed = [
            links.setdefault(frozenset(pair), count + len(links)) if len(set(pair)) > 1 else None
            for pair in pairwise(self.devices)
        ]
        forth, backwards = [], []
        for s in range(n):
            forth.append(PatternJob(Operation(s, F), self.forward[s], self.devices[s]))
            backwards.append(PatternJob(Operation(s, B), self.backward[s], self.devices[s]))
            link = crossed[s] if s < n - 1 else None
            if link is not None:
                forth.append(PatternJob(Operation(s, SEND_F), self.there[s], link))
                backwards.append(PatternJob(Operation(s + 1, SEND_B), self.back[s], link))
        return (*forth, *backwards[::-1])

    @property
    def most_periods(self) -> float:
        """How many periods a microbatch's round trip may last, by the versions of the weights."""
        return math.inf if self.version_bytes else self.microbatches + 1

    def old_versions(self, stage: int, in_flight: Sequence[int]) -> float:
        """Bytes of a stage's old versions with so many microbatches in flight on every stage."""
        if not self.version_bytes:
            return 0.0
        others = in_flight[0 if self.follows_first_stage else stage] - 1
        return max(0, others) * self.version_bytes[stage]

    def short_bytes(self) -> list[float]:
        """Per device the bytes missing with one microbatch in flight; negative: to spare."""
        needed = [0.0] * len(self.room_bytes)
        for one, device in zip(self.kept, self.devices, strict=True):
            needed[device] += one.saved_bytes + one.working_bytes
        return [need - room for need, room in zip(needed, self.room_bytes, strict=True)]

    @cached_property
    def shared(self) -> tuple[tuple[int, ...], ...]:
        """The jobs of every device and link, as positions in ``jobs``."""
        found: defaultdict[int, list[int]] = defaultdict(list)
        for i, job in enumerate(self.jobs):
            found[job.resource].append(i)
        return tuple(tuple(found[resource]) for resource in sorted(found))

    @cached_property
    def position(self) -> dict[Operation, int]:
        """The index of each operation in ``jobs``."""
        return {job.operation: i for i, job in enumerate(self.jobs)}

    def stages_on(self, device: int) -> list[int]:
        """The stages of a device."""
        return [s for s, d in enumerate(self.devices) if d == device]

    @cached_property
    def reducing(self) -> tuple[tuple[int, ...], ...]:
        """Per device the stages whose all-reduces must not overlap."""
        devices = range(len(self.room_bytes))
        return tuple(tuple(s for s in self.stages_on(v) if self.reduce[s] > 0) for v in devices)

    def iteration_seconds(self, period: float) -> float:
        """Duration of an iteration: one period per microbatch, plus the pause."""
        return self.microbatches * period + self.pause_seconds

    def period_of(self, iteration: float) -> float:
        """The period of an iteration that takes ``iteration`` seconds."""
        return (iteration - self.pause_seconds) / self.microbatches

    def reduce_starts(self, pattern: "Pattern") -> tuple[float, ...]:
        """Start of each stage's all-reduce, as if microbatch 0 were the last of an iteration.

        By default it starts when the backward ends; all-reduces on one device run in sequence.
        """
        if pattern.reduces:
            return pattern.reduces
        starts = [
            pattern.starts[self.position[Operation(s, B)]] + seconds
            for s, seconds in enumerate(self.backward)
        ]
        for stages in self.reducing:
            until = -math.inf
            for _ in range(2):  # the second pass follows the all-reduces of the previous iteration
                for s in reversed(stages):  # the backward of the last stage ends first
                    starts[s] = max(starts[s], until)
                    until = starts[s] + self.reduce[s]
                until -= self.microbatches * pattern.period
        return tuple(starts)

    def evaluate(self, pattern: "Pattern") -> float:
        """Check every rule and return the period of ``pattern``.

        Raises InvalidPlan if a rule is broken; the message names the first one.
        """
        for problem in self._broken(pattern):
            raise InvalidPlan(problem)
        return pattern.period

    def _broken(self, pattern: "Pattern") -> Iterator[str]:
        starts, jobs = pattern.starts, self.jobs
        if len(starts) != len(jobs) or not all(math.isfinite(start) for start in starts):
            yield f"the pattern needs {len(jobs)} starts"
            return
        if pattern.period < self.least_seconds * (1 - TOLERANCE):
            yield f"the period is {pattern.period}, below {self.least_seconds}"
        ends = [start + job.seconds for start, job in zip(starts, jobs, strict=True)]
        slack = TOLERANCE * (pattern.period + max(ends) - min(starts))
        for i in range(1, len(jobs)):
            if starts[i] < ends[i - 1] - slack:
                yield f"{jobs[i].operation} starts before {jobs[i - 1].operation} ends"
        for members in self.shared:
            occupied = {str(jobs[i].operation): (starts[i], jobs[i].seconds) for i in members}
            yield from overlaps(occupied, pattern.period, slack)
        yield from self._broken_updates(pattern, slack)
        for device, room in enumerate(self.room_bytes):
            most = self.peak_bytes(pattern, device)
            if most > room:  # as the checker compares
                yield f"device {device} keeps {most} bytes and has room for {room}"

    def _broken_updates(self, pattern: "Pattern", slack: float) -> Iterator[str]:
        iteration = self.microbatches * pattern.period
        reduces = self.reduce_starts(pattern)
        if len(reduces) != len(self.reduce):
            yield f"the pattern needs {len(self.reduce)} starts of all-reduces"
            return
        for s, (start, seconds) in enumerate(zip(reduces, self.reduce, strict=True)):
            forward, backward = (self.position[Operation(s, kind)] for kind in (F, B))
            end = pattern.starts[backward] + self.backward[s]
            if start < end - slack:
                yield f"the all-reduce of stage {s} starts before {s}B ends"
            needed = pattern.starts[0 if self.pause_seconds > 0 else forward]
            if max(end, start + seconds) - needed > self.most_periods * pattern.period + slack:
                yield f"stage {s} would need a third version of its weights"
        for stages in self.reducing:
            occupied = {
                f"the all-reduce of stage {s}": (reduces[s], self.reduce[s]) for s in stages
            }
            yield from overlaps(occupied, iteration, slack)

    def peak_bytes(self, pattern: "Pattern", device: int) -> float:
        """The peak bytes of a device's microbatches in flight."""
        most = 0.0
        slack = TOLERANCE * (pattern.period + max(pattern.starts) - min(pattern.starts))
        stages, first = self.stages_on(device), self._most_in_flight(pattern, 0, slack)
        for s in stages:
            for kind in (F, B):
                instant = pattern.starts[self.position[Operation(s, kind)]]
                total = sum(self._bytes_at(pattern, r, instant, slack, first) for r in stages)
                most = max(most, total)
        return most

    def _most_in_flight(self, pattern: "Pattern", stage: int, slack: float) -> int:
        """The microbatches in flight on a stage as a forward has begun."""
        instant = pattern.starts[self.position[Operation(stage, F)]]
        begun, _, ended = self._counts(pattern, stage, instant, slack)
        return begun - ended

    def _bytes_at(
        self, pattern: "Pattern", stage: int, instant: float, slack: float, first: int
    ) -> float:
        """Bytes that a stage keeps just after ``instant``; times within ``slack`` are equal.

        ``first`` are the microbatches in flight on the first stage at most.
        """
        begun, at_work, ended = self._counts(pattern, stage, instant, slack)
        kept, in_flight = self.kept[stage], begun - ended
        every = [in_flight] * len(self.kept)
        every[0] = first if self.follows_first_stage else every[0]
        held = in_flight * kept.saved_bytes + (at_work - ended) * kept.working_bytes
        return held + self.old_versions(stage, every)

    def _counts(
        self, pattern: "Pattern", stage: int, instant: float, slack: float
    ) -> tuple[int, int, int]:
        """How many forwards and backwards have begun just after ``instant``, and have ended."""
        forward, backward = (self.position[Operation(stage, kind)] for kind in (F, B))
        begins = [pattern.starts[forward], pattern.starts[backward]]
        end = pattern.starts[backward] + self.jobs[backward].seconds
        begun = [math.floor((instant - begin + slack) / pattern.period) for begin in begins]
        # An operation of zero length is in flight at its start.
        ended = math.floor((instant - end + slack) / pattern.period)
        return begun[0], begun[1], ended


@dataclass(frozen=True, slots=True)
class Pattern:
    """Start times of all operations of microbatch 0, in the order of :attr:`PatternProblem.jobs`.

    Starts are in seconds, start = shift x period + time within the period; microbatch k starts k
    periods later. ``reduces`` are the starts of the all-reduces as if microbatch 0 were the last
    of an iteration (empty: see :meth:`PatternProblem.reduce_starts`).
    """

    period: float
    starts: tuple[float, ...]
    reduces: tuple[float, ...] = ()


def overlaps(
    occupied: dict[str, tuple[float, float]], period: float, slack: float
) -> Iterator[str]:
    """Overlaps of intervals (start, seconds) on one resource, repeated every period."""
    positive = [name for name, (_, seconds) in occupied.items() if seconds > 0]
    order = sorted((occupied[name][0] % period, name) for name in positive)
    order += [(start + period, name) for start, name in order[:1]]
    for (start, name), (following, other) in pairwise(order):
        if start + occupied[name][1] > following + slack:
            yield f"{name} runs into {other}"
    # Operations of zero length may run between any two others.
    for other in occupied.keys() - set(positive):
        for name in positive:
            since = (occupied[other][0] - occupied[name][0]) % period
            if slack < since < occupied[name][1] - slack:
                yield f"{name} runs into {other}"
