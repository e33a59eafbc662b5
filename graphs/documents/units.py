"""Parse and format quantities with units."""

import math
import re
import reprlib
from collections.abc import Mapping
from contextlib import suppress
from numbers import Real

from stagewright.graphs.documents.errors import InputError

MIN_BANDWIDTH = 1e6  # bytes/s; anything below is a number of GB/s without its unit
MIN_MEMORY = 1e6  # bytes

# Far above any real training run, and low enough that arrays of this size fit in memory.
MAX_MICROBATCHES = 65_536
MAX_DEVICES = 16_384
MAX_LAYERS = 16_384

_MAX_LATENCY = 1.0  # seconds; anything above is a number of us without its unit

_PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}
_PER_SECOND |= {unit.upper(): count for unit, count in _PER_SECOND.items()}

_DURATIONS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}

_SCALES = {"": 1.0, "k": 1e3, "K": 1e3} | {
    prefix + binary: float(base**power)
    for power, prefix in enumerate("KMGTP", start=1)
    for binary, base in (("", 1000), ("i", 1024))
}
_SIZES = {prefix + unit: scale for prefix, scale in _SCALES.items() for unit in ("B", "bytes")}
_SIZES |= {unit.lower(): scale for unit, scale in _SIZES.items()}  # memory is not counted in bits

# A capital B is bytes and a small b bits, as network cards are named. Only where the word, or the
# spelling bps, says bits may the prefix be small too: gb/s may be either.
_RATES = {
    prefix + unit + second: scale / bits
    for prefix, scale in _SCALES.items()
    for unit, bits in (("B", 1), ("bytes", 1), ("b", 8), ("bit", 8), ("bits", 8))
    for second in ("/s", "/sec", "ps")
}
_RATES |= {unit.lower(): rate for unit, rate in _RATES.items() if re.search("bps|bit", unit)}


def parse_bytes(text: str, name: str) -> float:
    """Bytes in ``text``: ``16GB``, ``16GiB``; ``name`` is what it is of, for messages.

    Raises InputError if ``text`` is not a size with its unit, is in bits (``16Gb``), or is
    negative.
    """
    number, unit = _quantity(text, name, "size", _SIZES, "80GB or 80GiB")
    value = number * _SIZES.get(unit, 1.0)
    require_amount(value, f"{name} {text!r}")
    return value


def parse_bandwidth(text: str, name: str) -> float:
    """Bytes per second in ``text``: ``12.5GB/s``, or in bits ``100Gb/s``, ``100Gbps``.

    Raises InputError if ``text`` is not a bandwidth with its unit, or may be of bits or bytes
    (``100gb/s``).
    """
    example = "25GB/s (bytes) or 200Gb/s (bits)"
    number, unit = _quantity(text, name, "bandwidth", _RATES, example)
    value = number * _RATES.get(unit, 1.0)
    require_bandwidth(value, f"{name} {text!r}")
    return value


def parse_latency(text: str, name: str) -> float:
    """Seconds in ``text``: ``5us``, ``0.2 ms``.

    Raises InputError if ``text`` is not a time with its unit, is negative, or above a second.
    """
    number, unit = _quantity(text, name, "latency", _PER_SECOND, "5us, 0.2ms or 500ns")
    seconds = number / _PER_SECOND.get(unit, 1.0)
    if not 0 <= seconds <= _MAX_LATENCY:
        raise InputError(f"{name} must be from 0 to 1 s, such as 5us, got {text}")
    return seconds


def parse_duration(text: str, name: str) -> float:
    """Seconds in ``text``: ``90s``, ``10min``, ``50000h``, ``30d``.

    Raises InputError if ``text`` is not a time with its unit, or is negative.
    """
    number, unit = _quantity(text, name, "time", _DURATIONS, "90s, 10min, 12h or 30d")
    seconds = number * _DURATIONS.get(unit, 1.0)
    require_amount(seconds, f"{name} {text!r}")
    return seconds


def format_duration(value: float) -> str:
    """``value`` seconds as text, in minutes, hours or days where they are at least two."""
    for unit in ("d", "h", "min"):
        if value >= 2 * _DURATIONS[unit]:
            return f"{value / _DURATIONS[unit]:,.1f} {unit}"
    return format_seconds(value)


def _quantity(
    text: str, name: str, what: str, units: Mapping[str, float], examples: str
) -> tuple[float, str]:
    """The number in ``text`` and its unit, one of ``units``; 0 needs none."""
    number, unit = re.fullmatch(r"(.*?)\s*([a-zµ/]*)", text.strip(), re.IGNORECASE | re.S).groups()  # type: ignore[union-attr]
    try:
        value = float(number)
    except ValueError:
        problem = f"is not a {what}"
    else:
        if unit in units or not (unit or value):
            return value, unit
        problem = f"has an unknown unit, {unit}" if unit else "has no unit"
    raise InputError(f"{name} {text!r} {problem}; write for example {examples}")


def counted(number: int, one: str, several: str) -> str:
    """A number with its noun: ``1 stage``, ``2 stages``."""
    return f"{number} {one if number == 1 else several}"


def parse_share(value: str | float, name: str) -> float:
    """A share of a whole from ``1%``, ``0.01`` or a number.

    Raises InputError if it is not from 0 to 1 (100 %).
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


def require_bandwidth(value: float, place: str) -> None:
    """Refuse a bandwidth (bytes/s) that is not finite and positive, or that lacks its unit."""
    require_number(value, place)
    if not math.isfinite(value) or value <= 0:
        raise InputError(f"{place} must be positive and finite, got {value:g} bytes/s")
    if value < MIN_BANDWIDTH:
        raise InputError(
            f"{place} is {value:g} bytes/s, less than 1 MB/s: is a unit missing? "
            f"{value:g} GB/s is {value * 1e9:g}"
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


def require_positive(value: float | None, place: str) -> None:
    """Refuse a known value that is not a finite number above 0."""
    if value is None:
        return
    require_number(value, place)
    if not is_finite(value) or value <= 0:
        raise InputError(f"{place} must be finite and above 0, got {value}")


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
