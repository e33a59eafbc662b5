"""``what-if``: what one more GB, device or faster link would buy."""

from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.console import (
    ClusterFile,
    Engine,
    EngineName,
    JsonFlag,
    MemoryLimit,
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
    progress,
    read_limits,
    require_ray,
)
from stagewright.cli.interrupts import interruptible
from stagewright.cli.solving import answer_of, planning_engine

if TYPE_CHECKING:
    from stagewright.service.pipeline_requests import PlanRequest
    from stagewright.service.what_if_answers import WhatIfAnswer


def what_if(
    model: ModelFile,
    cluster: ClusterFile,
    microbatches: Annotated[int, typer.Option(help="Microbatches in an iteration.", metavar="M")],
    planner: Annotated[
        str, typer.Option(help="One of those that `stagewright planners` lists.")
    ] = "auto",
    runtime: Annotated[
        str | None,
        typer.Option(
            "--for", help="Plan only what this framework runs, as in plan.", metavar="FRAMEWORK"
        ),
    ] = None,
    memory_limit: MemoryLimit = None,
    time_limit: TimeLimit = 10.0,
    threads: Threads = None,
    seed: Seed = 0,
    engine: EngineName = Engine.LOCAL,
    address: RayAddress = None,
    server: Server = None,
    as_json: JsonFlag = False,
) -> int:
    """What one more GB, faster links, or one more device or server would buy.

    Every change is planned with the time limit, from the plan as things are; where it seems to
    save, things as they are are planned again from its plan, so that a luckier search is no saving.
    Every change has its own bound: no plan with it saves more than that leaves. With --engine ray
    the changes are planned at the same time. Exit code 1 if there is no plan as things are.
    """
    from stagewright.graphs.documents.units import parse_bytes
    from stagewright.graphs.machines.cluster import load_cluster
    from stagewright.graphs.models.chain import load_model
    from stagewright.service.pipeline_requests import PlanRequest

    on_ray = engine is Engine.RAY

    require_ray(engine, address, server)
    limits = read_limits(time_limit, 1 if on_ray and threads is None else threads, seed, server)
    request = ask(
        PlanRequest,
        {"memory_limit_bytes": "--memory-limit"},
        chain=load_model(model),
        cluster=load_cluster(cluster),
        microbatches=microbatches,
        planner=planner,
        runtime=runtime,
        memory_limit_bytes=None
        if memory_limit is None
        else parse_bytes(memory_limit, "--memory-limit"),
        time_limit=limits.seconds,
        threads=limits.threads,
        seed=limits.seed,
    )
    answer = _found(request, server, engine, address)
    if as_json:
        print_answer(answer)
    else:
        _print(answer)
    return 1 if answer.base.plan is None else 0


def _found(
    request: "PlanRequest", server: str | None, engine: Engine, address: str | None
) -> "WhatIfAnswer":
    from stagewright.service.what_if_answers import WhatIfAnswer

    with interruptible() as stop, progress("planning", stop) as on_progress:
        if server is not None:
            return answer_of(WhatIfAnswer, request, server, on_progress, stop, "what-if")
        from stagewright.service.planning import require_supported
        from stagewright.service.what_if import what_if as changed
        from stagewright.solvers.planners.warm_up import compile_kernels

        require_supported(request)  # before compilation
        compile_kernels(request.planner, stop=stop)
        where = planning_engine(engine, address, request.threads)
        return changed(request, stop=stop, engine=where)


def _print(answer: "WhatIfAnswer") -> None:
    from stagewright.graphs.documents.units import format_seconds

    def shown(seconds: float | None) -> str:
        return "-" if seconds is None else format_seconds(seconds)

    def share(seconds: float | None) -> str:
        cost = answer.base.cost_seconds
        return "-" if seconds is None or not cost else percent(seconds / cost)

    base = answer.base
    if base.plan is None:
        print_lines(f"as things are: {base.status}: {base.reason}")
    else:
        print_lines(
            f"as things are: {shown(base.cost_seconds)} per iteration, gap "
            f"{'-' if base.gap is None else percent(base.gap)} in its class"
        )
    head = ("<change", "<status", "iteration", "saves", "at most")
    rows = [
        (one.change, one.status, shown(one.cost_seconds), share(one.saved_seconds),
         share(one.most_seconds))
        for one in answer.rows
    ]  # fmt: skip
    print_table(head, rows)
    print_lines("at most: what the bound with the change leaves, for the class of its plan")
