"""The base of all answers: the fields that ``--json`` prints, and objects for users of Python.

``answer.model_dump(mode="json")`` is the JSON object; it does not contain the objects for users of
Python (a plan, an allocation, a timeline).
"""

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from stagewright.graphs.documents.errors import InputError


class Answer(BaseModel):
    """Base of all answers; a field that is an answer is made of any object with its fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", from_attributes=True, populate_by_name=True
    )

    @classmethod
    def of(cls, *sources: object, **fields: Any) -> Self:
        """The answer of ``fields``, and of the attributes of ``sources`` with the other names."""
        for name in cls.model_fields.keys() - fields.keys():
            for source in sources:
                if hasattr(source, name):
                    fields[name] = getattr(source, name)
                    break
        return cls(**fields)

    def json_object(self) -> dict[str, Any]:
        """The answer as plain data."""
        return self.model_dump(mode="json")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Finite = Annotated[float | None, BeforeValidator(_finite)]
"""A JSON number; values that are not finite become None."""

CARRIED = Field(exclude=True, repr=False)
"""Marks a field for users of Python; it is neither validated nor serialised."""


@dataclass(frozen=True, slots=True)
class AnswerTable:
    """A titled table of an answer; names of columns of text begin with ``<``."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def filled(self) -> dict[str, Any]:
        """What the page's script reads, without columns that are empty."""
        kept = [i for i in range(len(self.head)) if any(row[i] for row in self.rows)]
        return {
            "title": self.title,
            "head": [self.head[i] for i in kept],
            "rows": [[row[i] for i in kept] for row in self.rows],
        }


@dataclass(frozen=True, slots=True)
class ShownAnswer:
    """What a notebook shows of an answer: a few lines, a table, and the rows of a frame."""

    lines: Sequence[str]
    table: AnswerTable
    rows: Sequence[dict[str, Any]]


class NotebookAnswer(Answer):
    """An answer that prints as a few lines; a notebook shows its table too."""

    def shown(self) -> ShownAnswer:
        """What is shown."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return "\n".join(self.shown().lines)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        shown = self.shown()
        names = (name.removeprefix("<") for name in shown.table.head)
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in shown.table.rows)
        return (
            f"<pre>{escape(repr(self))}</pre><table><thead><tr>"
            f"{''.join(f'<th>{escape(name)}</th>' for name in names)}</tr></thead><tbody>"
            f"{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"
        )

    def to_frame(self) -> Any:
        """The rows of the answer as a ``DataFrame`` of pandas; see `frame_of`."""
        return frame_of(self.shown().rows)


def frame_of(rows: Sequence[dict[str, Any]]) -> Any:
    """Rows as a ``DataFrame`` of pandas.

    Raises
    ------
    InputError
        If pandas is not installed.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        raise InputError("to_frame needs pandas: pip install pandas") from None
    return pandas.DataFrame(rows)


class InvalidAnswer(Answer):
    """A plan that cannot be run, with the reason."""

    status: str = "invalid"
    reason: str


class ExportAnswer(Answer):
    """The files of an exported plan, and what the format does not say; or why there are none."""

    status: str
    reason: str | None = None
    files: tuple[str, ...] | None = None
    remarks: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The mean loss of the mini-batches that are held out, after a step."""

    step: int
    loss: Finite


class TrainedAnswer(Answer):
    """A training run by a plan: the loss and the seconds of its steps, and its evaluations."""

    status: str = "trained"
    steps: int
    loss: Finite
    losses: tuple[Finite, ...]
    evaluations: tuple[Evaluated, ...] = ()
    iteration_seconds: float
    seconds: float
    world_size: int


class RoundAnswer(Answer):
    """A plan that was carried out for some steps."""

    planner: str
    predicted_seconds: float
    measured_seconds: float
    kept: bool


class TrainedRoundsAnswer(Answer):
    """A training run by plans from its own measurements; ``best`` is the round of the last plan.

    ``iteration_seconds`` is the median of the steps after the rounds.
    """

    status: str = "trained"
    rounds: tuple[RoundAnswer, ...]
    best: int
    steps: int
    loss: Finite
    losses: tuple[Finite, ...]
    iteration_seconds: float
    world_size: int
    folder: str
