"""Arguments of Megatron-LM (core 0.20, megatron/training/arguments.py) for a layout.

Core 0.16 has all of them but ``--moe-shared-expert-gate`` and those of YaRN.
"""

import shlex
from collections.abc import Iterable
from itertools import groupby

from stagewright.executor.export.layouts.common import Fields, comment, launch, left_out
from stagewright.executor.export.layouts.core import (
    FSDP_FORMAT,
    RULES,
    Core,
    core_of,
    latent_scaling,
    require_numbers,
    require_scaling,
    router_fields,
)
from stagewright.executor.export.layouts.rules import (
    FrameworkRule,
    framework,
)
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import (
    Architecture,
    Experts,
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


def model_arguments(architecture: Architecture, sequence: int) -> list[Argument]:
    """Megatron-LM's arguments of a model; fields unknown to :class:`Architecture` keep defaults."""
    attention = architecture.first_attention
    longest = sequence if architecture.positions is None else architecture.positions
    found: list[Argument] = [
        ("--num-layers", str(architecture.layers)),
        ("--hidden-size", str(architecture.hidden)),
        ("--ffn-hidden-size", str(architecture.feed_forward.width)),
        ("--num-attention-heads", str(attention.heads)),
        *_attention(attention),
        ("--seq-length", str(sequence)),
        ("--max-position-embeddings", str(longest)),
        ("--vocab-size", str(architecture.vocabulary)),
        ("--normalization", NORMS[architecture.norm]),
        *_fields({name: value for name, value in _stated(architecture).items() if value}),
        *_biases(architecture),
    ]
    if architecture.feed_forward.gated and CLAMPED not in architecture.traits:
        found.append(("--swiglu",))
    if not architecture.tied:
        found.append(("--untie-embeddings-and-output-weights",))
    if not architecture.dropout:
        found += [("--hidden-dropout", "0.0"), ("--attention-dropout", "0.0")]
    return [*found, *_window(architecture), *_experts(architecture), *_further(architecture)]


def _further(architecture: Architecture) -> Iterable[Argument]:
    if architecture.next_tokens is not None:
        yield ("--mtp-num-layers", str(architecture.next_tokens))


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
        "position_embedding_type": "rope" if of.positions is None else "learned_absolute",
        "rotary_base": None if base is None else int(base),
        "norm_epsilon": of.norm_epsilon,
        "rotary_percent": None if part == 1 else part,
        **_scaling(of),
        **router_fields(of),
    }
    for trait in every_trait(of):
        found |= _OF_TRAITS.get(trait, {})
    return found


_SCALED_LATENT = (
    ("beta_fast", 32.0), ("beta_slow", 1.0), ("original_max_position_embeddings", 4096),
)  # fmt: skip
"""Numbers of a scaling for which there is no argument."""


def _scaling(of: Architecture) -> Fields:
    """How rotary positions are scaled; latent attention takes YaRN where it is not told."""
    scaling = of.stated.rotary_scaling
    if isinstance(of.attention, LatentAttention):
        if scaling is None:
            return {"rope_type": "rope"}
        fixed = [name for name, _ in _SCALED_LATENT]
        return {k: value for k, value in latent_scaling(scaling).items() if k not in fixed}
    if scaling is None:
        return {}
    if scaling.kind == "linear":
        return {"rotary_seq_len_interpolation_factor": int(scaling.factor)}
    if scaling.kind == "llama3":
        return {"use_rope_scaling": True, "rope_scaling_factor": scaling.factor}
    return {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": scaling.factor,
        "yarn_original_max_position_embeddings": scaling.original_max_position_embeddings,
        "yarn_beta_fast": scaling.beta_fast,
        "yarn_beta_slow": scaling.beta_slow,
        "mscale": scaling.mscale,
        "mscale_all_dim": scaling.mscale_all_dim,
        "no_yarn_correction_range_round_to_int": not scaling.truncate,
    }


def _require_scaling_arguments(problem: TrainingProblem, _: Layout, framework: str) -> None:
    of = problem.architecture
    scaling = of.stated.rotary_scaling
    if scaling is None:
        return
    if isinstance(of.attention, LatentAttention):
        require_numbers(scaling, _SCALED_LATENT, framework)
    if scaling.kind == "linear" and scaling.factor % 1:
        raise InputError(
            f"rotary positions scaled by {scaling.factor:g}: {framework} takes integers"
        )


def _attention(attention: GroupedAttention | LatentAttention) -> Iterable[Argument]:
    if isinstance(attention, LatentAttention):
        return _latent(attention)
    found: list[Argument] = [("--kv-channels", str(attention.head_size))]
    if attention.key_value_heads < attention.heads:
        groups = ("--num-query-groups", str(attention.key_value_heads))
        found += [("--group-query-attention",), groups]
    if attention.head_norms:
        found.append(("--qk-layernorm",))
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
    if _is_biased(architecture):
        return []
    return [
        ("--disable-bias-linear",),
        *([("--add-qkv-bias",)] if architecture.attention.bias else []),
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
    yield from _shared_experts(experts)
    sparse = [architecture.is_sparse(index) for index in range(architecture.layers)]
    if not all(sparse):
        yield ("--moe-layer-freq", _pattern(sparse))
    yield ("--moe-token-dispatcher-type", "alltoall")
    yield ("--moe-grouped-gemm",)


def _shared_experts(experts: Experts) -> Iterable[Argument]:
    if experts.shared_width is not None:
        yield ("--moe-shared-expert-intermediate-size", str(experts.shared_width))
        if experts.shared_gate:
            yield ("--moe-shared-expert-gate",)


def _pattern(flags: list[bool]) -> str:
    """A list of 0 and 1 as an expression: ``[0]*3+[1]*58``."""
    runs = [(int(flag), len(list(run))) for flag, run in groupby(flags)]
    return "+".join(f"[{flag}]*{count}" for flag, count in runs)


def _require_gates(problem: TrainingProblem, _: Layout, framework: str) -> None:
    if problem.architecture.experts is not None and not problem.architecture.feed_forward.gated:
        raise InputError(
            f"gated experts beside a feed-forward that is not: {framework} has one activation for "
            "both; set gated alike"
        )


def _require_biases(problem: TrainingProblem, _: Layout, framework: str) -> None:
    of, attention = problem.architecture, problem.architecture.first_attention
    outputs = attention.bias if isinstance(attention, LatentAttention) else attention.output_bias
    of_experts = of.experts is not None and (of.experts.bias or of.experts.router_bias)
    if (outputs or of.feed_forward.bias or of_experts) and not _is_biased(of):
        raise InputError(
            f"biases of only some projections: {framework} has them in all of a model with "
            "plain attention, in queries, keys and values alone, or nowhere"
        )


def _is_biased(of: Architecture) -> bool:
    """Whether all projections have biases, those of experts and the router too."""
    attention, experts = of.first_attention, of.experts
    if isinstance(attention, LatentAttention) or not (attention.bias and attention.output_bias):
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
        *model_arguments(problem.architecture, problem.sequence),
        ("--micro-batch-size", str(layout.microbatch)),
        ("--global-batch-size", str(problem.batch)),
        *_fields(_used(core)),
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
        + f"MEGATRON_RANKS={layout.ranks}\n"
        + f"MEGATRON_ARGUMENTS=(\n{lines})\n"
    )
    return {FILE: text}


def _head(problem: TrainingProblem, layout: Layout) -> str:
    return comment(
        f"The layout {str(layout)!r} that Stagewright chose, for Megatron-LM (core 0.20):",
        "source this file on every node, then",
        f'  {launch(problem)} ... pretrain_gpt.py "${{MEGATRON_ARGUMENTS[@]}}" ...',
        "with the data, the tokenizer, the learning rate and the number of iterations.",
        "Not in the plan, and so Megatron-LM's defaults: dropout's rates, padding of the",
        "vocabulary, recipe of fp8.",
        *left_out(problem),
    )


def _connections(layout: Layout, core: Core) -> str:
    """Kernels and communication must start in order, but for Megatron-FSDP."""
    if core.fsdp:
        return "unset CUDA_DEVICE_MAX_CONNECTIONS\n"
    if layout.tensor > 1 or layout.context > 1:
        return "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    return ""


def _used(core: Core) -> Fields:
    """The fields that differ from Megatron-LM's defaults, and the degrees."""
    fields = {**core.model, **core.ddp, **core.optimizer}
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
    if layout.chunks == 1 or core.model["pipeline_model_parallel_layout"] is not None:
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
        *(
            FrameworkRule("megatron/training/arguments.py", require, of_problem=True)
            for require in (
                _require_gates,
                _require_biases,
                _require_whole_base,
                require_scaling,
                _require_scaling_arguments,
            )
        ),
    ],
)
