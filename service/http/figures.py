"""What the page shows of an answer that is no plan: numbers, tables, timelines and charts."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from stagewright.executor.drawing.charts.memory_curve import Curve, curve_chart
from stagewright.executor.drawing.lanes import BarRun, Drawing, Mark, runs_drawing, table
from stagewright.executor.drawing.operators import drawing
from stagewright.executor.drawing.plan_lanes import BOUND
from stagewright.executor.drawing.schedules import Panel, schedules_drawing
from stagewright.executor.drawing.timeline import Block, Row
from stagewright.executor.drawing.web.render import Chart, Series
from stagewright.formulations.pipelines.windows import stage_times
from stagewright.formulations.plans.actions import parse_action
from stagewright.graphs.documents.units import format_bytes, format_seconds
from stagewright.graphs.workloads.jobs import Workload
from stagewright.graphs.workloads.pool import Pool
from stagewright.service.clusters.requests import (
    AllocateRequest,
    RoundsRequest,
    SimulateClusterRequest,
)
from stagewright.service.pipelines.requests import JobShopRequest, ScheduleRequest
from stagewright.service.requests import Request
from stagewright.service.whole_answers import placement

HOUR = 3600.0
Told = dict[str, Any]
Runs = dict[tuple[str, int], list[BarRun]]
"""What each accelerator runs, by its type and number."""


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table; names of columns of text begin with ``<``."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def filled(self) -> Told:
        """What the script reads, without columns that are empty."""
        kept = [i for i in range(len(self.head)) if any(row[i] for row in self.rows)]
        return {
            "title": self.title,
            "head": [self.head[i] for i in kept],
            "rows": [[row[i] for i in kept] for row in self.rows],
        }


@dataclass(frozen=True, slots=True)
class Figures:
    """Main numbers with their labels, then tables, timelines and charts with their titles."""

    facts: Sequence[tuple[str, str]]
    tables: Sequence[Table] = ()
    timelines: Sequence[tuple[str, Drawing]] = ()
    charts: Sequence[tuple[str, Chart]] = ()

    def table(self) -> Told:
        """What the script reads."""
        return {
            "facts": [(value, what) for value, what in self.facts if value],
            "tables": [one.filled() for one in self.tables if one.rows],
            "timelines": [{"title": title, "timeline": table(it)} for title, it in self.timelines],
            "charts": [{"title": title, "chart": it.table()} for title, it in self.charts],
        }


def figures(kind: str, request: Request, answer: Told) -> Figures:
    """The figures of an answer, which is the whole one's JSON object."""
    return _FIGURES[kind](request, answer)


# --- Numbers as text ------------------------------------------------------------------------------

T = TypeVar("T")


def _or_none(write: Callable[[T], str], value: T | None) -> str:
    return "" if value is None else write(value)


def _number(value: float | None) -> str:
    return _or_none(lambda it: f"{it:.5g}", value)


def _percent(value: float | None) -> str:
    return _or_none(lambda it: f"{it:.2%}", value)


def _time(value: float | None) -> str:
    return _or_none(format_seconds, value)


def _hours(value: float | None) -> str:
    return _or_none(lambda it: f"{it / HOUR:.4g} h", value)


def _size(value: float | None) -> str:
    return _or_none(format_bytes, value)


def _dollars(value: float | None) -> str:
    return _or_none(lambda it: f"{it:.2f} $", value)


# --- Each kind ------------------------------------------------------------------------------------


def _place(request: Request, answer: Told) -> Figures:
    facts = [
        (_time(answer["cost_seconds"]), "per step"),
        (_time(answer["bound_seconds"]), f"bound, by {answer['proved_by']}"),
        (_percent(answer["gap"]), "gap"),
        (_number(answer["operators"]), "operators"),
        (_number(answer["transfers"]), "transfers"),
    ]
    devices = [
        (one["device"], _number(one["operators"]), _time(one["busy_seconds"]),
         _size(one["peak_memory_bytes"]))
        for one in answer["devices"]
    ]  # fmt: skip
    head = ("<device", "operators", "computes", "peak memory")
    splits = [tuple(map(str, one.values())) for one in answer["splits"]]
    names = [f"<{name}" for name in (answer["splits"] or [{}])[0]]
    tables = Table("Devices", head, devices), Table("Split operators", names, splits)
    plan = placement(answer)
    return Figures(facts, tables, [("Operators and transfers", drawing(plan))] if plan else ())


def _partition(request: Request, answer: Told) -> Figures:
    found = [one for one in answer["partitions"] if one["bottleneck_seconds"] is not None]
    best = min(found, key=lambda one: one["bottleneck_seconds"], default=None)
    facts = [(_number(best["count"]), "stages with the least bottleneck"),
             (_time(best["bottleneck_seconds"]), "bottleneck")] if best else []  # fmt: skip
    rows = [
        (str(one["count"]), one["status"], _time(one["bottleneck_seconds"]),
         _time(one["bound_seconds"]), _percent(one["gap"]), _stages(one["stages"] or ()))
        for one in answer["partitions"]
    ]  # fmt: skip
    head = ("stages", "<status", "bottleneck", "bound", "gap", "<layers on devices")
    return Figures(facts, (Table("Numbers of stages", head, rows),))


def _stages(stages: Iterable[Told]) -> str:
    return "; ".join(
        f"{one['layers'][0]} to {one['layers'][1] - 1} on {', '.join(one['devices'])}"
        for one in stages
    )


def _schedule(request: Request, answer: Told) -> Figures:
    assert isinstance(request, ScheduleRequest)
    facts = [
        (_number(answer["makespan"]), "makespan"),
        (_number(answer["span"]), "longest span of a device"),
        (_number(answer["bound"]), f"bound on the {answer['objective']}, by {answer['proved_by']}"),
        (_percent(answer["gap"]), "gap"),
        (_percent(answer["bubble"]), "bubble"),
        (_number(answer["peak_memory"]), "peak memory"),
    ]
    if answer["order"] is None:
        return Figures(facts)
    times = stage_times(request.problem)
    rows, shades = list[Row](), list[tuple[float, ...]]()
    for d, (order, starts) in enumerate(zip(answer["order"], answer["starts"], strict=True)):
        actions = [parse_action(text) for text in order]
        blocks = tuple(
            Block(action, start, start + times.of(action))
            for action, start in zip(actions, starts, strict=True)
        )
        rows.append(Row(f"device {d}", "device", blocks))
        own = sorted({action.stage for action in actions})
        shades.append(tuple(own.index(one.stage) / max(1, len(own) - 1) for one in actions))
    bound = answer["bound"] if answer["objective"] == "makespan" else None
    drawn = schedules_drawing([Panel(answer["kind"], tuple(rows), tuple(shades), bound)])
    return Figures(facts, timelines=(("One row per device", drawn),))


def _compare_schedules(request: Request, answer: Told) -> Figures:
    found = answer["schedules"]
    names = {one["kind"]: ", ".join([one["kind"], *one["same_as_kinds"]]) for one in found}
    best = found[0] if found else None
    facts = [(best["kind"], f"has the least {answer['objective']}"),
             (_number(best["makespan"]), "makespan"),
             (_number(best["peak_memory"]), "peak memory")] if best else []  # fmt: skip
    rows = [
        (names[one["kind"]], one["placement"], _number(one["makespan"]), _number(one["span"]),
         _percent(one["bubble"]), _number(one["peak_memory"]), _number(one["bound"]),
         _percent(one["gap"]))
        for one in found
    ]  # fmt: skip
    head = ("<schedule", "<placement", "makespan", "span", "bubble", "peak memory", "bound", "gap")
    tables = (
        Table("Schedules, the best first", head, rows),
        Table("Those that do not fit", ("<schedule", "<reason"),
              [(one["kind"], one["reason"]) for one in answer["refused"]]),
    )  # fmt: skip
    charts = [("Memory and makespan", _front(found, names))] if found else []
    return Figures(facts, tables, charts=charts)


def _front(found: Sequence[Told], names: dict[str, str]) -> Chart:
    """All schedules by memory and makespan, and the front that no other is better than in both."""
    places: dict[tuple[float, float], list[str]] = defaultdict(list)
    for one in found:
        places[one["peak_memory"], one["makespan"]].append(names[one["kind"]])
    front, least = list[tuple[float, float]](), float("inf")
    for memory, makespan in sorted(places):
        if makespan < least:
            front.append((memory, makespan))
            least = makespan

    def points(of: Iterable[tuple[float, float]], name: str, colour: str) -> list[Series]:
        chosen = list(of)
        if not chosen:
            return []
        x, y = zip(*chosen, strict=True)
        texts = [", ".join(places[one]) for one in chosen]
        return [Series(name, x, y, "points", colour, texts)]

    until = max(memory for memory, _ in places)
    x, y = zip(*front, (until, least), strict=True)
    return Chart(
        "peak memory of a device", "makespan",
        (Series("Pareto front", x, y, "steps", "--best"),
         *points(front, "Pareto front", "--best"),
         *points((one for one in places if one not in front), "others", "--other")),
        420,
    )  # fmt: skip


def _schedule_curve(request: Request, answer: Told) -> Figures:
    name, points = answer["objective"], answer["points"]
    facts = [
        (_number(len(points)), "limits of memory"),
        (_number(points[0][name]), f"{name} with the least memory, {_number(points[0]['memory'])}"),
        (_number(points[-1][name]), f"{name} with the most, {_number(points[-1]['memory'])}"),
    ]  # fmt: skip
    rows = [
        (_number(one["memory"]), _number(one["makespan"]), _number(one["span"]),
         _number(one["bound"]), _percent(one["gap"]), one["proved_by"], one["status"])
        for one in points
    ]  # fmt: skip
    head = ("memory", "makespan", "span", "bound", "gap", "<proved by", "<status")
    memory, cost, bound = (tuple(one[key] for one in points) for key in ("memory", name, "bound"))
    others = tuple((one["kind"], one["peak_memory"], one[name]) for one in answer["kinds"])
    chart = curve_chart(Curve(memory, cost, bound, name, others))
    tables = (Table("The best schedule within every limit", head, rows),)
    return Figures(facts, tables, charts=((f"Memory and {name}", chart),))


def _jobshop(request: Request, answer: Told) -> Figures:
    assert isinstance(request, JobShopRequest)
    facts = [
        (_number(answer["makespan"]), "makespan"),
        (_number(answer["bound"]), f"bound, by {answer['proved_by']}"),
        (_percent(answer["gap"]), "gap"),
    ]
    if answer["starts"] is None:
        return Figures(facts)
    machines: dict[int, list[BarRun]] = defaultdict(list)
    rows_of = zip(request.problem.choices, answer["starts"], answer["chosen_machines"], strict=True)
    for j, rows in enumerate(rows_of):
        for i, (choice, start, machine) in enumerate(zip(*rows, strict=True)):
            end = start + dict(choice)[machine]
            machines[machine].append(BarRun(f"job {j}", start, end, f"{j}.{i}"))
    lanes = [(f"machine {one}", _in_order(runs)) for one, runs in sorted(machines.items())]
    names = [f"job {j}" for j in range(len(request.jobs))]
    drawn = runs_drawing(lanes, names, marks=(Mark(answer["bound"], BOUND),))
    return Figures(facts, timelines=(("Machines, with job.step", drawn),))


def _in_order(runs: Iterable[BarRun]) -> list[BarRun]:
    return sorted(runs, key=lambda run: run.start)


def _divide(request: Request, answer: Told) -> Figures:
    facts = [
        (_time(answer["cost_seconds"]), "between two samples, or of one"),
        (_time(answer["bound_seconds"]), f"bound, by {answer['proved_by']}"),
        (_percent(answer["gap"]), f"gap, over {answer['plan_class']}"),
        (answer["reason"] or "", "why there is none"),
    ]
    rows = [
        (one["device"], f"{one['replicas']} x {one['shards']}", _number(len(one["nodes"])),
         _time(one["seconds"]), _size(one["memory_bytes"]), ", ".join(one["nodes"]))
        for one in answer["sets"] or ()
    ]  # fmt: skip
    head = ("<device", "<replicas x shards", "nodes", "time", "memory", "<they are")
    return Figures(facts, (Table("Sets", head, rows),))


def _what_if(request: Request, answer: Told) -> Figures:
    base = answer["base"]
    facts = [
        (_time(base["cost_seconds"]), "per iteration, as things are"),
        (_time(base["bound_seconds"]), "bound"),
        (_number(len(answer["rows"])), "changes"),
    ]
    rows = [
        (one["change"], _time(one["cost_seconds"]), _time(one["saved_seconds"]),
         _time(one["most_seconds"]), one["plans"] or "", one["reason"])
        for one in answer["rows"]
    ]  # fmt: skip
    head = ("<change", "iteration", "saves", "saves at most", "<among", "<reason")
    return Figures(facts, (Table("What a change would buy", head, rows),))


def _sweep(request: Request, answer: Told) -> Figures:
    best = None if answer["best"] is None else answer["rows"][answer["best"]]
    facts = [(_number(best["samples_per_second"]), "samples per second, the most"),
             (_time(best["cost_seconds"]), "per iteration of it"),
             (best["planner"], "is its planner")] if best else []  # fmt: skip
    rows = [
        (f"{'★ ' if one is best else ''}{one['planner']}", _number(one["devices"]),
         _size(one["memory_bytes"]), _number(one["microbatches"]), one["status"],
         _time(one["cost_seconds"]), _number(one["samples_per_second"]), _percent(one["gap"]),
         one["replicas"] or "", _size(one["peak_memory_bytes"]),
         one["reason"] if one["cost_seconds"] is None else "")
        for one in answer["rows"]
    ]  # fmt: skip
    head = ("<planner", "devices", "memory", "microbatches", "<status", "iteration",
            "samples per second", "gap", "<replicas", "peak memory", "<reason")  # fmt: skip
    return Figures(facts, (Table("All combinations, the best has a star", head, rows),))


def _allocate(request: Request, answer: Told) -> Figures:
    assert isinstance(request, AllocateRequest)
    facts = [
        (_number(answer["objective"]), f"objective of {answer['policy']}"),
        (_number(answer["bound"]), f"bound, by {answer['proved_by']}"),
        (_percent(answer["gap"]), "gap"),
    ]
    given = answer["allocation"] or ()
    kinds = request.pool.names
    scales = {job.name: job.scale for job in request.workload.jobs}
    shares: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(kinds, 0.0))
    runs: dict[str, list[BarRun]] = {kind: [] for kind in kinds}
    for one in given:
        jobs, kind = " + ".join(one["jobs"]), one["accelerator"]
        shares[jobs][kind] += one["share"]
        from_ = runs[kind][-1].end if runs[kind] else 0.0
        runs[kind].append(BarRun(jobs, from_, from_ + one["share"] * scales[one["jobs"][0]]))
    rows = [
        (jobs, *(_percent(its[kind]) for kind in kinds), _percent(sum(its.values())))
        for jobs, its in shares.items()
    ]
    counts = {one.name: one.count for one in request.pool.accelerators}
    lanes = [(f"{kind} · {counts[kind]}", its) for kind, its in runs.items()]
    used = [(kind, _percent(it)) for kind, it in (answer["utilisation"] or {}).items()]
    tables = (
        Table("Shares of the time of each job", ("<job", *kinds, "in all"), rows),
        Table("Utilisation", ("<accelerator", "utilisation"), used),
    )
    title = "Accelerators that each job has on average"
    drawn = runs_drawing(lanes, scales, "accelerators")
    return Figures(facts, tables, [(title, drawn)] if given else ())


def _rounds(request: Request, answer: Told) -> Figures:
    assert isinstance(request, RoundsRequest)
    facts = [
        (_number(len(answer["rounds"])), f"rounds of {_time(answer['round_seconds'])}"),
        (_number(answer["mean_deviation"]), "mean deviation from the allocation"),
        (_number(answer["largest_shortfall"]), "largest shortfall"),
    ]
    runs = _places(request.pool)
    for r, assigned in enumerate(answer["rounds"]):
        start, end = (t * answer["round_seconds"] for t in (r, r + 1))
        for one in assigned:
            for number in one["numbers"]:
                _prolong(runs[one["accelerator"], number], " + ".join(one["jobs"]), start, end)
    drawn = _by_accelerator(runs, request.workload)
    return Figures(facts, timelines=[("Rounds by accelerator", drawn)])


def _places(pool: Pool) -> Runs:
    """No runs on each accelerator."""
    return {(one.name, n): [] for one in pool.accelerators for n in range(one.count)}


def _prolong(runs: list[BarRun], jobs: str, start: float, end: float) -> None:
    """Add a round to the runs of an accelerator, or to the last if it is of the same jobs."""
    if runs and (runs[-1].of, runs[-1].end) == (jobs, start):
        start = runs.pop().start
    runs.append(BarRun(jobs, start, end))


def _by_accelerator(runs: Runs, workload: Workload | None) -> Drawing:
    rows = [(f"{kind} {number}", _in_order(its)) for (kind, number), its in runs.items()]
    names = () if workload is None else [job.name for job in workload.jobs]
    return runs_drawing(rows, names, "h", 1 / HOUR)


def _simulate_cluster(request: Request, answer: Told) -> Figures:
    assert isinstance(request, SimulateClusterRequest)
    facts = [
        (f"{answer['completed']} of {answer['jobs']}", "jobs completed"),
        (_hours(answer["mean_jct_seconds"]), "mean completion time"),
        (_hours(answer["makespan_seconds"]), "until the last is done"),
        (_percent(answer["utilisation"]), "utilisation"),
        (_number(answer["worst_finish_time_fairness"]), "worst finish-time fairness"),
    ]
    if answer["dollars"] is not None:
        facts.append((_dollars(answer["dollars"]), "in all"))
    times = [
        (f"{share} %", _hours(seconds))
        for share, seconds in answer["percentile_jct_seconds"].items()
    ]
    weights = [
        (weight, _hours(seconds))
        for weight, seconds in answer["mean_jct_seconds_by_weight"].items()
    ]
    runs = _places(request.pool)
    for one in answer.get("runs") or ():
        jobs = " + ".join(one["jobs"])
        run = BarRun(jobs, one["start_seconds"], one["end_seconds"])
        runs[one["accelerator"], one["number"]].append(run)
    tables = (
        Table("Completion times", ("<share of the jobs", "within"), times),
        Table("Mean completion times by weight", ("<weight", "mean"), weights),
    )
    drawn = _by_accelerator(runs, request.workload)
    return Figures(facts, tables, [("Jobs by accelerator", drawn)] if any(runs.values()) else ())


def _cloud(request: Request, answer: Told) -> Figures:
    costs = {name: one["dollars"] for name, one in answer["strategies"].items() if one}
    least = min(costs, key=lambda name: costs[name], default=None)
    facts = [
        ("", "") if least is None else (_dollars(costs[least]), f"the least, by {least}"),
        (_dollars(answer["bound_dollars"]), f"bound, by {answer['proved_by']}"),
        (_percent(answer["gap"]), "gap of the last strategy"),
        (answer["deadline"].replace("T", " ").replace("Z", ""), "deadline, in UTC"),
    ]
    ways = [
        (name, "late", "", "")
        if one is None
        else (name, _dollars(one["dollars"]), _hours(one["seconds"]), str(one["switches"]))
        for name, one in answer["strategies"].items()
    ]
    stays = answer["plan"] or ()
    rows = [(f"{one['count']} x {one['instance']}", one["begin"], one["end"],
             _dollars(one["dollars"])) for one in stays]  # fmt: skip
    tables = (
        Table("Strategies", ("<strategy", "cost", "duration", "switches"), ways),
        Table("Stays of the last strategy", ("<instances", "<from", "<until", "cost"), rows),
    )
    start = datetime.fromisoformat(answer["start"])
    lanes: dict[str, list[BarRun]] = defaultdict(list)
    for one in stays:
        begin, end = ((datetime.fromisoformat(one[it]) - start).total_seconds()
                      for it in ("begin", "end"))  # fmt: skip
        lanes[one["instance"]].append(BarRun(f"{one['count']} instances", begin, end))
    title = f"Where the job runs, from {answer['start'].replace('T', ' ').replace('Z', '')} on"
    drawn = [(title, runs_drawing(lanes.items(), (), "h", 1 / HOUR))] if stays else []
    return Figures(facts, tables, drawn)


_FIGURES: dict[str, Callable[[Request, Told], Figures]] = {
    "what-if": _what_if,
    "place": _place,
    "partition": _partition,
    "schedule": _schedule,
    "compare-schedules": _compare_schedules,
    "schedule-curve": _schedule_curve,
    "jobshop": _jobshop,
    "sweep": _sweep,
    "divide": _divide,
    "allocate": _allocate,
    "rounds": _rounds,
    "simulate-cluster": _simulate_cluster,
    "cloud": _cloud,
}
