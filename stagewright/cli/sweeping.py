"""``sweep``: the plans of many combinations of devices, memory, microbatches and planners."""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from stagewright.cli.console import (
    ClusterFile,
    Engine,
    EngineName,
    JsonFlag,
    ModelFile,
    RayAddress,
    Seed,
    Server,
    Threads,
    TimeLimit,
    ask,
    percent,
    print_answer,
    print_lines,
    print_table,
    read_limits,
)
from stagewright.cli.interrupts import interruptible
from stagewright.cli.outputs import Writes
from stagewright.cli.solving import find
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.service.sweep_requests import SweepAnswer, SweepRequest, SweepRow

T = TypeVar("T")
SPELLED = {"memory_bytes": "--memory", "batches": "--global-batch", "planners": "--planner"}


def sweep(
    model: ModelFile,
    cluster: ClusterFile,
    microbatches: Annotated[
        str | None, typer.Option(help="Microbatches in an iteration.", metavar="M,...")
    ] = None,
    global_batch: Annotated[
        str | None,
        typer.Option(
            help="Samples between two updates, in place of --microbatches, for planners 2bw and "
            "2bw-flush.",
            metavar="N,...",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Numbers of devices: the first ones of the cluster file; default: all.",
            metavar="N,...",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of a device in place of the cluster file's, for example 16GB,40GB.",
            metavar="SIZE,...",
        ),
    ] = None,
    planner: Annotated[
        str,
        typer.Option(help="Of those that `stagewright planners` lists.", metavar="NAME,..."),
    ] = "auto",
    recompute: Annotated[
        str | None,
        typer.Option(help="As of `stagewright plan`.", metavar="<none|full|layer|auto>"),
    ] = None,
    offload: Annotated[
        bool | None, typer.Option("--offload/--no-offload", help="As of `stagewright plan`.")
    ] = None,
    time_limit: TimeLimit = 10.0,
    threads: Threads = 1,
    seed: Seed = 0,
    engine: EngineName = Engine.LOCAL,
    workers: Annotated[
        int | None,
        typer.Option(help="With --engine local: processes; default: one per core.", metavar="N"),
    ] = None,
    address: RayAddress = None,
    server: Server = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the table as CSV; - is standard output."),
        Writes(".csv"),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(help="Draw samples per second.", metavar="FILE"),
        Writes(".png"),
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Plan every combination of sizes; exit code 1 if none has a plan.

    Each plan has its own time limit, and its own bound. Ctrl-C (or SIGTERM) ends the sweep and
    keeps the rows found so far; a second one ends immediately.
    """
    from stagewright.graphs.documents.documents import write_bytes, write_text
    from stagewright.graphs.documents.units import parse_bytes
    from stagewright.graphs.machines.cluster import load_cluster
    from stagewright.graphs.models.chain import load_model
    from stagewright.service.sweep_requests import SweepRequest

    if (microbatches is None) == (global_batch is None):
        raise InputError(
            "give one of --microbatches and --global-batch, for example --microbatches 4,8"
        )
    limits = read_limits(time_limit, threads, seed)
    request = ask(
        SweepRequest,
        SPELLED,
        chain=load_model(model),
        cluster=load_cluster(cluster),
        microbatches=_listed("--microbatches", microbatches, _whole),
        batches=_listed("--global-batch", global_batch, _whole),
        devices=_listed("--devices", devices, _whole),
        memory_bytes=_listed("--memory", memory, parse_bytes),
        planners=_listed("--planner", planner, lambda name, _: name),
        recompute=recompute,
        offload=offload,
        time_limit=limits.seconds,
        threads=limits.threads,
        seed=limits.seed,
        engine=engine.value,
        workers=workers,
        address=address,
    )
    answer = _found(request, server)
    if output is not None:
        write_text(output, _csv(answer.rows))
    if png is not None:
        write_bytes(png, _drawn(answer))
    if as_json:
        print_answer(answer)
    else:
        _print(answer)
        print_lines(*(f"{path} is written" for path in (output, png) if path is not None))
    return 1 if answer.best is None else 0


def _found(request: "SweepRequest", server: str | None) -> "SweepAnswer":
    from stagewright.service.sweep_requests import SweepAnswer

    if server is not None:
        return find(SweepAnswer, request, f"{len(request.points)} plans", server)
    from stagewright.service.sweeping import sweep as answer_of
    from stagewright.solvers.planners.warm_up import compile_kernels

    with interruptible() as stop, _bar(len(request.points)) as on_row:
        for planner in request.planners:  # once, before all processes need them
            compile_kernels(planner, stop=stop)
        return answer_of(request, on_row, stop)


def _listed(option: str, text: str | None, read: Callable[[str, str], T]) -> tuple[T, ...]:
    """The values of a list, none without a text."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError(f"{option} {text!r} has an empty entry")
    return tuple(read(part, option) for part in parts)


def _whole(text: str, option: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"{option}: {text!r} is no whole number; write for example 4,8,16"
        ) from None


@contextmanager
def _bar(count: int) -> "Iterator[Callable[[SweepRow], None]]":
    """A progress bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[best]}"), console=console) as bar:
        task = bar.add_task("plans", total=count, best="")
        best = 0.0

        def report(row: "SweepRow") -> None:
            nonlocal best
            best = max(best, row.samples_per_second or 0.0)
            bar.update(task, advance=1, best=f"best {best:.6g} samples/s" if best else "")

        yield report


def _csv(rows: "Sequence[SweepRow]") -> str:
    """A line per row, after a line of the names."""
    text = io.StringIO()
    names = [*type(rows[0]).model_fields]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        values = row.json_object()
        writer.writerow(["" if values[name] is None else values[name] for name in names])
    return text.getvalue()


def _print(answer: "SweepAnswer") -> None:
    from stagewright.graphs.documents.units import format_bytes, format_seconds

    head = ("devices", "memory", "microbatches", "<planner", "<status", "iteration", "samples/s",
            "bound", "gap", "<replicas", "peak memory")  # fmt: skip
    cells = []
    for row in answer.rows:
        cost, bound, peak = row.cost_seconds, row.bound_seconds, row.peak_memory_bytes
        cells.append((
            str(row.devices),
            "as given" if row.memory_bytes is None else format_bytes(row.memory_bytes),
            _size(row), row.planner, row.status,
            "-" if cost is None else format_seconds(cost),
            "-" if row.samples_per_second is None else f"{row.samples_per_second:.5g}",
            "-" if bound is None else format_seconds(bound),
            "-" if row.gap is None else percent(row.gap),
            row.replicas or "-",
            "-" if peak is None else format_bytes(peak),
        ))  # fmt: skip
    alike = {head.index("memory"), head.index("<planner")}  # left out if they say nothing
    shown = [i for i in range(len(head)) if i not in alike or len({row[i] for row in cells}) > 1]
    print_table([head[i] for i in shown], [[row[i] for i in shown] for row in cells])
    for row in answer.rows:
        if row.cost_seconds is None:
            print_lines(f"{_place(row)}: {row.status}{row.reason and f': {row.reason}'}")
    print_lines(f"{len(answer.rows)} plans, {answer.status}, {answer.wall_seconds:.1f} s")
    if answer.best is not None:
        best = answer.rows[answer.best]
        rate = best.samples_per_second or 0.0
        print_lines(f"most samples per second of these: {_place(best)}: {rate:.6g}")


def _size(row: "SweepRow") -> str:
    if row.batch is None:
        return str(row.microbatches)
    chosen = f": {row.microbatches} x {row.microbatch_size}" if row.microbatches else ""
    return f"batch {row.batch}{chosen}"


def _asked(row: "SweepRow") -> str:
    return str(row.microbatches) if row.batch is None else f"batch {row.batch}"


def _place(row: "SweepRow") -> str:
    from stagewright.graphs.documents.units import format_bytes

    memory = "" if row.memory_bytes is None else f" of {format_bytes(row.memory_bytes)}"
    size = f"{row.microbatches} microbatches" if row.batch is None else f"batch {row.batch}"
    some = "1 device" if row.devices == 1 else f"{row.devices} devices"
    return f"{row.planner}, {some}{memory}, {size}"


def _drawn(answer: "SweepAnswer") -> bytes:
    """The first size with several values is the horizontal axis; the others make the lines."""
    from stagewright.executor.drawing.sweep_chart import SweepLine, sweep_png
    from stagewright.graphs.documents.units import format_bytes

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
