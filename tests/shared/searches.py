"""How long local searches go on in quick tests: for a fraction of what they do for users.

Tests assert what holds of any search: plans are valid, bounds hold, a further step costs no more,
optima are proved. ``make campaign`` runs all tests with the searches of users, ``make test`` those
that ask for the fixture ``usual_searches``: how good a search is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module

import pytest

SHORT = {
    ("operators.exact", "EVALUATIONS"): 20_000,
    ("backprop.exact", "_SEARCHED"): 40_000,
    ("planners.structures.refine", "CYCLE"): 15,
    ("planners.structures.refine", "_CYCLES"): 2,
    ("planners.periodic.madpipe", "SEARCHES"): 3,
    ("pipelines.rows.search", "PATIENCE"): 150,
    ("pipelines.rows.search", "SHIFTS"): 40,
}


@cache
def usual() -> dict[tuple[str, str], int]:
    """The limits of users; read before any is changed."""
    return {place: getattr(_module(place[0]), place[1]) for place in SHORT}


@contextmanager
def searches(limits: dict[tuple[str, str], int]) -> Iterator[None]:
    usual()
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), value in limits.items():
            patch.setattr(_module(module), name, value)
        yield


def _module(name: str) -> object:
    return import_module(f"stagewright.solvers.{name}")
