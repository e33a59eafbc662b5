"""Switching a training job between cloud instances: problem, plan and its cost.

Narayanan, PhD thesis (2021), section 6.3.2: prices of spot instances change, so a job can be moved
between instances, zones, regions and clouds. Instances are rented whole: a job of N GPUs has
ceil(N / k) instances of k GPUs each and pays all of them (:func:`offers_of`). Times are seconds
since 1970 (UTC). Work is counted in reference hours, for example hours on N V100s, and rates in
reference hours per hour; a job is assumed as fast on several instances as on one.

A stay on an instance begins with ``restore_seconds`` (boot, load the checkpoint) and, unless the
job ends with it, ends with ``checkpoint_seconds`` (write it): both are paid and do no work. Nothing
is paid between stays: waiting and storage are free. Prices are those of the series; preemptions are
part of the rates (:func:`useful_share`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.documents.units import require_amount, require_count
from stagewright.graphs.workloads.prices import HOUR, MAX_GPUS, Instance, Market, PriceSeries

TOLERANCE = 1e-9
"""Relative rounding error of the work of a valid plan."""
CLOCK_SECONDS = 1e-6
"""Resolution of doubles for times of the order of 1e9 s."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """Times and costs of moving a job.

    ``egress_dollars`` are paid for a checkpoint that leaves a region, ``dataset_dollars`` when the
    job first runs at each further provider, to which the dataset is copied once.
    """

    checkpoint_seconds: float = 0.0
    restore_seconds: float = 0.0
    egress_dollars: float = 0.0
    dataset_dollars: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            require_amount(getattr(self, name), name)


NO_OVERHEADS = Overheads()


@dataclass(frozen=True, slots=True)
class Offer:
    """An instance's prices, and the work that the job does on it per hour.

    ``instances`` is the number that the job pays, a fraction if other jobs pay for the rest.
    """

    series: PriceSeries
    rate: float
    instances: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.instances) and self.instances > 0):
            raise InputError(
                f"the job must pay for more than zero of {self.instance.key!r}, got "
                f"{self.instances:g}"
            )
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise InputError(
                f"the rate on {self.instance.key!r} must be more than zero, got {self.rate:g}"
            )

    @property
    def instance(self) -> Instance:
        """The instance type."""
        return self.series.instance

    def dollars(self, begin: float, end: float) -> float:
        """Dollars that the job pays from ``begin`` to ``end``."""
        return self.series.dollars(begin, end) * self.instances

    def price(self, at_seconds: float) -> float:
        """Dollars per hour of the job at a time."""
        return self.series.price(at_seconds) * self.instances

    def dollars_per_work(self, at_seconds: float) -> float:
        """Price over rate: the inverse of cost-normalised throughput (6.3.1)."""
        return self.price(at_seconds) / self.rate


@dataclass(frozen=True, slots=True)
class SwitchingProblem:
    """``work_hours`` are to be done between ``start_seconds`` and ``deadline_seconds``.

    ``running`` is the offer on which the job already runs at the start (None for a new job), and
    ``stocked`` are the providers that already have its dataset.
    """

    offers: tuple[Offer, ...]
    work_hours: float
    start_seconds: float
    deadline_seconds: float
    overheads: Overheads = NO_OVERHEADS
    running: int | None = None
    stocked: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.offers:
            raise InputError("no instances to choose from")
        if not (math.isfinite(self.work_hours) and self.work_hours > 0):
            raise InputError(f"the work must be more than zero hours, got {self.work_hours:g}")
        if not self.deadline_seconds > self.start_seconds:
            raise InputError(
                f"the deadline, {self.deadline_seconds:.15g} s, is not after the start, "
                f"{self.start_seconds:.15g} s"
            )
        for offer in self.offers:
            offer.series.require_cover(self.start_seconds, self.deadline_seconds)


def offers_of(market: Market, rates: Mapping[str, float], gpus: int = 1) -> tuple[Offer, ...]:
    """Offers for a job of ``gpus`` GPUs: whole instances whose kind of GPU has a rate.

    Raises
    ------
    InputError
        If a rate is for a kind that no instance has, no instance is left, or the number of GPUs
        is not valid.
    """
    require_count(gpus, "gpus", MAX_GPUS)
    return tuple(
        replace(offer, instances=float(-(-gpus // offer.instance.gpus)))
        for offer in _single(market, rates)
    )


def _single(market: Market, rates: Mapping[str, float]) -> tuple[Offer, ...]:
    """An offer of one instance for each whose kind of GPU has a rate."""
    kinds = {series.instance.gpu for series in market.series}
    for kind in rates:
        if kind not in kinds:
            raise InputError(f"no instance has GPUs of kind {kind!r}; known: {_listed(kinds)}")
    offers = tuple(
        Offer(series, rates[series.instance.gpu])
        for series in market.series
        if rates.get(series.instance.gpu, 0.0) > 0
    )
    if not offers:
        raise InputError(f"no instance has a rate above zero; kinds of GPU: {_listed(kinds)}")
    return offers


def _listed(kinds: set[str]) -> str:
    return ", ".join(sorted(kinds))


@dataclass(frozen=True, slots=True)
class Stay:
    """The job uses an offer (by its position in the problem) from begin to end."""

    offer: int
    begin_seconds: float
    end_seconds: float


Plan = tuple[Stay, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Costs and work of a plan.

    ``switches`` counts the stays after the first, ``seconds`` is the time from the job's start to
    its end.
    """

    compute_dollars: float
    moving_dollars: float
    work_hours: float
    seconds: float
    switches: int

    @property
    def dollars(self) -> float:
        """Total cost."""
        return self.compute_dollars + self.moving_dollars


def evaluate(problem: SwitchingProblem, plan: Sequence[Stay]) -> Outcome:
    """A plan's cost, from the prices and the rules in this module's docstring.

    Raises
    ------
    InvalidPlan
        In one line: stays that overlap, are too short for their overheads or outside the job's
        time, an unknown offer, or work that is not done.
    """
    if not plan:
        raise InvalidPlan("the plan has no stays")
    first = (plan[0].offer, plan[0].begin_seconds)
    if problem.running is not None and first != (problem.running, problem.start_seconds):
        raise InvalidPlan("the first stay is not where the job runs at its start")
    compute = work = 0.0
    for number, stay in enumerate(plan):
        _check_stay(problem, plan, number)
        offer = problem.offers[stay.offer]
        compute += offer.dollars(stay.begin_seconds, stay.end_seconds)
        idle = overhead_seconds(problem, plan, number)
        work += offer.rate * (stay.end_seconds - stay.begin_seconds - idle) / HOUR
    if not is_enough(problem, work):
        raise InvalidPlan(f"the plan does {work:.9g} of {problem.work_hours:.9g} hours of work")
    seconds = plan[-1].end_seconds - problem.start_seconds
    return Outcome(compute, moving_dollars(problem, plan), work, seconds, len(plan) - 1)


def is_enough(problem: SwitchingProblem, work_hours: float) -> bool:
    """Whether ``work_hours`` is all of the problem's work, up to rounding."""
    fastest = max(offer.rate for offer in problem.offers)
    slack = problem.work_hours * TOLERANCE + fastest * CLOCK_SECONDS / HOUR
    return work_hours >= problem.work_hours - slack


def _check_stay(problem: SwitchingProblem, plan: Sequence[Stay], number: int) -> None:
    stay = plan[number]
    if not 0 <= stay.offer < len(problem.offers):
        raise InvalidPlan(f"stay {number} is on offer {stay.offer} of {len(problem.offers)}")
    earliest = plan[number - 1].end_seconds if number else problem.start_seconds
    if not earliest <= stay.begin_seconds <= stay.end_seconds <= problem.deadline_seconds:
        raise InvalidPlan(
            f"stay {number}, from {stay.begin_seconds:.15g} to {stay.end_seconds:.15g} s, is not "
            f"between {earliest:.15g} and {problem.deadline_seconds:.15g} s"
        )
    needed = overhead_seconds(problem, plan, number)
    lasting = stay.end_seconds - stay.begin_seconds
    if lasting < needed - CLOCK_SECONDS:
        raise InvalidPlan(f"stay {number} lasts {lasting:.9g} s, its overheads {needed:.9g} s")


def overhead_seconds(problem: SwitchingProblem, plan: Sequence[Stay], number: int) -> float:
    """Seconds of a stay without work: the restore at its start, the checkpoint at its end."""
    continues = number == 0 and problem.running is not None
    restoring = 0.0 if continues else problem.overheads.restore_seconds
    return restoring + (problem.overheads.checkpoint_seconds if number + 1 < len(plan) else 0.0)


def moving_dollars(problem: SwitchingProblem, plan: Sequence[Stay]) -> float:
    """Dollars for checkpoints that leave their region, and for copies of the dataset."""
    running = None if problem.running is None else problem.offers[problem.running].instance
    place = None if running is None else (running.provider, running.region)
    stocked = set(problem.stocked) | ({running.provider} if running is not None else set())
    total = 0.0
    for stay in plan:
        instance = problem.offers[stay.offer].instance
        there = (instance.provider, instance.region)
        if place is not None and there != place:
            total += problem.overheads.egress_dollars
        if stocked and instance.provider not in stocked:
            total += problem.overheads.dataset_dollars
        place = there
        stocked.add(instance.provider)
    return total
