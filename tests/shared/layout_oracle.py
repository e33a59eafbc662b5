"""Random layouts of tiny training problems."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product
from random import Random
from typing import Any

from hypothesis import strategies as st
from layout_class import TOWERS, divisions, in_front
from own_rates import PRECISIONS, drawn_rates, own_rates

from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem, require_layout
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.fabric import Fabric, Level
from stagewright.graphs.machines.rates import Reached
from stagewright.graphs.machines.stack_memory import PLAIN, STACK_MEMORY
from stagewright.graphs.models.architecture import (
    Architecture,
    Experts,
    FeedForward,
    GroupedAttention,
    Variant,
)
from stagewright.graphs.models.recurrences import Recurrence

CHUNKS = 4


def copies(problem: TrainingProblem, layout: Layout) -> int:
    """The most ranks with the same parameters."""
    shared = layout.context * layout.data
    has_experts = problem.architecture.experts is not None
    return max(shared, layout.tensor * shared // layout.expert) if has_experts else shared


def random_layouts(problem: TrainingProblem, chance: Random, most: int) -> list[Layout]:
    """Up to ``most`` layouts that ``evaluate`` takes, of all their kinds."""
    every = Candidates(problem, (False, True))
    found = []
    for drawn in chance.sample(every, min(4 * most, len(every))):
        layout = offloading(drawn, problem, chance) if chance.random() < 0.5 else drawn
        try:
            require_layout(problem, layout)
        except InputError:
            continue
        found.append(by_stage(layout, problem, chance) if chance.random() < 0.4 else layout)
    return found[:most]


def offloading(layout: Layout, problem: TrainingProblem, chance: Random) -> Layout:
    """The layout with activations of some blocks in host memory, where that is possible."""
    blocks = chance.randint(0, problem.architecture.layers - 1)
    is_able = problem.memory.offloads_activations and layout.recompute == "none"
    return replace(layout, offload_blocks=blocks) if is_able and layout.pipeline == 1 else layout


def by_stage(layout: Layout, problem: TrainingProblem, chance: Random) -> Layout:
    """The layout with some blocks and some recomputed blocks of every stage."""
    stages = layout.stages
    inner = max(0, stages - 2)
    cuts = sorted(chance.randint(0, problem.architecture.layers - inner) for _ in range(stages - 1))
    ends = [0, *(cut + min(at, inner) for at, cut in enumerate(cuts)), problem.architecture.layers]
    blocks = tuple(b - a for a, b in pairwise(ends))
    again = tuple(chance.randint(0, count) for count in blocks)
    return replace(
        layout,
        recompute_blocks=None,
        first_blocks=None,
        last_blocks=None,
        blocks_by_stage=blocks,
        recomputed_by_stage=None if layout.recompute == "none" else again,
    )


class Candidates(Sequence[Layout]):
    """Every layout that is worth asking for, made when it is looked at: there may be millions."""

    def __init__(self, problem: TrainingProblem, offloads: tuple[bool, ...]) -> None:
        self._parts = [(each, _choices(problem, each, offloads)) for each in _degrees(problem)]
        sizes = (math.prod(map(len, choices)) for _, choices in self._parts)
        self._ends = list(accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> Layout:  # type: ignore[override]  # of one alone
        part = bisect_right(self._ends, number)
        degrees, choices = self._parts[part]
        left, values = number - self._ends[part], []
        for each in reversed(choices):
            left, place = divmod(left, len(each))
            values.append(each[place])
        return _layout(degrees, values[::-1])

    def __iter__(self) -> Iterator[Layout]:
        for degrees, choices in self._parts:
            for values in product(*choices):
                yield _layout(degrees, values)


def _degrees(problem: TrainingProblem) -> Iterator[dict[str, int]]:
    devices, batch = problem.fabric.devices, problem.batch
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    experts = problem.architecture.experts
    shared = range(1, 2 if experts is None else experts.number + 1)
    for p, t, c, d in product(sizes, repeat=4):
        if p * t * c * d != devices:
            continue
        for v, e, b in product(range(1, CHUNKS + 1), shared, range(1, batch // d + 1)):
            if batch % (b * d) or t * c * d % e or (p == 1 and v > 1):
                continue  # `evaluate` refuses them too: it only takes longer
            yield {
                "pipeline": p,
                "tensor": t,
                "context": c,
                "data": d,
                "expert": e,
                "microbatch": b,
                "chunks": v,
            }


def _choices(
    problem: TrainingProblem, degrees: dict[str, int], offloads: tuple[bool, ...]
) -> list[Sequence[Any]]:
    """What else a layout of these degrees may be, in the order that `_layout` takes."""
    p, t, c = degrees["pipeline"], degrees["tensor"], degrees["context"]
    d, e = degrees["data"], degrees["expert"]
    blocks, experts = problem.architecture.layers, problem.architecture.experts
    several = experts is not None and experts.number > 1
    both = p > 1 and d > 1 and t * c % e == 0
    return [
        divisions(blocks, p, degrees["chunks"]),
        _schedules(p, degrees["chunks"]),
        _recomputed(blocks),
        (False, True) if t > 1 else (False,),
        (0, 1, 2, 3) if c * d > 1 or (several and t * c * d > e) else (0,),
        ("data-inside", "pipeline-inside") if both else ("data-inside",),
        offloads,
    ]


def _schedules(pipeline: int, chunks: int) -> tuple[str, ...]:
    if pipeline == 1:
        return ("1f1b",)
    more = {1: ("zb-h2",), 2: ("zbv", "dualpipev")}.get(chunks, ())
    both_ways = ("dualpipe",) if chunks == 1 and pipeline in (4, 6, 8) else ()
    return ("1f1b", "zero-bubble", *more, *both_ways)


def _layout(degrees: dict[str, int], values: Sequence[Any]) -> Layout:
    ends, schedule, recompute, shared, zero, placement, offload = values
    return Layout(
        **degrees,
        schedule=schedule,
        recompute=recompute[0],
        recompute_blocks=recompute[1],
        sequence_parallel=shared,
        zero=zero,
        offload_optimizer=offload,
        placement=placement,
        first_blocks=ends[0],
        last_blocks=ends[1],
    )


def _recomputed(blocks: int) -> list[tuple[str, int | None]]:
    some = [("full", number) for number in range(1, blocks)]
    return [("none", None), ("selective", None), *some, ("full", None)]


SCAN = Recurrence("ssd", heads=12, head_size=8, state_size=4, groups=6, chunk=16, kernel_size=4)
"""A mixer that 1, 2, 3 or 6 tensor ranks divide."""

VARIANTS: tuple[tuple[Variant, ...], ...] = (
    (),
    (),
    (Variant(frozenset({1}), mixers=(SCAN,)),),
    (
        Variant(frozenset({0}), mixers=(SCAN,), fed=False),
        Variant(frozenset({1}), mixers=(), feed_forward=FeedForward(192)),
    ),
)
"""Blocks of other kinds: none, a recurrence, or a recurrence and a feed-forward alone."""


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """Dense, grouped-query, mixtures of experts and hybrids, of 2 to 8 blocks."""
    heads = draw(st.sampled_from((2, 4, 6)))
    groups = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    bias, blocks = draw(st.booleans()), draw(st.integers(2, 8))
    experts = None
    if draw(st.booleans()):
        number = draw(st.sampled_from((2, 4)))
        experts = Experts(
            number,
            draw(st.integers(1, number)),
            draw(st.sampled_from((32, 256))),
            shared_width=draw(st.sampled_from((None, 96))),
            dense_layers=draw(st.sampled_from((frozenset(), frozenset({0})))),
        )
    return Architecture(
        "tiny",
        blocks,
        hidden=heads * 16,
        vocabulary=draw(st.sampled_from((60, 997, 20000))),
        attention=GroupedAttention(heads, groups, 16, bias=bias, output_bias=bias),
        feed_forward=FeedForward(96 * draw(st.integers(1, 4)), gated=draw(st.booleans())),
        experts=experts,
        norm="layer" if bias else "rms",
        positions=draw(st.sampled_from((None, 64))),
        tied=draw(st.booleans()),
        window=draw(st.sampled_from((None, 8))),
        full_layers=frozenset({0}),
        dropout=draw(st.booleans()),
        variants=draw(st.sampled_from(VARIANTS)),
    )


@st.composite
def fabrics(draw: st.DrawFn, most: int = 24) -> Fabric:
    """One to three levels, of which the outer ones need not be the slower."""
    sizes = draw(
        st.lists(st.integers(1, 6), min_size=1, max_size=3).filter(
            lambda each: 2 <= _product(each) <= most
        )
    )
    levels = tuple(
        Level(
            f"level {i}",
            _product(sizes[: i + 1]),
            draw(st.sampled_from((1e7, 1e9, 1e11))),
            draw(st.sampled_from((0.0, 1e-6, 1e-4))),
        )
        for i in range(len(sizes))
    )
    return Fabric("h100", 40e9, levels, 20e9)


def _product(values: list[int]) -> int:
    found = 1
    for one in values:
        found *= one
    return found


MEMORIES = (
    PLAIN, PLAIN, *(STACK_MEMORY[name] for name in ("megatron", "torchtitan", "fsdp")),
    replace(STACK_MEMORY["deepspeed"], bucket_parameters=3e4),
)  # fmt: skip
"""What software keeps; the bucket is about as large as the tiny models."""

REACHED = own_rates(Reached(0.7, 1e7, 0.8, 1e-6))


@st.composite
def problems(draw: st.DrawFn, most_devices: int = 24, most_samples: int = 48) -> TrainingProblem:
    """Tiny problems of all kinds; without a reserve, so that small memories can decide."""
    memory = draw(st.sampled_from(MEMORIES))
    towers = (None,) if memory.by_operator else TOWERS
    return TrainingProblem(
        in_front(draw(architectures()), draw(st.sampled_from(towers)), draw(st.floats(0, 1))),
        sequence=draw(st.sampled_from((12, 32, 64))),
        batch=draw(st.integers(1, most_samples)),
        fabric=draw(fabrics(most_devices)),
        rates=drawn_rates(lambda values: draw(st.sampled_from(values))),
        precision=draw(st.sampled_from(PRECISIONS)),
        attention=draw(st.sampled_from(("fused", "materialized"))),
        overlap=draw(st.booleans()),
        overlap_tensor=draw(st.booleans()),
        fused_gradients=draw(st.booleans()),
        memory=memory,
        reserve_bytes=draw(st.sampled_from((0.0, 1e5))),
    )
