"""How far the predicted seconds and bytes of a layout can be trusted."""

from dataclasses import dataclass
from typing import Literal, get_args

from stagewright.formulations.parallelism.anchored import not_timed
from stagewright.formulations.parallelism.estimate import Estimate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.machines.groups import Group, links
from stagewright.graphs.machines.rates import Feature

Fits = Literal["yes", "no", "within the range"]
"""Whether the peak fits: even at the upper end of its range, not even at the lower, or between."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """The predicted seconds and peak bytes of a layout, and between what the measured ones lie."""

    seconds: float
    seconds_low: float
    seconds_high: float
    peak_bytes: float
    peak_bytes_low: float
    peak_bytes_high: float
    fits: Fits


def ranges(problem: TrainingProblem, found: Estimate) -> Ranges:
    """The ranges of an estimate, by the spreads of the problem's rate set."""
    of_time, of_memory, peak = problem.spread, problem.rates.memory, found.peak_bytes
    low, high, limit = of_memory.low * peak, of_memory.high * peak, problem.fabric.memory_bytes
    return Ranges(
        seconds=found.seconds,
        seconds_low=of_time.low * found.seconds,
        seconds_high=of_time.high * found.seconds,
        peak_bytes=peak,
        peak_bytes_low=low,
        peak_bytes_high=high,
        fits="yes" if high <= limit else "no" if low > limit else "within the range",
    )


def unmeasured(problem: TrainingProblem) -> tuple[Feature, ...]:
    """The features whose prices no run of the rate set confirms: all if the rates are borrowed."""
    rates = problem.rates
    known = () if rates.borrowed is not None else rates.measured
    return tuple(one for one in get_args(Feature) if one not in known)


def unknown_prices(problem: TrainingProblem, layout: Layout) -> tuple[Feature, ...]:
    """The features of a layout whose prices no run of the rate set confirms."""
    has = features(problem, layout)
    return tuple(one for one in unmeasured(problem) if one in has)


def features(problem: TrainingProblem, layout: Layout) -> tuple[Feature, ...]:
    """The features that a layout has, of those that not every rate set has measured."""
    has: dict[Feature, bool] = {
        "ZeRO 2-3 between servers": layout.zero >= 2 and _leaves_server(problem, layout.data_group),
        "context parallelism": layout.context > 1,
        "experts between servers": _leaves_server(problem, ((1, layout.expert),)),
    }
    return tuple(feature for feature, is_one in has.items() if is_one)


def causes(problem: TrainingProblem, layout: Layout) -> tuple[str, ...]:
    """Why a layout's time may be farther off than the runs that the rates were fitted to."""
    borrowed = [] if problem.rates.borrowed is None else problem.rates.borrowed.split("; ")
    unknown: list[str] = [*unknown_prices(problem, layout)]
    if problem.architecture.tuning is not None:
        unknown.append("frozen weights")
    if problem.precision.tf32_products:
        unknown.append("products in TF32 (torch.backends.cuda.matmul.allow_tf32)")
    return (
        *(f"rates {one}" for one in borrowed),
        *(f"{one} not measured in {problem.rates.name}" for one in unknown),
        *not_timed(problem, layout),
    )


def _leaves_server(problem: TrainingProblem, group: Group) -> bool:
    """Whether a group of ranks goes from server to server."""
    inside = problem.fabric.levels[0].name
    ways = links(problem.fabric, group).ways
    return any(one.level.name != inside for way in ways for one in way.crossed)
