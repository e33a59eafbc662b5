"""Latency of one sample beside published placements: ``python -m benchmarks dags_latency``.

The inputs are ``latency-inputs`` of github.com/msr-fiddle/dnn-partitioning at b207b6a. The
environment's ``LATENCY_INPUTS`` is that folder.
"""

import os
from pathlib import Path

from rich.progress import track

from benchmarks.report import Table, percent
from benchmarks.spec import BenchSpec
from stagewright.formulations.dags.latency import latency_problem
from stagewright.formulations.forms.answers import Limits
from stagewright.graphs.importers.dnn_partitioning import read_workload
from stagewright.solvers.dags.latency import place_for_latency

INPUTS = "LATENCY_INPUTS"
SHARED = Path(__file__).parents[2] / "shared" / "data" / "latency"
LIMITS = Limits(60)


def folder() -> Path:
    """Where the inputs are, if they are there."""
    return Path(os.environ.get(INPUTS, SHARED))


# Name, and latencies (ms) that the published program computes: of its greedy placement, and of the
# placement of least load that the published dynamic program finds (None: none within 15 minutes).
STUDY = BenchSpec(
    "dags_latency",
    lambda case: latency_problem(read_workload(folder() / f"{case[0]}_inference.json")),
    (
        ("LayerGraphs/bert24", 100.219, 108.031),
        ("LayerGraphs/gnmt", 268.500, 244.331),
        ("LayerGraphs/resnet50", 4197.055, 1443.793),
        ("LayerGraphs/inceptionv3", 2485.240, None),
        ("OperatorGraphs/bert_l-3", 416.204, 414.441),
        ("OperatorGraphs/bert_l-6", 494.135, 444.020),
        ("OperatorGraphs/bert_l-12", 867.839, 1327.031),
        ("OperatorGraphs/resnet50", 839.536, 1123.653),
    ),
)


def tables(quick: bool) -> list[Table]:
    """Latencies, bounds and seconds of each input; none without the inputs."""
    if not folder().is_dir():
        print(
            f"dags_latency: no {folder()}; set {INPUTS} to latency-inputs of "
            "github.com/msr-fiddle/dnn-partitioning (b207b6a)"
        )
        return []
    rows: list[tuple[object, ...]] = []
    place_for_latency(STUDY.build(STUDY.sweep[0]), LIMITS)
    for case in track(STUDY.cases(quick), "inputs"):
        name, greedy, load = case
        problem = STUDY.build(case)
        found = place_for_latency(problem, LIMITS)
        assert found.cost is not None
        size = (len(problem.names), problem.accelerators, greedy, load)
        ours = (found.cost * 1e3, found.status.value, found.bound * 1e3, percent(found.gap))
        rows.append((name, *size, *ours, found.proved_by, found.seconds))
    columns = ("input", "nodes", "accelerators", "greedy ms", "max-load ms", "ours ms", "status",
               "bound ms", "gap", "by", "s")  # fmt: skip
    title = f"Latency of one sample within {LIMITS.seconds:g} s: Tarnawski et al.'s inputs"
    return [Table("dags-latency", title, columns, tuple(rows))]
