"""Stagewright: planner of distributed training whose every answer carries a certificate.

Examples
--------
>>> import stagewright
>>> cluster = stagewright.uniform_servers(1, 2, stagewright.Link(100e9))
>>> model = stagewright.analytic_model("vgg19")
>>> result = stagewright.plan(model, cluster, microbatches=4, planner="dp")
>>> result.status.value
'feasible'
"""

import importlib
from typing import TYPE_CHECKING

from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.executor.programs.trace import load_trace
    from stagewright.executor.training.runtime import Executor
    from stagewright.formulations.clusters.allocation_plan import load_allocation, save_allocation
    from stagewright.formulations.operators.plan import load_operator_plan, save_operator_plan
    from stagewright.formulations.parallelism.document import load_layout, save_layout
    from stagewright.formulations.parallelism.goodput import Failures
    from stagewright.formulations.parallelism.layout import Layout, parse_layout
    from stagewright.formulations.parallelism.profiles.document import (
        load_profiled_plan,
        save_profiled_plan,
    )
    from stagewright.formulations.parallelism.trials import Trial, load_tuning, save_tuning
    from stagewright.formulations.plans.plan import load_plan, save_plan
    from stagewright.formulations.prices.analytic import analytic_model
    from stagewright.front.clusters import (
        allocate,
        cloud,
        estimate,
        forecast_jobs,
        price_jobs,
        rounds,
        run_cluster,
        simulate_cluster,
    )
    from stagewright.front.layouts import (
        calibrate,
        check_profiled_plan,
        frontier,
        memory,
        profiled_train_plan,
        train_plan,
        tune,
        tune_read,
    )
    from stagewright.front.operators import check_placement, divide, place
    from stagewright.front.pipelines import (
        check,
        check_proofs,
        compare,
        diff,
        export,
        partition,
        plan,
        show,
        simulate,
        sweep,
        what_if,
    )
    from stagewright.front.results import print_progress
    from stagewright.front.schedules import compare_schedules, jobshop, schedule
    from stagewright.graphs.importers.piper import load_partition_problem
    from stagewright.graphs.machines.cluster import (
        Link,
        load_cluster,
        save_cluster,
        uniform_servers,
    )
    from stagewright.graphs.machines.fabric import Fabric
    from stagewright.graphs.machines.networks import fabric_of_kind
    from stagewright.graphs.models.architecture import Architecture
    from stagewright.graphs.models.chain import load_model, save_model
    from stagewright.graphs.models.layer_profiles import load_layer_profiles, save_layer_profiles
    from stagewright.graphs.models.operators.step_graph import load_graph, save_graph
    from stagewright.graphs.workloads.jobs import load_workload
    from stagewright.graphs.workloads.pool import parse_pool
    from stagewright.graphs.workloads.prices import load_market
    from stagewright.service.architectures import read_architecture
    from stagewright.service.layouts.mixed import mixed_problem
    from stagewright.service.layouts.problems import profiled_problem, training_problem
    from stagewright.solvers.parallelism.space import Space

__all__ = [
    "Architecture", "Executor", "Fabric", "Failures", "InputError", "Layout", "Link", "Space",
    "Trial", "allocate", "analytic_model", "calibrate", "check", "check_placement",
    "check_profiled_plan", "check_proofs", "cloud", "compare", "compare_schedules", "diff",
    "divide", "estimate", "export", "fabric_of_kind", "forecast_jobs", "frontier", "jobshop",
    "load_allocation", "load_cluster", "load_graph", "load_layer_profiles", "load_layout",
    "load_market", "load_model", "load_operator_plan", "load_partition_problem", "load_plan",
    "load_profiled_plan", "load_trace", "load_tuning", "load_workload", "memory", "mixed_problem",
    "parse_layout", "parse_pool", "partition", "place", "plan", "price_jobs", "print_progress",
    "profiled_problem", "profiled_train_plan", "read_architecture", "rounds", "run_cluster",
    "save_allocation", "save_cluster", "save_graph", "save_layer_profiles", "save_layout",
    "save_model", "save_operator_plan", "save_plan", "save_profiled_plan", "save_tuning",
    "schedule", "show", "simulate", "simulate_cluster", "sweep", "train_plan", "training_problem",
    "tune", "tune_read", "uniform_servers", "what_if",
]  # fmt: skip

# Loaded on first use, so that ``import stagewright`` is fast.
_LAZY = {
    "stagewright.executor.programs.trace": ("load_trace",),
    "stagewright.executor.training.runtime": ("Executor",),
    "stagewright.formulations.clusters.allocation_plan": ("load_allocation", "save_allocation"),
    "stagewright.formulations.operators.plan": ("load_operator_plan", "save_operator_plan"),
    "stagewright.formulations.parallelism.document": ("load_layout", "save_layout"),
    "stagewright.formulations.parallelism.goodput": ("Failures",),
    "stagewright.formulations.parallelism.profiles.document": (
        "load_profiled_plan", "save_profiled_plan",
    ),
    "stagewright.formulations.parallelism.layout": ("Layout", "parse_layout"),
    "stagewright.formulations.parallelism.trials": ("Trial", "load_tuning", "save_tuning"),
    "stagewright.formulations.plans.plan": ("load_plan", "save_plan"),
    "stagewright.front.clusters": (
        "allocate", "cloud", "estimate", "forecast_jobs", "price_jobs", "rounds", "run_cluster",
        "simulate_cluster",
    ),
    "stagewright.front.layouts": (
        "calibrate", "check_profiled_plan", "frontier", "memory", "profiled_train_plan",
        "train_plan", "tune", "tune_read",
    ),
    "stagewright.front.operators": ("check_placement", "divide", "place"),
    "stagewright.graphs.importers.piper": ("load_partition_problem",),
    "stagewright.front.pipelines": (
        "check", "check_proofs", "compare", "diff", "export", "partition", "plan", "show",
        "simulate", "sweep", "what_if",
    ),
    "stagewright.front.schedules": ("compare_schedules", "jobshop", "schedule"),
    "stagewright.front.results": ("print_progress",),
    "stagewright.graphs.machines.cluster": (
        "Link", "load_cluster", "save_cluster", "uniform_servers",
    ),
    "stagewright.formulations.prices.analytic": ("analytic_model",),
    "stagewright.graphs.machines.fabric": ("Fabric",),
    "stagewright.graphs.machines.networks": ("fabric_of_kind",),
    "stagewright.graphs.models.architecture": ("Architecture",),
    "stagewright.graphs.models.chain": ("load_model", "save_model"),
    "stagewright.graphs.models.layer_profiles": ("load_layer_profiles", "save_layer_profiles"),
    "stagewright.graphs.models.operators.step_graph": ("load_graph", "save_graph"),
    "stagewright.graphs.workloads.jobs": ("load_workload",),
    "stagewright.graphs.workloads.pool": ("parse_pool",),
    "stagewright.graphs.workloads.prices": ("load_market",),
    "stagewright.service.architectures": ("read_architecture",),
    "stagewright.solvers.parallelism.space": ("Space",),
    "stagewright.service.layouts.mixed": ("mixed_problem",),
    "stagewright.service.layouts.problems": ("profiled_problem", "training_problem"),
}  # fmt: skip
_MODULE = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> object:
    if name in _MODULE:
        found = getattr(importlib.import_module(_MODULE[name]), name)
        if not isinstance(found, type):
            from stagewright.graphs.documents.arguments import checked

            found = checked(found)  # a wrong argument is told here for all functions
        globals()[name] = found
        return found
    if name == "__version__":
        from importlib.metadata import version

        return version("stagewright")
    raise AttributeError(f"module 'stagewright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
