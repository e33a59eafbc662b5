"""The request about renting cloud instances, and its answer."""

import datetime
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import model_validator

from stagewright.formulations.cloud.strategies import STRATEGIES, Home
from stagewright.formulations.forms.answers import Status
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_count
from stagewright.graphs.workloads.prices import HOUR, MAX_GPUS, Market, Preemptions
from stagewright.service.answers import CARRIED, Answer, Finite
from stagewright.service.options import Option
from stagewright.service.requests import Request, require_positive

if TYPE_CHECKING:
    from stagewright.formulations.cloud.switching import Plan, SwitchingProblem
else:  # carried, not validated
    Plan = SwitchingProblem = Any


class StrategyAnswer(Answer):
    """Cost, duration and number of switches of a strategy."""

    dollars: float
    seconds: float
    switches: int


class StayAnswer(Answer):
    """A stay of the job on ``count`` instances of one kind, in UTC."""

    instance: str
    count: int
    begin: str
    end: str
    dollars: float


class CloudAnswer(Answer):
    """The cost of each strategy, None if it is late; the plan is that of the last strategy.

    If ``status`` is ``interrupted``, strategies may be missing.
    """

    status: Status
    v100_hours: float
    gpus: int
    start: str
    deadline: str
    instances: int
    reason: str | None
    bound_dollars: Finite
    gap: Finite
    proved_by: str | None
    wall_seconds: Finite
    strategies: dict[str, StrategyAnswer | None]
    plan: tuple[StayAnswer, ...] | None
    problem: Annotated[SwitchingProblem, CARRIED]
    stays: Annotated[Plan | None, CARRIED]

    @property
    def shown(self) -> str:
        """The strategy whose plan this is."""
        return list(self.strategies)[-1]


ALL, OPTIMAL, ROLLING = "all", "optimal", "rolling"


def seconds_of(text: str, name: str) -> float:
    """Seconds since 1970 of a time in ISO 8601; UTC if no zone is given."""
    try:
        at = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise InputError(f"{name}: {text!r} is no time; write 2020-03-01T12:00") from None
    return at.replace(tzinfo=at.tzinfo or datetime.UTC).timestamp()


class CloudRequest(Request):
    """Compare ways of renting cloud GPUs for a job."""

    market: Market
    """The prices."""
    rates: dict[str, float]
    """Work per hour of each kind of GPU; a V100 does 1."""
    v100_hours: float = 96.0
    """The work: hours on as many V100s as the job has GPUs."""
    gpus: Annotated[int, Option(form="N")] = 1
    """GPUs of the job; instances are rented whole."""
    strategy: str = "all"
    """1xv100 (instances of one V100), gpu-type, multi-gpu, multi-cloud, dynamic; rolling (replans
    on constant forecasts), optimal (knows all prices); or all."""
    start_seconds: Annotated[float | None, Option("--start", of_text=seconds_of)] = None
    """Earliest start of the job, UTC (a number: seconds since 1970); default: once all prices are
    known."""
    deadline_hours: float | None = None
    """Hours after the start; default: until the first price series ends."""
    checkpoint_seconds: float = 0.0
    """Paid time before leaving an instance, to write the checkpoint."""
    restore_seconds: float = 0.0
    """Paid time on every new instance, to boot it and load the checkpoint."""
    egress_dollars: float = 0.0
    """Dollars for a checkpoint that leaves its region."""
    dataset_dollars: float = 0.0
    """Dollars for a copy of the dataset to each provider after the first."""
    preemptions: Preemptions | None = None
    """How long instances were up: rates are reduced by preemptions as often as these show."""
    checkpoint_every_seconds: Annotated[
        float | None, Option("--preempted", form="CHECKPOINT_EVERY_SECONDS")
    ] = None
    """Account for preemptions as in the logs, with checkpoints at this interval."""
    home: str = "aws/us-east-1"
    """Provider and region of the strategies that use only one."""

    @model_validator(mode="after")
    def _require_sense(self) -> Self:
        require_count(self.gpus, "gpus", MAX_GPUS)
        strategies(self.strategy)
        home_of(self.home)
        require_positive(self.v100_hours, "v100_hours", "more than zero")
        if self.deadline_hours is not None:
            require_positive(self.deadline_hours, "deadline_hours", "more than zero")
        if (self.preemptions is None) != (self.checkpoint_every_seconds is None):
            raise InputError("give preemptions and checkpoint_every_seconds together")
        return self

    @property
    def deadline_seconds(self) -> float | None:
        """Length of the time until the deadline."""
        return None if self.deadline_hours is None else HOUR * self.deadline_hours


def strategies(name: str) -> list[str]:
    """The strategies that ``name`` asks for, the optimum last."""
    known = [*STRATEGIES, ROLLING, OPTIMAL]
    if name == ALL:
        return known
    if name not in known:
        raise InputError(f"strategy: {name!r} is none of {', '.join([*known, ALL])}")
    return [name]


def home_of(text: str) -> Home:
    """The place that ``text`` names."""
    provider, _, region = text.partition("/")
    if not (provider and region):
        raise InputError(f"home: {text!r} is no place; write provider/region: aws/us-east-1")
    return Home(provider, region)
