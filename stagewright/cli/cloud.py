"""``cloud``: the cost of a job on cloud instances with changing prices, and a plan for it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.cloud_inputs import parse_time, read_market, read_preemptions, read_rates
from stagewright.cli.console import (
    JsonFlag,
    Server,
    ask,
    percent,
    print_answer,
    print_lines,
    print_table,
    progress,
)
from stagewright.cli.outputs import Writes
from stagewright.cli.solving import find
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.service.cloud_answers import CloudAnswer, StrategyAnswer

BASELINE = "1xv100"


def cloud(
    prices: Annotated[
        list[Path],
        typer.Argument(
            help="Prices files, or folders of logs that contain aws, azure or gcp.",
            metavar="PRICES...",
            show_default=False,
        ),
    ],
    rates: Annotated[
        str | None,
        typer.Option(help="Work per hour of each kind of GPU: v100=1.0,p100=0.4,k80=0.1."),
    ] = None,
    job_type: Annotated[
        str | None, typer.Option(help="A type of job of the throughput table.", metavar="NAME")
    ] = None,
    throughputs: Annotated[
        Path | None,
        typer.Option(help="A throughput table, JSON, in Gavel's format.", metavar="FILE"),
    ] = None,
    v100_hours: Annotated[
        float, typer.Option(help="The work: hours on as many V100s as the job has GPUs.")
    ] = 96.0,
    gpus: Annotated[
        int, typer.Option(help="GPUs of the job; instances are rented whole.", metavar="N")
    ] = 1,
    strategy: Annotated[
        str,
        typer.Option(
            help="1xv100 (instances of one V100), gpu-type, multi-gpu, multi-cloud, dynamic; "
            "rolling (replans on constant forecasts), optimal (knows all prices); or all."
        ),
    ] = "all",
    start: Annotated[
        str | None,
        typer.Option(help="Earliest start of the job, UTC; default: once all prices are known."),
    ] = None,
    deadline_hours: Annotated[
        float | None,
        typer.Option(help="Hours after the start; default: until the first price series ends."),
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Paid time before leaving an instance, to write the checkpoint.")
    ] = 0.0,
    restore_seconds: Annotated[
        float,
        typer.Option(help="Paid time on every new instance, to boot it and load the checkpoint."),
    ] = 0.0,
    egress_dollars: Annotated[
        float, typer.Option(help="Dollars for a checkpoint that leaves its region.")
    ] = 0.0,
    dataset_dollars: Annotated[
        float,
        typer.Option(help="Dollars for a copy of the dataset to each provider after the first."),
    ] = 0.0,
    preempted: Annotated[
        float | None,
        typer.Option(
            help="Account for preemptions as in the logs, with checkpoints at this interval.",
            metavar="CHECKPOINT_EVERY_SECONDS",
        ),
    ] = None,
    home: Annotated[
        str, typer.Option(help="Provider and region of the strategies that use only one.")
    ] = "aws/us-east-1",
    only: Annotated[
        str | None,
        typer.Option(
            help="Places to use, separated by commas: aws,azure/us-east; default: all.",
            show_default=False,
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(help="Draw the prices and the plan.", metavar="FILE"),
        Writes(".png"),
    ] = None,
    save_prices: Annotated[
        Path | None,
        typer.Option(help="Write the prices as one prices file.", metavar="FILE"),
        Writes(".json"),
    ] = None,
    server: Server = None,
    as_json: JsonFlag = False,
) -> int:
    """Compare strategies of renting cloud GPUs for a job, and plan its instances over time.

    Ctrl-C (or SIGTERM) keeps the strategies compared so far.
    """
    from stagewright.service.cloud_answers import CloudAnswer
    from stagewright.service.cloud_requests import CloudRequest

    with progress("reading prices"):
        market = read_market(prices, only)
    if save_prices is not None:
        from stagewright.graphs.workloads.prices import save_market

        save_market(market, save_prices)
    request = ask(
        CloudRequest,
        market=market,
        rates=read_rates(rates, job_type, throughputs, market),
        v100_hours=v100_hours,
        gpus=gpus,
        strategy=strategy,
        start_seconds=None if start is None else parse_time(start),
        deadline_hours=deadline_hours,
        checkpoint_seconds=checkpoint_seconds,
        restore_seconds=restore_seconds,
        egress_dollars=egress_dollars,
        dataset_dollars=dataset_dollars,
        preemptions=None if preempted is None else read_preemptions(prices),
        checkpoint_every_seconds=preempted,
        home=home,
    )
    answer = find(CloudAnswer, request, "planning", server)
    if png is not None and answer.strategies:
        _draw(answer, png)
    if as_json:
        print_answer(answer)
    else:
        _print(answer)
    return 1 if answer.plan is None else 0


def _draw(answer: "CloudAnswer", path: Path) -> None:
    from stagewright.executor.drawing.price_chart import write_price_png

    if answer.stays is None:
        raise InputError(f"--png: {answer.shown} has no plan to draw")
    title = f"{answer.shown}: {answer.v100_hours:g} V100-hours"
    write_price_png(answer.problem, answer.stays, title, path)


def _print(answer: "CloudAnswer") -> None:
    size = "one GPU" if answer.gpus == 1 else f"{answer.gpus} GPUs"
    print_lines(
        f"{answer.v100_hours:g} V100-hours on {size}, {answer.instances} kinds of instance, "
        f"{answer.start} to {answer.deadline}"
    )
    if not answer.strategies:
        print_lines(f"{answer.status}: {answer.reason}")
        return
    base = answer.strategies.get(BASELINE)
    print_table(
        ("<strategy", "dollars", "cheaper than 1xv100", "days", "switches"),
        [_row(name, paid, base) for name, paid in answer.strategies.items()],
    )
    if answer.status == "interrupted":
        print_lines(f"interrupted after the strategy {answer.shown}")
    if answer.bound_dollars is not None and answer.plan is not None:
        print_lines(
            f"{answer.status}: no plan costs less than {answer.bound_dollars:.2f} dollars, gap "
            f"{percent(answer.gap)}; {answer.proved_by}; {answer.wall_seconds:.2f} s"
        )
    if answer.plan is None or answer.stays is None:
        print_lines(f"{answer.shown}: {answer.reason}")
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
