"""What every price adds to a layout's iteration: its source, and the time without it."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.pipeline_time import Walk
from stagewright.formulations.parallelism.training import SwitchedProblem, TrainingProblem
from stagewright.formulations.prices.computing import Price
from stagewright.graphs.machines.rates import Reached

_CONSTANTS: dict[str, dict[str, Any]] = {
    "casts to 8 bits": {"cast_bytes": 0.0},
    "loss": {"logit_bytes": 0.0},
    "kernel launches": {"launch_seconds": 0.0},
    "dispatch by the host": {"dispatch_seconds": 0.0},
    "experts on the host": {"expert_seconds": 0.0, "each_expert_seconds": 0.0},
    "exchange beside computation": {"contention": 0.0},
}
"""Prices that are constants of the rate set alone, and their values without the price."""

_TIMED = {
    "matrix products", "attention", "memory-bound kernels", "sums of gradients", *_CONSTANTS
} - {"exchange beside computation"}  # fmt: skip
"""Prices that are within the seconds of timed layers, and are none of their own."""

_ATTENTION = ("attention", "attention_backward", "attention_half_flops")
_EXCHANGES = ("tensor exchange", "context exchange", "data exchange", "pipeline transfers")


@dataclass(frozen=True, slots=True)
class PriceEffect:
    """A price: by how many ``seconds`` the iteration is longer than without it, and its source."""

    price: str
    seconds: float
    without_seconds: float
    source: str


def price_effects(problem: TrainingProblem, found: Estimate, run: Walk) -> tuple[PriceEffect, ...]:
    """Every price of an estimated layout, the largest first.

    What runs beside something longer adds nothing, so that the seconds do not add up to the time.
    """
    effects = [
        PriceEffect(price, found.seconds - without, without, source)
        for price, without, source in _switched(problem, found, run)
    ]
    return tuple(sorted(effects, key=lambda one: -one.seconds))


def _switched(
    problem: TrainingProblem, found: Estimate, run: Walk
) -> Iterator[tuple[str, float, str]]:
    """Every price with the seconds without it and its source."""
    layout, rates = found.layout, problem.rates
    within = set() if rates.anchor is None else _TIMED
    for constants, changed in _CONSTANTS.items():
        if constants in within:
            continue
        other = replace(rates, reached=replace(rates.reached, **changed))
        without = evaluate(replace(problem, rates=other), layout, run).seconds
        yield constants, without, _of_rates(problem, tuple(changed))
    given = {one.name: getattr(problem, one.name) for one in fields(problem)}
    for price in (one for one in get_args(Price) if one not in within):
        free = SwitchedProblem(**given, free=frozenset((price,)))
        yield price, evaluate(free, layout, run).seconds, _source(problem, layout, price)
    plain = replace(layout, recompute="none", recompute_blocks=None, recomputed_by_stage=None)
    yield (
        "recomputation",
        evaluate(problem, plain, run).seconds,
        "forwards of the layout's recomputed blocks again, by the prices above",
    )
    yield (
        "bubble",
        found.seconds - found.bubble_seconds,
        f"the order of schedule {layout.schedule}, simulated",
    )


def _source(problem: TrainingProblem, layout: Layout, price: Price) -> str:
    """Where a price that is no constant alone comes from."""
    card, is_timed = problem.card, problem.rates.anchor is not None
    if price in ("matrix products", "attention"):
        product = "fp8_matmul" if problem.precision.fp8_products else "matmul"
        of_attention = price == "attention" and problem.reached.attention is not None
        peak = problem.processor.half_peak_flops if price == "attention" else problem.peak_flops
        names = _ATTENTION if of_attention else (product, "half_flops")
        return f"{_of_rates(problem, names)}; {peak / 1e12:.0f} TFLOP/s of {card.name}'s datasheet"
    host = f"{(problem.fabric.host_bytes_per_second or 0) / 1e9:.0f} GB/s to the host"
    if price == "activation offload":
        return f"all that {layout.offload_blocks} blocks keep, there and back, at {host}"
    if price == "optimizer step" and layout.offload_optimizer:
        return host
    if price == "optimizer step" and is_timed:
        return f"timed in {problem.rates.name}"
    if price in _EXCHANGES or price == "expert exchange":
        of_rates = price == "expert exchange"
        formula = "an all-to-all" if of_rates else "a message"
        if price in ("tensor exchange", "data exchange"):
            formula = "rings (Patarasuk and Yuan 2009)"
        links = "; ".join(
            f"{one.name} {one.bytes_per_second / 1e9:.0f} GB/s, {1e6 * one.latency_seconds:.1f} us"
            for one in problem.fabric.levels
        )
        overlap = f"; {_of_rates(problem, ('expert_overlap',))}" if of_rates else ""
        timed = f"timed in {problem.rates.name}, or, where it was not, "
        within = is_timed and price in ("tensor exchange", "expert exchange")
        return f"{timed * within}{formula} over the links: {links}{overlap}"
    bandwidth = f"{card.memory_bytes_per_second / 1e9:.0f} GB/s of {card.name}'s datasheet"
    return f"{_of_rates(problem, ('memory',))}; {bandwidth}"


def _of_rates(problem: TrainingProblem, names: tuple[str, ...]) -> str:
    """Constants of the rate set, with what they were fitted to."""
    reached, rates = problem.reached, problem.rates
    values = ", ".join(f"{name} {_shown(reached, name)}" for name in names)
    return f"{values} of {rates.name}, {rates.fitted_to}"


def _shown(reached: Reached, name: str) -> str:
    value = getattr(reached, name)
    return "not given" if value is None else f"{value:.3g}"
