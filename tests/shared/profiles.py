"""What ``make test`` leaves to other commands: real processes, further examples and instances."""

import os
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings  # noqa: TID251

Value = TypeVar("Value")

QUICK, NIGHTLY = "quick", "nightly"
QUICK_SHARE = 14
REAL_FOLDERS = {"capture", "faults", "jobs", "training"}
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)  # where shrinking takes minutes

# A busy machine is no error, and no test writes to what its fixtures share.
tolerated = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)
same = {"derandomize": True, "database": None}  # examples at every run
for name, options in {QUICK: same, NIGHTLY: same if os.environ.get("CI") else {}}.items():
    settings.register_profile(name, deadline=None, suppress_health_check=tolerated, **options)


def by_profile(quick: Value, nightly: Value) -> Value:
    """A limit of instances, which is wider under the nightly profile."""
    return nightly if settings.get_current_profile_name() == NIGHTLY else quick


def examples(count: int, *, quick: int | None = None, **options: Any) -> settings:
    """``count`` examples under the nightly profile, ``quick`` under any other.

    ``quick`` is a fourteenth of them unless told, and at least two.
    """
    few = max(2, count // QUICK_SHARE) if quick is None else quick
    return settings(max_examples=by_profile(few, count), **options)


def slow_after(count: int, values: Iterable[Any], ids: Sequence[str] = ()) -> list[Any]:
    """Parameters of a test: the first ``count``; under the nightly profile all, the others slow.

    A tuple holds the values of several parameters. ``ids`` are names of the instances.
    """
    rows = [each if isinstance(each, tuple) else (each,) for each in values]
    return [
        pytest.param(*row, marks=pytest.mark.slow if number >= count else (), id=name)
        for number, (row, name) in enumerate(zip_longest(rows, ids))
        if number < by_profile(count, len(rows))
    ]


def slow_but(count: int, turn: int, size: int) -> list[Any]:
    """Marks of ``size`` instances: ``count`` from number ``turn`` on are quick, the others slow."""
    return [() if (place - turn) % size < count else pytest.mark.slow for place in range(size)]


def mark_real(items: Iterable[pytest.Item]) -> None:
    """Mark tests of captured models, ranks, servers, workers or browsers, by folder or fixture."""
    for item in items:
        if item.path.parent.name in REAL_FOLDERS or "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("real")


def leave_a_cover(items: Iterable[pytest.Item]) -> None:
    """Mark the instances of tests marked ``covering`` as slow, but for few that show every value.

    Of the product of a test's parameters those stay that bring the most values not shown so far;
    an instance whose values have all been shown is slow.
    """
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("covering"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for instances in tests.values():
        _leave_a_cover(instances)


def _leave_a_cover(instances: list[pytest.Function]) -> None:
    left = {item: _values(item) for item in instances if _is_instance(item)}
    while left:
        chosen = max(left, key=lambda item: len(left[item]))
        shown = left.pop(chosen)
        if not shown:
            chosen.add_marker("slow")
        for values in left.values():
            values -= shown


def _is_instance(item: pytest.Function) -> bool:
    return hasattr(item, "callspec") and item.get_closest_marker("slow") is None


def _values(item: pytest.Function) -> set[tuple[str, int]]:
    return {(name, id(value)) for name, value in item.callspec.params.items()}
