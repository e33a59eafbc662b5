"""Plans for other frameworks' runtimes, and scripts that launch our own.

What a format cannot say is refused by name, never left out.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from stagewright.executor.export import deepspeed, launchers, megatron, torch_pipelining
from stagewright.executor.export.options import Options
from stagewright.executor.programs.program import plan_devices
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InputError

Files = dict[str, str]

PARTITION = ("model", "partition_only")
LAUNCH = ("command", "cluster", "gpus_per_node")


@dataclass(frozen=True, slots=True)
class Format:
    """One format: what writes it, which options it takes, and what its user must know."""

    write: Callable[[PipelinePlan, Options], Files]
    options: tuple[str, ...]
    remarks: Callable[[PipelinePlan], tuple[str, ...]] = lambda plan: ()


FORMATS: dict[str, Format] = {
    "torch-csv": Format(torch_pipelining.schedule, (), torch_pipelining.remarks),
    "torchtitan": Format(torch_pipelining.torchtitan, PARTITION),
    "nemo": Format(torch_pipelining.nemo, PARTITION),
    "megatron": Format(megatron.arguments, PARTITION),
    "deepspeed": Format(deepspeed.module, PARTITION),
    "torchrun": Format(launchers.torchrun, LAUNCH),
    "slurm": Format(launchers.slurm, LAUNCH),
    "kubernetes": Format(launchers.kubernetes, (*LAUNCH, "image")),
}


def export(plan: PipelinePlan, to: str, options: Options | None = None) -> Files:
    """The text of every file that says ``plan`` in the format ``to``, by file name.

    Raises
    ------
    InputError
        If there is no such format, if it cannot say something that the plan does, or if an option
        is missing or of no use to it.
    InvalidPlan
        If the plan's order cannot be run by anyone.
    """
    format_ = _format(to)
    options = options or Options()
    for field in fields(options):
        given = getattr(options, field.name) != field.default
        if given and field.name not in format_.options:
            flag = "--" + field.name.replace("_", "-")
            raise InputError(f"{flag}: {to} has no use for it; leave it out")
    return format_.write(plan, options)


def remarks(plan: PipelinePlan, to: str) -> tuple[str, ...]:
    """What the files cannot hold and their user must know, a line each."""
    ranks = ", ".join(f"{r} {name!r}" for r, name in enumerate(plan_devices(plan)))
    return (f"ranks: {ranks}", *_format(to).remarks(plan))


def _format(to: str) -> Format:
    if to not in FORMATS:
        raise InputError(f"--to {to!r} is not known; there are {', '.join(FORMATS)}")
    return FORMATS[to]
