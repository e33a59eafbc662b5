"""Compilation of the kernels before a time limit starts."""

from collections.abc import Callable
from functools import cache

from stagewright.formulations.forms.answers import Limits, StopToken, is_stopped, silent
from stagewright.formulations.patterns.joint_patterns import JointPatterns
from stagewright.formulations.patterns.madpipe import StageAllocationProblem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import DISJOINT_WHOLE, SHARED_SPLIT
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.patterns.joint_patterns import joint_optimum
from stagewright.solvers.patterns.madpipe import least_period
from stagewright.solvers.pipelines.relaxation import fill_and_drain_bound
from stagewright.solvers.pipelines.row_search import compile_row_kernels
from stagewright.solvers.pipelines.server_relaxation import is_server_bound
from stagewright.solvers.pipelines.window_search import compile_window_kernels
from stagewright.solvers.planners.baselines.pipedream import partition
from stagewright.solvers.planners.exact import exact
from stagewright.solvers.planners.spp import plan_spp


def compile_kernels(stop: StopToken | None = None) -> None:
    """Run every kernel on a tiny problem, at most once per process; ``stop`` leaves out the rest.

    Numba compiles on the first use on a machine (one to two minutes) and loads the kernels from its
    cache on disk later (under a second).
    """
    for step in _STEPS:
        if is_stopped(stop):
            return
        step()


@cache
def _tiny() -> PipelineProblem:
    cost = LayerCost(4, 1.0, 1e6, 1e6, backward_seconds=1.0)
    chain = Chain("tiny", "analytic: for compilation", 4, tuple(
        Layer(name, 1e6, (cost,)) for name in "abc"
    ))  # fmt: skip
    return PipelineProblem(chain, uniform_servers(2, 2, Link(1e9), Link(1e8)), 2)


def _allocation() -> StageAllocationProblem:
    return StageAllocationProblem(_tiny(), ((0,), (1,)), special=0)


_STEPS: tuple[Callable[[], object], ...] = tuple(
    cache(step)
    for step in (
        lambda: plan_spp(_tiny(), Limits(), silent),
        lambda: partition(_tiny()),
        lambda: fill_and_drain_bound(_tiny(), 10.0, wide=True),
        lambda: is_server_bound(_tiny(), 10.0, DISJOINT_WHOLE),
        lambda: is_server_bound(_tiny(), 10.0, SHARED_SPLIT),
        lambda: exact(_tiny(), Limits(seconds=1.0)),
        lambda: least_period(_allocation(), Limits(seconds=1.0)),
        compile_row_kernels,
        compile_window_kernels,
        lambda: joint_optimum(JointPatterns(_tiny(), ((0,), (1,))), Limits(seconds=1.0)),
    )
)
