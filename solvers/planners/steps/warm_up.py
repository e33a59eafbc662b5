"""Compilation of a planner's kernels before its time limit starts."""

import gc
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from time import monotonic

from numba.core import event

from stagewright.formulations.forms.answers import (
    GapStop,
    Limits,
    OnProgress,
    Progress,
    StopToken,
    is_stopped,
    silent,
)
from stagewright.formulations.patterns.joint_patterns import JointPatterns
from stagewright.formulations.patterns.madpipe import StageAllocationProblem
from stagewright.formulations.pipelines.bounds.every_plan import why_nothing_fits
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.formulations.plans.plan_class import DISJOINT_WHOLE, SHARED_SPLIT
from stagewright.formulations.plans.structure import Structure, work_of
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.patterns.joint_patterns import joint_optimum
from stagewright.solvers.patterns.madpipe import least_period
from stagewright.solvers.pipelines.relaxation import fill_and_drain_bound
from stagewright.solvers.pipelines.rows.search import compile_row_kernels
from stagewright.solvers.pipelines.servers.relaxation import is_server_bound
from stagewright.solvers.pipelines.structures.scheduling import best_schedule, rules_for
from stagewright.solvers.pipelines.windows.search import compile_window_kernels
from stagewright.solvers.planners.balanced import plan_balanced
from stagewright.solvers.planners.baselines.pipedream import partition
from stagewright.solvers.planners.exact import exact
from stagewright.solvers.planners.spp import plan_spp
from stagewright.solvers.planners.steps.proposal import NoPlan, Proposal

SECONDS = 1.0  # for the first plan, of balanced pipelines, which need no kernel


@dataclass
class FirstPlan:
    """Told of every kernel that is compiled, it reports a checked plan once, then the kernel.

    ``certified`` checks and certifies a proposal without kernels; None: no plan is made. A plan
    within the gap of ``target`` reaches it, and no kernel is reported.
    """

    problem: PipelineProblem
    on_progress: OnProgress
    target: GapStop
    certified: Callable[[Proposal], PipelinePlan] | None
    began: float = field(default_factory=monotonic)
    proposal: Proposal | None = None
    kernels: int = 0

    def __call__(self, kernel: str) -> None:
        """Report that ``kernel`` is compiled; before the first, a plan."""
        self.kernels += 1
        if self.kernels == 1 and self.certified and why_nothing_fits(self.problem) is None:
            self._plan(self.certified)
        if self.target.reached:
            return
        seconds = monotonic() - self.began
        self.on_progress(Progress(seconds, None, -math.inf, doing=f"compiling {kernel}"))

    def _plan(self, certified: Callable[[Proposal], PipelinePlan]) -> None:
        made = plan_balanced(self.problem, Limits(seconds=SECONDS), silent)
        if isinstance(made, NoPlan):
            return
        self.proposal, plan = made, certified(made)
        assert plan.certificate is not None
        proof, seconds = plan.certificate, monotonic() - self.began
        self.on_progress(
            Progress(seconds, proof.cost_seconds, proof.bound_seconds, lambda: plan, proof.plans)
        )
        self.target.reached = self.target.gap > 0 and proof.gap <= self.target.gap


Step = Callable[[], object]
_OnKernel = Callable[[str], None]


def compile_kernels(
    planner: str, on_kernel: _OnKernel = lambda _: None, stop: StopToken | None = None
) -> bool:
    """Run the kernels of ``planner`` on a tiny problem, at most once per process.

    Numba compiles on the first use on a machine (up to half a minute) and loads the kernels from
    its cache on disk later (under a second). ``on_kernel`` is told the name of each kernel that is
    compiled. Once ``stop`` is set, compilation ends at the next function.

    Returns
    -------
    Whether all are compiled.
    """
    collects = gc.isenabled()
    gc.disable()  # numba keeps what it makes: to look for garbage takes a sixth of the time
    try:
        with event.install_listener("numba:compile", _Listener(on_kernel, stop)):
            for step in KERNELS.get(planner, FINITE):
                if is_stopped(stop):
                    return False
                step()
    except _Stopped:
        return False
    finally:
        if collects:
            gc.enable()
    return True


class _Stopped(BaseException):
    """Ends a compilation; numba would take an Exception for an error in the kernel."""


class _Listener(event.Listener):
    """Hears of every function that is compiled, in a kernel or alone."""

    def __init__(self, on_kernel: _OnKernel, stop: StopToken | None) -> None:
        self.on_kernel, self.stop, self.depth = on_kernel, stop, 0
        self.thread = threading.get_ident()

    def on_start(self, started: event.Event) -> None:
        if threading.get_ident() != self.thread:
            return
        if is_stopped(self.stop):
            raise _Stopped
        if self.depth == 0:
            self.on_kernel(started.data["dispatcher"].py_func.__name__)
        self.depth += 1

    def on_end(self, _: event.Event) -> None:
        if threading.get_ident() == self.thread:
            self.depth -= 1


@cache
def _tiny() -> PipelineProblem:
    cost = LayerCost(4, 1.0, 1e6, 1e6, backward_seconds=1.0)
    chain = Chain("tiny", "analytic: for compilation", 4, tuple(
        Layer(name, 1e6, (cost,)) for name in "abc"
    ))  # fmt: skip
    return PipelineProblem(chain, uniform_servers(2, 2, Link(1e9), Link(1e8)), 2)


def _allocation() -> StageAllocationProblem:
    return StageAllocationProblem(_tiny(), ((0,), (1,)), special=0)


def _once(*steps: Step) -> tuple[Step, ...]:
    return tuple(map(cache, steps))


def _list_schedule() -> None:
    stage = Stage((0, 3), (_tiny().cluster.devices[0].name,))
    work, endings, _ = work_of(_tiny(), Structure.whole((stage,)))
    best_schedule(work, endings, rules_for(work)[:1])


BOUNDS = _once(
    lambda: fill_and_drain_bound(_tiny(), 10.0, wide=True),
    lambda: is_server_bound(_tiny(), 10.0, DISJOINT_WHOLE),
    lambda: is_server_bound(_tiny(), 10.0, SHARED_SPLIT),
)
STAGES = _once(
    lambda: plan_spp(_tiny(), Limits(), silent), lambda: exact(_tiny(), Limits(seconds=1.0))
)
_LISTS = _once(_list_schedule)
_ORDERS = _once(compile_row_kernels, compile_window_kernels)
HIERARCHY = _once(lambda: partition(_tiny()))
PATTERNS = _once(
    lambda: least_period(_allocation(), Limits(seconds=1.0)),
    lambda: joint_optimum(JointPatterns(_tiny(), ((0,), (1,))), Limits(seconds=1.0)),
)
FINITE = (*BOUNDS, *STAGES, *_LISTS, *_ORDERS)
KERNELS: dict[str, tuple[Step, ...]] = {
    **dict.fromkeys(("dp", "gpipe", "hetpipe", "2bw-flush"), (*BOUNDS, *_LISTS)),
    **dict.fromkeys(("spp", "exact", "servers"), (*BOUNDS, *STAGES, *_LISTS)),
    "pipedream": (*HIERARCHY, *BOUNDS),
    "pipedream-async": HIERARCHY,
    "2bw": (),
    **dict.fromkeys(("1f1b-star", "madpipe"), PATTERNS),
}
"""What some planners and the bounds of their plans run; all others run FINITE."""
