"""List scheduling: earliest start times from an order or a greedy rule (SPP Algorithm 1)."""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import numpy as np

from stagewright.formulations.pipelines.blocks import blocks_of, numbering, timetable_of
from stagewright.formulations.pipelines.makespan import MakespanProblem, Timetable
from stagewright.formulations.pipelines.windows import timetable_of_order
from stagewright.formulations.schedules.order import Order
from stagewright.formulations.schedules.published.one_f_one_b import (
    gpipe,
    interleaved,
    one_f_one_b,
    pe,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.pipelines.forward_backward import BlockRules, dispatch, rules_of

_RuleKind = Literal["pe", "gpipe", "1f1b"]
_ListKind = Literal[_RuleKind, "eager"]
LIST_KINDS: tuple[_ListKind, ...] = ("pe", "1f1b", "gpipe", "eager")

# Warm-up depths of the greedy rule, as multiples of 1F1B's: a deeper one hides slower transfers, a
# shallower one starts backwards earlier.
_EAGER_DEPTHS = (1.0, 1.5, 2.0, 3.0, np.inf)


def list_schedule(problem: MakespanProblem, kind: _ListKind) -> Timetable | None:
    """The schedule of one rule; None if the rule violates the mapping or in-flight limits."""
    if kind == "eager":
        schedules = [_eager(problem, depth) for depth in _EAGER_DEPTHS]
        return min(schedules, key=lambda times: times.makespan(problem))
    order = rule_order(problem, kind)
    return None if order is None else schedule_order(problem, order)


def rule_order(problem: MakespanProblem, kind: _RuleKind) -> Order | None:
    """The order of one rule; None if the rule violates the mapping or in-flight limits."""
    rules: dict[_RuleKind, Callable[[MakespanProblem], Order | None]] = {
        "pe": lambda problem: pe(problem.device, problem.microbatches, problem.in_flight),
        "gpipe": _gpipe,
        "1f1b": _one_f_one_b,
    }
    return rules[kind](problem)


def best_list_schedule(problem: MakespanProblem) -> tuple[_ListKind, Timetable]:
    """The shortest of all list schedules, and its rule."""
    found = [(kind, list_schedule(problem, kind)) for kind in LIST_KINDS]
    kept = [(kind, times) for kind, times in found if times is not None]
    return min(kept, key=lambda entry: entry[1].makespan(problem))


def schedule_order(problem: MakespanProblem, order: Order) -> Timetable:
    """Every device follows its order and starts each block as soon as it is ready.

    Channels serve transfers first come, first served (Algorithm 1, lines 9-25). A whole backward in
    the order runs both its parts in sequence if the problem's backwards are split.

    Raises
    ------
    InputError
        If the order does not match the problem, or the devices deadlock.
    """
    if (order.device, order.microbatches) != (problem.device, problem.microbatches):
        raise InputError(
            f"the order has {order.microbatches} microbatches and its stages on devices "
            f"{order.device}, the problem {problem.microbatches} and {problem.device}"
        )
    if problem.is_split:
        order = order.split()
    elif order.is_split:
        raise InputError("the order splits backwards, which are whole in the problem")
    return timetable_of_order(problem, order)[1]


def _gpipe(problem: MakespanProblem) -> Order | None:
    if min(problem.in_flight) < problem.microbatches:
        return None
    return gpipe(problem.device, problem.microbatches)


def _one_f_one_b(problem: MakespanProblem) -> Order | None:
    """1F1B; interleaved 1F1B if every device has the same number of stages, assigned cyclically."""
    stages, count, ranks = problem.stages, problem.microbatches, 1 + max(problem.device)
    if problem.is_disjoint:
        return one_f_one_b(stages, count, problem.in_flight)
    if count % ranks or stages % ranks or problem.device != (*range(ranks),) * (stages // ranks):
        return None
    order = interleaved(ranks, stages // ranks, count)
    needed = zip(order.most_in_flight(), problem.in_flight, strict=True)
    return order if all(most <= limit for most, limit in needed) else None


def _eager(problem: MakespanProblem, depth: float) -> Timetable:
    """Backwards first, then forwards up to ``depth`` times 1F1B's warm-up or the in-flight limit.

    Of several stages on a device the later ones come first. Weight gradients run when neither is
    possible.
    """
    blocks, stages = blocks_of(problem), np.arange(problem.stages)
    forward, backward, weight = numbering(problem.stages)
    limits = blocks.limits.copy()
    limits[forward] = np.minimum(
        limits[forward], np.maximum(1, np.ceil(depth * (problem.stages - stages)))
    )
    priority = np.full((len(limits), problem.microbatches), np.nan)  # transfers wait in a queue
    kinds = (backward, forward, weight) if problem.is_split else (backward, forward)
    for urgency, kind in enumerate(kinds, start=1):
        priority[kind] = (urgency * problem.stages - stages)[:, None]
    rules = _rules(problem.device, problem.is_split)
    rules = rules._replace(durations=blocks.durations, limits=limits)
    return timetable_of(problem, dispatch(rules, priority, 0.0))


@lru_cache(maxsize=64)
def _rules(device: tuple[int, ...], is_split: bool) -> BlockRules:
    """The dispatcher's rules for stages on ``device``, with any durations and limits."""
    ones = (1.0,) * len(device)
    none = (0.0,) * (len(device) - 1)
    weights = ones if is_split else None
    counts = (1,) * len(device)
    return rules_of(
        blocks_of(MakespanProblem(1, ones, ones, none, none, ones, counts, device, weights))
    )
