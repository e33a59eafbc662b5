"""The blocks that every microbatch passes, with their durations and precedences."""

from dataclasses import dataclass

import numpy as np

from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.graphs.documents.arrays import Floats, Ints

NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class BlockGraph:
    """n blocks in topological order of their precedences.

    Attributes
    ----------
    durations, releases, tails
        Duration of each block, its earliest start, and the time that must follow its last
        microbatch; shape (n,).
    machines
        The device or channel of each block, numbered from 0; shape (n,).
    before
        The predecessors of a block within a microbatch; shape (n, 2), filled up with ``NONE``.
    freeing, limits
        Block j of microbatch m starts after block ``freeing[j]`` of microbatch ``m - limits[j]``
        ends, for the in-flight limit; shape (n,), ``NONE`` where there is no limit.
    """

    durations: Floats
    releases: Floats
    tails: Floats
    machines: Ints
    before: Ints
    freeing: Ints
    limits: Ints

    def reversed(self) -> "BlockGraph":
        """The blocks of the problem reversed in time; block j becomes n - 1 - j."""
        n = len(self.durations)
        freeing, limits = np.full(n, NONE), np.full(n, NONE)
        limited = np.flatnonzero(self.freeing != NONE)
        waiting = n - 1 - self.freeing[limited]
        freeing[waiting], limits[waiting] = n - 1 - limited, self.limits[limited]
        after = self.after()[::-1]
        return BlockGraph(
            durations=self.durations[::-1].copy(),
            releases=self.tails[::-1].copy(),
            tails=self.releases[::-1].copy(),
            machines=self.machines[::-1].copy(),
            before=np.where(after == NONE, NONE, n - 1 - after),
            freeing=freeing,
            limits=limits,
        )

    def after(self) -> Ints:
        """The successors of each block within a microbatch, shape (n, 2); inverse of ``before``."""
        after = np.full_like(self.before, NONE)
        for j, row in enumerate(self.before.tolist()):
            for i in row:
                if i != NONE:
                    after[i, int(after[i, 0] != NONE)] = j
        return after

    def members(self) -> list[Ints]:
        """The blocks of each device and channel, in ascending order."""
        return [np.flatnonzero(self.machines == r) for r in range(self.machines.max() + 1)]


def numbering(stages: int) -> tuple[Ints, Ints, Ints]:
    """The block numbers of the forwards, the backwards (input gradients) and the weight gradients.

    Block j < 2S - 1 is the forward of stage j/2 (j even) or the transfer after it (j odd); block
    4S - 3 - j is its backward counterpart. Weight gradients are numbered from 4S - 2 on.
    """
    stage = np.arange(stages)
    return 2 * stage, 4 * stages - 3 - 2 * stage, 4 * stages - 2 + stage


def blocks_of(problem: MakespanProblem) -> BlockGraph:
    """The 4S - 2 blocks of a microbatch, and S weight gradients if backwards are split.

    An all-reduce is the tail of its stage's last computation. The two transfers between stages on
    one device, which take no time, have their own channel.
    """
    forward, backward, weight = numbering(problem.stages)
    path = 4 * problem.stages - 2
    n = path + problem.stages if problem.is_split else path
    durations, tails, before = np.zeros(n), np.zeros(n), np.full((n, 2), NONE)
    durations[forward], durations[backward] = problem.forward, problem.backward
    durations[forward[:-1] + 1] = problem.send_forward
    durations[backward[:-1] - 1] = problem.send_backward
    before[1:path, 0] = np.arange(path - 1)
    final = backward
    if problem.is_split:
        durations[weight], before[weight, 0], final = problem.last_computation, backward, weight
    tails[final] = problem.reduce
    freeing, limits = np.full(n, NONE), np.full(n, NONE)
    freeing[forward] = final
    limits[forward] = np.minimum(problem.in_flight, problem.microbatches)
    return BlockGraph(
        durations=durations,
        releases=np.zeros(n),
        tails=tails,
        machines=_machines(problem),
        before=before,
        freeing=freeing,
        limits=limits,
    )


def _machines(problem: MakespanProblem) -> Ints:
    """Devices and channels, numbered in the order in which the first microbatch reaches them."""
    there: list[int] = []
    of_device: dict[int, int] = {}
    for device in problem.device:
        if device not in of_device:
            of_device[device] = len(of_device) + len(there) // 2
        there += [of_device[device], len(of_device) + len(there) // 2]
    path = there[:-1]
    back = path[::-1]
    if problem.duplex == "full":  # channels of their own, numbered last
        back[1::2] = range(max(path) + 1, max(path) + problem.stages)
    weight = path[::2] if problem.is_split else []
    return np.array([*path, *back, *weight])


def block_starts(problem: MakespanProblem, times: Timetable) -> Floats:
    """The start times by block, shape (n, M), microbatches in the order of their starts."""
    forward, backward, _ = numbering(problem.stages)
    starts = np.empty((4 * problem.stages - 2, problem.microbatches))
    starts[forward], starts[backward] = times.forward, times.backward
    starts[forward[:-1] + 1] = times.send_forward
    starts[backward[:-1] - 1] = times.send_backward
    if times.weight_gradient is not None:
        starts = np.concatenate([starts, times.weight_gradient])
    return np.sort(starts, axis=1)


def timetable_of(problem: MakespanProblem, starts: Floats) -> Timetable:
    """The timetable of start times by block; all-reduces start as early as possible."""
    forward, backward, weight = numbering(problem.stages)
    final = weight if problem.is_split else backward
    return Timetable(
        forward=starts[forward],
        backward=starts[backward],
        send_forward=starts[forward[:-1] + 1],
        send_backward=starts[backward[:-1] - 1],
        reduce=starts[final].max(axis=1) + np.array(problem.last_computation),
        weight_gradient=starts[weight] if problem.is_split else None,
    )
