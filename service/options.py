"""How the fields of requests are spelled on a command line, where names and types do not say it."""

from collections.abc import Callable, Sequence
from typing import Any

from stagewright.graphs.documents.errors import InputError


class Option:
    """The option, or the argument, of a field.

    Parameters
    ----------
    names
        Of the option, such as ``--output`` and ``-o``; a name without dashes is an argument's. By
        default the field's name.
    form
        What a value looks like, such as ``SIZE``. A choice with a form may be any text: the request
        refuses a wrong one.
    of_text, of_file
        Makes the field's value of the option's text and its name, or of the file that it names.
    known
        The texts that there are; any text by default.
    may_be_file
        Whether the text may name a file.
    default
        The text where the option is not given; without it the field has its own default then.
    env
        A variable of the environment that has the value where the option is not given.
    """

    def __init__(
        self,
        *names: str,
        form: str | None = None,
        of_text: Callable[[str, str], Any] | None = None,
        of_file: Callable[[Any], Any] | None = None,
        known: Sequence[str] = (),
        may_be_file: bool = False,
        default: str | None = None,
        env: str | None = None,
    ) -> None:
        self.names, self.form, self.known = names, form, known
        self.of_text, self.of_file = of_text, of_file
        self.may_be_file, self.default, self.env = may_be_file, default, env


def itself(text: str, _: str) -> str:
    """The text as it is."""
    return text


def number_or_auto(text: str, option: str) -> int | None:
    """A number; None for ``auto``."""
    if text == "auto":
        return None
    if not text.isdecimal():
        raise InputError(f"{option} must be auto or a number, got {text!r}")
    return int(text)


def listed(read: Callable[[str, str], Any]) -> Callable[[str, str], tuple[Any, ...]]:
    """A function that reads values separated by commas, each by ``read``."""

    def values(text: str, option: str) -> tuple[Any, ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise InputError(f"{option} {text!r} has an empty entry")
        return tuple(read(part, option) for part in parts)

    return values


def whole(text: str, option: str) -> int:
    """A whole number of a list."""
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"{option}: {text!r} is no whole number; write for example 4,8,16"
        ) from None


def one_or_several(text: str, option: str) -> int | tuple[int, ...]:
    """A number, or numbers such as ``8,24,64``, or ``8-64``: each twice the one before."""
    first, dash, last = text.partition("-")
    found = [whole(part, option) for part in ([first, last] if dash else text.split(","))]
    if min(found) < 1:
        raise InputError(f"{option} must be at least 1, got {min(found)}")
    if dash and found[0] > found[1]:
        raise InputError(f"{option} {text!r} goes down; write for example 8-1024")
    if dash:
        doublings = range((found[1] // found[0]).bit_length())
        found = [*(found[0] << n for n in doublings), found[1]]
    numbers = tuple(sorted(set(found)))
    return numbers[0] if len(numbers) == 1 else numbers


def whole_numbers(text: str, option: str) -> tuple[int, ...]:
    """Numbers separated by commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{option} must be whole numbers such as 2,1,1, got {text!r}") from None
