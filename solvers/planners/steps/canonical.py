"""The problem that a planner searches: equal for all problems with the same plans.

Devices are in canonical order, under their own names; a device without room for any layer is left
out, and so is memory that no plan can use. Devices that can hardly contribute are left out first.
"""

from dataclasses import dataclass, replace
from time import monotonic
from typing import TypeVar

import numpy as np

from stagewright.formulations.forms.answers import Limits, OnProgress, Progress
from stagewright.formulations.pipelines.bounds.every_plan import without_useless
from stagewright.formulations.plans.memory import buffers_per_boundary, least_state_factor
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.units import MIN_MEMORY
from stagewright.graphs.machines.canonical import canonical_order, reordered
from stagewright.graphs.machines.cluster import Cluster
from stagewright.solvers.planners.steps.planner import Planner
from stagewright.solvers.planners.steps.proposal import (
    Choices,
    NoPlan,
    PeriodicProposal,
    Proposal,
)

_ABLE = 0.8  # of the time limit, for plans without negligible devices
_NEGLIGIBLE = 0.02  # of the work per second of the most able device
_Made = TypeVar("_Made", bound=Proposal | PeriodicProposal)


@dataclass(frozen=True, slots=True)
class CanonicalForms:
    """A problem in three forms, which are the same object where they do not differ.

    ``bounded`` is that of bounds, ``whole`` has no more memory than is useful, and ``able`` only
    the devices that are not negligible: bounds of a search on it are not about the problem.
    """

    bounded: PipelineProblem
    whole: PipelineProblem
    able: PipelineProblem


def canonical_forms(problem: PipelineProblem, planner: Planner) -> CanonicalForms:
    """The forms of a problem for a planner.

    For a runtime the order of the devices is left, as it gives their ranks; the exact planner
    searches all devices.
    """
    if planner.options.runtime:
        return CanonicalForms(problem, problem, problem)
    problem = without_useless(problem)
    useful = _with_useful_memory(problem, planner)
    order = canonical_order(useful.cluster)
    bounded = _on(problem, reordered(problem.cluster, order))
    whole = bounded if useful is problem else _on(useful, reordered(useful.cluster, order))
    able = whole if planner.name == "exact" else _without_negligible(whole)
    return CanonicalForms(bounded, whole, able)


def _without_negligible(problem: PipelineProblem) -> PipelineProblem:
    """The problem without devices that have room for little of the work, or are very slow.

    Their part in equal groups of devices would spoil plans more than it can gain.
    """
    seconds = np.array([
        costs.forward_seconds + costs.backward_seconds
        for costs in (problem.costs(kind, 1) for kind in problem.kinds)
    ])  # fmt: skip
    states = problem.chain.parameter_bytes * least_state_factor(problem)
    has_room = problem.memory_bytes[:, None] >= problem.saved_per_layer(1) + states
    work = seconds.min(axis=0)
    kind = [problem.kinds.index(one.kind) for one in problem.cluster.devices]
    able = has_room @ work / np.maximum(seconds.sum(axis=1)[kind], np.finfo(float).tiny)
    kept = np.flatnonzero(able >= _NEGLIGIBLE * able.max())
    if len(kept) == len(problem.cluster):
        return problem
    return _on(problem, reordered(problem.cluster, kept.tolist()))


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


def proposed(
    planner: Planner,
    forms: CanonicalForms,
    choices: Choices,
    limits: Limits,
    on_progress: OnProgress,
) -> Proposal | PeriodicProposal | NoPlan:
    """The planner's answer on the able devices; if it has no plan of them, on all.

    Bounds on plans of the able devices are left out.
    """
    if forms.able is forms.whole:
        return planner.propose(forms.whole, choices, limits, on_progress)

    def report(step: Progress) -> None:
        made = step.best
        best = None if made is None else lambda: _without_bounds(made())
        on_progress(replace(step, best=best, plans=None))

    began = monotonic()
    part = replace(limits, seconds=limits.seconds * _ABLE)
    answer = planner.propose(forms.able, choices, part, report)
    if isinstance(answer, NoPlan):
        left = replace(limits, seconds=limits.left(monotonic() - began))
        return planner.propose(forms.whole, choices, left, on_progress)
    able = forms.able.cluster.index
    names = ", ".join(name for name in forms.whole.cluster.index if name not in able)
    note = f"searched without devices that can do less than {_NEGLIGIBLE:.0%} of the best: {names}"
    return _without_bounds(replace(answer, notes=(*answer.notes, note)))


def _without_bounds(made: _Made) -> _Made:
    """The proposal without bounds on all plans of a problem."""
    made = replace(made, bounds=tuple(one for one in made.bounds if one.scope == "schedule"))
    if isinstance(made, Proposal):
        made = replace(made, others=tuple(_without_bounds(one) for one in made.others))
    return made
