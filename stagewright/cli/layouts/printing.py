"""Tables of layouts and of their memory."""

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

from stagewright.cli.console import out, percent, print_table, say
from stagewright.cli.layouts.failures import failing, said_failures, seconds_or_never
from stagewright.formulations.parallelism.document import rounded
from stagewright.graphs.documents.units import format_bytes, format_seconds
from stagewright.graphs.models.traits import said_parameters

WIDE = 110
"""Characters from which a table has all its columns."""

if TYPE_CHECKING:
    from stagewright.formulations.parallelism.training import TrainingProblem
    from stagewright.service.layouts.requests import (
        ExplainAnswer,
        LayoutAnswer,
        LayoutMemoryAnswer,
        LayoutRow,
        RankMemoryAnswer,
        RefinedAnswer,
    )


def print_layouts(
    name: str, problem: "TrainingProblem", answer: "LayoutAnswer", front: bool
) -> None:
    """The best layouts, and what else was asked for."""
    if answer.rows:
        _print_rows(answer.rows)
        say(*_said(name, problem, answer))
    else:
        say(f"{name}: {answer.status}", *([answer.reason] if answer.reason else []))
    if answer.refined is not None:
        _print_refined(answer.refined)
    if answer.explained is not None:
        _print_explained(answer.explained, problem.fabric.memory_bytes)
    if front and answer.front:
        print_table(
            ("peak memory", "time", "<layout"),
            [
                (format_bytes(one.peak_bytes), format_seconds(one.seconds), one.layout)
                for one in answer.front
            ],
            "Fastest layouts by memory",
        )
    if answer.what_if:
        print_table(
            ("<change", "time", "gain", "<layout"),
            [
                (
                    one.change,
                    "-" if one.seconds is None else format_seconds(one.seconds),
                    percent(_gain(one.seconds, answer.rows[0].seconds)),
                    one.layout or "none fits",
                )
                for one in answer.what_if
            ],
            "What if",
        )


def _said(name: str, problem: "TrainingProblem", answer: "LayoutAnswer") -> Iterator[str]:
    """The lines below the table of layouts."""
    best = answer.rows[0]
    folded = sum(len(one.alike) for one in answer.rows)
    if folded:
        yield (
            f"folded: {folded} evaluated layouts that differ from one of these only in placement, "
            "or in whether ranks divide samples or their tokens (c and d), and are no faster; "
            "--unfolded lists them"
        )
    interrupted = answer.status == "interrupted"
    proof = "not proved: interrupted" if interrupted else f"{answer.status} by the model"
    proof += "" if answer.failures is None else ", with failures"
    yield (
        f"{name} on {problem.fabric.devices} {problem.fabric.device}: "
        f"{format_seconds(best.seconds)} per iteration ({proof}), bound "
        f"{format_seconds(answer.bound_seconds or 0.0)} by {answer.proved_by}, gap "
        f"{percent(answer.gap)}, {answer.wall_seconds:.2f} s"
    )
    yield said_parameters(problem.architecture)
    yield f"{_expected(best)}; {bytes_in_range(best, problem.fabric.memory_bytes)}"
    fastest = answer.bound_fastest_seconds or 0.0
    yield (
        f"no layout is faster than {format_seconds(fastest)} on a machine as fast as the fastest "
        "measured"
    )
    for one in answer.refined.rows[:1] if answer.refined is not None else ():
        if one.seconds < best.seconds:
            yield f"faster, with blocks by stage: {format_seconds(one.seconds)}, {one.layout}"
    days = answer.training_days
    with_ = "without interruptions" if answer.failures is None else "with failures"
    yield f"{best.tokens_per_second:,.0f} tokens/s" + (
        "" if days is None else f"; all tokens take {days:,.1f} days {with_}"
    )
    if answer.failures is not None:
        yield from said_failures(answer.failures)
    if answer.fastest_rows < len(answer.rows) and not interrupted:
        many = (
            f"the first {answer.fastest_rows} of the table are"
            if answer.fastest_rows
            else "none is"
        )
        yield (
            f"{many} proved to be the fastest; other blocks of the stages may be faster than the "
            "rows below"
        )
    yield f"of all {answer.plan_class}"
    yield f"rates: {answer.rates}"
    yield (
        "`stagewright export LAYOUT --to plan` makes a plan of stages of it"
        if problem.memory.name == "plan"
        else "--for plan: layouts that `stagewright run` carries out, as plans of stages"
    )
    yield from answer.remarks


def _expected(of: "LayoutRow") -> str:
    """Between what the measured seconds of an iteration are expected."""
    low, high = format_seconds(of.seconds_low), format_seconds(of.seconds_high)
    return f"{low} to {high} when measured"


def bytes_in_range(of: "LayoutRow | LayoutMemoryAnswer", limit: float) -> str:
    """The peak with its range, and whether it fits."""
    peak, low, high = map(format_bytes, (of.peak_bytes, of.peak_bytes_low, of.peak_bytes_high))
    return f"peak memory {peak} ({low} to {high}) of {format_bytes(limit)}: fits {_FITS[of.fits]}"


_FITS = {
    "yes": "in the whole range", "no": "nowhere in the range",
    "within the range": "within the range, not at its upper end",
}  # fmt: skip


def _gain(seconds: float | None, before: float) -> float | None:
    return None if seconds is None else 1 - seconds / before


def print_shortages(shortages: tuple[str, ...]) -> None:
    """The first one, and how many more there are."""
    if shortages:
        more = len(shortages) - 1
        others = f"; {more} other pipeline rank{'s do' if more > 1 else ' does'} not fit"
        say(shortages[0] + (others if more else ""))


def _is_narrow() -> bool:
    """Whether the terminal is too narrow for tables with all their columns."""
    return out().width < WIDE


def _print_rows(rows: "tuple[LayoutRow, ...]") -> None:
    """The best layouts: in one table, or on a narrow terminal in two by the same numbers."""
    head = _HEAD if rows[0].goodput is None else _FAILING
    if not _is_narrow():
        print_table(head, map(_cells, rows))
        return
    tables = ((0, 1, 2, 4), (3, 5, 6, 7, 8)) if head is _HEAD else ((0, 1, 2, 3), (4, 5, 6))
    for columns in tables:
        print_table(
            ("#", *(head[one] for one in columns)),
            [
                (str(number), *(_cells(row)[one] for one in columns))
                for number, row in enumerate(rows, 1)
            ],
            tight=True,
        )


_HEAD = (
    "<layout", "time", "MFU", "TFLOP/s", "memory", "weights", "optimizer", "activations",
    "<loses by",
)  # fmt: skip
_FAILING = ("<layout", "time", "with failures", "goodput", "MFU", "memory", "<loses by")


def _cells(one: "LayoutRow") -> tuple[str, ...]:
    memory, time = one.memory, format_seconds(one.seconds)
    total, mfu = format_bytes(memory.total_bytes), f"{one.mfu:.1%}"
    if one.goodput is not None:
        effective = seconds_or_never(one.effective_seconds)
        return one.layout, time, effective, f"{one.goodput:.2%}", mfu, total, one.loses_by
    return (
        one.layout,
        time,
        mfu,
        f"{one.flops_per_device / 1e12:.0f}",
        total,
        format_bytes(memory.weights_bytes + memory.gradients_bytes),
        format_bytes(memory.optimizer_bytes),
        format_bytes(memory.activations_bytes + memory.buffers_bytes),
        one.loses_by,
    )


def _print_refined(answer: "RefinedAnswer") -> None:
    """Layouts with blocks by stage, and what their bounds speak of."""
    if answer.rows:
        print_table(
            ("<layout", "time", "before", "MFU", "memory", "bound"),
            [
                (
                    one.layout,
                    format_seconds(one.seconds),
                    "-" if one.before_seconds is None else format_seconds(one.before_seconds),
                    f"{one.mfu:.1%}",
                    format_bytes(one.peak_bytes),
                    format_seconds(one.bound_seconds),
                )
                for one in answer.rows
            ],
            "Blocks and recomputed blocks by stage",
        )
    divided = f"blocks by stage: {answer.examined} layouts divided, {answer.wall_seconds:.2f} s"
    if not isfinite(answer.plain_bound_seconds):
        say(f"{divided}; no plain pipeline of any division is possible, by {answer.proved_by}")
        return
    faster = "" if answer.rows else "; none is faster than with stages that are alike"
    say(
        f"{divided}{faster}; no plain pipeline of any division takes less than "
        f"{format_seconds(answer.plain_bound_seconds)}, no pipeline less than "
        f"{format_seconds(answer.bound_seconds)}, by {answer.proved_by}"
    )


def _print_explained(one: "ExplainAnswer", limit: float) -> None:
    if one.refused is not None:
        say(f"{one.layout}: not possible: {one.refused}")
        return
    print_table(
        ("<part", "this", "best", "more"),
        [
            (
                part.part,
                format_seconds(rounded(part.seconds)),
                *(
                    ("-", "-")
                    if part.best_seconds is None
                    else (
                        format_seconds(rounded(part.best_seconds)),
                        format_seconds(rounded(part.seconds - part.best_seconds)),
                    )
                ),
            )
            for part in one.parts
        ],
        one.layout,
    )
    _print_prices(one)
    if one.differs:
        say(f"the best differs in {', '.join(one.differs)}")
    if one.row is not None:
        rank = one.row.loses_by or ("" if one.shortages else "the best")
        say(
            *(f"less sure: {cause}" for cause in one.causes),
            bytes_in_range(one.row, limit),
            f"in all {format_seconds(one.row.seconds)}, {_expected(one.row)}"
            + (f"; {rank}" if rank else ""),
            *failing(one.row),
        )
    print_shortages(one.shortages)


def _print_prices(one: "ExplainAnswer") -> None:
    """What every price adds, and where it comes from."""
    seen = [price for price in one.prices if rounded(price.seconds) > 0]
    print_table(
        ("<price", "adds", "time without it", "<source"),
        [
            (
                price.price,
                format_seconds(price.seconds),
                format_seconds(price.without_seconds),
                price.source,
            )
            for price in seen
        ],
        "Prices, each switched off alone",
    )
    others = [price.price for price in one.prices if price not in seen]
    if others:
        say(f"no time here: {', '.join(others)}")


def print_memory(ranks: "tuple[RankMemoryAnswer, ...]", limit: float) -> None:
    """A row for every position in the pipeline."""
    kinds = ["weights", "gradients", "optimizer", "activations", "buffers", "reserve", "total"]
    narrow = _is_narrow()
    if narrow:
        kinds.remove("reserve")  # all ranks have the same
    print_table(
        ("rank" if narrow else "pipeline rank", *kinds, "free"),
        [
            (
                str(one.rank),
                *(format_bytes(getattr(one, f"{kind}_bytes")) for kind in kinds),
                format_bytes(limit - one.total_bytes),
            )
            for one in ranks
        ],
        tight=narrow,
    )
    if narrow:
        say(f"of every total {format_bytes(ranks[0].reserve_bytes)} are the reserve")
