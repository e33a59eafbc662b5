"""A clock that counts."""

import itertools
import sys

import pytest


@pytest.fixture
def counting_clock(monkeypatch):
    """A millisecond passes with every look at the clock."""
    ticks = itertools.count()
    for name, module in list(sys.modules.items()):
        if name.startswith("stagewright.") and hasattr(module, "monotonic"):
            monkeypatch.setattr(module, "monotonic", lambda: next(ticks) * 1e-3)
