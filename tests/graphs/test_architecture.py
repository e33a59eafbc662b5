"""Transformers by their architecture: closed forms, plain loops, the thesis's equations."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_sizes import active_parameters, total_parameters
from profiles import examples

from stagewright.formulations.prices.analytic import architecture_model
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.devices import ACCELERATORS
from stagewright.graphs.machines.rates import rates_of
from stagewright.graphs.models.architecture import (
    Architecture,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
    Variant,
)
from stagewright.graphs.models.language import bert, gpt
from stagewright.graphs.models.recurrences import Recurrence, ShortConvolution
from stagewright.graphs.models.shards import LayerSplit, shares_of
from stagewright.graphs.models.tuning import tuned_with

DAY = 86400.0


def gpt_like(layers, hidden, heads, vocabulary=51200, positions=2048):
    return Architecture(
        name="gpt2",
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        attention=GroupedAttention(heads, heads, hidden // heads, bias=True, output_bias=True),
        feed_forward=FeedForward(4 * hidden, gated=False, bias=True),
        norm="layer",
        positions=positions,
        tied=True,
        dropout=True,
    )


def total(flops):
    return sum(sum(operators.values()) for operators in flops.values())


# Thesis table 4.1: layers, hidden size, heads, billions of parameters.
TABLE = [
    (24, 2304, 24, 1.7),
    (30, 3072, 32, 3.6),
    (36, 4096, 32, 7.5),
    (40, 6144, 48, 18.4),
    (48, 8192, 64, 39.1),
    (60, 10240, 80, 76.1),
    (80, 12288, 96, 145.6),
    (96, 16384, 128, 310.1),
    (105, 20480, 128, 529.6),
    (128, 25600, 160, 1008.0),
]


@pytest.mark.parametrize(("layers", "hidden", "heads", "billions"), TABLE)
def test_equations_of_the_thesis(layers, hidden, heads, billions):
    model, sequence, vocabulary, samples = gpt_like(layers, hidden, heads), 2048, 51200, 3
    assert round(total_parameters(model) / 1e9, 1) == billions
    # Equation 4.3, which leaves out the final norm.
    ratio = 1 + 13 / (12 * hidden) + (vocabulary + sequence) / (12 * layers * hidden)
    expected = 12 * layers * hidden**2 * ratio + 2 * hidden
    assert total_parameters(model) == pytest.approx(expected, rel=1e-12)
    # Equation 4.2: with recomputation a block runs forward twice, and its backward is two more.
    flops = {name: sum(one.values()) for name, one in model.flops(samples, sequence).items()}
    blocks = sum(value for name, value in flops.items() if name.startswith("block"))
    ratio = 1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)
    expected = 96 * samples * sequence * layers * hidden**2 * ratio
    assert 4 * blocks + 3 * flops["head"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("sizes", "tokens", "devices", "teraflops", "days"),
    [((96, 12288, 96), 300e9, 1024, 140, 34), ((128, 25600, 160), 450e9, 3072, 163, 84)],
)
def test_training_times_of_the_thesis(sizes, tokens, devices, teraflops, days):
    """Equation 4.4, 8 T P / (n X), and the operators' own FLOPs, which it approximates."""
    model, rate = gpt_like(*sizes), devices * teraflops * 1e12
    assert round(8 * tokens * total_parameters(model) / rate / DAY) == days
    flops = {name: sum(one.values()) for name, one in model.flops(1, 2048).items()}
    per_sample = 4 * sum(flops.values()) - flops["head"]
    assert tokens / 2048 * per_sample / rate / DAY == pytest.approx(days, rel=0.04)


@examples(40)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6), st.integers(1, 40), st.data())
def test_flops_of_the_operators_add_up(layers, heads, size, vocabulary, data):
    samples, sequence = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 30))
    hidden = heads * size
    model = gpt_like(layers, hidden, heads, vocabulary, 30)
    rows = samples * sequence
    block = 24 * rows * hidden**2 + 4 * rows * sequence * hidden
    flops = model.flops(samples, sequence)
    assert total(flops) == layers * block + 2 * rows * hidden * vocabulary


def operations(model):
    """How often each operation is in each layer."""
    return [Counter(operators.values()) for operators in model.operators(2, 32).values()]


def test_operators_are_those_of_the_named_models():
    """The same operations as GPT's and BERT's named models, in another order."""
    mine = operations(gpt_like(3, 64, 4, 100, 32))
    theirs = gpt(2, layers=3, hidden=64, heads=4, sequence=32, vocabulary=100)
    assert mine == [Counter(one.operations) for one in theirs]
    encoder = replace(gpt_like(3, 64, 4, 100, 512), encoder=True, segments=2)
    pairs = zip(
        operations(encoder)[:-1],
        bert(2, layers=3, hidden=64, heads=4, sequence=32, vocabulary=100),
        strict=False,
    )
    for one, other in pairs:
        assert one == Counter(other.operations)


def plain_flops(outputs, inputs):
    """One multiplication and one addition per element that a loop over a product visits."""
    return sum(2 for _ in range(outputs) for _ in range(inputs))


@examples(30)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.data())
def test_grouped_attention_by_plain_loops(groups, per_group, size, hidden, data):
    window = data.draw(st.none() | st.integers(1, 6))
    sequence = data.draw(st.integers(1, 5))
    heads = groups * per_group
    flops = parameters = 0
    for kind, count in (("query", heads), ("key", groups), ("value", groups)):
        for _ in range(count):
            parameters += size * hidden + (size if kind in ("query", "key") else 0) + size
            flops += sequence * plain_flops(size, hidden)
    parameters += hidden * heads * size - (heads + groups) * size + 2 * size
    flops += sequence * plain_flops(hidden, heads * size)
    for _head in range(heads):
        for _query in range(sequence):
            seen = min(sequence, window or sequence)
            flops += plain_flops(seen, size) + plain_flops(size, seen)
    model = Architecture(
        name="qwen3",
        layers=1,
        hidden=hidden,
        vocabulary=7,
        attention=GroupedAttention(heads, groups, size, bias=True, head_norms=True),
        feed_forward=FeedForward(3),
        window=window,
    )
    found = model.flops(1, sequence)["block0"]
    assert sum(found[name] for name in ("query, key, value", "attention", "output")) == flops
    others = 3 * 3 * hidden + 2 * hidden
    assert model.parameters()["block0"] == parameters + others


@examples(30)
@given(st.integers(1, 3), st.none() | st.integers(1, 4), st.integers(1, 4), st.data())
def test_latent_attention_by_plain_loops(heads, query_rank, rank, data):
    plain, rotary, value, hidden, sequence = (data.draw(st.integers(1, 4)) for _ in range(5))
    flops = parameters = 0
    products = [(rank + rotary, hidden), (hidden, heads * value)]
    products += [(plain, rank), (value, rank)] * heads
    if query_rank is None:
        products += [(plain + rotary, hidden)] * heads
    else:
        products += [(query_rank, hidden)] + [(plain + rotary, query_rank)] * heads
    for outputs, inputs in products:
        flops += sequence * plain_flops(outputs, inputs)
        parameters += outputs * inputs
    for _query in range(heads * sequence):
        flops += plain_flops(sequence, plain + rotary) + plain_flops(value, sequence)
    parameters += rank + (query_rank or 0)
    model = Architecture(
        name="deepseek_v3",
        layers=1,
        hidden=hidden,
        vocabulary=7,
        attention=LatentAttention(heads, rank, plain, rotary, value, query_rank),
        feed_forward=FeedForward(3),
    )
    found = model.flops(1, sequence)["block0"]
    assert sum(found.values()) == flops + 3 * sequence * plain_flops(3, hidden)
    assert model.parameters()["block0"] == parameters + 3 * 3 * hidden + 2 * hidden


@examples(30)
@given(st.sampled_from(("ssd", "delta", "kda", "lightning")), st.integers(1, 9), st.integers(1, 4))
def test_scans_by_plain_loops(rule, sequence, chunk):
    """Pairs of tokens in a chunk, and tokens with a state; two rules pad the last chunk."""
    heads, size, keys = 6, 5, 3
    mixer = Recurrence(rule, heads, size, keys, groups=2, chunk=chunk)
    flops, has_delta = 0, rule in ("delta", "kda")
    for start in range(0, sequence, chunk):
        tokens = min(chunk, sequence - start) if rule == "lightning" else chunk
        for _first in range(tokens * tokens):
            flops += 2 * (keys + size)  # a score, and a value by it
            flops += 2 * keys + (keys + size) if has_delta else 0  # the triangular system
        flops += tokens * (3 if has_delta else 2) * 2 * keys * size
        flops += 4 * keys * size if rule == "ssd" else 0  # to the next chunk
    flops += 4 * keys * size if rule == "ssd" else 0  # from the state before the first
    model = replace(gpt_like(1, 8, 1), attention=mixer)
    assert model.flops(1, sequence)["block0"]["scan"] == heads * flops


def test_blocks_that_cannot_be_are_refused():
    scan = ShortConvolution(8, 3)
    for variants, message in (
        ((Variant(frozenset({2}), mixers=(scan,)),), "block 2 must be from 0 to 1"),
        ((Variant(frozenset({0})), Variant(frozenset({0}))), "block 0 must be .* in one variant"),
        ((Variant(frozenset({0}), mixers=(), fed=False),), "a mixer or a feed-forward"),
        ((Variant(frozenset({0}), mixers=(scan, scan)),), "an attention and a recurrence"),
    ):
        with pytest.raises(InputError, match=message):
            replace(gpt_like(2, 8, 1), variants=variants)
    hybrid = replace(gpt_like(2, 8, 1), variants=(Variant(frozenset({0}), mixers=(scan,)),))
    with pytest.raises(InputError, match="context degree 2: a recurrence passes its state along"):
        shares_of(hybrid, 8, LayerSplit(context=2))
    with pytest.raises(InputError, match="LoRA: block 0 of gpt2 has none of the targets"):
        tuned_with(hybrid, lora=2, targets="q_proj")


@examples(30)
@given(st.integers(1, 5), st.none() | st.integers(1, 4), st.integers(1, 4), st.data())
def test_experts_by_plain_loops(number, shared, width, data):
    chosen = data.draw(st.integers(1, number))
    dense = data.draw(st.frozensets(st.integers(0, 2)))
    rows, hidden = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    experts = Experts(number, chosen, width, shared, shared is not None, dense)
    model = replace(gpt_like(3, hidden, 1, 7, 8), feed_forward=FeedForward(5), experts=experts)
    without = replace(model, experts=None, feed_forward=FeedForward(1))
    one = 3 * plain_flops(1, hidden)  # a feed-forward of width 1, of one token
    flops, parameters, active = total(without.flops(1, rows)), total_parameters(without), 0
    for index in range(3):
        flops -= rows * one
        parameters -= 3 * hidden
        if index in dense:
            flops += 5 * rows * one
            parameters += 5 * 3 * hidden
            continue
        parameters += number * hidden + number * 3 * width * hidden
        active -= (number - chosen) * 3 * width * hidden
        for _token in range(rows):
            flops += plain_flops(number, hidden) + chosen * width * one
            flops += 0 if shared is None else shared * one + plain_flops(1, hidden)
        parameters += 0 if shared is None else 3 * shared * hidden + hidden
    assert total(model.flops(1, rows)) == flops
    assert total_parameters(model) == parameters
    assert active_parameters(model) == parameters + active


def test_all_experts_are_on_the_device_and_their_weights_are_read():
    experts = Experts(8, 2, 32)
    model = replace(gpt_like(1, 64, 4, 100, 32), experts=experts)
    chain = architecture_model(model, 32, 1, "h200", precision="bf16")
    assert chain.layers[1].parameter_bytes == 2 * model.parameters()["block0"]
    operators = model.operators(1, 32)["block0"]
    weights = 3 * 64 * 32
    moved = sum(operators[name].moved for name in ("experts in", "experts out"))
    assert moved == 8 * weights + 64 * (64 + 2 * 32 + 32 + 64)
    few = model.operators(1, 1)["block0"]["experts out"]
    assert few.moved == 2 * 32 * 64 + 2 * (32 + 64)  # one token reads two experts


def test_the_chain_of_an_architecture():
    model = replace(gpt_like(2, 64, 4, 100, 32), experts=Experts(4, 2, 32))
    chain = architecture_model(model, 32, [1, 4], ["h100", "mi300x"], precision="bf16")
    assert [layer.name for layer in chain.layers] == ["embedding", "block0", "block1", "head"]
    assert chain.name == "gpt2(layers=2,hidden=64,sequence=32)"
    assert chain.microbatch_size == 4
    kinds = [(cost.device_kind, cost.microbatch_size) for cost in chain.layers[0].costs]
    assert kinds == [("h100", 1), ("h100", 4), ("mi300x", 1), ("mi300x", 4)]
    tied = 2 * 64 * 100  # the head holds a copy of the table
    assert chain.layers[-1].parameter_bytes == tied + 2 * model.parameters()["head"]
    for phrase in (
        "h100, bf16 peak 989 TFLOP/s, rates megatron-h100", "fused attention", "spread evenly",
        "all experts on the device", "tied weights copied",
    ):  # fmt: skip
        assert phrase in chain.source
    single = architecture_model(model, 32, 4, "h100", precision="bf16", tied_copies=False)
    assert single.layers[-1].parameter_bytes == 2 * model.parameters()["head"]


def test_sixteen_bits_cost_the_same_in_both_formats():
    model = gpt_like(2, 64, 4, 100, 32)
    brain, half = (
        architecture_model(model, 32, 1, "h100", precision=one) for one in ("bf16", "fp16")
    )
    assert brain.layers == half.layers
    assert brain.source.replace("bf16", "fp16") == half.source
    assert brain.optimizer_bytes_per_parameter_byte == half.optimizer_bytes_per_parameter_byte == 6


@pytest.mark.parametrize("kind", ["a100", "a100-80gb", "h100", "h200", "b200", "mi300x"])
def test_a_large_product_reaches_the_part_of_the_dense_peak_that_rates_say(kind):
    model = gpt_like(1, 8192, 64)
    chain = architecture_model(model, 2048, 4, kind, precision="bf16")
    flops = sum(model.flops(4, 2048)["block0"].values())
    reached = flops / chain.layers[1].costs[0].forward_seconds
    expected = rates_of(kind).reached.matmul * ACCELERATORS[kind].fp16_flops
    assert reached == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"layers": 10**6}, "layers must be at most"),
        ({"hidden": 10**10}, "hidden must be at most"),
        ({"window": 0}, "window must be at least 1"),
    ],
)
def test_bad_sizes_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        replace(gpt_like(1, 8, 1), **change)


def test_other_bad_requests_are_refused():
    with pytest.raises(InputError, match=r"heads \(4\) must be a multiple of key_value_heads \(3"):
        GroupedAttention(4, 3, 8)
    with pytest.raises(InputError, match="3 experts per token, but there are 2"):
        Experts(2, 3, 8)
    with pytest.raises(InputError, match="at most the 2048 learned positions, got 2049"):
        gpt_like(1, 8, 1).operators(1, 2049)
    with pytest.raises(InputError, match="samples must be at least 1, got 0"):
        gpt_like(1, 8, 1).operators(0, 8)
    with pytest.raises(InputError, match="v100 has no bf16 arithmetic"):
        architecture_model(gpt_like(1, 8, 1), 8, precision="bf16")
    with pytest.raises(InputError, match="microbatch_size must be at least 1"):
        architecture_model(gpt_like(1, 8, 1), 8, 0)
