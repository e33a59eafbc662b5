"""Kernels are compiled for the planner that runs them, after a first plan; a stop ends that."""

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from numba import njit

from stagewright.formulations.checking.check import require_valid
from stagewright.formulations.forms.answers import Limits, Progress, Status
from stagewright.solvers.planners.steps import warm_up
from stagewright.solvers.planning import plan

LOADED = """
import sys
from numba.core.dispatcher import Dispatcher
from stagewright.solvers.planners.steps import warm_up

assert warm_up.compile_kernels(sys.argv[1])
ours = [one for name, one in sys.modules.items() if name.startswith("stagewright.solvers")]
found = {one for module in ours for one in vars(module).values() if isinstance(one, Dispatcher)}
entries = [one for one in found if not one.targetoptions.get("no_cpython_wrapper")]
print(*sorted(one.py_func.__name__ for one in entries if one.overloads))
"""
GPIPE = ["_place_all", "_simulate", "fill_before", "fill_rest", "fill_shared_rest", "find"]


@pytest.mark.real
@pytest.mark.parametrize(("planner", "kernels"), [("2bw", []), ("gpipe", GPIPE)])
def test_a_planner_compiles_only_what_it_runs(planner: str, kernels: list[str]) -> None:
    command = [sys.executable, "-c", LOADED, planner]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert loaded.split() == kernels


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], float]:
    """The only kernel of the portfolio, which is not compiled yet; it calls another."""

    @njit
    def twice(value: float) -> float:
        return 2 * value

    @njit
    def outer(value: float) -> float:
        return float(twice(value) + 1)

    monkeypatch.setitem(warm_up.KERNELS, "auto", (lambda: outer(1.0),))
    return outer


@pytest.mark.usefixtures("kernel")
def test_a_checked_plan_comes_before_the_first_kernel() -> None:
    problem, told = warm_up._tiny(), list[Progress]()
    found = plan(problem, "auto", Limits(seconds=1.0), told.append)
    first, second = told[:2]
    assert first.best is not None
    require_valid(problem, first.best())
    assert (second.doing, second.objective) == ("compiling outer", None)
    assert not any(one.doing for one in told[2:])
    assert (found.cost or 0.0) <= (first.objective or 0.0)
    assert first.bound <= (found.bound or 0.0)


def test_a_stop_ends_compilation_and_keeps_the_first_plan(kernel: Callable[[float], float]) -> None:
    problem, stop, told = warm_up._tiny(), threading.Event(), list[str]()

    def stop_while_compiling(news: Progress) -> None:
        told.append(news.doing)
        if news.doing:
            stop.set()

    found = plan(problem, "auto", Limits(seconds=60.0, stop=stop), stop_while_compiling)
    assert told == ["", "compiling outer"]
    assert found.status is Status.INTERRUPTED
    assert found.plan is not None
    require_valid(problem, found.plan)
    whole = plan(problem, "auto", Limits(seconds=1.0))
    assert (found.bound or 0.0) <= (whole.cost or 0.0)
    assert kernel(1.0) == 3.0


@pytest.mark.usefixtures("kernel")
def test_a_first_plan_within_the_gap_ends_compilation() -> None:
    told = list[Progress]()
    found = plan(warm_up._tiny(), "auto", Limits(seconds=60.0, gap=0.99), told.append)
    assert [(one.doing, one.objective) for one in told] == [("", found.cost)]
    assert found.gap == pytest.approx(1 - told[0].bound / found.cost)
    assert found.status is Status.FEASIBLE
    assert "at most 99.00% was asked for" in found.ended
