"""The integer program of a partition on every backend, and equal to the program over downsets."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from dag_instances import least, problems
from hypothesis import given
from profiles import examples

from stagewright.formulations.dags.by_assignment import ByAssignment
from stagewright.formulations.dags.problem import DagProblem, Pool, Tensor
from stagewright.formulations.forms.answers import Status
from stagewright.formulations.forms.models import LinearProgram
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.backends.backend import BACKENDS, solve
from stagewright.solvers.dags.partition import partition

BY_INTEGERS = [
    name for name, one in BACKENDS.items() if one.accepts is LinearProgram and one.integers
]
# Two devices for 3, 4 and 3 s one after the other; 0.5 s to send the tensor of the first.
CHAIN = DagProblem(
    ("a", "b", "c"),
    ((0, 1), (1, 2)),
    np.array([[3.0], [4.0], [3.0]]),
    np.ones(3),
    (Tensor((0, 1), 0.5),),
    (Pool("gpu", 2, inf),),
)


def optimum(problem, contiguous=True, backend=None):
    """The largest load, None if there is no partition."""
    form = ByAssignment(contiguous)
    answer = solve(form.apply(problem), backend)
    if answer.status is Status.INFEASIBLE:
        return None
    assert answer.status is Status.OPTIMAL
    cost = problem.evaluate(form.invert(problem, answer.values), contiguous)
    assert answer.bound <= cost * (1 + 1e-6)
    return cost


@pytest.mark.parametrize("backend", BY_INTEGERS)
def test_known_optimum(backend):
    """{a, b} takes 7 s; out of order {a, c} takes 6.5 s and {b} 4.5 s."""
    assert optimum(CHAIN, backend=backend) == pytest.approx(7)
    assert optimum(CHAIN, contiguous=False, backend=backend) == pytest.approx(6.5)
    small = replace(CHAIN, pools=(Pool("gpu", 2, 1.5),))
    assert optimum(small, backend=backend) is None


@examples(60)
@given(problems(most=5))
def test_equals_every_assignment_and_the_program_over_downsets(problem):
    best = least(problem)
    found = optimum(problem)
    assert (inf if found is None else found) == pytest.approx(best)
    downsets = partition(problem).cost
    assert (inf if downsets is None else downsets) == pytest.approx(best)
    free = optimum(problem, contiguous=False)
    assert (inf if free is None else free) == pytest.approx(least(problem, contiguous=False))


def test_replicas_are_refused():
    with pytest.raises(InputError, match="without replicas"):
        ByAssignment().apply(replace(CHAIN, most_replicas=2))
