"""Memory, parameters and FLOPs of a layout against the published formulas and counts by hand."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from layout_oracle import REACHED, architectures
from model_sizes import total_parameters
from profiles import examples

from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.machines.fabric import Fabric, Level
from stagewright.graphs.models.architecture import (
    Architecture,
    Experts,
    FeedForward,
    GroupedAttention,
)
from stagewright.graphs.models.shards import LayerSplit, shares_of

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
