"""The backprop problem of a plan's stages, its equal microbatches in turns, and its bounds."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from stagewright.formulations.backprop.problem import BackpropProblem, WindowTimes
from stagewright.formulations.backprop.training import Layers, training
from stagewright.formulations.pipelines.bounds.stages import one_machine_bound
from stagewright.formulations.pipelines.makespan_models import CP_SAT
from stagewright.formulations.plans.actions import REDUCE, SEND_B, SEND_F, UPDATE, B, F, I, W
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, Stage
from stagewright.formulations.plans.plan_class import EVERY_BACKWARD_FIRST
from stagewright.formulations.plans.timing import durations
from stagewright.graphs.documents.arrays import Floats, Ints

CRITICAL_PATH = "critical path"
_ONE_RESOURCE = "one-resource relaxation"


def window_bounds(problem: BackpropProblem) -> tuple[tuple[str, float], ...]:
    """(argument, seconds) of each bound; memory is not used.

    The critical path is the longest chain of precedences. The one-resource relaxation gives every
    operation of one stream or link the longest chains before and after it, and lets the resource
    preempt; Jackson's rule is optimal then (Carlier and Pinson 1989). Hence both hold for
    exclusive, chunked and preemptible resources.
    """
    heads, tails, seconds = problem.heads, problem.tails, problem.seconds
    path = float((heads + seconds + tails).max(initial=0.0))
    relaxed = 0.0
    for r in range(len(problem.resources)):
        own = np.flatnonzero(problem.resource == r)
        relaxed = max(relaxed, one_machine_bound(heads[own], seconds[own], tails[own]))
    return (CRITICAL_PATH, path), (_ONE_RESOURCE, relaxed)


BETWEEN_LOSSES = {name: f"{name} between losses" for name in (CRITICAL_PATH, _ONE_RESOURCE)}
"""The arguments of :func:`window_bounds` for schedules of given stages."""

SEARCHED_BETWEEN_LOSSES = f"{CP_SAT} between losses"
"""The argument of a search over all orders of given stages."""

ORDERS_BETWEEN_LOSSES = replace(EVERY_BACKWARD_FIRST, streams=1)
"""The schedules that these bounds hold for: every device computes one thing at a time."""


def splits(problem: PipelineProblem, stages: Sequence[Stage]) -> tuple[bool, ...]:
    """Whether each stage has the times of both parts of its backward."""
    return tuple(problem.layer_with_whole_backward(*stage.layers) is None for stage in stages)


def common_problem(
    problem: PipelineProblem, stages: Sequence[Stage], relaxed: bool = False
) -> BackpropProblem:
    """The common problem of ``stages``, with a channel for each pair of neighbours as in plans.

    Stages on the same devices take turns. A stage's weight gradient follows its output gradient. A
    whole backward counts as an output gradient; the first stage's, which nothing but its forward
    waits for, as a weight gradient. ``relaxed``: the parts of a backward take no longer than a
    whole one does.
    """
    parts = splits(problem, stages)
    split = np.repeat(np.array(parts)[:, None], problem.microbatches, axis=1)
    seconds = durations(problem, stages, split)
    first = {kind: np.nan_to_num(each[:, 0]) for kind, each in seconds.items()}
    outputs, weights = first[I] + first[B], first[W].copy()
    if relaxed:
        whole = durations(problem, stages)[B][:, 0]
        outputs = np.minimum(outputs, whole)
        weights = np.minimum(weights, whole - outputs)
    if not parts[0]:
        outputs[0], weights[0] = 0.0, first[B][0]
    homes: dict[tuple[str, ...], int] = {}
    common = training(
        Layers(_tuple(first[F]), _tuple(outputs), _tuple(weights)),
        [homes.setdefault(stage.devices, len(homes)) for stage in stages],
        problem.microbatches,
        _tuple(first[SEND_F][:-1]),
        _tuple(first[REDUCE]),
        back=_tuple(first[SEND_B][1:]),
        channels=True,
        update=_tuple(first[UPDATE]),
    )
    ordered = tuple(
        (i, common.find("dW", one.layer, one.microbatch))
        for i, one in enumerate(common.operations)
        if one.kind == "dO"
    )
    return replace(common, before=(*common.before, *ordered))


def stage_bounds(problem: PipelineProblem, stages: Sequence[Stage]) -> tuple[Bound, ...]:
    """Bounds on every schedule of ``stages`` between two losses.

    None if stages take turns with their microbatches, or recompute.
    """
    if any(stage.turns > 1 or stage.recompute != "none" for stage in stages):
        return ()
    return tuple(
        Bound(seconds, BETWEEN_LOSSES[name], "schedule", ORDERS_BETWEEN_LOSSES)
        for name, seconds in window_bounds(in_turns(common_problem(problem, stages, relaxed=True)))
    )


def _tuple(values: Floats) -> tuple[float, ...]:
    return tuple(values.tolist())


def in_turns(problem: BackpropProblem) -> BackpropProblem:
    """``problem`` with microbatch m before m + 1 wherever the two are equal; same optimum.

    Call the operations of one kind and layer, one per microbatch, a *family*. Number the
    operations of every family by their starts. A family with one resource, which never suspends,
    then ends in this order too. If each operation of family B waits for its own of family A, then k
    of A have ended when the k-th of B starts, so that the k-th of A has. Families that wait for
    all operations of another, or all for one, do not see the numbers. Hence the new numbers keep
    all precedences, and no time has changed. If anything else is found, or limits of memory,
    ``problem`` is returned.
    """
    if all(one.microbatch == 0 for one in problem.operations):
        return problem
    families = _families(problem)
    if problem.memory or not _are_equal(problem, families):
        return problem
    turns = [pair for family in families for pair in pairwise(family) if len(family) > 1]
    timed = [pair for pair in turns if problem.seconds[pair[0]] > 0]
    return replace(problem, before=problem.before + tuple(timed))


def renumbered(problem: BackpropProblem, timetable: WindowTimes) -> WindowTimes:
    """The same times, with the numbers that keep the turns of :func:`in_turns`."""
    name = np.arange(len(problem.operations))
    for family in _families(problem):
        by_start = np.argsort(timetable.starts[family], kind="stable")
        name[np.array(family)[by_start]] = family
    return WindowTimes(name[timetable.operation], timetable.start, timetable.finish)


def _families(problem: BackpropProblem) -> list[list[int]]:
    found: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for i, one in enumerate(problem.operations):
        found[one.kind, one.layer].append((one.microbatch, i))
    return [[i for _, i in sorted(members)] for members in found.values()]


def _are_equal(problem: BackpropProblem, families: list[list[int]]) -> bool:
    family: Ints = np.empty(len(problem.operations), dtype=np.int64)
    place = np.empty_like(family)
    for f, members in enumerate(families):
        family[members], place[members] = f, np.arange(len(members))
        resources = {int(problem.resource[i]) for i in members}
        chunks = [problem.resources[r].chunk_seconds for r in resources if r >= 0]
        if len(members) > 1 and (
            len(resources) > 1
            or len(set(problem.seconds[members])) > 1
            or not np.isinf(chunks).all()
        ):
            return False
    joined: dict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for i, j in problem.before:
        joined[int(family[i]), int(family[j])].add((int(place[i]), int(place[j])))
    for (a, b), pairs in joined.items():
        sizes = len(families[a]), len(families[b])
        own = sizes[0] == sizes[1] and pairs == {(k, k) for k in range(sizes[0])}
        if not own and len(pairs) < sizes[0] * sizes[1]:
            return False
    return True
