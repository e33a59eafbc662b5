"""Layouts for Megatron-LM that few formats can say: hybrids, and state that replicas divide."""

import json
import re
from dataclasses import replace

import pytest
from configurations import SMALL
from exported_plans import gpt, make_plan
from layout_problems import make_problem
from layout_readers import run_megatron

from stagewright.executor.export import export
from stagewright.executor.export.layouts import export_layout
from stagewright.executor.export.runs.megatron import read_megatron
from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.hf_config import architecture_of
from stagewright.graphs.models.recurrences import Recurrence

NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
NEMOTRON = {  # nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16
    "model_type": "nemotron_h", "hidden_size": 2688, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1856, "vocab_size": 131072,
    "hybrid_override_pattern": NANO, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8,
    "ssm_state_size": 128, "n_routed_experts": 128, "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
MAMBA2 = {  # mistralai/Mamba-Codestral-7B-v0.1
    "model_type": "mamba2", "hidden_size": 4096, "num_heads": 128, "head_dim": 64, "n_groups": 8,
    "state_size": 128, "num_hidden_layers": 64, "vocab_size": 32768,
}  # fmt: skip
BAMBA = {  # ibm-ai-platform/Bamba-9B-v2
    "model_type": "bamba", "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "num_hidden_layers": 32,
    "vocab_size": 128256, "attn_layer_indices": [9, 18, 27], "mamba_n_heads": 128,
    "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128,
}  # fmt: skip
BAMBA_LAYERS = "M-" * 9 + "*-" + "M-" * 8 + "*-" + "M-" * 8 + "*-" + "M-" * 4
PUBLISHED = [
    (NEMOTRON, "p1 t1 d16 e8 b1 zero1", NANO, 31.6e9),
    (MAMBA2, "p1 t2 d8 b1 zero1 sp", "M" * 64, 7.3e9),
    (BAMBA, "p1 t1 d16 b1 zero1", BAMBA_LAYERS, 9.8e9),
]


def exported(fields, words):
    layout = parse_layout(words)
    problem = make_problem(architecture_of(fields), layout)
    return problem, layout, export_layout(problem, layout, "megatron")


def counted(args):
    """Parameters of Megatron-LM's modules by its arguments, from core/ssm/mamba_mixer.py (M),
    transformer/attention.py (*), mlp.py (-) and moe (E); each has a norm before.
    """
    hidden, wide = args.hidden_size, 2 if args.swiglu else 1
    heads = args.mamba_num_heads
    inner, keys = heads * args.mamba_head_dim, 2 * args.mamba_num_groups * args.mamba_state_dim
    found = {
        "M": hidden * (2 * inner + keys + heads) + (inner + keys) * (4 + 1) + 3 * heads
        + inner + inner * hidden,
        "*": 2 * hidden * args.kv_channels
        * (args.num_attention_heads + (args.num_query_groups or args.num_attention_heads)),
    }  # fmt: skip
    if args.ffn_hidden_size is not None:
        found["-"] = (1 + wide) * hidden * args.ffn_hidden_size
    if args.num_experts is not None:
        each = args.num_experts * args.moe_ffn_hidden_size
        shared = args.moe_shared_expert_intermediate_size
        found["E"] = hidden * (args.num_experts + (1 + wide) * (each + shared))
    layers = args.hybrid_layer_pattern.replace("|", "")
    tables = 1 + args.untie_embeddings_and_output_weights
    return hidden * (tables * args.vocab_size + 1) + sum(found[one] + hidden for one in layers)


@pytest.mark.parametrize(("fields", "words", "pattern", "published"), PUBLISHED)
def test_published_hybrids_are_those_of_megatron(fields, words, pattern, published):
    """Parameters are those of its modules, and as published."""
    problem, layout, files = exported(fields, words)
    text = files["megatron.sh"]
    args, _, _ = run_megatron(text)
    assert args.hybrid_layer_pattern == pattern
    assert args.position_embedding_type == ("rope" if fields is BAMBA else "none")
    assert "MEGATRON_SCRIPT=pretrain_hybrid.py" in text
    weights = sum(problem.architecture.parameters().values())
    assert counted(args) == weights == pytest.approx(published, rel=0.02)
    run = read_megatron(text, "megatron.sh")
    assert sum(run.architecture.parameters().values()) == weights
    assert str(run.layout) == str(layout)
    chunked = problem.architecture.attention if fields is MAMBA2 else None
    assert ("planned are 256" in text) == (fields is not NEMOTRON)
    if isinstance(chunked, Recurrence):
        assert run.architecture.attention == replace(chunked, chunk=128)


QWEN3_NEXT = {  # Qwen/Qwen3-Next-80B-A3B-Instruct
    "model_type": "qwen3_next", "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 2, "intermediate_size": 5120, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10,
    "num_hidden_layers": 48, "vocab_size": 151936, "rope_theta": 1e7, "norm_topk_prob": True,
}  # fmt: skip


def counted_delta(args):
    """Parameters of core/ssm/gated_delta_net and of gated attention, with experts behind."""
    hidden, heads, size = args.hidden_size, args.linear_num_value_heads, args.linear_value_head_dim
    keys, values = args.linear_num_key_heads * args.linear_key_head_dim, heads * size
    delta = hidden * (2 * keys + 2 * values + 2 * heads) + (2 * keys + values) * 4
    delta += 2 * heads + size + values * hidden
    inner = args.num_attention_heads * args.kv_channels
    attention = hidden * (3 * inner + 2 * args.num_query_groups * args.kv_channels)
    attention += 2 * args.kv_channels
    width = args.num_experts * args.moe_ffn_hidden_size + args.moe_shared_expert_intermediate_size
    fed = hidden * (args.num_experts + 3 * width + args.moe_shared_expert_gate)
    kinds = eval(args.linear_attention_freq)
    mixed = sum(delta if one else attention for one in kinds)
    return hidden * (2 * args.vocab_size + 1) + mixed + len(kinds) * (fed + 2 * hidden)


def test_the_gated_delta_rule_is_that_of_megatron():
    problem, layout, files = exported(QWEN3_NEXT, "p2 t2 d4 e8 b1 v2 zero1 sp")
    args, _, _ = run_megatron(files["megatron.sh"])
    assert (args.experimental_attention_variant, args.attention_output_gate) == ("gdn", True)
    weights = sum(problem.architecture.parameters().values())
    assert counted_delta(args) == weights == pytest.approx(79.7e9, rel=1e-3)
    run = read_megatron(files["megatron.sh"], "qwen3_next.sh")
    assert run.layout == layout
    assert run.architecture == replace(problem.architecture, name="qwen3_next")
    text = re.sub(r"--linear-attention-freq \S+", "--linear-attention-freq 4", files["megatron.sh"])
    assert read_megatron(text, "qwen3_next.sh") == run
    with pytest.raises(InputError, match="--linear-attention-freq is missing; write the blocks"):
        read_megatron(re.sub(r"--linear-attention-freq \S+", "", text), "run.sh")


def test_stages_are_said_by_the_pattern():
    _, layout, files = exported(NEMOTRON, "p2 t1 d8 e8 b1 v2 zero1 first12 last14")
    args, _, _ = run_megatron(files["megatron.sh"])
    parts = args.hybrid_layer_pattern.split("|")
    assert [*map(len, parts)] == [12, 13, 13, 14]
    assert "".join(parts) == NANO
    assert str(read_megatron(files["megatron.sh"], "run.sh").layout) == str(layout)


def test_two_layers_of_a_block_are_recomputed_together():
    """Megatron-LM keeps the input of every second layer; read back, they are a block again."""
    problem, layout, files = exported(BAMBA, "p1 t1 d16 b1 zero1 full")
    args, _, _ = run_megatron(files["megatron.sh"])
    assert (args.recompute_method, args.recompute_num_layers) == ("uniform", 2)
    run = read_megatron(files["megatron.sh"], "run.sh")
    assert run.layout == layout
    assert run.architecture.layers == problem.architecture.layers == 32


@pytest.mark.parametrize("kind", ["nemotron_h", "mamba2", "bamba"])
def test_small_hybrids_are_counted_as_by_megatron(kind):
    """Of all kinds of layers."""
    fields = SMALL[kind] | {"n_groups": 2}
    _, _, files = exported(fields, "p1 t1 d8 b1 zero1")
    assert ("--moe-router" in files["megatron.sh"]) == ("n_routed_experts" in fields)
    args, _, _ = run_megatron(files["megatron.sh"])
    assert counted(args) == sum(architecture_of(fields).parameters().values())


TRAIN = """
HYBRID_LAYER_PATTERN="M-M-M--M-*M-M-M-M--*M-M-M-M-*M--M-M-M-*M-M--M-M-"
options=" --tensor-model-parallel-size 1 --sequence-parallel --use-distributed-optimizer
  --untie-embeddings-and-output-weights --position-embedding-type none
  --hybrid-layer-pattern ${HYBRID_LAYER_PATTERN} --hidden-size 1024 --num-attention-heads 16
  --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096
  --vocab-size 256000 --micro-batch-size 4 --global-batch-size 32 --attention-dropout 0.0
  --hidden-dropout 0.0 --disable-bias-linear --normalization RMSNorm --bf16
  --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
torchrun --nproc_per_node 8 ../../pretrain_hybrid.py ${options}
"""


def test_a_script_of_megatron_is_read():
    """Its examples/mamba/train.sh of 800 million parameters: 1024 wide, mixers of 32 heads."""
    run = read_megatron(TRAIN, "train.sh")
    assert run.architecture.layers == 48
    mixer = run.architecture.attention
    (recurrence,) = {
        one for i in range(48) for one in run.architecture.parts(i).mixers if one != mixer
    }
    assert recurrence == Recurrence("ssd", 32, 64, 128, 8, 128, 4, convolution_bias=True)
    assert run.architecture.feed_forward.width == 4096
    fused = TRAIN.replace(
        "--bf16", "--bf16 --use-fused-weighted-squared-relu --moe-router-dtype fp32"
    )
    assert read_megatron(fused, "train.sh") == run
    old = TRAIN.replace("--hybrid-layer-pattern", "--is-hybrid-model --hybrid-override-pattern")
    assert read_megatron(old, "train.sh") == run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("M-M-M--M-*M:MGM-M--M-*M", "--hybrid-layer-pattern: 'G' is none of the layers M . . - E"),
        ("hybrid_stack_spec:gdp_stack_spec", "--spec gdp_stack_spec: read are hybrid_stack_spec"),
        ("M-M-M--M-*M:MEM-M--M-*M", "has experts (E); add --num-experts"),
        ("*M-M-M-M-*M:*M-M-M-M-/*M", "'/' is none of the layers"),
    ],
)
def test_hybrids_that_are_not_read_are_refused(change, message):
    before, _, after = change.partition(":")
    with pytest.raises(InputError, match=re.escape(message).replace(r"\.", ".")):
        read_megatron(TRAIN.replace(before, after, 1), "train.sh")


GPT_CUTS = [(0, 3), (3, 5), (5, 6), (6, 10)]  # E t t | t t | t | t t t L


def with_shards(*shards: str) -> PipelinePlan:
    plan = make_plan((0, 1, 2, 3), replicas=2, cuts=GPT_CUTS)
    stages = zip(plan.stages, shards * (4 // len(shards)), strict=True)
    return replace(plan, stages=tuple(replace(one, shards=kind) for one, kind in stages))


def test_deepspeed_and_megatron_divide_the_optimizer() -> None:
    plan = with_shards("optimizer")
    config = json.loads(export(plan, "deepspeed", gpt(8))["ds_config.json"])
    assert config["zero_optimization"] == {"stage": 1}
    lines = export(plan, "megatron", gpt(8))["megatron.sh"].splitlines()
    assert lines[-2:] == ["  --use-distributed-optimizer", ")"]
    whole = with_shards("none")
    assert "zero" not in export(whole, "deepspeed", gpt(8))["ds_config.json"]
    assert "distributed" not in export(whole, "megatron", gpt(8))["megatron.sh"]


def test_torchtitan_divides_the_weights() -> None:
    text = export(with_shards("weights"), "torchtitan", gpt(8))["stagewright_parallelism.py"]
    fields = dict(line.split(" = ") for line in text.splitlines() if ".parallelism" not in line
                  and line.startswith("    parallelism.") and line.count(" = ") == 1)  # fmt: skip
    assert fields["    parallelism.data_parallel_shard_degree"] == "2"
    assert fields["    parallelism.data_parallel_replicate_degree"] == "1"
    assert fields["    parallelism.fsdp_reshard_after_forward"] == "'always'"


@pytest.mark.parametrize(
    ("to", "shards", "message"),
    [
        ("torch-csv", ("optimizer",), "stage 0 shards its optimizer state: the files for torch do"),
        ("nemo", ("weights",), "stage 0 shards its weights: the files for NeMo AutoModel do not"),
        ("deepspeed", ("weights",),
         "stage 0 shards its weights: the files for DeepSpeed divide nothing, or optimizer in all"),
        ("megatron", ("none", "optimizer"), "stage 1 shards its optimizer state: the files for M"),
        ("torchtitan", ("optimizer", "weights"), "plan shards 'none' or 'weights' for all stages"),
    ],
)  # fmt: skip
def test_others_are_refused(to: str, shards: tuple[str, ...], message: str) -> None:
    options = None if to == "torch-csv" else gpt(8)
    with pytest.raises(InputError, match=message):
        export(with_shards(*shards), to, options)
