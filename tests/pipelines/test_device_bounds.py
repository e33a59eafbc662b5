"""Bounds on the schedules of any stages: brute force, exact solvers, relations, known values."""

import json
import random
from dataclasses import replace
from itertools import islice, pairwise
from math import inf

import numpy as np
import pytest
from group_instances import named_stages
from hypothesis import assume, given
from hypothesis import strategies as st
from language_instances import random_instance
from language_oracle import Language, Search
from language_prices import Instance
from language_schedule import TICK, best_schedule, build_tasks, fits
from profiles import UNSHRUNK, examples, slow_after
from schedule_oracle import Action, least_time

from stagewright.formulations.checking.proofs import verdicts
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.bounds.devices import (
    EDGE_FINDING,
    is_refuted,
    machine_bound,
    quick_device_bound,
    tasks_of,
    tasks_of_stages,
    verified_bound,
    window_of,
)
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.memory import kept_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.plan_class import EVERY_FINITE, WHOLE_FINITE, class_of
from stagewright.formulations.plans.structure import Structure, misfit, work_of
from stagewright.graphs.documents.documents import parse
from stagewright.graphs.machines.cluster import Cluster, Device, Link, from_matrix, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.pipelines.every_plan import device_bounds
from stagewright.solvers.pipelines.scheduling import solve_schedule
from stagewright.solvers.planning import plan

SLACK = 1 + 1e-9
MB = 1e6
numbers = st.integers


# Tiny problems in whole seconds and bytes.


@st.composite
def problems(draw: st.DrawFn, layers: int, devices: int, microbatches: int) -> PipelineProblem:
    """Devices of one kind, layers with both parts of a backward; memory may be short."""
    drawn = tuple(draw(tiny_layers(f"l{i}")) for i in range(draw(numbers(1, layers))))
    chain = Chain("tiny", "drawn", 2, drawn)
    memory = draw(st.sampled_from((1000, 60, 40, 30))) * MB
    machines = [Device(f"d{v}", "one", memory) for v in range(draw(numbers(1, devices)))]
    return PipelineProblem(chain, linked(machines), draw(numbers(1, microbatches)))


@st.composite
def tiny_layers(draw: st.DrawFn, name: str) -> Layer:
    cost = LayerCost(
        2,
        forward_seconds=2.0 * draw(numbers(1, 5)),
        saved_bytes=2 * MB * draw(numbers(0, 3)),
        output_bytes=2 * MB * draw(numbers(0, 3)),
        input_gradient_seconds=2.0 * draw(numbers(1, 5)),
        weight_gradient_seconds=2.0 * draw(numbers(0, 5)),
        backward_seconds=draw(st.sampled_from((None, 2.0, 6.0, 12.0))),
        update_seconds=float(draw(st.sampled_from((0, 0, 1, 4)))),
    )
    return Layer(name, draw(st.sampled_from((0, 3))) * MB, (cost,))


def linked(devices):
    """A cluster whose links carry a megabyte per second."""
    return from_matrix(devices, np.full((len(devices),) * 2, MB), 0.0)


@st.composite
def structures(draw: st.DrawFn, problem: PipelineProblem) -> Structure:
    """Any cuts, devices, replication and recomputation."""
    size = len(problem.chain)
    cuts = sorted({0, size, *draw(st.sets(numbers(1, size)))})
    names = [device.name for device in problem.cluster.devices]
    stages = []
    for start, stop in pairwise(cuts):
        devices = tuple(draw(st.lists(st.sampled_from(names), min_size=1, unique=True)))
        kind = draw(st.sampled_from(("split", "round-robin"))) if len(devices) > 1 else "split"
        if kind == "split":
            devices = devices[:2]  # there are two samples
        way = draw(st.sampled_from(("none", "none", "full", "layer")))
        stages.append(Stage((start, stop), devices, kind, way))
    return Structure(tuple(stages), tuple(draw(st.booleans()) for _ in stages))


class Actions:
    """The actions of a structure for the oracle, by (kind, stage, microbatch)."""

    def __init__(self, problem, structure):
        self.work, self.endings, _ = work_of(problem, structure)
        self.problem, self.stages, self.split = problem, structure.stages, structure.split
        self.by_name = {}
        for s in range(len(self.stages)):
            for m in range(problem.microbatches):
                self.compute(s, m)
                if self.is_sent(s, m):
                    self.send(s, m)
            self.end(s)

    @property
    def memory(self):
        return {v: float(room) for v, room in enumerate(self.work.room)}

    def add(self, name, seconds, resources, before, holds=()):
        assert seconds == int(seconds)
        self.by_name[name] = Action(int(seconds), frozenset(resources), before, holds)

    def is_sent(self, s, m):
        """Whether microbatch m is sent from stage s to the next one."""
        last = s + 1 == len(self.stages)
        return not last and self.stages[s].runners(m) != self.stages[s + 1].runners(m)

    def devices(self, names):
        return [self.problem.cluster.index[name] for name in names]

    def compute(self, s, m):
        split, seconds = self.split[s], self.work.seconds[:, s, m]
        kept, done = kept_bytes(self.problem, self.stages[s], split), ("BW"[split], s, m)
        runners = self.devices(self.stages[s].runners(m))
        ready = [("TO" if self.is_sent(s - 1, m) else "F", s - 1, m)] if s else []
        back = ("BACK" if self.is_sent(s, m) else "B", s + 1, m)
        turn = back if s + 1 < len(self.stages) else ("F", s, m)
        saved, working = ([(v, size, done) for v in runners]
                          for size in (kept.saved_bytes, kept.working_bytes))  # fmt: skip
        self.add(("F", s, m), seconds[0], runners, tuple(ready), tuple(saved))
        self.add(("B", s, m), seconds[1], runners, (turn,), tuple(working))
        if split:
            self.add(("W", s, m), seconds[2], runners, (("B", s, m),))

    def send(self, s, m):
        channel = (s, self.stages[s].runners(m), self.stages[s + 1].runners(m))
        there, back = self.work.seconds[3, s, m], self.work.seconds[4, s + 1, m]
        self.add(("TO", s, m), there, [channel], (("F", s, m),))
        self.add(("BACK", s + 1, m), back, [channel], (("B", s + 1, m),))

    def end(self, s):
        group, (reduce, update) = self.devices(self.stages[s].devices), self.closing(s)
        ready = tuple(("BW"[self.split[s]], s, m) for m in range(self.problem.microbatches))
        if reduce:
            self.add(("REDUCE", s, 0), reduce, [("reduces", v) for v in group], ready)
            ready = (("REDUCE", s, 0),)
        if update:
            self.add(("UPDATE", s, 0), update, group, ready)

    def closing(self, s):
        return np.nan_to_num([self.endings.reduce[s], self.endings.update[s]]).tolist()


def all_bounds(tasks):
    window = window_of(tasks)
    return machine_bound(tasks, window), window


@given(st.data())
@examples(150, phases=UNSHRUNK)
def test_no_bound_exceeds_the_least_time_of_every_order(data):
    problem = data.draw(problems(3, 3, 3))
    structure = data.draw(structures(problem))
    work, endings, _ = work_of(problem, structure)
    assume(misfit(problem, structure) is None)
    actions = Actions(problem, structure)
    assume(len(actions.by_name) <= 14)
    optimum = least_time(actions.by_name, actions.memory)
    tasks = tasks_of(work, endings)
    seconds, window = all_bounds(tasks)
    assert quick_device_bound(work, endings) <= seconds * SLACK
    assert seconds <= optimum * SLACK
    assert not is_refuted(tasks, optimum * SLACK, window)
    parts = any(structure.split)
    of_class, window = all_bounds(tasks_of_stages(problem, structure.stages, parts))
    assert of_class <= optimum * SLACK
    assert verified_bound(problem, structure.stages, parts, 1.001 * optimum) <= 1.001 * optimum
    assert verified_bound(problem, structure.stages, parts, optimum * SLACK**2) <= optimum * SLACK


def test_the_oracle_by_hand():
    # Two microbatches of F = 1, B = 2 on one device, of 1 byte each; then on two devices in turn.
    def both(devices, room):
        actions = {}
        for m, v in enumerate(devices):
            holds = ((v, 1, ("B", m)),)
            actions["F", m] = Action(1, frozenset({v}), (), holds)
            actions["B", m] = Action(2, frozenset({v, "link"}), (("F", m),))
        return least_time(actions, {0: room, 1: room})

    assert both((0, 0), 1) == 6
    assert both((0, 1), 1) == 5  # the link carries one backward at a time
    assert both((0, 1), 0) == inf


def read(seed):
    model, cluster, microbatches = documents = random_instance(seed)
    chain = parse(Chain, json.dumps(model), "model")
    machines = parse(Cluster, json.dumps(cluster), "cluster")
    return documents, PipelineProblem(chain, machines, microbatches)


@pytest.mark.parametrize("seed", slow_after(8, range(120)))
def test_no_schedule_of_the_language_undercuts_a_bound(seed):
    """Unlike devices, offloading and uneven shares, against the oracle of the language."""
    documents, problem = read(seed)
    instance, draw = Instance(*documents), random.Random(seed)
    search = Search(instance, Language())
    found = list(islice(search.structures(), 3000))
    for plain in draw.sample(found, min(4, len(found))):
        stages = tuple(draw.choice([one, *search.stage_variants(one)]) for one in plain)
        if not fits(instance, stages):
            continue
        named = named_stages(instance, stages)
        for parts in (False, True):
            ticks, _ = best_schedule(instance, stages, build_tasks(instance, stages, parts), inf)
            tasks = tasks_of_stages(problem, named, parts)
            seconds, window = all_bounds(tasks)
            assert seconds <= ticks * TICK * SLACK
            assert not is_refuted(tasks, ticks * TICK * SLACK, window)


def makespan_of(problem, structure):
    """The makespan problem of single devices without optimizer steps and memory limits."""
    work, _, _ = work_of(problem, structure)
    forward, backward, weights, there, back = (row[:, 0].tolist() for row in work.seconds)
    homes = [problem.cluster.index[stage.devices[0]] for stage in structure.stages]
    number = {v: i for i, v in enumerate(dict.fromkeys(homes))}
    stages, split = len(homes), structure.split[0]
    return MakespanProblem(
        problem.microbatches,
        tuple(forward),
        tuple(backward),
        tuple(there[:-1]),
        tuple(back[1:]),
        (0.0,) * stages,
        (problem.microbatches,) * stages,
        tuple(number[v] for v in homes),
        tuple(weights) if split else None,
    )


@given(st.data())
@examples(50, phases=UNSHRUNK)
def test_no_bound_exceeds_the_optimum_of_looped_stages(data):
    problem = data.draw(problems(5, 3, 4))
    layers = tuple(
        replace(one, costs=tuple(replace(cost, update_seconds=0.0) for cost in one.costs))
        for one in problem.chain.layers
    )
    devices = [replace(one, memory_bytes=1e12) for one in problem.cluster.devices]
    chain = replace(problem.chain, layers=layers)
    problem = PipelineProblem(chain, linked(devices), problem.microbatches)
    names = st.sampled_from([one.name for one in devices])
    stages = tuple(Stage((s, s + 1), (data.draw(names),)) for s in range(len(layers)))
    structure = Structure(stages, (data.draw(st.booleans()),) * len(stages))
    found = solve_schedule(makespan_of(problem, structure), "optimal", Limits(20))
    assume(found.gap is not None and found.gap < 1e-9)
    work, endings, _ = work_of(problem, structure)
    tasks = tasks_of(work, endings)
    seconds, window = all_bounds(tasks)
    assert quick_device_bound(work, endings) <= seconds * SLACK
    assert seconds <= found.cost * SLACK
    assert not is_refuted(tasks, found.cost * SLACK, window)


# Known values.


def uniform(layers, microbatches, parts=None, output=0.0, whole=None):
    backward = {"backward_seconds": 2.0 if parts is None else whole}
    if parts is not None:
        backward |= {"input_gradient_seconds": parts[0], "weight_gradient_seconds": parts[1]}
    cost = LayerCost(1, 1.0, MB, output, **backward)
    chain = Chain("equal", "test", 1, tuple(Layer(f"l{i}", 0.0, (cost,)) for i in range(layers)))
    return PipelineProblem(chain, uniform_servers(1, 2, Link(MB)), microbatches)


def looped(layers):
    return tuple(Stage((s, s + 1), (f"s0g{s % 2}",)) for s in range(layers))


def test_two_devices_in_a_loop():
    # As the interleaved schedule: the last device starts after F, does all, and B follows.
    problem = uniform(4, 4)
    (bound,) = device_bounds(problem, looped(4), WHOLE_FINITE, 1e9, 1.0)
    assert bound.plans == EVERY_FINITE  # no layer has a separate input gradient
    assert bound.seconds == pytest.approx(2 * 3 * 4 + 3, rel=1e-6)


def test_weight_gradients_end_after_what_comes_back():
    # One microbatch on two devices: F F I I, then both W at once; whole backwards take 6.
    problem = uniform(2, 1, parts=(1.0, 1.0))
    every, whole = device_bounds(problem, looped(2), WHOLE_FINITE, 6.0, 1.0)
    assert (every.plans, whole.plans) == (EVERY_FINITE, WHOLE_FINITE)
    assert every.seconds == pytest.approx(5)
    assert whole.seconds == pytest.approx(6)


def test_parts_that_take_longer_bound_no_whole_backwards():
    problem = uniform(2, 1, parts=(3.0, 1.0), whole=2.0)
    every, whole = device_bounds(problem, looped(2), WHOLE_FINITE, 6.0, 1.0)
    assert every.seconds == whole.seconds == pytest.approx(6)


def test_devices_in_turns_run_half_of_the_microbatches():
    problem = uniform(1, 4)
    stages = (Stage((0, 1), ("s0g0", "s0g1"), "round-robin"),)
    (bound,) = device_bounds(problem, stages, WHOLE_FINITE, 6.0, 1.0)
    assert bound.seconds == pytest.approx(6)


def test_memory_for_one_microbatch_is_one_after_the_other():
    # Each stage keeps a byte per microbatch, and buffers of two.
    problem = uniform(2, 3, output=MB)
    devices = [replace(one, memory_bytes=3 * MB) for one in problem.cluster.devices]
    tight = PipelineProblem(problem.chain, linked(devices), 3)
    (bound,) = device_bounds(tight, looped(2), WHOLE_FINITE, 24.0, 1.0)
    assert bound.seconds == pytest.approx(3 * (3 + 3 + 2))


def test_a_whole_backward_on_unlike_devices_may_be_shorter_than_its_parts():
    # I and W take 4 and 1 on one device, 1 and 4 on the other: 4 each together, B takes 5.
    costs = tuple(
        LayerCost(2, 2.0, MB, 0.0, None, *parts, device_kind=kind)
        for kind, parts in (("a", (8.0, 2.0)), ("b", (2.0, 8.0)))
    )
    chain = Chain("unlike", "test", 2, (Layer("l", 0.0, costs),))
    cluster = linked([Device("d0", "a", 1e9), Device("d1", "b", 1e9)])
    stages = (Stage((0, 1), ("d0", "d1")),)
    for bound in device_bounds(PipelineProblem(chain, cluster, 1), stages, WHOLE_FINITE, 6.0, 1.0):
        assert bound.seconds == pytest.approx(1 + 5)


@pytest.mark.parametrize(
    ("parts", "first", "limits"),
    [
        (False, ("s0g0",), [3, 3, 1]),  # stages 0 and 2 keep a byte each of a microbatch
        (True, ("s0g0",), [3, 3, 3]),  # stage 0 may have ended its W, but stage 2 not
        (False, ("s0g0", "s0g1"), [3, 3, 3]),  # of every other microbatch stage 2 alone keeps one
    ],
)
def test_microbatches_that_fit(parts, first, limits):
    problem = uniform(3, 4, parts=(1.0, 1.0))
    devices = [replace(one, memory_bytes=3 * MB) for one in problem.cluster.devices]
    room = PipelineProblem(problem.chain, linked(devices), 4)
    kind = "round-robin" if len(first) > 1 else "split"
    stages = (Stage((0, 1), first, kind), Stage((1, 2), ("s0g1",)), Stage((2, 3), ("s0g0",)))
    assert tasks_of_stages(room, stages, parts).limits[:, 0].tolist() == limits


# In the certificate.


def test_a_looped_plan_is_certified_and_a_forged_bound_is_refuted():
    problem = uniform(4, 3, parts=(1.0, 1.0))
    result = plan(problem, "general", Limits(0.5))
    assert result.plan is not None
    given_ = result.plan.certificate
    assert given_ is not None
    own = [one for one in given_.bounds if one.proved_by == EDGE_FINDING]
    assert {one.plans for one in own} == {EVERY_FINITE, WHOLE_FINITE}
    assert given_.schedule_bound_seconds >= max(
        one.seconds for one in own if one.plans.contains(class_of(result.plan))
    )
    places = [i for i, one in enumerate(given_.bounds) if one.proved_by == EDGE_FINDING]
    assert all(verdicts(problem, result.plan)[i].verdict == "verified" for i in places)
    for change in ({"seconds": 1.01 * given_.cost_seconds}, {"scope": "problem"}):
        bounds = list(given_.bounds)
        bounds[places[0]] = replace(bounds[places[0]], **change)
        forged = replace(result.plan, certificate=replace(given_, bounds=tuple(bounds)))
        assert verdicts(problem, forged)[places[0]].verdict == "refuted"
