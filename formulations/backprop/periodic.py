"""Windows in sequence: when iterations overlap, and the least period.

The gradient of the loss of a microbatch waits for the microbatch's last forward in the window
before. With one microbatch this is a barrier: every operation of a window precedes its last
forward (each synchronisation precedes its layer's forward), and every operation of the next window
follows the loss. The least period is then the shortest window.

With several microbatches the next window's backward of one may overlap forwards of others, so that
the period may be shorter than the window.
"""

from dataclasses import replace

import numpy as np

from stagewright.formulations.backprop.problem import BackpropProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_count

MAX_WINDOWS = 1000


def repeated(problem: BackpropProblem, windows: int) -> BackpropProblem:
    """``windows`` copies of ``problem``; microbatch m of copy w has number w M + m.

    Raises
    ------
    InputError
        If the problem has limits of memory, which the copies do not carry over.
    """
    require_count(windows, "windows", MAX_WINDOWS)
    if problem.memory:
        raise InputError("windows in sequence are for problems without limits of memory")
    size = len(problem.operations)
    losses, lasts = _ends(problem)
    count = len(losses)
    operations = tuple(
        replace(one, microbatch=one.microbatch + w * count)
        for w in range(windows)
        for one in problem.operations
    )
    inside = [(i + w * size, j + w * size) for w in range(windows) for i, j in problem.before]
    between = [
        (last + w * size, loss + (w + 1) * size)
        for w in range(windows - 1)
        for last, loss in zip(lasts, losses, strict=True)
    ]
    return BackpropProblem(operations, problem.resources, (*inside, *between))


def period_bound(problem: BackpropProblem) -> float:
    """No period is shorter: the busiest resource, and a microbatch's way through a window.

    The way from a microbatch's loss to its last forward closes a circuit with the next loss. Holds
    for every order, and for windows that differ from each other, as their mean.
    """
    losses, lasts = _ends(problem)
    ways = [_way(problem, loss, last) for loss, last in zip(losses, lasts, strict=True)]
    used = problem.resource >= 0
    load = np.bincount(problem.resource[used], problem.seconds[used])
    return float(max(*ways, load.max(initial=0.0)))


def _ends(problem: BackpropProblem) -> tuple[list[int], list[int]]:
    """The loss and the last forward of each microbatch."""
    rows = [(i, one) for i, one in enumerate(problem.operations)]
    losses = sorted((one.microbatch, i) for i, one in rows if one.kind == "loss")
    top = max(one.layer for _, one in rows if one.kind == "F")
    lasts = [problem.find("F", top, m) for m, _ in losses]
    return [i for _, i in losses], lasts


def _way(problem: BackpropProblem, first: int, last: int) -> float:
    """The longest chain of precedences from ``first`` to ``last``, with both."""
    found = np.full(len(problem.operations), -np.inf)
    found[first] = problem.seconds[first]
    after: list[list[int]] = [[] for _ in problem.operations]
    for i, j in problem.before:
        after[i].append(j)
    for i in problem.topological:
        for j in after[i]:
            found[j] = max(found[j], found[i] + problem.seconds[j])
    return float(found[last])
