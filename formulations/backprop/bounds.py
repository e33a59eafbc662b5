"""Lower bounds on every order of the operations and every split of transfers."""

import numpy as np

from stagewright.formulations.backprop.problem import BackpropProblem
from stagewright.formulations.pipelines.bounds.stages import one_machine_bound

CRITICAL_PATH = "critical path"
ONE_RESOURCE = "one-resource relaxation"


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
    return (CRITICAL_PATH, path), (ONE_RESOURCE, relaxed)
