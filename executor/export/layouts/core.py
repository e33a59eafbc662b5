"""Layouts in the fields of Megatron Core (0.16 to 0.20), for all that are built on it.

Names are those of ``TransformerConfig``, ``DistributedDataParallelConfig`` and ``OptimizerConfig``.
Stage s is chunk s // P of rank s mod P. Rank orders are those of ``core/parallel_state.py``.
"""

from dataclasses import dataclass

from stagewright.executor.export.layouts.common import (
    Fields,
    NumberType,
    assignments,
    compared,
    launch,
    left_out,
    number_type,
    rotary_and_norms,
)
from stagewright.executor.export.layouts.hybrid import is_hybrid, mamba_fields, require_groups
from stagewright.executor.export.layouts.rules import (
    FrameworkRule,
    require_bytes,
    require_context,
)
from stagewright.executor.export.layouts.scaling import latent_scaling
from stagewright.executor.export.options import filled
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import Architecture, LatentAttention
from stagewright.graphs.models.mixers import AnyAttention
from stagewright.graphs.models.modules import modules_of
from stagewright.graphs.models.recurrences import RECURRENT
from stagewright.graphs.models.splits import mixers_of

STRATEGIES = {0: "no_shard", 1: "no_shard", 2: "optim_grads", 3: "optim_grads_params"}
"""Megatron-FSDP's for ZeRO 2 and 3; ZeRO 1 is the distributed optimizer's."""

FSDP_FORMAT = "fsdp_dtensor"  # the only format of checkpoints that Megatron-FSDP has


@dataclass(frozen=True, slots=True)
class Core:
    """Megatron Core's fields by configuration; a field that is None or False keeps its default.

    ``pipeline_inside``: whether ranks of a pipeline are nearer together than those of data
    parallelism. ``fp8_weights``: whether weights are gathered and kept in fp8. ``fp8_recipe``: how
    values in fp8 are scaled, where the framework's default would not do.
    """

    model: Fields
    ddp: Fields
    optimizer: Fields
    numbers: NumberType
    pipeline_inside: bool
    fsdp: bool
    fp8: bool
    fp8_weights: bool
    fp8_recipe: str | None


def core_of(problem: TrainingProblem, layout: Layout) -> Core:
    """The fields of a layout that keeps the :data:`RULES`."""
    precision = problem.precision
    return Core(
        model=_degrees(problem, layout) | _recomputation(problem, layout) | _offload(layout),
        ddp={
            "use_distributed_optimizer": layout.zero > 0,
            "use_megatron_fsdp": layout.zero > 1,
            "data_parallel_sharding_strategy": STRATEGIES[layout.zero],
            "overlap_grad_reduce": problem.overlap,
            "overlap_param_gather": problem.overlap and layout.zero > 0,
            "grad_reduce_in_fp32": precision.gradient_bytes == 4,
        },
        optimizer=_optimizer(problem, layout),
        numbers=number_type(problem),
        pipeline_inside=_is_inside(layout),
        fsdp=layout.zero > 1,
        fp8=precision.fp8_products,
        fp8_weights=precision.weight_bytes == 1,
        fp8_recipe="tensorwise" if precision.fp8_products and _scales_current(layout) else None,
    )


def stages_text(problem: TrainingProblem, layout: Layout) -> str:
    """``pipeline_model_parallel_layout``: E the embedding, t a layer, L the output and loss."""
    blocks = ["t" if n == 1 else f"t*{n}" if n else "" for n in _stages(problem, layout)]
    blocks[0] = "E" + blocks[0]
    blocks[-1] += "L"
    return "|".join(blocks)


def _stages(problem: TrainingProblem, layout: Layout) -> tuple[int, ...]:
    return layout.blocks_of_stages(problem.architecture.layers)


def _degrees(problem: TrainingProblem, layout: Layout) -> Fields:
    uneven = len(set(_stages(problem, layout))) > 1
    sparse = problem.architecture.experts is not None
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.chunks if layout.chunks > 1 else None,
        "pipeline_model_parallel_layout": stages_text(problem, layout) if uneven else None,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "context_parallel_size": layout.context,
        "sequence_parallel": layout.sequence_parallel,
        "expert_model_parallel_size": layout.expert,
        # Experts stay whole; None is the tensor degree.
        "expert_tensor_parallel_size": 1 if sparse else None,
    }


def _recomputation(problem: TrainingProblem, layout: Layout) -> Fields:
    """Full: layers again from their inputs. Selective: the attention without projections.

    The method ``block`` repeats the first layers of every stage.
    """
    full, some = layout.recompute == "full", layout.recompute_blocks
    modules = [] if full else _modules(problem, layout)
    return {
        "recompute_granularity": "full" if full else "selective" if modules else None,
        "recompute_method": None if not full else "uniform" if some is None else "block",
        "recompute_num_layers": None if not full else some or 1,
        "recompute_modules": modules or None,
    }


def _offload(layout: Layout) -> Fields:
    """Activations of the first layers in host memory, and no weights."""
    return {
        "cpu_offloading": layout.offload_blocks > 0,
        "cpu_offloading_num_layers": layout.offload_blocks,
        "cpu_offloading_weights": False,
    }


def _modules(problem: TrainingProblem, layout: Layout) -> list[str]:
    """The recomputed modules, with those that the price of a layout has always recomputed."""
    found = ["core_attn"] if layout.recompute == "selective" else [*modules_of(layout.recompute)]
    if isinstance(problem.architecture.attention, LatentAttention):
        found += [one for one in problem.memory.always if one not in found]
    return found


def _scales_current(layout: Layout) -> bool:
    """Whether modules are recomputed that Megatron Core refuses with delayed scaling of fp8."""
    return not {"moe_act", "layernorm"}.isdisjoint(modules_of(layout.recompute))


def _optimizer(problem: TrainingProblem, layout: Layout) -> Fields:
    offload = layout.offload_optimizer
    small = problem.precision.activation_bytes == 2 and problem.precision.optimizer_bytes == 8
    moments = "bf16" if small else "fp32"
    return {
        "use_distributed_optimizer": layout.zero > 0,
        "overlap_param_gather": problem.overlap and layout.zero > 0,
        "use_precision_aware_optimizer": offload or small,
        "exp_avg_dtype": moments,
        "exp_avg_sq_dtype": moments,
        "optimizer_cpu_offload": offload,
        "optimizer_offload_fraction": 1.0 if offload else 0.0,
        "overlap_cpu_optimizer_d2h_h2d": offload,
    }


def _is_inside(layout: Layout) -> bool:
    return layout.placement == "pipeline-inside" and layout.pipeline > 1 and layout.data > 1


def model_fields(architecture: Architecture) -> Fields:
    """Fields of a recipe's model that are not the layout's; its sizes are compared instead.

    How grouped attention scales rotary positions is not among them: recipes differ in it.
    """
    stated = architecture.stated
    latent = isinstance(architecture.attention, LatentAttention)
    known = {
        "rotary_percent": stated.rotary_part,
        "attn_logit_softcapping": stated.score_cap,
        "final_logit_softcapping": stated.logit_cap,
    }
    return {
        # Recipes may predict further tokens, which the plan has not, unless it says to leave it.
        **({} if architecture.left_out else {"mtp_num_layers": architecture.next_tokens}),
        **rotary_and_norms(architecture, "rotary_base", "layernorm_epsilon"),
        **(latent_scaling(stated.rotary_scaling) if latent and stated.rotary_scaling else {}),
        **router_fields(architecture),
        **{name: value for name, value in known.items() if value is not None},
    }


def attention_of(of: Architecture) -> AnyAttention | None:
    """The first attention of a model, if it has one."""
    return next((one for one in mixers_of(of) if not isinstance(one, RECURRENT)), None)


def _sizes(architecture: Architecture) -> Fields:
    attention, experts = attention_of(architecture), architecture.experts
    found: Fields = {"num_layers": architecture.layers, "hidden_size": architecture.hidden}
    if any(architecture.parts(index).feed_forward for index in range(architecture.layers)):
        found["ffn_hidden_size"] = architecture.feed_forward.width
    if attention is not None:
        found["num_attention_heads"] = attention.heads
    if isinstance(attention, LatentAttention):
        found["kv_lora_rank"] = attention.key_value_rank
    elif attention is not None:
        found["num_query_groups"] = attention.key_value_heads
        found["kv_channels"] = attention.head_size
    found |= mamba_fields(architecture) if is_hybrid(architecture) else {}
    if experts is not None:
        found["num_moe_experts"] = experts.number
        found["moe_router_topk"] = experts.per_token
        found["moe_ffn_hidden_size"] = experts.width
    return found


def router_fields(architecture: Architecture) -> Fields:
    """Fields of the router; none without experts, or where nothing is stated."""
    routing = architecture.stated.routing
    if routing is None or architecture.experts is None:
        return {}
    return {
        "moe_router_score_function": routing.scores,
        "moe_router_pre_softmax": routing.scores == "softmax" and not routing.normalized,
        "moe_router_num_groups": routing.groups if routing.is_grouped else None,
        "moe_router_group_topk": routing.chosen_groups if routing.is_grouped else None,
        "moe_router_topk_scaling_factor": None if routing.scale == 1 else routing.scale,
        "moe_router_enable_expert_bias": routing.choice_bias,
        "moe_router_load_balancing_type": "aux_loss" if routing.loss else "none",
        "moe_aux_loss_coeff": routing.loss or 0.0,
    }


def _require_router(problem: TrainingProblem, _: Layout, framework: str) -> None:
    routing, experts = problem.architecture.stated.routing, problem.architecture.experts
    if routing is None or experts is None:
        return
    soft, several = routing.scores == "softmax", experts.per_token > 1
    wrong = {
        "scores by sigmoid that do not sum to 1": several and not (soft or routing.normalized),
        "scores of one expert that sum to 1": not several and soft and routing.normalized,
        "a bias of the choice beside scores by softmax": soft and routing.choice_bias,
    }
    for what in (what for what, has in wrong.items() if has):
        raise InputError(f"{problem.architecture.name} has {what}: {framework} has no such router")


def _refuse_context_of_windows(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    if layout.context > 1 and problem.architecture.window is not None:
        raise InputError(
            f"context degree {layout.context} with a sliding window: {framework} passes keys and "
            "values around for full attention alone; choose context 1"
        )


def _require_pipeline_inside(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    """Ranks of a pipeline must be the same for experts and for the rest.

    The experts' order has no context ranks; its tensor degree is 1, without experts the tensor
    degree of the rest.
    """
    sparse = problem.architecture.experts is not None
    inner = layout.expert if sparse else layout.tensor
    if _is_inside(layout) and inner != layout.tensor * layout.context:
        works = "an expert degree of tensor x context" if sparse else "context 1"
        raise InputError(
            f"the placement pipeline-inside with tensor {layout.tensor}, context {layout.context} "
            f"and expert {layout.expert}: {framework} orders its ranks so only with {works}; "
            "choose data-inside"
        )


def _require_offload(_: TrainingProblem, layout: Layout, framework: str) -> None:
    if layout.offload_optimizer and layout.zero != 1:
        raise InputError(
            f"an offloaded optimizer with ZeRO {layout.zero}: {framework} offloads its "
            "distributed optimizer, which is ZeRO 1; choose zero 1"
        )


def _require_fsdp_placement(_: TrainingProblem, layout: Layout, framework: str) -> None:
    if layout.zero > 1 and _is_inside(layout):
        raise InputError(
            f"the placement pipeline-inside with ZeRO {layout.zero}: Megatron-FSDP, with which "
            f"{framework} shards, does not support it; choose data-inside or zero 1"
        )


def _refuse_fsdp_chunks(_: TrainingProblem, layout: Layout, framework: str) -> None:
    if layout.zero > 1 and layout.chunks > 1:
        raise InputError(
            f"{layout.chunks} chunks with ZeRO {layout.zero}: Megatron-FSDP, with which "
            f"{framework} shards, is not known to interleave a pipeline; choose chunks 1 or zero 1"
        )


def _require_precision(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    precision = problem.precision
    if precision.activation_bytes == 4:
        if precision.fp8_products:
            raise InputError(
                f"products in fp8 with activations of 4 bytes: {framework} has fp8 beside 2 bytes; "
                "set activation_bytes 2"
            )
        require_bytes(problem, [(4, 4, 8)], framework)
        return
    shards = layout.zero > 0
    weights = (2, 1) if precision.fp8_products and shards else (2,)
    # 8 is the precision-aware optimizer with both moments in bf16.
    optimizers = (12, 8) if shards and not layout.offload_optimizer else (12,)
    known = [(w, g, o) for w in weights for g in (4, 2) for o in optimizers]
    require_bytes(problem, known, framework)


RULES = (
    FrameworkRule("megatron/core/transformer/moe/router.py", _require_router, of_problem=True),
    FrameworkRule("megatron/core/optimizer/optimizer_config.py", _require_precision),
    FrameworkRule("megatron/training/arguments.py", require_context),
    FrameworkRule("megatron/core/extensions/transformer_engine.py", _refuse_context_of_windows),
    FrameworkRule("megatron/core/parallel_state.py", _require_pipeline_inside),
    FrameworkRule("megatron/core/optimizer/optimizer_config.py", _require_offload),
    FrameworkRule("megatron/core/distributed/fsdp", _require_fsdp_placement),
    FrameworkRule("megatron/core/distributed/fsdp", _refuse_fsdp_chunks),
    FrameworkRule("megatron/core/ssm/mamba_mixer.py", require_groups),
)
"""What all that is built on Megatron Core asks."""


def recipe_text(
    template: str,
    config: str,
    problem: TrainingProblem,
    layout: Layout,
    targets: dict[str, Fields],
    imported: str = "",
) -> str:
    """A recipe in Python: a template with the layout in words, the launch and the assignments.

    ``config`` has the model's sizes.
    """
    return filled(
        template,
        words=layout,
        imported=imported,
        ranks=layout.ranks,
        launch=launch(problem),
        left_out="".join(f"\n{line}" for line in left_out(problem)),
        compared=compared(config, _sizes(problem.architecture)),
        lines="".join(assignments(*one) for one in targets.items()),
    )
