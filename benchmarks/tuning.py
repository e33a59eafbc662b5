"""Trials until the fastest layout is found, on tables of measured runs as machines.

A machine is a model, a number of GPUs, a sequence and a batch, of which a table has two layouts or
more; to try a layout is to look its seconds up. The tuner sees the layouts, the prediction by the
package's rates, and what it has looked up; so do the peers, whose features are the logarithms of
the degrees and of the predicted seconds. ``python -m benchmarks
tuning`` takes half a minute; where the peers are installed, ten minutes of CPU.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from statistics import mean

import numpy as np

from benchmarks import layout_vtrain
from benchmarks.layout_runs import compiled
from benchmarks.measured_layouts import ROWS, measured_runs
from benchmarks.report import Table
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.parallelism.trials import MARGIN, Candidate, Trial, Tuning
from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.parallelism.tuner import standing_of

SEEDS = range(20)
"""Of the peers that draw: their first trials are random."""
AMPLE = 1e18
"""Bytes of a device: whatever is in a table has fit."""


@dataclass(frozen=True, eq=False)
class Machine:
    """The measured seconds of a problem's layouts."""

    table: str
    problem: TrainingProblem
    seconds: dict[Layout, float]

    @cached_property
    def start(self) -> Tuning:
        """The tuning before the first trial; its class is the table."""
        fabric = replace(self.problem.fabric, memory_bytes=AMPLE)
        problem = replace(self.problem, fabric=fabric)
        found = [evaluate(problem, one, compiled) for one in self.seconds]
        candidates = sorted(
            (Candidate(one.layout, one.seconds, one.peak_bytes) for one in found),
            key=lambda one: one.seconds,
        )
        return Tuning(problem, "megatron", f"the {len(found)} layouts", "a table", (*candidates,))

    @property
    def layouts(self) -> list[Layout]:
        """By predicted seconds."""
        return [one.layout for one in self.start.candidates]

    @property
    def best(self) -> Layout:
        """The fastest layout, at which peers end."""
        return min(self.seconds, key=self.seconds.__getitem__)

    @property
    def features(self) -> Floats:
        """Of the layouts, for the peers."""
        return np.log2(
            [
                (
                    one.seconds, one.layout.pipeline, one.layout.tensor, one.layout.data,
                    one.layout.expert, one.layout.microbatch, one.layout.chunks,
                )
                for one in self.start.candidates
            ]
        )  # fmt: skip


def machines() -> Iterator[Machine]:
    """Those of the tables that are there."""
    groups: dict[object, list[tuple[TrainingProblem, Layout, float]]] = defaultdict(list)
    if layout_vtrain.SINGLE.exists():
        for row in layout_vtrain.single():
            key = "vtrain_single_server", row.group, row.sequence
            groups[key].append((row.problem(), row.layout("none"), row.seconds))
    if ROWS.exists():
        for run in measured_runs():
            of = run.problem
            size = of.fabric.devices, of.sequence, of.batch
            key = "measured_layouts", run.stack, run.model, run.device, *size, run.precision
            groups[key].append((of, run.layout, run.seconds))
    for key, rows in groups.items():
        seconds: dict[Layout, list[float]] = defaultdict(list)
        for _, layout, taken in rows:
            seconds[layout].append(taken)
        if len(seconds) > 1:
            assert isinstance(key, tuple)
            yield Machine(key[0], rows[0][0], {one: mean(some) for one, some in seconds.items()})


# --- Who tries -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tuned:
    """The order of the trials, and after how many the tuner stopped."""

    order: tuple[Layout, ...]
    stopped: int


def tuned(of: Machine) -> Tuned:
    """The order of our tuner's trials, beyond its stop until all are tried."""
    tuning, order, stopped = of.start, [], None
    while True:
        standing = standing_of(tuning)
        if stopped is None and standing.claim is not None and standing.claim.stop:
            stopped = len(order)
        if not standing.next:
            return Tuned(tuple(order), len(order) if stopped is None else stopped)
        layout = standing.next[0].layout
        order.append(layout)
        trial = Trial(layout, "measured", str(len(order)), of.seconds[layout])
        tuning = tuning.with_trials([trial])


def by_tpe(of: Machine, seed: int) -> list[Layout]:
    """Optuna's tree-structured Parzen estimator over the features, each an integer of its rank."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    layouts, features = of.layouts, of.features
    names = [f"feature{one}" for one in range(features.shape[1])]
    values = [sorted(set(column)) for column in features.T]
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    order: list[int] = []
    for _ in range(20 * len(layouts)):
        trial = study.ask()
        asked = [
            column[trial.suggest_int(name, 0, len(column) - 1)]
            for name, column in zip(names, values, strict=True)
        ]
        # What it asks for may be no layout of the table: the nearest is tried.
        scaled = (features - asked) / np.maximum(np.ptp(features, axis=0), 1e-9)
        place = int((scaled**2).sum(1).argmin())
        study.tell(trial, float(np.log(of.seconds[layouts[place]])))
        if place not in order:
            order.append(place)
        if layouts[place] == of.best:
            break
    return _all(layouts, order, seed)


def by_process(of: Machine, seed: int) -> list[Layout]:
    """scikit-optimize's Gaussian process over the features, the best of what is left."""
    from skopt import Optimizer
    from skopt.space import Integer

    layouts, features = of.layouts, of.features
    drawn = np.random.default_rng(seed).permutation(len(layouts))
    order = [int(one) for one in drawn[: min(3, len(layouts))]]
    scaled = (features - features.min(0)) / np.maximum(np.ptp(features, axis=0), 1e-9)
    process = Optimizer([Integer(0, 1)], base_estimator="GP").base_estimator_
    while of.best not in [layouts[one] for one in order]:
        times = np.log([of.seconds[layouts[one]] for one in order])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            process.set_params(random_state=seed, kernel=None)
            process.fit(scaled[order], times)
            means, deviations = process.predict(scaled, return_std=True)
        left = [one for one in range(len(layouts)) if one not in order]
        order.append(max(left, key=_improvement(means, deviations, times.min()).__getitem__))
    return _all(layouts, order, seed)


def _improvement(means: Floats, deviations: Floats, best: float) -> Floats:
    from scipy.stats import norm

    steps = (best - means) / np.maximum(deviations, 1e-9)
    found: Floats = deviations * (steps * norm.cdf(steps) + norm.pdf(steps))
    return found


def _all(layouts: Sequence[Layout], order: Sequence[int], seed: int) -> list[Layout]:
    left = [one for one in range(len(layouts)) if one not in order]
    drawn = np.random.default_rng(seed).permutation(left) if left else []
    return [layouts[int(one)] for one in (*order, *drawn)]


# --- The comparison ------------------------------------------------------------------------------


def until(of: Machine, order: Sequence[Layout], within: float) -> int:
    """Trials until a layout within this part of the best is found."""
    goal = (1 + within) * min(of.seconds.values())
    return 1 + next(place for place, one in enumerate(order) if of.seconds[one] <= goal)


def by_chance(of: Machine, within: float) -> float:
    """The expected trials of a random order: (n + 1) / (k + 1) where k of n layouts will do."""
    goal = (1 + within) * min(of.seconds.values())
    return (len(of.seconds) + 1) / (sum(one <= goal for one in of.seconds.values()) + 1)


def is_wrong(of: Machine, found: Tuned) -> bool:
    """Whether the stop left a layout that is faster than the best by more than the margin."""
    best = min(of.seconds[one] for one in found.order[: found.stopped])
    return min(of.seconds.values()) < (1 - MARGIN) * best


PEERS: dict[str, tuple[str, Callable[[Machine, int], list[Layout]]]] = {
    "Optuna, TPE": ("optuna", by_tpe),
    "scikit-optimize, Gaussian process": ("skopt", by_process),
}


def tables(quick: bool) -> list[Table]:
    """Mean trials by table of runs and by who tries."""
    rows: list[tuple[object, ...]] = []
    stops: list[tuple[object, ...]] = []
    by_table: dict[str, list[Machine]] = defaultdict(list)
    for one in machines():
        by_table[one.table].append(one)
    for name, every in by_table.items():
        some = every[::12] if quick else every
        layouts = sum(len(one.seconds) for one in some)
        found = [tuned(one) for one in some]
        orders: dict[str, list[list[tuple[Layout, ...]]]] = {
            "ours": [[one.order] for one in found],
            "by our prediction alone": [[(*one.layouts,)] for one in some],
        }
        for peer, (module, tries) in PEERS.items():
            if find_spec(module) is not None:
                seeds = SEEDS[:1] if quick else SEEDS
                orders[peer] = [[(*tries(one, seed),) for seed in seeds] for one in some]
        for who, of in orders.items():
            rows.append((name, who, *_trials(some, of)))
        rows.append((name, "random, expected", *_expected(some)))
        stops.append(
            (
                name, len(some), layouts, mean(one.stopped for one in found),
                sum(one.stopped for one in found) / layouts,
                sum(map(is_wrong, some, found)),
            )
        )  # fmt: skip
    return [
        Table(
            "tuning", "Trials until the fastest layout of a table is found",
            ("table", "who", "trials to the best", "to within 1 %", "most, to within 1 %",
             "machines with more than random"), tuple(rows),
        ),
        Table(
            "tuning_stops", "When the tuner stops",
            ("table", "machines", "layouts", "trials to the stop", "part of all", "wrong stops"),
            tuple(stops),
        ),
    ]  # fmt: skip


def _trials(some: Sequence[Machine], of: Sequence[list[tuple[Layout, ...]]]) -> tuple[object, ...]:
    """Of every machine the mean over the orders that were drawn, and of these the mean."""
    near, best = (
        [
            float(mean(until(one, order, within) for order in orders))
            for one, orders in zip(some, of, strict=True)
        ]
        for within in (0.01, 0.0)
    )
    more = sum(one > by_chance(machine, 0.01) for one, machine in zip(near, some, strict=True))
    return mean(best), mean(near), max(near), more


def _expected(some: Sequence[Machine]) -> tuple[object, ...]:
    near = [by_chance(one, 0.01) for one in some]
    return mean(by_chance(one, 0.0) for one in some), mean(near), max(near), 0
