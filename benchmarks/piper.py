"""Piper's pipelines beside the published program: ``python -m benchmarks piper``."""

from pathlib import Path
from time import process_time

from rich.progress import track

from benchmarks.report import Table
from benchmarks.spec import BenchSpec
from stagewright.formulations.dags.piper import PiperProblem, piper_problem
from stagewright.formulations.forms.answers import Limits
from stagewright.graphs.importers.piper import read_piper
from stagewright.solvers.dags.piper import piper_pipeline

INPUTS = Path(__file__).parents[2] / "shared" / "data" / "piper"
LIMITS = Limits(60)
GIB = 2**30


def _build(case: tuple[str, int, float, float | None, float | None]) -> PiperProblem:
    name, devices, gigabytes, *_ = case
    workload = read_piper(INPUTS / f"{name}.json")
    return piper_problem(workload, devices=devices, memory=gigabytes * GIB, bandwidth=25 * GIB)


# Name, devices, GiB, and of the published program: seconds per sample (None: infeasible), CPU s.
STUDY = BenchSpec(
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


def tables(quick: bool) -> list[Table]:
    """The optima and the CPU seconds, compiled before, of each input; none without the inputs."""
    if not INPUTS.is_dir():
        return []
    rows: list[tuple[object, ...]] = []
    for case in STUDY.cases(quick=True):
        piper_pipeline(STUDY.build(case), LIMITS)
    for case in track(STUDY.cases(quick), "inputs"):
        name, devices, gigabytes, published, spent = case
        problem = STUDY.build(case)
        began = process_time()
        found = piper_pipeline(problem, LIMITS)
        ours = process_time() - began
        shown = (name, f"{gigabytes:g}", devices, _seconds(published), _seconds(found.cost))
        rows.append((*shown, found.status.value, found.upsets, found.priced, spent, ours))
    columns = ("input", "GiB", "devices", "published s", "ours s", "status", "upsets",
               "stages priced", "published CPU s", "our CPU s")  # fmt: skip
    title = "Time per sample of pipelines: Piper's inputs, 25 GiB/s"
    return [Table("piper", title, columns, tuple(rows))]


def _seconds(value: float | None) -> str:
    return "infeasible" if value is None else f"{value:.6g}"
