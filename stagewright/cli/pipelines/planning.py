"""``plan`` and ``planners``: from a model and a cluster to a certified plan, which is printed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from stagewright.cli import interruptible
from stagewright.cli.commands import Asked, command
from stagewright.cli.console import (
    kept,
    percent,
    print_json,
    print_table,
    progress,
    say,
    seconds,
    size,
    tell,
    warn,
)
from stagewright.cli.options import OnRay, Printed, Served, Threaded, Written, threads_of
from stagewright.cli.outputs import is_document
from stagewright.cli.placing import place
from stagewright.cli.solving import answer_of, planning_engine
from stagewright.formulations.backprop.orders import OutOfOrder
from stagewright.formulations.forms.answers import Status
from stagewright.formulations.plans.plan import save_plan
from stagewright.formulations.plans.plan_class import EVERY_PLAN
from stagewright.formulations.schedules.published.kinds import ScheduleChoice
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_seconds
from stagewright.graphs.models.chain import Chain
from stagewright.service.options import Option, number_or_auto, whole_numbers
from stagewright.service.pipelines.requests import PlanRequest

if TYPE_CHECKING:
    from stagewright.executor.drawing.page import StageSummary
    from stagewright.formulations.plans.plan import Certificate, PeriodicSchedule, PipelinePlan
    from stagewright.graphs.models.chain import Chain
    from stagewright.service.pipelines.answers import PlanAnswer
    from stagewright.solvers.planning import Result

_OF_GRAPHS = (
    "chain", "cluster", "planner", "contention", "time_limit", "threads", "seed", "server",
    "output", "as_json", "address",
)  # fmt: skip


class PlanOptions(Written, OnRay, Served, Threaded):
    """What ``plan`` is asked beside its request."""

    microbatches: int | None = None
    """Microbatches in an iteration; needed for a model of layers."""
    order: Annotated[str | None, Option(form="KIND")] = None
    """Plan this schedule on balanced stages: optimal, or a kind of `stagewright schedule` (planner
    order)."""
    chunks: Annotated[int | None, Option(form="V")] = None
    """With --order: stages per device; default: 2 where the kind has several."""
    replicas: Annotated[tuple[int, ...] | None, Option(form="R,...", of_text=whole_numbers)] = None
    """With --order 1f1b-rr: devices of each stage, such as 2,1,1."""
    placement: Literal["line", "loop", "V", "wave"] | None = None
    """With --order optimal: where the stages are; default: a line, or a loop if there are several
    per device."""
    training: Annotated[str | None, Option(form="<data|pipeline|single>")] = None
    """With --planner ooo: all devices share every layer (the default), groups of layers go around
    the devices, or the only device has two streams."""
    reversed_layers: Annotated[str | None, Option("--k", form="<auto|K>")] = None
    """With --training data: the weight gradients of the first K layers come last."""
    group: Annotated[str | None, Option(form="<auto|N>")] = None
    """With --training pipeline: layers of a group."""
    contention: Literal["none", "exclusive"] | None = None
    """Of a graph: transfers between two devices do not wait for each other (none, the default), or
    are one at a time in each direction (exclusive)."""


@command(
    headings={
        "Microbatches of a batch": "batch microbatch_size",
        "What a plan may do": "recompute offload shards tensor vertical_sync runtime",
        "A schedule of your choice": "order chunks replicas placement",
        "Planners with choices of their own": "period_seconds group_size backend training"
        " reversed_layers group assumed_share contention",
        "Search": "start gap threads seed engine address server",
    }
)
def plan(asked: Asked[PlanRequest], given: PlanOptions) -> int:
    """Plan a model on a cluster; exit code 1 if there is no plan, or none was found in time.

    A model is a file of layers, or a graph of operators that `stagewright capture` writes. Of a
    transformer `stagewright train-plan` searches tensor, data, context and expert degrees too.

    With --engine ray the sizes of a batch's microbatches are planned at the same time.

    Ctrl-C (or SIGTERM) ends the search and keeps the best plan found so far; a second one ends
    immediately.
    """
    given.require(given.server)
    model, on_ray = asked.given["chain"], given.engine == "ray"
    threads = threads_of(1 if on_ray and given.threads is None else given.threads, given.server)
    if is_document(model, "graph"):
        for option in asked.strays(_OF_GRAPHS, given):
            raise InputError(f"{option} is for models of layers; {model} is a graph of operators")
        return place(asked, given, threads)
    if given.contention is not None:
        raise InputError("--contention is for graphs of operators")
    _require_size(asked, given)
    _require_layers(asked.given["planner"], model)
    request = asked.request(
        microbatches=1 if given.microbatches is None else given.microbatches,
        threads=threads,
        order=_order(given),
        out_of_order=_out_of_order(asked, given),
    )
    _tell_of_experts(request.chain)
    answer = _found(request, given)
    written = kept(answer.plan, given, save_plan)
    tell(answer, given, lambda answer: _print(request.chain, answer), written)
    return 1 if answer.plan is None else 0


def _tell_of_experts(chain: Chain) -> None:
    """Say before the search that no plan of it divides a model's experts."""
    from stagewright.formulations.prices.analytic import ALL_EXPERTS

    if ALL_EXPERTS in chain.source:
        warn(
            f"{chain.name}: {ALL_EXPERTS}, and no exchange with experts elsewhere; `stagewright "
            "train-plan` divides them, and prices the exchange"
        )


def _require_size(asked: Asked[PlanRequest], given: PlanOptions) -> None:
    """Refuse options that give the number of microbatches twice, or not at all."""
    batch, sized = asked.given["batch"], asked.given["microbatch_size"] != "auto"
    if (given.microbatches is None) == (batch is None):
        raise InputError(
            "--microbatches is missing; write for example --microbatches 8, or --global-batch 256"
            if batch is None
            else "--global-batch is in place of --microbatches: give one of them"
        )
    if sized and batch is None:
        raise InputError("--microbatch-size goes with --global-batch")
    if given.engine == "ray" and (batch is None or sized):
        raise InputError("--engine ray goes with --global-batch, whose sizes it plans")


def _found(request: PlanRequest, given: PlanOptions) -> "PlanAnswer":
    """The answer."""
    from stagewright.service.pipelines.answers import PlanAnswer

    with interruptible() as stop:
        if given.server is not None:
            with progress("planning", stop) as on_progress:
                return answer_of(PlanAnswer, request, given.server, on_progress, stop)
        from stagewright.service.pipelines.planning import plan as planned
        from stagewright.service.pipelines.planning import require_supported

        require_supported(request)
        where = planning_engine(given, request.threads)
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


def _order(given: PlanOptions) -> ScheduleChoice | None:
    """The schedule to plan."""
    if given.order is None:
        for option in ("chunks", "replicas", "placement"):
            if getattr(given, option) is not None:
                raise InputError(f"--{option} goes with --order KIND")
        return None
    return ScheduleChoice(given.order, given.chunks, given.replicas or (), given.placement)


def _out_of_order(asked: Asked[PlanRequest], given: PlanOptions) -> OutOfOrder | None:
    """The choices of out-of-order backprop; None for other planners."""
    share = asked.given["assumed_share"]
    texts = {"--training": given.training, "--k": given.reversed_layers, "--group": given.group}
    if asked.given["planner"] != "ooo":
        for option, value in (texts | {"--share": share}).items():
            if value is not None:
                raise InputError(f"{option} goes with --planner ooo")
        return None
    if share is not None and given.training != "single":
        raise InputError("--share goes with --training single")
    way: Any = given.training or ("data" if given.group is None else "pipeline")
    counts = (number_or_auto(texts[name] or "auto", name) for name in ("--k", "--group"))
    return OutOfOrder(way, *counts)


def _print(chain: "Chain", answer: "PlanAnswer") -> None:
    _print_result(chain, answer.result)
    _print_exports(answer)
    is_transformer = chain.source.startswith("analytic") and "attention" in chain.source
    if is_transformer and answer.status is not Status.INTERRUPTED:
        others = "searches tensor, data, context and expert degrees too"
        if answer.result.status is Status.INFEASIBLE:
            others = "may find what fits: it divides layers, recomputes and shards the optimizer"
        say(f"`stagewright train-plan` {others}")


def _print_result(chain: "Chain", result: "Result") -> None:
    if result.plan is not None:
        print_plan(result.plan, chain)
    _print_sizes(result)
    _print_restriction(result)
    _print_other(result)
    # A portfolio's reason is already printed with its best attempt.
    portfolio = result.plan is not None and result.attempts
    shown = result.ended if portfolio else result.reason
    reason = f": {shown}" if shown else ""
    among = result.optimal_among
    of = "" if among in (None, str(EVERY_PLAN)) else f" among {among}"
    say(f"{result.planner}: {result.status}{of} after {result.seconds:.2f} s{reason}")
    if result.plan is None and result.status is not Status.NO_ANSWER:
        return  # the reason says it all
    rows = [
        (one.planner, one.status.value, seconds(one.cost_seconds), f"{one.wall_seconds:.2f}",
         one.reason)
        for one in result.attempts
    ]  # fmt: skip
    if rows:
        print_table(("<planner", "<status", "cost", "seconds", "<notes"), rows)


def _print_sizes(result: "Result") -> None:
    """Print the cost for each size of microbatches, and the bound for all sizes."""
    if not result.sizes:
        return
    rows = [
        (str(one.samples), str(one.microbatches), one.status.value, seconds(one.cost),
         seconds(one.bound))
        for one in result.sizes
    ]  # fmt: skip
    head = ("samples", "microbatches", "<status", "cost", "bound")
    print_table(head, rows, "sizes of microbatches, each with its own bound")
    if result.plans is not None and result.bound is not None and result.gap is not None:
        say(
            f"bound  {format_seconds(result.bound)} for {result.plans}, in all these sizes, "
            f"gap {percent(result.gap)}"
        )


def _print_restriction(result: "Result") -> None:
    """Print what it costs to plan only what a framework runs."""
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
    say(*lines)


def _print_other(result: "Result") -> None:
    """Print the gap of the other plan of a portfolio, and how much slower or faster it is."""
    proof = None if result.other is None else result.other.certificate
    if proof is None or not result.cost:
        return
    more = proof.cost_seconds / result.cost - 1
    say(
        f"other  {format_seconds(proof.cost_seconds)}, {percent(abs(more))} "
        f"{'slower' if more >= 0 else 'faster'}: gap {percent(proof.gap)} to "
        f"{format_seconds(proof.bound_seconds)} for {proof.plans}, proved by {proof.proved_by}"
    )


def _print_exports(answer: "PlanAnswer") -> None:
    """Print which frameworks run the plan, and why others do not."""
    if answer.exports is None:
        return
    able = [to for to, refusal in answer.exports.items() if refusal is None]
    say(f"exports to {', '.join(able)}" if able else "exports to no other framework")
    if answer.restriction is None:
        refusals = [(to, why) for to, why in answer.exports.items() if why is not None]
        say(*(f"not to {to}: {why}" for to, why in refusals))


def planners(given: Printed) -> int:
    """List the planners."""
    from stagewright.solvers.operators.names import PLANNERS as OF_OPERATORS
    from stagewright.solvers.planning import PLANNERS

    rows = [(one.name, one.summary, one.source) for one in PLANNERS.values()]
    placing = [(name, one.summary, one.source) for name, one in OF_OPERATORS.items()]
    if given.as_json:
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


def print_plan(plan: "PipelinePlan", chain: "Chain | None" = None) -> None:
    """Print the stages of a plan and its certificate; layers by name where the chain is known."""
    from stagewright.executor.drawing.page import summarise
    from stagewright.executor.drawing.timeline import headline, stage_features
    from stagewright.formulations.plans.plan import PeriodicSchedule

    is_periodic = isinstance(plan.schedule, PeriodicSchedule)
    between = ["<first .. last layer"] if chain else []
    more = ["<index shifts", "<shares with"] if is_periodic else []
    features = [", ".join(stage_features(stage)) for stage in plan.stages]
    if any(features):
        more.append("<features")
    say(headline(plan))
    print_table(
        ["stage", "<layers", *between, "<devices", "replicas", "forward", "backward", "in flight",
         "peak memory", *more],
        [
            [*_stage_row(line, chain), *([its] if any(features) else [])]
            for line, its in zip(summarise(plan), features, strict=True)
        ],
    )  # fmt: skip
    if isinstance(plan.schedule, PeriodicSchedule):
        say(*_period_lines(plan, plan.schedule))
    if plan.predicted is not None:
        say(f"idle   {percent(max(0.0, plan.predicted.bubble))} of the used devices' time")
    if plan.certificate is not None:
        say(*_certificate_lines(plan.certificate, plan.of_sizes))


def _stage_row(line: "StageSummary", chain: "Chain | None") -> list[str]:
    from stagewright.executor.drawing.page import shared_text, shifts_text
    from stagewright.executor.drawing.timeline import shorten_devices

    start, stop = line.layers
    names = [f"{chain.layers[start].name} .. {chain.layers[stop - 1].name}"] if chain else []
    more = [] if line.shifts is None else [shifts_text(line), shared_text(line)]
    return [
        str(line.stage), f"{start}-{stop - 1}", *names, shorten_devices(line.devices),
        str(line.replicas), format_seconds(line.forward_seconds),
        format_seconds(line.backward_seconds), str(line.in_flight),
        size(line.peak_memory_bytes), *more,
    ]  # fmt: skip


def _period_lines(plan: "PipelinePlan", schedule: "PeriodicSchedule") -> list[str]:
    from stagewright.formulations.plans.periodic import iteration_seconds, latency

    period, pause = schedule.period_seconds, schedule.pause_seconds
    through, whole = latency(schedule), iteration_seconds(schedule, plan.microbatches)
    updates = f", a pause of {format_seconds(pause)} for the updates" if pause > 0 else ""
    return [
        f"period {format_seconds(period)}, a microbatch each{updates}: "
        f"{format_seconds(whole)} per iteration of {plan.microbatches}; "
        "the pipeline does not drain in between",
        f"       a microbatch takes {format_seconds(through)}, {through / period:.2f} periods, "
        "from its first action to its last",
    ]


def _certificate_lines(certificate: "Certificate", sizes: str) -> list[str]:
    from stagewright.formulations.checking.certificates import headlines

    lines = [f"cost   {format_seconds(certificate.cost_seconds)} per iteration"]
    for i, one in enumerate(headlines(certificate)):
        lines.append(
            f"{'       ' if i else 'bound  '}{format_seconds(one.seconds)} for {one.plans}{sizes}, "
            f"gap {percent(one.gap)}, proved by {one.proved_by}"
        )
    for promise in certificate.guarantees:
        holds = "holds" if promise.holds else "DOES NOT HOLD"
        lines.append(
            f"       {promise.theorem}: {format_seconds(promise.cost_seconds)} <= "
            f"{format_seconds(promise.seconds)} {holds}; {promise.premise}"
        )
    return lines
