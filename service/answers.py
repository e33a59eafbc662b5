"""The base of all answers: the fields that ``--json`` prints, and objects for users of Python.

``answer.model_dump(mode="json")`` is the JSON object; it does not contain the objects for users of
Python (a plan, an allocation, a timeline).
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
"""A JSON number; values that are not finite become None."""

CARRIED = Field(exclude=True, repr=False)
"""Marks a field for users of Python; it is neither validated nor serialised."""


class InvalidAnswer(Answer):
    """A plan that cannot be run, with the reason."""

    status: str = "invalid"
    reason: str
