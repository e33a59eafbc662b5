"""The answer about renting cloud instances."""

from typing import TYPE_CHECKING, Annotated, Any

from stagewright.formulations.forms.answers import Status
from stagewright.service.answers import CARRIED, Answer, Finite

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
