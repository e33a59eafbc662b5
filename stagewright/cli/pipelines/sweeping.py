"""``sweep`` and ``what-if``: the plans of many combinations of sizes, and of changed clusters."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stagewright.cli import interruptible
from stagewright.cli.commands import Asked, command
from stagewright.cli.console import (
    percent,
    print_table,
    progress,
    say,
    seconds,
    size,
    tell,
    terminal,
)
from stagewright.cli.options import OnRay, Printed, Served, Threaded, threads_of
from stagewright.cli.outputs import Writes
from stagewright.cli.solving import answer_of, find, planning_engine
from stagewright.graphs.documents.documents import write_file
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import counted, format_bytes
from stagewright.service.options import Option
from stagewright.service.pipelines.requests import PlanRequest
from stagewright.service.pipelines.sweeping import SweepAnswer, SweepRequest, SweepRow

if TYPE_CHECKING:
    from stagewright.service.pipelines.answers import WhatIfAnswer


class SweepOptions(Served, Printed):
    """What ``sweep`` is asked beside its request."""

    output: Annotated[Path | None, Option("--output", "-o"), Writes(".csv")] = None
    """Write the table as CSV; - is standard output."""
    png: Annotated[Path | None, Option(form="FILE"), Writes(".png")] = None
    """Draw samples per second."""


@command(
    headings={
        "What a plan may do": "recompute offload",
        "Search": "threads seed engine workers address server",
    }
)
def sweep(asked: Asked[SweepRequest], given: SweepOptions) -> int:
    """Plan every combination of sizes; exit code 1 if none has a plan.

    Each plan has its own time limit, and its own bound. Ctrl-C (or SIGTERM) ends the sweep and
    keeps the rows found so far; a second one ends immediately.
    """
    if (asked.given["microbatches"] is None) == (asked.given["batches"] is None):
        raise InputError(
            "give one of --microbatches and --global-batch, for example --microbatches 4,8"
        )
    answer = _swept(asked.request(), given.server)
    if given.output is not None:
        write_file(given.output, _csv(answer.rows))
    if given.png is not None:
        write_file(given.png, _drawn(answer))
    tell(answer, given, _print_sweep, (given.output, given.png))
    return 1 if answer.best is None else 0


def _swept(request: SweepRequest, server: str | None) -> SweepAnswer:
    if server is not None:
        return find(SweepAnswer, request, f"{len(request.points)} plans", server)
    from stagewright.service.pipelines.sweeping import sweep as answer_of
    from stagewright.solvers.planners.steps.warm_up import compile_kernels

    with interruptible() as stop, _bar(len(request.points)) as on_row:
        for planner in request.planners:  # once, before all processes need them
            compile_kernels(planner, stop=stop)
        return answer_of(request, on_row, stop)


@contextmanager
def _bar(count: int) -> Iterator[Callable[[SweepRow], None]]:
    """A progress bar on stderr, if that is a terminal."""
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = terminal()
    if console is None:
        yield lambda _: None
        return
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[best]}"), console=console) as bar:
        task = bar.add_task("plans", total=count, best="")
        best = 0.0

        def report(row: SweepRow) -> None:
            nonlocal best
            best = max(best, row.samples_per_second or 0.0)
            bar.update(task, advance=1, best=f"best {best:.6g} samples/s" if best else "")

        yield report


def _csv(rows: Sequence[SweepRow]) -> str:
    """The rows as CSV, after a line of their names."""
    text = io.StringIO()
    names = [*type(rows[0]).model_fields]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        values = row.json_object()
        writer.writerow(["" if values[name] is None else values[name] for name in names])
    return text.getvalue()


def _print_sweep(answer: SweepAnswer) -> None:
    head = ("devices", "memory", "microbatches", "<planner", "<status", "iteration", "samples/s",
            "bound", "gap", "<replicas", "peak memory")  # fmt: skip
    cells = [
        (
            str(row.devices), "as given" if row.memory_bytes is None else size(row.memory_bytes),
            _size(row), row.planner, row.status, seconds(row.cost_seconds),
            "-" if row.samples_per_second is None else f"{row.samples_per_second:.5g}",
            seconds(row.bound_seconds), percent(row.gap), row.replicas or "-",
            size(row.peak_memory_bytes),
        )
        for row in answer.rows
    ]  # fmt: skip
    alike = {head.index("memory"), head.index("<planner")}  # left out if they say nothing
    shown = [i for i in range(len(head)) if i not in alike or len({row[i] for row in cells}) > 1]
    print_table([head[i] for i in shown], [[row[i] for i in shown] for row in cells])
    for row in answer.rows:
        if row.cost_seconds is None:
            say(f"{_place(row)}: {row.status}{row.reason and f': {row.reason}'}")
    plans = counted(len(answer.rows), "plan", "plans")
    say(f"{plans}, {answer.status}, {answer.wall_seconds:.1f} s")
    if answer.best is not None:
        best = answer.rows[answer.best]
        rate = best.samples_per_second or 0.0
        say(f"most samples per second of these: {_place(best)}: {rate:.6g}")


def _size(row: SweepRow) -> str:
    if row.batch is None:
        return str(row.microbatches)
    chosen = f": {row.microbatches} x {row.microbatch_size}" if row.microbatches else ""
    return f"batch {row.batch}{chosen}"


def _asked(row: SweepRow) -> str:
    return str(row.microbatches) if row.batch is None else f"batch {row.batch}"


def _place(row: SweepRow) -> str:
    memory = "" if row.memory_bytes is None else f" of {format_bytes(row.memory_bytes)}"
    microbatches = counted(row.microbatches or 0, "microbatch", "microbatches")
    size = microbatches if row.batch is None else f"batch {row.batch}"
    some = counted(row.devices, "device", "devices")
    return f"{row.planner}, {some}{memory}, {size}"


def _drawn(answer: SweepAnswer) -> bytes:
    """A chart by the first size that varies, with a line for each value of the others."""
    from stagewright.executor.drawing.charts.prices import SweepLine, sweep_png

    shown = {
        "devices": [str(row.devices) for row in answer.rows],
        "memory of a device": [
            "" if row.memory_bytes is None else format_bytes(row.memory_bytes)
            for row in answer.rows
        ],
        "microbatches": [_asked(row) for row in answer.rows],
        "planner": [row.planner for row in answer.rows],
    }
    varied = [name for name, values in shown.items() if len(set(values)) > 1] or ["devices"]
    places = list(dict.fromkeys(shown[varied[0]]))
    lines: dict[str, list[float | None]] = {}
    for number, row in enumerate(answer.rows):
        name = ", ".join(_told(one, shown[one][number]) for one in varied[1:])
        rates = lines.setdefault(name, [None] * len(places))
        rates[places.index(shown[varied[0]][number])] = row.samples_per_second
    made = [SweepLine(name, tuple(rates)) for name, rates in lines.items()]
    return sweep_png(varied[0], places, made)


def _told(size: str, value: str) -> str:
    return value if size != "microbatches" or not value.isdigit() else f"{value} microbatches"


class WhatIfOptions(Printed, OnRay, Served, Threaded):
    """What ``what-if`` is asked beside its request."""

    microbatches: Annotated[int, Option(form="M")]
    """Microbatches in an iteration."""


@command(
    only="chain cluster planner runtime memory_limit_bytes time_limit seed",
    headings={"Search": "threads seed engine address server"},
)
def what_if(asked: Asked[PlanRequest], given: WhatIfOptions) -> int:
    """What one more GB, faster links, or one more device or server would buy.

    Every change is planned with the time limit, from the plan as things are; where it seems to
    save, things as they are are planned again from its plan, so that a luckier search is no saving.
    Every change has its own bound: no plan with it saves more than that leaves. With --engine ray
    the changes are planned at the same time. Exit code 1 if there is no plan as things are.
    """
    given.require(given.server)
    on_ray = given.engine == "ray" and given.threads is None
    threads = threads_of(1 if on_ray else given.threads, given.server)
    request = asked.request(microbatches=given.microbatches, threads=threads)
    answer = _changed(request, given)
    tell(answer, given, _print_changes)
    return 1 if answer.base.plan is None else 0


def _changed(request: PlanRequest, given: WhatIfOptions) -> "WhatIfAnswer":
    from stagewright.service.pipelines.answers import WhatIfAnswer

    with interruptible() as stop, progress("planning", stop) as on_progress:
        if given.server is not None:
            return answer_of(WhatIfAnswer, request, given.server, on_progress, stop, "what-if")
        from stagewright.service.pipelines.planning import require_supported
        from stagewright.service.pipelines.what_if import what_if as changed

        require_supported(request)
        where = planning_engine(given, request.threads)
        return changed(request, stop=stop, engine=where)


def _print_changes(answer: "WhatIfAnswer") -> None:
    def share(saved: float | None) -> str:
        cost = answer.base.cost_seconds
        return "-" if saved is None or not cost else percent(saved / cost)

    base = answer.base
    if base.plan is None:
        say(f"as things are: {base.status}: {base.reason}")
    else:
        say(
            f"as things are: {seconds(base.cost_seconds)} per iteration, gap {percent(base.gap)} "
            "in its class"
        )
    head = ("<change", "<status", "iteration", "saves", "at most")
    rows = [
        (one.change, one.status, seconds(one.cost_seconds), share(one.saved_seconds),
         share(one.most_seconds))
        for one in answer.rows
    ]  # fmt: skip
    print_table(head, rows)
    say("at most: what the bound with the change leaves, for the class of its plan")
