"""How far the predicted seconds and bytes of a layout can be trusted."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypedDict, get_args

from stagewright.formulations.parallelism.anchored import not_timed
from stagewright.formulations.parallelism.estimate import Estimate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.prices.computing import Precision
from stagewright.graphs.machines.anchors import TimedModel
from stagewright.graphs.machines.groups import Group, links
from stagewright.graphs.machines.rates import UNMEASURED, Beyond, Feature, Spread
from stagewright.graphs.models.traits import recurrences_of


class Measured(TypedDict):
    """What the runs of a rate set have, as the set has it."""

    measured: tuple[Feature, ...]
    most_devices: int
    longest_sequence: int


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
    of_time = expected(problem, features(problem, found.layout))
    of_memory, peak = problem.rates.memory, found.peak_bytes
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


def expected(problem: TrainingProblem, has: Iterable[Feature]) -> Spread:
    """Measured over predicted seconds of layouts that have these features.

    The range of the rate set is wider by each feature that none of its runs has. What is borrowed
    has widened it already, as runs of other stacks and devices show, whatever their features.
    """
    rates, found = problem.rates, problem.spread
    lacks = [one for one in (*has, products(problem.precision)) if one not in rates.measured]
    for one in (*lacks, *dict(beyond(problem))):
        found = found.widened(*UNMEASURED[one])
    return found


def beyond(problem: TrainingProblem) -> Iterator[tuple[Beyond, str]]:
    """Where a problem goes beyond all measured runs, and in words what was not measured."""
    rates = problem.rates
    if rates.most_devices is not None and problem.fabric.devices > rates.most_devices:
        yield "more GPUs", f"more than {rates.most_devices} GPUs"
    if rates.longest_sequence is not None and problem.sequence > rates.longest_sequence:
        yield "longer sequences", f"more than {rates.longest_sequence} tokens in a sequence"
    for mixers in recurrences_of(problem.architecture):
        yield "recurrent mixers", mixers


def unmeasured(problem: TrainingProblem) -> tuple[Feature, ...]:
    """The features whose prices no run of the rate set confirms: all if the rates are borrowed."""
    rates = problem.rates
    known = () if rates.borrowed is not None else rates.measured
    return tuple(one for one in get_args(Feature) if one not in known)


def unknown_prices(problem: TrainingProblem, layout: Layout) -> tuple[Feature, ...]:
    """The features that a layout chooses whose prices no run of the rate set confirms."""
    has = features(problem, layout)
    return tuple(one for one in unmeasured(problem) if one in has)


def features(problem: TrainingProblem, layout: Layout) -> tuple[Feature, ...]:
    """The features that a layout chooses, of those that not every rate set has measured."""
    has: dict[Feature, bool] = {
        "ZeRO 2-3 between servers": layout.zero >= 2 and _leaves_server(problem, layout.data_group),
        "context parallelism": layout.context > 1,
        "experts between servers": _leaves_server(problem, ((1, layout.expert),)),
        "activation offload": layout.offload_blocks > 0,
        "schedules in a V": layout.form.in_v,
    }
    return tuple(feature for feature, is_one in has.items() if is_one)


def causes(problem: TrainingProblem, layout: Layout) -> tuple[str, ...]:
    """Why a layout's time may be farther off than the runs that the rates were fitted to."""
    rates = problem.rates
    borrowed = [] if rates.borrowed is None else rates.borrowed.split("; ")
    return (
        *(f"rates {one}" for one in borrowed),
        *(f"{one} not measured in {rates.name}" for one in unknown_prices(problem, layout)),
        *unmeasured_work(problem),
        *not_timed(problem, layout),
    )


def unmeasured_work(problem: TrainingProblem) -> Iterator[str]:
    """What every layout of the problem has, and no run that the rates were fitted to."""
    unknown = {
        products(problem.precision): products(problem.precision) not in problem.rates.measured,
        **{words: True for _, words in beyond(problem)},
        "frozen weights": problem.architecture.tuning is not None,
        "TF32 (torch.backends.cuda.matmul.allow_tf32)": problem.precision.tf32_products,
    }
    for what, is_one in unknown.items():
        if is_one:
            yield f"{what} not measured in {problem.rates.name}"


def measured_by(runs: Iterable[tuple[TrainingProblem, Layout]]) -> Measured:
    """What measured runs have."""
    runs = tuple(runs)
    has = {one for run in runs for one in (*features(*run), products(run[0].precision))}
    return Measured(
        measured=tuple(one for one in get_args(Feature) if one in has),
        most_devices=max(problem.fabric.devices for problem, _ in runs),
        longest_sequence=max(problem.sequence for problem, _ in runs),
    )


def products(of: Precision | TimedModel) -> Feature:
    """In what matrix products are; those in TF32 have numbers of 32 bits."""
    if of.fp8_products:
        return "products in 8 bits"
    return "products in 32 bits" if of.activation_bytes == 4 else "products in 16 bits"


def _leaves_server(problem: TrainingProblem, group: Group) -> bool:
    """Whether a group of ranks goes from server to server."""
    inside = problem.fabric.levels[0].name
    ways = links(problem.fabric, group).ways
    return any(one.level.name != inside for way in ways for one in way.crossed)
