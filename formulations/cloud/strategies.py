"""Strategies without knowledge of future prices (thesis, section 6.3.2, figure 6.5).

Each strategy sees some of the offers. All except *dynamic* choose the one with the lowest price per
work at the start and keep it; *dynamic* chooses again whenever a price changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stagewright.formulations.cloud.switching import (
    Offer,
    Outcome,
    Plan,
    Stay,
    SwitchingProblem,
    evaluate,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.prices import HOUR, Instance

_REFERENCE_GPU = "v100"


@dataclass(frozen=True, slots=True)
class Home:
    """The provider and region of the strategies that use a single region."""

    provider: str = "aws"
    region: str = "us-east-1"

    def has(self, instance: Instance) -> bool:
        """Whether an instance is in the home region."""
        return (instance.provider, instance.region) == (self.provider, self.region)


@dataclass(frozen=True, slots=True)
class Strategy:
    """The instances that a strategy sees, given a home, and whether it moves."""

    sees: Callable[[Home, Instance], bool]
    moves: bool = False


STRATEGIES = {
    "1xv100": Strategy(
        lambda home, one: home.has(one) and one.gpu == _REFERENCE_GPU and one.gpus == 1
    ),
    "gpu-type": Strategy(lambda home, one: home.has(one) and one.gpus == 1),
    "multi-gpu": Strategy(lambda home, one: home.has(one)),
    "multi-cloud": Strategy(lambda home, one: True),
    "dynamic": Strategy(lambda home, one: True, moves=True),
}
"""In the order of figure 6.5; each sees at least what the one before it does."""


@dataclass(frozen=True, slots=True)
class Followed:
    """The result of a strategy; None if the job does not end before the deadline."""

    plan: Plan
    outcome: Outcome | None


def follow(problem: SwitchingProblem, name: str, home: Home) -> Followed:
    """Simulate a strategy on ``problem``; returns its plan.

    Raises
    ------
    InputError
        If there is no such strategy, or it sees none of the offers.
    """
    seen = offers_seen(problem, name, home)
    moves = STRATEGIES[name].moves
    plan = _dynamic(problem, seen) if moves else stick(problem, cheapest(problem, seen))
    late = plan[-1].end_seconds > problem.deadline_seconds
    return Followed(plan, None if late else evaluate(problem, plan))


def offers_seen(problem: SwitchingProblem, name: str, home: Home) -> list[int]:
    """The numbers of the offers that a strategy sees. Raises InputError as `follow`."""
    if name not in STRATEGIES:
        raise InputError(f"unknown strategy {name!r}; one of {', '.join(STRATEGIES)}")
    sees = STRATEGIES[name].sees
    seen = [i for i, one in enumerate(problem.offers) if sees(home, one.instance)]
    if not seen:
        raise InputError(
            f"strategy {name!r} finds no instance in {home.provider} {home.region}; choose another "
            "home region, or give prices of this one"
        )
    return seen


def cheapest(problem: SwitchingProblem, seen: Sequence[int]) -> int:
    """The offer with the lowest price per work at the start; the first one in a tie."""
    at = problem.start_seconds
    return min(seen, key=lambda number: problem.offers[number].dollars_per_work(at))


def stick(problem: SwitchingProblem, number: int) -> Plan:
    """The whole job on one offer from the start; it may end after the deadline."""
    return (Stay(number, problem.start_seconds, _end(problem, number, problem.start_seconds)),)


def _end(problem: SwitchingProblem, number: int, begin: float) -> float:
    running = HOUR * problem.work_hours / problem.offers[number].rate
    return begin + problem.overheads.restore_seconds + running


def _dynamic(problem: SwitchingProblem, seen: Sequence[int]) -> Plan:
    """At every price change, move if the rest of the job is then cheaper at current prices.

    The forecast is constant prices, so that moving immediately or never is optimal. The cost of the
    move is included, and offers on which the job would miss its deadline are left out.
    """
    now = problem.start_seconds
    stays = [Stay(_first(problem, seen), now, 0.0)]
    left, ready = problem.work_hours, now + problem.overheads.restore_seconds
    copied = {problem.offers[stays[0].offer].instance.provider}
    compares_all = True
    for at, changed in _changes(problem, seen):
        here = stays[-1].offer
        if at < ready:
            compares_all = True
            continue
        done = problem.offers[here].rate * (at - ready) / HOUR
        if done >= left:
            break
        # An offer with an unchanged price that was not better before is not better for less work.
        candidates = seen if compares_all or here in changed else changed
        compares_all = False
        target = _target(problem, candidates, here, (at, left - done), copied)
        if target != here:
            leave = at + problem.overheads.checkpoint_seconds
            stays[-1] = Stay(here, stays[-1].begin_seconds, leave)
            stays.append(Stay(target, leave, 0.0))
            left -= done
            ready = leave + problem.overheads.restore_seconds
            copied.add(problem.offers[target].instance.provider)
            compares_all = True
    last = stays[-1]
    end = ready + HOUR * left / problem.offers[last.offer].rate
    stays[-1] = Stay(last.offer, last.begin_seconds, end)
    return tuple(stays)


def _first(problem: SwitchingProblem, seen: Sequence[int]) -> int:
    in_time = [
        number
        for number in seen
        if _end(problem, number, problem.start_seconds) <= problem.deadline_seconds
    ]
    return cheapest(problem, in_time or seen)


def _changes(problem: SwitchingProblem, seen: Sequence[int]) -> list[tuple[float, list[int]]]:
    """Times of price changes with the offers whose prices change, in order."""
    changes: dict[float, list[int]] = {}
    for number in seen:
        for at in problem.offers[number].series.seconds:
            if problem.start_seconds < at < problem.deadline_seconds:
                changes.setdefault(at, []).append(number)
    return sorted(changes.items())


def _target(
    problem: SwitchingProblem,
    seen: Sequence[int],
    here: int,
    at_left: tuple[float, float],
    copied: set[str],
) -> int:
    """The offer on which the remaining work is cheapest from now on; ``here`` in a tie."""
    at, left = at_left
    overheads = problem.overheads
    moving = overheads.checkpoint_seconds + overheads.restore_seconds
    now = problem.offers[here]
    best, least = here, left * now.dollars_per_work(at)
    for number in seen:
        offer = problem.offers[number]
        if at + moving + HOUR * left / offer.rate > problem.deadline_seconds:
            continue
        rest = left * offer.dollars_per_work(at) + _moving(problem, now, offer, at, copied)
        if number != here and rest < least * (1 - 1e-12):
            best, least = number, rest
    return best


def _moving(
    problem: SwitchingProblem, now: Offer, then: Offer, at: float, copied: set[str]
) -> float:
    overheads, old, new = problem.overheads, now.instance, then.instance
    paid = overheads.checkpoint_seconds * now.price(at)
    paid += overheads.restore_seconds * then.price(at)
    dollars = paid / HOUR
    if (old.provider, old.region) != (new.provider, new.region):
        dollars += overheads.egress_dollars
    if new.provider not in copied:
        dollars += overheads.dataset_dollars
    return dollars
