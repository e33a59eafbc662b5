"""The problem that a planner searches: equal for all problems with the same plans.

Devices are in canonical order, under their own names; a device without room for any layer is left
out, and so is memory that no plan can use.
"""

from dataclasses import replace

from stagewright.formulations.pipelines.bounds.every_plan import without_useless
from stagewright.formulations.plans.memory import buffers_per_boundary, least_state_factor
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.units import MIN_MEMORY
from stagewright.graphs.machines.canonical import canonical_order, reordered
from stagewright.graphs.machines.cluster import Cluster
from stagewright.solvers.planners.steps.planner import Planner


def canonical_forms(
    problem: PipelineProblem, planner: Planner
) -> tuple[PipelineProblem, PipelineProblem]:
    """The problem for bounds, and that for the search, which has no more memory than is useful.

    For a runtime the order of the devices is left, as it gives their ranks.
    """
    if planner.options.runtime:
        return problem, problem
    problem = without_useless(problem)
    useful = _with_useful_memory(problem, planner)
    order = canonical_order(useful.cluster)
    bounded = _on(problem, reordered(problem.cluster, order))
    if useful is problem:
        return bounded, bounded
    return bounded, _on(useful, reordered(useful.cluster, order))


def _on(problem: PipelineProblem, cluster: Cluster) -> PipelineProblem:
    return problem if cluster is problem.cluster else replace(problem, cluster=cluster)


def _with_useful_memory(problem: PipelineProblem, planner: Planner) -> PipelineProblem:
    """The problem with at most twice the memory that a finite plan can use on a device.

    Twice, as planners look for ways to save memory where a plan needs more than half of it. A
    device has at most the states and buffers of all layers; of every microbatch and the next
    mini-batch's (of orders that begin with backwards) all activations, inputs and gradients of
    outputs; and once what it recomputes. Periodic plans may keep more.
    """
    options = planner.options
    if options.period_seconds or options.vertical_sync or options.batch:
        return problem
    passed = 2 * problem.inputs_per_layer(1).sum() + problem.boundary_bytes(len(problem.chain))
    kept = float(problem.saved_per_layer(1).sum() + passed)
    states = float(problem.chain.parameter_bytes.sum()) * least_state_factor(problem)
    buffers = 2 * float(buffers_per_boundary(problem, 1).sum())
    most = max(MIN_MEMORY, 2 * (states + buffers + (2 * problem.microbatches + 1) * kept))
    devices = problem.cluster.devices
    if most >= max(device.memory_bytes for device in devices):
        return problem
    devices = tuple(replace(one, memory_bytes=min(one.memory_bytes, most)) for one in devices)
    return replace(problem, cluster=replace(problem.cluster, devices=devices))
