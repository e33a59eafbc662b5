"""Event-driven simulation of a pipeline's blocks with a choice rule per device."""

import heapq
from collections import deque
from collections.abc import Callable

import numpy as np

from stagewright.formulations.pipelines.blocks import NONE, blocks_of, numbering, timetable_of
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable

Task = tuple[int, int]  # block and microbatch


class EventRun:
    """Simulates devices that start the task ``choose(device, run)`` when idle; None waits.

    Channels are first come, first served; stages on one device have no transfers between them.

    Attributes
    ----------
    ready
        ``ready[block][m]``: whether the previous block has ended.
    started
        Number of microbatches that each block has started.
    """

    def __init__(
        self, problem: MakespanProblem, choose: Callable[[int, "EventRun"], Task | None]
    ) -> None:
        blocks, count = blocks_of(problem), problem.microbatches
        self.problem, self.choose = problem, choose
        self.durations, self.machine = blocks.durations.tolist(), blocks.machines.tolist()
        self.after = [[j for j in row if j != NONE] for row in blocks.after().tolist()]
        forward = numbering(problem.stages)[0].tolist()
        self.device_of = {self.machine[forward[s]]: d for s, d in enumerate(problem.device)}
        self.instant = _transfers_on_one_device(problem)
        self.ready = [[False] * count for _ in self.durations]
        self.ready[0] = [True] * count
        self.started = [0] * len(self.durations)
        self.starts = [[0.0] * count for _ in self.durations]
        self.idle = [True] * (max(self.machine) + 1)
        self.waiting: list[deque[Task]] = [deque() for _ in self.idle]
        self.events: list[tuple[float, int, int, int]] = []
        self.sequence = 0

    def finish(self) -> Timetable:
        """Run to the end.

        Raises
        ------
        ValueError
            If the devices deadlock with work left.
        """
        self._start_device(self.machine[0], 0.0)
        while self.events:
            now, _, block, m = heapq.heappop(self.events)
            self._end(block, m, now)
        if min(self.started) < self.problem.microbatches:
            raise ValueError("deadlock: the devices wait for each other")
        return timetable_of(self.problem, np.array(self.starts))

    def _end(self, block: int, m: int, now: float) -> None:
        machine = self.machine[block]
        self.idle[machine] = True
        devices = []
        if machine in self.device_of:
            devices.append(machine)
        else:
            self._start_channel(machine, now)
        for following in self.after[block]:
            self._arrive(following, m, now, devices)
        for device in devices:
            self._start_device(device, now)

    def _arrive(self, block: int, m: int, now: float, devices: list[int]) -> None:
        """Start a transfer, or add the device to ``devices``."""
        machine = self.machine[block]
        self.ready[block][m] = True
        if machine in self.device_of:
            devices.append(machine)
        elif block in self.instant:
            self._note(block, m, now)
            for following in self.after[block]:
                self._arrive(following, m, now, devices)
        else:
            self.waiting[machine].append((block, m))
            self._start_channel(machine, now)

    def _start_device(self, machine: int, now: float) -> None:
        task = self.choose(self.device_of[machine], self) if self.idle[machine] else None
        if task is not None:
            self._start(task, now)

    def _start_channel(self, machine: int, now: float) -> None:
        if self.idle[machine] and self.waiting[machine]:
            self._start(self.waiting[machine].popleft(), now)

    def _start(self, task: Task, now: float) -> None:
        block, m = task
        self.idle[self.machine[block]] = False
        self._note(block, m, now)
        self.sequence += 1  # among equal times, first come first served
        heapq.heappush(self.events, (now + self.durations[block], self.sequence, block, m))

    def _note(self, block: int, m: int, now: float) -> None:
        self.started[block] += 1
        self.starts[block][m] = now


def _transfers_on_one_device(problem: MakespanProblem) -> set[int]:
    """The transfer blocks between two stages on one device."""
    forward, backward, _ = (numbers.tolist() for numbers in numbering(problem.stages))
    same = [s for s in range(problem.stages - 1) if problem.device[s] == problem.device[s + 1]]
    return {forward[s] + 1 for s in same} | {backward[s] - 1 for s in same}
