"""HetPipe with a synchronous barrier: a pipeline in every server, data parallelism among them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.forms.answers import Limits, OnProgress
from stagewright.formulations.pipelines.bppm import (
    StageChoice,
    makespan_problem,
    prefix_sums,
    range_sums,
)
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.pipelines.list_scheduling import list_schedule
from stagewright.solvers.planners.steps.proposal import NoPlan, Proposal, proposal_of, shortage
from stagewright.solvers.planners.structures.uniform import UniformPlanner


def plan_hetpipe(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress
) -> Proposal | NoPlan:
    """Every server is a virtual worker without replication (SPP section II).

    Whole microbatches are assigned round-robin to the servers; stage s is on the s-th device of
    each server, and its replicas all-reduce their gradients when the last one ends.
    """
    sizes = {len(server) for server in problem.cluster.servers}
    if len(sizes) > 1:
        return NoPlan(f"servers must have equal numbers of devices, got {sorted(sizes)}")
    workers = problem.cluster.servers[: problem.microbatches]
    cuts = _partition(problem, workers[0])
    pipelines: list[tuple[MakespanProblem, Timetable]] = []
    for w, server in enumerate(workers):
        stages = [
            StageChoice(start, stop, (server[s],)) for s, (start, stop) in enumerate(pairwise(cuts))
        ]
        scheduling = makespan_problem(problem, stages)
        if scheduling is None:
            return NoPlan(shortage(problem, stages))
        share = len(range(w, problem.microbatches, len(workers)))
        scheduling = _with_microbatches(scheduling, share)
        times = list_schedule(scheduling, "1f1b")
        assert times is not None  # 1F1B keeps every limit
        pipelines.append((scheduling, times))
    devices = problem.cluster.devices
    named = tuple(
        Stage(
            (cuts[s], cuts[s + 1]),
            tuple(devices[server[s]].name for server in workers),
            "round-robin" if len(workers) > 1 else "split",
        )
        for s in range(len(cuts) - 1)
    )
    return proposal_of(problem, named, _interleave(problem.microbatches, pipelines))


def _partition(problem: PipelineProblem, server: Sequence[int]) -> list[int]:
    """Cuts of the layers over a server's devices that minimise the slowest stage or channel."""
    layers, count = len(problem.chain), min(len(problem.chain), len(server))
    best = _stage_times(problem, server[0])[0]
    choice: list[NDArray[np.int64]] = []
    for s in range(1, count):
        times = _stage_times(problem, server[s])
        entering = np.full(layers + 1, np.inf)
        for stop in range(1, layers):
            entering[stop] = sum(problem.transfer_seconds(stop, (server[s - 1],), (server[s],)))
        through = np.maximum(np.maximum(best, entering)[:, None], times)
        choice.append(through.argmin(axis=0))
        best = through.min(axis=0)
    cuts = [layers]
    for row in reversed(choice):
        cuts.append(int(row[cuts[-1]]))
    return [*([0] if cuts[-1] else []), *reversed(cuts)]


def _stage_times(problem: PipelineProblem, device: int) -> Floats:
    """Time of layers [start, stop) per microbatch on ``device``, inf where stop <= start."""
    costs = problem.costs(problem.cluster.devices[device].kind, 1)
    times = range_sums(prefix_sums(costs.forward_seconds + costs.backward_seconds))
    return np.where(np.tri(len(times), dtype=bool), np.inf, times)


def _with_microbatches(scheduling: MakespanProblem, share: int) -> MakespanProblem:
    limits = tuple(min(limit, share) for limit in scheduling.in_flight)
    return replace(scheduling, microbatches=share, in_flight=limits)


def _interleave(
    microbatches: int, pipelines: Sequence[tuple[MakespanProblem, Timetable]]
) -> Timetable:
    """The timetable of all microbatches; microbatch m is in pipeline m modulo their number."""
    names = ("forward", "backward", "send_forward", "send_backward")
    rows = {}
    for name in names:
        rows[name] = np.zeros((len(getattr(pipelines[0][1], name)), microbatches))
        for w, (_, times) in enumerate(pipelines):
            rows[name][:, w :: len(pipelines)] = getattr(times, name)
    ends = [
        times.backward.max(axis=1) + np.array(scheduling.backward)
        for scheduling, times in pipelines
    ]
    return Timetable(**rows, reduce=np.max(ends, axis=0))


PLANNER = UniformPlanner(
    "hetpipe",
    "a pipeline in every server, data parallelism among servers",
    "Park et al., ATC 2020, with a synchronous barrier",
    plan_hetpipe,
)
