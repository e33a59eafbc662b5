"""Goodput: optima, Erlang's formula, ranks written one by one, all layouts, simulated runs."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_class import every_layout, random_case
from layout_problems import random_problem
from profiles import examples, slow_after
from scipy.optimize import minimize_scalar

from stagewright.executor.simulation.failures import simulated_goodput
from stagewright.formulations.parallelism.cut import stage_layers
from stagewright.formulations.parallelism.goodput import (
    Checkpoint,
    Failures,
    RunSize,
    checkpoint,
    daly_interval,
    exact_interval,
    goodput,
    least_checkpoint,
    run_size,
    shares_of_away,
    young_interval,
)
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.parts import shares
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.service.layouts.requests import LayoutRequest
from stagewright.service.layouts.searching import find_layouts

HOUR = 3600.0
MEANS = st.floats(1e3, 1e6)
STOPS = st.floats(1e-2, 1e3)


@examples(30)
@given(STOPS, MEANS)
def test_the_closed_interval_is_the_least_by_a_search(stop: float, mean: float) -> None:
    """Overhead by Daly's expectation: minimised by golden section, not by a formula."""

    def overhead(work: float) -> float:
        return math.expm1((work + stop) / mean) / work

    found = minimize_scalar(overhead, bounds=(1e-3, 10 * mean), options={"xatol": 1e-9})
    exact = exact_interval(stop, mean)
    assert overhead(exact) <= found.fun * (1 + 1e-12)
    assert overhead(exact) <= overhead(exact * 1.01)
    assert overhead(exact) <= overhead(exact * 0.99)
    if stop < mean / 2:
        assert abs(daly_interval(stop, mean) - exact) <= 0.07 * exact
        assert abs(daly_interval(stop, mean) - exact) <= abs(young_interval(stop, mean) - exact)


@examples(30)
@given(STOPS, MEANS, st.floats(0.5, 500), st.floats(0, 2000))
def test_whole_iterations_are_the_best_of_all(
    stop: float, mean: float, seconds: float, write: float
) -> None:
    size = RunSize(8, seconds, stop, write, 60.0)
    count = size.iterations(mean)
    assert count * seconds >= write
    assert count == 1 or (count - 1) * seconds < write or is_better(size, count, count - 1, mean)
    assert all(is_better(size, count, other, mean) for other in (count + 1, 2 * count, 3 * count))


def is_better(size: RunSize, count: int, other: int, mean: float) -> bool:
    best, shorter = (size.share(n * size.iteration_seconds, mean) for n in (count, other))
    return best >= shorter * (1 - 1e-12)


@pytest.mark.parametrize(("load", "spares"), [(0.3, 0), (2.0, 3), (40.0, 30)])
def test_the_waiting_share_is_erlangs(load: float, spares: int) -> None:
    blocked = 1.0  # by Erlang's recursion over the servers that may be away
    for k in range(1, spares + 2):
        blocked = load * blocked / (k + load * blocked)
    failures = Failures(100 * HOUR, 1e9, repair_seconds=load * 25 * HOUR, spares=spares)
    shares = shares_of_away(failures, [4] * (spares + 1))
    assert shares[-1] == pytest.approx(blocked)
    assert shares.sum() == pytest.approx(1)


FULL = RunSize(1024, 10.0, 60.0, 0.0, 900.0)
LATER = replace(FULL, stop_seconds=3.0, write_seconds=300.0)
FEWER = (RunSize(1016, 11.0, 60.0, 0.0, 900.0), RunSize(512, 20.0, 60.0, 0.0, 900.0))
OFTEN = Failures(5000 * HOUR, 2e9)
AWAY = replace(OFTEN, repair_seconds=6 * HOUR)
RUNS = {
    "blocking": (OFTEN, FULL, ()),
    "asynchronous": (OFTEN, LATER, ()),
    "more failures than work": (replace(OFTEN, mtbf_seconds=500 * HOUR), LATER, ()),
    "waiting": (AWAY, FULL, ()),
    "spares": (replace(AWAY, spares=2), FULL, ()),
    "smaller": (replace(AWAY, mtbf_seconds=20000 * HOUR), FULL, FEWER),
    "spares and smaller": (replace(AWAY, spares=1), LATER, FEWER),
}


@pytest.mark.parametrize("name", RUNS)
def test_simulated_runs_have_the_goodput(name: str) -> None:
    """Within 3.3 standard errors, and 0.3 % where a change of size is counted to first order."""
    failures, full, smaller = RUNS[name]
    of = goodput(failures, full, smaller)
    every = [
        of.iterations,
        *(size.iterations(failures.mtbf_seconds / size.devices) for size in smaller),
    ]
    runs = [simulated_goodput(failures, full, smaller, every, 200_000, seed) for seed in range(40)]
    error = float(np.std(runs, ddof=1)) / len(runs) ** 0.5
    assert np.mean(runs) == pytest.approx(of.goodput, abs=3.3 * error + 0.003 * bool(smaller))
    assert error < 0.01
    parts = (of.goodput, of.stopped, of.lost, of.restarting, of.away)
    assert sum(parts) == pytest.approx(1)
    assert min(parts) >= -1e-12


@examples(30)
@given(st.floats(1e6, 1e9), st.floats(0, 1e6), st.integers(0, 4))
def test_better_machines_have_no_less_goodput(mtbf: float, repair: float, spares: int) -> None:
    of = Failures(mtbf, 2e9, repair_seconds=repair, spares=spares if repair else 0)
    base = goodput(of, FULL)
    assert goodput(of, FULL, least=True).goodput >= base.goodput
    assert goodput(replace(of, mtbf_seconds=2 * mtbf), FULL).goodput >= base.goodput - 1e-9
    assert goodput(of, replace(FULL, stop_seconds=30.0)).goodput >= base.goodput
    if repair:
        assert goodput(replace(of, spares=of.spares + 1), FULL).goodput >= base.goodput - 1e-12


def written(problem: TrainingProblem, layout: Layout) -> Iterator[tuple[int, float]]:
    """Rank by rank, what it writes: an equal part of what it and its equals hold."""
    of, blocks = shares(problem, layout.split), layout.blocks_of_stages(problem.architecture.layers)
    each = problem.precision.weight_bytes + problem.precision.optimizer_bytes
    starts = [0, *np.cumsum(blocks)]
    outer = ("pipeline", "data") if layout.placement == "data-inside" else ("data", "pipeline")
    sizes = [getattr(layout, name) for name in outer]
    copies = layout.context * layout.data
    for rank, (*place, _, _) in enumerate(
        product(*map(range, sizes), range(layout.context), range(layout.tensor))
    ):
        mine = 0.0
        for stage in range(place[outer.index("pipeline")], layout.stages, layout.pipeline):
            own = of.blocks[starts[stage] : starts[stage + 1]]
            ends = {"first": stage == 0, "last": stage == layout.stages - 1}
            for one, _, n in stage_layers(of, own, 0, "none", **ends):
                shared = one.parameters - one.frozen_parameters
                experts = one.expert_parameters - one.frozen_expert_parameters
                equals = layout.tensor * copies / layout.expert
                mine += n * each * (shared / copies + experts / equals)
        yield rank, mine


@pytest.mark.parametrize("seed", slow_after(20, range(60)))
def test_a_checkpoint_is_what_its_ranks_write(seed: int) -> None:
    problem, layout = random_problem(seed)
    servers: dict[int, float] = defaultdict(float)
    ranks = dict(written(problem, layout))
    for rank, mine in ranks.items():
        servers[rank // problem.fabric.per_server] += mine
    expected = Checkpoint(sum(ranks.values()), max(servers.values()), max(ranks.values()))
    found, least = checkpoint(problem, layout), least_checkpoint(problem)
    for name in ("total", "of_server", "of_device"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name))
        assert getattr(least, name) <= getattr(found, name) * (1 + 1e-12)
    whole = sum(problem.architecture.parameters().values())
    each = problem.precision.weight_bytes + problem.precision.optimizer_bytes
    assert least.total == pytest.approx(whole * each)


@pytest.mark.parametrize("seed", slow_after(5, range(60)))
def test_no_layout_is_better_with_failures_than_the_first(seed: int) -> None:
    """All layouts of tiny problems, whose checkpoints are large beside their iterations."""
    chance = Random(seed)
    case = random_case(chance, every_layout, 200)
    memory = case.draw_memory(chance)
    problem, asynchronous = case.limited(memory), chance.random() < 0.5
    fitting = case.fitting(memory)
    longest = fitting[0].seconds
    failures = Failures(
        longest * chance.choice((30, 1e3, 1e5)) * problem.fabric.devices,
        max(1e6, checkpoint(problem, fitting[0].layout).of_server / longest),
        asynchronous,
        restart_seconds=longest * chance.choice((0, 3)),
        repair_seconds=longest * chance.choice((0, 100)),
    )
    request = LayoutRequest(
        problem=problem, space=case.space, top=3, by_stage=False, failures=failures
    )
    answer = find_layouts(request)
    waits = not answer.failures.smaller
    best = answer.rows[0].effective_seconds
    effective = [
        goodput(
            failures, run_size(problem, failures, one.seconds, checkpoint(problem, one.layout))
        ).effective_seconds(one.seconds)
        for one in fitting
    ]
    shown = [row.effective_seconds for row in answer.rows]
    assert all(low <= high * (1 + 1e-9) for low, high in pairwise(shown))
    if waits:
        assert best == pytest.approx(min(effective), rel=1e-8)
        assert answer.failures.bound_effective_seconds <= min(effective) * (1 + 1e-9)
    else:
        assert best <= min(effective) * (1 + 1e-9)
    if answer.status == "optimal":
        assert answer.failures.gap == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mtbf_seconds": 0.0}, "mtbf_seconds must be positive"),
        ({"checkpoint_bytes_per_second": 2.0}, "is a unit missing"),
        ({"spares": 1}, "spares need repair_seconds"),
        ({"restart_seconds": -1.0}, "restart_seconds must be finite and not negative"),
    ],
)
def test_refusals(changed: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(OFTEN, **changed)
