"""Export parallel layouts of a transformer to the frameworks that train them.

What a framework cannot express is refused by name, never dropped.
"""

from collections.abc import Callable

from stagewright.executor.export.layouts import (
    accelerate,
    deepspeed,
    megatron,
    megatron_bridge,
    nemo,
    torchtitan,
)
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.rules import require_layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError

LAYOUT_FORMATS: dict[str, Callable[[TrainingProblem, Layout], dict[str, str]]] = {
    "megatron": megatron.arguments,
    "megatron-bridge": megatron_bridge.recipe,
    "nemo": nemo.recipe,
    "torchtitan": torchtitan.configuration,
    "deepspeed": deepspeed.configuration,
    "accelerate": accelerate.configuration,
}


def export_layout(problem: TrainingProblem, layout: Layout, to: str) -> dict[str, str]:
    """The texts of the files of ``layout`` in the format ``to``, by file name.

    Raises
    ------
    InputError
        If the format is unknown, the layout breaks a rule of the problem, or the format cannot
        express one of its features.
    """
    if to not in LAYOUT_FORMATS:
        raise InputError(f"--to {to!r} is not known; there are {', '.join(LAYOUT_FORMATS)}")
    require_layout(problem, layout)
    positions = problem.architecture.positions
    if positions is not None and problem.sequence > positions:
        raise InputError(
            f"sequence must be at most the {positions} learned positions, got {problem.sequence}"
        )
    return LAYOUT_FORMATS[to](problem, layout)
