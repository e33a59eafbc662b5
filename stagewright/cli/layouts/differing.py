"""``diff`` of two layouts, and the table of causes that ``diff`` of plans has too."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.cli.console import percent, print_json, print_table, say, size
from stagewright.graphs.documents.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from stagewright.executor.simulation.difference import Part
    from stagewright.service.layouts.difference import LayoutDifference


def diff_layouts(first: Path, second: Path, as_json: bool) -> int:
    """Compare two layouts that train-plan wrote."""
    from stagewright.formulations.parallelism.document import load_layout
    from stagewright.service.layouts.difference import layout_difference

    found = layout_difference(load_layout(first), load_layout(second))
    if as_json:
        print_json(asdict(found))
    else:
        _print(found)
    return 0


def print_parts(parts: "Iterable[Part]", whole: "Part", title: str = "") -> None:
    """Seconds of two plans by cause, and the differences as shares of the first iteration."""
    print_table(
        ("<cause", "first", "second", "difference", "of the first"),
        [
            (
                one.cause,
                format_seconds(one.first_seconds),
                format_seconds(one.second_seconds),
                _signed(one.difference, format_seconds),
                percent(one.difference / whole.first_seconds) if whole.first_seconds else "-",
            )
            for one in parts
        ],
        title,
    )


def _signed(value: float, written: Callable[[float], str]) -> str:
    sign = "-" if value < 0 else "+"
    return f"{sign}{written(abs(value))}" if value else written(0.0)


def _print(found: "LayoutDifference") -> None:
    print_parts((found.iteration, *found.parts), found.iteration)
    if found.prices:
        print_parts(found.prices, found.iteration, "Prices that move, each switched off alone")
    print_table(
        ("pipeline rank", "first", "second", "difference"),
        [
            (str(rank), size(one), size(other), _more(one, other))
            for rank, (one, other) in enumerate(zip_longest(*found.memory_bytes))
        ],
        "Peak memory",
    )
    rates = [f"{rate:,.0f}" for rate in found.tokens_per_second]
    say(f"tokens/s: {rates[0]} -> {rates[1]}", *(found.changes or ("nothing is different",)))


def _more(one: float | None, other: float | None) -> str:
    return "-" if one is None or other is None else _signed(other - one, format_bytes)
