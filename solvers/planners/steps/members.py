"""Members of a portfolio, which search in turns, and what was learnt of them.

A portfolio divides its time by what its members gain (cf. Gagliolo and Schmidhuber, Learning
dynamic algorithm portfolios, Annals of Mathematics and Artificial Intelligence 2006).
"""

from collections.abc import Callable
from dataclasses import dataclass

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.solvers.planners.steps.proposal import NoPlan, Proposal

PlanWithin = Callable[[Limits], Proposal | NoPlan]
FIRST_TURN = 0.1  # CPU seconds of a member's first turn; each turn is as long as all before it
_LONGER = "servers", "spp"  # whose first plan takes longer on more devices
_ANEW = "spp", "exact"  # which keep nothing from turn to turn
_DEVICES, _MOST_TIMES = 16, 6  # a first turn for so many, and at most so many times as long
_MANY = 64  # devices; on more, SPP is the first to find what is good
_PER_SAMPLE = 8  # microbatches from which round-robin replicas may win


@dataclass(eq=False)
class Member:
    """A search of the portfolio.

    Attributes
    ----------
    follows
        Whether the search begins with the best plan.
    anew
        Whether every turn begins anew.
    first
        CPU seconds of its first turn.
    promise
        Relative gain that is expected of each doubling of its time.
    gain
        Relative gain in cost and bound per CPU second of its last turn.
    spent
        CPU seconds of all its turns.
    ended
        The cost for which its last search ended by itself.
    """

    name: str
    run: PlanWithin
    is_wanted: Callable[[], bool]
    follows: bool
    anew: bool = False
    first: float = FIRST_TURN
    promise: float = 0.0
    gain: float = 0.0
    spent: float = 0.0
    ended: float | None = None

    def expected(self) -> float:
        """Expected gain per CPU second of the next turn, which is as long as all before it.

        A member that gains goes on. If none does, their times are in proportion to their promises.
        One that begins anew does what it did before, and only then gains.
        """
        promised = self.promise / (self.first + self.spent)
        if self.anew:
            return promised * self.first / (self.first + self.spent)
        return max(self.gain, promised)

    def is_over(self, cost: float) -> bool:
        """Whether its search ended by itself, and has nothing new to begin with."""
        return self.ended is not None and (not self.follows or self.ended == cost)


PROMISES = {
    "": {
        "published": 0.35, "servers": 0.2, "grouped": 0.5, "general": 0.1, "bound": 0.025,
        "spp": 0.02, "ordered": 0.05, "exact": 0.005,
    },
    "many devices": {"servers": 0.9, "spp": 0.85, "published": 0.2},
    "few layers": {"servers": 0.28},
    "no balanced plan": {
        "published": 0.6, "spp": 0.2, "general": 0.5, "grouped": 0.2,
    },
    "many microbatches": {"general": 1.5, "spp": 0.03, "grouped": 0.2},
}  # fmt: skip
"""Relative gains of a doubling of a member's time, of all problems and of some kinds.

From a fit to courses of the members, each alone, on problems that are not in the benchmark
``anytime``, evened out by hand: ``benchmarks.anytime_members``, docs/benchmarks/pipelines.md.
"""


def member_of(
    name: str, run: PlanWithin, is_wanted: Callable[[], bool], follows: bool, devices: int
) -> Member:
    """A member whose first turn is about as long as it takes to a first plan on ``devices``."""
    turn = FIRST_TURN
    if name == "published":
        turn *= 2.5  # it examines a list of schedules
    elif name in _LONGER:
        turn *= min(max(1.0, devices / _DEVICES), _MOST_TIMES)
    return Member(name, run, is_wanted, follows, name in _ANEW, turn)


def promises_of(
    problem: PipelineProblem, has_plan: bool, known: dict[str, dict[str, float]] = PROMISES
) -> dict[str, float]:
    """The promises of all members: of each kind of problem that this one is, the last one counts.

    ``has_plan``: whether there is a plan yet.
    """
    devices, samples = len(problem.cluster), int(problem.replicas_per_layer.max())
    kinds = {
        "": True,
        "many devices": devices > _MANY,
        "few layers": len(problem.chain) < devices <= _MANY,
        "no balanced plan": not has_plan,
        # There are enough for replicas that take turns, each with as many samples as it can use.
        "many microbatches": samples == 1 or problem.microbatches >= _PER_SAMPLE * samples,
    }
    promises: dict[str, float] = {}
    for kind, applies in kinds.items():
        promises |= known[kind] if applies else {}
    return promises
