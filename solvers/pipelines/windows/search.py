"""Search in all windows of a pipeline: lower bounds, and schedules that meet them.

For a target T, the windows are searched in both directions of time, short ones first. A search that
finds no schedule of T refutes T: every schedule takes longer. Every other search raises the heads
(or tails) for the next ones. A window with too many states is left out; states that are too many
with the same blocks scheduled are merged, each time the earliest of both, which only relaxes the
problem. Schedules come from the window of all stages, with the best states of each step.

A search in one window: every active schedule, one block after the other.

After Giffler and Thompson (1960). Of the states with the same blocks scheduled it keeps those that
no other dominates (Gromicho et al., 2012), and drops those whose bound exceeds the target.
"""

from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import NamedTuple

import numpy as np

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.blocks import NONE, BlockGraph, blocks_of
from stagewright.formulations.pipelines.bounds.stages import longest_paths
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.pipelines.makespan_models import earliest
from stagewright.formulations.pipelines.windows import Span, Window, spans, window
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.pipelines.windows.kernels import Parents, Places, advance

_UNMERGED = 2**62  # a width that no search reaches
ROUNDING = 1e-12  # relative; sums of the same numbers in another order may exceed the target


class WindowRun:
    """The states of a search, and the way to each.

    Attributes
    ----------
    done
        Number of blocks that are scheduled in every state.
    where, clock
        The states; see :mod:`window_kernels`.
    ends
        The earliest end of every block in any state, shape (n, M).
    is_exact
        Whether no state was left out.
    """

    def __init__(self, form: Window, target: float, width: int = _UNMERGED) -> None:
        self.form, self.target, self.width, self.done = form, target, width, 0
        most = 1 + min(form.heads.shape[1], int(form.limits.max()))  # microbatches, and a 0
        self.where = np.zeros((1, most), np.int16)
        self.clock = np.zeros((1, 1 + len(form.members) + most))
        self.ends = np.full(form.heads.shape, np.inf)
        self.is_exact = True
        self._steps: list[tuple[Ints, Parents, Places]] = []

    @property
    def is_finished(self) -> bool:
        """Whether no state is left, or all blocks are scheduled."""
        return self.is_empty or self.done == self.form.heads.size

    @property
    def is_empty(self) -> bool:
        """Whether no state is left."""
        return not len(self.clock)

    def bound(self) -> float:
        """The least bound of all states, infinite without any."""
        return float(self.clock[:, 0].min(initial=np.inf))

    def advance(self, most: int) -> int:
        """Go on until ``most`` states are found; returns their number."""
        self.done, self.where, self.clock, sizes, parents, blocks = advance(
            self.form,
            self.target * (1 + ROUNDING),
            self.width,
            self.done,
            self.where,
            self.clock,
            self.ends,
            most,
        )
        self._steps.append((sizes, parents, blocks))
        return len(parents)

    def leave_out(self, beam: int) -> None:
        """After one step, keep the ``beam`` states with the least bounds and busy machines."""
        if len(self.clock) <= beam:
            return
        machines = self.clock[:, 1 : 1 + len(self.form.members)]
        score = self.clock[:, 0] + machines.mean(axis=1)
        kept = np.sort(np.argpartition(score, beam)[:beam])
        self.where, self.clock = self.where[kept], self.clock[kept]
        _, parents, blocks = self._steps[-1]
        self._steps[-1] = np.array([beam]), parents[kept], blocks[kept]
        self.is_exact = False

    def order(self) -> Ints:
        """The blocks in the sequence that leads to the best state."""
        sizes, parents, blocks = (np.concatenate(part) for part in zip(*self._steps, strict=True))
        state, order = int(self.clock[:, 0].argmin()), np.empty(self.done, np.int64)
        for step, end in zip(reversed(range(self.done)), np.cumsum(sizes)[::-1], strict=True):
            place = end - sizes[step] + state
            order[step], state = blocks[place], int(parents[place])
        return order

    def ranks(self) -> Floats:
        """The position of every block in that sequence, shape (n, M)."""
        ranks = np.empty(self.form.heads.shape)
        done = [0] * len(ranks)
        for rank, j in enumerate(self.order().tolist()):
            ranks[j, done[j]] = rank
            done[j] += 1
        return ranks


CHUNK = 20_000  # states between two looks at the time
SMALLEST = 1e-3  # gap at which a round ends, relative
_BELOW = 0.5 * RELATIVE_TOLERANCE  # by which a target is below a known cost, relative


class Effort(NamedTuple):
    """Limits of each search of a round.

    It is left out if it has more than ``states``; more than ``width`` with the same blocks are
    merged; the search for a schedule keeps ``beam`` in each step.
    """

    states: int = 20_000
    width: int = 4
    beam: int = 200

    def more(self) -> "Effort":
        """The effort of the next round."""
        return Effort(8 * self.states, 2 * self.width, 2 * self.beam)


class Searched(NamedTuple):
    """The lower bound that is proved, and the schedule that was found, if any."""

    bound: float
    timetable: Timetable | None = None


def search_windows(
    problem: MakespanProblem, incumbent: float, bound: float, limits: Limits
) -> Searched:
    """Close the gap between ``bound`` and the cost of an ``incumbent`` as far as possible.

    Rounds of growing effort: first for a schedule just below the incumbent, then for the largest
    target that is refuted, by bisection.
    """
    began = perf_counter()

    def is_over() -> bool:
        return limits.left(perf_counter() - began) <= 0

    effort, best = Effort(), None
    while bound < incumbent * (1 - _BELOW) and not is_over():
        search = WindowSearch(problem, incumbent * (1 - _BELOW), effort, is_over)
        bound = max(bound, search.bound())
        for _ in range(2):  # below the incumbent, and near the bound
            found = search.schedule() if bound < search.target else Searched(bound)
            bound = max(bound, found.bound)
            if found.timetable is not None:
                best, incumbent = found.timetable, found.timetable.makespan(problem)
            bound, nearer = _bisect(search, incumbent, bound)
            if nearer is search:
                break
            search = nearer
        effort = effort.more()
    return Searched(incumbent if bound >= incumbent * (1 - _BELOW) else bound, best)


@cache
def compile_window_kernels() -> None:
    """Search a tiny problem, at most once per process, so that no time limit pays for it."""
    tiny = MakespanProblem(1, (1.0,), (1.0,), (), (), (0.0,), (1,))
    WindowSearch(tiny, 2.0, Effort()).bound()


def _bisect(search: "WindowSearch", incumbent: float, bound: float) -> tuple[float, "WindowSearch"]:
    """The largest target that is refuted with the same effort, and the search that is not."""
    high = min(search.target, incumbent)
    while high - bound > SMALLEST * incumbent and not search.is_over():
        half = WindowSearch(search.problem, (bound + high) / 2, search.effort, search.is_over)
        found = half.bound()
        bound = max(bound, found)
        if found < half.target:
            search, high = half, half.target
    return bound, search


class Direction(NamedTuple):
    """The pipeline in the direction of time or against it; the heads of one are tails of the other.

    The arrays are views, so a change of the heads changes the other's tails.
    """

    blocks: BlockGraph
    heads: Floats
    tails: Floats


class WindowSearch:
    """The search for one target."""

    def __init__(
        self,
        problem: MakespanProblem,
        target: float,
        effort: Effort,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.problem, self.target, self.effort, self.is_over = problem, target, effort, is_over
        ahead, count = blocks_of(problem), problem.microbatches
        back = ahead.reversed()
        heads = longest_paths(ahead, count)
        tails = longest_paths(back, count)[::-1, ::-1].copy()
        self.ahead = Direction(ahead, heads, tails)
        self.back = Direction(back, tails[::-1, ::-1], heads[::-1, ::-1])

    def bound(self) -> float:
        """A lower bound from all windows; the target itself if a window refutes it."""
        best = 0.0
        for span in spans(self.problem.stages):
            for direction in (self.back, self.ahead):
                run = self._searched(self._window(direction, span))
                if run is not None:
                    if run.is_empty:
                        return self.target
                    best = max(best, run.bound())
                    _sharpen(direction, run)
        return best

    def schedule(self) -> Searched:
        """A schedule of the target, the best one if no state was left out; see :meth:`bound`."""
        bound, best = 0.0, None
        for direction in (self.back, self.ahead):
            run = WindowRun(self._window(direction, Span(0, self.problem.stages)), self.target)
            while not (run.is_finished or self.is_over()):
                run.advance(1)
                run.leave_out(self.effort.beam)
            if run.is_exact and run.is_finished:
                bound = min(run.bound(), self.target)
            if not run.is_empty and run.is_finished:
                found = self._timetable(run, direction)
                if best is None or found.makespan(self.problem) < best.makespan(self.problem):
                    best = found
            if run.is_exact:
                break
        return Searched(bound, best)

    def _window(self, direction: Direction, span: Span) -> Window:
        return window(direction.blocks, span, direction.heads, direction.tails)

    def _searched(self, form: Window) -> WindowRun | None:
        """The finished search, or None if it has too many states."""
        run, left = WindowRun(form, self.target, self.effort.width), self.effort.states
        while not run.is_finished:
            if left <= 0 or self.is_over():
                return None
            left -= run.advance(min(left, CHUNK))
        return run

    def _timetable(self, run: WindowRun, direction: Direction) -> Timetable:
        ranks = run.ranks() if direction is self.ahead else -run.ranks()[::-1, ::-1]
        return earliest(self.problem, ranks, block_durations=np.zeros(len(ranks)))


def _sharpen(direction: Direction, run: WindowRun) -> None:
    """Raise the heads to the earliest starts in a window, and along the way of a microbatch."""
    heads, durations = direction.heads, direction.blocks.durations
    for row, ends in zip(run.form.rows.tolist(), run.ends, strict=True):
        if row != NONE:
            np.maximum(heads[row], ends - durations[row], out=heads[row])
    for j in range(1, len(heads)):
        np.maximum(heads[j], heads[j - 1] + durations[j - 1], out=heads[j])
    for m in range(1, heads.shape[1]):
        np.maximum(heads[:, m], heads[:, m - 1] + durations, out=heads[:, m])
