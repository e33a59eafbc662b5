"""Measured plans and their prediction from layer profiles: ``python -m benchmarks profiled``."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
from rich.progress import track

from benchmarks.decoder import OPT_350M
from benchmarks.report import Table, percent
from benchmarks.sailor_plans import SailorPlan, read_sailor_plan
from stagewright.formulations.parallelism.profiles.cluster import Pool, Route, ServerPools
from stagewright.formulations.parallelism.profiles.pipelines import (
    MemoryRule,
    ProfiledEstimate,
    ProfiledPlan,
    ProfiledProblem,
    ProfiledStage,
    Replica,
    evaluate,
    even_microbatches,
)
from stagewright.graphs.importers.sailor import read_sailor
from stagewright.graphs.models.layer_profiles import LayerProfiles

INPUTS = Path(__file__).parents[2] / "shared" / "data" / "training" / "sailor"
GIB = 2**30
PER_SERVER = 4

NOMINAL = (25e9, 25e9)
"""Bytes/s of one 200 Gbit/s network card, for sends and for rings: GH200 servers have four."""
RATES = (18e9, 8e9)
"""Fitted: what a group sends at, and each device's ring; the least mean error of the grid."""
SEND_GRID = tuple(n * 1e9 for n in (12, 14, 16, 18, 20, 22, 25))
RING_GRID = tuple(n * 1e9 for n in (6, 8, 10, 12.5, 15, 20, 25))
FACTOR_GRID = tuple(n / 4 for n in range(17))
RESERVE_GRID = tuple(n * 1e8 for n in range(35, 56))
SAILOR_ERRORS = ("Sailor's simulator, its own profile", 0.0892, 0.1607, None, 0.059, 0.088, None)
"""Mean and greatest errors of time, then of memory. Its own profile has three forwards changed."""
SAILOR_SAME = ("Sailor's simulator, this profile", 0.1601, 0.4568, None, None, None, None)


def profiles() -> LayerProfiles:
    """OPT-350M on all kinds of devices."""
    sizes = tuple(OPT_350M.sizes(tensor) for tensor in (1, 2, 4, 8))
    return replace(read_sailor(INPUTS / "profiles" / "OPT-350"), sizes=sizes)


# The measured plans.


@dataclass(frozen=True, slots=True)
class Prediction:
    """A plan's estimate beside what was measured."""

    name: str
    plan: SailorPlan
    estimate: ProfiledEstimate

    @property
    def time_error(self) -> float:
        """Relative error of the iteration's seconds."""
        assert self.plan.seconds is not None
        return self.estimate.seconds / self.plan.seconds - 1

    @property
    def memory_error(self) -> float:
        """Relative error of the bytes of the fullest device."""
        assert self.plan.peak_bytes is not None
        return self.estimate.peak_bytes / self.plan.peak_bytes - 1


def predictions(
    send: float, ring: float, memory: MemoryRule | None = None
) -> tuple[Prediction, ...]:
    """All measured plans on GH200 servers whose links reach these rates."""
    known, rule = profiles(), memory or MemoryRule()
    found = []
    for file in sorted((INPUTS / "measured_OPT-350_GH200").glob("*.json")):
        plan = read_sailor_plan(file)
        estimate = evaluate(*_stated(plan, known, Route(ring, send), rule))
        found.append(Prediction(file.stem.removeprefix(file.stem.split("_")[0] + "_plan_config_"),
                                plan, estimate))  # fmt: skip
    return tuple(found)


def _stated(
    plan: SailorPlan, known: LayerProfiles, route: Route, rule: MemoryRule
) -> tuple[ProfiledProblem, ProfiledPlan]:
    """Every group has a server of its own, as its plan says."""
    groups = sum(map(len, plan.groups))
    pool = Pool("GH-96", plan.groups[0][0].zone, groups, PER_SERVER, 96 * GIB, route)
    problem = ProfiledProblem(known, ServerPools((pool,)), plan.batch, rule)
    servers = iter(range(groups))
    stages = tuple(
        ProfiledStage(layers, tuple(Replica(0, next(servers), one.tensor) for one in of))
        for layers, of in zip(plan.layers, plan.groups, strict=True)
    )
    counts = even_microbatches(plan.batch // plan.microbatch_size, len(plan.groups[0]))
    return problem, ProfiledPlan(plan.microbatch_size, stages, counts)


def left_out(errors: np.ndarray) -> np.ndarray:
    """Errors of each plan under the point of the grid that is best for all others.

    ``errors`` are absolute, shape (points, plans).
    """
    plans = range(errors.shape[1])
    best = [np.delete(errors, k, axis=1).mean(axis=1).argmin() for k in plans]
    return np.array([errors[point, k] for k, point in enumerate(best)])


def _time_errors(send: float, ring: float) -> list[float]:
    return [abs(row.time_error) for row in predictions(send, ring)]


def _memory_errors(factor: float, reserve: float) -> list[float]:
    rule = MemoryRule(backward_factor=factor, reserve_bytes=reserve)
    return [abs(row.memory_error) for row in predictions(*RATES, rule)]


def tables(quick: bool) -> Iterator[Table]:
    """Every measured plan, and the errors; none without the inputs."""
    if not INPUTS.is_dir():
        return
    rows: list[tuple[object, ...]] = []
    for one in predictions(*RATES):
        plan = one.plan
        assert plan.peak_bytes is not None
        shape = f"{len(plan.groups)} x {plan.groups[0][0].tensor} x {len(plan.groups[0])}"
        rows.append(
            (
                shape,
                plan.microbatch_size,
                plan.batch,
                plan.seconds,
                one.estimate.seconds,
                f"{one.time_error:+.1%}",
                plan.peak_bytes / 1e9,
                one.estimate.peak_bytes / 1e9,
                f"{one.memory_error:+.1%}",
            )
        )
    columns = ("p x t x d", "microbatch", "batch", "measured s", "predicted s", "error",
               "measured GB", "predicted GB", "error of memory")  # fmt: skip
    title = "Measured plans of OPT-350M on GH200 servers"
    yield Table("profiled", title, columns, tuple(rows))
    yield _errors(quick)


def _errors(quick: bool) -> Table:
    """Means and greatest errors; leaving each plan out of the fit needs the grid, so not quick."""
    fitted = predictions(*RATES)
    time = np.abs([row.time_error for row in fitted])
    memory = np.abs([row.memory_error for row in fitted])
    apart: list[float | None] = [None, None]
    if not quick:
        grids = ((_time_errors, SEND_GRID, RING_GRID), (_memory_errors, FACTOR_GRID, RESERVE_GRID))
        apart = [
            float(left_out(np.array([of(a, b) for a, b in track(list(product(*axes)), "grid")]))
                  .mean())
            for of, *axes in grids
        ]  # fmt: skip
    nominal = _time_errors(*NOMINAL)
    plain = ("links at their nominal rate", float(np.mean(nominal)), max(nominal))
    ours = ("two rates, two constants of memory fitted", time.mean(), time.max(), apart[0],
            memory.mean(), memory.max(), apart[1])  # fmt: skip
    rows = (ours, (*plain, None, None, None, None), SAILOR_SAME, SAILOR_ERRORS)
    columns = ("prediction", "time: mean error", "most", "left one out", "memory: mean error",
               "most", "left one out")  # fmt: skip
    shown = [(name, *(percent(each) for each in errors)) for name, *errors in rows]
    return Table("profiled_errors", "Errors on the measured plans", columns, tuple(shown))
