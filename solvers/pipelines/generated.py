"""The published schedules that fit a makespan problem."""

from collections.abc import Iterator

from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.formulations.schedules.order import Order
from stagewright.formulations.schedules.placements import line, placed, v_shape
from stagewright.formulations.schedules.published.automatic import automatic
from stagewright.formulations.schedules.published.automatic_v import automatic_v
from stagewright.formulations.schedules.published.kinds import KINDS, PLACEMENTS, Sizes, schedule_of
from stagewright.formulations.schedules.timing import ActivationMemory, StageTimes
from stagewright.graphs.documents.errors import InputError


def generated(problem: MakespanProblem) -> Iterator[tuple[str, Order]]:
    """Name and order of every published schedule with the problem's placement, limits and splits.

    The heuristics for any memory come first.
    """
    for name, order in _candidates(problem):
        if order.is_split and not problem.is_split:
            continue
        fitting = order.split() if problem.is_split else order
        if _keeps_limits(problem, fitting):
            yield name, fitting


def _candidates(problem: MakespanProblem) -> Iterator[tuple[str, Order]]:
    count, path, devices = problem.microbatches, problem.device, 1 + max(problem.device)
    times = None
    if problem.weight_gradient is not None:
        times = StageTimes(
            problem.forward, problem.backward, problem.weight_gradient,
            problem.send_forward, problem.send_backward,
        )  # fmt: skip
        memory = _activations(problem)
        heuristics = {line(devices): automatic, v_shape(devices): automatic_v}
        if path in heuristics:
            heuristic = heuristics[path]
            yield "zero-bubble heuristic", heuristic(times, count, memory, problem.objective)
    chunks, left = divmod(problem.stages, devices)
    for name, kind in KINDS.items():
        if left or kind.weights != "flush" or not kind.chunks.allows(chunks):
            continue
        if kind.placement not in PLACEMENTS or placed(kind.placement, devices, chunks) != path:
            continue
        try:
            yield name, schedule_of(name, Sizes(devices, count, chunks, times=times))
        except InputError:
            continue  # there is none of these sizes


def _activations(problem: MakespanProblem) -> ActivationMemory:
    """The problem's memory; without it, its microbatches."""
    if problem.memory:
        taken, _, late = zip(*problem.saved, strict=True)
        kept = tuple(map(min, taken, late))  # they may differ by rounding
        return ActivationMemory(taken, kept, problem.memory)
    ones = (1.0,) * problem.stages
    limit = float(problem.microbatches * problem.stages)
    return ActivationMemory(ones, ones, (limit,) * (1 + max(problem.device)))


def _keeps_limits(problem: MakespanProblem, order: Order) -> bool:
    """Whether the rows stay within memory and in-flight limits, whatever their times."""
    flying = zip(order.most_in_flight(), problem.in_flight, strict=True)
    if any(most > limit for most, limit in flying):
        return False
    if not problem.memory:
        return True
    peaks = zip(_activations(problem).peaks(order), problem.memory, strict=True)
    return all(peak <= limit * (1 + RELATIVE_TOLERANCE) for peak, limit in peaks)
