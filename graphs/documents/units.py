"""Parse and format quantities with units."""

import math
import re
import reprlib
from contextlib import suppress
from numbers import Real

from pydantic import ByteSize, TypeAdapter, ValidationError

from stagewright.graphs.documents.errors import InputError

MIN_BANDWIDTH = 1e6  # bytes/s; anything below is a number of GB/s without its unit
MIN_MEMORY = 1e6  # bytes

# Far above any real training run, and low enough that arrays of this size fit in memory.
MAX_MICROBATCHES = 65_536
MAX_DEVICES = 16_384
MAX_LAYERS = 16_384

MAX_LATENCY = 1.0  # seconds; anything above is a number of us without its unit

_BYTES = TypeAdapter(ByteSize)
_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}


def parse_bytes(text: str) -> float:
    """Bytes in ``text``: ``16GB``, ``16GiB``, ``16e9``.

    Raises
    ------
    InputError
        If ``text`` is not a size, or is negative.
    """
    try:
        value = _plain_or_bytes(text)
    except ValidationError:
        raise InputError(f"{text!r} is not a size; write for example 16GB or 16GiB") from None
    require_amount(value, f"size {text!r}")
    return value


def parse_bandwidth(text: str) -> float:
    """Bytes per second in ``text``: ``12.5GB/s``, ``100Gbps``, ``100Gbit/s``, ``12.5e9``.

    Raises
    ------
    InputError
        If ``text`` is not a bandwidth, or so small that its unit must be missing.
    """
    size = re.sub(r"(?i)bps$", "bit", text.strip())
    size = re.sub(r"(?i)/s(ec)?$", "", size)
    try:
        value = _plain_or_bytes(size)
    except ValidationError:
        raise InputError(
            f"{text!r} is not a bandwidth; write for example 12.5GB/s or 100Gbps"
        ) from None
    require_bandwidth(value, f"bandwidth {text!r}")
    return value


def parse_latency(text: str, name: str) -> float:
    """Seconds in ``text``: ``5us``, ``0.2 ms``; ``name`` is what it is of, for messages.

    Raises
    ------
    InputError
        If ``text`` is not a time with its unit, is negative, or above a second.
    """
    number, unit = re.fullmatch(r"(.*?)\s*([a-zµ]*)", text.strip(), re.IGNORECASE | re.S).groups()  # type: ignore[union-attr]
    try:
        value = float(number)
    except ValueError:
        raise InputError(f"{name} {text!r} is not a latency; write for example 5us") from None
    if value and unit.lower() not in _PER_SECOND:
        known = "has no unit" if not unit else f"has an unknown unit, {unit}"
        raise InputError(f"{name} {text!r} {known}; write for example 5us, 0.2ms or 500ns")
    seconds = value / _PER_SECOND.get(unit.lower(), 1.0)
    if not 0 <= seconds <= MAX_LATENCY:
        raise InputError(f"{name} must be from 0 to 1 s, such as 5us, got {text}")
    return seconds


def counted(number: int, one: str, several: str) -> str:
    """``1 stage``, ``2 stages``."""
    return f"{number} {one if number == 1 else several}"


def parse_share(value: str | float, name: str) -> float:
    """A share of a whole from ``1%``, ``0.01`` or a number.

    Raises
    ------
    InputError
        If it is not from 0 to 1 (100 %).
    """
    share = math.nan
    if isinstance(value, str):
        text = value.strip()
        with suppress(ValueError):
            share = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    else:
        require_number(value, name)
        share = float(value)
    if not 0 <= share <= 1:
        raise InputError(f"{name} must be from 0 to 100%, such as 1% or 0.01, got {value!r}")
    return share


def _plain_or_bytes(text: str) -> float:
    """A plain number in any notation, or else a size that pydantic reads (``16GB``)."""
    try:
        return float(text)
    except ValueError:
        return float(_BYTES.validate_python(text))


def require_bandwidth(value: float, place: str) -> None:
    """Refuse a bandwidth (bytes/s) that is not finite and positive, or that lacks its unit."""
    require_number(value, place)
    if not math.isfinite(value) or value <= 0:
        raise InputError(f"{place} must be positive and finite, got {value:g} bytes/s")
    if value < MIN_BANDWIDTH:
        raise InputError(
            f"{place} is {value:g} bytes/s, less than 1 MB/s: is a unit missing? "
            f"Write {value:g}GB/s on the command line, {value * 1e9:g} in a file"
        )


def require_count(value: int, name: str, most: int) -> None:
    """Refuse a count below 1, or implausibly large."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{name} must be a whole number, got {value!r}")
    if value < 1:
        raise InputError(f"{name} must be at least 1, got {value}")
    if value > most:
        raise InputError(f"{name} must be at most {most}, got {value}")


def require_amount(value: float, place: str) -> None:
    """Refuse a time, size or rate that is not a number, is negative or not finite."""
    if type(value) is float and 0.0 <= value < math.inf:
        return  # the common case, quickly
    require_number(value, place)
    if not is_finite(value) or value < 0:
        raise InputError(f"{place} must be finite and not negative, got {value}")


def require_number(value: float, place: str) -> None:
    """Refuse a value that is not a real number, such as a size with its unit."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InputError(f"{place} must be a number, got {reprlib.repr(value)}")


def require_seed(value: int, name: str) -> None:
    """Refuse a seed that some generator or solver does not accept."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise InputError(f"{name} must be from 0 to {2**31 - 1}, got {reprlib.repr(value)}")


def is_finite(value: float) -> bool:
    """Whether ``value`` is a number that a float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def require_type(value: object, kind: type, name: str) -> None:
    """Refuse an argument of another type than ``kind``."""
    if not isinstance(value, kind):
        found = type(value).__name__
        raise InputError(f"{name} must be a {kind.__name__}, got {reprlib.repr(value)} ({found})")


def format_bytes(value: float) -> str:
    """``value`` bytes as text with decimal units."""
    unit, scale = byte_unit(value)
    return f"{value / scale:.3g} {unit}" if scale > 1 else f"{value:.0f} B"


def byte_unit(value: float) -> tuple[str, float]:
    """The decimal unit in which ``value`` bytes are at least 1, and its bytes."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    return next(((unit, scale) for unit, scale in units if abs(value) >= scale), ("B", 1.0))


def format_seconds(value: float) -> str:
    """``value`` seconds as text with a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value:.4g} s"
