"""Time, memory, parameters and FLOPs of a layout, recomputed by plain code and by hand."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from layout_oracle import REACHED, architectures, problems, random_layouts
from layout_time_oracle import Plain
from model_sizes import total_parameters
from own_rates import own_rates
from profiles import UNSHRUNK, examples

from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.parts import Parts
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.prices.collectives import (
    all_reduce_seconds,
    all_to_all_seconds,
    gather_seconds,
    send_seconds,
)
from stagewright.graphs.machines.fabric import Fabric, Level
from stagewright.graphs.machines.groups import links
from stagewright.graphs.models.architecture import (
    Architecture,
    Experts,
    FeedForward,
    GroupedAttention,
)
from stagewright.graphs.models.shards import LayerSplit, shares_of


@examples(200, phases=UNSHRUNK)
@given(problems(), st.randoms(use_true_random=False))
def test_an_iteration_is_pipeline_exchange_and_update(problem, chance) -> None:
    for layout in random_layouts(problem, chance, 6):
        found, plain = evaluate(problem, layout), Plain(problem, layout)
        assert found.pipeline_seconds == pytest.approx(plain.finish.max(), rel=1e-9)
        assert found.update_seconds == pytest.approx(plain.update, rel=1e-9)
        assert found.seconds == pytest.approx(plain.seconds, rel=1e-9)
        parts = found.pipeline_seconds + found.gradient_seconds + found.update_seconds
        assert found.seconds == pytest.approx(parts, rel=1e-9)


@examples(150, phases=UNSHRUNK)
@given(problems(), st.randoms(use_true_random=False))
def test_lower_bounds_are_below_the_estimate(problem, chance) -> None:
    for layout in random_layouts(problem, chance, 8):
        found, parts = evaluate(problem, layout), Parts(problem, layout)
        assert parts.least_seconds <= found.seconds * (1 + 1e-12)
        assert parts.least_bytes <= found.peak_bytes * (1 + 1e-12)


def faster_links(problem: TrainingProblem) -> TrainingProblem:
    levels = tuple(
        replace(one, bytes_per_second=2 * one.bytes_per_second, latency_seconds=0.0)
        for one in problem.fabric.levels
    )
    return replace(problem, fabric=replace(problem.fabric, levels=levels))


def higher_peaks(problem: TrainingProblem) -> TrainingProblem:
    return replace(problem, fabric=replace(problem.fabric, device="b200"))


def better_kernels(problem: TrainingProblem) -> TrainingProblem:
    return reaching(problem, matmul=0.9, half_flops=0.0, memory=0.9, launch_seconds=0.0)


def with_overlap(problem: TrainingProblem) -> TrainingProblem:
    """Exchanges beside computation that do not slow it down, else they may well take longer."""
    return replace(reaching(problem, contention=0.0), overlap=True, overlap_tensor=True)


def reaching(problem: TrainingProblem, **better: float) -> TrainingProblem:
    return replace(problem, rates=own_rates(replace(problem.reached, **better)))


def fused(problem: TrainingProblem) -> TrainingProblem:
    return replace(problem, fused_gradients=True)


@pytest.mark.parametrize(
    "better", [faster_links, higher_peaks, better_kernels, with_overlap, fused]
)
@examples(60, phases=UNSHRUNK)
@given(problems(), st.randoms(use_true_random=False))
def test_a_better_machine_makes_no_layout_slower(better, problem, chance) -> None:
    """The best of them are then no slower either.

    A rank's exchange of gradients runs beside the last backward of each of its stages: where there
    are several, and they are shorter, more of it may be seen than the pipeline gains. So it is
    where a rank waits for its sends.
    """
    for layout in random_layouts(problem, chance, 8):
        if layout.stages > layout.positions and better is not faster_links:
            continue
        before, after = evaluate(problem, layout), evaluate(better(problem), layout)
        if after.seconds > before.seconds * (1 + 1e-12):
            assert better is not faster_links
            sending = Parts(problem, layout).sending_seconds
            assert sending > 0.99 * Plain(better(problem), layout).finish.min()
        assert [one.total for one in after.memory] == [one.total for one in before.memory]


# Servers of 4, racks of 2 servers, 2 racks; moved are megabytes.
FABRIC = Fabric(
    "a100",
    40e9,
    (Level("server", 4, 100e6, 1.0), Level("rack", 8, 10e6, 2.0), Level("all", 16, 3e6, 5.0)),
)


@pytest.mark.parametrize(
    ("stride", "size", "bandwidth", "latency"),
    [
        (1, 4, 100, 3 * 1),  # in a server
        (2, 2, 100, 1 * 1),
        (1, 8, 40, 6 * 1 + 1 * 2),  # 4 cards lead out of a server
        (2, 4, 20, 2 * 1 + 1 * 2),  # 2 members in each of 2 servers
        (4, 2, 10, 1 * 2),  # one in each
        (1, 16, 24, 12 * 1 + 2 * 2 + 1 * 5),  # 8 cards out of a rack: 8 x 3 is less than 4 x 10
        (2, 8, 12, 4 * 1 + 2 * 2 + 1 * 5),
        (4, 4, 6, 2 * 2 + 1 * 5),
        (8, 2, 3, 1 * 5),
    ],
)
def test_collectives_of_groups_by_hand(stride, size, bandwidth, latency) -> None:
    moved = (size - 1) / size * 600
    assert gather_seconds(links(FABRIC, ((stride, size),)), 600e6) == pytest.approx(
        moved / bandwidth + latency
    )
    reduced = 2 * (moved / bandwidth + latency)
    assert all_reduce_seconds(links(FABRIC, ((stride, size),)), 600e6) == pytest.approx(reduced)


def test_a_ring_through_unequal_parts_of_servers_by_hand() -> None:
    """Six of twelve ranks, four of one server and two of another: four hops inside, one between."""
    fabric = replace(FABRIC, levels=(FABRIC.levels[0], replace(FABRIC.levels[1], devices=12)))
    found = gather_seconds(links(fabric, ((1, 6),)), 600e6)
    assert found == pytest.approx(5 / 6 * 600 / 20 + 4 * 1 + 1 * 2)


@pytest.mark.parametrize(
    ("stride", "size", "seconds"),
    [
        (1, 4, 3 / 4 * 800 / 100 + 1),
        (1, 8, max(3 / 8 * 800 / 100, 4 / 8 * 800 / 10) + 2),  # half of it to the other server
        (1, 16, max(4 / 16 * 800 / 10, 8 / 16 * 800 / 3) + 5),
        (4, 4, max(1 / 4 * 800 / 10, 2 / 4 * 800 / 3) + 5),
    ],
)
def test_all_to_all_by_hand(stride, size, seconds) -> None:
    assert all_to_all_seconds(links(FABRIC, ((stride, size),)), 800e6) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (4, 3 / 4 * 800 / 100 + 1),  # in a server, as without
        (8, max(3 / 4 * 800 / 100, 800 / 2 * (1 - 1 / 4) / 10) + 2),  # half of the receivers there
        (6, max(3 / 4 * 800 / 100, 800 / 2 * (1 - 1 / 9) / 10) + 2),  # servers of 4 and 2 members
    ],
)
def test_two_copies_cross_to_a_server_once_by_hand(size, seconds) -> None:
    fabric = replace(FABRIC, levels=(FABRIC.levels[0], replace(FABRIC.levels[1], devices=24)))
    found = all_to_all_seconds(links(fabric, ((1, size),)), 800e6, copies=2)
    assert found == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("stride", "size", "seconds"),
    [(1, 1, 0), (2, 2, 600 / 100 + 1), (2, 4, 600 / 10 + 2), (4, 4, 600 / 3 + 5)],
)
def test_sends_take_the_slowest_link_between_neighbours(stride, size, seconds) -> None:
    assert send_seconds(links(FABRIC, ((stride, size),)), 600e6) == pytest.approx(seconds)


ONE = Fabric("a100", 40e9, (Level("server", 4, 1e9, 1e-3),))


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_exchanges_of_tensor_ranks_by_hand(divided, microbatches) -> None:
    """Four all-reduces per block, one of the embedding and one of the head: of b s h numbers.

    With sequence parallelism those of the backward gather their inputs once more.
    """
    model = Architecture("m", 5, 64, 100, GroupedAttention(4, 4, 16), FeedForward(128))
    problem = TrainingProblem(model, 32, 2 * microbatches, ONE, REACHED, overlap_tensor=False)
    layout = Layout(tensor=4, microbatch=2, sequence_parallel=divided)
    one = 2 * (3 / 4 * 2 * 32 * 64 * 2 / 1e9 + 3 * 1e-3)
    back = 1.5 if divided else 1
    found = evaluate(problem, layout).exchange_seconds
    assert found == pytest.approx(microbatches * (2 * 5 + 1 + (2 * 5 + 1) * back) * one)


@pytest.mark.parametrize(("zero", "gradients"), [(0, 2 * 4), (1, 4 + 2)])
def test_exchange_of_gradients_by_hand(zero, gradients) -> None:
    """All-reduce of fp32 gradients; or reduce-scatter, and all-gather of the fp16 weights."""
    model = Architecture("m", 5, 64, 100, GroupedAttention(4, 4, 16), FeedForward(128))
    fabric = Fabric("a100", 40e9, (Level("server", 4, 1e9),))
    problem = TrainingProblem(model, 32, 8, fabric, REACHED, overlap=False)
    found = evaluate(problem, Layout(data=4, zero=zero)).gradient_seconds
    assert found == pytest.approx(3 / 4 * total_parameters(model) * gradients / 1e9)


SEQUENCE, HIDDEN, HEADS = 64, 96, 12


def gpt(blocks: int) -> Architecture:
    """Blocks as in Korthikanti et al. 2022: biases, layer norms, dropout, widths of 4 h."""
    return Architecture(
        "gpt",
        blocks,
        HIDDEN,
        256,
        GroupedAttention(HEADS, HEADS, HIDDEN // HEADS, bias=True, output_bias=True),
        FeedForward(4 * HIDDEN, gated=False, bias=True),
        norm="layer",
        positions=SEQUENCE,
        dropout=True,
    )


def estimate(architecture: Architecture, layout: Layout, **others) -> Estimate:
    fabric = Fabric("a100", 40e9, (Level("server", layout.ranks, 1e11),), 2e10)
    chosen = {"sequence": SEQUENCE, "batch": layout.data * layout.microbatch} | others
    return evaluate(TrainingProblem(architecture, fabric=fabric, rates=REACHED, **chosen), layout)


SBH = SEQUENCE * HIDDEN
CORE = 5 * HEADS * SEQUENCE / HIDDEN


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize(
    ("recompute", "divided", "per_token"),
    [
        ("none", False, lambda t: 10 + 24 / t + CORE / t),  # Table 2 of the paper
        ("none", True, lambda t: 34 / t + CORE / t),
        ("selective", False, lambda t: 10 + 24 / t),
        ("selective", True, lambda t: 34 / t),
        ("full", False, lambda t: 2),
        ("full", True, lambda t: 2 / t),
    ],
)
def test_activations_of_a_block(samples, tensor, recompute, divided, per_token) -> None:
    layout = Layout(
        tensor=tensor,
        microbatch=samples,
        recompute=recompute,
        sequence_parallel=divided and tensor > 1,
    )
    few, many = (
        estimate(gpt(blocks), layout, attention="materialized").memory[0].activations
        for blocks in (3, 5)
    )
    assert (many - few) / 2 == pytest.approx(samples * SBH * per_token(tensor))


def held(found: Estimate, bytes_each: int = 2) -> list[float]:
    """Parameters of every rank of the pipeline, from the bytes of the weights."""
    return [one.weights / bytes_each for one in found.memory]


def attending(architecture: Architecture) -> int:
    """Blocks with attention."""
    return sum(architecture.parts(i).attention is not None for i in range(architecture.layers))


def norms_of_blocks(architecture: Architecture) -> int:
    """One before a mixer, and one before a feed-forward or experts."""
    parts = [architecture.parts(index) for index in range(architecture.layers)]
    return sum(bool(one.mixers) + one.is_fed for one in parts)


@examples(100)
@given(architectures(), st.sampled_from((1, 2, 3, 6)))
def test_parameters_of_all_tensor_ranks(architecture, tensor) -> None:
    attention, experts = architecture.attention, architecture.experts
    width = architecture.feed_forward.width
    groups = attention.key_value_heads
    assume(tensor == 1 or experts is None)
    assume(not attention.heads % tensor and not width % tensor)
    assume(not groups % tensor or not tensor % groups)
    h, n = architecture.hidden, attending(architecture)
    norms = (norms_of_blocks(architecture) + 1) * h * (2 if architecture.norm == "layer" else 1)
    row_biases = n * h * attention.output_bias
    key_values = n * 2 * groups * 16 * (h + attention.bias) * (max(1, tensor // groups) - 1)
    tables = (architecture.positions or 0) * h
    padding = (-architecture.vocabulary % tensor) * h * (1 if architecture.tied else 2)
    replicated = (tensor - 1) * (norms + row_biases + tables) + key_values + padding
    architecture = replace(
        architecture, feed_forward=replace(architecture.feed_forward, bias=False)
    )
    found = held(estimate(architecture, Layout(tensor=tensor), sequence=12))[0]
    assert tensor * found == pytest.approx(total_parameters(architecture) + replicated)


MIXTURE = replace(
    gpt(3), experts=Experts(4, 2, 48, shared_width=96, dense_layers=frozenset({1})), dropout=False
)


@pytest.mark.parametrize(("tensor", "data", "expert"), [(1, 4, 1), (1, 4, 4), (2, 2, 4), (4, 1, 2)])
def test_parameters_of_experts(tensor, data, expert) -> None:
    layout = Layout(
        tensor=tensor, data=data, expert=expert, sequence_parallel=tensor > 1, microbatch=2
    )
    experts = 2 * 4 * 3 * HIDDEN * 48
    # Norms, output biases and the dense block's, positions and routers are on all tensor ranks.
    replicated = 7 * 2 * HIDDEN + 3 * HIDDEN + HIDDEN + SEQUENCE * HIDDEN + 2 * HIDDEN * 4
    split = (total_parameters(MIXTURE) - experts - replicated) / tensor
    found = held(estimate(MIXTURE, layout))[0]
    assert found == pytest.approx(split + replicated + experts / expert)


def test_a_tied_table_is_on_both_ends_of_a_pipeline() -> None:
    tied = replace(gpt(4), tied=True)
    assert sum(held(estimate(gpt(4), Layout(pipeline=2)))) == total_parameters(gpt(4))
    twice = total_parameters(tied) + 256 * HIDDEN
    assert sum(held(estimate(tied, Layout(pipeline=2)))) == twice
    assert held(estimate(tied, Layout()))[0] == total_parameters(tied)


@examples(100)
@given(architectures(), st.sampled_from((1, 2, 3)), st.sampled_from((1, 2, 4)), st.booleans())
def test_flops_of_all_ranks_are_those_of_the_model(architecture, tensor, context, divided) -> None:
    attention, experts = architecture.attention, architecture.experts
    groups = attention.key_value_heads
    divided = tensor > 1 and (divided or experts is not None)
    context = 1 if architecture.variants else context  # a scan is not divided by tokens
    assume(not attention.heads % tensor and not (divided and 12 // context % tensor))
    assume(not groups % tensor or not tensor % groups)
    replicas = max(1, tensor // groups) - 1  # of the keys and values
    again = replicas * attending(architecture) * 2 * 12 * architecture.hidden * 2 * groups * 16
    # The rest of the padded vocabulary.
    padding = 2 * 12 * architecture.hidden * (-architecture.vocabulary % tensor)
    every = shares_of(architecture, 12, LayerSplit(tensor, context, 1, divided)).every
    found = sum(one.flops for share in every for one in share.operators.values())
    whole = sum(sum(layer.values()) for layer in architecture.flops(1, 12).values())
    assert tensor * context * found == pytest.approx(whole + again + padding)


@pytest.mark.parametrize(
    ("zero", "bytes_each"),
    [
        (0, lambda n: 18),  # Rajbhandari et al. 2020, with fp32 gradients
        (1, lambda n: 6 + 12 / n),
        (2, lambda n: 2 + 16 / n),
        (3, lambda n: 18 / n),
    ],
)
@pytest.mark.parametrize(("data", "context"), [(4, 1), (2, 2), (8, 1), (1, 4)])
def test_states_of_a_parameter(zero, bytes_each, data, context) -> None:
    found = estimate(gpt(2), Layout(data=data, context=context, zero=zero)).memory[0]
    held_bytes = found.weights + found.gradients + found.optimizer
    each = bytes_each(data * context)
    assert held_bytes == pytest.approx(total_parameters(gpt(2)) * each)


def test_experts_are_divided_among_the_ranks_that_hold_the_same() -> None:
    """Of 8 ranks with expert degree 4, two hold equal experts; all 8 hold the rest."""
    found = estimate(MIXTURE, Layout(data=8, expert=4, zero=3)).memory[0]
    experts = 2 * 4 * 3 * HIDDEN * 48
    rest = total_parameters(MIXTURE) - experts
    per_rank = 18 * (rest / 8 + experts / 4 / 2)
    assert found.weights + found.gradients + found.optimizer == pytest.approx(per_rank)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_offloaded_state_leaves_the_device(zero) -> None:
    kept, moved = (
        estimate(gpt(2), Layout(data=4, zero=zero, offload_optimizer=on)).memory[0]
        for on in (False, True)
    )
    assert (moved.optimizer, moved.weights) == (0.0, kept.weights)
    assert moved.total == pytest.approx(kept.total - kept.optimizer)
