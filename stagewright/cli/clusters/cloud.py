"""``cloud``: the cost of a job on cloud instances with changing prices, and a plan for it."""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stagewright.cli.commands import Asked, command
from stagewright.cli.console import percent, print_table, progress, say, tell
from stagewright.cli.options import Printed, Served
from stagewright.cli.outputs import Writes
from stagewright.cli.solving import find
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.prices import save_market
from stagewright.service.cloud.requests import CloudRequest
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.graphs.workloads.prices import Market, Preemptions
    from stagewright.service.cloud.requests import CloudAnswer, StrategyAnswer

_BASELINE = "1xv100"


class CloudOptions(Served, Printed):
    """What ``cloud`` is asked beside its request."""

    prices: Annotated[list[Path], Option("PRICES...")]
    """Prices files, or folders of logs that contain aws, azure or gcp."""
    rates: str | None = None
    """Work per hour of each kind of GPU: v100=1.0,p100=0.4,k80=0.1."""
    job_type: Annotated[str | None, Option(form="NAME")] = None
    """A type of job of the throughput table."""
    throughputs: Annotated[Path | None, Option(form="FILE")] = None
    """A throughput table, JSON, in Gavel's format."""
    only: str | None = None
    """Places to use, separated by commas: aws,azure/us-east; default: all."""
    png: Annotated[Path | None, Option(form="FILE"), Writes(".png")] = None
    """Draw the prices and the plan."""
    save_prices: Annotated[Path | None, Option(form="FILE"), Writes(".json")] = None
    """Write the prices as one prices file."""


@command(
    headings={
        "What moving costs": "checkpoint_seconds restore_seconds egress_dollars dataset_dollars"
        " checkpoint_every_seconds",
        "Rates from a table": "job_type throughputs",
        "Places": "home only",
    }
)
def cloud(asked: Asked[CloudRequest], given: CloudOptions) -> int:
    """Compare strategies of renting cloud GPUs for a job, and plan its instances over time.

    Ctrl-C (or SIGTERM) keeps the strategies compared so far.
    """
    from stagewright.service.cloud.requests import CloudAnswer

    with progress("reading prices"):
        market = _read_market(given.prices, given.only)
    if given.save_prices is not None:
        save_market(market, given.save_prices)
    preempted = asked.given["checkpoint_every_seconds"] is not None
    request = asked.request(
        market=market,
        rates=_read_rates(given.rates, given.job_type, given.throughputs, market),
        preemptions=_read_preemptions(given.prices) if preempted else None,
    )
    answer = find(CloudAnswer, request, "planning", given.server)
    if given.png is not None and answer.strategies:
        _draw(answer, given.png)
    tell(answer, given, _print)
    return 1 if answer.plan is None else 0


def _draw(answer: "CloudAnswer", path: Path) -> None:
    from stagewright.executor.drawing.charts.prices import price_png

    if answer.stays is None:
        raise InputError(f"--png: {answer.shown} has no plan to draw")
    title = f"{answer.shown}: {answer.v100_hours:g} V100-hours"
    documents.write_file(path, price_png(answer.problem, answer.stays, title))


def _print(answer: "CloudAnswer") -> None:
    size = "one GPU" if answer.gpus == 1 else f"{answer.gpus} GPUs"
    say(
        f"{answer.v100_hours:g} V100-hours on {size}, {answer.instances} kinds of instance, "
        f"{answer.start} to {answer.deadline}"
    )
    if not answer.strategies:
        say(f"{answer.status}: {answer.reason}")
        return
    base = answer.strategies.get(_BASELINE)
    print_table(
        ("<strategy", "dollars", "cheaper than 1xv100", "days", "switches"),
        [_row(name, paid, base) for name, paid in answer.strategies.items()],
    )
    if answer.status == "interrupted":
        say(f"interrupted after the strategy {answer.shown}")
    if answer.bound_dollars is not None and answer.plan is not None:
        say(
            f"{answer.status}: no plan costs less than {answer.bound_dollars:.2f} dollars, gap "
            f"{percent(answer.gap)}; {answer.proved_by}; {answer.wall_seconds:.2f} s"
        )
    if answer.plan is None or answer.stays is None:
        say(f"{answer.shown}: {answer.reason}")
        return
    hours = [(stay.end_seconds - stay.begin_seconds) / 3600 for stay in answer.stays]
    print_table(
        ("<instance", "rented", "<from", "<to", "hours", "dollars"),
        [
            (one.instance, str(one.count), one.begin, one.end, f"{time:.2f}", f"{one.dollars:.2f}")
            for one, time in zip(answer.plan, hours, strict=True)
        ],
        title=f"plan of {answer.shown}",
    )


def _row(
    name: str, paid: "StrategyAnswer | None", base: "StrategyAnswer | None"
) -> tuple[str, ...]:
    if paid is None:
        return (name, "not in time", "-", "-", "-")
    known = base is not None and base.dollars and paid.dollars
    cheaper = f"{base.dollars / paid.dollars:.2f}x" if base is not None and known else "-"
    days = f"{paid.seconds / 86_400:.2f}"
    return (name, f"{paid.dollars:.2f}", cheaper, days, str(paid.switches))


def _read_market(paths: list[Path], places: str | None) -> "Market":
    """The prices of files and folders; only of ``places``, if any are given."""
    from stagewright.graphs.importers.cloud_prices import read_cloud_logs
    from stagewright.graphs.workloads.prices import load_market, merge

    read = (read_cloud_logs(path) if path.is_dir() else load_market(path) for path in paths)
    return _only(merge(read), places)


def _only(market: "Market", places: str | None) -> "Market":
    if places is None:
        return market
    wanted = [part.strip() for part in places.split(",")]
    known = {
        place
        for one in market.series
        for place in (one.instance.provider, f"{one.instance.provider}/{one.instance.region}")
    }
    for place in wanted:
        if place not in known:
            raise InputError(f"--only: no prices of {place!r}; known: {', '.join(sorted(known))}")
    return market.of(lambda one: one.provider in wanted or f"{one.provider}/{one.region}" in wanted)


def _read_rates(
    text: str | None, model: str | None, throughputs: Path | None, market: "Market"
) -> dict[str, float]:
    """Work per hour of each kind of GPU, relative to a V100."""
    if (text is None) == (model is None) or (model is None) != (throughputs is None):
        raise InputError("give --rates, or --job-type with --throughputs")
    if text is not None:
        return _spelled_rates(text)
    from stagewright.graphs.importers.cloud_prices import read_model_rates

    table = read_model_rates(str(throughputs))
    found = table.get(str(model), {})
    if not found.get("v100"):
        known = "; ".join(sorted(name for name, rates in table.items() if rates.get("v100")))
        raise InputError(f"{throughputs}: no rate of {model!r} on a v100; models: {known}")
    kinds = {one.instance.gpu for one in market.series}
    return {gpu: rate / found["v100"] for gpu, rate in found.items() if gpu in kinds}


def _spelled_rates(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z][\w.-]*)=([\d.eE+-]+)\s*", part)
        try:
            rate = float(match[2]) if match else math.nan
        except ValueError:
            rate = math.nan
        if match is None or not (math.isfinite(rate) and rate >= 0):
            raise InputError(f"--rates: {part.strip()!r} is no rate; write v100=1.0,p100=0.4")
        if match[1] in found:
            raise InputError(f"--rates: {match[1]!r} appears twice")
        found[match[1]] = rate
    return found


def _read_preemptions(paths: list[Path]) -> "Preemptions":
    """The uptimes in the availability logs of the folders."""
    from stagewright.graphs.importers.cloud_prices import read_availability
    from stagewright.graphs.workloads.prices import Preemptions

    logs = [read_availability(path) for path in paths if path.is_dir()]
    if not logs:
        raise InputError("--preempted needs a folder of logs with PROVIDER/availability in it")
    return Preemptions(tuple(up for log in logs for up in log.uptimes))
