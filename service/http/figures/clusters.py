"""What the page shows of answers about the jobs of clusters and of the cloud."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime

from stagewright.executor.drawing.lanes import BarRun, Drawing, runs_drawing
from stagewright.graphs.workloads.jobs import Workload
from stagewright.graphs.workloads.pool import Pool
from stagewright.service.answers import AnswerTable
from stagewright.service.clusters.answers import AllocateAnswer, ComputedRate, RoundFilesAnswer
from stagewright.service.clusters.requests import (
    AllocateRequest,
    RoundsRequest,
    SimulateClusterRequest,
)
from stagewright.service.clusters.told import (
    job_lines,
    job_tables,
    jobs_table,
    launch_lines,
    prices_table,
)
from stagewright.service.http.figures.tables import HOUR, Figures, Told, facts, titled, written
from stagewright.service.requests import Request
from stagewright.service.whole_answers import read

Runs = dict[tuple[str, int], list[BarRun]]
"""What each accelerator runs, by its type and number."""


def allocate(request: Request, answer: Told) -> Figures:
    """An allocation: the share of each job, and the accelerators that it has on average."""
    assert isinstance(request, AllocateRequest)
    numbers = facts(answer, {
        f"objective of {answer['policy']}": "objective number",
        f"bound, by {answer['proved_by']}": "bound number", "gap": "gap percent",
    })  # fmt: skip
    found = read(json.dumps(answer), request)
    assert isinstance(found, AllocateAnswer)
    given, why = found.allocation or (), found.explained
    scales = {job.name: job.scale for job in request.workload.jobs}
    runs: dict[str, list[BarRun]] = {kind: [] for kind in request.pool.names}
    for one in given:
        its = runs[one.accelerator]
        from_, many = its[-1].end if its else 0.0, one.count or scales[one.jobs[0]]
        its.append(BarRun(" + ".join(one.jobs), from_, from_ + one.share * many))
    counts = {one.name: one.count for one in request.pool.accelerators}
    lanes = [(f"{kind} · {counts[kind]}", its) for kind, its in runs.items()]
    used = [(kind, written(it, "percent")) for kind, it in (answer["utilisation"] or {}).items()]
    jobs = [jobs_table(found)] if given else []
    tables = (
        *(() if why is None else job_tables(why)),
        *jobs,
        AnswerTable("Utilisation", ("<accelerator", "utilisation"), used),
        prices_table(found.prices),
    )
    title = "Accelerators that each job has on average"
    drawn = runs_drawing(lanes, scales, "accelerators")
    return Figures(
        numbers,
        tables,
        [(title, drawn)] if given else (),
        lead=() if why is None else (f"Why {why.job}?", *job_lines(why)),
        lines=(*found.notes, *found.assumed),
        explains="".join(one.title for one in jobs),
    )


def rounds(request: Request, answer: Told) -> Figures:
    """Rounds that realise an allocation, by accelerator."""
    assert isinstance(request, RoundsRequest)
    length = written(answer["round_seconds"], "seconds")
    numbers = [
        (written(len(answer["rounds"]), "number"), f"rounds of {length}"),
        (written(answer["mean_deviation"], "number"), "mean deviation from the allocation"),
        (written(answer["largest_shortfall"], "number"), "largest shortfall"),
    ]
    runs, held = _places(request.pool), Held()
    for r, assigned in enumerate(answer["rounds"]):
        start, end = (t * answer["round_seconds"] for t in (r, r + 1))
        for one in assigned:
            many = len(one["numbers"])
            held += [(job, one["accelerator"], many, start, end) for job in one["jobs"]]
            for number in one["numbers"]:
                _prolong(runs[one["accelerator"], number], " + ".join(one["jobs"]), start, end)
    drawn = _by_accelerator(runs, request.pool, request.workload)
    names = [job.name for job in request.workload.jobs]
    prices = [ComputedRate.model_validate(one) for one in answer["prices"]]
    lines = [*answer["assumed"]]
    if answer["measured"]:
        lines.append(f"measured, the others computed: {', '.join(answer['measured'])}")
    launch = answer["launch"] and RoundFilesAnswer.model_validate(answer["launch"])
    return Figures(
        numbers,
        (_jobs_table(held, request.pool, dict.fromkeys(names, 0.0)), prices_table(prices)),
        [("Rounds by accelerator", drawn)],
        lead=(f"The first round, for {launch.launcher}", *launch_lines(launch)) if launch else (),
        lines=lines,
        folder="round" if launch else "",
    )


Held = list[tuple[str, str, int, float, float]]
"""Job, type of accelerators, how many, from when until when in seconds."""


def _jobs_table(held: Held, pool: Pool, arrivals: Mapping[str, float]) -> AnswerTable:
    """How long each job waits, and when and how long it has accelerators of each type."""
    of_jobs: dict[str, Held] = defaultdict(list)
    for one in held:
        of_jobs[one[0]].append(one)
    rows = []
    for job, arrival in arrivals.items():
        its, hours = of_jobs[job], dict.fromkeys(pool.names, 0.0)
        for _, kind, many, start, end in its:
            hours[kind] += many * (end - start)
        first = min((start for *_, start, _ in its), default=None)
        rows.append((
            job,
            "does not run" if first is None else written(first - arrival, "hours"),
            written(max((end for *_, end in its), default=None), "hours"),
            *(written(one, "hours") if one else "" for one in hours.values()),
        ))  # fmt: skip
    head = ("<job", "waits at first", "runs until", *(f"time of {name}" for name in pool.names))
    return AnswerTable("When each job runs, and its time of accelerators", head, rows)


def _places(pool: Pool) -> Runs:
    """An empty list of runs for each accelerator of a pool."""
    return {(one.name, n): [] for one in pool.accelerators for n in range(one.count)}


def _prolong(runs: list[BarRun], jobs: str, start: float, end: float) -> None:
    """Add a round to the runs of an accelerator, or to the last if it is of the same jobs."""
    if runs and (runs[-1].of, runs[-1].end) == (jobs, start):
        start = runs.pop().start
    runs.append(BarRun(jobs, start, end))


def _in_order(runs: Iterable[BarRun]) -> list[BarRun]:
    return sorted(runs, key=lambda run: run.start)


def _by_accelerator(runs: Runs, pool: Pool, workload: Workload | None) -> Drawing:
    """A row for each accelerator, named by its server where there are servers."""
    sizes = {one.name: one.per_server for one in pool.accelerators}
    rows = [
        (
            f"{kind} {number}" if (size := sizes[kind]) is None
            else f"{kind} server {number // size} GPU {number % size}",
            _in_order(its),
        )
        for (kind, number), its in runs.items()
    ]  # fmt: skip
    names = () if workload is None else [job.name for job in workload.jobs]
    return runs_drawing(rows, names, "h", 1 / HOUR)


def simulate_cluster(request: Request, answer: Told) -> Figures:
    """A simulated cluster: completion times, and the jobs by accelerator."""
    assert isinstance(request, SimulateClusterRequest)
    numbers = [
        (f"{answer['completed']} of {answer['jobs']}", "jobs completed"),
        (written(answer["mean_jct_seconds"], "hours"), "mean completion time"),
        (written(answer["makespan_seconds"], "hours"), "until the last is done"),
        (written(answer["utilisation"], "percent"), "utilisation"),
        (written(answer["worst_finish_time_fairness"], "number"), "worst finish-time fairness"),
    ]
    if answer["dollars"] is not None:
        numbers.append((written(answer["dollars"], "dollars"), "in all"))
    times = [
        (f"{share} %", written(seconds, "hours"))
        for share, seconds in answer["percentile_jct_seconds"].items()
    ]
    weights = [
        (weight, written(seconds, "hours"))
        for weight, seconds in answer["mean_jct_seconds_by_weight"].items()
    ]
    runs, held = _places(request.pool), Held()
    for one in answer.get("runs") or ():
        start, end = one["start_seconds"], one["end_seconds"]
        held += [(job, one["accelerator"], 1, start, end) for job in one["jobs"]]
        runs[one["accelerator"], one["number"]].append(BarRun(" + ".join(one["jobs"]), start, end))
    given = () if request.workload is None else request.workload.jobs
    jobs = _jobs_table(held, request.pool, {one.name: one.arrival_seconds for one in given})
    tables = (
        *([jobs] if held else []),
        AnswerTable("Completion times", ("<share of the jobs", "within"), times),
        AnswerTable("Mean completion times by weight", ("<weight", "mean"), weights),
        titled("Drawn throughputs", answer["drawn"], {
            "<training": "model", "<accelerator": "accelerator", "accelerators": "count number",
            "predicted steps/s": "predicted_steps_per_second number",
            "true steps/s": "steps_per_second number",
            "<known": lambda one: "measured" if one["measured"] else "no job ran there",
        }),
    )  # fmt: skip
    drawn = _by_accelerator(runs, request.pool, request.workload)
    shown = [("Jobs by accelerator", drawn)] if held else ()
    return Figures(numbers, tables, shown, lines=answer["assumed"])


def cloud(request: Request, answer: Told) -> Figures:
    """Strategies of renting, and where the job runs by the last of them."""
    costs = {name: one["dollars"] for name, one in answer["strategies"].items() if one}
    least = min(costs, key=lambda name: costs[name], default=None)
    numbers = [
        ("", "") if least is None else (written(costs[least], "dollars"), f"the least, by {least}"),
        (written(answer["bound_dollars"], "dollars"), f"bound, by {answer['proved_by']}"),
        (written(answer["gap"], "percent"), "gap of the last strategy"),
        (answer["deadline"].replace("T", " ").replace("Z", ""), "deadline, in UTC"),
    ]
    ways = [
        (name, "late", "", "")
        if one is None
        else (
            name,
            written(one["dollars"], "dollars"),
            written(one["seconds"], "hours"),
            str(one["switches"]),
        )
        for name, one in answer["strategies"].items()
    ]
    stays = answer["plan"] or ()
    rows = [(f"{one['count']} x {one['instance']}", one["begin"], one["end"],
             written(one["dollars"], "dollars")) for one in stays]  # fmt: skip
    tables = (
        AnswerTable("Strategies", ("<strategy", "cost", "duration", "switches"), ways),
        AnswerTable("Stays of the last strategy", ("<instances", "<from", "<until", "cost"), rows),
    )
    start = datetime.fromisoformat(answer["start"])
    lanes: dict[str, list[BarRun]] = defaultdict(list)
    for one in stays:
        begin, end = ((datetime.fromisoformat(one[it]) - start).total_seconds()
                      for it in ("begin", "end"))  # fmt: skip
        lanes[one["instance"]].append(BarRun(f"{one['count']} instances", begin, end))
    title = f"Where the job runs, from {answer['start'].replace('T', ' ').replace('Z', '')} on"
    drawn = [(title, runs_drawing(lanes.items(), (), "h", 1 / HOUR))] if stays else []
    return Figures(numbers, tables, drawn)
