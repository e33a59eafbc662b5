"""Configurations of PipeDream-2BW: the thesis's formulas, written again as plain loops."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from strategies import random_chain

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.patterns.parallel_pipelines import (
    Configuration,
    Family,
    divisors,
    samples_of,
)
from stagewright.formulations.plans.actions import DOUBLE_BUFFER, FLUSH, WeightRule
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.patterns.parallel_pipelines import best_configuration

LIMITS = Limits(60.0)
SIZES = (1, 2, 4, 8, 16)


def every_configuration(batch, devices, layers):
    """Algorithm 1: all d, p with d p <= N; all b, r; m whole and at least p."""
    for d in range(1, devices + 1):
        for p in range(1, devices // d + 1):
            for b in range(1, batch + 1):
                for recompute in ("none", "full"):
                    if batch % (d * b) == 0 and p <= min(layers, batch // (d * b)):
                        yield Configuration(d, p, b, batch // (d * b), recompute)


def cost_at(layer, b):
    return next(one for one in layer.costs if one.microbatch_size == b)


def equal_stages(chain, p):
    """L mod p stages of one layer more, first."""
    layers, found = list(chain.layers), []
    for s in range(p):
        size = len(chain.layers) // p + (s < len(chain.layers) % p)
        found.append(layers[:size])
        layers = layers[size:]
    return found


def thesis_seconds(chain, servers, size, high, low, one, flush):
    """Seconds of an iteration: m t, section 3.3.3."""
    stages, extra = equal_stages(chain, one.depth), 4 / 3 if one.recompute == "full" else 1
    across = high if one.width <= size else low
    inside = high if one.width * one.depth <= size else low
    busy, reduce = [], []
    for s, stage in enumerate(stages):
        costs = [cost_at(layer, one.microbatch_size) for layer in stage]
        compute = sum(cost.forward_seconds + cost.total_backward_seconds for cost in costs)
        before = stages[s - 1][-1] if s > 0 else None
        after = stage[-1] if s < len(stages) - 1 else None
        sent = sum(
            2 * cost_at(layer, one.microbatch_size).output_bytes / inside
            for layer in (before, after)
            if layer is not None
        )
        weights = sum(layer.parameter_bytes for layer in stage)
        busy.append(extra * compute + sent)
        reduce.append(2 * (one.width - 1) / one.width * weights / across)
    if flush:
        return (one.microbatches + one.depth - 1) * max(busy) + max(reduce)
    each = [max(a, r / one.microbatches) for a, r in zip(busy, reduce, strict=True)]
    return one.microbatches * max(each)


def thesis_memory(chain, one, versions):
    need, stages = [], equal_stages(chain, one.depth)
    for s, stage in enumerate(stages):
        saved = sum(cost_at(layer, one.microbatch_size).saved_bytes for layer in stage)
        before = cost_at(stages[s - 1][-1], one.microbatch_size).output_bytes if s else 0.0
        kept = saved if one.recompute == "full" else one.depth * saved
        need.append(versions * sum(x.parameter_bytes for x in stage) + kept + one.depth * before)
    return max(need)


@dataclass(frozen=True)
class ThesisCosts:
    """The thesis's costs on servers of one size, with as many seconds as floor."""

    chain: Chain
    servers: int
    size: int
    high: float
    low: float
    memory: float = math.inf
    rule: WeightRule = DOUBLE_BUFFER

    def floors(self, line):
        return np.array([self.seconds(line.at(depth)) for depth in range(1, line.most + 1)])

    def seconds(self, one):
        if thesis_memory(self.chain, one, self.rule.versions) > self.memory:
            return math.inf
        links = self.high, self.low if self.servers > 1 else self.high
        return thesis_seconds(self.chain, self.servers, self.size, *links, one, self.rule is FLUSH)


@examples(60)
@given(st.data())
def test_the_best_is_that_of_a_plain_loop_over_the_thesis_formulas(data):
    chain = replace(data.draw(random_chain(5, sizes=SIZES)), microbatch_size=16)
    servers, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    high, low = 4e9, data.draw(st.sampled_from((0.25e9, 1e9)))
    memory = data.draw(st.sampled_from((5e6, 50e6, 200e6, 1e12)))
    batch = data.draw(st.sampled_from((1, 2, 4, 8, 16)))
    rule = data.draw(st.sampled_from((DOUBLE_BUFFER, FLUSH)))
    costs = ThesisCosts(chain, servers, size, high, low, memory, rule)
    devices = servers * size
    family = Family(batch, devices, len(chain), samples_of(chain, batch))
    found = best_configuration(family, costs, LIMITS)
    every = [*every_configuration(batch, devices, len(chain))]
    best, count = min(map(costs.seconds, every), default=math.inf), len(every)
    assert found.configurations == count
    assert found.seconds == pytest.approx(best)
    assert found.bound_seconds == found.seconds
    assert (found.best is None) == (best == math.inf)


def blocks(count, sizes=SIZES, seconds=1.0, parameters=8e6, saved=4e6, output=1e6):
    """Equal blocks, whose times grow less than the samples."""
    costs = tuple(
        LayerCost(b, seconds * (1 + b) / 2, saved * b, output * b, seconds * (1 + b)) for b in sizes
    )
    layers = tuple(Layer(f"block{i}", parameters, costs) for i in range(count))
    return Chain("blocks", "by hand", max(sizes), layers, 0.0)


class Counted:
    """Costs that count how many configurations are priced, with floors that are not tight."""

    def __init__(self, costs, share):
        self.costs, self.share, self.priced = costs, share, 0

    def floors(self, line):
        return self.share * self.costs.floors(line)

    def seconds(self, one):
        self.priced += 1
        return self.costs.seconds(one)


def test_loose_floors_price_more_and_find_the_same():
    family = Family(16, 16, 12, SIZES)
    costs = ThesisCosts(blocks(12), 4, 4, 1e9, 1e8)
    tight, loose = (Counted(costs, share) for share in (1.0, 0.5))
    one, other = (best_configuration(family, each, LIMITS) for each in (tight, loose))
    assert one.seconds == other.seconds == other.bound_seconds
    assert (one.priced, other.priced) == (tight.priced, loose.priced)
    assert 1 == one.priced < other.priced < other.configurations


def test_without_time_the_bound_says_so():
    costs, family = ThesisCosts(blocks(4), 1, 4, 1e9, 1e9), Family(8, 4, 4, SIZES)
    found = best_configuration(family, costs, Limits(0.0))
    assert (found.best, found.seconds, found.priced) == (None, math.inf, 0)
    assert found.bound_seconds == best_configuration(family, costs, LIMITS).seconds


@given(st.integers(1, 2000))
def test_divisors(number):
    assert divisors(number) == tuple(n for n in range(1, number + 1) if number % n == 0)


@pytest.mark.parametrize(
    ("sizes", "batch", "near"),
    [((4,), 6, "4 or 8"), ((4, 5), 11, "10 or 12"), ((4,), 1, "4"), ((8, 16), 23, "22 or 24")],
)
def test_a_batch_without_whole_microbatches_is_refused_with_the_nearest(sizes, batch, near):
    chain = blocks(2, sizes)
    with pytest.raises(
        InputError, match=f"a batch of {batch} samples .* use a batch of {near}, or"
    ):
        samples_of(chain, batch)
    for one in near.split(" or "):
        assert samples_of(chain, int(one))


def test_a_batch_is_positive():
    with pytest.raises(InputError, match="the batch must be at least 1 sample, got 0"):
        samples_of(blocks(2), 0)
