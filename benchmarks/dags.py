"""Partitions of operator graphs beside the published optima: ``python -m benchmarks dags``."""

from pathlib import Path
from time import process_time

from rich.progress import track

from benchmarks.report import Table
from benchmarks.spec import BenchSpec
from stagewright.formulations.dags.workloads import dag_problem
from stagewright.formulations.forms.answers import Limits
from stagewright.graphs.importers.dnn_partitioning import read_workload
from stagewright.solvers.dags.partition import partition

INPUTS = Path(__file__).parents[2] / "shared" / "data" / "downsets"
LIMITS = Limits(60)

# Name, and of the published program: optimum (ms), downsets and CPU seconds on two cores.
STUDY = BenchSpec(
    "dags",
    lambda case: dag_problem(read_workload(INPUTS / f"{case[0]}.json")),
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


def tables(quick: bool) -> list[Table]:
    """The optima and the CPU seconds, compiled before, of each input; none without the inputs."""
    if not INPUTS.is_dir():
        return []
    rows: list[tuple[object, ...]] = []
    partition(STUDY.build(STUDY.sweep[0]), LIMITS)
    for case in track(STUDY.cases(quick), "inputs"):
        name, optimum, listed, published = case
        problem = STUDY.build(case)
        began = process_time()
        found = partition(problem, LIMITS)
        spent = process_time() - began
        assert found.cost is not None
        shown = name.partition("_")[2].replace("_", " ")
        ours = (found.cost * 1e3, found.status.value, listed, found.downsets, found.pairs)
        rows.append((shown, optimum, *ours, published, spent))
    columns = ("input", "published ms", "ours ms", "status", "downsets", "ours", "sets priced",
               "published CPU s", "our CPU s")  # fmt: skip
    title = "Largest load of contiguous partitions: Tarnawski et al.'s inputs"
    return [Table("dags", title, columns, tuple(rows))]
