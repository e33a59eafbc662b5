"""``cloud``: what a job costs on cloud instances whose prices change, and where to run it."""

import datetime
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.console import (
    JsonFlag,
    percent,
    print_json,
    print_lines,
    print_table,
    progress,
)
from stagewright.cli.outputs import Writes
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.formulations.cloud.strategies import Home
    from stagewright.formulations.cloud.switching import (
        Offer,
        Outcome,
        Overheads,
        Plan,
        SwitchingProblem,
    )
    from stagewright.graphs.workloads.prices import Market
    from stagewright.solvers.cloud.switching import SwitchingResult

ALL, OPTIMAL, ROLLING = "all", "optimal", "rolling"
BASELINE = "1xv100"


def cloud(
    prices: Annotated[
        list[Path],
        typer.Argument(
            help="Prices files, or folders of logs with aws, azure, gcp in them.",
            metavar="PRICES...",
            show_default=False,
        ),
    ],
    rates: Annotated[
        str | None,
        typer.Option(help="Work in an hour per kind of GPU: v100=1.0,p100=0.4,k80=0.1."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model of the throughput table.", metavar="NAME")
    ] = None,
    throughputs: Annotated[
        Path | None, typer.Option(help="A throughput table, JSON, as Gavel has it.", metavar="FILE")
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
            "rolling (planned on forecasts that prices stay), optimal (knows all prices); or all."
        ),
    ] = ALL,
    start: Annotated[
        str | None,
        typer.Option(help="When the job may start, UTC; else as soon as every price is known."),
    ] = None,
    deadline_hours: Annotated[
        float | None,
        typer.Option(help="Hours after the start; else as long as every price is known."),
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Paid before leaving an instance, to write the checkpoint.")
    ] = 0.0,
    restore_seconds: Annotated[
        float, typer.Option(help="Paid on every new instance, to boot it and load the checkpoint.")
    ] = 0.0,
    egress_dollars: Annotated[
        float, typer.Option(help="For a checkpoint that leaves its region.")
    ] = 0.0,
    dataset_dollars: Annotated[
        float, typer.Option(help="For a copy of the dataset to each provider after the first.")
    ] = 0.0,
    preempted: Annotated[
        float | None,
        typer.Option(
            help="Reckon with preemptions as often as the logs show, with a checkpoint so often.",
            metavar="CHECKPOINT_EVERY_SECONDS",
        ),
    ] = None,
    home: Annotated[
        str, typer.Option(help="Provider and region of the strategies that know one only.")
    ] = "aws/us-east-1",
    only: Annotated[
        str | None,
        typer.Option(
            help="Places to use, with commas: aws,azure/us-east; else all.", show_default=False
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the prices and the plan, PNG.", metavar="FILE"),
        Writes(".png"),
    ] = None,
    save_prices: Annotated[
        Path | None,
        typer.Option(help="Write the prices as one prices file.", metavar="FILE"),
        Writes(".json"),
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Compare ways of renting cloud GPUs for a job, and plan where it runs when."""
    from stagewright.formulations.cloud.switching import Overheads, offers_of
    from stagewright.graphs.documents.units import require_count
    from stagewright.graphs.workloads.prices import MAX_GPUS

    require_count(gpus, "--gpus", MAX_GPUS)
    names = _names(strategy)
    at_home = _home(home)
    overheads = Overheads(checkpoint_seconds, restore_seconds, egress_dollars, dataset_dollars)
    with progress("reading prices"):
        market = _only(_read(prices), only)
    if save_prices is not None:
        from stagewright.graphs.workloads.prices import save_market

        save_market(market, save_prices)
    per_gpu = _rates(rates, model, throughputs, market)
    offers = _offers(offers_of(market, per_gpu, gpus), overheads, prices, preempted)
    problem = _problem(offers, v100_hours, start, deadline_hours, overheads)
    with progress("planning"):
        answers = _answers(problem, names, at_home)
    shown = answers[-1]
    if plot is not None:
        if shown.plan is None:
            raise InputError(f"--plot: {shown.name} has no plan to draw")
        from stagewright.executor.drawing.price_chart import write_price_png

        write_price_png(problem, shown.plan, f"{shown.name}: {v100_hours:g} V100-hours", plot)
    if as_json:
        print_json(_document(problem, gpus, answers))
    else:
        _print(problem, gpus, answers)
    return 1 if shown.outcome is None else 0


# --- Input ---------------------------------------------------------------------------------------


def _names(strategy: str) -> list[str]:
    from stagewright.formulations.cloud.strategies import STRATEGIES

    known = [*STRATEGIES, ROLLING, OPTIMAL]
    if strategy == ALL:
        return known
    if strategy not in known:
        raise InputError(f"--strategy: {strategy!r} is none of {', '.join([*known, ALL])}")
    return [strategy]


def _home(text: str) -> "Home":
    from stagewright.formulations.cloud.strategies import Home

    provider, _, region = text.partition("/")
    if not (provider and region):
        raise InputError(f"--home: {text!r} is no place; write provider/region: aws/us-east-1")
    return Home(provider, region)


def _read(paths: list[Path]) -> "Market":
    from stagewright.graphs.importers.cloud_prices import read_cloud_logs
    from stagewright.graphs.workloads.prices import load_market, merge

    return merge(read_cloud_logs(path) if path.is_dir() else load_market(path) for path in paths)


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


def _rates(
    text: str | None, model: str | None, throughputs: Path | None, market: "Market"
) -> dict[str, float]:
    """Work per hour of each kind of GPU, of which a V100 does one hour's."""
    if (text is None) == (model is None) or (model is None) != (throughputs is None):
        raise InputError("give --rates, or --model with --throughputs")
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
            raise InputError(f"--rates: {match[1]!r} stands twice")
        found[match[1]] = rate
    return found


def _offers(
    offers: "tuple[Offer, ...]",
    overheads: "Overheads",
    paths: list[Path],
    checkpoint_every_seconds: float | None,
) -> "tuple[Offer, ...]":
    """The offers; with preemptions, at the rates that are left of them.

    A job on several instances stops when one of them is preempted. A kind of instance that no log
    tells of is taken for never preempted.
    """
    from stagewright.graphs.importers.cloud_prices import read_availability
    from stagewright.graphs.workloads.prices import Preemptions, useful_share

    if checkpoint_every_seconds is None:
        return offers
    logs = [read_availability(path) for path in paths if path.is_dir()]
    if not logs:
        raise InputError("--preempted needs a folder of logs with PROVIDER/availability in it")
    seen = Preemptions(tuple(up for log in logs for up in log.uptimes))
    found = []
    for offer in offers:
        one = offer.instance
        mean = seen.of(one.provider, one.gpu, one.gpus).mean_seconds / offer.instances
        share = useful_share(
            mean, checkpoint_every_seconds, overheads.checkpoint_seconds, overheads.restore_seconds
        )
        if share > 0:
            found.append(replace(offer, rate=offer.rate * share))
    if not found:
        raise InputError(
            f"--preempted: with a checkpoint every {checkpoint_every_seconds:g} s no instance "
            "makes progress; write them more often"
        )
    return tuple(found)


def _problem(
    offers: "tuple[Offer, ...]",
    v100_hours: float,
    start: str | None,
    deadline_hours: float | None,
    overheads: "Overheads",
) -> "SwitchingProblem":
    from stagewright.formulations.cloud.switching import SwitchingProblem

    if not (math.isfinite(v100_hours) and v100_hours > 0):
        raise InputError(f"--v100-hours must be more than zero, got {v100_hours:g}")
    begin = max(offer.series.from_seconds for offer in offers)
    end = min(offer.series.until_seconds for offer in offers)
    if start is not None:
        begin = _time(start)
    if deadline_hours is not None:
        if not (math.isfinite(deadline_hours) and deadline_hours > 0):
            raise InputError(f"--deadline-hours must be more than zero, got {deadline_hours:g}")
        end = begin + 3600.0 * deadline_hours
    return SwitchingProblem(offers, v100_hours, begin, end, overheads)


def _time(text: str) -> float:
    try:
        at = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise InputError(f"--start: {text!r} is no time; write 2020-03-01T12:00") from None
    return at.replace(tzinfo=at.tzinfo or datetime.UTC).timestamp()


# --- Answers -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """What one strategy gives; ``result`` is there for the optimum."""

    name: str
    plan: "Plan | None"
    outcome: "Outcome | None"
    result: "SwitchingResult | None" = None


def _answers(problem: "SwitchingProblem", names: list[str], home: "Home") -> list[Answer]:
    """In the order of ``names``, of which the optimum is the last."""
    from stagewright.formulations.cloud.strategies import follow
    from stagewright.formulations.cloud.switching import evaluate

    answers: list[Answer] = []
    for name in names:
        if name == OPTIMAL:
            from stagewright.solvers.cloud.switching import solve_switching

            hints = [one.plan for one in answers if one.plan and one.outcome]
            result = solve_switching(problem, hints)
            answers.append(Answer(name, result.plan, result.outcome, result))
        elif name == ROLLING:
            from stagewright.solvers.cloud.switching import solve_rolling

            plan = solve_rolling(problem)
            answers.append(Answer(name, plan, None if plan is None else evaluate(problem, plan)))
        else:
            followed = follow(problem, name, home)
            kept = None if followed.outcome is None else followed.plan
            answers.append(Answer(name, kept, followed.outcome))
    return answers


def _document(problem: "SwitchingProblem", gpus: int, answers: list[Answer]) -> dict[str, Any]:
    shown = answers[-1]
    result = shown.result
    feasible = "feasible" if shown.outcome else "infeasible"
    return {
        "status": feasible if result is None else result.status,
        "v100_hours": problem.work_hours,
        "gpus": gpus,
        "start": _iso(problem.start_seconds),
        "deadline": _iso(problem.deadline_seconds),
        "instances": len(problem.offers),
        "reason": _reason(shown),
        "bound_dollars": None if result is None else result.bound,
        "gap": None if result is None else result.gap,
        "proved_by": None if result is None else result.proved_by,
        "wall_seconds": None if result is None else result.seconds,
        "strategies": {
            answer.name: None
            if answer.outcome is None
            else {
                "dollars": answer.outcome.dollars,
                "seconds": answer.outcome.seconds,
                "switches": answer.outcome.switches,
            }
            for answer in answers
        },
        "plan": None
        if shown.plan is None
        else [
            {
                "instance": row.key,
                "count": row.count,
                "begin": _iso(row.begin),
                "end": _iso(row.end),
                "dollars": row.dollars,
            }
            for row in _stays(problem, shown.plan)
        ],
    }


@dataclass(frozen=True, slots=True)
class _Row:
    key: str
    count: int
    begin: float
    end: float
    dollars: float


def _stays(problem: "SwitchingProblem", plan: "Plan") -> list[_Row]:
    rows = []
    for stay in plan:
        offer, begin, end = problem.offers[stay.offer], stay.begin_seconds, stay.end_seconds
        count = round(offer.instances)
        rows.append(_Row(offer.instance.key, count, begin, end, offer.dollars(begin, end)))
    return rows


def _reason(answer: Answer) -> str | None:
    if answer.outcome is not None:
        return None
    if answer.result is not None:
        return answer.result.reason
    return f"{answer.name} does not end before the deadline"


def _print(problem: "SwitchingProblem", gpus: int, answers: list[Answer]) -> None:
    size = "one GPU" if gpus == 1 else f"{gpus} GPUs"
    print_lines(
        f"{problem.work_hours:g} V100-hours on {size}, {len(problem.offers)} kinds of instance, "
        f"{_iso(problem.start_seconds)} to {_iso(problem.deadline_seconds)}"
    )
    first = answers[0]
    base = first.outcome.dollars if first.name == BASELINE and first.outcome else None
    print_table(
        ("<strategy", "dollars", "cheaper than 1xv100", "days", "switches"),
        [_row(answer, base) for answer in answers],
    )
    shown = answers[-1]
    if shown.result is not None and shown.outcome is not None:
        result = shown.result
        print_lines(
            f"{result.status}: no plan costs less than {result.bound:.2f} dollars, gap "
            f"{percent(result.gap)}; {result.proved_by}; {result.seconds:.2f} s"
        )
    if shown.plan is None:
        print_lines(f"{shown.name}: {_reason(shown)}")
        return
    print_table(
        ("<instance", "rented", "<from", "<to", "hours", "dollars"),
        [
            (
                row.key, str(row.count), _iso(row.begin), _iso(row.end),
                f"{(row.end - row.begin) / 3600:.2f}", f"{row.dollars:.2f}",
            )
            for row in _stays(problem, shown.plan)
        ],
        title=f"plan of {shown.name}",
    )  # fmt: skip


def _row(answer: Answer, base: float | None) -> tuple[str, ...]:
    outcome = answer.outcome
    if outcome is None:
        return (answer.name, "not in time", "-", "-", "-")
    cheaper = f"{base / outcome.dollars:.2f}x" if base and outcome.dollars else "-"
    days = f"{outcome.seconds / 86_400:.2f}"
    return (answer.name, f"{outcome.dollars:.2f}", cheaper, days, str(outcome.switches))


def _iso(seconds: float) -> str:
    at = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
