"""The best layouts of a search, one explained, and its memory."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import inf, isfinite

from stagewright.formulations.parallelism.document import rounded
from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.units import format_bytes, format_duration, format_seconds
from stagewright.graphs.models.traits import said_parameters
from stagewright.service.answers import AnswerTable, ShownAnswer
from stagewright.service.layouts.failures import GoodputAnswer
from stagewright.service.layouts.requests import (
    ExplainAnswer,
    LayoutAnswer,
    LayoutMemoryAnswer,
    LayoutRow,
    RankMemoryAnswer,
    RefinedAnswer,
)

KINDS = ("weights", "gradients", "optimizer", "activations", "buffers", "reserve")
"""Of what a rank's memory holds."""
_FITS = {
    "yes": "in the whole range", "no": "nowhere in the range",
    "within the range": "within the range, not at its upper end",
}  # fmt: skip


def best_table(rows: Sequence[LayoutRow]) -> AnswerTable:
    """The best layouts, with what each loses by."""
    failing = bool(rows) and rows[0].goodput is not None
    head = FAILING if failing else HEAD
    return AnswerTable("The fastest layouts", head, [_cells(one) for one in rows])


HEAD = (
    "<layout", "time", "MFU", "TFLOP/s", "memory", "weights", "optimizer", "activations",
    "<loses by",
)  # fmt: skip
FAILING = ("<layout", "time", "with failures", "goodput", "MFU", "memory", "<loses by")


def _cells(one: LayoutRow) -> tuple[str, ...]:
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


def best_lines(name: str, problem: TrainingProblem, answer: LayoutAnswer) -> Iterator[str]:
    """What is said below the table of the best layouts."""
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
    yield f"{expected(best)}; {bytes_in_range(best, problem.fabric.memory_bytes)}"
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
    yield _other_door(problem, best)
    yield from answer.remarks


def _other_door(problem: TrainingProblem, best: LayoutRow) -> str:
    """What ``plan`` and ``run`` do with such layouts."""
    if problem.memory.name == "plan":
        return "`stagewright export LAYOUT --to plan` makes a plan of stages of it"
    runs = "--for plan: layouts that `stagewright run` carries out, as plans of stages"
    layout = parse_layout(best.layout)
    if layout.tensor * layout.context * layout.expert > 1:
        return runs
    return f"it has stages and replicas alone, which `stagewright plan` cuts layer by layer; {runs}"


def expected(of: LayoutRow) -> str:
    """Between what the measured seconds of an iteration are expected."""
    low, high = format_seconds(of.seconds_low), format_seconds(of.seconds_high)
    return f"{low} to {high} when measured"


def bytes_in_range(of: LayoutRow | LayoutMemoryAnswer, limit: float) -> str:
    """The peak with its range, and whether it fits."""
    peak, low, high = map(format_bytes, (of.peak_bytes, of.peak_bytes_low, of.peak_bytes_high))
    return f"peak memory {peak} ({low} to {high}) of {format_bytes(limit)}: fits {_FITS[of.fits]}"


def refined_table(answer: RefinedAnswer) -> AnswerTable:
    """Layouts with blocks by stage."""
    return AnswerTable(
        "Blocks and recomputed blocks by stage",
        ("<layout", "time", "before", "MFU", "memory", "bound"),
        [
            (
                one.layout,
                format_seconds(one.seconds),
                seconds(one.before_seconds),
                f"{one.mfu:.1%}",
                format_bytes(one.peak_bytes),
                format_seconds(one.bound_seconds),
            )
            for one in answer.rows
        ],
    )


def refined_line(answer: RefinedAnswer) -> str:
    """What the bounds of the refinement speak of."""
    divided = f"blocks by stage: {answer.examined} layouts divided, {answer.wall_seconds:.2f} s"
    if not isfinite(answer.plain_bound_seconds):
        return f"{divided}; no plain pipeline of any division is possible, by {answer.proved_by}"
    faster = "" if answer.rows else "; none is faster than with stages that are alike"
    return (
        f"{divided}{faster}; no plain pipeline of any division takes less than "
        f"{format_seconds(answer.plain_bound_seconds)}, no pipeline less than "
        f"{format_seconds(answer.bound_seconds)}, by {answer.proved_by}"
    )


def seconds_or_never(seconds: float | None) -> str:
    """Seconds of an iteration with failures, None if it is never complete."""
    return "never" if seconds is None else format_seconds(seconds)


def said_failures(answer: GoodputAnswer) -> Iterator[str]:
    """What failures leave of the best layout, and why."""
    gap = "-" if answer.gap is None else f"{answer.gap:.2%}"
    yield (
        f"with failures: {seconds_or_never(answer.effective_seconds)} per iteration, goodput "
        f"{answer.goodput:.2%}; bound {seconds_or_never(answer.bound_effective_seconds)} by "
        f"{answer.proved_by}, gap {gap}"
    )
    shares = {
        "training at full speed": answer.goodput,
        "stopped for checkpoints": answer.stopped,
        "work done again": answer.lost,
        "restarts": answer.restarting,
        "servers away": answer.away,
    }
    yield "of the time: " + ", ".join(f"{part} {share:.2%}" for part, share in shares.items())
    intervals = {
        "Young": answer.young_seconds,
        "Daly": answer.daly_seconds,
        "exact": answer.exact_seconds,
    }
    of = ", ".join(f"{name} {format_duration(one)}" for name, one in intervals.items())
    written = f", and is written {format_duration(answer.write_seconds)} later"
    yield (
        f"a checkpoint of {format_bytes(answer.checkpoint_bytes)} every {answer.iterations} "
        f"iterations, {format_duration(answer.interval_seconds)} ({of}); it stops the run for "
        f"{format_duration(answer.stop_seconds)}{written if answer.write_seconds else ''}"
    )
    other = "blocking" if answer.write_seconds else "asynchronous"
    yield (
        f"a failure every {format_duration(answer.mean_seconds)}, "
        f"{format_duration(answer.restart_seconds)} to restart"
        + (
            ""
            if answer.other_goodput is None
            else f"; {answer.other_goodput:.2%} with {other} checkpoints"
        )
    )
    if answer.away:
        yield f"with servers too few {'; '.join(_smaller(answer)) or 'the run waits'}"
    if answer.simulated_low is not None:
        yield (
            f"simulated: a mean goodput of {answer.simulated_low:.2%} to "
            f"{answer.simulated_high:.2%}, with 95 % confidence"
        )
    yield (
        "assumed: failures and repairs are independent and exponential; ranks with equal states "
        "write an equal part each; asynchronous writes do not slow the run"
    )


def _smaller(answer: GoodputAnswer) -> Iterator[str]:
    """The layouts with servers too few, by how many."""
    for (layout, seconds), runs in groupby(answer.smaller, lambda one: (one.layout, one.seconds)):
        numbers = [one.servers for one in runs]
        span = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        yield f"{span}: {layout}, {format_seconds(seconds)}"


def front_table(answer: LayoutAnswer) -> AnswerTable:
    """The fastest layouts with less and with more memory."""
    rows = [
        (format_bytes(one.peak_bytes), format_seconds(one.seconds), one.layout)
        for one in answer.front
    ]
    return AnswerTable("Fastest layouts by memory", ("peak memory", "time", "<layout"), rows)


def what_if_table(answer: LayoutAnswer) -> AnswerTable:
    """What better machines would buy."""
    rows = []
    for one in answer.what_if:
        gain = None if one.seconds is None else 1 - one.seconds / answer.rows[0].seconds
        layout = one.layout or "none fits"
        rows.append((one.change, seconds(one.seconds), percent(gain), layout))
    return AnswerTable("What if", ("<change", "time", "gain", "<layout"), rows)


def explained_tables(one: ExplainAnswer) -> Iterator[AnswerTable]:
    """Part by part what takes longer, and what every price adds."""
    if one.refused is not None:
        return
    yield AnswerTable(
        one.layout,
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
    )
    yield AnswerTable(
        "Prices, each switched off alone",
        ("<price", "adds", "time without it", "<source"),
        [
            (
                price.price,
                format_seconds(price.seconds),
                format_seconds(price.without_seconds),
                price.source,
            )
            for price in one.prices
            if rounded(price.seconds) > 0
        ],
    )


def explained_lines(one: ExplainAnswer, limit: float) -> Iterator[str]:
    """Why a layout is not the best, or not possible."""
    if one.refused is not None:
        yield f"{one.layout}: not possible: {one.refused}"
        return
    others = [price.price for price in one.prices if rounded(price.seconds) <= 0]
    if others:
        yield f"no time here: {', '.join(others)}"
    if one.differs:
        yield f"the best differs in {', '.join(one.differs)}"
    if one.row is not None:
        rank = one.row.loses_by or ("" if one.shortages else "the best")
        yield from (f"less sure: {cause}" for cause in one.causes)
        yield bytes_in_range(one.row, limit)
        yield f"in all {format_seconds(one.row.seconds)}, {expected(one.row)}" + (
            f"; {rank}" if rank else ""
        )
        if one.row.goodput is not None:
            effective = seconds_or_never(one.row.effective_seconds)
            yield f"with failures: {effective} per iteration, goodput {one.row.goodput:.2%}"
    yield from shortage_lines(one.shortages)


def shortage_lines(shortages: Sequence[str]) -> Iterator[str]:
    """The first one, and how many more there are."""
    if shortages:
        more = len(shortages) - 1
        others = f"; {more} other pipeline rank{'s do' if more > 1 else ' does'} not fit"
        yield shortages[0] + (others if more else "")


def memory_table(
    ranks: Sequence[RankMemoryAnswer], limit: float, kinds: Sequence[str] = KINDS
) -> AnswerTable:
    """A row for every position in the pipeline."""
    shown = (*kinds, "total")
    return AnswerTable(
        "Peak memory by pipeline rank",
        ("pipeline rank", *shown, "free"),
        [
            (
                str(one.rank),
                *(format_bytes(getattr(one, f"{kind}_bytes")) for kind in shown),
                format_bytes(limit - one.total_bytes),
            )
            for one in ranks
        ],
    )


def shown_layouts(answer: LayoutAnswer) -> ShownAnswer:
    """The best layout with its bound, and the table of layouts."""
    plan, lines = answer.plan, [f"{answer.status}: {answer.reason or 'no layout'}"]
    if plan is not None:
        problem = plan.problem
        lines = [
            f"{answer.status}: {problem.architecture.name} on {problem.fabric.devices} "
            f"{problem.fabric.device}, {format_seconds(plan.iteration_seconds)} per iteration",
            f"layout {plan.layout}",
        ]
        if plan.bound is not None:
            gap = 1 - plan.bound.seconds / plan.iteration_seconds
            bound = format_seconds(plan.bound.seconds)
            lines.append(f"bound {bound}, gap {percent(gap)}, by {plan.bound.proved_by}")
        for best in answer.rows[:1]:
            fits = bytes_in_range(best, problem.fabric.memory_bytes)
            lines.append(f"{best.layout}: {expected(best)}; {fits}")
    if answer.failures is not None:
        lines += said_failures(answer.failures)
    if answer.explained is not None:
        limit = inf if plan is None else plan.problem.fabric.memory_bytes
        lines += [f"explained {answer.explained.layout}:"]
        lines += explained_lines(answer.explained, limit)
    rows = [one.model_dump(exclude={"memory", "alike"}) for one in answer.rows]
    return ShownAnswer(lines, best_table(answer.rows), rows)


def shown_memory(answer: LayoutMemoryAnswer) -> ShownAnswer:
    """Whether the layout fits, and the memory of every rank."""
    fits = bytes_in_range(answer, answer.memory_bytes)
    lines = [answer.layout, *shortage_lines(answer.shortages), fits]
    table = memory_table(answer.ranks, answer.memory_bytes)
    return ShownAnswer(lines, table, [one.model_dump() for one in answer.ranks])


def percent(share: float | None) -> str:
    """A share, or a dash."""
    return "-" if share is None or not isfinite(share) else f"{share:.2%}"


def seconds(value: float | None) -> str:
    """Seconds, or a dash."""
    return "-" if value is None else format_seconds(value)
