"""What every answer is: the fields that ``--json`` prints, and beside them the domain's objects.

``answer.model_dump(mode="json")`` is the JSON object. What an answer carries for users of Python
(a plan, an allocation, a timeline) is in none of it.
"""

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Answer(BaseModel):
    """Base of all answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def json_object(self) -> dict[str, Any]:
        """The answer as plain data."""
        return self.model_dump(mode="json")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Finite = Annotated[float | None, BeforeValidator(_finite)]
"""A number that JSON can hold; what is not finite becomes None."""

CARRIED = Field(exclude=True, repr=False)
"""Marks what an answer carries for users of Python; it is neither validated nor written."""


class InvalidAnswer(Answer):
    """A plan that cannot be run, and why."""

    status: str = "invalid"
    reason: str
