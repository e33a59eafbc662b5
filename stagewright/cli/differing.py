"""``diff``: one plan against another."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.console import (
    JsonFlag,
    PlanFile,
    percent,
    print_json,
    print_lines,
    print_table,
)

if TYPE_CHECKING:
    from stagewright.executor.simulation.difference import PlanDifference
    from stagewright.formulations.plans.plan import PipelinePlan


def diff(
    plan: PlanFile,
    other: Annotated[
        Path,
        typer.Argument(
            help="The second plan, of the same model.", metavar="OTHER", show_default=False
        ),
    ],
    as_json: JsonFlag = False,
) -> int:
    """Compare two plans of a model: what the second takes longer for, and what it does otherwise.

    The causes of a finite plan are the actions and waits on its critical path, those of a periodic
    one the load and the idle time of its busiest device; they add up to the iteration.
    """  # fmt: skip
    from stagewright.executor.simulation.difference import differ
    from stagewright.formulations.plans.plan import load_plan

    first, second = load_plan(plan), load_plan(other)
    found = differ(first, second)
    if as_json:
        print_json(asdict(found))
    else:
        _print(found, first, second)
    return 0


def _print(found: "PlanDifference", first: "PipelinePlan", second: "PipelinePlan") -> None:
    from stagewright.graphs.documents.units import format_bytes, format_seconds

    def signed(seconds: float) -> str:
        return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}" if seconds else "0 s"

    whole = found.iteration.first_seconds
    rows = [
        (one.cause, format_seconds(one.first_seconds), format_seconds(one.second_seconds),
         signed(one.difference), percent(one.difference / whole) if whole else "-")
        for one in (found.iteration, *found.parts)
    ]  # fmt: skip
    print_table(("<cause", "first", "second", "difference", "of the first"), rows)
    memory = ["-" if peak is None else format_bytes(peak) for peak in found.peak_memory_bytes]
    proofs = [one.certificate for one in (first, second)]
    gaps = ["no bound" if one is None else f"gap {percent(one.gap)} in its class" for one in proofs]
    print_lines(
        f"peak memory: {memory[0]} -> {memory[1]}",
        f"proof: {gaps[0]} -> {gaps[1]}",
        *(found.changes or ("nothing else is different",)),
    )
