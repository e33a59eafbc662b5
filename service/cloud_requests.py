"""The request about renting cloud instances."""

from typing import Self

from pydantic import model_validator

from stagewright.formulations.cloud.strategies import STRATEGIES, Home
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_count
from stagewright.graphs.workloads.prices import HOUR, MAX_GPUS, Market, Preemptions
from stagewright.service.requests import Request, require_positive

ALL, OPTIMAL, ROLLING = "all", "optimal", "rolling"


class CloudRequest(Request):
    """Compare ways of renting cloud GPUs for a job.

    Parameters
    ----------
    rates
        Work per hour of each kind of GPU; a V100 does 1.
    start_seconds
        When the job may start, since 1970 (UTC). None: as soon as every price is known.
    deadline_hours
        Hours after the start. None: as long as every price is known.
    preemptions, checkpoint_every_seconds
        With both, rates are reduced by preemptions as often as these logs show.
    home
        Provider and region of the strategies that know only one.
    """

    market: Market
    rates: dict[str, float]
    v100_hours: float = 96.0
    gpus: int = 1
    strategy: str = "all"
    start_seconds: float | None = None
    deadline_hours: float | None = None
    checkpoint_seconds: float = 0.0
    restore_seconds: float = 0.0
    egress_dollars: float = 0.0
    dataset_dollars: float = 0.0
    preemptions: Preemptions | None = None
    checkpoint_every_seconds: float | None = None
    home: str = "aws/us-east-1"

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
