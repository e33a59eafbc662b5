"""Thirty types of models, small and in full size: read, planned, exported and read back.

The fields of the full sizes are those of the largest or best known model of the type.
"""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from layout_problems import said
from layout_readers import READERS, architecture_from, run_megatron

from stagewright.executor.export.layouts import LAYOUT_FORMATS
from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.hf_config import architecture_of
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.models.stated import Stated
from stagewright.service.layouts.problems import training_problem
from stagewright.service.layouts.requests import LayoutRequest
from stagewright.service.layouts.searching import find_layouts
from stagewright.solvers.parallelism.space import Space

FULL = json.loads(Path(__file__).with_name("configurations.json").read_text())
SMALL = {
    "num_hidden_layers": 4, "n_layer": 4, "hidden_size": 256, "n_embd": 256, "vocab_size": 512,
    "num_attention_heads": 8, "n_head": 8, "num_key_value_heads": 4, "num_kv_heads": 4,
    "head_dim": 32, "intermediate_size": 512, "intermediate_size_mlp": 512, "ffn_dim": 512,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
    "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
SAME = ("ranks", "tensor", "pipeline", "data", "batch", "accumulation", "blocks", "recompute")
PLAIN = "p1 d64 b1 zero1"
OTHERS = ("d64 b1 zero3 full", "d64 b1 zero2", "d64 b1 zero1 full", "d64 b1")
SPACE = Space(
    pipeline=(4,), tensor=(1, 8), context=(1,), expert=(1, 8), microbatch=(1,), chunks=1,
    schedules=("1f1b",), recompute=("none",), partial=False, zero=(1,),
    placements=("data-inside",),
)  # fmt: skip
HAVE = {
    "megatron": "llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gpt_oss phi3 glm4_moe "
    "deepseek_v2 deepseek_v3 nemotron gpt2 starcoder2",
    "megatron-bridge": "llama mistral qwen2 qwen3 qwen3_moe gemma gemma2 gemma3_text gpt_oss "
    "glm4_moe deepseek_v2 deepseek_v3 kimi_k2 minimax_m2 olmoe nemotron gpt2",
    "nemo": "llama mistral mixtral qwen2 qwen3 qwen3_moe gemma gemma2 gemma3_text gpt_oss phi3 "
    "llama4_text deepseek_v2 deepseek_v3 nemotron gpt2 starcoder2",
    "torchtitan": "llama mistral qwen3 qwen3_moe gpt_oss phi3 deepseek_v2 deepseek_v3 kimi_k2",
}


def have(to):
    """The types that a framework has: all but encoders where it is not told above."""
    if to in HAVE:
        return HAVE[to].split()
    decoders = to in ("axolotl", "trl", "transformers")
    return [kind for kind in FULL if not (decoders and kind == "bert")]


def problem_of(kind, size, to=None):
    fields = FULL[kind] if size == "full" else {n: SMALL.get(n, v) for n, v in FULL[kind].items()}
    if kind == "llama4_text":
        fields["num_experts_per_tok"] = 1
    of = architecture_of({"model_type": kind, **fields})
    return training_problem(of, fabric_of_kind("h100", 64), sequence=512, batch=512, framework=to)


def without_defaults(of):
    """An architecture as arguments say it: without values that are defaults."""
    stated = of.stated
    routing, scaling = stated.routing, stated.rotary_scaling
    if routing is not None and routing.groups == 1:
        routing = replace(routing, groups=None, chosen_groups=None)
    part = None if stated.rotary_part == 1 else stated.rotary_part
    return replace(of, name="", left_out=None, stated=Stated(part, scaling, routing))


def taken(framework, problem, planned):
    """The planned layout, or a plain one, which a framework takes; None of a model it lacks."""
    for layout in (*planned, *map(parse_layout, OTHERS)):
        if not any(framework.broken(problem, layout)):
            return layout
    return None


@pytest.mark.parametrize("kind", FULL)
@pytest.mark.parametrize("size", ["small", "full"])
def test_every_configuration_is_planned_exported_and_read_back(kind, size):
    """The full size by a search, and for the frameworks that do not train any model.

    The full sizes are searched for every framework in the campaign.
    """
    problem = problem_of(kind, size)
    planned = searched(problem, SPACE) if size == "full" else [parse_layout(PLAIN)]
    assert planned or sum(problem.architecture.parameters().values()) > 2e11
    for to in LAYOUT_FORMATS.keys() - HAVE.keys() if size == "small" else HAVE:
        export_and_read_back(to, problem, planned, kind in have(to))


QUICK = {("megatron", "mistral"), ("torchtitan", "olmoe"), ("nemo", "opt"), ("trl", "gemma")}
PAIRS = [
    pytest.param(to, kind, marks=[] if (to, kind) in QUICK else pytest.mark.slow)
    for to, kind in product(LAYOUT_FORMATS, FULL)
]


@pytest.mark.parametrize(("to", "kind"), PAIRS)
def test_every_configuration_is_planned_for_its_framework(to, kind):
    """By the best layout that two seconds find, which tell more of the rules than of the search."""
    problem = problem_of(kind, "full", to)
    if kind in have(to):
        planned = searched(problem, Space(recompute=("none", "full")), to, time_limit=2.0)
        export_and_read_back(to, problem, planned, True)
    else:
        with pytest.raises(InputError, match=f"{to} can express no layout of it"):
            LayoutRequest.of(problem=problem, framework=to).require_problem()


def searched(problem, space, to=None, **limit):
    """The best layout that a search finds, if any."""
    request = LayoutRequest.of(
        problem=problem, space=space, by_stage=False, top=1, framework=to, **limit
    )
    answer = find_layouts(request)
    return [] if answer.plan is None else [answer.plan.layout]


def export_and_read_back(to, problem, planned, has_model):
    framework = LAYOUT_FORMATS[to]
    layout = taken(framework, problem, planned)
    assert (layout is not None) == has_model, to
    if layout is None:
        return
    files = framework.files(problem, layout) | {"mpirun.sh": "mpirun -np 64 "}
    if to == "megatron":
        args, _, _ = run_megatron(files["megatron.sh"])
        assert architecture_from(args) == without_defaults(problem.architecture)
    found = READERS[to](files, problem.architecture.layers)
    wanted = said(problem, layout)
    assert {name: found[name] for name in SAME} == {name: wanted[name] for name in SAME}
