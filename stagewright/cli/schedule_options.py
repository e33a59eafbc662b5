"""Options of ``schedule`` that are lists of numbers, as the fields of a request."""

import math
import re
from typing import TYPE_CHECKING, Any, TypeVar

from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.cli.schedules import ScheduleOptions

T = TypeVar("T")


def read_stages(given: "ScheduleOptions", microbatches: int) -> dict[str, Any]:
    """The fields of a request."""
    stages, in_flight = given.stages, given.in_flight
    from stagewright.graphs.documents.units import MAX_LAYERS, MAX_MICROBATCHES, require_count

    require_count(stages, "--stages", MAX_LAYERS)
    require_count(microbatches, "--microbatches", MAX_MICROBATCHES)
    return {
        "transfers": tuple(_numbers("--transfer", given.transfer)),
        "device": _read_devices(given.stage_devices, stages),
        "memory": _read_memory(given.memory_limit),
        **_read_times(given.times, stages),
        **_read_saved(given.saved or [], stages),
        **({} if in_flight is None else {"in_flight": _read_in_flight(in_flight, stages)}),
    }


def _read_memory(text: str | None) -> tuple[float, ...]:
    return () if text is None else tuple(_numbers("--memory-limit", text))


def _read_times(times: list[str], stages: int) -> dict[str, Any]:
    columns = _columns("--times", times, stages, {2: "F,B", 3: "F,I,W"})
    return {
        "forward": columns[0],
        "backward": columns[1],
        "weight_gradient": columns[2] if len(columns) == 3 else (),
    }


def _read_saved(saved: list[str], stages: int) -> dict[str, Any]:
    """What forwards save, and how much of it input gradients free: the rest is for W."""
    if not saved:
        return {}
    columns = _columns("--saved", saved, stages, {1: "f", 3: "f,i,w"})
    if len(columns) == 1:
        return {"saved": columns[0]}
    for s, (f, i, w) in enumerate(zip(*columns, strict=True)):
        if not math.isclose(f, i + w):
            raise InputError(
                f"--saved: stage {s}: I and W must give back what F adds, {f:g}, not {i:g} + {w:g}"
            )
    return {"saved": columns[0], "freed": columns[1]}


def _read_in_flight(text: str, stages: int) -> tuple[int, ...]:
    limits = _numbers("--in-flight", text)
    for limit in limits:
        if not (limit.is_integer() and limit >= 1):
            raise InputError(f"--in-flight must be whole numbers from 1, got {limit:g}")
    return tuple(int(n) for n in _per_place("--in-flight", limits, stages, "stage"))


def _read_devices(text: str | None, stages: int) -> tuple[int, ...]:
    if text is None:
        return ()
    devices = _numbers("--stage-devices", text)
    for device in devices:
        if not (device.is_integer() and device >= 0):
            raise InputError(f"--stage-devices must be whole numbers from 0, got {device:g}")
    if len(devices) != stages:
        raise InputError(
            f"--stage-devices needs {stages} values, one per stage; got {len(devices)}"
        )
    return tuple(map(int, devices))


def _columns(
    option: str, texts: list[str], stages: int, forms: dict[int, str]
) -> list[tuple[float, ...]]:
    """Groups of numbers, one or one per stage, as a column per number; ``forms`` by their size."""
    rows = [_numbers(option, row) for text in texts for row in text.replace(";", " ").split()]
    for row in rows:
        if len(row) not in forms or len(row) != len(rows[0]):
            which = " or ".join(f"{form} for every stage" for form in forms.values())
            raise InputError(f"{option}: {len(row)} numbers; write {which}")
    return list(zip(*_per_place(option, rows, stages, "stage"), strict=True))


def _numbers(option: str, text: str) -> list[float]:
    """Numbers separated by commas or spaces."""
    try:
        return [float(part) for part in re.split(r"\s*,\s*|\s+", text.strip())]
    except ValueError:
        raise InputError(f"{option}: {text!r} is no list of numbers") from None


def _per_place(option: str, values: list[T], size: int, places: str) -> list[T]:
    """``values``, one per place; a single one is used for all places."""
    if len(values) == 1:
        return values * size
    if len(values) != size:
        raise InputError(f"{option} needs one value or {size}, one per {places}; got {len(values)}")
    return values
