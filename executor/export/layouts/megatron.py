"""Arguments of Megatron-LM (core 0.20, megatron/training/arguments.py) for a layout.

Core 0.16 has all of them but ``--moe-shared-expert-gate`` and those of YaRN.
"""

import shlex
from collections.abc import Iterable, Sequence
from itertools import groupby

from stagewright.executor.export.layouts import hybrid
from stagewright.executor.export.layouts.common import Fields, comment, launch, left_out
from stagewright.executor.export.layouts.core import (
    FSDP_FORMAT,
    RULES,
    Core,
    attention_of,
    core_of,
    router_fields,
)
from stagewright.executor.export.layouts.rules import (
    FrameworkRule,
    framework,
)
from stagewright.executor.export.layouts.scaling import (
    require_arguments,
    require_scaling,
    scaling_arguments,
)
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import (
    Architecture,
    GroupedAttention,
    LatentAttention,
)
from stagewright.graphs.models.traits import (
    ADDED_ONE,
    ADJACENT,
    CLAMPED,
    SINKS,
    SQUARED_RELU,
    every_trait,
)

Argument = tuple[str, ...]
"""A name and its values; none for a flag."""

NORMS = {"layer": "LayerNorm", "rms": "RMSNorm"}


def model_arguments(
    architecture: Architecture, sequence: int, stages: Sequence[int] | None = None
) -> list[Argument]:
    """Megatron-LM's arguments of a model; fields unknown to :class:`Architecture` keep defaults.

    ``stages`` are the blocks of each, which the pattern of a hybrid says.
    """
    longest = sequence if architecture.longest is None else architecture.longest
    found: list[Argument] = [
        *_blocks(architecture, stages),
        ("--hidden-size", str(architecture.hidden)),
        *_heads(architecture),
        ("--seq-length", str(sequence)),
        ("--max-position-embeddings", str(longest)),
        ("--vocab-size", str(architecture.vocabulary)),
        ("--normalization", NORMS[architecture.norm]),
        *_fields({name: value for name, value in _stated(architecture).items() if value}),
        *_biases(architecture),
    ]
    if _is_gated(architecture) and CLAMPED not in architecture.traits:
        found.append(("--swiglu",))
    if not architecture.tied:
        found.append(("--untie-embeddings-and-output-weights",))
    if not architecture.dropout:
        found += [("--hidden-dropout", "0.0"), ("--attention-dropout", "0.0")]
    if architecture.next_tokens is not None:
        found.append(("--mtp-num-layers", str(architecture.next_tokens)))
    return [*found, *_window(architecture), *_experts(architecture)]


def _blocks(of: Architecture, stages: Sequence[int] | None) -> Iterable[Argument]:
    """How many blocks there are, or the layers of a hybrid; the width of its feed-forward."""
    if not hybrid.is_hybrid(of):
        yield ("--num-layers", str(of.layers))
        if fields := hybrid.delta_fields(of):
            limited = [of.parts(index).attention is None for index in range(of.layers)]
            yield from _fields({**fields, "linear_attention_freq": _pattern(limited)})
    else:
        yield ("--hybrid-layer-pattern", hybrid.pattern(of, stages))
        yield ("--spec", *hybrid.SPEC)
        yield from _fields(hybrid.mamba_fields(of))
    if not hybrid.is_hybrid(of) or hybrid.FED in hybrid.pattern(of):
        yield ("--ffn-hidden-size", str(of.feed_forward.width))


def _is_gated(of: Architecture) -> bool:
    """Whether feed-forwards have gates; those of experts, where no block has another."""
    blocks = [of.parts(index) for index in range(of.layers)]
    if any(one.feed_forward for one in blocks):
        return of.feed_forward.gated
    return of.experts is not None and of.experts.gated


def _heads(of: Architecture) -> Iterable[Argument]:
    """Those of the attention; where there is none, those of mixers, as they must be told."""
    attention, mixer = attention_of(of), hybrid.recurrence_of(of)
    if attention is not None:
        return [("--num-attention-heads", str(attention.heads)), *_attention(attention)]
    assert mixer is not None
    return _fields({"num_attention_heads": mixer.heads, "kv_channels": mixer.head_size})


_OF_TRAITS: dict[str, Fields] = {
    SQUARED_RELU: {"squared_relu": True},
    ADJACENT: {"rotary_interleaved": True},
    ADDED_ONE: {"apply_layernorm_1p": True},
    CLAMPED: {
        "quick_geglu": True, "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0,
    },
    SINKS: {"softmax_type": "learnable"},
}  # fmt: skip
"""Arguments of traits that others do not say."""


def _stated(of: Architecture) -> Fields:
    """Fields of what changes no cost; those that are None, False or 0 keep their defaults."""
    base, part = of.rotary_base, of.stated.rotary_part
    found: Fields = {
        "position_embedding_type": _positions(of),
        "rotary_base": None if base is None else int(base),
        "norm_epsilon": of.norm_epsilon,
        "rotary_percent": None if part == 1 else part,
        **scaling_arguments(of),
        **router_fields(of),
    }
    for trait in every_trait(of):
        found |= _OF_TRAITS.get(trait, {})
    return found


def _positions(of: Architecture) -> str:
    if of.positions is not None:
        return "learned_absolute"
    return "rope" if of.rotary and attention_of(of) is not None else "none"


def _attention(attention: GroupedAttention | LatentAttention) -> Iterable[Argument]:
    if isinstance(attention, LatentAttention):
        return _latent(attention)
    found: list[Argument] = [("--kv-channels", str(attention.head_size))]
    if attention.key_value_heads < attention.heads:
        groups = ("--num-query-groups", str(attention.key_value_heads))
        found += [("--group-query-attention",), groups]
    if attention.head_norms:
        found.append(("--qk-layernorm",))
    if attention.gate:
        found.append(("--attention-output-gate",))
    return found


def _latent(attention: LatentAttention) -> Iterable[Argument]:
    yield ("--multi-latent-attention",)
    if attention.query_rank is not None:
        yield ("--q-lora-rank", str(attention.query_rank))
    yield ("--kv-lora-rank", str(attention.key_value_rank))
    yield ("--qk-head-dim", str(attention.plain_size))
    yield ("--qk-pos-emb-head-dim", str(attention.rotary_size))
    yield ("--v-head-dim", str(attention.value_size))
    yield ("--kv-channels", str(attention.value_size))
    yield ("--qk-layernorm",)  # the norms of the latent vectors


def _biases(architecture: Architecture) -> list[Argument]:
    """Biases everywhere, nowhere, or of queries, keys and values alone."""
    attention = attention_of(architecture)
    if _is_biased(architecture):
        return []
    return [
        ("--disable-bias-linear",),
        *([("--add-qkv-bias",)] if attention is not None and attention.bias else []),
    ]


def _window(architecture: Architecture) -> Iterable[Argument]:
    if architecture.window is None:
        return
    # A token attends to itself and the tokens left of it.
    yield ("--window-size", f"{architecture.window - 1},0")
    if architecture.full_layers:
        limited = [index not in architecture.full_layers for index in range(architecture.layers)]
        yield ("--window-attn-skip-freq", _pattern(limited))


def _experts(architecture: Architecture) -> Iterable[Argument]:
    experts = architecture.experts
    if experts is None:
        return
    yield ("--num-experts", str(experts.number))
    yield ("--moe-router-topk", str(experts.per_token))
    yield ("--moe-ffn-hidden-size", str(experts.width))
    if experts.shared_width is not None:
        yield ("--moe-shared-expert-intermediate-size", str(experts.shared_width))
        if experts.shared_gate:
            yield ("--moe-shared-expert-gate",)
    sparse = [architecture.is_sparse(index) for index in range(architecture.layers)]
    if not all(sparse) and not hybrid.is_hybrid(architecture):
        yield ("--moe-layer-freq", _pattern(sparse))
    yield ("--moe-token-dispatcher-type", "alltoall")
    yield ("--moe-grouped-gemm",)


def _pattern(flags: list[bool]) -> str:
    """A list of 0 and 1 as an expression: ``[0]*3+[1]*58``."""
    runs = [(int(flag), len(list(run))) for flag, run in groupby(flags)]
    return "+".join(f"[{flag}]*{count}" for flag, count in runs)


def _require_gates(problem: TrainingProblem, _: Layout, framework: str) -> None:
    of = problem.architecture
    has_dense = any(of.parts(index).feed_forward for index in range(of.layers))
    if of.experts is not None and has_dense and of.experts.gated != of.feed_forward.gated:
        raise InputError(
            f"experts with gates and a feed-forward without, or the other way: {framework} has one "
            "activation for both; set gated alike"
        )


def _require_biases(problem: TrainingProblem, _: Layout, framework: str) -> None:
    of, attention = problem.architecture, attention_of(problem.architecture)
    outputs = (
        attention.output_bias
        if isinstance(attention, GroupedAttention)
        else attention is not None and attention.bias
    )
    of_experts = of.experts is not None and (of.experts.bias or of.experts.router_bias)
    if (outputs or of.feed_forward.bias or of_experts) and not _is_biased(of):
        raise InputError(
            f"biases of only some projections: {framework} has them in all of a model with "
            "plain attention, in queries, keys and values alone, or nowhere"
        )


def _is_biased(of: Architecture) -> bool:
    """Whether all projections have biases, those of experts and the router too."""
    attention, experts = attention_of(of), of.experts
    if not isinstance(attention, GroupedAttention):
        return False
    if not (attention.bias and attention.output_bias):
        return False
    if experts is None:
        return of.feed_forward.bias
    dense = of.feed_forward.bias or not experts.dense_layers
    return dense and experts.bias and experts.router_bias and experts.shared_width is None


def _require_whole_base(problem: TrainingProblem, _: Layout, framework: str) -> None:
    base = problem.architecture.rotary_base
    if base is not None and not base.is_integer():
        raise InputError(f"a base of rotary positions of {base}: {framework} takes integers")


FILE = "megatron.sh"

_NO_ARGUMENT = (
    "virtual_pipeline_model_parallel_size", "grad_reduce_in_fp32", "cpu_offloading",
)  # fmt: skip
"""Fields that Megatron-LM computes from other arguments."""


def arguments(problem: TrainingProblem, layout: Layout) -> dict[str, str]:
    """A file for bash that sets the array ``MEGATRON_ARGUMENTS``."""
    core = core_of(problem, layout)
    words = [
        *model_arguments(
            problem.architecture,
            problem.sequence,
            layout.blocks_of_stages(problem.architecture.layers),
        ),
        ("--micro-batch-size", str(layout.microbatch)),
        ("--global-batch-size", str(problem.batch)),
        *_fields(_used(problem, core)),
        *_virtual_stages(problem, layout, core),
        *_precision(problem, core),
    ]
    if core.pipeline_inside:
        words.append(("--use-tp-pp-dp-mapping",))
    if core.fsdp:
        words.append(("--ckpt-format", FSDP_FORMAT))
    if problem.attention == "materialized":
        words.append(("--attention-backend", "unfused"))
    lines = "".join(f"  {shlex.join(one)}\n" for one in words)
    text = (
        _head(problem, layout)
        + _connections(layout, core)
        + f"MEGATRON_RANKS={layout.ranks}\nMEGATRON_SCRIPT={_script(problem)}\n"
        + f"MEGATRON_ARGUMENTS=(\n{lines})\n"
    )
    return {FILE: text}


def _script(problem: TrainingProblem) -> str:
    """What trains: of hybrids another script, before core 0.17 pretrain_mamba.py."""
    return f"pretrain_{'hybrid' if hybrid.is_hybrid(problem.architecture) else 'gpt'}.py"


def _head(problem: TrainingProblem, layout: Layout) -> str:
    return comment(
        f"The layout {str(layout)!r} that Stagewright chose, for Megatron-LM (core 0.20):",
        "source this file on every node, then",
        f'  {launch(problem)} ... {_script(problem)} "${{MEGATRON_ARGUMENTS[@]}}" ...',
        "with the data, the tokenizer, the learning rate and the number of iterations.",
        "Not in the plan, and so Megatron-LM's defaults: dropout's rates, padding of the",
        "vocabulary, recipe of fp8.",
        *hybrid.remarks(problem.architecture),
        *left_out(problem),
    )


def _connections(layout: Layout, core: Core) -> str:
    """Kernels and communication must start in order, but for Megatron-FSDP."""
    if core.fsdp:
        return "unset CUDA_DEVICE_MAX_CONNECTIONS\n"
    if layout.tensor > 1 or layout.context > 1:
        return "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    return ""


def _used(problem: TrainingProblem, core: Core) -> Fields:
    """The fields that differ from Megatron-LM's defaults, and the degrees."""
    fields = {**core.model, **core.ddp, **core.optimizer}
    if hybrid.is_hybrid(problem.architecture):  # whose pattern says the stages
        del fields["pipeline_model_parallel_layout"]
        if hybrid.layers_in_block(problem.architecture) == {2} and fields["recompute_num_layers"]:
            fields["recompute_num_layers"] = 2
    if fields["expert_tensor_parallel_size"] is None:
        del fields["expert_model_parallel_size"]
    if not core.fsdp:
        del fields["data_parallel_sharding_strategy"]
    if fields["exp_avg_dtype"] == "fp32":
        del fields["exp_avg_dtype"], fields["exp_avg_sq_dtype"]
    return {name: value for name, value in fields.items() if name not in _NO_ARGUMENT and value}


def _fields(fields: Fields) -> list[Argument]:
    found: list[Argument] = []
    for name, value in fields.items():
        values = value if isinstance(value, list) else [] if value is True else [str(value)]
        found.append((f"--{name.replace('_', '-')}", *values))
    return found


def _virtual_stages(problem: TrainingProblem, layout: Layout, core: Core) -> list[Argument]:
    """An uneven division's text says the number of chunks too."""
    told = core.model["pipeline_model_parallel_layout"] is not None
    if layout.chunks == 1 or told or hybrid.is_hybrid(problem.architecture):
        return []
    each = problem.architecture.layers // layout.stages
    return [("--num-layers-per-virtual-pipeline-stage", str(each))]


def _precision(problem: TrainingProblem, core: Core) -> list[Argument]:
    found: list[Argument] = [] if core.numbers == "fp32" else [(f"--{core.numbers}",)]
    wide = problem.precision.gradient_bytes == 4
    if core.numbers == "bf16" and not wide:
        found.append(("--grad-reduce-in-bf16",))
    if core.numbers == "fp16" and wide:
        found.append(("--accumulate-allreduce-grads-in-fp32",))
    if core.fp8:
        found.append(("--fp8-format", "hybrid"))
    if core.fp8_recipe:
        found.append(("--fp8-recipe", core.fp8_recipe))
    if core.fp8_weights:
        found.append(("--fp8-param-gather",))
    return found


FRAMEWORK = framework(
    "megatron",
    arguments,
    [
        *RULES,
        FrameworkRule(
            "megatron/core/models/hybrid/hybrid_layer_specs.py", hybrid.require_blocks, True
        ),
        FrameworkRule("megatron/core/transformer/transformer_block.py", hybrid.require_layers),
        *(
            FrameworkRule("megatron/training/arguments.py", require, of_problem=True)
            for require in (
                _require_gates,
                _require_biases,
                _require_whole_base,
                require_scaling,
                require_arguments,
            )
        ),
    ],
)
