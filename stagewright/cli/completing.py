"""Values of options for the shell's completion, by option; files are completed by the shell.

Completion answers while one types: names whose registries import solvers are repeated here, and a
test compares them.
"""

from collections.abc import Callable, Iterable

import typer

from stagewright.formulations.schedules.published.kinds import KINDS

PLANNERS = (
    "auto", "spp", "exact", "dp", "gpipe", "pipedream", "hetpipe", "1f1b-star", "madpipe",
    "pipedream-async", "2bw", "2bw-flush", "servers", "general", "order", "ooo",
    "launchable",
)  # fmt: skip
POLICIES = (
    "max-min", "las", "makespan", "makespan-agnostic", "finish-time-fairness",
    "finish-time-fairness-agnostic", "fifo", "fifo-agnostic", "sjf", "sjf-agnostic", "isolated",
    "static-partition", "allox", "gandiva", "water-filling", "water-filling-agnostic",
    "hierarchical", "max-throughput", "min-cost", "min-cost-slo", "makespan-budget",
)  # fmt: skip
RUNTIMES = ("torch-csv", "torchtitan", "nemo", "megatron", "deepspeed")
OF_PLANS = (*RUNTIMES, "torchrun", "slurm", "kubernetes")
OF_LAYOUTS = (
    "megatron", "megatron-bridge", "nemo", "torchtitan", "deepspeed", "accelerate", "axolotl",
    "trl", "transformers", "nnscaler", "plan",
)  # fmt: skip
STRATEGIES = (
    "1xv100", "gpu-type", "multi-gpu", "multi-cloud", "dynamic", "rolling", "optimal", "all",
)  # fmt: skip
BACKENDS = (
    "cp-sat", "highs", "highs-ipm", "pulp-cbc", "cvxpy", "cvxpy-convex",
)  # fmt: skip

Values = Callable[[], Iterable[str]]


def _placing() -> Iterable[str]:
    from stagewright.solvers.operators.names import PLANNERS as OF_OPERATORS

    return OF_OPERATORS


def _devices() -> Iterable[str]:
    from stagewright.graphs.machines.devices import ACCELERATORS

    return ACCELERATORS


def _models() -> Iterable[str]:
    from stagewright.graphs.models.named import MODELS

    return MODELS


def _types() -> Iterable[str]:
    from stagewright.graphs.importers.diffusers_config import CLASSES
    from stagewright.graphs.importers.hf_types import TYPES

    return [*TYPES, *CLASSES]


def _rates() -> Iterable[str]:
    from stagewright.graphs.machines.rates import rate_sets

    return rate_sets()


# By the name of an option or an argument; that of a single command comes first.
VALUES: dict[str, Values] = {
    "anchor --for": lambda: OF_LAYOUTS,
    "calibrate --for": lambda: OF_LAYOUTS,
    "devices NAME": _devices,
    "frameworks NAME": lambda: OF_LAYOUTS,
    "model NAME": _models,
    "models NAME": _types,
    "rates NAME": _rates,
    "partition --backend": lambda: ("recurrence", *BACKENDS),
    "sweep --planner": lambda: PLANNERS,
    "train --planner": _placing,
    "train-plan --for": lambda: OF_LAYOUTS,
    "train-plan --recompute": lambda: ("none", "selective", "full"),
    "--backend": lambda: BACKENDS,
    "--contention": lambda: ("none", "exclusive"),
    "--device": _devices,
    "--for": lambda: RUNTIMES,
    "--kind": lambda: ("optimal", "pe", *KINDS),
    "--lr-schedule": lambda: ("constant", "linear", "cosine"),
    "--optimizer": lambda: ("adam", "adamw", "sgd"),
    "--order": lambda: ("optimal", *KINDS),
    "--planner": lambda: (*PLANNERS, *_placing()),
    "--policy": lambda: POLICIES,
    "--recompute": lambda: ("none", "full", "layer", "auto"),
    "--schedule": lambda: ("1f1b", "zero-bubble"),
    "--strategy": lambda: STRATEGIES,
    "--to": lambda: dict.fromkeys((*OF_PLANS, *OF_LAYOUTS)),
    "--training": lambda: ("data", "pipeline", "single"),
}


def completion(name: str) -> Callable[[typer.Context, str], list[str]] | None:
    """What completes values of an option or an argument; None where no values are known."""
    if not any(one.rpartition(" ")[2] == name for one in VALUES):
        return None

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        """The values that continue ``incomplete``, of which the last of a list counts."""
        values = VALUES.get(f"{ctx.command.name} {name}", VALUES.get(name, tuple))()
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{value}" for value in values if value.startswith(last)]

    return complete
