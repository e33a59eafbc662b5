"""``doctor``: installed packages and working backends."""

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from stagewright.cli.console import print_json, print_table, progress
from stagewright.cli.options import Printed
from stagewright.graphs.documents.errors import InputError

TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: ``needed`` things that are not ``working`` are faults."""

    name: str
    working: bool
    note: str
    needed: bool = True


class DoctorOptions(Printed):
    """What ``doctor`` is asked."""

    compile: bool = False
    """Compile all kernels of all planners now, in minutes, so that no first plan waits for them."""


def doctor(given: DoctorOptions) -> int:
    """List installed packages and working backends; exit code 1 if a needed one is missing."""
    with progress("trying the backends"):
        found = [*_packages(), *_backends(), _try("partition kernel", 3.0, _ask_kernel)]
    if given.compile:
        with progress("compiling"):
            found.append(_compiled())
    if given.as_json:
        print_json(
            {
                "working": all(one.working for one in found if one.needed),
                "findings": [
                    {"name": f.name, "working": f.working, "needed": f.needed, "note": f.note}
                    for f in found
                ],
            }
        )
    else:
        rows = [(_mark(one), one.name, one.note) for one in found]
        print_table(("<", "<what", "<version or finding"), rows)
    return 0 if all(one.working for one in found if one.needed) else 1


def _compiled() -> Finding:
    from stagewright.service.workers.kernels import compile_all

    return Finding("all kernels", True, f"{compile_all()} were compiled")


def _mark(finding: Finding) -> str:
    if finding.working:
        return "ok"
    return "BROKEN" if finding.needed else "absent"


def _packages() -> list[Finding]:
    """Python, the package itself, its dependencies, and torch."""
    names = [text for text in requires("stagewright") or [] if "extra ==" not in text]
    found = [Finding("python", True, platform.python_version()), _package("stagewright")]
    return [*found, *(_package(_name(text)) for text in sorted(names)), _torch()]


def _name(requirement: str) -> str:
    """The distribution that a requirement such as ``jinja2<4,>=3.1`` names."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None  # it is one of our own
    return found[0]


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, version(name))
    except PackageNotFoundError:
        return Finding(name, False, "not installed")


def _torch() -> Finding:
    if find_spec("torch") is None:
        note = "not installed; only running a plan needs it: pip install 'stagewright[executor]'"
        return Finding("torch", False, note, needed=False)
    from stagewright.executor.training.ranks.launch import require_torch

    try:
        require_torch()
    except InputError as error:
        return Finding("torch", False, str(error), needed=False)
    return Finding("torch", True, version("torch"), needed=False)


def _backends() -> list[Finding]:
    """Every backend, on a tiny job shop."""
    from stagewright.formulations.forms.models import Convex
    from stagewright.solvers.backends.backend import BACKENDS

    return [
        _try(f"backend {name}", 7.0, partial(_ask_backend, name))
        for name, backend in BACKENDS.items()
        if backend.accepts is not Convex
    ]


def _ask_backend(name: str) -> float | None:
    from stagewright.formulations.forms.models import Intervals
    from stagewright.formulations.pipelines.jobshop import (
        ByDisjunctions,
        JobShop,
        JobShopByIntervals,
    )
    from stagewright.solvers.backends.backend import BACKENDS, solve

    shop = JobShop((((0, 3), (1, 2)), ((1, 2), (0, 4))))
    if BACKENDS[name].accepts is Intervals:
        return solve(JobShopByIntervals(shop).apply(), name).objective
    return solve(ByDisjunctions(shop).apply(), name).objective


def _ask_kernel() -> float | None:
    """The bottleneck, by the partition kernel, of two layers of 3 s on two devices."""
    from stagewright.formulations.pipelines.bppm import BalancedPartition
    from stagewright.formulations.plans.pipeline import PipelineProblem
    from stagewright.graphs.machines.cluster import Link, uniform_servers
    from stagewright.graphs.models.chain import Chain, Layer, LayerCost
    from stagewright.solvers.pipelines.partition.passes import PartitionSearch

    cost = LayerCost(1, forward_seconds=1, backward_seconds=2, saved_bytes=0, output_bytes=0)
    chain = Chain("tiny", "doctor", 1, tuple(Layer(name, 0, (cost,)) for name in "ab"))
    problem = PipelineProblem(chain, uniform_servers(1, 2, Link(1e9)), microbatches=1)
    found = PartitionSearch(BalancedPartition(problem, (0, 1))).solve(2)
    return None if found is None else found.bottleneck_seconds


def _try(name: str, expected: float, ask: Callable[[], float | None]) -> Finding:
    # Any error in a solver's library is a finding, not a reason to stop.
    try:
        value = ask()
    except Exception as error:
        return Finding(name, False, f"{type(error).__name__}: {error}")
    if value is None or abs(value - expected) > TOLERANCE:
        return Finding(name, False, f"answers {value} to a problem whose optimum is {expected:g}")
    return Finding(name, True, f"solves a tiny problem to its optimum, {expected:g}")
