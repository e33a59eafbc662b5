"""The pipelines with the least iteration time by measured layer profiles, and a bound on it.

For every microbatch size and number of pipelines, a dynamic program over labels
(``profiled_labels``) gives a lower bound and candidates, which :func:`evaluate` judges. Where the
bound stays below the best plan, all pipelines with a bound below it are listed, if they are not too
many; then the best is optimal.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from stagewright.formulations.forms.answers import Limits, Status, settled
from stagewright.formulations.parallelism.profiles.cluster import ServerPools
from stagewright.formulations.parallelism.profiles.pipelines import (
    ProfiledEstimate,
    ProfiledPlan,
    ProfiledProblem,
    ProfiledStage,
    Replica,
    evaluate,
)
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.solvers.parallelism.profiles.labels import Overflow, ProfileLabel, ProfileLabels
from stagewright.solvers.parallelism.profiles.tables import (
    ReplicaPlace,
    Tables,
    TimedStage,
    choices,
)


def placements(tables: Tables, stages: Sequence[TimedStage]) -> Iterator[ProfiledPlan]:
    """Plans with every replica in the first server that has room; none if one has no server.

    Larger groups go first; of equal ones those of a pipeline are next to each other, for the
    transfers, in the first plan, and those of a stage, for the sums of gradients, in the second.
    Where every tensor degree divides the next larger one, as powers of two do, servers are found if
    there are any (Coffman, Garey, Johnson 1987: first-fit decreasing for divisible sizes).
    """
    pipelines, count = range(tables.data), range(len(stages))
    for groups in ([(j, s) for j in pipelines for s in count],
                   [(j, s) for s in count for j in pipelines]):  # fmt: skip
        plan = _place(tables, stages, groups)
        if plan is not None:
            yield plan


def _place(
    tables: Tables, stages: Sequence[TimedStage], groups: Sequence[tuple[int, int]]
) -> ProfiledPlan | None:
    """The plan with the groups (pipeline, stage) in this order, the larger ones first."""
    chosen = [tables.choices[stage.choice] for stage in stages]
    room = _Room(tables.problem.cluster)
    found: dict[tuple[int, int], Replica] = {}
    for j, s in sorted(groups, key=lambda one: -chosen[one[1]].tensor):
        server = room.take(chosen[s])
        if server is None:
            return None
        found[j, s] = Replica(chosen[s].pool, server, chosen[s].tensor)
    return ProfiledPlan(
        tables.samples,
        tuple(
            ProfiledStage(stage.stop - stage.start, tuple(found[j, s] for j in range(tables.data)))
            for s, stage in enumerate(stages)
        ),
        tables.counts,
    )


class _Room:
    """Free devices of every server; ``first[pool, tensor]`` is where to look from."""

    def __init__(self, cluster: ServerPools) -> None:
        self.free = [[pool.devices] * pool.servers for pool in cluster.pools]
        self.first: dict[ReplicaPlace, int] = {}

    def take(self, one: ReplicaPlace) -> int | None:
        """The first server with room for the group."""
        free = self.free[one.pool]
        for server in range(self.first.get(one, 0), len(free)):
            if free[server] >= one.tensor:
                free[server] -= one.tensor
                self.first[one] = server
                return server
        return None


_CLASS = (
    "consecutive layers; all stages on the same number of replicas, those of a stage on one pool "
    "and tensor degree that was measured; microbatches of a measured size, divided as evenly as "
    "possible among the pipelines; 1F1B"
)
"""The class of plans that the bound is about."""

LABELS, EVEN = "dynamic program over labels", "device-seconds and the way of a microbatch"
MOST_LABELS = 2_000_000
MOST_LISTED = 400_000
FIRST, WIDTH = 24, 4  # cases, and labels for each first layer, of the plans that are tried first


@dataclass(frozen=True, slots=True)
class ProfiledResult:
    """The best plan found and a bound on the seconds of every plan of ``plans`` (a class).

    ``plan`` and ``estimate`` are None if none was found; ``labels`` were made in all.
    """

    plan: ProfiledPlan | None
    estimate: ProfiledEstimate | None
    bound: float
    proved_by: str
    status: Status
    labels: int
    seconds: float
    plans: str = _CLASS

    @property
    def gap(self) -> float | None:
        """(cost - bound) / cost."""
        if self.estimate is None:
            return None
        return max(0.0, 1 - self.bound / self.estimate.seconds)


def profiled_plan(problem: ProfiledProblem, limits: Limits | None = None) -> ProfiledResult:
    """The plan with the least iteration time of its class, within ``limits``."""
    return _ProfileSearch(problem, limits or Limits()).run()


class _ProfileSearch:
    """The best plan so far, and a bound for every microbatch size and number of pipelines."""

    def __init__(self, problem: ProfiledProblem, limits: Limits) -> None:
        self.began = perf_counter()
        self.problem, self.limits = problem, limits
        self.plan: ProfiledPlan | None = None
        self.estimate: ProfiledEstimate | None = None
        self.labels = 0
        self.is_partial = False  # whether cases were left out

    @property
    def cost(self) -> float:
        """Seconds of the best plan; infinite if there is none."""
        return float("inf") if self.estimate is None else self.estimate.seconds

    def run(self) -> ProfiledResult:
        """Find a few plans, search below a rising cutoff up to the best, then list the rest.

        Below the optimum labels are few, far above it many.
        """
        cases = sorted(self._made(), key=lambda one: one.bound())
        bounds = [one.bound() for one in cases]
        for tables in cases[:FIRST]:
            self._begin(tables)
        for cutoff in _cutoffs(min(bounds, default=0.0)):
            if cutoff >= self.cost or self._is_late():
                break
            self._raise(cases, bounds, partial(self._bounded, cutoff=cutoff))
        self._raise(cases, bounds, partial(self._bounded, cutoff=float("inf")))
        self._raise(cases, bounds, self._listed)
        return self._result(cases, bounds)

    def _made(self) -> Iterator[Tables]:
        """The cases (sizes and numbers of pipelines); not all if half of the time is over."""
        for one in _cases(self.problem):
            if self.limits.left(perf_counter() - self.began) < self.limits.seconds / 2:
                self.is_partial = True
                return
            one.bound()  # makes its tables now
            yield one

    def _raise(
        self, cases: list[Tables], bounds: list[float], by: Callable[[Tables], float]
    ) -> None:
        """Raise the bounds of the cases that may have a better plan, the most promising first."""
        for number in sorted(range(len(cases)), key=lambda one: bounds[one]):
            if bounds[number] < self.cost and not self._is_late():
                bounds[number] = max(bounds[number], by(cases[number]))

    def _begin(self, tables: Tables) -> None:
        """Try the plans of a few labels."""
        if tables.bound() < self.cost and not self._is_late():
            for bound, label in self._search(tables, self.cost, MOST_LABELS, width=WIDTH) or ():
                if bound < self.cost:
                    self._try(tables, label)

    def _bounded(self, tables: Tables, cutoff: float) -> float:
        """The program's bound, at most the cutoff or the best plan; its candidates are tried."""
        cutoff = min(cutoff, self.cost)
        found = self._search(tables, cutoff, MOST_LABELS)
        if found is None:
            return 0.0
        for bound, label in found:
            if bound < self.cost:
                self._try(tables, label)
        return found[0][0] if found else cutoff

    def _listed(self, tables: Tables) -> float:
        """The best of all pipelines whose bound is below the best plan; 0 if they are too many."""
        found = self._search(tables, self.cost, MOST_LISTED, prune=False)
        if found is None:
            return 0.0
        open_ = float("inf")
        for bound, label in found:
            if bound >= self.cost:
                break
            ideal = tables.ideal_seconds(list(label.stages()))
            if ideal < self.cost and not self._reaches(tables, label, ideal):
                open_ = min(open_, ideal)
        return min(open_, self.cost)

    def _reaches(self, tables: Tables, label: ProfileLabel, ideal: float) -> bool:
        """Whether the placement found for a label is as fast as the ideal ``ideal`` seconds."""
        seconds = self._try(tables, label)
        return seconds is not None and seconds <= ideal * (1 + RELATIVE_TOLERANCE)

    def _search(
        self,
        tables: Tables,
        cutoff: float,
        most: int,
        *,
        prune: bool = True,
        width: int | None = None,
    ) -> list[tuple[float, ProfileLabel]] | None:
        labels = ProfileLabels(
            tables, cutoff, most, prune=prune, width=width, is_late=self._is_late
        )
        try:
            return labels.run()
        except Overflow:
            return None
        finally:
            self.labels += labels.made

    def _try(self, tables: Tables, label: ProfileLabel) -> float | None:
        """Least seconds of a label's placed plans; the best plan is kept. None without a plan."""
        least = None
        for plan in placements(tables, list(label.stages())):
            found = evaluate(self.problem, plan)
            if found.fits and found.seconds < self.cost:
                self.plan, self.estimate = plan, found
            least = found.seconds if least is None else min(least, found.seconds)
        return least

    def _is_late(self) -> bool:
        return self.limits.left(perf_counter() - self.began) == 0

    def _result(self, cases: list[Tables], bounds: list[float]) -> ProfiledResult:
        weakest = min(range(len(cases)), key=lambda one: bounds[one], default=None)
        bound = float("inf") if weakest is None else bounds[weakest]
        simple = weakest is not None and bound == cases[weakest].bound()
        if self.is_partial:
            bound, simple = min(bound, _least_of_all(self.problem)), True
        return ProfiledResult(
            plan=self.plan,
            estimate=self.estimate,
            bound=min(bound, self.cost),
            proved_by=EVEN if simple else LABELS,
            status=self._status(bound),
            labels=self.labels,
            seconds=perf_counter() - self.began,
        )

    def _status(self, bound: float) -> Status:
        if self.plan is None and bound == float("inf"):
            return Status.INFEASIBLE
        cost = None if self.plan is None else self.cost
        return settled(self.limits.status(found=cost is not None), cost, bound)


def _cutoffs(least: float) -> Iterator[float]:
    """Seconds below which plans are looked for, one after the other."""
    cutoff = least
    while cutoff < least * 4:
        cutoff *= 1.1
        yield cutoff
    for _ in range(16):
        cutoff *= 2
        yield cutoff
    yield float("inf")


def _cases(problem: ProfiledProblem) -> Iterator[Tables]:
    """Every measured microbatch size that divides the batch, with every number of pipelines.

    Multiples of large powers of two come first, in case that not all are looked at.
    """
    sizes = _sizes(problem)
    devices = sum(pool.servers * pool.devices for pool in problem.cluster.pools)
    most = min(devices, problem.batch // min(sizes, default=1))
    for data in sorted(range(1, most + 1), key=lambda one: (-(one & -one), one)):
        for samples in sizes:
            if data <= problem.batch // samples:
                tables = Tables(problem, samples, data)
                if tables.choices:
                    yield tables


def _least_of_all(problem: ProfiledProblem) -> float:
    """A bound on all cases: the bound of a single pipeline with work spread over all devices.

    Several pipelines have at least as much work, on no more choices, and sums of gradients.
    """
    return min(
        (Tables(problem, samples, 1).bound() for samples in _sizes(problem)), default=float("inf")
    )


def _sizes(problem: ProfiledProblem) -> list[int]:
    """The measured microbatch sizes that divide the batch and are usable, ascending."""
    measured = sorted({one.microbatch_size for one in problem.profiles.measured})
    return [one for one in measured if problem.batch % one == 0 and choices(problem, one)]
