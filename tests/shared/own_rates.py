"""Rate sets of constants that a test chooses."""

from collections.abc import Callable, Sequence
from typing import Any

from stagewright.formulations.prices.computing import Precision
from stagewright.graphs.machines.rates import RateSet, Reached, Spread

DRAWN: dict[str, Sequence[Any]] = {
    "matmul": (0.7,),
    "half_flops": (0.0, 1e7),
    "memory": (0.8,),
    "launch_seconds": (0.0, 1e-6),
    "dispatch_seconds": (0.0, 1e-6, 1e-4),
    "fp8_matmul": (None, 0.3, 0.9),
    "fp8_head": (False, True),
    "cast_bytes": (0.0, 4.0, 40.0),
    "attention": (None, 0.2, 0.9),
    "attention_backward": (None, 0.1, 0.9),
    "attention_half_flops": (0.0, 1e6),
    "context_balanced": (False, True),
    "expert_seconds": (0.0, 1e-5),
    "each_expert_seconds": (0.0, 1e-5),
    "expert_overlap": (0.0, 0.4, 1.0),
    "once_per_unit": (False, True),
    "contention": (0.0, 0.5, 2.0),
    "logit_bytes": (None, 0.0, 12.0),
}
"""Values of every constant, for tiny models."""

PRECISIONS = (
    Precision(), Precision(gradient_bytes=2), Precision(4, 4, 4, 8), Precision(fp8_products=True),
)  # fmt: skip


def drawn_rates(choice: Callable[[Sequence[Any]], Any]) -> RateSet:
    """A set with a drawn value of every constant."""
    return own_rates(Reached(**{name: choice(each) for name, each in DRAWN.items()}))


def own_rates(reached: Reached) -> RateSet:
    """A set with these constants, by hand."""
    return RateSet(
        "by-hand", "megatron", ("h100",), "none", "by hand", "not fitted", reached,
        Spread(0.9, 1.2), Spread(0.8, 1.3), Spread(0.95, 1.05),
    )  # fmt: skip
