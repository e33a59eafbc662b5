"""What arguments of Megatron-LM state beside sizes: rotary positions, routers and activations."""

from stagewright.executor.export.runs.arguments import Arguments
from stagewright.graphs.models.stated import RotaryScaling, Routing, Stated
from stagewright.graphs.models.traits import (
    ADDED_ONE,
    ADJACENT,
    CLAMPED,
    PARTLY_ROTATED,
    SQUARED_RELU,
)

POSITIONS = ("learned_absolute", "rope", "yarn", "none")
_ROUTER = ("score-function", "pre-softmax", "num-groups", "group-topk", "topk-scaling-factor",
           "enable-expert-bias", "load-balancing-type")  # fmt: skip


def read_stated(arguments: Arguments, positions: str, *, latent: bool, experts: bool) -> Stated:
    """The values of a model with these ``positions``, with ``latent`` attention or ``experts``."""
    scaling = _latent_scaling(arguments) if latent else _scaling(arguments, positions)
    routing = _routing(arguments)
    return Stated(
        rotary_part=arguments.real("--rotary-percent"),
        rotary_scaling=scaling,
        routing=routing if experts else None,
    )


def read_traits(arguments: Arguments) -> tuple[str, ...]:
    """The traits that arguments say, in words."""
    clamped = arguments.flag("--quick-geglu")
    for name, value in (("--activation-func-clamp-value", 7.0), ("--glu-linear-offset", 1.0)):
        arguments.require(name, (value,) if clamped else ())
    part = arguments.real("--rotary-percent")
    found = {
        SQUARED_RELU: arguments.flag("--squared-relu"),
        ADJACENT: arguments.flag("--rotary-interleaved"),
        ADDED_ONE: arguments.flag("--apply-layernorm-1p"),
        CLAMPED: clamped,
        PARTLY_ROTATED: part not in (None, 1.0),
    }
    return tuple(sorted(what for what, has in found.items() if has))


def _latent_scaling(arguments: Arguments) -> RotaryScaling | None:
    """Latent attention scales by YaRN unless it is told not to."""
    factor = arguments.real("--rotary-scaling-factor")
    scale, scale_all = (arguments.real(one) for one in _SCALES)
    if arguments.choice("--rope-type", ("yarn", "rope")) == "rope":
        return None
    return RotaryScaling(
        "yarn", 40.0 if factor is None else factor, mscale=scale, mscale_all_dim=scale_all
    )


_SCALES = ("--mscale", "--mscale-all-dim")


def _scaling(arguments: Arguments, positions: str) -> RotaryScaling | None:
    linear = arguments.real("--rotary-seq-len-interpolation-factor")
    scaled, factor = arguments.flag("--use-rope-scaling"), arguments.real("--rope-scaling-factor")
    if positions == "yarn":
        scale, scale_all = (arguments.real(one) for one in _SCALES)
        longest = arguments.number("--yarn-original-max-position-embeddings")
        return RotaryScaling(
            "yarn",
            factor=arguments.real("--rotary-scaling-factor") or 1.0,
            original_max_position_embeddings=longest,
            beta_fast=arguments.real("--yarn-beta-fast"),
            beta_slow=arguments.real("--yarn-beta-slow"),
            mscale=scale,
            mscale_all_dim=scale_all,
            truncate=not arguments.flag("--no-yarn-correction-range-round-to-int"),
        )
    if scaled:
        return RotaryScaling("llama3", 8.0 if factor is None else factor)
    return None if linear is None else RotaryScaling("linear", linear)


def _routing(arguments: Arguments) -> Routing | None:
    """The router, None if nothing is said of it."""
    said = any(f"--moe-router-{name}" in arguments.values for name in _ROUTER)
    scores = arguments.choice("--moe-router-score-function", ("softmax", "sigmoid"))
    before = arguments.flag("--moe-router-pre-softmax")
    names = ("num-groups", "group-topk")
    groups, chosen = (arguments.number(f"--moe-router-{name}") for name in names)
    scale = arguments.real("--moe-router-topk-scaling-factor")
    loss = arguments.real("--moe-aux-loss-coeff")
    kinds = ("aux_loss", "none", "seq_aux_loss", "global_aux_loss", "sinkhorn")
    evened = arguments.choice("--moe-router-load-balancing-type", kinds) not in ("none", "sinkhorn")
    biased = arguments.flag("--moe-router-enable-expert-bias")
    if not said and not loss:
        return None
    return Routing(
        scores="sigmoid" if scores == "sigmoid" else "softmax",
        normalized=scores == "sigmoid" or not before,
        groups=groups,
        chosen_groups=chosen,
        scale=scale or 1.0,
        choice_bias=biased,
        loss=(loss or None) if evened else None,
    )
