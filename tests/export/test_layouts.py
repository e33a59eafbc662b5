"""Exported layouts: every file says what the layout says, or its features are refused by name."""

import json
import re
import subprocess
from dataclasses import replace

import pytest
import yaml
from framework_names import run_module, stand_ins
from hypothesis import given
from hypothesis import strategies as st
from layout_problems import (
    ARCHITECTURES,
    DEEPSEEK,
    GPT2,
    HYBRID,
    LLAMA,
    MAMBA,
    MIXTRAL,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    make_problem,
    random_problem,
    said,
)
from layout_readers import (
    CONFIGS,
    READERS,
    architecture_from,
    run_megatron,
    said_of_model,
    words_in_bash,
    words_of,
)
from profiles import examples

from stagewright.executor.export.layouts import (
    EVERY_FORMAT,
    LAYOUT_FORMATS,
    export_layout,
    require_framework,
)
from stagewright.executor.export.layouts.megatron import model_arguments
from stagewright.executor.export.options import FormatOptions
from stagewright.executor.export.runs.megatron import read_megatron
from stagewright.executor.export.runs.torchtitan import read_torchtitan
from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.formulations.prices.computing import Precision, precision_named
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.stack_memory import STACK_MEMORY
from stagewright.graphs.models.architecture import (
    Architecture,
    Block,
    Experts,
    FeedForward,
    GroupedAttention,
    fields_of,
)
from stagewright.graphs.models.diffusion import Diffusion
from stagewright.graphs.models.stated import RotaryScaling, Routing, Stated
from stagewright.graphs.models.towers import Tower
from stagewright.graphs.models.traits import (
    ADDED_ONE,
    ADJACENT,
    CLAMPED,
    PARTLY_ROTATED,
    SQUARED_RELU,
)
from stagewright.graphs.models.tuning import tuned_with

RUNS = {"megatron": read_megatron, "torchtitan": read_torchtitan}
PIPED = ("megatron", "megatron-bridge", "nemo", "torchtitan")
CORE = PIPED[:3]
FSDP2 = ("accelerate", "axolotl", "trl")
SHARDING = (
    "torchtitan",
    *FSDP2,
    "transformers",
)  # say nothing of ZeRO where there is nothing to divide
FULL_FP32 = Precision(4, 4, 4, 8)
KV2 = replace(LLAMA, attention=GroupedAttention(16, 2, 64))


def exported(architecture, words, to, **others):
    """The files for a framework, without those that launch it."""
    layout = parse_layout(words)
    files = export_layout(make_problem(architecture, layout, **others), layout, to)
    launched = ("train.sh", "run.sh", "job.sbatch", "jobset.yaml", "mpirun.sh")
    assert to == "plan" or set(launched) < set(files)
    return {name: text for name, text in files.items() if name not in launched}


def expected(to, problem, layout):
    found = said(problem, layout)
    if to in SHARDING and layout.data * layout.context == 1:
        found["zero"] = 0
    if to == "nnscaler" and layout.data * layout.context == 1:
        found["zero"] = min(1, layout.zero)
    if to not in CORE and layout.recompute_blocks is not None:
        assert layout.recompute_blocks >= max(found["blocks"])
        found["recompute_blocks"] = None
    return found


def require_read_back(to, files, problem, found):
    """What train-plan --from reads of an export is what was exported."""
    name, text = next(iter(files.items()))
    bytes_of = problem.precision
    if bytes_of.activation_bytes == 2 and bytes_of.optimizer_bytes < 12:
        with pytest.raises(InputError, match=r"exp-avg-dtype|training\.dtype"):
            RUNS[to](text, name)
        return
    run = RUNS[to](text, name)
    assert said(problem, run.layout) == found
    assert (run.batch, run.sequence) == (problem.batch, problem.sequence)
    numbers = precision_named(run.precision)
    assert numbers.activation_bytes == bytes_of.activation_bytes
    assert numbers.fp8_products == bytes_of.fp8_products
    if to == "megatron":
        own = replace(problem.architecture, left_out=None)
        said_again = model_arguments(run.architecture, run.sequence)
        assert said_again == model_arguments(own, problem.sequence)
        alike = replace(run.architecture, name=own.name, stated=own.stated, traits=own.traits)
        assert alike == own
        assert {"bf16": 2, "fp32": 4}[run.gradients] == bytes_of.gradient_bytes
        assert run.attention == problem.attention
        assert run.overlap == (problem.overlap or found["data"] * found["context"] == 1)


@examples(300)
@given(seed=st.integers(0, 2**32))
def test_files_say_what_the_layout_says(seed):
    problem, layout = random_problem(seed)
    for to, framework in LAYOUT_FORMATS.items():
        if any(framework.broken(problem, layout)):
            continue
        files = export_layout(problem, layout, to)
        found = READERS[to](files, problem.architecture.layers)
        assert found == expected(to, problem, layout)
        if to in RUNS:
            require_read_back(to, files, problem, found)
        inner = found["pipeline"] * found["tensor"] * found["context"]
        assert found["ranks"] == inner * found["data"] == problem.fabric.devices
        assert found["batch"] == found["microbatch"] * found["data"] * found["accumulation"]


TAKEN = [
    *((to, LLAMA, "p4 t2 d2 b1 v2 zero1 full sp") for to in PIPED),
    *((to, LLAMA, "p4 t2 c2 d2 b2 v2 zero1 sp first1 last3") for to in PIPED),
    *((to, LLAMA, "p2 t1 d2 b1 zero0 first16 last0") for to in PIPED),
    *((to, LLAMA, "p4 t2 d4 b1 zero1 pipeline-inside offload") for to in CORE),
    *((to, MIXTRAL, "p2 t2 c2 d2 e4 b1 zero1 pipeline-inside sp") for to in ("megatron", "nemo")),
    *((to, DEEPSEEK, "p2 t2 d4 e8 b1 zero1 full sp") for to in PIPED),
    ("megatron", QWEN2_MOE, "p1 t2 d4 e4 b1 zero2 sp"),
    *((to, QWEN2, "p1 t4 d4 b1 zero2") for to in (*CORE, "deepspeed", *FSDP2)),
    *((to, KV2, "p1 t4 d2 b1 zero2") for to in CORE[:2]),
    ("torchtitan", QWEN3_MOE, "p1 t2 d4 e4 b1 zero2 sp"),
    ("torchtitan", QWEN3, "p1 t4 d4 b1 zero2"),
    *((to, LLAMA, "p1 t1 d8 b2 zero3 full") for to in LAYOUT_FORMATS if to != "nnscaler"),
    *((to, GPT2, "p1 t1 d8 b1 zero0") for to in (*CORE, *FSDP2, "transformers", "nnscaler")),
    ("nnscaler", LLAMA, "p2 t2 d2 b1 zero1 full"),
    ("transformers", MIXTRAL, "p1 t1 d8 e4 b1 zero3"),
    *((to, LLAMA, "p1 t2 d4 b1 zero3") for to in (*FSDP2, "transformers")),
    ("torchtitan", replace(LLAMA, tied=True), "p1 t1 d8 b1 zero0"),
    *((to, LLAMA, "p4 t1 d2 b1 v2 zero1 full blocks1") for to in CORE),
    *((to, LLAMA, "p1 t1 d8 b1 zero3 full blocks16") for to in LAYOUT_FORMATS if to != "nnscaler"),
    *((to, LLAMA, "p4 t2 d1 b1 zero1 stages3-4-5-4 full") for to in PIPED),
    *((to, LLAMA, "p4 t2 d1 b1 zero1 stages3-4-5-4 full blocks2") for to in CORE),
    *((to, LLAMA, "p4 t2 d1 b1 zero1 stages4x4") for to in PIPED),
    ("torchtitan", LLAMA, "p4 t1 d2 b1 v2 zero1 zero-bubble"),
    ("torchtitan", LLAMA, "p4 t1 d2 b1 zero0 zero-bubble first1"),
    ("torchtitan", LLAMA, "p4 t1 d2 b1 v2 zero1 zbv"),
    ("torchtitan", LLAMA, "p2 t1 d4 b1 v2 zero1 dualpipev"),
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
    text = export_layout(problem, layout, "megatron")["megatron.sh"]
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
    words = "p1 t1 d8 b1 zero1" if to == "nnscaler" else "p1 t1 d8 b1 zero3"
    text = next(text for name, text in exported(LLAMA, words, to).items() if ".json" not in name)
    assert "The layout" in text
    assert words in text
    assert "torchrun --nnodes=1 --nproc-per-node=8 ..." in text


@pytest.mark.parametrize("to", [*PIPED[1:], "deepspeed", "accelerate"])
def test_another_number_of_layers_is_refused(to):
    files = exported(LLAMA, "p1 t1 d8 b1 zero3", to)
    with pytest.raises(ValueError, match=r"the plan is for .*16.*, the model has 15"):
        READERS[to](files, 15)


def test_other_sizes_of_a_recipe_are_refused():
    for to in CORE[1:]:
        (text,) = exported(LLAMA, "p1 t1 d8 b1 zero3", to).values()
        config = CONFIGS[to](16, hidden_size=1000)
        with pytest.raises(ValueError, match="is for hidden_size 1024, the model has 1000"):
            run_module(text)["configure"](config)


@pytest.mark.parametrize("to", PIPED)
def test_what_the_plan_has_not_counted_is_said(to):
    (text,) = exported(DEEPSEEK, "p2 t1 d4 e4 b1 zero1", to).values()
    assert "The plan has not counted: 'the layers of multi-token prediction'." in text


# ---------------------------------------------------------------- Megatron-LM's model and numbers


def parsed(architecture, words="p1 t1 d8 b1", **others):
    return run_megatron(exported(architecture, words, "megatron", **others)["megatron.sh"])[0]


YARN = RotaryScaling("yarn", 32, 4096, beta_fast=32, beta_slow=1, truncate=False)
GPT_OSS = Architecture(
    "gpt_oss", 4, 64, 96,
    GroupedAttention(4, 2, 16, bias=True, output_bias=True, sinks=True), FeedForward(32),
    Experts(8, 2, 32, bias=True, router_bias=True), window=512, full_layers=frozenset({1, 3}),
    rotary_base=150_000.0, norm_epsilon=1e-5, traits=(CLAMPED,),
    stated=Stated(rotary_scaling=YARN, routing=Routing(loss=0.001)),
)  # fmt: skip
STATED = (
    GPT_OSS,
    replace(LLAMA, stated=Stated(rotary_scaling=RotaryScaling("llama3", 32, 8192, 1, 4))),
    replace(
        LLAMA, traits=(PARTLY_ROTATED,),
        stated=Stated(rotary_part=0.5, rotary_scaling=RotaryScaling("linear", 4)),
    ),
    replace(
        DEEPSEEK,
        stated=Stated(
            rotary_scaling=RotaryScaling("yarn", 40, 4096, None, None, 32, 1, 1.0, 1.0),
            routing=Routing("sigmoid", True, 8, 4, 2.5, choice_bias=True),
        ),
    ),
    replace(QWEN3_MOE, stated=Stated(routing=Routing(normalized=False, loss=0.01))),
    replace(
        GPT2, positions=None, feed_forward=replace(GPT2.feed_forward, gated=False),
        traits=tuple(sorted((SQUARED_RELU, ADDED_ONE, ADJACENT))),
    ),
)  # fmt: skip


@pytest.mark.parametrize("architecture", [*ARCHITECTURES[:-1], *STATED], ids=lambda one: one.name)
def test_megatron_arguments_describe_the_model(architecture):
    found = architecture_from(parsed(architecture))
    assert found == replace(architecture, name="", left_out=None)


@pytest.mark.parametrize("words", ["p1 t1 d8 b1 zero3", "p4 t2 d2 b1 zero1 sp first3 last5"])
def test_bash_reads_what_is_written(words):
    text = exported(LLAMA, words, "megatron")["megatron.sh"]
    assert words_in_bash(text) == words_of(text)


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


# ---------------------------------------------------------------- scripts that launch


@pytest.mark.parametrize("to", LAYOUT_FORMATS)
def test_every_export_is_launched_by_four_scripts(to):
    layout = parse_layout("d16 b1 zero1" if to == "nnscaler" else "d16 b1 zero3")
    problem = make_problem(LLAMA, layout)
    files = export_layout(problem, layout, to, options=FormatOptions(image="image:1", time="1:00"))
    head, _, body = files["train.sh"].partition("set -euo pipefail\n")
    added = re.findall(r': "\$\{(\w+):\?[^"]+\}"', head)
    used = set(re.findall(r"\$\{?([A-Z]+)\b", body)) | {"BASE", "RECIPE", "CHECKPOINTS"}
    assert added
    assert set(added) <= used
    for name in re.findall(r"\b[\w.]+\.(?:sh|yaml|env)\b", body):
        assert name in files
    node = "--nnodes=2 --nproc-per-node=8 "
    assert node in files["run.sh"]
    assert node in files["job.sbatch"]
    assert "#SBATCH --time=1:00\n" in files["job.sbatch"]
    assert "mpirun -np 16 " in files["mpirun.sh"]
    assert all(f" -x {name} " in files["mpirun.sh"] for name in added)
    job = yaml.safe_load(files["jobset.yaml"])
    (one,) = job["spec"]["replicatedJobs"]
    assert one["template"]["spec"]["completions"] == 2
    (container,) = one["template"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "image:1"
    first = f"{job['metadata']['name']}-{one['name']}-0-0.{job['metadata']['name']}"
    assert container["env"] == [{"name": "MASTER_ADDR", "value": first}]


def test_a_rank_says_what_is_to_be_added(tmp_path):
    """Without what the user adds, the first name that lacks is said."""
    layout = parse_layout("d16 b1 zero1")
    files = export_layout(make_problem(LLAMA, layout), layout, "megatron")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "torchrun").write_text(
        '#!/bin/sh\nwhile [ "$1" != --no-python ]; do shift; done\nshift; exec "$@"\n'
    )
    (tmp_path / "torchrun").chmod(0o755)
    given = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NODE_RANK": "1", "MASTER_ADDR": "node0"}
    done = subprocess.run(
        ["bash", "run.sh"], cwd=tmp_path, env=given, capture_output=True, text=True
    )
    assert "MEGATRON: the folder of Megatron-LM" in done.stderr


# ---------------------------------------------------------------- refusals

BERT = replace(GPT2, name="bert", encoder=True, segments=2)
HF = ("deepspeed", *FSDP2, "transformers")
OTHERS = ("torchtitan", *HF)
TITAN, DEEPSPEED, ACCELERATE, MEGATRON = ("torchtitan",), HF[:1], FSDP2, CORE[:1]
DISTRIBUTED, NNSCALER = ("transformers",), ("nnscaler",)
NARROW, FP8 = Precision(2, 2, 2, 8), Precision(fp8_products=True)
FP8_FULL = Precision(4, 4, 4, 8, fp8_products=True)
ONE_BYTE = Precision(activation_bytes=1)
BIASED = FeedForward(2816, bias=True)
UNGATED = FeedForward(2048, gated=False)
LORA, FROZEN = tuned_with(LLAMA, lora=8), tuned_with(LLAMA, frozen="embedding")
HALF_TUNED = tuned_with(LLAMA, lora=8, targets="q_proj", frozen="blocks.0")
MIXED = tuned_with(LLAMA, lora=8, targets="linear_qkv,q_proj")


STATED_YARN = replace(LLAMA, stated=Stated(rotary_scaling=RotaryScaling("yarn", 4)))


def stated(**values):
    return replace(DEEPSEEK, stated=Stated(**values))


def scaled(*values):
    return replace(LLAMA, stated=Stated(rotary_scaling=RotaryScaling(*values)))


def refused(formats, architecture, words, message, **others):
    return [(to, architecture, words, message, others) for to in formats]


def hybrid_of(mixers, fed=LLAMA.feed_forward):
    """A model whose blocks have these mixers and a feed-forward."""
    blocks = [Block(tuple(mixers), fed, None)] * 16
    return replace(LLAMA, **fields_of(blocks, fed))


PAIRED = hybrid_of((MAMBA,))
MEGATRON_MEMORY = STACK_MEMORY["megatron"]
FURTHER = replace(LLAMA, next_tokens=1)
LATENTS = replace(LLAMA, diffusion=Diffusion(patch=16, classes=10))
PICTURED = replace(
    LLAMA, tower=Tower(2, 64, LLAMA.attention, LLAMA.feed_forward, tokens=8, outputs=8)
)
BEHIND = replace(LLAMA, tower=Tower(2, 64, LLAMA.attention, LLAMA.feed_forward))
REFUSED = [
    *refused(DISTRIBUTED, LLAMA, "c2 d4 zero3", "context degree 2: transformers"),
    *refused(DISTRIBUTED, LLAMA, "d8 zero1", "ZeRO 1: transformers divides the weights too"),
    *refused(DISTRIBUTED, LLAMA, "d8 zero2", "ZeRO 2: .*; megatron or .* can"),
    *refused(DISTRIBUTED, LLAMA, "d8 zero3", "2 . 2 . 8 bytes", precision=NARROW),
    *refused(DISTRIBUTED, MIXTRAL, "t4 d4 e2 zero3 sp", "sequence parallelism"),
    *refused(DISTRIBUTED, GPT2, "t2 d4 zero3", "tensor degree 2 of gpt2"),
    *refused(DISTRIBUTED, LLAMA, "d8 zero3", "v100 has no bf16", device="v100"),
    *refused(DISTRIBUTED, KV2, "t4 d2 zero3", "tensor degree 4 with 2 key-value heads"),
    *refused(DISTRIBUTED, LLAMA, "p2 d4", "a pipeline of 2: .*no schedule.*; megatron or"),
    *refused(FSDP2[1:], LLAMA, "t4", "tensor 4 without ZeRO: .* choose zero 2 or 3 and data"),
    *refused(FSDP2[1:], HALF_TUNED, "d8 zero3", "frozen blocks beside LoRA"),
    *refused(NNSCALER, LLAMA, "d8 zero3", "ZeRO 3: nnScaler divides the optimizer's states alone"),
    *refused(NNSCALER, LLAMA, "d8 zero2", "ZeRO 2"),
    *refused(NNSCALER, LLAMA, "p2 d4 v2 zero1", "2 chunks: nnScaler"),
    *refused(NNSCALER, LLAMA, "p2 d4 zero1 zero-bubble", "zero-bubble: .*choose 1f1b"),
    *refused(NNSCALER, LLAMA, "p2 d4 zero1 first7 last9", "stages of unequal numbers of blocks"),
    *refused(NNSCALER, LLAMA, "p2 d4 zero1 pipeline-inside", "pipeline-inside"),
    *refused(NNSCALER, LLAMA, "t2 d4 sp", "sequence parallelism"),
    *refused(NNSCALER, LLAMA, "c2 d4", "context degree 2"),
    *refused(NNSCALER, MIXTRAL, "d8 e4", "expert degree 4"),
    *refused(NNSCALER, LLAMA, "d8 offload", "an offloaded optimizer"),
    *refused(NNSCALER, LLAMA, "d8 selective", "selective", attention="materialized"),
    *refused(NNSCALER, LLAMA, "d8 full blocks3", "3 recomputed blocks of 16"),
    *refused(NNSCALER, LLAMA, "d8", "2 . 2 . 8 bytes", precision=NARROW),
    *refused(NNSCALER, LLAMA, "d8", "products in fp8", precision=FP8),
    *refused(NNSCALER, LORA, "d8", "LoRA or frozen layers"),
    *refused(NNSCALER, LLAMA, "d8 mlp", "mlp: ", memory=STACK_MEMORY["megatron"]),
    *refused(NNSCALER, LLAMA, "d8 offload7", "of 7 blocks in", memory=STACK_MEMORY["megatron"]),
    *refused(
        LAYOUT_FORMATS,
        LLAMA,
        "p2 d4 zero1 stages7-9 again3-1 full",
        "recomputed blocks by stage: .* has one recomputation|a pipeline of 2|stages of unequal",
    ),
    *refused(
        (*CORE, "torchtitan", *FSDP2),
        LLAMA,
        "c2 d4 zero3",
        "1022 tokens: .* needs a multiple",
        sequence=1022,
    ),
    *refused((*PIPED, *FSDP2[1:], "transformers"), BERT, "t1 d8", "an encoder .bert.: .* decoders"),
    *refused(LAYOUT_FORMATS, LLAMA, "t1 d8 zero3", "activations of 1 byte", precision=ONE_BYTE),
    *refused(CORE, LLAMA, "d8 offload", "offloaded optimizer with ZeRO 0.*zero 1"),
    *refused(CORE, LLAMA, "d8 zero3 offload", "offloaded optimizer with ZeRO 3.*zero 1"),
    *refused(CORE, LLAMA, "p2 d4 v2 zero2", "2 chunks with ZeRO 2.*chunks 1"),
    *refused(CORE, LLAMA, "p2 d4 zero3 pipeline-inside", "pipeline-inside with ZeRO 3.*zero 1"),
    *refused(CORE, LLAMA, "p2 c2 d2 pipeline-inside", "pipeline-inside.*only with context 1"),
    *refused(CORE, DEEPSEEK, "p2 t2 d2 sp pipeline-inside", "expert degree of tensor x context"),
    *refused(CORE[1:], QWEN2_MOE, "d8", "qwen2_moe: .* has no recipe of that model.*; megatron"),
    *refused(CORE, stated(routing=Routing("sigmoid", normalized=False)), "d8", "has scores by sig"),
    *refused(CORE, stated(routing=Routing(choice_bias=True)), "d8", "has a bias of the choice"),
    *refused(CORE[:2], scaled("dynamic", 2), "d8", "scaled by dynamic: .* linear, llama3 or yarn"),
    *refused(CORE[:2], scaled("llama3", 8, 4096), "d8", "embeddings 4096: .* has 8192, and no"),
    *refused(CORE[2:], scaled("yarn", 8), "d8", "scaled by yarn: NeMo scales these by linear or"),
    *refused(
        MEGATRON,
        stated(rotary_scaling=RotaryScaling("yarn", 32, beta_fast=1)),
        "d8",
        "with beta_fast 1: Megatron-LM has 32, and no argument",
    ),
    *refused(
        MEGATRON,
        replace(LLAMA, stated=Stated(rotary_scaling=RotaryScaling("linear", 2.5))),
        "d8",
        "scaled by 2.5: .* takes integers",
    ),
    *refused(CORE, QWEN2, "c2 d4", "context degree 2 with a sliding window.*context 1"),
    *refused(CORE, LLAMA, "d8", "2 . 2 . 8 bytes.*keeps 2 . 4 . 12", precision=NARROW),
    *refused(CORE, LLAMA, "d8", "fp8 with activations of 4 bytes", precision=FP8_FULL),
    *refused(CORE, LLAMA, "p2 d4 zero1 zero-bubble", "zero-bubble.*choose 1f1b"),
    *refused(
        OTHERS, LLAMA, "d8 zero3 full blocks3", "3 recomputed blocks of 16.*; megatron or .* can"
    ),
    *refused(
        OTHERS,
        LLAMA,
        "d8 zero3 offload7",
        "activations of 7 blocks in host.*; megatron or megatron-bridge or nemo can",
        memory=STACK_MEMORY["megatron"],
    ),
    *refused(TITAN, LLAMA, "p2 d4 zero1 zero-bubble full", "full recomputation with zero bubbles"),
    *refused(
        TITAN, LLAMA, "p4 d2 zero1 zero-bubble", "9 microbatches.*a multiple of 4", microbatches=9
    ),
    *refused(CORE, LLAMA, "p2 d4 v2 zero1 zbv", "the schedule zbv.*choose 1f1b"),
    *refused(TITAN, LLAMA, "p4 d2 zero1 dualpipe", "the schedule dualpipe: .*dualpipev"),
    *refused(TITAN, LLAMA, "p2 d4 zero1 zb-h2", "the schedule zb-h2: .*choose zero-bubble"),
    *refused(
        TITAN, DEEPSEEK, "p2 d4 e2 v2 zero1 dualpipev", "expert degree 2: .*one after the other"
    ),
    *refused(HF[:-1], LLAMA, "p2 d4", "a pipeline of 2: .*no pipeline.*pipeline 1.*; megatron or"),
    *refused(HF, LLAMA, "t2 d4 zero2 sp", "sequence parallelism over the tensor ranks"),
    *refused(
        OTHERS, LLAMA, "d8 zero3 selective", "selective.*none or full", attention="materialized"
    ),
    *refused(OTHERS, LLAMA, "d8 zero3", "products in fp8", precision=FP8),
    *refused(SHARDING, LLAMA, "d8 zero3 offload", "offloads parameters and gradients"),
    *refused(SHARDING[:-1], LLAMA, "c2 d4", "ZeRO 0 with context degree 2.*zero 2 or 3"),
    *refused(TITAN, LLAMA, "p2 d4 zero2", "ZeRO 2 in a pipeline.*zero 1"),
    *refused(TITAN, LLAMA, "d8 zero1", "ZeRO 1 without a pipeline.*zero 2"),
    *refused(TITAN, LLAMA, "p2 d4 zero1 pipeline-inside", "pipeline outermost"),
    *refused(TITAN, replace(LLAMA, tied=True), "p2 d4 zero1", "a tied head in a pipeline"),
    *refused(TITAN, LLAMA, "p2 d4 zero3", "ZeRO 3 in a pipeline.*zero 1.*pipelining/stage.py"),
    *refused(
        TITAN, QWEN2, "d8 zero3", "qwen2 has biases of attention: TorchTitan .* llama3, qwen3"
    ),
    *refused(
        TITAN, replace(LLAMA, traits=("GELU gates",)), "d8 zero3", "; megatron-bridge or nemo"
    ),
    *refused(TITAN, GPT2, "d8", "gpt2 has biases of attention: TorchTitan has"),
    *refused(TITAN, STATED_YARN, "d8 zero3", "scaled by yarn: TorchTitan scales by llama3 in such"),
    *refused(TITAN, MIXTRAL, "d8 zero3", "mixtral has experts: TorchTitan"),
    *refused(TITAN, QWEN2_MOE, "d8 zero3", "qwen2_moe has .*: TorchTitan"),
    *refused(TITAN, replace(LLAMA, window=512), "d8 zero3", "llama has windows"),
    *refused(
        ("nemo", *OTHERS[:-1]),
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
    *refused(ACCELERATE, LLAMA, "d8 zero1", "ZeRO 1: .* divides the gradients too; choose another"),
    *refused(
        OTHERS,
        LLAMA,
        "d8 zero3 mlp",
        "mlp: .* no such modules.*; megatron or",
        memory=STACK_MEMORY["megatron"],
    ),
    *refused(
        CORE,
        replace(LLAMA, norm="layer-plain"),
        "d8",
        "norms without weights.*; accelerate or axolotl or trl can",
    ),
    *refused(
        (*MEGATRON, *TITAN),
        replace(LLAMA, traits=frozenset({"GELU gates"})),
        "d8",
        "has GELU gates",
    ),
    *refused(
        MEGATRON,
        replace(LLAMA, attention=replace(LLAMA.attention, whole_norms=True)),
        "d8",
        "has norms of heads with weights for each: Megatron-LM .*; megatron-bridge or nemo",
    ),
    *refused(CORE, HYBRID, "t8 d2 sp", "tensor degree 8 with 4 groups of a mixer's heads"),
    *refused(CORE[1:], HYBRID, "p2 d4 v2", "4 stages of a hybrid on 2 ranks: .* choose chunks 1"),
    *refused(MEGATRON, hybrid_of((MAMBA, HYBRID.attention)), "d8", "two mixers in a block"),
    *refused(MEGATRON, PAIRED, "d8 full blocks2", "2 recomputed blocks with a mixer and a feed"),
    *refused(MEGATRON, PAIRED, "d8 offload2", "activations of 2 blocks", memory=MEGATRON_MEMORY),
    *(
        one
        for change, message in (
            ({"bias": True}, "biases of mixers' projections"),
            ({"kernel_size": 3}, "convolutions of other than 4 tokens"),
            ({"norm": False}, "mixers without norms"),
            ({"convolution_bias": False}, "convolutions without biases"),
        )
        for one in refused(MEGATRON, hybrid_of((replace(MAMBA, **change),)), "d8", message)
    ),
    *refused(
        MEGATRON,
        hybrid_of((replace(MAMBA, rule="delta"),)),
        "d8",
        "has convolutions with biases: Megatron-LM has no such hybrid",
    ),
    *refused(
        MEGATRON,
        replace(HYBRID, stated=Stated(rotary_scaling=RotaryScaling("linear", 2))),
        "d8",
        "rotary positions scaled by other than yarn",
    ),
    *refused(MEGATRON, replace(LLAMA, block_norms=4), "d8", "4 norms in a block"),
    *refused(MEGATRON, replace(LLAMA, feed_forward=BIASED), "d8", "biases of only some"),
    *refused(MEGATRON, replace(DEEPSEEK, feed_forward=UNGATED), "d8", "experts with gates and"),
    *refused(LAYOUT_FORMATS, replace(GPT2, positions=512), "d8", "512 learned positions, got 1024"),
    *refused(LAYOUT_FORMATS, LLAMA, "t3", "tensor degree 3 does not divide 16 heads"),
    *refused(
        ("megatron", "nemo", "torchtitan", "deepspeed", "transformers"),
        LORA,
        "d8",
        "LoRA or frozen layers: .*no",
    ),
    *refused(CORE[1:2] + ACCELERATE, FROZEN, "d8", "frozen layers without LoRA"),
    *refused(ACCELERATE, LORA, "d8 zero3", "LoRA of linear_fc1, linear_qkv: .* adapts"),
    *refused(CORE[1:2], MIXED, "d8", "LoRA of linear_qkv: Megatron-Bridge adapts down_proj"),
    *refused(HF, FURTHER, "d8", "multi-token prediction: .*; set num"),
    *refused(
        (*CORE[:1], "deepspeed", "transformers", *ACCELERATE),
        LATENTS,
        "d8",
        "patches of latents in place of",
    ),
    *refused(("transformers",), PICTURED, "d8", "a tower for images: transformers has no"),
    *refused(CORE, BEHIND, "d8", r"an encoder \(llama\)"),
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
    layout = parse_layout("d8")
    require_framework(to, make_problem(LLAMA, layout))
    if to in PIPED:
        with pytest.raises(InputError, match=r"an encoder .bert.*; deepspeed or accelerate"):
            require_framework(to, make_problem(BERT, layout))


def model_of(to, architecture):
    """The fields of a recipe's model, where they are set."""
    (text,) = exported(architecture, "p1 t1 d8 b1 zero2", to).values()
    config = run_module(text)["configure"](CONFIGS[to](architecture.layers))
    return config.model if to == "megatron-bridge" else config.model.config


GEMMA2 = replace(LLAMA, name="gemma2", stated=Stated(score_cap=50.0, logit_cap=30.0))
LLAMA31 = scaled("llama3", 8.0, 8192, 1.0, 4.0)
FIELDS = [
    ("megatron-bridge", STATED[3], "moe_router_topk_scaling_factor mscale_all_dim beta_fast",
     (2.5, 1.0, 32)),
    ("nemo", STATED[3], "moe_router_group_topk rotary_scaling_factor moe_router_enable_expert_bias",
     (4, 40, True)),
    *((to, GEMMA2, "attn_logit_softcapping final_logit_softcapping", (50.0, 30.0))
      for to in CORE[1:]),
    *((to, FURTHER, "mtp_num_layers", (1,)) for to in CORE[1:]),
    *((to, LLAMA, "mtp_num_layers", (None,)) for to in CORE[1:]),
    *((to, scaled("linear", 2.5), "seq_len_interpolation_factor", (2.5,)) for to in CORE[1:]),
    ("megatron-bridge", LLAMA31, "rope_scaling rope_scaling_factor", (True, 8.0)),
    ("nemo", LLAMA31, "scale_factor low_freq_factor high_freq_factor old_context_len",
     (8.0, 1.0, 4.0, 8192)),
    ("megatron-bridge", GPT_OSS, "position_embedding_type yarn_rotary_scaling_factor "
     "yarn_original_max_position_embeddings yarn_mscale yarn_correction_range_round_to_int",
     ("yarn", 32, 4096, None, False)),
]  # fmt: skip


@pytest.mark.parametrize(("to", "architecture", "names", "values"), FIELDS)
def test_fields_of_recipes_are_those_of_the_model(to, architecture, names, values):
    """Routers, scaled rotary positions and capped scores."""
    model = model_of(to, architecture)
    assert tuple(getattr(model, name) for name in names.split()) == values


def test_yarn_of_a_recipe_is_its_own():
    assert not hasattr(model_of("nemo", GPT_OSS), "rotary_scaling_factor")


def test_routers_and_scaling_of_torchtitan():
    (text,) = exported(STATED[3], "p1 t1 d8 b1 zero2", "torchtitan").values()
    assert "rope.rope_factor = 40\n" in text
    assert "router.score_func = 'sigmoid'\n" in text
    (text,) = exported(GPT_OSS, "p1 t1 d8 b1 zero2", "torchtitan").values()
    assert "rope.truncate = False\n" in text
    assert "not by the loss with factor 0.001" in text


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
