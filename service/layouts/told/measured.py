"""Tunings, plans by layer profiles and calibrations: answers that rest on measured times."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from stagewright.graphs.documents.units import counted, format_bytes, format_seconds
from stagewright.service.answers import AnswerTable, ShownAnswer
from stagewright.service.layouts.told.layouts import percent, seconds

if TYPE_CHECKING:
    from stagewright.service.layouts.profiled import ProfiledAnswer, ProfiledPoolAnswer
    from stagewright.service.layouts.rates import CalibrateAnswer
    from stagewright.service.layouts.tuning import TuneAnswer

SHOWN = 10
"""Layouts that may still win, in the table."""


def calibrated_table(answer: "CalibrateAnswer") -> AnswerTable:
    """The runs, and how they are predicted before and after the fit."""
    return AnswerTable(
        "Measured runs",
        ("<run", "<layout", "measured", "before", "fitted", "left out", "error"),
        [
            (
                one.place, one.layout, format_seconds(one.seconds),
                format_seconds(one.before_seconds), format_seconds(one.after_seconds),
                seconds(one.left_out_seconds),
                "-" if one.left_out_seconds is None
                else f"{one.left_out_seconds / one.seconds - 1:+.1%}",
            )
            for one in answer.rows
        ],
    )  # fmt: skip


def calibrated_lines(answer: "CalibrateAnswer") -> Iterator[str]:
    """Which constants were fitted, and from which rates."""
    factors = ", ".join(f"{name} x {factor:.3g}" for name, factor in answer.factors.items())
    said = factors or "no constant is changed, the runs are not all on one side of the range"
    yield f"from {answer.started_from}: {said}"
    if answer.at_peak:
        yield (
            f"the fit ends at the peak of the device ({', '.join(answer.at_peak)} = 1): check "
            "--device, and the layouts, batches and seconds of the runs"
        )


def profiled_tables(answer: "ProfiledAnswer") -> tuple[AnswerTable, AnswerTable]:
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


def _pool_name(pools: "Sequence[ProfiledPoolAnswer]", number: int) -> str:
    """The name of a pool: its kind, with server size and zone if other pools share it."""
    one = pools[number]
    same = [other for other in pools if other.device_kind == one.device_kind]
    size = f" of {one.per_server}" if len({other.per_server for other in same}) > 1 else ""
    zone = f" in {one.zone}" if len({other.zone for other in same}) > 1 else ""
    return f"{one.device_kind}{size}{zone}"


def shown_profiled(answer: "ProfiledAnswer") -> ShownAnswer:
    """The plan by measured layers with its bound, and its stages."""
    lines = [f"{answer.status}: {seconds(answer.iteration_seconds)} per iteration"]
    if answer.bound_seconds is not None:
        bound = format_seconds(answer.bound_seconds)
        lines.append(f"bound {bound}, gap {percent(answer.gap)}, by {answer.proved_by}")
    lines += [answer.reason] if answer.reason else []
    stages, _ = profiled_tables(answer)
    return ShownAnswer(lines, stages, [one.model_dump() for one in answer.stages])


def shown_calibration(answer: "CalibrateAnswer") -> ShownAnswer:
    """The fitted constants, and the runs."""
    rows = [one.model_dump() for one in answer.rows]
    return ShownAnswer([*calibrated_lines(answer)], calibrated_table(answer), rows)


def tuned_tables(answer: "TuneAnswer") -> Iterator[AnswerTable]:
    """What was tried, and what may still win."""
    if answer.tried:
        rows = [
            (
                one.layout, one.outcome if one.seconds is None else format_seconds(one.seconds),
                "-" if one.predicted_seconds is None else format_seconds(one.predicted_seconds),
                "" if one.memory_bytes is None else format_bytes(one.memory_bytes),
            )
            for one in answer.tried
        ]  # fmt: skip
        head = ("<layout", "measured", "predicted", "memory")
        yield AnswerTable("What was tried", head, rows)
    if answer.open and not answer.stop:
        yield _open_table(answer)


def _open_table(answer: "TuneAnswer") -> AnswerTable:
    """The first layouts that may still win; before any run predictions are all there is."""
    shown, all_ = answer.open[:SHOWN], len(answer.open)
    title = "What may still win" + (f": {len(shown)} of {all_}" if len(shown) < all_ else "")
    if answer.best is None:
        first = [
            (one.layout, format_seconds(one.predicted_seconds), f"{one.fits:.0%}") for one in shown
        ]
        return AnswerTable(title, ("<layout", "predicted", "fits"), first)
    head = ("<layout", "corrected", "9 of 10 within", "saves", "fits")
    rows = [
        (
            one.layout, format_seconds(one.seconds),
            f"{format_seconds(one.seconds_low)} - {format_seconds(one.seconds_high)}",
            f"at most {one.gain or 0:.0%}", f"{one.fits:.0%}",
        )
        for one in shown
    ]  # fmt: skip
    return AnswerTable(title, head, rows)


def standing_lines(answer: "TuneAnswer") -> Iterator[str]:
    """The best so far, whether to stop, and what is next."""
    if answer.best is not None:
        yield f"best so far: {answer.best.layout}, {format_seconds(answer.best.seconds or 0)}"
    yield answer.said
    if answer.broken is not None:
        yield answer.broken
    elif not answer.stop:
        yield from (f"next: {one.layout}" for one in answer.next)


def about_lines(answer: "TuneAnswer") -> Iterator[str]:
    """What the answer speaks of."""
    rest = "there is no other"
    if answer.rest_seconds is not None:
        rest = f"every other takes {format_seconds(answer.rest_seconds)} or more as predicted"
    known = counted(answer.candidates, "layout is", "layouts are")
    yield f"{known} corrected, {rest} ({answer.proved_by})"
    if answer.left_out:
        yield f"{counted(answer.left_out, 'does', 'do')} not fit, as far as the runs tell"
    yield f"rates: {answer.rates}"
    yield f"class: {answer.plan_class}"
