"""How long local searches go on in quick tests: a fraction of what they do for users.

Tests assert what holds of any search: plans are valid, bounds hold, a further step costs no more,
optima are proved. ``make campaign`` runs them with the searches of users.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import pytest

SHORT = {
    "operators.exact": {"EVALUATIONS": 20_000},
    "backprop.exact": {"_SEARCHED": 40_000},
    "planners.structures.refine": {"CYCLE": 15, "_CYCLES": 2},
    "pipelines.rows.search": {"PATIENCE": 150, "SHIFTS": 40},
}


@contextmanager
def short_searches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module, values in SHORT.items():
            for name, value in values.items():
                patch.setattr(import_module(f"stagewright.solvers.{module}"), name, value)
        yield
