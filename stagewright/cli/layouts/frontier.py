"""``train-plan`` for several numbers of GPUs or lengths of sequences: options, and the table."""

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stagewright.cli import interruptible
from stagewright.cli.commands import CommandOptions, ask, spelled
from stagewright.cli.console import kept, out, print_table, progress, say, seconds, tell
from stagewright.cli.layouts.printing import WIDE
from stagewright.formulations.parallelism.document import save_layout
from stagewright.graphs.documents.documents import write_file
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import parse_duration
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.cli.layouts.layouts import TrainPlanOptions
    from stagewright.service.layouts.frontier import FrontierAnswer, FrontierRequest, FrontierRow
    from stagewright.service.layouts.requests import LayoutRequest


Several = int | tuple[int, ...] | None


def one_of(value: Several, name: str) -> int | None:
    """The one value of an option that may have several."""
    if isinstance(value, tuple):
        raise InputError(f"{spelled(name)}: give one number here, got {', '.join(map(str, value))}")
    return value


class FrontierOptions(CommandOptions):
    """What a GPU-hour costs, and when the training must end."""

    price: Annotated[str | None, Option(form="DOLLARS|FILE", may_be_file=True)] = None
    """Dollars of a GPU-hour, or a file of prices (see cloud), of which the cheapest on demand for
    the kind of GPU is taken."""
    deadline: Annotated[str | None, Option(form="TIME")] = None
    """With --tokens: find the cheapest number of GPUs that trains them in such a time as 30d; exit
    code 1 if none does. -o keeps its layout."""


def plan_frontier(given: "TrainPlanOptions", name: str, layouts: "Sequence[LayoutRequest]") -> int:
    """Compare the best layouts of several sizes; exit code 1 if none fits or meets the deadline."""
    from stagewright.service.layouts.frontier import FrontierRequest, find_frontier

    if given.server is not None:
        raise InputError("--server: it plans one size, without --price and --deadline")
    deadline = None if given.deadline is None else parse_duration(given.deadline, "--deadline")
    if given.output is not None and deadline is None:
        raise InputError(
            "-o keeps the layout that --deadline chooses; give --deadline, or one size"
        )
    if deadline is not None and layouts[0].tokens is None:
        raise InputError("--deadline needs --tokens, the length of the training")
    device = layouts[0].problem.fabric.device
    request = ask(
        FrontierRequest,
        {"deadline_seconds": "--deadline"},
        layouts=tuple(layouts),
        price=None if given.price is None else _dollars(given.price, device),
        deadline_seconds=deadline,
    )
    with interruptible() as stop, progress(f"planning {name}", stop):
        answer = find_frontier(request, stop)
    is_found = any(row.days is not None for row in answer.rows)
    if given.png is not None and is_found:
        _draw(given.png, f"{name} on {device}", request, answer)
    written = kept(answer.plan, given, save_layout)
    tell(
        answer,
        given,
        lambda answer: _print(name, request, answer),
        [*([given.png] if is_found else []), *written],
    )
    return 0 if is_found and (deadline is None or answer.chosen is not None) else 1


def _dollars(text: str, device: str) -> float:
    """Dollars of a GPU-hour from a number, or from a file of prices."""
    from stagewright.graphs.workloads.prices import load_market
    from stagewright.service.layouts.frontier import on_demand_price

    try:
        return float(text)
    except ValueError:
        if not Path(text).is_file():
            raise InputError(
                f"--price {text!r} is neither a number of dollars nor a file of prices"
            ) from None
    return on_demand_price(load_market(text), device)


def _cost(request: "FrontierRequest", answer: "FrontierAnswer") -> str:
    of = "" if request.layouts[0].tokens is not None else " per 1B tokens"
    return ("GPU-hours" if request.price is None else "dollars") + of


def _draw(png: Path, title: str, request: "FrontierRequest", answer: "FrontierAnswer") -> None:
    from stagewright.executor.drawing.charts.layouts import frontier_png

    deadline = request.deadline_seconds
    days = None if deadline is None else deadline / 86_400
    title = f"{title}, {answer.tokens:.3g} tokens"
    write_file(png, frontier_png(answer.rows, _cost(request, answer), title, days))


def _print(name: str, request: "FrontierRequest", answer: "FrontierAnswer") -> None:
    longest = max((row.days or 0.0 for row in answer.rows), default=0.0)
    unit, each = ("days", 1) if longest >= 2 else ("hours", 24)
    columns: list[tuple[str, Callable[[FrontierRow], str]]] = [
        ("GPUs", lambda row: str(row.gpus)),
        ("sequence", lambda row: str(row.sequence)),
        ("<layout", lambda row: row.layout or "none"),
        ("time", lambda row: seconds(row.seconds)),
        ("bound", lambda row: seconds(row.bound_seconds)),
        ("tokens/s", lambda row: _number(row.tokens_per_second)),
        ("MFU", lambda row: "-" if row.mfu is None else f"{row.mfu:.1%}"),
        (unit, lambda row: _number(row.days, each)),
        ("range", lambda row: _range(row, each)),
        (_cost(request, answer), lambda row: _number(row.cost)),
        ("<front", lambda row: "yes" if row.is_pareto else ""),
    ]
    hidden = {
        head
        for head, field in (("GPUs", "gpus"), ("sequence", "sequence"))
        if len({getattr(row, field) for row in answer.rows}) == 1
    } | (_WIDE_ONLY if out().width < WIDE else set())
    columns = [one for one in columns if one[0] not in hidden]
    if request.deadline_seconds is not None:
        columns.append(("<deadline", lambda row: _MEETS[row.meets or "no"]))
    print_table(
        [head for head, _ in columns], [[cell(row) for _, cell in columns] for row in answer.rows]
    )
    say(*_said(name, request, answer))


_WIDE_ONLY = {"bound", "MFU", "range", "tokens/s"}
"""Columns that a narrow terminal does not have."""
_MEETS = {"yes": "surely met", "within the range": "likely met", "no": "not met"}

_FITS = {"yes": "surely", "within the range": "likely", "no": "not"}


def _range(row: "FrontierRow", each: int) -> str:
    if row.days is None:
        return "-"
    return f"{_number(row.days_low, each)}-{_number(row.days_high, each)}"


def _number(value: float | None, each: int = 1) -> str:
    if value is None or not isfinite(value):
        return "-"
    value *= each
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def _said(name: str, request: "FrontierRequest", answer: "FrontierAnswer") -> Iterator[str]:
    """The lines below the table."""
    yield f"{name}: costs are of {answer.tokens:.4g} tokens; {answer.wall_seconds:.1f} s"
    yield (
        "front: no other row of the same sequences is faster and costs no more, or costs less and "
        "is as fast; bound: no layout of the row's class is faster (--gpus N alone names the class)"
    )
    for row in answer.rows:
        if row.reason is not None:
            yield f"{row.gpus} GPUs, sequence {row.sequence}: {row.reason}"
    if request.layouts[0].failures is not None:
        yield "times, days and costs are with failures (--gpus N alone says where the time goes)"
    if request.price is not None:
        yield f"price: {request.price:g} dollars per GPU-hour"
    if answer.chosen is not None:
        row = answer.rows[answer.chosen]
        yield (
            f"chosen: {row.gpus} GPUs, sequence {row.sequence}, {row.layout}: {_number(row.days)} "
            f"days ({_number(row.days_low)} to {_number(row.days_high)} when measured): deadline "
            f"{_MEETS[row.meets or 'no']}; memory fits {_FITS[row.fits or 'no']}"
        )
    if answer.reason is not None:
        yield answer.reason
    yield f"rates: {answer.rates}"
