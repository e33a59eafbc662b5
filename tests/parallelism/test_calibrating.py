"""Rates of one's own: known constants are given back, with an error and a range that hold."""

from dataclasses import replace

import pytest
from layout_problems import LLAMA

from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.rates import BORROWED, Reached, Spread, rates_of
from stagewright.solvers.parallelism.calibrating import (
    FACTORS,
    CalibrationRun,
    calibrated,
    require_runs,
)

START = replace(rates_of("h100"), dense=Spread(0.98, 1.02))
PROBLEM = TrainingProblem(LLAMA, 2048, 64, fabric_of_kind("h100", 16), START)
LAYOUTS = ("d16 b4 zero2", "p2 t2 d4 b2", "t8 d2 b8 sp", "d16 b2 zero3")


def scaled(factors: dict[str, float]) -> Reached:
    reached = START.reached
    for kind, factor in factors.items():
        known = {name: getattr(reached, name) for name in FACTORS[kind]}
        reached = replace(reached, **{name: old * factor for name, old in known.items() if old})
    return reached


def runs_of(reached: Reached, layouts: tuple[str, ...] = LAYOUTS) -> list[CalibrationRun]:
    """Runs on a machine of these constants."""
    machine = replace(PROBLEM, rates=replace(START, reached=reached))
    texts = [(f"runs.csv:{line}", parse_layout(one)) for line, one in enumerate(layouts, 2)]
    return [
        CalibrationRun(place, PROBLEM, layout, evaluate(machine, layout).seconds)
        for place, layout in texts
    ]


@pytest.mark.parametrize(
    ("runs", "factors"),
    [
        (1, {"kernels": 0.6}),
        (2, {"kernels": 1.2}),
        (3, {"kernels": 0.6, "memory-bound kernels": 1.3}),
        (4, {"kernels": 0.9, "memory-bound kernels": 0.7, "contention": 2.0}),
    ],
)
def test_known_constants_are_given_back(runs: int, factors: dict[str, float]) -> None:
    known = scaled(factors)
    found = calibrated(runs_of(known, LAYOUTS[:runs]), "mine", "runs.csv")
    assert found.factors == pytest.approx(factors, rel=0.05)
    assert found.after == pytest.approx([1.0] * runs, rel=2e-3)
    assert found.at_peak == ()
    assert found.rates.reached.matmul == pytest.approx(known.matmul, rel=0.01)
    assert found.rates.source == f"runs.csv; from {START.name}"
    assert (found.rates.stack, found.rates.devices) == ("megatron", ("h100",))


def test_one_run_is_not_left_out_and_the_range_stays() -> None:
    found = calibrated(runs_of(scaled({"kernels": 0.6}), LAYOUTS[:1]), "mine", "runs.csv")
    assert found.left_out == found.rates.errors == ()
    assert found.rates.mean_error is None
    assert found.rates.dense == START.dense
    assert found.rates.experts == START.experts.widened(BORROWED)


def test_every_run_is_in_the_range_and_errors_are_of_runs_left_out() -> None:
    noise = zip(runs_of(START.reached, LAYOUTS[:3]), (1.3, 1.4, 1.2), strict=True)
    off = [replace(run, seconds=by * run.seconds) for run, by in noise]
    found = calibrated(off, "mine", "runs.csv")
    ratios = [1 / one for one in (*found.left_out, *found.after)]
    assert all(found.rates.dense.low <= one <= found.rates.dense.high for one in ratios)
    assert found.rates.mean_error == pytest.approx(
        sum(abs(one - 1) for one in found.left_out) / 3, abs=1e-4
    )
    # The fit to all is nearer than the fits without the run.
    assert sum(abs(one - 1) for one in found.after) < sum(abs(one - 1) for one in found.left_out)


@pytest.mark.parametrize("deviations", [(1.01, 0.99), (1.3, 1.0), (1.3, 0.8)])
def test_runs_that_a_machine_of_the_rates_may_have_change_no_constant(deviations) -> None:
    """Deviations of models and layouts are not the machine's, and stay in the range."""
    noise = zip(runs_of(START.reached, LAYOUTS[:2]), deviations, strict=True)
    off = [replace(run, seconds=by * run.seconds) for run, by in noise]
    found = calibrated(off, "mine", "runs.csv")
    assert (found.factors, found.rates.reached) == ({}, START.reached)
    assert found.rates.fitted_to == "confirmed by 2 iterations of one's own"
    assert found.rates.dense.low <= min(deviations) < max(deviations) <= found.rates.dense.high


def test_a_fit_that_ends_at_the_peak_says_so() -> None:
    fast = [replace(run, seconds=run.seconds / 2.2) for run in runs_of(START.reached, LAYOUTS[:1])]
    found = calibrated(fast, "mine", "runs.csv")
    assert {"matmul", "memory"} <= {*found.at_peak}
    assert found.after[0] > 1.1  # and is still too slow


def test_runs_of_the_same_layout_count_once_with_their_mean() -> None:
    (run,) = runs_of(START.reached, LAYOUTS[:1])
    again = [replace(run, seconds=0.95 * run.seconds), replace(run, seconds=1.05 * run.seconds)]
    found = calibrated(again, "mine", "runs.csv")
    assert [one.seconds for one in found.runs] == pytest.approx([run.seconds])


def test_measured_memory_is_in_the_range_of_bytes() -> None:
    (run,) = runs_of(START.reached, LAYOUTS[:1])
    peak = evaluate(PROBLEM, run.layout).peak_bytes
    found = calibrated([replace(run, memory_bytes=1.5 * peak)], "mine", "runs.csv")
    assert (found.rates.memory.low, found.rates.memory.high) == (START.memory.low, 1.5)


def test_runs_that_cannot_be_are_refused_by_line() -> None:
    first, second = runs_of(START.reached, LAYOUTS[:2])
    other = replace(first, place="runs.csv:9", seconds=1.3 * first.seconds)
    require_runs([first, second, replace(other, seconds=1.15 * first.seconds)])
    for wrong, said in (
        (replace(first, seconds=0.0), "runs.csv:2: seconds must be above 0"),
        (replace(first, seconds=1e-3), r"runs.csv:2: 0.001 s would be an MFU of \d+%"),
        (replace(first, layout=parse_layout("d8")), "runs.csv:2: p x t x c x d .* 16 devices"),
        (other, r"runs.csv:9: .* contradicts runs.csv:2, which has"),
    ):
        with pytest.raises(InputError, match=said):
            calibrated([first, wrong], "mine", "runs.csv")
