"""Kernels are compiled before limits of time are running."""

import pytest

from benchmarks.operator_graphs import random_problem
from stagewright.formulations.forms.answers import Limits
from stagewright.solvers.operators.search import search


@pytest.fixture(scope="session", autouse=True)
def _compiled():
    for contention in ("none", "exclusive"):
        search(random_problem(8, 2, 0, contention=contention), 8, Limits(seconds=600))
