"""What software stacks keep, by hand; measured and estimated memory of published runs."""

from dataclasses import replace

import pytest
from layout_problems import DEEPSEEK, LLAMA, make_problem

import stagewright
from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.formulations.prices.computing import precision_named
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.stack_memory import PLAIN, STACK_MEMORY, StackMemory
from stagewright.graphs.models.architecture import Architecture, FeedForward, GroupedAttention

SMALL = Architecture("small", 4, 64, 1000, GroupedAttention(8, 2, 8), FeedForward(160))
LLAMA_8B = Architecture(
    "llama3-8b", 32, 4096, 128256, GroupedAttention(32, 8, 128), FeedForward(14336)
)
TOKENS = 1024


def estimated(
    stack: str, words: str, architecture: Architecture = SMALL, precision: str = "bf16"
) -> Estimate:
    layout = parse_layout(words)
    memory, numbers = STACK_MEMORY[stack], precision_named(precision)
    problem = make_problem(architecture, layout, 1, memory=memory, precision=numbers)
    return evaluate(problem, layout)


def of_a_block(stack: str, words: str, precision: str) -> float:
    """Bytes that a block keeps of a token, but for the allocator's slack."""
    few, many = (
        estimated(stack, words, replace(SMALL, layers=n), precision).memory[0].activations
        for n in (2, 3)
    )
    return (many - few) / TOKENS / (1 + STACK_MEMORY[stack].slack)


# Two norms, inputs of both products, queries with keys and values, their statistics, the output.
COMMON = 2 * (4 * 64 + 64 + 2 * 16 + 64) + 4 * 8


@pytest.mark.parametrize(
    ("stack", "words", "precision", "kept"),
    [
        ("plan", "b1", "bf16", COMMON + 2 * 4 * 160),  # gate, its activation, up, the product
        ("megatron", "b1", "bf16", COMMON + 2 * 3 * 160),
        ("fsdp", "b1", "bf16", COMMON + 2 * 4 * 160),
        # The three inputs of 64, 64 and 160 in 8 bits; the attention's output in both types.
        ("megatron", "b1", "fp8", COMMON + 2 * 2 * 160 - 2 * 64 + 64 + 160),
        ("plan", "b1", "fp8", COMMON + 2 * 4 * 160),
        ("megatron", "b1 full", "bf16", 2 * 64),
        # Input, queries, values, the attention, gate, and the product back.
        ("torchtitan", "b1 selective", "bf16", 2 * (64 + 64 + 16 + 64 + 160 + 64) + 4 * 8),
    ],
)
def test_what_a_block_keeps_of_a_token(stack, words, precision, kept) -> None:
    assert of_a_block(stack, f"p1 t1 d1 {words}", precision) == pytest.approx(kept)


def test_up_projections_of_latent_attention_are_computed_again() -> None:
    one, other = (
        estimated(stack, "p1 t1 d1 b1", replace(DEEPSEEK, experts=None)).memory[0]
        for stack in ("plan", "megatron")
    )
    of = DEEPSEEK.attention
    repeated = of.heads * (2 * of.key_size + of.value_size)
    silu = DEEPSEEK.feed_forward.width
    per_token = (one.activations - other.activations) / DEEPSEEK.layers / 2 / TOKENS
    assert per_token == pytest.approx(repeated + silu)


def test_experts_outputs_are_weighted_before_the_product_back() -> None:
    one, other = (
        estimated(stack, "p1 t1 d1 b1", DEEPSEEK).memory[0] for stack in ("plan", "megatron")
    )
    experts, of = DEEPSEEK.experts, DEEPSEEK.attention
    sparse = DEEPSEEK.layers - len(experts.dense_layers)
    combined = experts.per_token * (DEEPSEEK.hidden + experts.width) + experts.shared_width
    dense = len(experts.dense_layers) * DEEPSEEK.feed_forward.width
    repeated = DEEPSEEK.layers * of.heads * (2 * of.key_size + of.value_size)
    found = (one.activations - other.activations) / 2 / TOKENS
    assert found == pytest.approx(sparse * combined + dense + repeated)


LOGITS = 1000 * TOKENS


@pytest.mark.parametrize(
    ("stack", "kept", "added"),
    [("plan", 4, 4), ("megatron", 4, 2), ("fsdp", 2, 2), ("torchtitan", 4, 8), ("deepspeed", 6, 8)],
)
def test_bytes_of_a_logit(stack, kept, added) -> None:
    """A vocabulary twice as large adds them, and the table's and the layer's larger weights."""
    memory, slack = STACK_MEMORY[stack], 1 + STACK_MEMORY[stack].slack
    one, two = (
        estimated(stack, "p1 t1 d1 b8", replace(SMALL, vocabulary=n)).memory[0]
        for n in (1000, 2000)
    )
    assert two.activations - one.activations == pytest.approx(8 * LOGITS * kept * slack)
    weights = 2 * 1000 * 64 if memory.layer_gradients else 0
    assert two.buffers - one.buffers == pytest.approx(8 * LOGITS * added * slack + weights)


PARAMETERS = 2 * 1000 * 64 + 64 + 4 * (64 * 96 + 64 * 64 + 3 * 64 * 160 + 2 * 64)


@pytest.mark.parametrize(
    ("stack", "words", "each"),
    [
        ("plan", "p1 t1 d8 b1 zero3", 18 / 8),
        ("torchtitan", "p1 t1 d8 b1 zero3", 16 / 8),  # fp32 masters, gradients, two moments
        ("fsdp", "p1 t1 d8 b1 zero2", 2 + 16 / 8),
        ("torchtitan", "p1 t1 d8 b1 zero2", 2 + 16 / 8),
        ("torchtitan", "p2 t1 d4 b1 zero2", 2 + 4 + 12 / 4),  # whole until the last microbatch
        ("torchtitan", "p2 t1 d4 b1 zero3", 2 + 4 + 12 / 4),
        ("plan", "p2 t1 d4 b1 zero2", 2 + 16 / 4),
    ],
)
def test_states_of_a_parameter(stack, words, each) -> None:
    found = sum(m.weights + m.gradients + m.optimizer for m in estimated(stack, words).memory)
    assert found == pytest.approx(PARAMETERS * each)


def test_buckets_of_gradients() -> None:
    """Two of 5e8 numbers, or of as many as there are."""
    plain, bucketed = (
        estimated(stack, "p1 t1 d8 b1 zero1", SMALL).memory[0].buffers
        for stack in ("accelerate", "deepspeed")
    )
    assert bucketed - plain == pytest.approx(2 * 2 * PARAMETERS)


def test_a_problem_is_of_its_stack() -> None:
    fabric = fabric_of_kind("h100", 8)

    def made(**others):
        return stagewright.training_problem(LLAMA, fabric, sequence=512, batch=8, **others)

    plain, megatron = made(), made(framework="megatron")
    assert (plain.memory, plain.precision.gradient_bytes, plain.reserve_bytes) == (PLAIN, 4, 2e9)
    assert (megatron.precision.gradient_bytes, megatron.reserve_bytes) == (2, 2.75e9)
    assert made(framework="megatron", precision="fp32").precision.gradient_bytes == 4
    own = made(framework="megatron", gradient_bytes=4, reserve_bytes=3e9)
    assert (own.precision.gradient_bytes, own.reserve_bytes) == (4, 3e9)
    with pytest.raises(InputError, match="'caffe' is"):
        made(framework="caffe")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gradient_bytes": 3}, "gradient_bytes must be 2 or 4, got 3"),
        ({"slack": 1.0}, r"slack must be in \[0, 1\), got 1"),
        ({"loss_bytes": -1.0}, "loss_bytes must be finite and not negative, got -1.0"),
    ],
)
def test_what_no_stack_keeps(fields, message) -> None:
    with pytest.raises(InputError, match=message):
        StackMemory("own", "by hand", **fields)


def test_a_published_run_of_nemo() -> None:
    """Llama 3 8B on 8 H100 in bf16: its log says 70.8 GB at the peak, 44.3 GB after a step."""
    problem = stagewright.training_problem(
        LLAMA_8B, fabric_of_kind("h100", 8), sequence=8192, batch=128, framework="nemo"
    )
    found = evaluate(problem, parse_layout("p1 t1 c2 d4 b1 zero1"))
    (rank,) = found.memory
    assert found.fits
    assert found.peak_bytes == pytest.approx(70.83e9, rel=0.06)
    assert rank.weights + rank.gradients + rank.optimizer == pytest.approx(44.27e9, rel=0.003)


@pytest.fixture(scope="module")
def runs():
    """Published runs, with what estimates them; none where the data is not there."""
    measured = pytest.importorskip("benchmarks.measured_layouts")
    if not measured.ROWS.exists():
        pytest.skip("no measured layouts")
    from benchmarks.stack_memory import estimate

    return [(run, estimate(run)) for run in measured.measured_runs()]


def test_printed_memory_of_torchtitan(runs) -> None:
    """Its maximum of reserved bytes; the allocator's slack alone is fitted to them."""
    printed = [(run, found) for run, found in runs if run.memory_bytes is not None]
    assert len(printed) == 10
    for run, found in printed:
        of_torch = max(rank.total - rank.reserve for rank in found.memory)
        assert of_torch == pytest.approx(run.memory_bytes, rel=0.06)


def test_runs_that_ran_fit(runs) -> None:
    """All of them, with what rows do not print and their recipes say (``BY_RECIPE``)."""
    assert [(run.id, str(run.layout)) for run, found in runs if not found.fits] == []
    assert sum(run.layout.offload_blocks > 0 for run, _ in runs) == 7


DENSE, SPARSE = 3, 13  # blocks of DEEPSEEK
FREED = {
    "moe_act": SPARSE * 4 * 512,  # products of gates and ups of four experts
    "layernorm": (DENSE + 2 * SPARSE) * 1024,  # before the attention, and before experts
    "mlp": DENSE * (1024 + 3 * 4096),  # the norm's output, gate, up and their product
    # Scores; tokens at their experts with gate, up and their product; the same of shared experts.
    "moe": SPARSE * (16 + 4 * (1024 + 3 * 512) + 3 * 1024),
}


@pytest.mark.parametrize(
    ("modules", "freed"),
    [
        *FREED.items(),
        ("mla_up_proj", 0),  # as always
        ("moe_act+layernorm", FREED["moe_act"] + FREED["layernorm"]),
        ("moe_act+moe", FREED["moe"]),  # of which the activation is a part
    ],
)
def test_what_modules_free(modules: str, freed: int) -> None:
    """By hand, elements of a token; seconds are between those of none and of all."""
    none, some, full = (
        estimated("megatron", f"p1 t1 d1 b1 {one}", DEEPSEEK) for one in ("none", modules, "full")
    )
    found = none.memory[0].activations - some.memory[0].activations
    assert found / 2 / TOKENS == pytest.approx(freed)
    assert none.seconds <= some.seconds < full.seconds
    assert (some.seconds > none.seconds) == (freed > 0)


@pytest.mark.parametrize("blocks", [1, 3])
def test_what_offloaded_blocks_free(blocks: int) -> None:
    """By hand: all that they keep, but for a block on its way; over a slow link copies decide."""
    few = replace(SMALL, vocabulary=500)
    none, some = (parse_layout(f"p1 t1 d1 b1 {one}") for one in ("none", f"offload{blocks}"))
    problem = make_problem(few, some, 2, memory=STACK_MEMORY["megatron"])
    kept, away = (evaluate(problem, layout).memory[0] for layout in (none, some))
    block = TOKENS * (COMMON + 2 * 3 * 160)
    assert kept.activations - away.activations == pytest.approx(blocks * block)
    assert away.buffers - kept.buffers == pytest.approx(block - 2 * 500 * TOKENS)
    fast, slow = (
        evaluate(replace(problem, fabric=replace(problem.fabric, host_bytes_per_second=rate)), some)
        for rate in (1e15, 1e6)
    )
    assert fast.seconds == evaluate(problem, none).seconds
    assert slow.pipeline_seconds == pytest.approx(2 * 2 * blocks * block / 1e6)


def test_copies_to_the_host_wait_for_exchanges_between_servers_alone() -> None:
    """Of eight ranks in a server, and of sixteen, whose weights are gathered over its network."""
    found = []
    for ranks in (8, 16):
        layout = parse_layout(f"p1 t1 d{ranks} b1 zero3 offload1")
        problem = make_problem(SMALL, layout, 2, memory=STACK_MEMORY["megatron"])
        slow = replace(problem.fabric, host_bytes_per_second=1e6)
        found.append(evaluate(replace(problem, fabric=slow), layout))
    copied = 2 * 2 * TOKENS * (COMMON + 2 * 3 * 160) / 1e6
    assert found[0].pipeline_seconds == pytest.approx(copied, rel=1e-9)
    assert found[1].pipeline_seconds > copied + 2 * 3 * PARAMETERS / (8 * 5e10)


@pytest.mark.parametrize(
    ("stack", "words", "message"),
    [
        ("torchtitan", "mlp", "module mlp: torchtitan can recompute no modules"),
        ("megatron", "moe_act", "module moe_act: no block has experts; choose none or full"),
        ("megatron", "core_attn", "no block has attention in several kernels"),
        ("megatron", "mlp+attn", "'attn' is none of none, selective, full and of the modules"),
        ("deepspeed", "offload1", "deepspeed has none, only megatron, megatron-bridge, nemo;"),
        ("megatron", "offload4", "offload_blocks 4 of 4 blocks: at most 3"),
        ("megatron", "offload1 full", "needs pipeline 1 and recompute none, got 1 with"),
    ],
)
def test_modules_that_are_refused(stack: str, words: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        estimated(stack, f"p1 t1 d1 b1 {words}")
