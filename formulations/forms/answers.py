"""Limits of a solve, its progress, and its answer."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents import units
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.formulations.plans.plan_class import PlanClass

_MAX_THREADS = 1024

V = TypeVar("V")


class Status(StrEnum):
    """The status of an answer, the same for all searches and problems."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNBOUNDED = "unbounded"
    NO_ANSWER = "no-answer"  # the limit came before anything was found or proved
    INTERRUPTED = "interrupted"  # a stop token came first; what was found by then is there


def settled(
    status: Status, cost: float | None, bound: float, tolerance: float = RELATIVE_TOLERANCE
) -> Status:
    """Optimal if ``cost`` meets a lower bound on the class of the answer; otherwise ``status``.

    Every answer with a cost and a bound is asked this; ``tolerance`` is relative to the cost.
    """
    is_met = cost is not None and cost - bound <= tolerance * abs(cost)
    return Status.OPTIMAL if is_met else status


class StopToken(Protocol):
    """Asks a search to end early, such as a :class:`threading.Event` that another thread sets."""

    def is_set(self) -> bool:
        """Whether the search is to end."""
        ...


def is_stopped(stop: StopToken | None) -> bool:
    """Whether there is a token and it is set."""
    return stop is not None and stop.is_set()


@dataclass(frozen=True, slots=True)
class Deadline:
    """A stop token that is also set from ``at`` seconds of :func:`time.monotonic` on."""

    at: float
    other: StopToken | None = None

    def is_set(self) -> bool:
        """Whether the time has come, or the other token is set."""
        return time.monotonic() >= self.at or is_stopped(self.other)


@dataclass(slots=True)
class GapStop:
    """A stop token that is also set when a plan's gap is at most ``gap`` (``reached``)."""

    gap: float
    other: StopToken | None = None
    reached: bool = False

    def is_set(self) -> bool:
        """Whether the gap is reached, or the other token is set."""
        return self.reached or is_stopped(self.other)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a search: seconds, stop token; ``seed`` and ``threads`` as in CP-SAT.

    ``stop`` ends the work before ``seconds`` are over, once it is set; searches look at it as often
    as they look at the time. ``backend`` names the solver of forms that several accept; None is
    the default for each. ``gap``: planning ends as soon as the relative gap of its best plan is at
    most this.
    """

    seconds: float = 10.0
    threads: int = 1
    seed: int = 0
    stop: StopToken | None = None
    backend: str | None = None
    gap: float = 0.0

    def stopped(self) -> bool:
        """Whether the work is to end, whatever time is left."""
        return is_stopped(self.stop)

    def left(self, elapsed: float) -> float:
        """The seconds that are left after ``elapsed`` ones, at least 0; 0 once stopped."""
        return 0.0 if self.stopped() else max(0.0, self.seconds - elapsed)

    def status(self, found: bool) -> Status:
        """The status of a search that ended without a proof, with an answer if ``found``."""
        if self.stopped():
            return Status.INTERRUPTED
        return Status.FEASIBLE if found else Status.NO_ANSWER

    @property
    def end(self) -> str:
        """The reason for which an incomplete search ended, in words."""
        if isinstance(self.stop, GapStop) and self.stop.reached:
            return "the gap"
        return "an interrupt" if self.stopped() else "the time limit"


def require_limits(limits: Limits) -> Limits:
    """``limits``, if a person may ask for them.

    Raises
    ------
    InputError
        If there is no time, or endless time; no thread, or more than any machine has; or if the
        seed is none that all solvers take.
    """
    units.require_number(limits.seconds, "time_limit")
    if not units.is_finite(limits.seconds) or limits.seconds <= 0:
        raise InputError(f"time_limit must be a positive number of seconds, got {limits.seconds}")
    units.require_count(limits.threads, "threads", _MAX_THREADS)
    units.require_seed(limits.seed, "seed")
    units.parse_share(limits.gap, "gap")
    return limits


class Bounded:
    """A result with the cost of the best answer found, None without one, and a bound on all."""

    __slots__ = ()
    cost: float | None
    bound: float

    @property
    def gap(self) -> float | None:
        """(cost - bound) / cost."""
        if self.cost is None:
            return None
        return (self.cost - self.bound) / self.cost if self.cost > self.bound else 0.0


@dataclass(frozen=True, slots=True)
class Progress:
    """An improvement while a backend works: the incumbent and the bound, after ``seconds``.

    ``plans`` is the class of plans that the bound is proved for; None: it is not known here.
    ``best()`` is the incumbent itself where the search has it at hand: of a planner it is the best
    plan so far, assembled, checked and certified when it is asked for. ``doing`` says what is done
    before the search, such as the kernel that is compiled: then there is no other news.
    """

    seconds: float
    objective: float | None
    bound: float
    best: Callable[[], Any] | None = field(default=None, compare=False)
    plans: "PlanClass | None" = None
    doing: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Answer(Generic[V]):
    """A backend's answer. ``values`` is None exactly if nothing feasible was found.

    ``bound`` bounds the form's optimum from below when minimising (from above when maximising).
    ``duals`` has one number per row of a linear program without integers that was solved.
    """

    status: Status
    values: V | None
    objective: float | None
    bound: float
    seconds: float
    backend: str
    log: str = ""
    progress: tuple[Progress, ...] = ()
    duals: Floats | None = None


OnProgress = Callable[[Progress], None]


def silent(_: Progress) -> None:
    """Report progress to nobody."""
