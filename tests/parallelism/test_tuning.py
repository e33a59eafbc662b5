"""LoRA and frozen layers: counts of PEFT and torch, states by hand, what exports say."""

from dataclasses import replace

import pytest
from layout_problems import LLAMA, make_problem

from stagewright.executor.export.layouts import EVERY_FORMAT
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.models.architecture import Architecture, FeedForward, GroupedAttention
from stagewright.graphs.models.shards import LayerSplit, shares_of
from stagewright.graphs.models.tuning import tuned_with
from stagewright.service.layouts.problems import training_problem

TINY = Architecture("llama", 3, 64, 128, GroupedAttention(4, 2, 16), FeedForward(160))
EVERY = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
SKIPPED = 2 * 2 * 32 * 32 * 16 * 4 / 2
"""FLOPs of the keys' gradient in the first block, which a fused attention does not leave out."""


@pytest.mark.parametrize(
    ("tuning", "total", "trained", "flops", "saved"),
    [
        ({}, 145856, 145856, 28704768, 529804),
        ({"lora": 4, "targets": "q_proj,v_proj"}, 148544, 2688, 19750912 + SKIPPED, 397324),
        ({"lora": 4, "targets": EVERY}, 159296, 13440, 21929984, 523788),
        ({"lora": 4, "targets": "w2"}, 148544, 2688, 17121280, 330124),
        ({"lora": 4, "targets": "output_proj"}, 147392, 1536, 18890752, 363020),
        ({"frozen": "embedding,blocks.0"}, 145856, 94528, 22675456, 365452),
        ({"frozen": "head,blocks.1"}, 145856, 94464, 25427968, 476556),
    ],
)
def test_counts_are_those_of_peft_and_torch(tuning, total, trained, flops, saved) -> None:
    """Recorded with peft 0.21.2, transformers 5.24, torch 2.13 in fp32: torch's counter of FLOPs
    and its hooks of saved tensors, of a Llama of 32 tokens with an eager attention."""
    shares = shares_of(tuned_with(TINY, **tuning), 32, LayerSplit(), "materialized").every
    assert sum(one.parameters for one in shares) == total
    assert sum(one.parameters - one.frozen_parameters for one in shares) == trained
    operators = [one for share in shares for one in share.operators.values()]
    assert sum(one.training_flops for one in operators) == flops
    kept = sum(share.saved_bytes(4, "none") for share in shares)
    assert kept == pytest.approx(saved, rel=0.017)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_frozen_weights_have_no_other_state(zero: int) -> None:
    """ZeRO divides them at stage 3 alone; nothing but adapters is exchanged or updated before."""
    layout = parse_layout(f"d4 b1 zero{zero}")
    problem = make_problem(tuned_with(LLAMA, lora=8), layout)
    memory = evaluate(problem, layout).memory[0]
    total = sum(problem.architecture.parameters().values())
    adapters = total - sum(LLAMA.parameters().values())
    # Of 3 x 1,024 x 2,816 gated feed-forwards and 1,024 x (1,024 + 512) projections of 16 blocks.
    columns = (1024 + 1536) + (1024 + 1024) + (1024 + 2 * 2816) + (2816 + 1024)
    assert adapters == 16 * 8 * columns
    assert memory.weights == pytest.approx(2 * total / (4 if zero == 3 else 1))
    assert memory.gradients == pytest.approx(4 * adapters / (4 if zero >= 2 else 1))
    assert memory.optimizer == pytest.approx(12 * adapters / (4 if zero >= 1 else 1))


def test_a_large_model_is_trained_in_about_two_thirds_of_the_time() -> None:
    layout, large = parse_layout("b1"), replace(LLAMA, hidden=8192, feed_forward=FeedForward(28672))
    whole, lora = (
        evaluate(make_problem(one, layout, sequence=8192), layout).seconds
        for one in (large, tuned_with(large, lora=16))
    )
    assert 0.62 < lora / whole < 0.78


@pytest.mark.parametrize(
    ("device", "words", "measured"),
    [
        ("gb200", "p2 d4 b1 v20 zero1", 6206),
        ("gb200", "p4 d2 b1 v20 zero1", 5958),
        ("h100", "p4 t2 b1 v20 zero1 sp", 2643),
    ],
)
def test_published_runs_with_adapters(device, words, measured) -> None:
    """Tokens per second and GPU of Llama 3 70B in fp8 on 8 GPUs, with adapters of linear_qkv
    (NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md, 26.06)."""
    model = Architecture(
        "llama", 80, 8192, 128256, GroupedAttention(64, 8, 128), FeedForward(28672)
    )
    problem = training_problem(
        tuned_with(model, lora=16, targets="linear_qkv"), fabric_of_kind(device, 8),
        sequence=4096, batch=32, precision="fp8", framework="megatron-bridge",
    )  # fmt: skip
    found = evaluate(problem, parse_layout(words))
    assert 32 * 4096 / 8 / found.seconds == pytest.approx(measured, rel=0.08)
    assert max(one.total for one in found.memory) < found.memory_bytes


def test_what_is_before_the_first_trained_layer_has_no_backward() -> None:
    shares = shares_of(tuned_with(TINY, frozen="embedding,blocks.0-1"), 32, LayerSplit())
    assert [one.has_backward for one in shares.every] == [False, False, False, True, True]
    assert [one.saved_bytes(2, "full") > 0 for one in shares.every] == [False] * 3 + [True] * 2


def test_a_tensor_group_divides_adapters() -> None:
    model = tuned_with(TINY, lora=4)
    whole, half = (shares_of(model, 32, LayerSplit(t)).kinds[0] for t in (1, 2))
    trained = [one.parameters - one.frozen_parameters for one in (whole, half)]
    # The parts of A for queries, keys and values, and gate and up, by rows; all others by columns.
    assert trained[0] == 2 * trained[1]


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        ({"lora": 0}, "LoRA rank must be at least 1"),
        ({"lora": 4, "targets": "c_attn"}, "LoRA target 'c_attn': llama has down_proj"),
        ({"targets": "q_proj"}, "lora_targets without lora"),
        ({"frozen": "blocks.3"}, "frozen 'blocks.3': blocks are 0 to 2"),
        ({"frozen": "blocks.0-999999999999"}, "blocks are 0 to 2"),
        ({"frozen": "blocks.2-1"}, "frozen 'blocks.2-1': blocks are 0 to 2, in this order"),
        ({"frozen": "layers.0"}, "frozen 'layers.0': write for example"),
        ({"frozen": "embedding,head,blocks.0-2"}, "nothing is trained"),
    ],
)
def test_another_tuning_is_refused(tuning, message) -> None:
    with pytest.raises(InputError, match=message):
        tuned_with(TINY, **tuning)
    with pytest.raises(InputError, match="freeze both"):
        tuned_with(replace(TINY, tied=True), frozen="embedding")


@pytest.mark.parametrize(
    ("framework", "targets", "said"),
    [
        ("megatron-bridge", None, "LoRA(target_modules=['linear_fc2', 'linear_fc1', 'linear_qkv'"),
        (
            "megatron-bridge",
            "q_proj,w3",
            "CanonicalLoRA(target_modules=['linear_q', 'linear_fc1_up",
        ),
        ("accelerate", "q_proj", "target_modules=['q_proj']"),
    ],
)
def test_exports_have_adapters(framework, targets, said) -> None:
    layout = parse_layout("d4 b1")
    problem = make_problem(tuned_with(LLAMA, lora=8, targets=targets), layout)
    text = "".join(EVERY_FORMAT[framework].files(problem, layout).values())
    compile(text, framework, "exec")
    assert said in text
