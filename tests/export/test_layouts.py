"""Exported layouts: every file says what the layout says, or its features are refused by name."""

import json
import re
from dataclasses import replace

import pytest
from framework_names import stand_ins
from hypothesis import given
from hypothesis import strategies as st
from layout_problems import (
    ARCHITECTURES,
    DEEPSEEK,
    GPT2,
    LLAMA,
    MIXTRAL,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    make_problem,
    random_problem,
    said,
)
from layout_readers import READERS, run_megatron, said_of_model
from profiles import examples

from stagewright.executor.export.layouts import EVERY_FORMAT, LAYOUT_FORMATS, export_layout
from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.formulations.prices.computing import Precision, precision_named
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.stack_memory import STACK_MEMORY
from stagewright.graphs.models.architecture import (
    Architecture,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
)
from stagewright.graphs.models.diffusion import Diffusion
from stagewright.graphs.models.towers import Tower
from stagewright.graphs.models.tuning import tuned_with

PIPED = ("megatron", "megatron-bridge", "nemo", "torchtitan")
CORE = PIPED[:3]
SHARDING = ("torchtitan", "accelerate")  # say nothing of ZeRO where there is nothing to divide
FULL_FP32 = Precision(4, 4, 4, 8)
KV2 = replace(LLAMA, attention=GroupedAttention(16, 2, 64))


def exported(architecture, words, to, **others):
    layout = parse_layout(words)
    return export_layout(make_problem(architecture, layout, **others), layout, to)


def expected(to, problem, layout):
    found = said(problem, layout)
    if to in SHARDING and layout.data * layout.context == 1:
        found["zero"] = 0
    if to not in CORE and layout.recompute_blocks is not None:
        assert layout.recompute_blocks >= max(found["blocks"])
        found["recompute_blocks"] = None
    return found


@pytest.mark.parametrize("to", LAYOUT_FORMATS)
@examples(300)
@given(seed=st.integers(0, 2**32))
def test_files_say_what_the_layout_says(to, seed):
    problem, layout = random_problem(seed)
    try:
        files = export_layout(problem, layout, to)
    except InputError:
        return
    found = READERS[to](files, problem.architecture.layers)
    assert found == expected(to, problem, layout)
    inner = found["pipeline"] * found["tensor"] * found["context"]
    assert found["ranks"] == inner * found["data"] == problem.fabric.devices
    assert found["batch"] == found["microbatch"] * found["data"] * found["accumulation"]


TAKEN = [
    *((to, LLAMA, "p4 t2 d2 b1 v2 zero1 full sp") for to in PIPED),
    *((to, LLAMA, "p4 t2 c2 d2 b2 v2 zero1 sp first1 last3") for to in PIPED),
    *((to, LLAMA, "p2 t1 d2 b1 zero0 first16 last0") for to in PIPED),
    *((to, LLAMA, "p4 t2 d4 b1 zero1 pipeline-inside offload") for to in CORE),
    *((to, MIXTRAL, "p2 t2 c2 d2 e4 b1 zero1 pipeline-inside sp") for to in CORE),
    *((to, DEEPSEEK, "p2 t2 d4 e8 b1 zero1 full sp") for to in PIPED),
    *((to, QWEN2_MOE, "p1 t2 d4 e4 b1 zero2 sp") for to in CORE),
    *((to, QWEN2, "p1 t4 d4 b1 zero2") for to in LAYOUT_FORMATS if to != "torchtitan"),
    *((to, KV2, "p1 t4 d2 b1 zero2") for to in CORE[:2]),
    ("torchtitan", QWEN3_MOE, "p1 t2 d4 e4 b1 zero2 sp"),
    ("torchtitan", QWEN3, "p1 t4 d4 b1 zero2"),
    *((to, LLAMA, "p1 t1 d8 b2 zero3 full") for to in LAYOUT_FORMATS),
    *((to, GPT2, "p1 t1 d8 b1 zero0") for to in (*CORE, "accelerate")),
    ("torchtitan", replace(LLAMA, tied=True), "p1 t1 d8 b1 zero0"),
    *((to, LLAMA, "p4 t1 d2 b1 v2 zero1 full blocks1") for to in CORE),
    *((to, LLAMA, "p1 t1 d8 b1 zero3 full blocks16") for to in LAYOUT_FORMATS),
    *((to, LLAMA, "p4 t2 d1 b1 zero1 stages3-4-5-4 full") for to in PIPED),
    *((to, LLAMA, "p4 t2 d1 b1 zero1 stages3-4-5-4 full blocks2") for to in CORE),
    *((to, LLAMA, "p4 t2 d1 b1 zero1 stages4x4") for to in PIPED),
    ("torchtitan", LLAMA, "p4 t1 d2 b1 v2 zero1 zero-bubble"),
    ("torchtitan", LLAMA, "p4 t1 d2 b1 zero0 zero-bubble first1"),
    ("accelerate", LLAMA, "p1 t2 c2 d2 b1 zero3"),
    ("accelerate", LLAMA, "p1 t4 d1 b1 zero0"),
    ("torchtitan", LLAMA, "p1 t2 c2 d2 b1 zero3 sp"),
    ("torchtitan", QWEN3_MOE, "p2 t2 d2 e2 b1 zero0 sp"),
    ("deepspeed", LLAMA, "p1 t2 d4 b1 zero1 offload full"),
    ("deepspeed", MIXTRAL, "p1 t1 d8 e4 b1 zero3"),
]


@pytest.mark.parametrize(("to", "architecture", "words"), TAKEN)
def test_features_that_are_taken(to, architecture, words):
    layout = parse_layout(words)
    problem = make_problem(architecture, layout)
    files = export_layout(problem, layout, to)
    assert READERS[to](files, architecture.layers) == expected(to, problem, layout)


def test_modules_that_megatron_recomputes():
    """With those that the price has always; delayed scaling of fp8 does not allow them."""
    layout = parse_layout("p2 t2 d4 e8 b1 zero1 sp layernorm+moe_act")
    assert str(layout).endswith("moe_act+layernorm sp")
    problem = make_problem(
        DEEPSEEK, layout, memory=STACK_MEMORY["megatron"], precision=precision_named("fp8")
    )
    (text,) = export_layout(problem, layout, "megatron").values()
    assert "--recompute-granularity selective" in text
    assert "--recompute-modules moe_act layernorm mla_up_proj\n" in text
    assert "--fp8-recipe tensorwise" in text


@pytest.mark.parametrize("to", CORE)
def test_activations_that_megatron_offloads(to):
    layout = parse_layout("p1 t1 d8 b2 zero3 offload7")
    problem = make_problem(LLAMA, layout, memory=STACK_MEMORY["megatron"])
    files = export_layout(problem, layout, to)
    assert READERS[to](files, LLAMA.layers) == expected(to, problem, layout)


def test_selective_recomputation_by_operator():
    """Torchtitan's own, of a problem that is planned for it."""
    layout = parse_layout("p1 t1 d8 b1 zero3 selective")
    problem = make_problem(LLAMA, layout, memory=STACK_MEMORY["torchtitan"])
    files = export_layout(problem, layout, "torchtitan")
    assert READERS["torchtitan"](files, LLAMA.layers) == said(problem, layout)
    twice = parse_layout("p2 t1 d4 b1 zero1 zero-bubble selective")
    with pytest.raises(InputError, match="selective recomputation with zero bubbles"):
        export_layout(replace(problem, batch=32), twice, "torchtitan")


@pytest.mark.parametrize("to", LAYOUT_FORMATS)
def test_files_say_what_they_are(to):
    text = next(
        text
        for name, text in exported(LLAMA, "p1 t1 d8 b1 zero3", to).items()
        if ".json" not in name
    )
    assert "The layout" in text
    assert "p1 t1 d8 b1 zero3" in text
    assert "torchrun --nnodes=1 --nproc-per-node=8 ..." in text


@pytest.mark.parametrize("to", [to for to in LAYOUT_FORMATS if to != "megatron"])
def test_another_number_of_layers_is_refused(to):
    files = exported(LLAMA, "p1 t1 d8 b1 zero3", to)
    with pytest.raises(ValueError, match="the plan is for 16 layers, the model has 15"):
        READERS[to](files, 15)


@pytest.mark.parametrize("to", PIPED)
def test_what_the_plan_has_not_counted_is_said(to):
    (text,) = exported(DEEPSEEK, "p2 t1 d4 e4 b1 zero1", to).values()
    assert "The plan has not counted: 'the layers of multi-token prediction'." in text


# ---------------------------------------------------------------- Megatron-LM's model and numbers


def parsed(architecture, words="p1 t1 d8 b1", **others):
    return run_megatron(exported(architecture, words, "megatron", **others)["megatron.sh"])[0]


def architecture_from(args):
    """The architecture that Megatron-LM's arguments describe."""
    every = not args.disable_bias_linear
    rotary = args.position_embedding_type == "rope"
    return Architecture(
        "", args.num_layers, args.hidden_size, args.vocab_size, attention_from(args),
        FeedForward(args.ffn_hidden_size, args.swiglu, every), experts_from(args),
        {"LayerNorm": "layer", "RMSNorm": "rms"}[args.normalization],
        positions=None if rotary else args.max_position_embeddings,
        tied=not args.untie_embeddings_and_output_weights,
        window=None if args.window_size is None else int(args.window_size.split(",")[0]) + 1,
        full_layers=frozenset(zeros(args.window_attn_skip_freq)),
        dropout=args.hidden_dropout is None and args.attention_dropout is None,
        rotary_base=args.rotary_base, norm_epsilon=args.norm_epsilon,
    )  # fmt: skip


def zeros(pattern):
    """Where a pattern has 0."""
    return [] if pattern is None else [i for i, one in enumerate(eval(pattern)) if one == 0]


def attention_from(args):
    every = not args.disable_bias_linear
    heads, size = args.num_attention_heads, args.kv_channels
    if args.multi_latent_attention:
        return LatentAttention(
            heads, args.kv_lora_rank, args.qk_head_dim, args.qk_pos_emb_head_dim, args.v_head_dim,
            args.q_lora_rank,
        )  # fmt: skip
    assert args.group_query_attention == (args.num_query_groups is not None)
    return GroupedAttention(
        heads, args.num_query_groups or heads, size, every or args.add_qkv_bias, every,
        args.qk_layernorm,
    )  # fmt: skip


def experts_from(args):
    if args.num_experts is None:
        return None
    return Experts(
        args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size,
        args.moe_shared_expert_intermediate_size, args.moe_shared_expert_gate,
        frozenset(zeros(args.moe_layer_freq)),
    )  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda one: one.name)
def test_megatron_arguments_describe_the_model(architecture):
    found = architecture_from(parsed(architecture))
    assert found == replace(architecture, name="", left_out=None)


def test_megatron_numbers():
    words = "p1 t1 d8 b1 zero1"
    plain = parsed(LLAMA, words)
    assert (plain.bf16, plain.fp16, plain.grad_reduce_in_bf16) == (True, False, False)
    small = parsed(LLAMA, words, precision=Precision(2, 2, 2, 8))
    assert (small.grad_reduce_in_bf16, small.use_precision_aware_optimizer) == (True, True)
    assert (small.exp_avg_dtype, small.exp_avg_sq_dtype) == ("bf16", "bf16")
    old = parsed(LLAMA, words, device="v100")
    assert (old.bf16, old.fp16, old.accumulate_allreduce_grads_in_fp32) == (False, True, True)
    full = parsed(LLAMA, words, precision=FULL_FP32)
    assert (full.bf16, full.fp16) == (False, False)
    eight = parsed(LLAMA, words, precision=Precision(2, 1, 4, 12, fp8_products=True))
    assert (eight.fp8_format, eight.fp8_param_gather) == ("hybrid", True)


def test_megatron_overlaps_and_offloads():
    away = parsed(LLAMA, "p1 t1 d8 b1 zero1 offload", overlap=False)
    assert (away.overlap_grad_reduce, away.overlap_param_gather) == (False, False)
    assert away.optimizer_offload_fraction == 1
    assert away.use_precision_aware_optimizer
    beside = parsed(LLAMA, "p1 t1 d8 b1 zero0")
    assert (beside.overlap_grad_reduce, beside.overlap_param_gather) == (True, False)
    kept = parsed(LLAMA, "p1 t1 d8 b1 selective", attention="materialized")
    assert kept.attention_backend == "unfused"


# ---------------------------------------------------------------- refusals

BERT = replace(GPT2, name="bert", encoder=True, segments=2)
HF = ("deepspeed", "accelerate")
OTHERS = ("torchtitan", *HF)
TITAN, DEEPSPEED, ACCELERATE, MEGATRON = ("torchtitan",), HF[:1], HF[1:], CORE[:1]
NARROW, FP8 = Precision(2, 2, 2, 8), Precision(fp8_products=True)
FP8_FULL = Precision(4, 4, 4, 8, fp8_products=True)
ONE_BYTE = Precision(activation_bytes=1)
BIASED = FeedForward(2816, bias=True)
UNGATED = FeedForward(2048, gated=False)
LORA, FROZEN = tuned_with(LLAMA, lora=8), tuned_with(LLAMA, frozen="embedding")
MIXED = tuned_with(LLAMA, lora=8, targets="linear_qkv,q_proj")


def refused(formats, architecture, words, message, **others):
    return [(to, architecture, words, message, others) for to in formats]


FURTHER = replace(LLAMA, next_tokens=1)
LATENTS = replace(LLAMA, diffusion=Diffusion(patch=16, classes=10))
BEHIND = replace(LLAMA, tower=Tower(2, 64, LLAMA.attention, LLAMA.feed_forward))
REFUSED = [
    *refused(
        LAYOUT_FORMATS,
        LLAMA,
        "p2 d4 zero1 stages7-9 again3-1 full",
        "recomputed blocks by stage: .* has one recomputation|a pipeline of 2",
    ),
    *refused(
        (*CORE, *SHARDING), LLAMA, "c2 d4 zero3", "1022 tokens: .* needs a multiple", sequence=1022
    ),
    *refused(PIPED, BERT, "t1 d8", "an encoder .bert.: .* decoders"),
    *refused(LAYOUT_FORMATS, LLAMA, "t1 d8 zero3", "activations of 1 byte", precision=ONE_BYTE),
    *refused(CORE, LLAMA, "d8 offload", "offloaded optimizer with ZeRO 0.*zero 1"),
    *refused(CORE, LLAMA, "d8 zero3 offload", "offloaded optimizer with ZeRO 3.*zero 1"),
    *refused(CORE, LLAMA, "p2 d4 v2 zero2", "2 chunks with ZeRO 2.*chunks 1"),
    *refused(CORE, LLAMA, "p2 d4 zero3 pipeline-inside", "pipeline-inside with ZeRO 3.*zero 1"),
    *refused(CORE, LLAMA, "p2 c2 d2 pipeline-inside", "pipeline-inside.*only with context 1"),
    *refused(CORE, MIXTRAL, "p2 t2 d2 sp pipeline-inside", "expert degree of tensor x context"),
    *refused(CORE, QWEN2, "c2 d4", "context degree 2 with a sliding window.*context 1"),
    *refused(CORE, LLAMA, "d8", "2 . 2 . 8 bytes.*keeps 2 . 4 . 12", precision=NARROW),
    *refused(CORE, LLAMA, "d8", "fp8 with activations of 4 bytes", precision=FP8_FULL),
    *refused(CORE, LLAMA, "p2 d4 zero1 zero-bubble", "zero-bubble.*choose 1f1b"),
    *refused(OTHERS, LLAMA, "d8 zero3 full blocks3", "3 recomputed blocks of 16.*megatron"),
    *refused(
        OTHERS,
        LLAMA,
        "d8 zero3 offload7",
        "activations of 7 blocks in host.*to megatron",
        memory=STACK_MEMORY["megatron"],
    ),
    *refused(TITAN, LLAMA, "p2 d4 zero1 zero-bubble full", "full recomputation with zero bubbles"),
    *refused(
        TITAN, LLAMA, "p4 d2 zero1 zero-bubble", "9 microbatches.*a multiple of 4", microbatches=9
    ),
    *refused(HF, LLAMA, "p2 d4", "a pipeline of 2: .*no pipeline.*to megatron"),
    *refused(HF, LLAMA, "t2 d4 zero2 sp", "sequence parallelism over the tensor ranks"),
    *refused(
        OTHERS, LLAMA, "d8 zero3 selective", "selective.*none or full", attention="materialized"
    ),
    *refused(OTHERS, LLAMA, "d8 zero3", "products in fp8", precision=FP8),
    *refused(SHARDING, LLAMA, "d8 zero3 offload", "offloads parameters and gradients"),
    *refused(SHARDING, LLAMA, "c2 d4", "ZeRO 0 with context degree 2.*zero 2 or 3"),
    *refused(TITAN, LLAMA, "p2 d4 zero2", "ZeRO 2 in a pipeline.*zero 1"),
    *refused(TITAN, LLAMA, "d8 zero1", "ZeRO 1 without a pipeline.*zero 2"),
    *refused(TITAN, LLAMA, "p2 d4 zero1 pipeline-inside", "pipeline outermost"),
    *refused(TITAN, replace(LLAMA, tied=True), "p2 d4 zero1", "a tied head in a pipeline"),
    *refused(TITAN, LLAMA, "p2 d4 zero3", "ZeRO 3 in a pipeline.*zero 1.*pipelining/stage.py"),
    *refused(TITAN, QWEN2, "d8 zero3", "qwen2 has biases: TorchTitan has llama3, qwen3"),
    *refused(TITAN, replace(LLAMA, traits=("GELU gates",)), "d8 zero3", "to megatron-bridge"),
    *refused(TITAN, GPT2, "d8", "gpt2 has learned positions: TorchTitan has"),
    *refused(TITAN, MIXTRAL, "d8 zero3", "mixtral has experts beside"),
    *refused(TITAN, QWEN2_MOE, "d8 zero3", "qwen2_moe has biases"),
    *refused(TITAN, replace(LLAMA, window=512), "d8 zero3", "a sliding window"),
    *refused(
        ("nemo", *OTHERS),
        KV2,
        "t4 d2 zero2",
        "tensor degree 4 with 2 key-value heads: .* equally many of its own",
    ),
    *refused(ACCELERATE, GPT2, "t2 d4 zero2", "tensor degree 2 of gpt2: .* plan of transformers"),
    *refused(
        CORE, replace(GPT2, parallel=True, positions=None), "d8", "attention and feed-forward of"
    ),
    *refused(MEGATRON, replace(LLAMA, rotary_base=1e4 / 3), "d8", "base of rotary.*integers"),
    *refused(TITAN, LLAMA, "p4 d2 zero1", "2 microbatches in a pipeline of 4", microbatches=2),
    *refused(TITAN, LLAMA, "d8 zero3", "v100 has no bf16", device="v100"),
    *refused(TITAN, QWEN3_MOE, "t2 d4 zero3 sp", "expert degree 1.*at least 2"),
    *refused(TITAN, QWEN3_MOE, "t2 d4 e4 sp", "ZeRO 0 with expert degree 4.*expert 2"),
    *refused(DEEPSPEED, LLAMA, "c2 d4", "context degree 2.*Ulysses"),
    *refused(DEEPSPEED, LLAMA, "d8 offload", "offloaded optimizer with ZeRO 0"),
    *refused(DEEPSPEED, QWEN2_MOE, "d8 e4 zero1", "expert degree 4 of 'qwen2_moe'.*mixtral"),
    *refused(DEEPSPEED, LLAMA, "d8", "2 . 4 . 12 bytes.*keeps 2 . 2 . 12"),
    *refused(ACCELERATE, MIXTRAL, "d8 e4 zero3", "expert degree 4.*expert 1"),
    *refused(ACCELERATE, LLAMA, "d8 zero3", "2 . 2 . 8 bytes", precision=NARROW),
    *refused(ACCELERATE, LLAMA, "t2 d4", "ZeRO 0 with tensor 2 and data 4"),
    *refused(ACCELERATE, LLAMA, "d8 zero1", "ZeRO 1.*zero 2 or 3"),
    *refused(
        OTHERS, LLAMA, "d8 zero3 mlp", "mlp: .* no such modules", memory=STACK_MEMORY["megatron"]
    ),
    *refused(CORE, replace(LLAMA, norm="layer-plain"), "d8", "norms without weights.*deepspeed"),
    *refused(
        (*MEGATRON, *TITAN),
        replace(LLAMA, traits=frozenset({"GELU gates"})),
        "d8",
        "has GELU gates",
    ),
    *refused(
        MEGATRON,
        replace(LLAMA, attention=replace(LLAMA.attention, sinks=True)),
        "d8",
        "has attention sinks: an export to Megatron-LM cannot say it; export to nemo or",
    ),
    *refused(MEGATRON, replace(LLAMA, block_norms=4), "d8", "4 norms in a block"),
    *refused(MEGATRON, replace(LLAMA, feed_forward=BIASED), "d8", "biases of only some"),
    *refused(MEGATRON, replace(MIXTRAL, feed_forward=UNGATED), "d8", "gated experts beside"),
    *refused(LAYOUT_FORMATS, replace(GPT2, positions=512), "d8", "512 learned positions, got 1024"),
    *refused(LAYOUT_FORMATS, LLAMA, "t3", "tensor degree 3 does not divide 16 heads"),
    *refused(
        ("megatron", "nemo", "torchtitan", "deepspeed"), LORA, "d8", "LoRA or frozen layers: .*none"
    ),
    *refused(CORE[1:2] + ACCELERATE, FROZEN, "d8", "frozen layers without LoRA"),
    *refused(ACCELERATE, LORA, "d8 zero3", "LoRA of linear_fc1, linear_qkv: Accelerate adapts"),
    *refused(CORE[1:2], MIXED, "d8", "LoRA of linear_qkv: Megatron-Bridge adapts down_proj"),
    *refused(HF, FURTHER, "d8", "multi-token prediction: .* set num"),
    *refused(
        (*CORE[:1], "deepspeed", *ACCELERATE), LATENTS, "d8", "patches of latents in place of"
    ),
    *refused(CORE, BEHIND, "d8", "an encoder and a decoder: exports to"),
    *refused(CORE[1:2], tuned_with(LORA, lora=8, frozen="blocks.0"), "d8", "frozen blocks beside"),
    *refused(("slurm",), LLAMA, "d8", "--to 'slurm' is not known; there are megatron, "),
]


@pytest.mark.parametrize(("to", "architecture", "words", "message", "others"), REFUSED)
def test_refused_by_name(to, architecture, words, message, others):
    with pytest.raises(InputError, match=message) as found:
        exported(architecture, words, to, **others)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("to", LAYOUT_FORMATS)
def test_every_rule_has_a_source_and_is_broken_above(to):
    framework, broken = LAYOUT_FORMATS[to], set()
    for _, architecture, words, _, others in (one for one in REFUSED if one[0] == to):
        layout = parse_layout(words)
        problem = make_problem(architecture, layout, **others)
        broken |= {rule.require for rule, _ in framework.broken(problem, layout)}
    for rule in framework.rules:
        assert re.match(r"\S+ (core )?\d+\.\d+.*, \S+", rule.source)
        assert rule.require in broken


@pytest.mark.parametrize("to", EVERY_FORMAT)
def test_what_the_model_breaks_is_said_without_a_layout(to):
    framework, layout = EVERY_FORMAT[to], parse_layout("d8")
    framework.require_problem(make_problem(LLAMA, layout))
    if to in PIPED:
        with pytest.raises(InputError, match=r"an encoder .bert."):
            framework.require_problem(make_problem(BERT, layout))


@pytest.mark.parametrize("to", PIPED)
@pytest.mark.parametrize("known", [True, False])
def test_rotary_base_and_epsilon_are_those_of_the_model(to, known):
    """Where they are not known, the framework's own are kept."""
    model = LLAMA if known else replace(LLAMA, rotary_base=None, norm_epsilon=None)
    found = said_of_model(to, exported(model, "p1 t1 d8 b1 zero2", to), model.layers)
    assert found == ({5e5}, {1e-5}) if known else ({None}, {None})


# ---------------------------------------------------------------- the real packages


def test_accelerate_itself():
    parallelism = pytest.importorskip("accelerate.parallelism_config")
    files = exported(LLAMA, "p1 t2 c2 d2 b1 zero3", "accelerate")
    space = {}
    with stand_ins():
        exec(files["stagewright_accelerate.py"], space)
        degrees = vars(space["build"]().parallelism_config)
    degrees.pop("positional")
    assert parallelism.ParallelismConfig(**degrees).total_size == 8


def test_deepspeed_itself():
    config = pytest.importorskip("deepspeed.runtime.config")
    files = exported(LLAMA, "d1 zero2", "deepspeed")  # a process alone
    found = config.DeepSpeedConfig(json.loads(files["ds_config.json"]))
    assert (found.train_batch_size, found.gradient_accumulation_steps) == (8, 8)
    assert (found.zero_config.stage, found.grad_accum_dtype) == (2, "fp32")
