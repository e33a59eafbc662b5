"""Partitions, latencies and pipelines of operator graphs beside published ones.

The inputs of latencies are ``latency-inputs`` of github.com/msr-fiddle/dnn-partitioning at b207b6a,
the folder that ``LATENCY_INPUTS`` of the environment names.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from time import process_time
from typing import TypeVar

from rich.progress import track

from benchmarks.report import Table, percent
from benchmarks.spec import BenchSpec
from stagewright.formulations.dags.latency import latency_problem
from stagewright.formulations.dags.piper import PiperProblem, piper_problem
from stagewright.formulations.dags.workloads import dag_problem
from stagewright.formulations.forms.answers import Limits
from stagewright.graphs.importers.dnn_partitioning import read_workload
from stagewright.graphs.importers.piper import read_piper
from stagewright.solvers.dags.latency import place_for_latency
from stagewright.solvers.dags.partition import partition
from stagewright.solvers.dags.piper import piper_pipeline

DATA = Path(__file__).parents[2] / "shared" / "data"
DOWNSETS, PIPER = DATA / "downsets", DATA / "piper"
LATENCY = Path(os.environ.get("LATENCY_INPUTS", DATA / "latency"))
LIMITS = Limits(60)
GIB = 2**30
T = TypeVar("T")
Row = tuple[object, ...]

# Name, and of the published program: optimum (ms), downsets and CPU seconds on two cores.
PARTITIONS = BenchSpec(
    "dags",
    lambda case: dag_problem(read_workload(DOWNSETS / f"{case[0]}.json")),
    (
        ("LayerGraphs_bert24_inference", 17.7899, 30, 0.01),
        ("LayerGraphs_bert24_training", 41.7458, 30, 0.01),
        ("LayerGraphs_resnet50_inference", 33.7747, 242, 0.06),
        ("LayerGraphs_resnet50_training", 78.6318, 242, 0.10),
        ("LayerGraphs_gnmt_inference", 32.9107, 17_914, 9.1),
        ("LayerGraphs_gnmt_training", 107.004, 17_914, 16.6),
        ("LayerGraphs_inceptionv3_inference", None, 36_596, None),
        ("OperatorGraphs_bert_l-3_inference", 27.9186, 1_428, 0.48),
        ("OperatorGraphs_bert_l-3_training", 65.3031, 2_774, 2.8),
        ("OperatorGraphs_bert_l-6_inference", 29.5795, 1_923, 1.75),
    ),
)


# Name, and latencies (ms) that the published program computes: of its greedy placement, and of the
# placement of least load that the published dynamic program finds (None: none within 15 minutes).
LATENCIES = BenchSpec(
    "dags_latency",
    lambda case: latency_problem(read_workload(LATENCY / f"{case[0]}_inference.json")),
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


def _build(case: tuple[str, int, float, float | None, float | None]) -> PiperProblem:
    name, devices, gigabytes, *_ = case
    workload = read_piper(PIPER / f"{name}.json")
    return piper_problem(workload, devices=devices, memory=gigabytes * GIB, bandwidth=25 * GIB)


# Name, devices, GiB, and of the published program: seconds per sample (None: infeasible), CPU s.
PIPELINES = BenchSpec(
    "piper",
    _build,
    (
        ("bert32a100", 8, 2, None, 0.052),
        ("bert32a100", 16, 2, None, 0.07),
        ("bert32a100", 32, 2, 0.0665495, 0.13),
        ("bert32a100", 64, 2, 0.0320301, 0.2),
        ("bert32a100", 128, 2, 0.0151464, 0.38),
        ("bert32a100", 256, 2, 0.00758007, 1),
        ("bert32a100", 512, 2, 0.00366753, 3.6),
        ("bert32a100", 1024, 2, 0.00184063, 13),
        ("bert32a100", 2048, 2, 0.000927184, 57),
        ("bert32a100", 8, 8, 0.165856, 0.049),
        ("bert32a100", 16, 8, 0.0829622, 0.07),
        ("bert32a100", 32, 8, 0.0415155, 0.11),
        ("bert32a100", 64, 8, 0.0202006, 0.19),
        ("bert32a100", 128, 8, 0.0101209, 0.26),
        ("bert32a100", 256, 8, 0.00508105, 0.73),
        ("bert32a100", 512, 8, 0.00256113, 2.3),
        ("bert32a100", 1024, 8, 0.00130318, 4.6),
        ("bert32a100", 2048, 8, 0.000703591, 51),
        ("bert32a100", 8, 80, 0.122007, 0.043),
        ("bert32a100", 16, 80, 0.0612318, 0.076),
        ("bert32a100", 32, 80, 0.030844, 0.14),
        ("bert32a100", 64, 80, 0.0156502, 0.27),
        ("bert32a100", 128, 80, 0.00805324, 0.56),
        ("bert32a100", 256, 80, 0.0042517, 1.2),
        ("bert32a100", 512, 80, 0.00227252, 2.9),
        ("bert32a100", 1024, 80, 0.00115876, 6.5),
        ("bert32a100", 2048, 80, 0.000663713, 49),
        ("resnet", 8, 4, 73.4933, 2.7),
        ("resnet", 8, 8, 63.4335, 3),
        ("resnet", 16, 2, 76.5213, 4.2),
        ("resnet", 16, 4, 35.3334, 4.3),
        ("resnet", 16, 8, 31.6344, 4.7),
        ("resnet", 32, 1.5, 50.9772, 5.9),
        ("resnet", 32, 2, 24.6259, 6.2),
        ("resnet", 32, 4, 17.624, 6.3),
        ("resnet", 32, 8, 15.758, 7.2),
        ("resnet", 64, 1, None, 7.8),
        ("resnet", 64, 1.5, 16.9921, 8.2),
        ("resnet", 64, 2, 11.3338, 7.8),
        ("resnet", 64, 4, 8.66677, 8.4),
        ("resnet", 128, 1, 19.8563, 10),
        ("resnet", 128, 1.5, 7.02493, 11),
        ("resnet", 128, 2, 5.40608, 12),
        ("resnet", 128, 4, 4.30571, 13),
        ("resnet", 128, 16, 3.65986, 19),
    ),
)


def tables(quick: bool) -> Iterator[Table]:
    """The tables whose inputs are there; what is timed was compiled before."""
    if DOWNSETS.is_dir():
        partition(PARTITIONS.build(PARTITIONS.sweep[0]), LIMITS)
        yield Table(
            "dags",
            "Largest load of contiguous partitions: Tarnawski et al.'s inputs",
            ("input", "published ms", "ours ms", "status", "downsets", "ours", "sets priced",
             "published CPU s", "our CPU s"),
            tuple(map(_partition, track(PARTITIONS.cases(quick), "partitions"))),
        )  # fmt: skip
    if LATENCY.is_dir():
        place_for_latency(LATENCIES.build(LATENCIES.sweep[0]), LIMITS)
        yield Table(
            "dags-latency",
            f"Latency of one sample within {LIMITS.seconds:g} s: Tarnawski et al.'s inputs",
            ("input", "nodes", "accelerators", "greedy ms", "max-load ms", "ours ms", "status",
             "bound ms", "gap", "by", "s"),
            tuple(map(_latency, track(LATENCIES.cases(quick), "latencies"))),
        )  # fmt: skip
    if PIPER.is_dir():
        for case in PIPELINES.cases(quick=True):
            piper_pipeline(PIPELINES.build(case), LIMITS)
        yield Table(
            "piper",
            "Time per sample of pipelines: Piper's inputs, 25 GiB/s",
            ("input", "GiB", "devices", "published s", "ours s", "status",
             "stages priced", "published CPU s", "our CPU s"),
            tuple(map(_pipeline, track(PIPELINES.cases(quick), "pipelines"))),
        )  # fmt: skip


def _timed(solve: Callable[[], T]) -> tuple[T, float]:
    """What is found, and the CPU seconds."""
    began = process_time()
    found = solve()
    return found, process_time() - began


def _partition(case: tuple[str, float | None, int, float | None]) -> Row:
    name, optimum, listed, published = case
    problem = PARTITIONS.build(case)
    found, spent = _timed(lambda: partition(problem, LIMITS))
    assert found.cost is not None
    ours = (found.cost * 1e3, found.status.value, listed, found.downsets, found.pairs)
    return (name.partition("_")[2].replace("_", " "), optimum, *ours, published, spent)


def _latency(case: tuple[str, float, float | None]) -> Row:
    name, greedy, load = case
    problem = LATENCIES.build(case)
    found = place_for_latency(problem, LIMITS)
    assert found.cost is not None
    size = (len(problem.names), problem.accelerators, greedy, load)
    ours = (found.cost * 1e3, found.status.value, found.bound * 1e3, percent(found.gap))
    return (name, *size, *ours, found.proved_by, found.seconds)


def _pipeline(case: tuple[str, int, float, float | None, float | None]) -> Row:
    name, devices, gigabytes, published, spent = case
    problem = PIPELINES.build(case)
    found, ours = _timed(lambda: piper_pipeline(problem, LIMITS))
    shown = (name, f"{gigabytes:g}", devices, _seconds(published), _seconds(found.cost))
    return (*shown, found.status.value, found.priced, spent, ours)


def _seconds(value: float | None) -> str:
    return "infeasible" if value is None else f"{value:.6g}"
