"""What the page shows of answers about models and schedules."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from stagewright.executor.drawing.lanes import BOUND, BarRun, Mark, runs_drawing
from stagewright.executor.drawing.operators import drawing
from stagewright.executor.drawing.schedules import Curve, Panel, curve_chart, schedules_drawing
from stagewright.executor.drawing.timeline import Block, Row
from stagewright.executor.drawing.web.render import Chart, Series
from stagewright.formulations.pipelines.windows import stage_times
from stagewright.formulations.plans.actions import parse_action
from stagewright.service.answers import AnswerTable
from stagewright.service.http.figures.tables import (
    Figures,
    Told,
    facts,
    titled,
    written,
)
from stagewright.service.requests import Request
from stagewright.service.schedules.requests import JobShopRequest, ScheduleRequest
from stagewright.service.whole_answers import placement


def place(request: Request, answer: Told) -> Figures:
    """A placement of operators: its devices, splits and timeline."""
    numbers = facts(answer, {
        "per step": "cost_seconds seconds", f"bound, by {answer['proved_by']}":
        "bound_seconds seconds", "gap": "gap percent", "operators": "operators number",
        "transfers": "transfers number",
    })  # fmt: skip
    devices = titled("Devices", answer["devices"], {
        "<device": "device", "operators": "operators number", "computes": "busy_seconds seconds",
        "peak memory": "peak_memory_bytes bytes",
    })  # fmt: skip
    splits = [tuple(map(str, one.values())) for one in answer["splits"]]
    names = [f"<{name}" for name in (answer["splits"] or [{}])[0]]
    tables = devices, AnswerTable("Split operators", names, splits)
    plan = placement(answer)
    return Figures(numbers, tables, [("Operators and transfers", drawing(plan))] if plan else ())


def partition(request: Request, answer: Told) -> Figures:
    """Partitions into every number of stages, and the best of them."""
    made = [one for one in answer["partitions"] if one["bottleneck_seconds"] is not None]
    best = min(made, key=lambda one: one["bottleneck_seconds"], default=None)
    numbers = facts(best or {}, {
        "stages with the least bottleneck": "count number",
        "bottleneck": "bottleneck_seconds seconds",
    } if best else {})  # fmt: skip
    return Figures(numbers, (titled("Numbers of stages", answer["partitions"], {
        "stages": "count", "<status": "status", "bottleneck": "bottleneck_seconds seconds",
        "bound": "bound_seconds seconds", "gap": "gap percent",
        "<layers on devices": lambda one: _stages(one["stages"] or ()),
    }),))  # fmt: skip


def _stages(stages: Iterable[Told]) -> str:
    return "; ".join(
        f"{one['layers'][0]} to {one['layers'][1] - 1} on {', '.join(one['devices'])}"
        for one in stages
    )


def schedule(request: Request, answer: Told) -> Figures:
    """A schedule of stages, and its timeline."""
    assert isinstance(request, ScheduleRequest)
    numbers = facts(answer, {
        "makespan": "makespan number", "longest span of a device": "span number",
        f"bound on the {answer['objective']}, by {answer['proved_by']}": "bound number",
        "gap": "gap percent", "bubble": "bubble percent", "peak memory": "peak_memory number",
    })  # fmt: skip
    if answer["order"] is None:
        return Figures(numbers)
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
    return Figures(numbers, timelines=(("One row per device", drawn),))


def compare_schedules(request: Request, answer: Told) -> Figures:
    """All schedules that fit, and a chart of their memory and makespan."""
    found = answer["schedules"]
    names = {one["kind"]: ", ".join([one["kind"], *one["same_as_kinds"]]) for one in found}
    best = found[0] if found else {}
    numbers = facts(
        best,
        {
            f"has the least {answer['objective']}": "kind",
            "makespan": "makespan number",
            "peak memory": "peak_memory number",
        }
        if best
        else {},
    )
    tables = (
        titled("Schedules, the best first", found, {
            "<schedule": lambda one: names[one["kind"]], "<placement": "placement",
            "makespan": "makespan number", "span": "span number", "bubble": "bubble percent",
            "peak memory": "peak_memory number", "bound": "bound number", "gap": "gap percent",
        }),
        titled("Those that do not fit", answer["refused"],
               {"<schedule": "kind", "<reason": "reason"}),
    )  # fmt: skip
    charts = [("Memory and makespan", _front(found, names))] if found else []
    return Figures(numbers, tables, charts=charts)


def _front(found: Sequence[Told], names: dict[str, str]) -> Chart:
    """A chart of all schedules by memory and makespan, with their Pareto front."""
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


def schedule_curve(request: Request, answer: Told) -> Figures:
    """The best schedule for every limit of memory, as a table and a chart."""
    name, points = answer["objective"], answer["points"]
    least, most = (
        f"{name} with the {which}, {written(one['memory'], 'number')}"
        for which, one in (("least memory", points[0]), ("most", points[-1]))
    )
    numbers = [
        (written(len(points), "number"), "limits of memory"),
        (written(points[0][name], "number"), least),
        (written(points[-1][name], "number"), most),
    ]  # fmt: skip
    limits = titled("The best schedule within every limit", points, {
        "memory": "memory number", "makespan": "makespan number", "span": "span number",
        "bound": "bound number", "gap": "gap percent", "<proved by": "proved_by",
        "<status": "status",
    })  # fmt: skip
    memory, cost, bound = (tuple(one[key] for one in points) for key in ("memory", name, "bound"))
    others = tuple((one["kind"], one["peak_memory"], one[name]) for one in answer["kinds"])
    chart = curve_chart(Curve(memory, cost, bound, name, others))
    return Figures(numbers, (limits,), charts=((f"Memory and {name}", chart),))


def jobshop(request: Request, answer: Told) -> Figures:
    """A schedule of a job shop by machine."""
    assert isinstance(request, JobShopRequest)
    numbers = facts(answer, {
        "makespan": "makespan number", f"bound, by {answer['proved_by']}": "bound number",
        "gap": "gap percent",
    })  # fmt: skip
    if answer["starts"] is None:
        return Figures(numbers)
    machines: dict[int, list[BarRun]] = defaultdict(list)
    rows_of = zip(request.problem.choices, answer["starts"], answer["chosen_machines"], strict=True)
    for j, rows in enumerate(rows_of):
        for i, (choice, start, machine) in enumerate(zip(*rows, strict=True)):
            end = start + dict(choice)[machine]
            machines[machine].append(BarRun(f"job {j}", start, end, f"{j}.{i}"))
    lanes = [
        (f"machine {one}", sorted(runs, key=lambda run: run.start))
        for one, runs in sorted(machines.items())
    ]
    names = [f"job {j}" for j in range(len(request.jobs))]
    drawn = runs_drawing(lanes, names, marks=(Mark(answer["bound"], BOUND),))
    return Figures(numbers, timelines=(("Machines, with job.step", drawn),))


def divide(request: Request, answer: Told) -> Figures:
    """A division of a workload in sets."""
    numbers = facts(answer, {
        "between two samples, or of one": "cost_seconds seconds",
        f"bound, by {answer['proved_by']}": "bound_seconds seconds",
        f"gap, over {answer['plan_class']}": "gap percent", "why there is none": "reason",
    })  # fmt: skip
    return Figures(numbers, (titled("Sets", answer["sets"] or (), {
        "<device": "device",
        "<replicas x shards": lambda one: f"{one['replicas']} x {one['shards']}",
        "nodes": lambda one: written(len(one["nodes"]), "number"), "time": "seconds seconds",
        "memory": "memory_bytes bytes", "<they are": lambda one: ", ".join(one["nodes"]),
    }),))  # fmt: skip


def what_if(request: Request, answer: Told) -> Figures:
    """What each change of the machines would buy."""
    changes = answer["rows"]
    numbers = facts(answer["base"] | {"changes": len(changes)}, {
        "per iteration, as things are": "cost_seconds seconds", "bound": "bound_seconds seconds",
        "changes": "changes number",
    })  # fmt: skip
    return Figures(numbers, (titled("What a change would buy", changes, {
        "<change": "change", "iteration": "cost_seconds seconds", "saves": "saved_seconds seconds",
        "saves at most": "most_seconds seconds", "<among": "plans", "<reason": "reason",
    }),))  # fmt: skip


def sweep(request: Request, answer: Told) -> Figures:
    """The plans of all combinations, of which the best has a star."""
    best = None if answer["best"] is None else answer["rows"][answer["best"]]
    numbers = facts(best or {}, {
        "samples per second, the most": "samples_per_second number",
        "per iteration of it": "cost_seconds seconds", "is its planner": "planner",
    } if best else {})  # fmt: skip
    return Figures(numbers, (titled("All combinations, the best has a star", answer["rows"], {
        "<planner": lambda one: f"{'★ ' if one is best else ''}{one['planner']}",
        "devices": "devices number", "memory": "memory_bytes bytes",
        "microbatches": "microbatches number", "<status": "status",
        "iteration": "cost_seconds seconds", "samples per second": "samples_per_second number",
        "gap": "gap percent", "<replicas": "replicas", "peak memory": "peak_memory_bytes bytes",
        "<reason": lambda one: one["reason"] if one["cost_seconds"] is None else "",
    }),))  # fmt: skip
