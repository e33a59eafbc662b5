"""What failures leave of the best layout: the answer, and its lines."""

from collections.abc import Iterator
from itertools import groupby

from stagewright.graphs.documents.units import format_bytes, format_duration, format_seconds
from stagewright.service.answers import Answer, Finite


class SmallerAnswer(Answer):
    """The fastest layout with so many ``servers`` too few, and the seconds of its iteration."""

    servers: int
    layout: str
    seconds: float


class GoodputAnswer(Answer):
    """What failures leave of the best layout.

    No layout of ``plan_class`` takes less than ``bound_effective_seconds`` for an iteration with
    failures. ``goodput``, ``stopped`` (for checkpoints), ``lost`` (work done again), ``restarting``
    and ``away`` (servers: waiting, or training slower) are shares of time that add up to 1.
    Checkpoints come every ``iterations``, ``interval_seconds``; ``other_goodput`` is with the other
    kind of checkpoints. Without ``smaller`` layouts the run waits for servers. With 95 % confidence
    the mean of simulated runs is between ``simulated_low`` and ``simulated_high``.
    """

    goodput: float
    effective_seconds: Finite
    bound_effective_seconds: Finite
    gap: Finite
    proved_by: str
    plan_class: str
    stopped: float
    lost: float
    restarting: float
    away: float
    mean_seconds: float
    checkpoint_bytes: float
    stop_seconds: float
    write_seconds: float
    restart_seconds: float
    iterations: int
    interval_seconds: float
    young_seconds: float
    daly_seconds: float
    exact_seconds: float
    other_goodput: float | None
    smaller: tuple[SmallerAnswer, ...]
    simulated_low: float | None
    simulated_high: float | None


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
