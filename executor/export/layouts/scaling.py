"""How rotary positions are scaled, in the words of what is built on Megatron Core."""

from stagewright.executor.export.layouts.common import Fields
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import Architecture, LatentAttention
from stagewright.graphs.models.stated import RotaryScaling


def latent_scaling(scaling: RotaryScaling) -> Fields:
    """How latent attention scales rotary positions; YaRN alone."""
    found: Fields = {
        "rotary_scaling_factor": scaling.factor,
        "mscale": scaling.mscale,
        "mscale_all_dim": scaling.mscale_all_dim,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "original_max_position_embeddings": scaling.original_max_position_embeddings,
    }
    return {name: value for name, value in found.items() if value is not None}


def _grouped(architecture: Architecture) -> RotaryScaling | None:
    """How grouped attention scales rotary positions."""
    latent = isinstance(architecture.attention, LatentAttention)
    return None if latent else architecture.stated.rotary_scaling


def require_scaling(problem: TrainingProblem, _: Layout, framework: str) -> None:
    """Refuse scalings that Megatron Core lacks, and numbers that it has no field for."""
    of = problem.architecture
    scaling, latent = of.stated.rotary_scaling, isinstance(of.attention, LatentAttention)
    if scaling is None:
        return
    _require_kind(scaling, ("yarn",) if latent else ("linear", "llama3", "yarn"), framework)
    if scaling.kind == "llama3":
        _require_numbers(scaling, _SCALED_LLAMA, framework)


def _require_kind(scaling: RotaryScaling, kinds: tuple[str, ...], framework: str) -> None:
    """Raise InputError unless rotary positions are scaled in one of some kinds."""
    if scaling.kind not in kinds:
        raise InputError(
            f"rotary positions scaled by {scaling.kind}: {framework} scales these by "
            + " or ".join((", ".join(kinds[:-1]), kinds[-1]) if len(kinds) > 1 else kinds)
        )


_SCALED_LLAMA = (
    ("low_freq_factor", 1.0), ("high_freq_factor", 4.0), ("original_max_position_embeddings", 8192),
)  # fmt: skip


def _require_numbers(
    scaling: RotaryScaling, fixed: tuple[tuple[str, float], ...], framework: str
) -> None:
    """Raise InputError where a number for which there is no field is not its default."""
    for name, default in fixed:
        if getattr(scaling, name) not in (None, default):
            raise InputError(
                f"rotary positions with {name} {getattr(scaling, name):g}: {framework} has "
                f"{default:g}, and no argument for it"
            )


_SCALED_LATENT = (
    ("beta_fast", 32.0), ("beta_slow", 1.0), ("original_max_position_embeddings", 4096),
)  # fmt: skip
"""Numbers of a scaling for which there is no argument."""


def scaling_arguments(of: Architecture) -> Fields:
    """Megatron-LM's arguments; latent attention takes YaRN where it is not told."""
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


def require_arguments(problem: TrainingProblem, _: Layout, framework: str) -> None:
    """Refuse numbers for which Megatron-LM has no arguments."""
    of = problem.architecture
    scaling = of.stated.rotary_scaling
    if scaling is None:
        return
    if isinstance(of.attention, LatentAttention):
        _require_numbers(scaling, _SCALED_LATENT, framework)
    if scaling.kind == "linear" and scaling.factor % 1:
        raise InputError(
            f"rotary positions scaled by {scaling.factor:g}: {framework} takes integers"
        )


_YARN = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast", "beta_slow": "beta_slow", "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim", "truncate": "correction_range_round_to_int",
}  # fmt: skip
"""Numbers of YaRN, and their fields after ``yarn_`` (models/gpt_provider.py)."""


def bridge_scaling(of: Architecture) -> Fields:
    """Megatron-Bridge's fields of grouped attention."""
    scaling = _grouped(of)
    if scaling is None:
        return {}
    if scaling.kind == "linear":
        return {"seq_len_interpolation_factor": scaling.factor}
    if scaling.kind == "llama3":
        return {"rope_scaling": True, "rope_scaling_factor": scaling.factor}
    numbers = {f"yarn_{field}": getattr(scaling, name) for name, field in _YARN.items()}
    return {"position_embedding_type": "yarn", **numbers}


def nemo_scaling(of: Architecture) -> Fields:
    """NeMo's fields of grouped attention; recipes of GPT-OSS have their own YaRN."""
    scaling = _grouped(of)
    if scaling is None or scaling.kind == "yarn":
        return {}
    if scaling.kind == "linear":
        return {"seq_len_interpolation_factor": scaling.factor}
    numbers = {
        "scale_factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "old_context_len": scaling.original_max_position_embeddings,
    }
    return {name: value for name, value in numbers.items() if value is not None}


def require_nemo_scaling(problem: TrainingProblem, _: Layout, framework: str) -> None:
    """Refuse scalings that no recipe of NeMo has."""
    of = problem.architecture
    scaling = of.stated.rotary_scaling
    if scaling is None:
        return
    by_name = {"llama": ("linear", "llama3"), "gpt_oss": ("linear", "yarn")}
    latent = _grouped(of) is None
    _require_kind(scaling, ("yarn",) if latent else by_name.get(of.name, ("linear",)), framework)
