"""The most balanced partitions into every number of stages."""

from collections.abc import Sequence

from stagewright.formulations.pipelines.bppm import BalancedPartition, StageChoice
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.solvers.pipelines.partition.passes import PartitionSearch


def balanced_partitions(
    problem: PipelineProblem, order: Sequence[int]
) -> dict[int, tuple[float, tuple[StageChoice, ...]]]:
    """W and its partition for every feasible number of stages, with devices in ``order``."""
    search = PartitionSearch(BalancedPartition(problem, tuple(order)))
    solved = {stages: search.solve(stages) for stages in search.bound}
    return {
        stages: (balanced.bottleneck_seconds, balanced.stages)
        for stages, balanced in solved.items()
        if balanced is not None
    }
