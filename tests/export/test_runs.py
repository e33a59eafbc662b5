"""Runs that people have: scripts of Megatron-LM, TOML files of torchtitan, Meta's params.json."""

import json
from pathlib import Path

import pytest

from stagewright.executor.export.runs import read_run
from stagewright.executor.export.runs.arguments import read_script
from stagewright.executor.export.runs.megatron import read_megatron
from stagewright.executor.export.runs.torchtitan import read_torchtitan
from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.hf_config import parse_hf_config, read_hf_config

SCRIPT = """\
#!/bin/bash
# it's a run of a small Llama
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8; NNODES=${SLURM_NNODES:-4}
SEQ=4096
TP=${TP:-$((2 * 2))}
export PP=2 CP=1
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE   # of a node
    --nnodes=$NNODES
)
MODEL_ARGS="
    --num-layers 8 --hidden-size 1024 \\
    --num-attention-heads 16 --group-query-attention --num-query-groups 4
    --seq-length $SEQ --max-position-embeddings $SEQ --position-embedding-type rope
    --normalization RMSNorm --swiglu --ffn-hidden-size 2816 --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0
    --attention-dropout 0 --vocab-size 32000
"
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size 64 --bf16 --lr 3e-4 --train-iters 100)
TRAINING_ARGS+=(
    --use-distributed-optimizer --overlap-grad-reduce --recompute-activations
)
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \\
    $MODEL_ARGS ${TRAINING_ARGS[@]} --tensor-model-parallel-size $TP \\
    --pipeline-model-parallel-size ${PP} --context-parallel-size=$CP --sequence-parallel \\
    --data-path "$DATA" 2>&1 | tee run.log
"""
MOE = """\
--num-layers 4 --hidden-size 256 --num-attention-heads 4 --vocab-size 1000
--position-embedding-type rope --disable-bias-linear --normalization RMSNorm --swiglu
--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-layer-freq ([0]*1+[1]*3)
--expert-model-parallel-size 4 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1
"""
TOML = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 4
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""
PARAMS = {
    "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256,
    "multiple_of": 1024, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 5e5,
}  # fmt: skip


def test_a_launch_script_of_megatron() -> None:
    run = read_megatron(SCRIPT, "run.sh")
    assert str(run.layout) == "p2 t4 d4 b1 zero1 sp"
    assert run.notes == ("run.sh: selective recomputation of a fused attention is priced as none",)
    assert (run.batch, run.sequence, run.precision, run.overlap) == (64, 4096, "bf16", True)
    assert run.architecture is not None
    assert run.architecture.attention.heads == 16
    assert run.architecture.feed_forward.width == 2816
    assert not run.architecture.dropout
    assert str(read_megatron(SCRIPT, "run.sh", 64).layout) == "p2 t4 d8 b1 zero1 sp"
    eight = SCRIPT.replace("--vocab-size 32000", "--tokenizer-type GPT2BPETokenizer").replace(
        "--bf16", "--bf16 --fp8-format hybrid --fp8-param-gather"
    )
    run = read_megatron(eight, "run.sh")
    assert (run.precision, run.architecture.vocabulary) == ("fp8", 50257)  # type: ignore[union-attr]
    assert "weights in fp8 (--fp8-param-gather) are priced in two bytes" in run.notes[0]
    more = SCRIPT.replace("--bf16", "--attention-backend unfused --num-layers-per-virtual-pipeline-"
                          "stage 2 --decoder-first-pipeline-num-layers 3")  # fmt: skip
    assert "v2 zero1 first3 selective" in str(read_megatron(more, "run.sh").layout)


def test_arguments_without_a_script() -> None:
    run = read_megatron(MOE, "args.txt", 8)
    assert str(run.layout) == "p1 t2 d4 e4 b1"
    assert run.architecture is not None
    assert run.architecture.experts is not None
    assert run.architecture.experts.dense_layers == {0}
    assert (run.batch, run.sequence, run.precision) == (None, None, "fp32")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("SEQ=4096", "", "--max-position-embeddings has '.SEQ'; it must be one value, whose v"),
        ("--bf16", "--bf16 --multi-head-thing", "--multi-head-thing is not understood; if it"),
        ("--bf16", "--optimizer sgd", "--optimizer sgd: read are adam"),
        ("--vocab-size 32000", "", "the size of the vocabulary is not said; add --vocab-size"),
        ("--num-layers 8", "", "--num-layers is missing; it must be a whole number"),
        ("--num-layers 8", "--num-layers x", "--num-layers must be a whole number, got 'x'"),
        ("GPUS_PER_NODE=8", "GPUS_PER_NODE=3", "12 GPUs are no multiple of tensor 4 x pipeline 2"),
        ("type rope", "type relative", "-type relative: read are learned_absolute, rope, yarn"),
        ("--bf16", "--num-experts 8", "experts divided over tensor ranks: layouts keep experts"),
        ("--bf16", "--pipeline-model-parallel-layout Ex|L", "'Ex' is not of E, t and L"),
        ("--recompute-activations", "--recompute-granularity full --recompute-num-layers 2",
         "the method uniform: layouts keep the input"),
        ("--bf16", "--glu-linear-offset 1", "--glu-linear-offset 1 is not understood here"),
        ("--bf16", "--window-size 4,4", "write the tokens to the left and 0: 4095,0"),
        ("-path \"$DATA\"", "-path \"$DATA", "a quote or parenthesis is not closed"),
    ],
)  # fmt: skip
def test_what_a_script_does_not_say_gets_one_line(old: str, new: str, message: str) -> None:
    assert old in SCRIPT
    with pytest.raises(InputError, match=message) as caught:
        read_megatron(SCRIPT.replace(old, new), "run.sh")
    assert str(caught.value).startswith("run.sh: ")
    assert "\n" not in str(caught.value)


def test_the_words_of_a_script() -> None:
    text = 'A=2\nB="$A x"\nC=(one $B)\nC+=("two")\nX=$((A * (3 + 1)))\n'
    text += "python run.py --c ${C[@]} --x $X"
    script = read_script(text, "s", "NONE")
    assert script.arguments == ("--c", "one", "2", "x", "two", "--x", "8")
    assert script.launcher == ("python",)
    assert read_script("ALL=(--a 1)", "s", "ALL").arguments == ("--a", "1")
    unknown = read_script("python run.py --x $(nproc) --y $((Z + 1))", "s", "NONE")
    assert unknown.arguments[:2] == ("--x", "$(nproc)")


def test_a_toml_file_of_torchtitan(tmp_path: Path) -> None:
    run = read_torchtitan(TOML, "llama.toml", 32)
    assert str(run.layout) == "p1 t4 d8 b2 zero3 selective sp"
    assert (run.batch, run.sequence, run.precision) == (16, 8192, "bf16")
    assert run.architecture is not None
    assert sum(run.architecture.parameters().values()) == 8_030_261_248
    piped = TOML.replace(
        "shard_degree = -1",
        "shard_degree = 1\npipeline_parallel_degree = 2\ndata_parallel_replicate_degree = 4",
    )
    assert str(read_torchtitan(piped, "a.toml").layout) == "p2 t4 d4 b1 selective sp"
    parts = [["layers.0", "layers.1"], ["layers.2"], ["layers.3"], ["layers.4"]]
    in_v = f'pipeline_parallel_schedule = "ZBVZeroBubble"\nmodule_fqns_per_model_part = {parts}'
    in_v = piped.replace("pipeline_parallel_degree = 2", f"pipeline_parallel_degree = 2\n{in_v}")
    words = "p2 t4 d4 b1 v2 first2 selective sp zbv"
    assert read_torchtitan(in_v, "a.toml").layout == parse_layout(words)
    (tmp_path / "params.json").write_text(json.dumps(PARAMS))
    assert read_hf_config(tmp_path) == run.architecture
    (tmp_path / "run.toml").write_text(TOML.replace('"8B"', '"9B"'))
    assert read_run(tmp_path / "run.toml", 8).architecture is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[model]", "[model", "no TOML: "),
        ("local_batch_size = 2", "", "local_batch_size is missing; it must be a positive integer"),
        ('selective_ac_option = "op"', "", "selective_ac_option '2': selective is by operator"),
        ('"selective"', '"some"', "activation_checkpoint.mode 'some' is none of none, selective"),
        ("shard_degree = -1", "shard_degree = 2\ndata_parallel_replicate_degree = 2",
         "2 replicas of 2 shards: layouts have replicas or shards"),
        ("shard_degree = -1", "replicate_degree = 5", "32 GPUs are no multiple of replicas 5 x"),
        ("shard_degree = -1", "shard_degree = 1\npipeline_parallel_degree = 2\n"
         "pipeline_parallel_schedule = 'GPipe'",
         "pipeline_parallel_schedule 'GPipe' is none of 1F1B"),
        ("seq_len = 8192", "dtype = 'bfloat16'", "training.dtype: the prices are of weights in"),
    ],
)  # fmt: skip
def test_what_a_toml_file_does_not_say_gets_one_line(old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_torchtitan(TOML.replace(old, new), "run.toml", 32)
    assert str(caught.value).startswith("run.toml: ")


def test_a_file_of_python_is_an_export() -> None:
    with pytest.raises(InputError, match=r"x\.py: sets no config"):
        read_torchtitan("RANKS = 8", "x.py")
    with pytest.raises(InputError, match=r"x\.py: no Python"):
        read_torchtitan("def", "x.py")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"vocab_size": -1}, "vocab_size is not said .-1: the tokenizer's."),
        ({"dim": "wide"}, "dim must be a positive integer, got 'wide'"),
        ({"moe": {}}, "moe and sliding_window are not read; give the model's config.json"),
    ],
)
def test_bad_params_get_one_line(changed: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=f"params.json: {message}"):
        parse_hf_config(json.dumps(PARAMS | changed), "params.json")
    mistral = PARAMS | {"hidden_dim": 14336}
    assert parse_hf_config(json.dumps(mistral), "p.json") == parse_hf_config(
        json.dumps(PARAMS), "p.json"
    )
