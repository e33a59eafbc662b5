"""``plan`` and ``planners``: from a model and a cluster to a certified plan."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagewright.cli.console import (
    ClusterFile,
    Engine,
    EngineName,
    JsonFlag,
    MemoryLimit,
    ModelFile,
    OutputFile,
    RayAddress,
    Seed,
    Server,
    Threads,
    TimeLimit,
    ask,
    percent,
    print_answer,
    print_json,
    print_lines,
    print_table,
    progress,
    read_limits,
    require_ray,
)
from stagewright.cli.interrupts import interruptible
from stagewright.cli.printing import print_plan
from stagewright.cli.schedule_options import read_replicas
from stagewright.cli.schedules import Placement
from stagewright.cli.solving import answer_of, planning_engine
from stagewright.graphs.documents.errors import InputError


class Sharded(StrEnum):
    """What the replicas of a stage divide among them."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    WEIGHTS = "weights"


class Contention(StrEnum):
    """Whether transfers between two devices wait for each other."""

    NONE = "none"
    EXCLUSIVE = "exclusive"


if TYPE_CHECKING:
    from stagewright.formulations.backprop.choice import OutOfOrder
    from stagewright.formulations.schedules.choice import ScheduleChoice
    from stagewright.graphs.models.chain import Chain
    from stagewright.service.pipeline_answers import PlanAnswer
    from stagewright.service.pipeline_requests import PlanRequest
    from stagewright.solvers.planning import Result


_OPTIONS = {
    "memory_limit_bytes": "--memory-limit",
    "period_seconds": "--period",
    "batch": "--global-batch",
    "runtime": "--for",
    "start": "--from",
}


def plan(
    model: ModelFile,
    cluster: ClusterFile,
    microbatches: Annotated[
        int | None,
        typer.Option(help="Microbatches in an iteration; needed for a model of layers."),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch",
            help="Samples between two updates, in place of --microbatches.",
            metavar="N",
        ),
    ] = None,
    microbatch_size: Annotated[
        str,
        typer.Option(
            "--microbatch-size",
            help="With --global-batch: samples of a microbatch, of all replicas of a stage "
            "together; auto plans every size that the model has costs for.",
            metavar="<auto|N>",
        ),
    ] = "auto",
    runtime: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="Plan only what this framework runs, as `stagewright export --to` writes it: "
            "torch-csv, torchtitan, nemo, megatron or deepspeed.",
            metavar="FRAMEWORK",
        ),
    ] = None,
    planner: Annotated[
        str,
        typer.Option(
            help="One of those that `stagewright planners` lists; auto is fastt for a graph."
        ),
    ] = "auto",
    memory_limit: MemoryLimit = None,
    period: Annotated[
        float | None,
        typer.Option(help="Periodic planners: seconds between microbatches; default: the minimum."),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(help="Periodic planners: devices per stage; default: the best number."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Periodic planners: solver of the patterns; highs (the default), pulp-cbc, "
            "cvxpy or cp-sat.",
            metavar="NAME",
        ),
    ] = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            help="none; full or layer: stages keep their input, or every layer's, and recompute "
            "the rest; auto: the best of them. Default: auto for the planners auto, general "
            "and launchable, none for the others.",
            metavar="<none|full|layer|auto>",
        ),
    ] = None,
    offload: Annotated[
        bool | None,
        typer.Option(
            "--offload/--no-offload",
            help="Whether stages may offload activations to host memory; the cluster file must "
            "have host bandwidths. auto, general, madpipe and 1f1b-star offload where it helps "
            "(auto and general by default), the other planners in every stage.",
        ),
    ] = None,
    shards: Annotated[
        Sharded,
        typer.Option(
            help="What the replicas of a stage divide: the optimizer's state (ZeRO-1), or the "
            "weights too (ZeRO-3). Put into the plan that is found without, or where none fits, "
            "into one that is found for smaller states: nothing is proved about it.",
            case_sensitive=False,
        ),
    ] = Sharded.NONE,
    vertical_sync: Annotated[
        bool,
        typer.Option(
            "--vertical-sync",
            help="With --planner pipedream-async: a microbatch uses on every stage the version of "
            "the weights that it used on the first.",
        ),
    ] = False,
    gap: Annotated[
        str | None,
        typer.Option(
            help="End as soon as the best plan is proved to be within this of the best of its "
            "class, such as 1% or 0.01.",
            metavar="SHARE",
        ),
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(
            help="Plan this schedule on balanced stages: optimal, or a kind of `stagewright "
            "schedule` (planner order).",
            metavar="KIND",
        ),
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(
            help="With --order: stages per device; default: 2 where the kind has several.",
            metavar="V",
        ),
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            help="With --order 1f1b-rr: devices of each stage, such as 2,1,1.", metavar="R,..."
        ),
    ] = None,
    placement: Annotated[
        Placement | None,
        typer.Option(
            help="With --order optimal: where the stages are; default: a line, or a loop if there "
            "are several per device.",
            case_sensitive=False,
        ),
    ] = None,
    training: Annotated[
        str | None,
        typer.Option(
            help="With --planner ooo: all devices share every layer (the default), groups of "
            "layers go around the devices, or the only device has two streams.",
            metavar="<data|pipeline|single>",
        ),
    ] = None,
    reversed_layers: Annotated[
        str | None,
        typer.Option(
            "--k",
            help="With --training data: the weight gradients of the first K layers come last.",
            metavar="<auto|K>",
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(help="With --training pipeline: layers of a group.", metavar="<auto|N>"),
    ] = None,
    share: Annotated[
        str | None,
        typer.Option(
            help="With --training single: share of the device that kernels occupy where the "
            "profile has none, such as 30% or 0.3; default: all of it.",
            metavar="SHARE",
        ),
    ] = None,
    tensor: Annotated[
        int | None,
        typer.Option(
            help="Tensor degree of all stages: each T devices of a server compute their layers "
            "together. The model needs costs of that degree (profile --tensor).",
            metavar="T",
        ),
    ] = None,
    contention: Annotated[
        Contention | None,
        typer.Option(
            help="Of a graph: transfers between two devices do not wait for each other (none, the "
            "default), or are one at a time in each direction (exclusive).",
            case_sensitive=False,
        ),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from-plan",
            help="Start from this plan of the same layers, made for other times, memory or "
            "devices; planners auto and general.",
            metavar="FILE",
        ),
    ] = None,
    time_limit: TimeLimit = 10.0,
    threads: Threads = None,
    seed: Seed = 0,
    engine: EngineName = Engine.LOCAL,
    address: RayAddress = None,
    server: Server = None,
    output: OutputFile = None,
    as_json: JsonFlag = False,
) -> int:
    """Plan a model on a cluster; exit code 1 if there is no plan, or none was found in time.

    A model is a file of layers, or a graph of operators that `stagewright capture` writes.

    With --engine ray the sizes of a batch's microbatches are planned at the same time.

    Ctrl-C (or SIGTERM) ends the search and keeps the best plan found so far; a second one ends
    immediately.
    """
    from stagewright.cli.placing import is_graph, place, refuse_options
    from stagewright.formulations.plans.plan import load_plan, save_plan
    from stagewright.graphs.documents.units import parse_bytes, parse_share
    from stagewright.graphs.machines.cluster import load_cluster
    from stagewright.graphs.models.chain import load_model
    from stagewright.service.pipeline_requests import PlanRequest

    require_ray(engine, address, server)
    on_ray = engine is Engine.RAY
    limits = read_limits(time_limit, 1 if on_ray and threads is None else threads, seed, server)
    if is_graph(model):
        given = {
            "--microbatches": microbatches, "--global-batch": global_batch, "--for": runtime,
            "--microbatch-size": None if microbatch_size == "auto" else microbatch_size,
            "--memory-limit": memory_limit, "--period": period,
            "--group-size": group_size, "--backend": backend, "--recompute": recompute,
            "--offload": offload, "--gap": gap, "--order": order, "--chunks": chunks,
            "--replicas": replicas, "--placement": placement, "--training": training,
            "--k": reversed_layers, "--group": group, "--share": share, "--from-plan": start,
            "--vertical-sync": vertical_sync or None, "--tensor": tensor,
            "--shards": None if shards is Sharded.NONE else shards,
            "--engine": None if engine is Engine.LOCAL else engine,
        }  # fmt: skip
        refuse_options(given, f"is for models of layers; {model} is a graph of operators")
        chosen = None if contention is None else contention.value
        return place((model, cluster), planner, chosen, limits, server, output, as_json)
    refuse_options({"--contention": contention}, "is for graphs of operators")
    if (microbatches is None) == (global_batch is None):
        raise InputError(
            "--microbatches is missing; write for example --microbatches 8, or --global-batch 256"
            if global_batch is None
            else "--global-batch is in place of --microbatches: give one of them"
        )
    if microbatch_size != "auto" and global_batch is None:
        raise InputError("--microbatch-size goes with --global-batch")
    if on_ray and (global_batch is None or microbatch_size != "auto"):
        raise InputError("--engine ray goes with --global-batch, whose sizes it plans")
    _require_layers(planner, model)
    request = ask(
        PlanRequest,
        _OPTIONS,
        memory_limit_bytes=None
        if memory_limit is None
        else parse_bytes(memory_limit, "--memory-limit"),
        chain=load_model(model),
        cluster=load_cluster(cluster),
        microbatches=1 if microbatches is None else microbatches,
        batch=global_batch,
        microbatch_size=_number("--microbatch-size", microbatch_size),
        runtime=runtime,
        vertical_sync=vertical_sync,
        tensor=tensor,
        shards=shards.value,
        planner=planner,
        recompute=recompute,
        offload=offload,
        group_size=group_size,
        backend=backend,
        period_seconds=period,
        order=_read_order(order, chunks, replicas, placement),
        out_of_order=_read_out_of_order(planner, training, reversed_layers, group, share),
        assumed_share=None if share is None else parse_share(share, "--share"),
        start=None if start is None else load_plan(start),
        gap=0.0 if gap is None else parse_share(gap, "--gap"),
        time_limit=limits.seconds,
        threads=limits.threads,
        seed=limits.seed,
    )
    answer = _found(request, server, engine, address)
    if output is not None and answer.plan is not None:
        save_plan(answer.plan, output)
    if as_json:
        print_answer(answer)
    else:
        _print_result(request.chain, answer.result)
        _print_exports(answer)
        if output is not None and answer.plan is not None:
            print_lines(f"{output} is written")
    return 1 if answer.plan is None else 0


def _found(
    request: "PlanRequest", server: str | None, engine: Engine, address: str | None
) -> "PlanAnswer":
    """The answer."""
    from stagewright.service.pipeline_answers import PlanAnswer

    with interruptible() as stop:
        if server is not None:
            with progress("planning", stop) as on_progress:
                return answer_of(PlanAnswer, request, server, on_progress, stop)
        from stagewright.service.planning import plan as planned
        from stagewright.service.planning import require_supported

        require_supported(request)
        where = planning_engine(engine, address, request.threads)
        with progress("planning", stop) as on_progress:
            return planned(request, on_progress, stop, where)


def _require_layers(planner: str, model: Path) -> None:
    """Refuse a planner of operators for a model of layers."""
    from stagewright.solvers.operators.names import PLANNERS as OF_OPERATORS

    if planner in OF_OPERATORS:
        raise InputError(
            f"planner {planner!r} places graphs of operators; {model} has layers, `stagewright "
            "capture` makes a graph"
        )


def _read_order(
    order: str | None, chunks: int | None, replicas: str | None, placement: Placement | None
) -> "ScheduleChoice | None":
    """The schedule to plan."""
    from stagewright.formulations.schedules.choice import ScheduleChoice

    given = {"--chunks": chunks, "--replicas": replicas, "--placement": placement}
    if order is None:
        for option, value in given.items():
            if value is not None:
                raise InputError(f"{option} goes with --order KIND")
        return None
    counts = read_replicas(replicas)
    return ScheduleChoice(order, chunks, counts, None if placement is None else placement.value)


def _read_out_of_order(
    planner: str,
    training: str | None,
    reversed_layers: str | None,
    group: str | None,
    share: str | None,
) -> "OutOfOrder | None":
    """What is asked of out-of-order backprop."""
    from stagewright.formulations.backprop.choice import OutOfOrder

    given = {
        "--training": training,
        "--k": reversed_layers,
        "--group": group,
        "--share": share,
    }
    if planner != "ooo":
        for option, value in given.items():
            if value is not None:
                raise InputError(f"{option} goes with --planner ooo")
        return None
    if share is not None and training != "single":
        raise InputError("--share goes with --training single")
    way: Any = training or ("data" if group is None else "pipeline")
    return OutOfOrder(way, _number("--k", reversed_layers), _number("--group", group))


def _number(option: str, text: str | None) -> int | None:
    """A number, None for ``auto``."""
    if text in (None, "auto"):
        return None
    if not text.isdecimal():
        raise InputError(f"{option} must be auto or a number, got {text!r}")
    return int(text)


def _print_result(chain: "Chain", result: "Result") -> None:
    from stagewright.formulations.forms.answers import Status
    from stagewright.formulations.plans.plan_class import EVERY_PLAN
    from stagewright.graphs.documents.units import format_seconds

    if result.plan is not None:
        print_plan(result.plan, chain)
    _print_sizes(result)
    _print_restriction(result)
    # A portfolio's reason is already printed with its best attempt.
    portfolio = result.plan is not None and result.attempts
    shown = result.ended if portfolio else result.reason
    reason = f": {shown}" if shown else ""
    among = result.optimal_among
    of = "" if among in (None, str(EVERY_PLAN)) else f" among {among}"
    print_lines(f"{result.planner}: {result.status}{of} after {result.seconds:.2f} s{reason}")
    if result.plan is None and result.status is not Status.NO_ANSWER:
        return  # the reason says it all
    rows = []
    for one in result.attempts:
        cost = "-" if one.cost_seconds is None else format_seconds(one.cost_seconds)
        rows.append((one.planner, one.status.value, cost, f"{one.wall_seconds:.2f}", one.reason))
    if rows:
        head = ("<planner", "<status", "cost", "seconds", "<notes")
        print_table(head, rows)


def _print_sizes(result: "Result") -> None:
    """What was found for each size of a batch's microbatches, and what is proved about all."""
    from stagewright.graphs.documents.units import format_seconds

    if not result.sizes:
        return
    rows = []
    for one in result.sizes:
        cost, bound = ("-" if s is None else format_seconds(s) for s in (one.cost, one.bound))
        rows.append((str(one.samples), str(one.microbatches), one.status.value, cost, bound))
    head = ("samples", "microbatches", "<status", "cost", "bound")
    print_table(head, rows, "sizes of microbatches, each with its own bound")
    if result.plans is not None and result.bound is not None and result.gap is not None:
        print_lines(
            f"bound  {format_seconds(result.bound)} for {result.plans}, in all these sizes, "
            f"gap {percent(result.gap)}"
        )


def _print_restriction(result: "Result") -> None:
    """What planning for a framework alone costs."""
    from stagewright.graphs.documents.units import format_seconds

    known = result.restriction
    if known is None or result.cost is None:
        return
    lines = []
    if known.bound is not None and known.gap is not None:
        whose = "every plan that it runs, in all these sizes" if result.sizes else known.plans
        lines.append(
            f"for {known.name}: bound {format_seconds(known.bound)} for {whose}, "
            f"gap {percent(known.gap)}, proved by {known.proved_by}"
        )
    if known.free_cost is None:
        lines.append(
            "       no plan without this restriction was found in the time left: --time-limit"
        )
    else:
        less = 1 - known.free_cost / result.cost
        better = f"{percent(less)} less" if less > 0 else "no less"
        lines.append(
            f"       the best plan found without this restriction takes "
            f"{format_seconds(known.free_cost)}, {better}"
        )
    print_lines(*lines)


def _print_exports(answer: "PlanAnswer") -> None:
    """Which frameworks run the plan as it is, and, unless it is for one, why others do not."""
    if answer.exports is None:
        return
    able = [to for to, refusal in answer.exports.items() if refusal is None]
    print_lines(f"exports to {', '.join(able)}" if able else "exports to no other framework")
    if answer.restriction is None:
        refusals = [(to, why) for to, why in answer.exports.items() if why is not None]
        print_lines(*(f"not to {to}: {why}" for to, why in refusals))


def planners(as_json: JsonFlag = False) -> int:
    """List the planners."""
    from stagewright.solvers.operators.names import PLANNERS as OF_OPERATORS
    from stagewright.solvers.planning import PLANNERS

    rows = [(one.name, one.summary, one.source) for one in PLANNERS.values()]
    placing = [(name, one.summary, one.source) for name, one in OF_OPERATORS.items()]
    if as_json:
        named = [
            {"name": name, "model": model, "summary": summary, "source": source}
            for model, listed in (("layers", rows), ("operators", placing))
            for name, summary, source in listed
        ]
        print_json({"planners": named})
    else:
        head = ("<planner", "<what it does", "<source")
        print_table(head, rows)
        print_table(head, placing, "of graphs of operators")
    return 0
