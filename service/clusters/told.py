"""Tables of answers about jobs, as commands and pages show them."""

from collections.abc import Iterator, Sequence

import numpy as np

from stagewright.formulations.clusters.allocation import (
    accelerators_in_use,
    accelerators_of_jobs,
    throughput,
)
from stagewright.graphs.documents.units import format_duration
from stagewright.service.answers import AnswerTable
from stagewright.service.clusters.answers import (
    AllocateAnswer,
    ChoiceAnswer,
    ComputedRate,
    ForecastAnswer,
    JobAnswer,
    RoundFilesAnswer,
)

WHOLE = 1 - 1e-6  # of a share, a rate or the accelerators: solvers' rounding


def launch_lines(launch: RoundFilesAnswer) -> Iterator[str]:
    """What the first round does, in the order of its script."""
    for what in ("stops", "stays", "starts", "waits"):
        yield f"{what + ':':8}{', '.join(getattr(launch, what)) or '-'}"
    if launch.bound is not None:
        yield f"objective {launch.objective:.6g}, bound {launch.bound:.6g} by {launch.proved_by}"
    if launch.one_more is not None:
        more = launch.one_more.items()
        yield "one more buys at most: " + ", ".join(f"{name} {worth:.4g}" for name, worth in more)
    yield from launch.remarks


def prices_table(prices: Sequence[ComputedRate]) -> AnswerTable:
    """The throughputs that were computed for trainings."""
    head = ("<training", "<on", "count", "servers", "steps/s", "range", "at most", "<layout")
    rows = [
        (
            one.model, one.accelerator, str(one.count), str(one.servers),
            f"{one.steps_per_second:.4g}",
            f"{one.steps_per_second_low:.4g} to {one.steps_per_second_high:.4g}"
            if one.layout else "-",
            "-" if one.bound_steps_per_second is None else f"{one.bound_steps_per_second:.4g}",
            one.layout or one.reason or "",
        )
        for one in prices
    ]  # fmt: skip
    return AnswerTable("Computed throughputs", head, rows)


def forecast_table(forecasts: Sequence[ForecastAnswer]) -> AnswerTable:
    """When each job is done, and whether that is in time."""
    return AnswerTable(
        "When jobs are done, if no other comes",
        ("<job", "done after", "<range", "deadline", "<in time"),
        [
            (
                one.job,
                _after(one.seconds),
                _range(one),
                "" if one.deadline_seconds is None else format_duration(one.deadline_seconds),
                _in_time(one),
            )
            for one in forecasts
        ],
    )


def _range(one: ForecastAnswer) -> str:
    low, high = _after(one.seconds_low), _after(one.seconds_high)
    return "" if low == high else f"{low} to {high}"


def _after(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)


def _in_time(one: ForecastAnswer) -> str:
    limit = one.deadline_seconds
    if limit is None or one.seconds is None:
        return ""
    if one.seconds > limit:
        return "no"
    return "yes" if one.seconds_high is not None and one.seconds_high <= limit else "perhaps"


def job_lines(one: JobAnswer) -> list[str]:
    """Why a job has what it has, and when it is done."""
    lines = [*one.why]
    if one.steps_per_second_low < one.steps_per_second_high:
        low, high = one.steps_per_second_low, one.steps_per_second_high
        lines.append(f"its computed rate is expected from {low:.4g} to {high:.4g} steps/s")
    then = one.forecast
    if then is not None and then.seconds is not None:
        expected = f" ({_range(then)})" if _range(then) else ""
        lines.append(f"if no other job comes, it is done after {_after(then.seconds)}{expected}")
    return lines


def job_tables(one: JobAnswer) -> Iterator[AnswerTable]:
    """Where the explained job may run, and what it would have after changes."""
    yield AnswerTable(
        f"Where {one.job} may run",
        ("<accelerators", "share of time", "steps/s", "<range", "<layout, or why not"),
        [_choice(choice) for choice in one.choices],
    )
    yield AnswerTable(
        f"What would change it for {one.job}",
        ("<change", "steps/s", "times", "done after"),
        [
            ("as it is", f"{one.steps_per_second:.4g}", "1.00",
             _after(None if one.forecast is None else one.forecast.seconds)),
            *(
                (it.change, *_gain(it.steps_per_second, one), _after(it.completion_seconds))
                for it in one.changes
            ),
        ],
    )  # fmt: skip


def _gain(rate: float | None, one: JobAnswer) -> tuple[str, str]:
    if rate is None:
        return "-", "-"
    return f"{rate:.4g}", f"{rate / one.steps_per_second:.2f}" if one.steps_per_second else "-"


def _choice(one: ChoiceAnswer) -> tuple[str, ...]:
    low, high = one.steps_per_second_low, one.steps_per_second_high
    spread = "" if one.placement is None else f" {one.placement}"
    return (
        f"{one.count} {one.accelerator}{spread}",
        f"{one.share:.1%}",
        f"{one.steps_per_second:.4g}",
        f"{low:.4g} to {high:.4g}" if low and high else "measured" if one.layout is None else "",
        one.layout or one.reason or "",
    )


class Holdings:
    """What the jobs of an allocation have: arrays by job and worker type, or accelerator type."""

    def __init__(self, answer: AllocateAnswer) -> None:
        self.problem, allocation = answer.problem, answer.result.allocation
        assert allocation is not None
        self.shares = allocation.dense(len(self.problem), len(self.problem.table.workers))
        self.rates = throughput(self.problem, allocation)
        self.in_use = accelerators_in_use(self.problem, allocation)
        self.of_jobs = accelerators_of_jobs(self.problem, allocation)

    def types_of(self, job: int) -> list[int]:
        """The types of accelerators on which a job runs, by their positions."""
        return sorted({*self.problem.table.accelerator[self.problem.rates[job] > 0].tolist()})


def jobs_table(answer: AllocateAnswer) -> AnswerTable:
    """Shares of the time of each job, its rate, when it is done, and what it waits for."""
    has = Holdings(answer)
    problem, shares, rates = has.problem, has.shares, has.rates
    table, kinds, best = problem.table, problem.table.pool.names, problem.best_rates()
    is_full = has.in_use >= WHOLE * table.counts
    done = {one.job: one for one in answer.forecasts or ()}
    rows = []
    for job, name in enumerate(problem.names):
        of_kinds = np.bincount(table.accelerator, shares[job], len(kinds))
        taken = ", ".join(kinds[it] for it in has.types_of(job) if is_full[it])
        forecast = done.get(name)
        rows.append(
            (
                name,
                *(f"{share:.2%}" if share else "" for share in of_kinds),
                f"{shares[job].sum():.2%}",
                f"{rates[job]:.4g}",
                "" if forecast is None else _after(forecast.seconds),
                "" if forecast is None else _range(forecast),
                "" if rates[job] >= WHOLE * best[job]
                else f"no {taken} left" if taken else "the policy gives it no more",
            )
        )  # fmt: skip
    head = ("<job", *kinds, "in all", "steps/s", "done after", "<range", "<why no more")
    return AnswerTable("Shares of the time of each job", head, rows)
