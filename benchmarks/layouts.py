"""The cost model of layouts against published iterations (docs/layouts.md explains the tables)."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from benchmarks import layout_experts, layout_h100, layout_vtrain
from benchmarks.layout_runs import (
    MEASURED,
    Run,
    compiled,
    error,
    kept_by_blocks,
    korthikanti,
    predicted,
    table_4_1,
    table_4_2_ptd,
    table_4_2_zero,
    thesis_teraflops,
)
from benchmarks.report import Table
from stagewright.formulations.parallelism.estimate import evaluate


def tables(quick: bool) -> Iterator[Table]:
    """All comparisons; if ``quick`` only those of the A100."""
    if MEASURED.exists():
        yield iterations()
        yield memory()
    yield weak_scaling()
    yield strong_scaling()
    if not quick:
        yield from layout_vtrain.tables()
        yield from layout_h100.tables()
        yield from layout_experts.tables()


def iterations() -> Table:
    """Korthikanti et al. 2022, tables 4 and 5."""
    runs = [one.run for one in korthikanti()]
    rows = [
        (
            run.name,
            str(run.layout),
            run.seconds,
            f"{predicted(run):.2f}",
            _shown(error(run)),
        )
        for run in runs
    ]
    columns = ("model", "layout", "measured s", "predicted s", "error")
    return Table("layout_iterations", _title("Iterations of 2022", runs), columns, tuple(rows))


def memory() -> Table:
    """The same runs: activations and state of the first rank."""
    rows = []
    for one in korthikanti():
        first = evaluate(one.run.problem, one.run.layout, compiled).memory[0]
        state = first.weights + first.gradients + first.optimizer
        kept, found = one.activation_bytes, kept_by_blocks(one.run, first)
        rows.append(
            (
                one.run.name,
                _gib(one.state_bytes),
                _gib(state),
                None if kept is None else _gib(kept),
                _gib(found),
                None if kept is None else _shown(found / kept - 1),
            )
        )
    columns = (
        "model",
        "state of the blocks GiB",
        "predicted with the embedding",
        "activations of the blocks GiB",
        "predicted",
        "error",
    )
    return Table("layout_memory", "Memory of the first rank", columns, tuple(rows))


def weak_scaling() -> Table:
    """Thesis table 4.1."""
    runs = list(table_4_1())
    rows = [_rates(run) for run in runs]
    columns = (
        "model",
        "layout",
        "printed TFLOP/s per GPU",
        "predicted",
        "error",
    )
    return Table("layout_weak", _title("Thesis table 4.1", runs), columns, tuple(rows))


def strong_scaling() -> Table:
    """Thesis table 4.2, which is not fitted."""
    rows = [_rates(run) for run in (*table_4_2_ptd(), *table_4_2_zero())]
    columns = ("model", "layout", "printed TFLOP/s per GPU", "predicted", "error")
    return Table("layout_strong", "Thesis table 4.2, not fitted", columns, tuple(rows))


def _rates(run: Run) -> tuple[object, ...]:
    printed = thesis_teraflops(run, run.seconds)
    found = thesis_teraflops(run, predicted(run))
    return (
        run.name,
        str(run.layout),
        f"{printed:.0f}",
        f"{found:.0f}",
        _shown(found / printed - 1),
    )


def _title(what: str, runs: Sequence[Run]) -> str:
    return f"{what}: {_summary(error(run) for run in runs)}"


def _summary(errors: Iterable[float]) -> str:
    found = np.abs([*errors])
    return f"seconds {found.mean():.1%} off on average, {found.max():.1%} at most"


def _shown(value: float | None) -> str | None:
    return None if value is None else f"{value:+.1%}"


def _gib(value: float) -> str:
    return f"{value / 2**30:.2f}"
