"""Computed throughputs of trainings in the table of a workload, and read from it."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from stagewright.graphs.workloads.jobs import Computed, Rate, Throughputs, Workload
from stagewright.service.clusters.answers import ComputedRate


def with_rates(workload: Workload, prices: Iterable[ComputedRate]) -> Workload:
    """The workload with computed rates and checkpoints in place of its trainings."""
    found = {(one.model, one.scale, one.accelerator): one for one in workload.throughputs.alone}
    moves: dict[str, float | None] = {}
    for one in prices:
        moves[one.model] = moves.get(one.model) or one.checkpoint_seconds
        key, rate = (one.model, one.count, one.accelerator), one.steps_per_second
        how = Computed(**one.model_dump(include={*Computed.__dataclass_fields__}))
        if one.placement == "consolidated":
            found[key] = Rate(*key, rate, computed=how)
        else:
            found[key] = replace(found[key], spread_steps_per_second=rate, spread_computed=how)
    jobs = (
        replace(job, checkpoint_seconds=moves.get(job.model))
        if job.checkpoint_seconds is None
        else job
        for job in workload.jobs
    )
    table = replace(workload.throughputs, alone=tuple(found.values()))
    return replace(workload, jobs=tuple(jobs), throughputs=table, trainings=())


def computed_rates(throughputs: Throughputs) -> Iterator[ComputedRate]:
    """The rates that were computed, also before; what is not among them is measured."""
    for one in throughputs.alone:
        for placement, rate, how in (
            ("consolidated", one.steps_per_second, one.computed),
            ("spread", one.spread_steps_per_second, one.spread_computed),
        ):
            if how is not None:
                yield ComputedRate.of(
                    how,
                    model=one.model,
                    accelerator=one.accelerator,
                    count=one.scale,
                    placement=placement,
                    steps_per_second=rate,
                )


def measured_rates(throughputs: Throughputs) -> Iterator[str]:
    """The rates that are measured while others are computed, in words."""
    if any(one.computed for one in throughputs.alone):
        for one in throughputs.alone:
            if one.computed is None:
                yield f"{one.model} on {one.scale} {one.accelerator}"
