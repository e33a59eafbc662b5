"""Answers about layouts in tables and lines: for the command line, the page and notebooks."""

from collections.abc import Iterator, Sequence
from math import inf, isfinite

from stagewright.formulations.parallelism.document import rounded
from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.units import format_bytes, format_seconds
from stagewright.graphs.models.traits import said_parameters
from stagewright.service.answers import AnswerTable, ShownAnswer
from stagewright.service.layouts.calibrating import CalibrateAnswer
from stagewright.service.layouts.failures import said_failures, seconds_or_never
from stagewright.service.layouts.profiled import ProfiledAnswer, ProfiledPoolAnswer
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
        f"{_percent(answer.gap)}, {answer.wall_seconds:.2f} s"
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
                _seconds(one.before_seconds),
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
        rows.append((one.change, _seconds(one.seconds), _percent(gain), layout))
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


def calibrated_table(answer: CalibrateAnswer) -> AnswerTable:
    """The runs, and how they are predicted before and after the fit."""
    return AnswerTable(
        "Measured runs",
        ("<run", "<layout", "measured", "before", "fitted", "left out", "error"),
        [
            (
                one.place, one.layout, format_seconds(one.seconds),
                format_seconds(one.before_seconds), format_seconds(one.after_seconds),
                _seconds(one.left_out_seconds),
                "-" if one.left_out_seconds is None
                else f"{one.left_out_seconds / one.seconds - 1:+.1%}",
            )
            for one in answer.rows
        ],
    )  # fmt: skip


def calibrated_lines(answer: CalibrateAnswer) -> Iterator[str]:
    """Which constants were fitted, and from which rates."""
    factors = ", ".join(f"{name} x {factor:.3g}" for name, factor in answer.factors.items())
    said = factors or "no constant is changed, the runs are not all on one side of the range"
    yield f"from {answer.started_from}: {said}"
    if answer.at_peak:
        yield (
            f"the fit ends at the peak of the device ({', '.join(answer.at_peak)} = 1): check "
            "--device, and the layouts, batches and seconds of the runs"
        )


def profiled_tables(answer: ProfiledAnswer) -> tuple[AnswerTable, AnswerTable]:
    """The stages of a plan by measured layers, and the GPUs of every kind."""
    stages = AnswerTable(
        "Stages",
        ("stage", "layers", "<GPUs", "replicas", "tensor", "forward", "backward", "all-reduce",
         "update", "memory", "of"),
        [
            (
                str(s), f"{one.first}-{one.stop - 1}", _pool_name(answer.pools, one.pool),
                str(one.replicas), str(one.tensor), format_seconds(one.forward_seconds),
                format_seconds(one.backward_seconds), format_seconds(one.reduce_seconds),
                format_seconds(one.update_seconds), format_bytes(one.memory_bytes),
                format_bytes(one.capacity_bytes),
            )
            for s, one in enumerate(answer.stages)
        ],
    )  # fmt: skip
    pools = AnswerTable(
        "GPUs",
        ("<GPUs", "servers", "each", "used", "fullest GPU", "of"),
        [
            (
                _pool_name(answer.pools, number), str(one.servers), str(one.per_server),
                f"{one.used} of {one.devices}",
                "-" if one.peak_bytes is None else format_bytes(one.peak_bytes),
                format_bytes(one.capacity_bytes),
            )
            for number, one in enumerate(answer.pools)
        ],
    )  # fmt: skip
    return stages, pools


def _pool_name(pools: Sequence[ProfiledPoolAnswer], number: int) -> str:
    """The name of a pool: its kind, with server size and zone if other pools share it."""
    one = pools[number]
    same = [other for other in pools if other.device_kind == one.device_kind]
    size = f" of {one.per_server}" if len({other.per_server for other in same}) > 1 else ""
    zone = f" in {one.zone}" if len({other.zone for other in same}) > 1 else ""
    return f"{one.device_kind}{size}{zone}"


def shown_profiled(answer: ProfiledAnswer) -> ShownAnswer:
    """The plan by measured layers with its bound, and its stages."""
    lines = [f"{answer.status}: {_seconds(answer.iteration_seconds)} per iteration"]
    if answer.bound_seconds is not None:
        bound = format_seconds(answer.bound_seconds)
        lines.append(f"bound {bound}, gap {_percent(answer.gap)}, by {answer.proved_by}")
    lines += [answer.reason] if answer.reason else []
    stages, _ = profiled_tables(answer)
    return ShownAnswer(lines, stages, [one.model_dump() for one in answer.stages])


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
            lines.append(f"bound {bound}, gap {_percent(gap)}, by {plan.bound.proved_by}")
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


def shown_calibration(answer: CalibrateAnswer) -> ShownAnswer:
    """The fitted constants, and the runs."""
    rows = [one.model_dump() for one in answer.rows]
    return ShownAnswer([*calibrated_lines(answer)], calibrated_table(answer), rows)


def _percent(share: float | None) -> str:
    return "-" if share is None or not isfinite(share) else f"{share:.2%}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)
