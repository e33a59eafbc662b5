"""Rounds that realise an allocation of a cluster, and the launch files of the first of them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from stagewright.executor.clusters.rounds import Assignment, Mechanism
from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem
from stagewright.formulations.clusters.allocation_plan import (
    AllocationPlan,
    allocation_of,
    digest_of,
)
from stagewright.formulations.clusters.round_document import RoundEntry
from stagewright.formulations.forms.answers import OnProgress, StopToken, silent
from stagewright.graphs.documents.errors import InputError
from stagewright.service.clusters.allocating import (
    answer_of,
    problem_for,
    require_trainings,
    with_throughputs,
)
from stagewright.service.clusters.answers import (
    AllocateAnswer,
    AssignmentAnswer,
    PriceJobsAnswer,
    RoundsAnswer,
)
from stagewright.service.clusters.rates import computed_rates, measured_rates
from stagewright.service.clusters.requests import RoundsRequest
from stagewright.solvers.clusters.policies import allocate as solve
from stagewright.solvers.clusters.policies import require_policy

_Key = tuple[tuple[int, ...], int]  # jobs by their position, and their worker type


def rounds(
    request: RoundsRequest, on_progress: OnProgress = silent, stop: StopToken | None = None
) -> RoundsAnswer | AllocateAnswer:
    """Realise an allocation round by round; the policy's answer where it has no allocation.

    Raises
    ------
    InputError
        If the given allocation answers other jobs or another pool, or as for
        :func:`~stagewright.service.clusters.allocating.allocate`.
    """
    whole, priced = with_throughputs(request, on_progress, stop)
    problem, given = _realisable(request, whole)
    if given is not None:
        return _realised(request, given, problem, allocation_of(given, problem), priced)
    result = solve(
        problem, request.policy, request.limits(stop), budget_dollars=request.budget_dollars
    )
    answer = answer_of(request, problem, result, priced)
    if result.allocation is None:
        return answer
    return _realised(request, answer, problem, result.allocation, priced)


def require_realisable(request: RoundsRequest) -> None:
    """Refuse what can be refused before a search. Raises InputError as `rounds`."""
    if not require_trainings(request):
        _realisable(request, request)


def _realisable(
    request: RoundsRequest, whole: RoundsRequest
) -> tuple[AllocationProblem, AllocationPlan | None]:
    """The problem, and the allocation if it is given; refuses what the policy lacks.

    ``whole`` is the request with all throughputs.
    """
    given = request.allocation
    if given is None:
        problem = problem_for(whole)
        require_policy(problem, request.policy, request.budget_dollars)
        return problem, None
    settings = {"space_sharing": given.space_sharing, "placement": given.placement}
    problem = problem_for(whole.model_copy(update=settings))
    if not given.answers(digest_of(request.workload, request.pool)):
        raise InputError("the allocation answers other jobs, or another cluster")
    allocation_of(given, problem)
    return problem, given


def _realised(
    request: RoundsRequest,
    source: AllocateAnswer | AllocationPlan,
    problem: AllocationProblem,
    target: Allocation,
    priced: PriceJobsAnswer | None,
) -> RoundsAnswer:
    """The rounds, after the round that runs now if there is one."""
    mechanism = Mechanism(problem.table, request.round_seconds)
    mechanism.reset(problem, target, range(len(problem)))
    history = _History(request, problem)
    history.resume(mechanism)
    made: list[tuple[Assignment, ...]] = []
    for _ in range(request.rounds):
        made.append(mechanism.schedule())
        for one in made[-1]:
            mechanism.account(one, request.round_seconds)
    deviation = mechanism.deviation()
    launch = None
    if request.to is not None:
        from stagewright.service.clusters.launching import launched  # with the formats

        elapsed = history.elapsed + request.round_seconds
        launch = launched(request, source, tuple(history.after(made[0])), elapsed, priced)
    throughputs = (priced or request).workload.throughputs
    return RoundsAnswer(
        policy=source.policy,
        round_seconds=request.round_seconds,
        rounds=tuple(tuple(_assignment(problem, one) for one in each) for each in made),
        mean_deviation=deviation.mean,
        largest_shortfall=deviation.shortfall,
        prices=tuple(computed_rates(throughputs)),
        measured=tuple(measured_rates(throughputs)),
        assumed=() if priced is None else priced.assumed,
        launch=launch,
        accelerators=problem.table.pool.names,
    )


class _History:
    """What jobs had until the first round, from the request's document of the round before.

    Where the jobs of the cluster have changed, shares of time begin anew, and only places count.
    """

    def __init__(self, request: RoundsRequest, problem: AllocationProblem) -> None:
        self.problem = problem
        self.round_seconds = request.round_seconds
        self.entries: dict[_Key, RoundEntry] = {}
        self.elapsed = 0.0
        self.received: defaultdict[_Key, float] = defaultdict(float)
        before = request.after
        if before is None:
            return
        rows = {name: row for row, name in enumerate(problem.names)}
        columns = {
            (problem.table.pool.names[kind.accelerator], kind.placement, kind.count): column
            for column, kind in enumerate(problem.table.workers)
        }
        is_same = {*before.jobs} == {*problem.names}
        self.elapsed = before.elapsed_seconds if is_same else 0.0
        for one in before.entries:
            worker = columns.get((one.accelerator, one.placement, one.count))
            if worker is None or not rows.keys() >= {*one.jobs}:
                continue
            jobs = sorted((rows[job] for job in one.jobs), key=lambda job: problem.kind[job])
            key = tuple(jobs), worker
            self.entries[key] = one
            if is_same:
                self.received[key] = one.received_seconds

    def resume(self, mechanism: Mechanism) -> None:
        """Let the mechanism go on from there."""
        last = [
            (Assignment(*key, one.numbers, False), one.lease_seconds)
            for key, one in self.entries.items()
            if one.numbers
        ]
        mechanism.resume(last, self.received, self.elapsed)

    def after(self, assignments: Sequence[Assignment]) -> Iterator[RoundEntry]:
        """The entries after a round."""
        now = {(one.jobs, one.worker): one for one in assignments}
        for key in {**self.received, **now}:
            kind = self.problem.table.workers[key[1]]
            one, received = now.get(key), self.received[key]
            had = self.entries[key].lease_seconds if one is not None and one.renewed else 0.0
            yield RoundEntry(
                jobs=tuple(self.problem.names[job] for job in key[0]),
                accelerator=self.problem.table.pool.names[kind.accelerator],
                placement=kind.placement,
                count=kind.count,
                numbers=() if one is None else one.accelerators,
                lease_seconds=0.0 if one is None else had + self.round_seconds,
                received_seconds=received + (0.0 if one is None else self.round_seconds),
            )


def _assignment(problem: AllocationProblem, one: Assignment) -> AssignmentAnswer:
    kind = problem.table.workers[one.worker]
    return AssignmentAnswer(
        jobs=tuple(problem.names[job] for job in one.jobs),
        accelerator=problem.table.pool.names[kind.accelerator],
        numbers=one.accelerators,
        renewed=one.renewed,
    )
