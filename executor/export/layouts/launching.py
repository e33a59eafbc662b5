"""How an exported layout is started: one script per rank, and what starts it on every device."""

from typing import Any

from stagewright.executor.export import launchers
from stagewright.executor.export.layouts.common import nodes
from stagewright.executor.export.layouts.rules import described
from stagewright.executor.export.options import FormatOptions
from stagewright.formulations.parallelism.training import TrainingProblem

SCRIPT = "train.sh"
LAUNCHERS = (launchers.torchrun, launchers.slurm, launchers.jobset, launchers.mpi)

_HEAD = """\
#!/usr/bin/env bash
# One rank of the run. Started on every device by one of run.sh (torchrun, on every node),
# job.sbatch (Slurm, submitted in this folder), jobset.yaml (Kubernetes, with this folder as the
# container's working directory) and mpirun.sh (Open MPI). To add in the environment before:
"""


def launch_files(
    to: str, problem: TrainingProblem, options: FormatOptions, short: bool = False
) -> dict[str, str]:
    """The script of a rank, which begins with what the user must add, and those that start it.

    A ``short`` run only measures: few iterations, every one logged, nothing saved.
    """
    of = described(to)
    if short:
        of = of | of.get("short", {})
    count, each = nodes(problem)
    launch = launchers.Launch(
        problem.architecture.name,
        (launchers.LaunchNode((), tuple(range(each))),) * count,
        ("bash", SCRIPT),
        options,
        tuple(of["add"]),
    )
    asked = "".join(f': "${{{name}:?{what}}}"\n' for name, what in of["add"].items())
    files = {SCRIPT: f"{_HEAD}{asked}set -euo pipefail\n{_filled(of, problem)}\n"}
    for write in LAUNCHERS:
        files |= write(launch)
    return files


def _filled(of: dict[str, Any], problem: TrainingProblem) -> str:
    start: str = of["start"].strip()
    return start.replace("VOCABULARY", str(problem.architecture.vocabulary))
