"""The drawn periods of a periodic plan, and their phases."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stagewright.formulations.plans.actions import (
    PLANNED,
    Action,
    Operation,
    parse_action,
    parse_operation,
)
from stagewright.formulations.plans.periodic import iteration_seconds as iteration_of
from stagewright.formulations.plans.periodic import unroll_run, warm_up_periods
from stagewright.formulations.plans.plan import (
    PeriodicAction,
    PeriodicSchedule,
    PipelinePlan,
    ScheduledAction,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_seconds

_WHOLE_PERIODS = 4  # drawn at least, to show the repetition


_MAX_DRAWN_ACTIONS = 1_000_000


Span = tuple[str, float, float]
"""A name, and its start and end in seconds."""


@dataclass(frozen=True, slots=True)
class Phases:
    """The periods of the drawn run of a periodic plan.

    Every operation runs in the periods ``first`` to ``last``; before them the pipeline fills, after
    them it drains, until ``finish_seconds``. Before each period whose number is a multiple of
    ``microbatches`` there is a pause for the updates.
    """

    period_seconds: float
    pause_seconds: float
    microbatches: int
    first: int
    last: int
    finish_seconds: float

    def _begin(self, period: int) -> float:
        return period * self.period_seconds + period // self.microbatches * self.pause_seconds

    @property
    def bounds(self) -> tuple[float, ...]:
        """Starts of the whole periods, and the end of the last, in seconds."""
        begins = (self._begin(i) for i in range(self.first, self.last + 1))
        return (*begins, self._begin(self.last) + self.period_seconds)

    @property
    def spans(self) -> tuple[Span, ...]:
        """Warm-up, numbered periods, pauses and drain, without those of zero length."""
        between = list[Span]()
        for i in range(self.first, self.last + 1):
            begin = self._begin(i)
            if i > self.first and i % self.microbatches == 0:
                between.append(("updates", begin - self.pause_seconds, begin))
            between.append((f"period {i}", begin, begin + self.period_seconds))
        ends = [("warm-up", 0.0, self.bounds[0]), ("drain", self.bounds[-1], self.finish_seconds)]
        return tuple(span for span in (ends[0], *between, ends[1]) if span[1] < span[2])

    @property
    def headings(self) -> tuple[Span, ...]:
        """Headings as :attr:`spans`, but of one period, in the middle, named with its length."""
        period = f"period {format_seconds(self.period_seconds)}"
        begin = self._begin((self.first + self.last) // 2)
        middle = (period, begin, begin + self.period_seconds)
        ends = (span for span in self.spans if span[0] in ("warm-up", "drain"))
        return (middle, *ends)


def drawn(plan: PipelinePlan) -> PipelinePlan:
    """The finite plan that is drawn: ``plan``, or a run of a periodic plan.

    Raises InputError if the schedule's actions do not belong to the plan's stages and devices, or
    their index shifts are so large that the run is too long to draw.
    """
    require_places(plan)
    if not isinstance(plan.schedule, PeriodicSchedule):
        return plan
    microbatches = _drawn_microbatches(plan.schedule)
    if microbatches * len(plan.schedule.actions) > _MAX_DRAWN_ACTIONS:
        raise InputError(
            f"schedule: {len(plan.schedule.actions)} actions with index shifts of up to "
            f"{warm_up_periods(plan.schedule)} periods are too many to be drawn"
        )
    return unroll_run(plan, microbatches)


def phases(plan: PipelinePlan) -> Phases | None:
    """The periods that are drawn; None for a finite plan."""
    schedule = plan.schedule
    if not isinstance(schedule, PeriodicSchedule):
        return None
    return Phases(
        period_seconds=schedule.period_seconds,
        pause_seconds=schedule.pause_seconds,
        microbatches=plan.microbatches,
        first=warm_up_periods(schedule),
        last=_drawn_microbatches(schedule) - 1,
        finish_seconds=finish_seconds(plan),
    )


def _drawn_microbatches(schedule: PeriodicSchedule) -> int:
    """The number of microbatches whose whole periods are as long as warm-up and drain."""
    fill = warm_up_periods(schedule)
    return fill + max(_WHOLE_PERIODS, fill)


def finish_seconds(plan: PipelinePlan) -> float:
    """End of the last drawn action; 0 for an empty schedule."""
    finite = drawn(plan) if plan.is_periodic else plan
    return max((action.finish_seconds for action in finite.actions), default=0.0)


def iteration_seconds(plan: PipelinePlan) -> float:
    """Seconds of an iteration: the end of its last action, or its periods and the pause."""
    if isinstance(plan.schedule, PeriodicSchedule):
        return iteration_of(plan.schedule, plan.microbatches)
    return finish_seconds(plan)


def require_places(plan: PipelinePlan) -> None:
    """Refuse schedule entries with a stage or device that is not the plan's."""
    parse: Callable[[str], Action | Operation] = (
        parse_operation if plan.is_periodic else parse_action
    )
    entries: Sequence[ScheduledAction | PeriodicAction] = plan.schedule.actions
    known: dict[str, Action | Operation] = {}
    devices = [frozenset(stage.devices) for stage in plan.stages]
    for i, entry in enumerate(entries):
        try:
            if entry.action not in known:
                known[entry.action] = parse(entry.action)
            _require_place(devices, known[entry.action], entry.device)
        except InputError as error:
            raise InputError(f"schedule.actions[{i}]: {error}") from None


def _require_place(
    devices: Sequence[frozenset[str]], action: Action | Operation, device: str
) -> None:
    if action.kind not in PLANNED:
        raise InputError(f"{action} belongs to programs, not to plans")
    if action.stage >= len(devices):
        raise InputError(f"{action} has stage {action.stage}, the plan has {len(devices)} stages")
    if device not in devices[action.stage]:
        raise InputError(
            f"{action} runs on {device!r}, which is not a device of stage {action.stage}"
        )
