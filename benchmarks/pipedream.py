"""The profiles that PipeDream's authors measured: every planner, and the reference answers.

They are read from the folder ``shared/data/pipedream`` beside the checkout and are not part of
this repository. A profile's batch is taken as one microbatch. Large profiles are contracted at
the cuts that one output crosses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time

import numpy as np

from benchmarks.report import Table, percent
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.bppm import StageChoice
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.importers.pipedream import read_pipedream
from stagewright.graphs.machines.cluster import Cluster, Link, uniform_servers
from stagewright.graphs.models.chain import Chain
from stagewright.solvers.planners.baselines.hierarchy import hierarchy_of, optimize, placed
from stagewright.solvers.planners.baselines.pipedream import costs_of, optimum, partition
from stagewright.solvers.planning import plan

DATA = Path(__file__).parents[2] / "shared" / "data" / "pipedream"
MISSING = f"skipped: the public profiles are not in {Path(*DATA.parts[-3:])} beside the checkout"
MICROBATCHES = 8
CONTRACTED_FROM = 100  # layers
PLANNERS = ("spp", "dp", "gpipe", "pipedream", "hetpipe", "auto")
PROFILES = (
    "alexnet", "vgg16", "resnet50", "resnet101", "densenet121", "inception_v3", "gnmt",
    "gnmt_large",
)  # fmt: skip


SAMPLES = {
    "alexnet": 256, "vgg16": 128, "resnet50": 128, "resnet101": 64, "densenet121": 64,
    "inception_v3": 128, "gnmt": 64, "gnmt_large": 64,
}  # fmt: skip
"""Samples of the profiled mini-batches, which the files do not say.

From the bytes of a layer of known shape; of GNMT as in PipeDream's paper.
"""


def read_profile(profile: str, contract: bool = False) -> Chain:
    """The chain of a profile; a microbatch is the profiled mini-batch."""
    path, samples = DATA / f"{profile}.graph.txt", SAMPLES[profile]
    return read_pipedream(path, microbatch_size=samples, contract=contract)


def clusters() -> tuple[Cluster, ...]:
    """V100 servers as in table 2.1 of Narayanan's thesis (A: PCIe, 10 Gbps; B: NVLink, 25 Gbps)."""
    return (
        uniform_servers(1, 4, Link(12e9), name="1x4"),
        uniform_servers(4, 4, Link(12e9), Link(1.25e9), name="A 4x4"),
        uniform_servers(2, 8, Link(30e9), Link(3.125e9), name="B 2x8"),
    )


def problem(case: tuple[str, Cluster]) -> PipelineProblem:
    """A profile on a cluster."""
    profile, cluster = case
    chain = read_profile(profile)
    if len(chain) >= CONTRACTED_FROM:
        chain = read_profile(profile, contract=True)
    return PipelineProblem(chain, cluster, MICROBATCHES)


def planners_table(profiles: Sequence[str], seconds: float) -> Table:
    """Every planner's seconds per iteration, and the best plan's certified gap."""
    rows = []
    for profile in profiles:
        for cluster in clusters():
            asked = problem((profile, cluster))
            results = {name: plan(asked, name, Limits(seconds)) for name in PLANNERS}
            costs = {name: result.cost for name, result in results.items()}
            lost = [
                name
                for name in PLANNERS[1:-1]
                if costs["spp"] and (costs[name] or costs["spp"]) < costs["spp"] * (1 - 1e-9)
            ]
            best = results["auto"]
            rows.append(
                (
                    profile,
                    len(asked.chain),
                    cluster.name,
                    *costs.values(),
                    percent(results["spp"].gap),
                    percent(best.gap),
                    best.proved_by,
                    ", ".join(lost) or "none",
                )
            )
    columns = ("profile", "layers", "cluster", *PLANNERS, "gap of spp", "gap of auto", "proved by",
               "spp slower than")  # fmt: skip
    title = f"Seconds per iteration of {MICROBATCHES} microbatches, and gap to the certified bound"
    return Table("pipedream-planners", title, columns, tuple(rows))


@dataclass(frozen=True, slots=True)
class Reference:
    """What PipeDream's own optimizer answers on one level of equal devices, transfers counted."""

    profile: str
    devices: int
    bandwidth: float
    replicas: tuple[int, ...]
    cuts: tuple[int, ...] | None
    slowest_seconds: float


REFERENCES = (
    Reference("vgg16", 4, 1e9, (3, 1), (17,), 0.205521),
    Reference("vgg16", 16, 3.125e9, (15, 1), (25,), 0.045525),
    Reference("alexnet", 4, 1e9, (3, 1), None, 0.034217),
    Reference("gnmt", 4, 1e9, (1, 1, 1, 1), None, 0.025868),
)


def reference_problem(reference: Reference) -> PipelineProblem:
    """The profile, not contracted, on devices that all see one bandwidth."""
    chain = read_profile(reference.profile)
    return PipelineProblem(
        chain, uniform_servers(1, reference.devices, Link(reference.bandwidth)), 1
    )


def thesis_seconds(asked: PipelineProblem) -> float:
    """The slowest stage or channel by the thesis's formula, max(compute, all-reduce)."""
    return optimum(asked).seconds


def public_code_seconds(asked: PipelineProblem, stages: Sequence[StageChoice]) -> float:
    """The same stages by the formula of PipeDream's public code.

    A stage on m devices takes (sum T + 4 (m - 1) / m sum w / B) / m: compute and all-reduce one
    after the other, where the thesis overlaps them; a channel takes 2 a / B.
    """
    bandwidth = float(asked.cluster.bandwidth.min())
    costs = asked.costs(asked.kinds[0], 1)
    work = costs.forward_seconds + costs.backward_seconds
    slowest = 0.0
    for stage in stages:
        m = len(stage.devices)
        reduced = 4 * (m - 1) / m * asked.gradient_bytes(stage.start, stage.stop) / bandwidth
        slowest = max(slowest, (work[stage.start : stage.stop].sum() + reduced) / m)
        if stage.stop < len(work):
            slowest = max(slowest, 2 * asked.boundary_bytes(stage.stop) / bandwidth)
    return float(slowest)


def references_table() -> Table:
    """PipeDream's shipped answers beside those of the planner ``pipedream``."""
    rows = []
    for reference in REFERENCES:
        asked = reference_problem(reference)
        stages = partition(asked)
        thesis, public = thesis_seconds(asked), public_code_seconds(asked, stages)
        rows.append(
            (
                reference.profile,
                f"{reference.devices} at {reference.bandwidth / 1e9:g} GB/s",
                "-".join(str(len(stage.devices)) for stage in stages),
                " ".join(str(stage.stop) for stage in stages[:-1]),
                tuple(len(stage.devices) for stage in stages) == reference.replicas,
                f"{reference.slowest_seconds:.6f}",
                f"{public:.6f}",
                f"{thesis:.6f}",
            )
        )
    columns = ("profile", "devices", "our replicas", "our cuts", "replicas as PipeDream's",
               "its slowest s", "ours by the public code's formula",
               "ours by the thesis's formula")  # fmt: skip
    return Table("pipedream-references", "PipeDream's own answers", columns, tuple(rows))


HIERARCHIES = (
    ("gnmt_large", (1, 16), (1.25e9,), 13, 0.058971, 33.9),
    ("resnet50", (4, 4), (12e9, 1.25e9), 9, 0.028667, 22.8),
    ("resnet50", (2, 8), (30e9, 3.125e9), None, None, None),
    ("gnmt_large", (4, 4), (12e9, 1.25e9), None, None, None),
    ("gnmt_large", (2, 8), (30e9, 3.125e9), None, None, None),
)
"""Profile, servers x devices, bandwidths, and PipeDream's stages, slowest stage and seconds.

It counts no transfers here, and an all-reduce after the computation. None: no answer in 90 s.
"""


def hierarchies_table() -> Table:
    """The recurrence as PipeDream's public code has it; CPU seconds after the compilation."""
    rows: list[tuple[object, ...]] = []
    for profile, shape, bandwidths, stages, slowest, seconds in HIERARCHIES:
        chain = read_profile(profile)
        cluster = uniform_servers(*shape, *(Link(one) for one in bandwidths))
        costs = costs_of(PipelineProblem(chain, cluster, 1), memory=False)
        costs = replace(costs, output_bytes=np.zeros(len(chain)))
        hierarchy = hierarchy_of(cluster)
        optimize(costs, hierarchy, overlapped=False)
        began = process_time()
        found = optimize(costs, hierarchy, overlapped=False)
        spent = process_time() - began
        ours = float(found[-1].slowest[0, -1, -1])
        levels = f"{shape[0]}x{shape[1]}"
        shown = "over 90" if seconds is None else seconds
        count = len(placed(found, hierarchy))
        rows.append((profile, levels, stages, count, slowest, f"{ours:.6f}", shown, f"{spent:.3f}"))
    columns = ("profile", "servers x devices", "its stages", "ours", "its slowest s", "ours",
               "its seconds", "our CPU s")  # fmt: skip
    return Table("pipedream-hierarchies", "PipeDream's recurrence on levels", columns, tuple(rows))


def tables(quick: bool) -> list[Table]:
    """The tables; nothing where the profiles are absent."""
    if not DATA.is_dir():
        print(MISSING)
        return []
    profiles = PROFILES[:2] if quick else PROFILES
    return [
        references_table(),
        hierarchies_table(),
        planners_table(profiles, 1.0 if quick else 10.0),
    ]
