"""Plans in which every group of a tensor degree is one device, and back.

A planner knows devices that compute alone. Where all stages have one tensor degree, each group of
so many consecutive devices of a server is a device with a shard's costs and memory, and with the
slowest of its members' links; of a plan for these, the stages and the order of the computations
are a plan for the devices. The times are computed again, with every member's own links.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from stagewright.formulations.checking.check import require_valid
from stagewright.formulations.checking.peaks import memory_exceeded
from stagewright.formulations.checking.times import read_times
from stagewright.formulations.pipelines.bounds.tensor_groups import (
    Group,
    cluster_of_groups,
    groups_of_cluster,
    joined,
)
from stagewright.formulations.plans.actions import COMPUTE, FLUSH, Action, parse_action
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.formulations.schedules.order import Order
from stagewright.formulations.schedules.planned import starts_to_the_end
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.sharding import require_degree

_INSTEAD = "plan with --planner spp, or with an --order of one path"


def problem_of_groups(problem: PipelineProblem, degree: int) -> PipelineProblem:
    """The problem in which every group of ``degree`` devices is one device.

    Raises
    ------
    InputError
        If a layer has no costs at that degree, or no server has so many devices of one kind.
    """
    require_degree(problem.chain, 0, len(problem.chain), degree)
    given, groups = problem.cluster, groups_of_cluster(problem.cluster, degree)
    devices = [joined([given.devices[v] for v in group]) for group in groups]
    cluster = cluster_of_groups(given, groups, devices, lambda: _slowest(given, groups))
    return replace(problem.at(degree), cluster=cluster)


def plan_of_devices(problem: PipelineProblem, found: PipelinePlan, degree: int) -> PipelinePlan:
    """A plan for groups of devices as a plan for the devices; checked, not certified.

    Raises
    ------
    InputError
        If stages of that tensor degree are not run so, or it does not fit.
    """
    _require_runnable(found)
    devices = problem.cluster.devices
    members = {
        joined([devices[v] for v in group]).name: [devices[v].name for v in group]
        for group in groups_of_cluster(problem.cluster, degree)
    }
    stages = tuple(_divided(stage, members, degree) for stage in found.stages)
    starts = starts_to_the_end(problem, stages, _order_of(found))
    plan = assemble(problem, found.planner, stages, starts)
    for short in memory_exceeded(read_times(problem, plan)):
        raise InputError(f"the plan of groups does not fit: {short.place} {short.message}")
    require_valid(problem, plan)
    return plan


def _slowest(cluster: Cluster, groups: Sequence[Group]) -> Floats:
    """The slowest link from members of a group to the members in the same places of another.

    Bandwidth and latency, shape (2, G, G).
    """
    found = np.zeros((2, len(groups), len(groups)))
    for i, j in product(range(len(groups)), repeat=2):
        if i != j:
            ends = groups[i], groups[j]
            found[:, i, j] = cluster.bandwidth[ends].min(), cluster.latency[ends].max()
    return found


def _require_runnable(found: PipelinePlan) -> None:
    """Refuse plans that cannot run with divided stages, or whose groups have no common order."""
    if found.spans_steps or found.weight_rule != FLUSH or found.is_backward_first:
        raise InputError(f"divided stages have no {found.weights!r} weights or periods; {_INSTEAD}")
    for s, stage in enumerate(found.stages):
        if stage.offload:
            raise InputError(f"stage {s} is divided and offloads, which is not run; {_INSTEAD}")
        if stage.replication != "split" and stage.replicas > 1:
            raise InputError(f"stage {s} takes microbatches in turn, group by group; {_INSTEAD}")
        for other in found.stages:
            if set(stage.devices) != set(other.devices) and set(stage.devices) & set(other.devices):
                raise InputError(f"stage {s} shares some of its devices with another; {_INSTEAD}")


def _divided(stage: Stage, members: Mapping[str, Sequence[str]], degree: int) -> Stage:
    devices = tuple(name for group in stage.devices for name in members[group])
    return replace(stage, devices=devices, tensor=degree)


def _order_of(plan: PipelinePlan) -> Order:
    """The computations of each set of devices, in order."""
    rows: dict[str, list[Action]] = {}
    firsts = {min(stage.devices) for stage in plan.stages}
    for entry in sorted(plan.actions, key=lambda one: one.start_seconds):
        action = parse_action(entry.action)
        if action.kind in COMPUTE and entry.device in firsts:
            rows.setdefault(entry.device, []).append(action)
    return Order(tuple(map(tuple, rows.values())))
