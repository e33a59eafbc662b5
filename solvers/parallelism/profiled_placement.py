"""Servers for the replicas of profiled pipelines."""

from collections.abc import Iterator, Sequence

from stagewright.formulations.parallelism.profiled_cluster import ServerPools
from stagewright.formulations.parallelism.profiled_plan import (
    ProfiledPlan,
    ProfiledStage,
    Replica,
)
from stagewright.solvers.parallelism.profiled_tables import Choice, Stage, Tables


def placements(tables: Tables, stages: Sequence[Stage]) -> Iterator[ProfiledPlan]:
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
    tables: Tables, stages: Sequence[Stage], groups: Sequence[tuple[int, int]]
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
        self.first: dict[Choice, int] = {}

    def take(self, one: Choice) -> int | None:
        """The first server with room for the group."""
        free = self.free[one.pool]
        for server in range(self.first.get(one, 0), len(free)):
            if free[server] >= one.tensor:
                free[server] -= one.tensor
                self.first[one] = server
                return server
        return None
