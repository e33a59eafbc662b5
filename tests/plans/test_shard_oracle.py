"""Plans whose replicas divide their state, against plain arithmetic."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, permutations
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from tensor_oracle import UPDATE, B, F, I, Links, TensorOracle, W

from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.checking.check import check
from stagewright.formulations.plans.actions import Action, parse_action
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.formulations.plans.plan_class import SHARDS
from stagewright.formulations.plans.timing import empty_blocks
from stagewright.graphs.machines.cluster import Device, from_matrix
from stagewright.graphs.models.chain import Chain, Layer, LayerCost

UNIT = 16
"""Bytes; every part is a multiple of it."""

ROUNDS = {F: 1, B: 2, I: 1, W: 1}
"""All-gathers and reduce-scatters of weights and gradients in a computation."""

WHOLE = {"gradients": 1, "weights": 0}
"""Where gradients are divided, how many tensors as large as the weights stay whole."""


class ShardOracle(TensorOracle):
    """What a plan costs whose stages may have ``shards``."""

    def __init__(
        self, problem: PipelineProblem, stages: Sequence[Stage], links: Links, split: Sequence[bool]
    ) -> None:
        super().__init__(problem, stages, links, split)
        self.reached = problem.cluster.all_reduce_share or 1.0
        """The share of a link's bandwidth that collectives reach."""

    def shards(self, s: int) -> str:
        return self.stages[s].shards if len(self.groups(s)) > 1 else "none"

    def layer_bytes(self, s: int) -> list[float]:
        """Weights of each layer of stage ``s`` on a device."""
        if self.stages[s].tensor == 1:
            start, stop = self.stages[s].layers
            return [one.parameter_bytes for one in self.chain.layers[start:stop]]
        return [one.shard_parameter_bytes or 0.0 for one in self.of(s, self.kinds_of(s)[0])]

    def divided(self, s: int) -> list[float]:
        """The bytes of each flat tensor that stage ``s`` cuts into parts."""
        each = self.layer_bytes(s)
        return [sum(each)] if self.shards(s) == "optimizer" else [one for one in each if one]

    def part_bytes(self, s: int) -> list[float]:
        """The part of each flat tensor that a replica has: equal ones, in whole units."""
        count = len(self.groups(s))
        return [UNIT * -(-whole // (UNIT * count)) for whole in self.divided(s)]

    # --- Times ------------------------------------------------------------------------------------

    def round_seconds(self, s: int) -> float:
        """An all-gather or a reduce-scatter of all flat tensors, one after the other."""
        return sum(
            max(self.half_ring(ring, part) for ring in zip(*self.groups(s), strict=True))
            for part in self.part_bytes(s)
        )

    def half_ring(self, ring: Sequence[str], part: float) -> float:
        """k-1 steps, in each of which a part moves over the slowest link."""
        ends = [self.links[one, other] for one in ring for other in ring if one != other]
        slowest, latest = min(b for b, _ in ends), max(late for _, late in ends)
        return (len(ring) - 1) * (part / (self.reached * slowest) + latest)

    def ring_seconds(self, ring: Sequence[str], volume: float) -> float:
        """An all-reduce: two rounds, of parts that need no whole units."""
        return 2 * self.half_ring(ring, volume / len(ring)) if len(ring) > 1 else 0.0

    def reduce_seconds(self, s: int) -> float:
        if self.shards(s) == "optimizer":
            return self.round_seconds(s)
        return super().reduce_seconds(s)

    def seconds(self, action: Action) -> float:
        s, kind = action.stage, action.kind
        found, shards = super().seconds(action), self.shards(s)
        if kind is UPDATE and shards != "none":
            found *= self.step_share(s)
            found += self.round_seconds(s) if shards != "weights" else 0.0
        if shards == "gradients" and kind in (B, W):
            found += self.round_seconds(s)
        if shards == "weights" and kind in ROUNDS:
            again = self.stages[s].recompute == "full" and kind in (B, I)
            found += (ROUNDS[kind] + again) * self.round_seconds(s)
        return found

    def step_share(self, s: int) -> float:
        """Of the bytes of all parameters, those that a replica steps; padding is no parameter."""
        whole = sum(self.divided(s))
        return min(1.0, sum(self.part_bytes(s)) / whole) if whole else 1.0

    def add_end(self, s: int, found: dict[Action, list[Action]]) -> None:
        """Gradients that are divided are scattered within backwards."""
        if self.shards(s) in ("none", "optimizer"):
            return super().add_end(s, found)
        if self.seconds(Action(s, UPDATE)) > 0:
            found[Action(s, UPDATE)] = [
                Action(s, self.backward(s)[-1], m) for m in self.microbatches
            ]
        return None

    # --- Memory -----------------------------------------------------------------------------------

    def always(self, s: int) -> float:
        """Parts in place of what is divided; the rest as without."""
        part, states = sum(self.part_bytes(s)), self.chain.optimizer_bytes_per_parameter_byte
        found, whole = super().always(s), self.shard(s)
        if self.shards(s) == "optimizer":
            return found - states * (whole - part)
        if self.shards(s) in WHOLE:
            return found - (2 + states - WHOLE[self.shards(s)]) * (whole - part)
        return found

    def gathered(self, name: str) -> float:
        """Of the largest layer whose gradients ``name`` divides these, and weights if divided."""
        return max(
            (
                (2.0 - WHOLE[self.shards(s)])
                * len(self.groups(s))
                * max(self.part_bytes(s), default=0)
                for s, one in enumerate(self.stages)
                if name in one.devices and self.shards(s) in WHOLE
            ),
            default=0.0,
        )

    def peak(self, name: str, times: dict[Action, tuple[float, float]]) -> float:
        return super().peak(name, times) + self.gathered(name)

    def link_bytes(self) -> dict[str, float]:
        """Bytes per iteration over boundaries, and within stages: half a round counts half."""
        found: dict[str, float] = {}
        for s, one in enumerate(self.stages):
            if s + 1 < len(self.stages) and (
                sent := sum(self.crosses(s, m) for m in self.microbatches)
            ):
                both = self.stages[s + 1].tensor + one.tensor
                found[f"{s}-{s + 1}"] = sent * both * self.boundary(s)
            if len(self.groups(s)) > 1:
                rounds = 2
                if self.shards(s) == "gradients":
                    rounds = len(self.microbatches) + 1
                if self.shards(s) == "weights":
                    rounds = len(self.microbatches) * (4 if one.recompute == "full" else 3)
                found[str(s)] = rounds / 2 * self.shard(s) * one.tensor
        return found


NAMES = [f"d{i}" for i in range(6)]
NUMBERS = st.integers(1, 9)
BYTES = st.sampled_from([0.0, 4.0, 100.0, 4_000_004.0, 5_000_000.0, 12_345_678.0])
Times = dict[Action, tuple[float, float]]


@st.composite
def chains(draw: st.DrawFn, layers: int) -> Chain:
    """Layers of odd sizes, some without weights, on two kinds of device, at degrees 1 and 2."""

    def cost(kind: str, output: float, steps: bool, shard: float | None) -> LayerCost:
        return LayerCost(
            6, draw(NUMBERS), draw(NUMBERS) * 1e6, output,
            input_gradient_seconds=draw(NUMBERS), weight_gradient_seconds=draw(NUMBERS),
            update_seconds=draw(NUMBERS) / 4 if steps else None, device_kind=kind,
            tensor=None if shard is None else 2, shard_parameter_bytes=shard,
        )  # fmt: skip

    def layer(i: int) -> Layer:
        output, steps, whole = draw(NUMBERS) * 1e6, draw(st.booleans()), draw(BYTES)
        costs = [cost(k, output, steps, shard) for k in "vw" for shard in (None, whole * 0.75)]
        return Layer(f"l{i}", whole, tuple(costs))

    state = draw(st.sampled_from([0.0, 1.0, 2.0]))
    found = tuple(layer(i) for i in range(layers))
    return Chain("random", "test", 6, found, optimizer_bytes_per_parameter_byte=state)


@st.composite
def stages(draw: st.DrawFn, layers: tuple[int, int]) -> Stage:
    """One to three replicas of one or two devices, which other stages may use too."""
    t = draw(st.sampled_from([1, 2]))
    order = draw(st.sampled_from(list(permutations([(0, 1), (2, 3), (4, 5)]))))
    devices = [f"d{v}" for pair in order for v in pair]
    count = draw(st.integers(1, 3))
    shards = draw(st.sampled_from(SHARDS)) if count > 1 else "none"
    ways = ["split"] if shards in WHOLE else ["split", "round-robin"]
    return Stage(
        layers, tuple(devices[: count * t]), draw(st.sampled_from(ways)),
        draw(st.sampled_from(["none", "full", "layer"])), tensor=t, shards=shards,
    )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> tuple[PipelineProblem, ShardOracle, Times, PipelinePlan]:
    """A problem, its oracle, the times of a plan, and the plan."""
    layers = draw(st.integers(1, 4))
    chain = draw(chains(layers))
    # By a seed, as Hypothesis' own draws are mostly equal.
    mixed = Random(draw(st.integers(0, 10**6)))
    width = {(a, b): mixed.randint(5, 9) * 1e6 for a in NAMES for b in NAMES if a < b}
    rows = [[width.get((min(a, b), max(a, b))) for b in NAMES] for a in NAMES]
    late = draw(st.sampled_from([0.0, 0.125]))
    cluster = from_matrix([Device(n, "vvvvww"[i], 1e12) for i, n in enumerate(NAMES)], rows, late)
    cluster = replace(cluster, all_reduce_share=draw(st.sampled_from([None, 0.5])))
    links = {(a, b): (width[min(a, b), max(a, b)], late) for a in NAMES for b in NAMES if a != b}
    problem = PipelineProblem(chain, cluster, draw(st.integers(1, 3)))
    inner = draw(st.sets(st.integers(1, layers - 1), max_size=2)) if layers > 1 else set()
    found = [draw(stages(span)) for span in pairwise([0, *sorted(inner), layers])]
    split = [draw(st.booleans()) for _ in found]
    oracle = ShardOracle(problem, found, links, split)
    times = oracle.schedule(lambda waiting: draw(st.sampled_from(waiting)))
    starts = empty_blocks(len(found), problem.microbatches)
    for action, (start, _) in times.items():
        place: Any = (
            action.stage if action.microbatch is None else (action.stage, action.microbatch)
        )
        starts[action.kind][place] = start
    return problem, oracle, times, assemble(problem, "test", found, starts)


@examples(500)
@given(cases())
def test_times_and_memory(case: Any) -> None:
    """Every action, the iteration, the simulation, and the peak of every device."""
    problem, oracle, times, plan = case
    assert check(problem, plan) == ()
    found = {
        parse_action(one.action): (one.start_seconds, one.finish_seconds) for one in plan.actions
    }
    assert found.keys() == times.keys()
    for action, span in times.items():
        assert found[action] == pytest.approx(span), action
    assert plan.predicted is not None
    assert plan.predicted.link_bytes == pytest.approx(oracle.link_bytes())
    last = max(end for _, end in times.values())
    assert plan.predicted.iteration_seconds == pytest.approx(last)
    assert simulate(problem, plan).iteration_seconds == pytest.approx(last)
    for name in NAMES:
        assert plan.predicted.peak_memory_bytes.get(name, 0.0) == pytest.approx(
            oracle.peak(name, times), rel=1e-12
        )
