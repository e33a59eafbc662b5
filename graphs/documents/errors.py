"""The exception for bad input, and the warning about a result that differs from the expected."""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """Invalid input; the message is one line with the place and the remedy."""


class InvalidPlan(ValueError):  # noqa: N818 - the design's name
    """A plan that breaks a rule of its problem; the message names the first broken rule."""


class Notice(UserWarning):
    """Warning about a result that was computed in an unexpected way; commands print one line."""


@contextmanager
def naming(place: object) -> Iterator[None]:
    """Begin the message of an InputError with the place of the input, such as a file."""
    try:
        yield
    except InputError as error:
        error.args = (f"{place}: {error}",)
        raise
