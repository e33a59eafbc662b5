"""Piper's pipelines: every pipeline of tiny problems, and the published times per sample."""

from dataclasses import replace
from itertools import product
from math import ceil, inf
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.formulations.dags.piper import (
    Edge,
    LayerOption,
    PiperLayer,
    PiperProblem,
    PiperStage,
    piper_problem,
    shared_work,
)
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.importers.piper import read_piper
from stagewright.solvers.dags import piper as solver
from stagewright.solvers.dags.piper import piper_pipeline

LIMITS = Limits(60)


def option(seconds, flight=0.0, fixed=0.0, parameters=0.0, edges=None):
    return LayerOption("", seconds, parameters, flight, fixed, edges or {})


# Layers a -> b -> c: b in two ways on one device, in one way on two.
PROBLEM = PiperProblem(
    layers=(
        PiperLayer("a", {1: (option(1.0, 1.0, edges={0: 1.0}),)}),
        PiperLayer(
            "b",
            {
                1: (option(4.0, 3.0, 1.0, 6.0), option(6.0, 1.0, 2.0, 6.0)),
                2: (option(3.0, 2.0, 1.0, 3.0, {0: 2.0, 1: 3.0}),),
            },
        ),
        PiperLayer("c", {1: (option(1.0, 1.0),)}),
    ),
    edges=(Edge(0, 1, 2.0), Edge(1, 2, 4.0)),
    devices=4,
    memory=9.0,
    bandwidth=8.0,
    samples=6,
)
GOOD = (PiperStage((0,), 1, 1, (0,)), PiperStage((1,), 1, 2, (0,)), PiperStage((2,), 1, 1, (0,)))


def test_the_time_and_the_bytes_of_a_stage_by_hand():
    # b on two replicas: 4 / 2, 2 * (2 + 4) bytes in and out / 2 / 8, and 4 / 2 * 6 / 6 bytes / 8.
    replicated = PiperStage((1,), 2, 1, (0,))
    assert PROBLEM.stage_seconds(replicated) == pytest.approx(2 + 6 / 8 + 2 / 8)
    assert PROBLEM.stage_bytes(replicated, 2) == 7
    # b on two shards: 3, and 2 * (2 + 2 + 4 + 3) bytes / 8; a: 1, and 2 * (2 + 1) bytes / 8.
    assert PROBLEM.stage_seconds(GOOD[1]) == pytest.approx(3 + 22 / 8)
    assert PROBLEM.stage_seconds(GOOD[0]) == pytest.approx(1 + 6 / 8)
    assert PROBLEM.evaluate(GOOD) == pytest.approx(3 + 22 / 8)
    # Within a stage no edge is paid for; one stage of one replica exchanges nothing.
    whole = PiperStage((0, 1, 2), 1, 1, (0, 0, 0))
    assert PROBLEM.evaluate((whole,)) == pytest.approx(6)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (GOOD[:2], "c is in no stage"),
        ((*GOOD, GOOD[0]), "a is in two stages"),
        ((GOOD[1], GOOD[0], GOOD[2]), "the edge from a to b goes back"),
        ((PiperStage((0, 2), 1, 1, (0, 0)), PiperStage((1,), 1, 1, (1,))), "from b to c goes back"),
        ((GOOD[0], PiperStage((1,), 1, 1, (2,)), GOOD[2]), "b has no option 2 for 1 shards"),
        ((PiperStage((0,), 1, 2, (0,)), *GOOD[1:]), "a has no option 0 for 2 shards"),
        ((*GOOD, PiperStage((), 1, 1, ())), "stage 3 must have layers"),
        ((GOOD[0], PiperStage((1, 2), 1, 1, (0,))), "stage 1 must have layers, and an option"),
        ((*GOOD[:2], PiperStage((3,), 1, 1, (0,))), "there is no layer 3"),
        ((*GOOD[:2], PiperStage((2,), 4, 1, (0,))), "stage 2: 4 replicas do not divide 6 samples"),
        ((PiperStage((0,), 0, 1, (0,)), *GOOD[1:]), "stage 0: 0 replicas do not divide"),
        ((*GOOD[:2], PiperStage((2,), 6, 1, (0,))), "8 replicas in all for 6 samples"),
        ((*GOOD[:2], PiperStage((2,), 2, 1, (0,))), "5 devices are used, there are 4"),
        # b has 3 samples in flight on its one replica: 3 * 3 + 1 bytes.
        ((GOOD[0], PiperStage((1,), 1, 1, (0,)), PiperStage((2,), 2, 1, (0,))),
         "stage 1: 10 B with 3 samples in flight on a device of 9 B"),
    ],
)  # fmt: skip
def test_broken_pipelines_are_refused(stages, message):
    with pytest.raises(InvalidPlan, match=message):
        PROBLEM.evaluate(stages)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": 0}, "devices must be at least 1"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"bandwidth": 0.0}, "bandwidth must be positive"),
        ({"memory": -1.0}, "memory must not be negative"),
        ({"layers": ()}, "there must be a layer"),
        ({"edges": (Edge(0, 1, 1.0), Edge(1, 3, 1.0))}, "edge 1 must be between layers below 3"),
        ({"edges": (Edge(0, 1, inf), Edge(1, 2, 1.0))}, "edge 0: bytes must be finite"),
        ({"edges": (*PROBLEM.edges, Edge(2, 0, 1.0))}, "the layers form a cycle: a -> b -> c"),
        ({"edges": PROBLEM.edges[:1]}, r"edge_bytes must be of the edges \[0\], got \[0, 1\]"),
        ({"layers": (PiperLayer("a", {1: ()}), *PROBLEM.layers[1:])}, "layer a has no option"),
        (
            {"layers": (PiperLayer("a", {0: (option(1.0),)}), *PROBLEM.layers[1:])},
            "number of shards",
        ),
        (
            {"layers": (PiperLayer("a", {1: (option(-1.0),)}), *PROBLEM.layers[1:])},
            "layer a, option",
        ),
    ],
)
def test_what_makes_no_problem_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        replace(PROBLEM, **change)


@st.composite
def problems(draw, most=4):
    """Whole numbers; options that differ in all they may differ in, memory that binds."""
    n = draw(st.integers(1, most))
    order = draw(st.permutations(range(n)))
    few, shards = st.integers(0, 4), st.sampled_from([(1,), (1, 2), (2,), (1, 2, 3)])
    pairs = [(order[a], order[b]) for b in range(n) for a in range(b) if draw(st.booleans())]
    edges = tuple(Edge(a, b, float(draw(few))) for a, b in pairs)
    same = draw(st.booleans())  # parameters of the options of a layer
    layers = []
    for v in range(n):
        own = [e for e, pair in enumerate(pairs) if v in pair]
        options = {}
        for degree in draw(shards):
            parameters = draw(few)
            options[degree] = tuple(
                LayerOption(
                    "",
                    float(draw(st.integers(0, 9))),
                    float(parameters if same else draw(few)),
                    float(draw(few)),
                    float(draw(few)),
                    {e: float(draw(few)) for e in own if draw(st.booleans())},
                )
                for _ in range(draw(st.integers(1, 3)))
            )
        layers.append(PiperLayer(f"l{v}", options))
    return PiperProblem(
        layers=tuple(layers),
        edges=edges,
        devices=draw(st.integers(1, 8)),
        memory=draw(st.sampled_from([9.0, 14.0, 20.0, inf])),
        bandwidth=draw(st.sampled_from([2.0, 16.0, 128.0])),
        samples=draw(st.sampled_from([2, 3, 4, 6, 12])),
    )


def least(problem):
    """The least time per sample, by every pipeline; the formula written a second time."""
    n, best = len(problem.layers), inf
    for home in product(range(n), repeat=n):
        last = max(home)
        if set(home) != set(range(last + 1)):
            continue
        if any(home[edge.source] > home[edge.target] for edge in problem.edges):
            continue
        sets = [[v for v in range(n) if home[v] == i] for i in range(last + 1)]
        best = min(best, _best(problem, sets[::-1], 0, problem.devices))
    return best


def _best(problem, sets, later, devices):
    """The least time of stages of these sets, the last first, after ``later`` replicas."""
    if not sets:
        return 0.0
    best = inf
    for t in range(1, devices + 1):
        for d in range(1, devices // t + 1):
            if problem.samples % d or later + d > problem.samples:
                continue
            rest = _best(problem, sets[1:], later + d, devices - d * t)
            own = _stage(problem, sets[0], t, d, ceil((later + d) / d))
            best = min(best, max(rest, own))
    return best


def _stage(problem, layers, t, d, in_flight):
    best = inf
    for chosen in product(*(problem.layers[v].options.get(t, ()) for v in layers)):
        held = sum(one.flight_bytes * in_flight + one.fixed_bytes for one in chosen)
        if held > problem.memory:
            continue
        sent = sum(4 * (d - 1) * one.parameter_bytes / problem.samples for one in chosen)
        for v, one in zip(layers, chosen, strict=True):
            for e, edge in enumerate(problem.edges):
                if v in (edge.source, edge.target) and not {edge.source, edge.target} <= {*layers}:
                    sent += 2 * (edge.bytes + one.edge_bytes.get(e, 0))
        computed = sum(one.seconds for one in chosen)
        best = min(best, (computed + sent / problem.bandwidth) / d)
    return best


@examples(300)
@given(problem=problems())
def test_equals_every_pipeline(problem):
    right = least(problem)
    found = piper_pipeline(problem, LIMITS)
    if right == inf:
        assert found.status is Status.INFEASIBLE
        assert found.stages is None
        return
    assert found.status is Status.OPTIMAL
    assert found.cost == pytest.approx(right)
    assert problem.evaluate(found.stages) == found.cost
    assert found.gap == 0
    assert shared_work(problem) <= right * (1 + 1e-9)


def chain_of(seed):
    """A chain of 5 to 8 layers; recomputation, shards and replicas all pay somewhere."""
    random = np.random.default_rng(seed)
    n, equal = int(random.integers(5, 9)), random.random() < 0.5
    layers = []
    for v in range(n):
        seconds, kept, parameters = random.random() + 0.3, 4 * random.random(), 3 * random.random()
        own = [e for e in (v - 1, v) if 0 <= e < n - 1]
        options = {
            shards: tuple(
                LayerOption(
                    "",
                    seconds / shards**0.8 * (1 + 0.3 * way + 0.1 * random.random()),
                    parameters / shards * (1 if equal else 0.5 + random.random()),
                    kept / shards / (1 + 2 * way),
                    2 * parameters / shards + kept * way / 3,
                    {e: random.random() for e in own},
                )
                for way in range(2)
            )
            for shards in (1, 2, 4)
        }
        layers.append(PiperLayer(f"l{v}", options))
    return PiperProblem(
        layers=tuple(layers),
        edges=tuple(Edge(v, v + 1, 3 * random.random()) for v in range(n - 1)),
        devices=int(random.integers(4, 17)),
        memory=float(random.choice([6, 8, 12, 18])),
        bandwidth=float(random.choice([5, 30, 200])),
        samples=int(random.choice([6, 12, 24])),
    )


def by_the_paper(problem):
    """Its dynamic program: the least time of layers v and on, by devices and replicas in all."""
    n, most = len(problem.layers), min(problem.devices, problem.samples)
    best = np.full((n + 1, problem.devices + 1, most + 1), inf)
    best[n] = 0.0
    degrees = [
        (t, d)
        for t in (1, 2, 4)
        for d in range(1, problem.devices // t + 1)
        if problem.samples % d == 0
    ]
    for v, (t, d) in product(reversed(range(n)), degrees):
        for end, in_flight in product(range(v + 1, n + 1), range(1, ceil(most / d) + 1)):
            own = _stage(problem, range(v, end), t, d, in_flight)
            for s in range(max(d, d * (in_flight - 1) + 1), min(d * in_flight, most) + 1):
                rest = best[end, : problem.devices + 1 - t * d, s - d]
                best[v, t * d :, s] = np.minimum(best[v, t * d :, s], np.maximum(rest, own))
    return best[0].min()


@examples(20)
@given(seed=st.integers(0, 10**6))
def test_equals_the_papers_program_on_chains(seed):
    problem = chain_of(seed)
    right, found = by_the_paper(problem), piper_pipeline(problem, LIMITS)
    assert (found.status is Status.INFEASIBLE) == (right == inf)
    if found.stages is not None:
        assert found.cost == pytest.approx(right, rel=1e-8)


@examples(60)
@given(problem=problems())
def test_more_of_anything_never_hurts(problem):
    found = piper_pipeline(problem, LIMITS)
    for better in (
        replace(problem, devices=problem.devices + 1),
        replace(problem, memory=2 * problem.memory),
        replace(problem, bandwidth=2 * problem.bandwidth),
    ):
        again = piper_pipeline(better, LIMITS)
        assert found.cost is None or again.cost <= found.cost * (1 + 1e-9)


@examples(100)
@given(problem=problems())
def test_too_many_upsets_leave_a_gap(problem):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "MOST_UPSETS", 2)
        found = piper_pipeline(problem, LIMITS)
    right = least(problem)
    if len(problem.layers) > 1 and found.cost is not None:
        is_met = found.cost <= found.bound * (1 + 1e-9)
        assert (found.status is Status.OPTIMAL) == is_met
    assert found.bound <= right * (1 + 1e-9)
    if found.stages is not None:
        assert problem.evaluate(found.stages) == found.cost >= right * (1 - 1e-9)


def test_the_time_limit_keeps_the_bound():
    found = piper_pipeline(PROBLEM, Limits(1e-9))
    assert (found.status, found.stages, found.gap) == (Status.NO_ANSWER, None, None)
    assert found.bound == shared_work(PROBLEM) == 6 / 4


def test_options_on_more_devices_than_there_are_are_no_use():
    layers = (PiperLayer("a", {2: (option(1.0),)}), PiperLayer("b", {4: (option(1.0),)}))
    problem = PiperProblem(layers, (), 4, 0.0, 1.0, 2)
    for devices in (1, 3, 5):
        found = piper_pipeline(replace(problem, devices=devices), LIMITS)
        assert (found.status, found.stages) == (Status.INFEASIBLE, None)
    assert piper_pipeline(replace(problem, devices=6), LIMITS).cost == 1


def test_which_option_is_best_depends_on_the_replicas():
    """On 1, 2 replicas the second option: 2, 1 + 1 s; on 4 the first one: 1 s, not 1/2 + 3/2."""
    layers = (PiperLayer("a", {1: (option(4.0), option(2.0, parameters=2.0))}),)
    problem = PiperProblem(layers, (), 1, 0.0, 1.0, 4)
    for devices, cost, choice in ((1, 2.0, 1), (3, 2.0, None), (4, 1.0, 0)):
        found = piper_pipeline(replace(problem, devices=devices), LIMITS)
        assert found.cost == pytest.approx(cost)
        assert choice is None or found.stages[0].options == (choice,)
    held = (PiperLayer("a", {1: (option(4.0, 1.0), option(2.0, parameters=2.0))}),)
    found = piper_pipeline(replace(problem, layers=held, devices=4), LIMITS)
    assert (found.cost, found.stages[0].replicas) == (pytest.approx(2.0), 1)


PIPER = Path(__file__).parents[3] / "shared" / "data" / "piper"

# (input, devices, GiB): time per sample at 25 GiB/s, as measured with the published program
PUBLISHED = {
    ("bert32a100", 8, 2): None,
    ("bert32a100", 8, 8): 0.165856,
    ("bert32a100", 128, 8): 0.0101209,
    ("bert32a100", 1024, 8): 0.00130318,
    ("bert32a100", 8, 80): 0.122007,
    ("bert32a100", 1024, 80): 0.00115876,
    ("resnet", 8, 8): 63.434,
}


def published(name, devices, gigabytes):
    return piper_problem(
        read_piper(PIPER / f"{name}.json"),
        devices=devices,
        memory=gigabytes * 2**30,
        bandwidth=25 * 2**30,
    )


@pytest.mark.skipif(not PIPER.exists(), reason="the published inputs are absent")
@pytest.mark.parametrize("case", PUBLISHED)
def test_the_published_times(case):
    problem = published(*case)
    found = piper_pipeline(problem, LIMITS)
    if PUBLISHED[case] is None:
        assert found.status is Status.INFEASIBLE
        return
    assert found.status is Status.OPTIMAL
    assert found.cost == pytest.approx(PUBLISHED[case], rel=1e-5)
    assert problem.evaluate(found.stages) == found.cost


@pytest.mark.skipif(not PIPER.exists(), reason="the published inputs are absent")
def test_the_published_choice_of_options_is_a_heuristic():
    """Its greedy choice recomputes more than the memory asks for: 17.624 s."""
    problem = published("resnet", 32, 4)
    found = piper_pipeline(problem, LIMITS)
    assert found.status is Status.OPTIMAL
    assert problem.evaluate(found.stages) == found.cost == pytest.approx(17.42013, rel=1e-6)
