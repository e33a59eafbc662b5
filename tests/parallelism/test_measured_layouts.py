"""The cost model against published iterations, with one set of rates for the A100."""

import numpy as np
import pytest

from benchmarks.layout_runs import (
    Measured,
    Run,
    compiled,
    error,
    kept_by_blocks,
    predicted,
    table_4_1,
    table_4_2_ptd,
    thesis_teraflops,
)
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.parts import shares


def test_iterations_of_2022(measured: list[Measured]) -> None:
    errors = np.abs([error(one.run) for one in measured])
    assert errors.mean() <= 0.03
    assert errors.max() <= 0.07


def test_state_of_blocks(measured: list[Measured]) -> None:
    """The table's state leaves out embedding and norms: it is 18 bytes of 12 h^2 l / (p t)."""
    for one in measured:
        problem, layout = one.run.problem, one.run.layout
        of = problem.architecture
        formula = 18 * 12 * of.hidden**2 * of.layers / (layout.pipeline * layout.tensor)
        assert one.state_bytes == formula
        block = shares(problem, layout.split).kinds[0].parameters
        bytes_each = (
            problem.precision.weight_bytes
            + problem.precision.gradient_bytes
            + problem.precision.optimizer_bytes
        )
        state = bytes_each * block * of.layers / layout.pipeline
        assert state == pytest.approx(one.state_bytes, rel=0.03)
        first = evaluate(problem, layout, compiled).memory[0]
        assert first.weights + first.gradients + first.optimizer > state  # and the embedding


def test_activations_of_the_first_rank(measured: list[Measured]) -> None:
    """Those of its blocks; the table leaves out the logits, which a single rank has too."""
    printed = [one for one in measured if one.activation_bytes is not None]
    assert len(printed) == 4
    for one in printed:
        first = evaluate(one.run.problem, one.run.layout, compiled).memory[0]
        assert kept_by_blocks(one.run, first) == pytest.approx(one.activation_bytes, rel=0.03)


@pytest.mark.parametrize("run", list(table_4_1()), ids=lambda run: run.name)
def test_weak_scaling_to_a_trillion(run: Run) -> None:
    """Thesis table 4.1, TFLOP/s per GPU."""
    printed = thesis_teraflops(run, run.seconds)
    assert thesis_teraflops(run, predicted(run)) == pytest.approx(printed, rel=0.10)


@pytest.mark.parametrize("run", list(table_4_2_ptd()), ids=lambda run: run.name)
def test_strong_scaling_which_is_not_fitted(run: Run) -> None:
    """Thesis table 4.2, PTD-P."""
    assert abs(error(run)) <= 0.10
