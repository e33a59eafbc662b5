"""Compilation of the kernels before a time limit starts."""

from functools import cache

from stagewright.formulations.forms.answers import Limits, silent
from stagewright.formulations.patterns.joint_patterns import JointPatterns
from stagewright.formulations.patterns.madpipe import StageAllocationProblem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan_class import DISJOINT_WHOLE, SHARED_SPLIT
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.patterns.joint_patterns import joint_optimum
from stagewright.solvers.patterns.madpipe import least_period
from stagewright.solvers.patterns.madpipe_grid import Grid, by_grid
from stagewright.solvers.pipelines.relaxation import fill_and_drain_bound
from stagewright.solvers.pipelines.server_relaxation import is_server_bound
from stagewright.solvers.pipelines.window_search import compile_window_kernels
from stagewright.solvers.planners.baselines.pipedream import partition
from stagewright.solvers.planners.exact import exact
from stagewright.solvers.planners.spp import plan_spp


@cache
def compile_kernels() -> None:
    """Run every kernel on a tiny problem, at most once per process.

    Numba compiles on the first use on a machine (one to two minutes) and loads the kernels from its
    cache on disk later (under a second).
    """
    cost = LayerCost(4, 1.0, 1e6, 1e6, backward_seconds=1.0)
    chain = Chain("tiny", "analytic: for compilation", 4, tuple(
        Layer(name, 1e6, (cost,)) for name in "abc"
    ))  # fmt: skip
    cluster = uniform_servers(2, 2, Link(1e9), Link(1e8))
    problem = PipelineProblem(chain, cluster, 2)
    plan_spp(problem, Limits(), silent)
    partition(problem)
    fill_and_drain_bound(problem, 10.0, wide=True)
    is_server_bound(problem, 10.0, DISJOINT_WHOLE)
    is_server_bound(problem, 10.0, SHARED_SPLIT)
    exact(problem, Limits(seconds=1.0))
    allocation = StageAllocationProblem(problem, ((0,), (1,)), special=0)
    least_period(allocation, Limits(seconds=1.0))
    by_grid(allocation, Grid(2, 2, 2), passes=1)
    compile_window_kernels()
    joint_optimum(JointPatterns(problem, ((0,), (1,))), Limits(seconds=1.0))
