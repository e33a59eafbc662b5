"""Servers for the replicas of profiled pipelines."""

from collections.abc import Sequence

from stagewright.formulations.parallelism.profiled_cluster import ServerPools
from stagewright.formulations.parallelism.profiled_plan import (
    ProfiledPlan,
    ProfiledStage,
    Replica,
)
from stagewright.solvers.parallelism.profiled_tables import Choice, Stage, Tables


def place(tables: Tables, stages: Sequence[Stage]) -> ProfiledPlan | None:
    """The plan with every replica in the first server that has room; None if one has no server.

    Larger groups go first, and of equal ones those of one pipeline next to each other. Where every
    tensor degree divides the next larger one, as powers of two do, this finds servers if there are
    any (Coffman, Garey, Johnson 1987: first-fit decreasing for divisible sizes).
    """
    chosen = [tables.choices[stage.choice] for stage in stages]
    groups = sorted(
        ((j, s) for j in range(tables.data) for s in range(len(stages))),
        key=lambda one: -chosen[one[1]].tensor,
    )
    room = _Room(tables.problem.cluster)
    found: dict[tuple[int, int], Replica] = {}
    for j, s in groups:
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
