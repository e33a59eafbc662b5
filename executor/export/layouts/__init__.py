"""Export parallel layouts of a transformer to the frameworks that train them, or as a plan.

What a format cannot express is refused by name, never dropped.
"""

from collections.abc import Sequence

from stagewright.executor.export.layouts import (
    accelerate,
    deepspeed,
    hugging_face,
    megatron,
    megatron_bridge,
    nemo,
    nnscaler,
    plan,
    torchtitan,
)
from stagewright.executor.export.layouts.launching import launch_files
from stagewright.executor.export.options import FormatOptions
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem, require_layout
from stagewright.graphs.documents.errors import InputError

LAYOUT_FORMATS = {
    "megatron": megatron.FRAMEWORK,
    "megatron-bridge": megatron_bridge.FRAMEWORK,
    "nemo": nemo.FRAMEWORK,
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
) -> dict[str, str]:
    """The texts of the files of ``layout`` in the format ``to``, by file name, with launch scripts.

    ``names`` are those of the layers in the module that is run, only for a plan. A ``short`` run
    only measures: few iterations, every one logged, nothing saved. Raises InputError if the format
    is unknown or takes no names, the layout breaks a rule of the problem, or the format cannot
    express one of its features.
    """
    if to not in EVERY_FORMAT:
        raise InputError(f"--to {to!r} is not known; there are {', '.join(EVERY_FORMAT)}")
    if names is not None and to != PLAN:
        raise InputError(f"--model gives the names of layers, which only --to {PLAN} takes")
    require_layout(problem, layout)
    positions = problem.architecture.positions
    if positions is not None and problem.sequence > positions:
        raise InputError(
            f"sequence must be at most the {positions} learned positions, got {problem.sequence}"
        )
    require_framework(to, problem, layout)
    if names is not None:
        return plan.documents(problem, layout, names)
    files = EVERY_FORMAT[to].files(problem, layout)
    if to == PLAN:
        return files
    return files | launch_files(to, problem, options or FormatOptions(), short)


def require_framework(to: str, problem: TrainingProblem, layout: Layout | None = None) -> None:
    """Raise for the first rule of a framework that a possible layout breaks, or without one all.

    Raises InputError with the rule, what would do, the rule's source, and frameworks that can.
    """
    asked = (problem, layout or Layout(), layout is None)
    for _, wrong in EVERY_FORMAT[to].broken(*asked):
        can = [name for name, one in LAYOUT_FORMATS.items() if not any(one.broken(*asked))]
        raise InputError(wrong + (f"; {' or '.join(can[:3])} can" if can else ""))
