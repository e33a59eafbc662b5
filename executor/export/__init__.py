"""Export plans to other frameworks' runtimes, and launch scripts for our own.

Features that a format cannot express are refused by name, never dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from stagewright.executor.export import deepspeed, kubernetes, launchers, megatron, torch_pipelining
from stagewright.executor.export.options import FormatOptions
from stagewright.executor.programs.program import plan_devices
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.executor.export.layouts.plan import Certify
    from stagewright.formulations.parallelism.document import LayoutPlan

Files = dict[str, str]

_PARTITION = ("model", "partition_only")
LAUNCH = ("command", "cluster", "per_server")


@dataclass(frozen=True, slots=True)
class Format:
    """One format: its writer, its options, and its remarks for the user."""

    write: Callable[[PipelinePlan, FormatOptions], Files]
    options: tuple[str, ...]
    remarks: Callable[[PipelinePlan], tuple[str, ...]] = lambda plan: ()


FORMATS: dict[str, Format] = {
    "torch-csv": Format(torch_pipelining.schedule, ("model",), torch_pipelining.remarks),
    "torchtitan": Format(torch_pipelining.torchtitan, _PARTITION),
    "nemo": Format(torch_pipelining.nemo, _PARTITION),
    "megatron": Format(megatron.arguments, _PARTITION),
    "deepspeed": Format(deepspeed.module, _PARTITION),
    "torchrun": Format(launchers.of_plan(launchers.torchrun), LAUNCH),
    "slurm": Format(launchers.of_plan(launchers.slurm), (*LAUNCH, "cpus", "time")),
    "kubernetes": Format(launchers.of_plan(kubernetes.kubernetes), (*LAUNCH, "image")),
}


def export(
    plan: "PipelinePlan | LayoutPlan",
    to: str,
    options: FormatOptions | None = None,
    certify: "Certify | None" = None,
) -> Files:
    """The texts of the files of ``plan`` in the format ``to``, by file name.

    ``certify`` adds bounds to the plan that a layout becomes.

    Raises InputError if the format is unknown, if it cannot express a feature of the plan, or if an
    option is missing or does not apply to it. Raises InvalidPlan if the plan's order is a deadlock.
    """
    options = options or FormatOptions()
    if isinstance(plan, PipelinePlan):
        format_ = _format(to)
        _require_options(options, format_.options, to)
        return format_.write(plan, options)
    from stagewright.executor.export.layouts import export_layout

    _require_options(options, ("model", "image", "cpus", "time"), "a layout")
    names = None if options.model is None else [layer.name for layer in options.model.layers]
    return export_layout(plan.problem, plan.layout, to, names, options, certify=certify)


def _require_options(options: FormatOptions, known: tuple[str, ...], to: str) -> None:
    for field in fields(options):
        if getattr(options, field.name) != field.default and field.name not in known:
            raise InputError(f"--{field.name.replace('_', '-')} does not apply to {to}")


def remarks(plan: "PipelinePlan | LayoutPlan", to: str) -> tuple[str, ...]:
    """Remarks for the user that the files cannot express, one per line; none of a layout."""
    if not isinstance(plan, PipelinePlan):
        return ()
    ranks = ", ".join(f"{r} {name!r}" for r, name in enumerate(plan_devices(plan)))
    return (f"ranks: {ranks}", *_format(to).remarks(plan))


def _format(to: str) -> Format:
    if to not in FORMATS:
        raise InputError(f"--to {to!r} is not known; there are {', '.join(FORMATS)}")
    return FORMATS[to]
