"""How often GPUs fail, and what failures leave of a layout: options, and lines of the answer."""

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Literal

from stagewright.cli.commands import CommandOptions, spelled, with_option
from stagewright.cli.console import percent
from stagewright.formulations.parallelism.goodput import Failures
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import (
    format_bytes,
    format_duration,
    format_seconds,
    parse_bandwidth,
    parse_duration,
)
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.service.layouts.requests import GoodputAnswer, LayoutRow


class FailureOptions(CommandOptions):
    """How often GPUs fail, and what saves and restores the run."""

    mtbf: Annotated[str | None, Option(form="TIME")] = None
    """Time between two failures of one GPU, with its part of the failures of server, network and
    software, such as 50000h: rank layouts by the time that they take with failures."""
    checkpoint_bandwidth: Annotated[str | None, Option(form="SIZE/s")] = None
    """From a server to the store, or back, for all its GPUs together while all servers do so."""
    checkpoints: Literal["blocking", "asynchronous"] = "blocking"
    """blocking: the run stops until a checkpoint is written; asynchronous: until the host has it in
    memory."""
    restart: Annotated[str, Option(form="TIME")] = "10min"
    """From a failure until the checkpoint is loaded: detection, processes, communication."""
    repair: Annotated[str | None, Option(form="TIME")] = None
    """Until a server that failed is back; default: it restarts with the run. Meanwhile a spare
    takes its place, or the run is smaller, or waits, whichever is faster."""
    spares: Annotated[int, Option(form="N")] = 0
    """Spare servers, with --repair."""

    def failures(self) -> Failures | None:
        """The failures, None if none are given."""
        if self.mtbf is None:
            stray = [
                spelled(name)
                for name, info in FailureOptions.model_fields.items()
                if getattr(self, name) != info.default
            ]
            if stray:
                raise InputError(f"{', '.join(stray)}: needs --mtbf, for example 50000h")
            return None
        if self.checkpoint_bandwidth is None:
            raise InputError("--mtbf needs --checkpoint-bandwidth, for example 2GB/s")
        try:
            return Failures(
                mtbf_seconds=parse_duration(self.mtbf, "--mtbf"),
                checkpoint_bytes_per_second=parse_bandwidth(
                    self.checkpoint_bandwidth, "--checkpoint-bandwidth"
                ),
                asynchronous=self.checkpoints == "asynchronous",
                restart_seconds=parse_duration(self.restart, "--restart"),
                repair_seconds=parse_duration(self.repair or "0", "--repair"),
                spares=self.spares,
            )
        except InputError as error:
            options = {"mtbf_seconds": "--mtbf", "spares": "--spares"}
            message = with_option(str(error), options, options)
            raise InputError(message.replace("repair_seconds", "--repair")) from None


def seconds_or_never(seconds: float | None) -> str:
    """Seconds of an iteration with failures, None if it is never complete."""
    return "never" if seconds is None else format_seconds(seconds)


def failing(row: "LayoutRow") -> Iterator[str]:
    """What failures leave of an explained layout."""
    if row.goodput is not None:
        effective = seconds_or_never(row.effective_seconds)
        yield f"with failures: {effective} per iteration, goodput {row.goodput:.2%}"


def said_failures(answer: "GoodputAnswer") -> Iterator[str]:
    """What failures leave of the best layout, and why."""
    yield (
        f"with failures: {seconds_or_never(answer.effective_seconds)} per iteration, goodput "
        f"{answer.goodput:.2%}; bound {seconds_or_never(answer.bound_effective_seconds)} by "
        f"{answer.proved_by}, gap {percent(answer.gap)}"
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


def _smaller(answer: "GoodputAnswer") -> Iterator[str]:
    """The layouts with servers too few, by how many."""
    for (layout, seconds), runs in groupby(answer.smaller, lambda one: (one.layout, one.seconds)):
        numbers = [one.servers for one in runs]
        span = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        yield f"{span}: {layout}, {format_seconds(seconds)}"
