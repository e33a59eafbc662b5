"""What the published schedules lose on measured, unequal stages.

The layers of a profile, with embedding and head, are cut into chunks of nearly equal time for the
placement of each schedule. Beside it stands the best schedule of the same chunks within the peak
memory of the published one, with its bound.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from benchmarks.report import Table, percent
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.grouped_stages import GroupedStages
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.pipelines.windows import stage_times, timetable_of_order
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.structure import Structure
from stagewright.formulations.schedules.order import Device, Order, placed
from stagewright.formulations.schedules.published.kinds import KINDS, Sizes, schedule_of
from stagewright.formulations.schedules.timing import ActivationMemory
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import load_model
from stagewright.solvers.pipelines.rows.search import compile_row_kernels
from stagewright.solvers.pipelines.scheduling import solve_schedule
from stagewright.solvers.planners.structures.arrangements import balanced_cuts

PROFILES = Path(__file__).parent.parent / "examples" / "profiles"
LINK = Link(12.5e9, 1e-5)
CASES = (
    ("bert-large.v100", 4, 16), ("bert-large.v100", 8, 32), ("gpt-12x512.cpu", 4, 16),
    ("resnet50.cpu", 4, 16), ("xlnet-large.v100", 8, 32),
)  # fmt: skip
SECONDS = 10.0  # for the best schedule
COLUMNS = (
    "profile", "devices", "M", "schedule", "placement", "ms", "peak GB", "best ms", "bound ms",
    "loss", "gap of the best",
)  # fmt: skip


def tables(quick: bool) -> Iterator[Table]:
    """One table: every schedule on every profile."""
    compile_row_kernels()
    limits = Limits(seconds=0.2 if quick else SECONDS)
    rows = [row for case in CASES[: 1 if quick else None] for row in _rows(*case, limits)]
    title = (
        f"Published schedules of unequal stages, and the best in their memory after {SECONDS:g} s"
    )
    yield Table("unequal", title, COLUMNS, tuple(rows))


def _rows(profile: str, devices: int, count: int, limits: Limits) -> Iterator[tuple[object, ...]]:
    chain = load_model(PROFILES / f"{profile}.json")
    kind = chain.layers[0].costs[0].device_kind or "any"
    cluster = uniform_servers(devices, 1, LINK, LINK, kind=kind, memory_bytes=1e12)
    problem = PipelineProblem(chain, cluster, count)
    for name, described in KINDS.items():
        if described.weights != "flush" or described.placement == "both directions":
            continue
        chunks = described.chunks.step if described.chunks.fixed else 2
        path = placed(described.placement, devices, chunks)
        grouped = _stages(problem, path, described.is_split)
        scheduling = next(grouped.problems())
        sizes = Sizes(devices, count, chunks, times=stage_times(scheduling))
        try:
            order = schedule_of(name, sizes)
        except InputError:
            continue  # not of these sizes
        figures = _compared(scheduling, tuple(grouped.work.kept.tolist()), order, limits)
        yield (chain.name, devices, count, name, described.placement, *figures)


def _stages(problem: PipelineProblem, path: Device, split: bool) -> GroupedStages:
    """Balanced chunks of the layers, with the devices of a path."""
    cuts = balanced_cuts(problem, [(d,) for d in path], round_robin=False)
    assert cuts is not None
    names = [device.name for device in problem.cluster.devices]
    stages = tuple(
        Stage(layers, (names[d],)) for layers, d in zip(pairwise(cuts), path, strict=True)
    )
    return GroupedStages.of(problem, Structure(stages, (split,) * len(stages)))


def _compared(
    problem: MakespanProblem, kept: tuple[float, ...], order: Order, limits: Limits
) -> tuple[object, ...]:
    """The figures of an order, and those of the best one within its peak memory."""
    devices = 1 + max(problem.device)
    peak = max(ActivationMemory(kept, kept, (math.inf,) * devices).peaks(order))
    _, timetable = timetable_of_order(problem, order)
    limited = replace(
        problem, saved=tuple((one, 0.0, one) for one in kept), memory=(peak,) * devices
    )
    cost = limited.evaluate(timetable)
    best = solve_schedule(limited, "optimal", limits, incumbent=timetable)
    assert best.cost is not None
    return (
        f"{cost * 1e3:.1f}", f"{peak / 1e9:.3f}", f"{best.cost * 1e3:.1f}",
        f"{best.bound * 1e3:.1f}", percent(cost / best.cost - 1), percent(best.gap),
    )  # fmt: skip
