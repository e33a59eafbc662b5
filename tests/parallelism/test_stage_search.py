"""Blocks and recomputed blocks of every stage, against all of them on tiny problems."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from layout_oracle import by_stage, copies, problems
from layout_time_oracle import Plain
from pipeline_oracle import kept_by_order
from profiles import UNSHRUNK, examples

from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.parts import Parts
from stagewright.formulations.parallelism.training import (
    TrainingProblem,
    has_selective,
    require_layout,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import Architecture
from stagewright.graphs.models.modules import CORE
from stagewright.solvers.parallelism.any_division import AnyDivision
from stagewright.solvers.parallelism.family import simply_placed
from stagewright.solvers.parallelism.refining import refine, search
from stagewright.solvers.parallelism.space import Counts, Space, StageOptions
from stagewright.solvers.parallelism.stage_search import Divided, StageSearch, least_division
from stagewright.solvers.parallelism.tree import compiled_walk

MOST_BLOCKS = 5


@dataclass(frozen=True)
class Every:
    """A division with its recomputed blocks; time and peak are computed from definitions."""

    layout: Layout
    seconds: float
    peak_bytes: float


def divisions(blocks: int, stages: int) -> Iterator[tuple[int, ...]]:
    """At least one block in all stages but the first and the last."""
    for cuts in product(range(blocks + 1), repeat=stages - 1):
        found = tuple(b - a for a, b in pairwise((0, *cuts, blocks)))
        if min(found) >= 0 and 0 not in found[1:-1]:
            yield found


def every_division(problem: TrainingProblem, base: Layout) -> Iterator[Every]:
    for blocks in divisions(problem.architecture.layers, base.pipeline):
        for again in product(*(range(count + 1) for count in blocks)):
            layout = replace(base, blocks_by_stage=blocks, recomputed_by_stage=again)
            plain = Plain(problem, layout)
            yield Every(layout, plain.seconds, max(peaks(problem, plain)))


def peaks(problem: TrainingProblem, plain: Plain) -> Iterator[float]:
    """Bytes of every rank without experts: states, what is kept in flight, and buffers."""
    layout, of, memory = plain.layout, problem.precision, problem.memory
    once = kept_once(problem, layout)
    saved = [
        sum(kept(problem, layout, *one) for one in stage)
        + once["tower"] * any(share.kept_once[0] == "tower" for share, _ in stage)
        + once["decoder"] * any(share.kept_once[0] == "decoder" for share, _ in stage)
        for stage in plain.stages
    ]
    activations = kept_by_order(plain.order, saved)
    for stage, flying in zip(plain.stages, activations, strict=True):
        each = [one.parameters + one.tied_parameters for one, _ in stage]
        parameters, largest = sum(each), max(each)
        repeated = max(
            layout.microbatch * one.gradient_bytes * memory.loss_gradient_bytes / 4
            * (1 + memory.slack)
            + kept(problem, layout, one, False)
            - kept(problem, layout, one, again)
            for one, again in stage
        )  # fmt: skip
        buffers = largest * of.gradient_bytes * (layout.zero >= 2)
        buffers += 2 * largest * of.weight_bytes * (layout.zero == 3)
        if memory.layer_gradients:
            buffers += largest * of.weight_bytes
        if layout.zero:
            buffers += 2 * min(memory.bucket_parameters, parameters) * of.weight_bytes
        if layout.sequence_parallel:
            widest = max(one.width for stage in plain.stages for one, _ in stage if one.is_block)
            buffers += layout.microbatch * widest * of.activation_bytes
        yield (
            states(problem, layout, parameters) + flying + repeated
            + buffers * (1 + memory.slack) + problem.reserve_bytes
        )  # fmt: skip


def states(problem: TrainingProblem, layout: Layout, parameters: float) -> float:
    """Bytes of weights, gradients and the optimizer's states."""
    of, part = problem.precision, parameters / (layout.context * layout.data)
    weights, gradients = parameters * of.weight_bytes, parameters * of.gradient_bytes
    optimizer = of.optimizer_bytes * (part if layout.zero else parameters)
    if not (problem.memory.whole_in_pipelines and layout.pipeline > 1):
        gradients = part * of.gradient_bytes if layout.zero >= 2 else gradients
        if layout.zero == 3:
            alone = problem.memory.float_masters and of.weight_bytes < 4 <= of.optimizer_bytes
            # The masters, which are the optimizer's, are the only weights.
            weights = 0.0 if alone else part * of.weight_bytes
    return weights + gradients + optimizer


def kept(problem: TrainingProblem, layout: Layout, share, again: bool) -> float:
    """Bytes that a layer's forward keeps of a microbatch."""
    memory, size = problem.memory, problem.precision.activation_bytes
    how = layout.recompute if again else "none"
    if how == "full":
        found = share.input * size
    elif how == "selective" and memory.by_operator:
        found = (
            share.input + first_products(problem.architecture, layout, problem.sequence)
        ) * size
        found += sum(
            one.saved_bytes for name, one in share.operators.items() if name == "attention"
        )
    else:
        found = sum(one.saved * size + one.saved_bytes for one in share.operators.values())
        if how == "selective":
            dropped = [share.operators[one] for one in CORE[1:] if one in share.operators]
            found -= sum(one.saved * size + one.saved_bytes for one in dropped)
        if memory.fused_gate and "feed-forward gate" in share.operators:
            found -= share.operators["feed-forward gate"].saved / 2 * size  # silu(gate)
        if memory.fp8_inputs and problem.precision.fp8_products:
            for name in ("query, key, value", "feed-forward in", "feed-forward out"):
                found -= share.operators[name].saved * (size - 1) if share.is_block else 0.0
            found += (
                share.operators["output"].saved if share.is_block else 0.0
            )  # kept as it was too
        found += share.gradient_bytes * (memory.loss_bytes / 4 - 1)  # as large as the loss keeps
    return layout.microbatch * found * (1 + memory.slack)


def kept_once(problem: TrainingProblem, layout: Layout) -> dict[str, float]:
    """Bytes of a microbatch that a stage keeps for all its blocks of a tower, or of a decoder.

    These are learned scores of every two tokens, and the outputs of an encoder.
    """
    of, tower, memory = problem.architecture, problem.architecture.tower, problem.memory
    if tower is None:
        return {"tower": 0.0, "decoder": 0.0}
    images, tokens = tower.images, tower.tokens or problem.sequence
    scored = tower.score_table is not None
    own = scored * images * tower.attention.heads // layout.tensor * tokens**2
    decoder = scored * of.attention.heads // layout.tensor * problem.sequence**2
    if tower.is_encoder:
        parts = layout.tensor if layout.sequence_parallel else 1
        decoder += tokens * tower.hidden / parts
    each = layout.microbatch * problem.precision.activation_bytes * (1 + memory.slack)
    return {"tower": own * each, "decoder": decoder * each}


def first_products(architecture: Architecture, layout: Layout, sequence: int) -> float:
    """Elements of the attention's output and of every first of two products'."""
    of, t, tokens = architecture.attention, layout.tensor, sequence // layout.context
    heads, keys = of.heads // t * of.head_size, max(1, of.key_value_heads // t) * of.head_size
    width = architecture.feed_forward.width // t
    back = architecture.hidden / (t if layout.sequence_parallel else 1)
    # Queries, values, gate and the product back; without a gate the product up.
    return tokens * (
        heads + heads + keys + width + (back if architecture.feed_forward.gated else 0)
    )


@st.composite
def based(draw: st.DrawFn) -> tuple[TrainingProblem, Layout]:
    """A tiny problem without experts, and a plain layout of it whose division is left open."""
    problem = draw(problems(12, 16))
    tower = problem.architecture.tower
    if problem.architecture.next_tokens:
        tower = None  # what these keep is not counted here
    fewest = 0 if tower is None else tower.layers
    uncounted = problem.memory.by_operator or problem.precision.fp8_products
    architecture = replace(
        problem.architecture, experts=None, tower=tower, next_tokens=None,
        variants=() if uncounted else problem.architecture.variants,
        layers=fewest + min(problem.architecture.layers - fewest, MOST_BLOCKS - fewest),
    )  # fmt: skip
    problem = replace(problem, architecture=architecture)
    devices = problem.fabric.devices
    pipeline = draw(st.sampled_from([n for n in (2, 3, 4) if devices % n == 0] or [1]))
    data = draw(st.sampled_from([n for n in (1, 2, 3) if devices // pipeline % n == 0]))
    tensor = devices // pipeline // data
    assume(pipeline > 1)
    assume(pipeline - 2 <= architecture.layers)
    assume(architecture.layers < MOST_BLOCKS or pipeline < 4)
    kinds = ("full", "selective") if has_selective(problem) else ("full",)
    layout = Layout(
        pipeline, tensor, data=data,
        schedule=draw(st.sampled_from(("1f1b", "zero-bubble"))),
        recompute=draw(st.sampled_from(kinds)),
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        zero=draw(st.integers(0, 3)),
    )  # fmt: skip
    try:
        require_layout(problem, by_stage(layout, problem, Random(0)))
    except InputError:
        assume(False)
    return problem, layout


def any_number(count: int) -> Sequence[int]:
    return range(count + 1)


def all_or_none(count: int) -> Sequence[int]:
    return (0, count)


def at_most_two(count: int) -> Sequence[int]:
    return (min(2, count),)


def divided(
    problem: TrainingProblem,
    base: Layout,
    memory: float,
    below: float,
    counts: Counts = any_number,
    **limits: int,
) -> Divided:
    walk = compiled_walk()
    options = StageOptions(problem, base, memory, counts, walk)
    return StageSearch(options, walk, below).run(**limits)


def has_counts(layout: Layout, counts: Counts) -> bool:
    both = zip(layout.blocks_by_stage or (), layout.recomputed_by_stage or (), strict=True)
    return all(again in counts(count) for count, again in both)


def waits_for_sends(problem: TrainingProblem, layout: Layout) -> bool:
    """Then more recomputation than must be can hide the gradients' exchange."""
    found = evaluate(problem, layout)
    return Parts(problem, layout).sending_seconds > 0.99 * found.pipeline_seconds


@examples(60, phases=UNSHRUNK)
@given(
    based(),
    st.floats(0, 1),
    st.integers(0, 3),
    st.sampled_from((any_number, all_or_none, at_most_two)),
)
def test_the_best_division_is_that_of_all(case, place, nodes, counts) -> None:
    problem, base = case
    every = [one for one in every_division(problem, base) if has_counts(one.layout, counts)]
    for one in every[:: max(1, len(every) // 5)]:
        assert evaluate(problem, one.layout).peak_bytes == pytest.approx(one.peak_bytes)
    memory = sorted(one.peak_bytes for one in every)[int(place * (len(every) - 1))] * (1 + 1e-6)
    fitting = [one for one in every if one.peak_bytes <= memory]
    best = min(fitting, key=lambda one: one.seconds)
    found = divided(problem, base, memory, math.inf, counts)
    assert found.best is not None
    named = replace(
        base, blocks_by_stage=found.best.blocks, recomputed_by_stage=found.best.recomputed
    )
    evaluated = evaluate(problem, named)
    assert evaluated.peak_bytes <= memory
    assert evaluated.seconds == pytest.approx(found.best.seconds, rel=1e-9)
    if waits_for_sends(problem, best.layout):
        assert found.best.seconds >= best.seconds * (1 - 1e-9)
    else:
        assert found.best.seconds == pytest.approx(best.seconds, rel=1e-8)
        assert found.bound >= best.seconds * (1 - 1e-8)
    few = divided(problem, base, memory, math.inf, counts, nodes=nodes)
    assert few.bound <= found.best.seconds * (1 + 1e-9)
    assert few.best is None or few.best.seconds >= found.best.seconds * (1 - 1e-9)


@examples(60, phases=UNSHRUNK)
@given(based())
def test_nothing_is_found_where_nothing_fits_or_is_faster(case) -> None:
    problem, base = case
    every = list(every_division(problem, base))
    least = min(one.peak_bytes for one in every)
    assert divided(problem, base, least * (1 - 1e-6), math.inf) == Divided(None, math.inf)
    found = divided(problem, base, math.inf, math.inf)
    assert found.best is not None
    below = found.best.seconds
    assert divided(problem, base, math.inf, below) == Divided(None, below)


@examples(60, quick=4, phases=UNSHRUNK)
@given(based())
def test_bounds_are_not_above_the_best_division(case) -> None:
    problem, base = case
    walk = compiled_walk()
    options = StageOptions(problem, base, math.inf, any_number, walk)
    first = min(every_division(problem, base), key=lambda one: one.seconds)
    best = first.seconds
    stages, blocks = options.stages, options.blocks
    low = [0, *(1,) * (stages - 2), 0]
    least = least_division(options, low, [blocks] * stages, [range(blocks + 1)] * stages)
    assert least is not None
    assert sum(least.blocks) == blocks
    assert least.seconds <= best
    assume(not waits_for_sends(problem, first.layout))
    # With no room between the best time and what is looked for, a wrong bound would hide it.
    found = divided(problem, base, math.inf, best * (1 + 1e-6))
    assert found.best is not None
    assert found.best.seconds == pytest.approx(best, rel=1e-8)


@examples(200, phases=UNSHRUNK)
@given(problems(12, 16), st.integers(0, 2**32))
def test_closed_bounds_are_below_every_division(problem, seed) -> None:
    chance = Random(seed)
    space = Space(chunks=3, sequence_parallel="any")
    every = AnyDivision(problem, space, problem.fabric.memory_bytes)
    bounds = {one.layout: one.bound for one in every.plain(lambda: math.inf)}
    layouts = _layouts(problem, chance, 60)
    for number, layout in enumerate(layouts):
        # Where there is nothing to divide, ZeRO may take less memory, and is not in the class.
        layout = replace(layout, zero=_open(problem, layout).zero)
        found = evaluate(problem, layout)
        bound = closed(every, layout)
        assert found.seconds >= bound * (1 - 1e-9)
        if (simple := simply_placed(problem, layout)) is not layout:
            assert evaluate(problem, simple).seconds == pytest.approx(found.seconds, rel=1e-12)
        if layout.chunks > 1:
            assert found.seconds >= every.interleaved() * (1 - 1e-9)
        elif layout.pipeline > 1:
            assert bounds[_open(problem, layout)] == bound
        if number < 15:  # in memory that is just enough for it
            memory = found.peak_bytes * (1 + 1e-9)
            tight = closed(AnyDivision(problem, space, memory), layout)
            assert found.seconds >= tight * (1 - 1e-9)


def closed(every: AnyDivision, layout: Layout) -> float:
    """The closed bound on all divisions of a layout."""
    layout = _open(every.problem, layout)
    family = next(one for _, one in every.families if one.split == layout.split)
    of = every.of(family, layout.schedule)
    bounds = of.several if layout.chunks > 1 else of.plain
    size, ranks = of.places(layout.microbatch, layout.pipeline)
    keeping = every.keepings.index((layout.zero, layout.offload_optimizer))
    without_bubbles = of.without_bubbles[..., size, ranks].min()
    assert without_bubbles <= bounds[..., size, ranks].min() * (1 + 1e-12)
    return float(bounds[int(layout.placement == "pipeline-inside"), keeping, size, ranks])


def _layouts(problem: TrainingProblem, chance: Random, most: int) -> list[Layout]:
    """Pipelines with some blocks and recomputation by stage."""
    devices, found = problem.fabric.devices, []
    experts = 1 if problem.architecture.experts is None else problem.architecture.experts.number
    for _ in range(10 * most):
        pipeline, tensor, data = chance.randint(1, 6), chance.randint(1, 4), chance.randint(1, 6)
        context, left = divmod(devices, pipeline * tensor * data)
        kind = chance.choice(("none", "full", "selective"))
        try:
            layout = Layout(
                pipeline, tensor, context or 1, data,
                expert=chance.randint(1, experts),
                microbatch=chance.randint(1, 3),
                chunks=chance.choice((1, 1, 2, 3)),
                schedule=chance.choice(("1f1b", "zero-bubble")),
                recompute=kind,
                sequence_parallel=tensor > 1 and chance.random() < 0.5,
                zero=chance.randint(0, 3),
                placement=chance.choice(("data-inside", "pipeline-inside")),
            )  # fmt: skip
            if left or not context or layout.stages > problem.architecture.layers + 2:
                continue
            divided = by_stage(layout, problem, chance)
            require_layout(problem, divided)
        except InputError:
            continue
        found.append(divided)
    return found[:most]


def _open(problem: TrainingProblem, layout: Layout) -> Layout:
    """What all divisions and kinds of recomputation of a layout have in common."""
    differ = layout.data > 1 and layout.pipeline > 1
    differ = differ and layout.tensor * layout.context % layout.expert == 0
    return replace(
        layout,
        recompute="none",
        placement=layout.placement if differ else "data-inside",
        blocks_by_stage=None,
        recomputed_by_stage=None,
        zero=0 if copies(problem, layout) == 1 else layout.zero,
    )


@examples(40, phases=UNSHRUNK)
@given(problems(8, 12), st.integers(0, 2**32))
def test_refined_layouts_fit_are_faster_and_no_plain_one_is_below_the_bound(problem, seed) -> None:
    chance = Random(seed)
    space = Space(chunks=2, sequence_parallel="any")
    some = [evaluate(problem, one).peak_bytes for one in _layouts(problem, chance, 10)]
    assume(some)
    memory = sorted(some)[len(some) // 3]
    limited = replace(problem, fabric=replace(problem.fabric, memory_bytes=memory))
    found = search(limited, space, keep=3)
    assume(found.best)
    done = refine(limited, space, found)
    for one in done.best:
        assert one.estimate.fits
        assert one.bound <= one.estimate.seconds
        if one.before is not None:
            assert one.estimate.seconds < one.before
    assert done.bound <= done.plain_bound <= found.best[0].seconds
    for layout in _layouts(limited, chance, 60):
        one = evaluate(limited, layout)
        if one.fits:
            any_way = layout.chunks > 1 or waits_for_sends(limited, layout)
            bound = done.bound if any_way else done.plain_bound
            assert one.seconds >= bound * (1 - 1e-9)
