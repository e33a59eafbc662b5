"""Equal microbatches take turns: an order between them that costs nothing."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np

from stagewright.formulations.backprop.problem import BackpropProblem, WindowTimes
from stagewright.graphs.documents.arrays import Ints


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
