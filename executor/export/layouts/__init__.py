"""Export parallel layouts of a transformer to the frameworks that train them, or as a plan.

What a format cannot express is refused by name, never dropped.
"""

from collections.abc import Sequence
from typing import Any

from stagewright.executor.export import kubernetes, launchers
from stagewright.executor.export.layouts import (
    accelerate,
    deepspeed,
    hugging_face,
    megatron,
    nnscaler,
    plan,
    recipes,
    torchtitan,
)
from stagewright.executor.export.layouts.common import nodes
from stagewright.executor.export.layouts.rules import described
from stagewright.executor.export.options import FormatOptions
from stagewright.formulations.parallelism.document import LayoutPlan
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem, require_layout
from stagewright.graphs.documents.errors import InputError

LAYOUT_FORMATS = {
    "megatron": megatron.FRAMEWORK,
    "megatron-bridge": recipes.BRIDGE,
    "nemo": recipes.NEMO,
    "torchtitan": torchtitan.FRAMEWORK,
    "deepspeed": deepspeed.FRAMEWORK,
    "accelerate": accelerate.FRAMEWORK,
    "axolotl": hugging_face.AXOLOTL,
    "trl": hugging_face.TRL,
    "transformers": hugging_face.DISTRIBUTED,
    "nnscaler": nnscaler.FRAMEWORK,
}
"""The frameworks; next to them there is :data:`PLAN`."""

PLAN = "plan"
EVERY_FORMAT = {**LAYOUT_FORMATS, PLAN: plan.FRAMEWORK}


def export_layout(
    problem: TrainingProblem,
    layout: Layout,
    to: str,
    names: Sequence[str] | None = None,
    options: FormatOptions | None = None,
    short: bool = False,
    certify: plan.Certify | None = None,
) -> dict[str, str]:
    """The texts of the files of ``layout`` in the format ``to``, by file name, with launch scripts.

    ``names`` are those of the layers in the module that is run, only for a plan. A ``short`` run
    only measures: few iterations, every one logged, nothing saved. ``certify`` adds bounds to the
    plan that a layout becomes. Raises InputError if the format
    is unknown or takes no names, the layout breaks a rule of the problem, or the format cannot
    express one of its features.
    """
    if to not in EVERY_FORMAT:
        raise InputError(f"--to {to!r} is not known; there are {', '.join(EVERY_FORMAT)}")
    if names is not None and to != PLAN:
        raise InputError(f"--model gives the names of layers, which only --to {PLAN} takes")
    _require(to, problem, layout)
    if to == PLAN:
        return plan.documents(problem, layout, names, certify)
    files = EVERY_FORMAT[to].files(problem, layout)
    return files | launch_files(to, problem, options or FormatOptions(), short)


def _require(to: str, problem: TrainingProblem, layout: Layout) -> None:
    require_layout(problem, layout)
    problem.architecture.require_sequence(problem.sequence)
    require_framework(to, problem, layout)


def shared_files(made: LayoutPlan, to: str) -> dict[str, str]:
    """The files of a framework for a layout, and the script of a rank, but none that starts it.

    Raises InputError as :func:`export_layout`.
    """
    _require(to, made.problem, made.layout)
    script = rank_script(to, made.problem, head=_SHARED_HEAD)
    return {**EVERY_FORMAT[to].files(made.problem, made.layout), SCRIPT: script}


def require_framework(to: str, problem: TrainingProblem, layout: Layout | None = None) -> None:
    """Raise for the first rule of a framework that a possible layout breaks, or without one all.

    Raises InputError with the rule, what would do, the rule's source, and frameworks that can.
    """
    asked = (problem, layout or Layout(), layout is None)
    for _, wrong in EVERY_FORMAT[to].broken(*asked):
        can = [name for name, one in LAYOUT_FORMATS.items() if not any(one.broken(*asked))]
        raise InputError(wrong + (f"; {' or '.join(can[:3])} can" if can else ""))


SCRIPT = "train.sh"
LAUNCHERS = (launchers.torchrun, launchers.slurm, kubernetes.jobset, launchers.mpi)

_HEAD = """\
#!/usr/bin/env bash
# One rank of the run. Started on every device by one of run.sh (torchrun, on every node),
# job.sbatch (Slurm, submitted in this folder), jobset.yaml (Kubernetes, with this folder as the
# container's working directory) and mpirun.sh (Open MPI). To add in the environment before:
"""


_SHARED_HEAD = """\
#!/usr/bin/env bash
# One rank of the run, started on every device with the environment that the job was given:
"""


def launch_files(
    to: str, problem: TrainingProblem, options: FormatOptions, short: bool = False
) -> dict[str, str]:
    """The script of a rank, which begins with what the user must add, and those that start it.

    A ``short`` run only measures: few iterations, every one logged, nothing saved.
    """
    count, each = nodes(problem)
    launch = launchers.Launch(
        problem.architecture.name,
        (launchers.LaunchNode((), tuple(range(each))),) * count,
        ("bash", SCRIPT),
        options,
        tuple(added(to, short)),
    )
    files = {SCRIPT: rank_script(to, problem, short)}
    for write in LAUNCHERS:
        files |= write(launch)
    return files


def added(to: str, short: bool = False) -> dict[str, str]:
    """What the user adds in the environment of a rank of a framework: names, and what they are."""
    found: dict[str, str] = _run_of(to, short)["add"]
    return found


def _run_of(to: str, short: bool) -> dict[str, Any]:
    of = described(to)
    return of | of.get("short", {}) if short else of


def rank_script(to: str, problem: TrainingProblem, short: bool = False, head: str = _HEAD) -> str:
    """The script of a rank, which begins with what the user must add."""
    asked = "".join(f': "${{{name}:?{what}}}"\n' for name, what in added(to, short).items())
    start = _run_of(to, short)["start"].strip()
    start = start.replace("VOCABULARY", str(problem.architecture.vocabulary))
    return f"{head}{asked}set -euo pipefail\n{start}\n"
