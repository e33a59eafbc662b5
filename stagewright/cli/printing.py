"""How plans are printed: stages, period, certificate."""

from typing import TYPE_CHECKING

from stagewright.cli.console import percent, print_lines, print_table

if TYPE_CHECKING:
    from stagewright.executor.drawing.summary import StageSummary
    from stagewright.formulations.plans.plan import (
        Certificate,
        PeriodicSchedule,
        PipelinePlan,
    )
    from stagewright.graphs.models.chain import Chain


def print_plan(plan: "PipelinePlan", chain: "Chain | None" = None) -> None:
    """Print the stages of a plan and its certificate; layers by name where the chain is known."""
    from stagewright.executor.drawing.summary import summarise
    from stagewright.executor.drawing.timeline import headline, stage_features
    from stagewright.formulations.plans.plan import PeriodicSchedule

    is_periodic = isinstance(plan.schedule, PeriodicSchedule)
    between = ["<first .. last layer"] if chain else []
    more = ["<index shifts", "<shares with"] if is_periodic else []
    features = [", ".join(stage_features(stage)) for stage in plan.stages]
    if any(features):
        more.append("<features")
    print_lines(headline(plan))
    print_table(
        ["stage", "<layers", *between, "<devices", "replicas", "forward", "backward", "in flight",
         "peak memory", *more],
        [
            [*_stage_row(line, chain), *([its] if any(features) else [])]
            for line, its in zip(summarise(plan), features, strict=True)
        ],
    )  # fmt: skip
    if isinstance(plan.schedule, PeriodicSchedule):
        print_lines(*_period_lines(plan, plan.schedule))
    if plan.predicted is not None:
        print_lines(f"idle   {percent(max(0.0, plan.predicted.bubble))} of the used devices' time")
    if plan.certificate is not None:
        print_lines(*_certificate_lines(plan.certificate, plan.of_sizes))


def _stage_row(line: "StageSummary", chain: "Chain | None") -> list[str]:
    from stagewright.executor.drawing.summary import shared_text, shifts_text
    from stagewright.executor.drawing.timeline import shorten_devices
    from stagewright.graphs.documents.units import format_bytes, format_seconds

    peak = "-" if line.peak_memory_bytes is None else format_bytes(line.peak_memory_bytes)
    start, stop = line.layers
    names = [f"{chain.layers[start].name} .. {chain.layers[stop - 1].name}"] if chain else []
    more = [] if line.shifts is None else [shifts_text(line), shared_text(line)]
    return [
        str(line.stage), f"{start}-{stop - 1}", *names, shorten_devices(line.devices),
        str(line.replicas), format_seconds(line.forward_seconds),
        format_seconds(line.backward_seconds), str(line.in_flight), peak, *more,
    ]  # fmt: skip


def _period_lines(plan: "PipelinePlan", schedule: "PeriodicSchedule") -> list[str]:
    from stagewright.formulations.plans.periodic import iteration_seconds, latency
    from stagewright.graphs.documents.units import format_seconds

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
    from stagewright.graphs.documents.units import format_seconds

    lines = [
        f"cost   {format_seconds(certificate.cost_seconds)} per iteration",
    ]
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
