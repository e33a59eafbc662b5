"""The answer of a policy, with its certificate."""

from dataclasses import dataclass

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem
from stagewright.formulations.clusters.rates import server_rows
from stagewright.formulations.forms.answers import Status
from stagewright.formulations.plans.envelope import relative_gap
from stagewright.graphs.documents.arrays import Floats


@dataclass(frozen=True, slots=True, eq=False)
class Duals:
    """Duals of a written-out program: the objective's gain by one more unit of each resource.

    ``time`` is of each job, shape (jobs,); ``accelerators`` of each type, (types,); ``servers`` of
    each of ``server_rows``. The makespan's program is in 1/T.
    """

    time: Floats
    accelerators: Floats
    servers: Floats

    def named(self, problem: AllocationProblem) -> dict[str, dict[str, float]]:
        """The same by job, by accelerator type, and by accelerator type and row of servers."""
        rows = enumerate(server_rows(problem.table))
        servers = [f"{problem.table.pool.names[number]} {n}" for n, (number, *_) in rows]
        keys = {
            "jobs": (problem.names, self.time),
            "accelerators": (problem.table.pool.names, self.accelerators),
            "servers": (servers, self.servers),
        }
        return {
            name: dict(zip(of, values.tolist(), strict=True)) for name, (of, values) in keys.items()
        }


@dataclass(frozen=True, slots=True, eq=False)
class AllocationResult:
    """The answer of a policy to an allocation problem.

    ``objective`` is the policy's, recomputed from ``allocation`` in floats; no valid allocation is
    better than ``bound``, from above where ``maximises``; ``gap`` is |bound - objective| over the
    larger of the two. ``proved_by`` names what proved the bound. An agnostic policy's objective
    and bound are those of the problem as it sees it. ``levels`` is the round of water-filling in
    which each job was fixed. ``notes`` are for people: whose SLO cannot be met, what was rounded.
    Written-out programs have ``duals``. ``first`` is what runs until a job arrives or ends, where
    that is not the allocation itself: the start of a schedule of the same objective. ``one_more``
    is how far one more accelerator of each type moves ``bound`` at most, (types,): by the duals
    that prove it, at the needs and floors of the jobs as they are.
    """

    status: Status
    objective: float | None
    bound: float | None
    allocation: Allocation | None
    proved_by: str | None
    maximises: bool = True
    levels: Floats | None = None
    notes: tuple[str, ...] = ()
    policy: str = ""
    seconds: float = 0.0
    duals: Duals | None = None
    first: Allocation | None = None
    one_more: Floats | None = None

    @property
    def gap(self) -> float | None:
        """Relative distance of objective and bound, 0 for an optimum; None without an answer."""
        if self.objective is None or self.bound is None:
            return None
        return relative_gap(self.objective, self.bound)
