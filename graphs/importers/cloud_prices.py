r"""Price and availability logs of three clouds (github.com/stanford-futuredata/training_on_a_dime).

A folder of logs holds any of ``aws/cost/REGION/*.json`` (output of ``aws ec2
describe-spot-price-history``; the files overlap), ``azure/cost/REGION.csv`` (a price per day and
instance) with ``azure/instance_mapping.csv``, ``gcp/spin_up_and_shut_down/*.out`` (static prices)
and ``PROVIDER/availability/*.out`` (instances created and preempted).
"""

import csv
import datetime
import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.documents import not_json
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.prices import Instance, Market, Preemptions, PriceSeries, Uptime

DAY = 86_400.0

_AWS_TYPES = {
    "p2.xlarge": ("k80", 1),
    "p2.8xlarge": ("k80", 8),
    "p2.16xlarge": ("k80", 16),
    "p3.2xlarge": ("v100", 1),
    "p3.8xlarge": ("v100", 4),
    "p3.16xlarge": ("v100", 8),
}
"""GPUs of AWS's instance types."""

_ON_DEMAND = {
    **{
        ("aws", region, name): price
        for region in ("us-east-1", "us-east-2", "us-west-2")
        for name, price in {
            "p2.xlarge": 0.90,
            "p2.8xlarge": 7.20,
            "p2.16xlarge": 14.40,
            "p3.2xlarge": 3.06,
            "p3.8xlarge": 12.24,
            "p3.16xlarge": 24.48,
        }.items()
    },
    ("azure", "us-east", "NC6"): 0.90,
    ("azure", "us-east", "NC6s v2"): 2.07,
    ("azure", "us-east", "NC6s v3"): 3.06,
}
"""List prices of 2020, dollars per hour, by provider, region and instance type."""


def read_cloud_logs(folder: str | os.PathLike[str]) -> Market:
    """All prices in a folder of logs.

    Raises InputError with file and place, if there are no logs, an instance type is unknown, a file
    is malformed or a price is missing on a day between others.
    """
    root = Path(folder)
    series: list[PriceSeries] = []
    if (root / "aws" / "cost").is_dir():
        series += read_aws(root / "aws" / "cost").series
    if (root / "azure" / "cost").is_dir():
        series += read_azure(root / "azure").series
    if (root / "gcp" / "spin_up_and_shut_down").is_dir():
        ends = [(one.from_seconds, one.until_seconds) for one in series]
        span = (min(e[0] for e in ends), max(e[1] for e in ends)) if ends else None
        series += read_gcp(root / "gcp" / "spin_up_and_shut_down", span).series
    if not series:
        raise InputError(
            f"{folder}: no price logs; expected aws/cost, azure/cost or gcp/spin_up_and_shut_down"
        )
    return Market(tuple(series))


# --- AWS -----------------------------------------------------------------------------------------


def read_aws(folder: str | os.PathLike[str]) -> Market:
    """AWS's spot prices from all files; a price holds until the next, or the last file's end."""
    points: dict[tuple[str, str], dict[float, float]] = {}
    for file in sorted(Path(folder).glob("**/*.json")):
        for number, entry in enumerate(_history(file)):
            place = f"{file}: SpotPriceHistory[{number}]: "
            zone, name, at, price = _aws_point(place, entry)
            known = points.setdefault((zone, name), {})
            if known.setdefault(at, price) != price:
                raise InputError(
                    f"{place}{name} in {zone} costs {price:g} at {entry['Timestamp']}, "
                    f"and {known[at]:g} elsewhere"
                )
    if not points:
        raise InputError(f"{folder}: no spot prices in its JSON files")
    until = max(at for known in points.values() for at in known) + 1.0
    return Market(
        tuple(
            _series(_aws_instance(zone, name), sorted(known.items()), until)
            for (zone, name), known in sorted(points.items())
        )
    )


def _read_json(path: str | os.PathLike[str]) -> Any:
    text = documents.read_text(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise InputError(f"{path}: {not_json(text, error)}") from None


def _history(file: Path) -> list[Any]:
    document = _read_json(file)
    history = document.get("SpotPriceHistory") if isinstance(document, dict) else None
    if not isinstance(history, list):
        raise InputError(f"{file}: no list SpotPriceHistory; expected spot prices of AWS")
    return history


def _aws_point(place: str, entry: Any) -> tuple[str, str, float, float]:
    try:
        zone, name = entry["AvailabilityZone"], entry["InstanceType"]
        at, price = entry["Timestamp"], entry["SpotPrice"]
    except (KeyError, TypeError):
        raise InputError(
            f"{place}expected AvailabilityZone, InstanceType, SpotPrice and Timestamp"
        ) from None
    if name not in _AWS_TYPES:
        raise InputError(f"{place}unknown instance type {name!r}; known: {', '.join(_AWS_TYPES)}")
    return str(zone), name, _timestamp(place, at), _dollars(place, price)


def _aws_instance(zone: str, name: str) -> Instance:
    region = zone.rstrip("abcdefghijklmnopqrstuvwxyz")
    gpu, gpus = _AWS_TYPES[name]
    return Instance("aws", region, name, gpu, gpus, zone, _ON_DEMAND.get(("aws", region, name)))


# --- Azure ---------------------------------------------------------------------------------------


def read_azure(folder: str | os.PathLike[str]) -> Market:
    """Azure's spot prices: ``cost/REGION.csv``, a price from each day's start (UTC) on."""
    types = _azure_types(Path(folder) / "instance_mapping.csv")
    series: list[PriceSeries] = []
    for file in sorted((Path(folder) / "cost").glob("*.csv")):
        series += _azure_region(file, types)
    if not series:
        raise InputError(f"{folder}: no prices in cost/*.csv")
    return Market(tuple(series))


def _azure_types(file: Path) -> dict[str, tuple[str, int]]:
    types = {}
    for line, row in _rows(file):
        try:
            types[row["Instance"]] = (row["GPU type"].lower(), int(row["# GPUs"]))
        except (KeyError, ValueError, AttributeError, TypeError):
            raise InputError(f"{file}:{line}: expected Instance, GPU type, # GPUs") from None
    return types


def _azure_region(file: Path, types: dict[str, tuple[str, int]]) -> Iterator[PriceSeries]:
    region = file.stem.replace("_", "-")
    rows = list(_rows(file))
    if not rows or "Date" not in rows[0][1]:
        raise InputError(f"{file}: expected a column Date and a row per day")
    days = [_day(f"{file}:{line}: ", row["Date"]) for line, row in rows]
    for name in (column for column in rows[0][1] if column != "Date"):
        if name not in types:
            raise InputError(f"{file}: unknown instance type {name!r}; known: {', '.join(types)}")
        cells = [(row[name] or "").strip() for _, row in rows]
        if not any(cells):
            continue  # not offered in this region
        points = []
        for (line, _), day, cell in zip(rows, days, cells, strict=True):
            points.append((day, _dollars(f"{file}:{line}: {name}: ", cell.removeprefix("$"))))
            if len(points) > 1 and day - points[-2][0] > DAY:
                raise InputError(f"{file}:{line}: days are missing before this one")
        gpu, gpus = types[name]
        listed = _ON_DEMAND.get(("azure", region, name))
        instance = Instance("azure", region, name, gpu, gpus, on_demand=listed)
        yield _series(instance, points, days[-1] + DAY)


def _rows(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a CSV file with their line numbers."""
    reader = csv.DictReader(io.StringIO(documents.read_text(file)))
    for row in reader:
        if None in row or None in row.values():
            raise InputError(
                f"{file}:{reader.line_num}: the number of cells differs from the header's"
            )
        yield reader.line_num, row


def _day(place: str, text: str) -> float:
    try:
        day = datetime.datetime.strptime(text, "%m/%d/%Y")
    except ValueError:
        raise InputError(f"{place}{text!r} is not a date; expected month/day/year") from None
    return day.replace(tzinfo=datetime.UTC).timestamp()


# --- GCP -----------------------------------------------------------------------------------------

_GCP_PRICE = re.compile(
    r"Zone: (?P<zone>\S+), GPU type: nvidia-tesla-(?P<gpu>\w+), "
    r"Number of GPUs: (?P<gpus>\d+), Price per hour: \$(?P<price>\S+)"
)


def read_gcp(folder: str | os.PathLike[str], span: tuple[float, float] | None = None) -> Market:
    """GCP's prices of preemptible instances.

    They are static (thesis, 6.2), so a price is assumed to hold over ``span`` (seconds; by default
    the time that the logs cover). Logs that contradict each other are refused.
    """
    prices: dict[tuple[str, str, int], float] = {}
    times = []
    for file in sorted(Path(folder).glob("*.out")):
        times.append(_timestamp(f"{file}: file name: ", file.stem))
        for number, line in enumerate(documents.read_text(file).splitlines(), 1):
            match = _GCP_PRICE.fullmatch(line.strip())
            if match is None:
                continue  # the state of an instance
            place = f"{file}:{number}: "
            key = (match["zone"], match["gpu"], int(match["gpus"]))
            price = _dollars(place, match["price"])
            if prices.setdefault(key, price) != price:
                raise InputError(f"{place}the price was {prices[key]:g} before; it is static")
    if not prices:
        raise InputError(f"{folder}: no line 'Zone: ..., GPU type: ..., Price per hour: ...'")
    begin, end = span or (min(times), max(times) + DAY)
    return Market(
        tuple(
            _series(
                Instance("gcp", zone.rpartition("-")[0], f"{gpu}x{gpus}", gpu, gpus, zone),
                [(begin, price)],
                end,
            )
            for (zone, gpu, gpus), price in sorted(prices.items())
        )
    )


# --- Availability --------------------------------------------------------------------------------

_LOGGED = re.compile(r"\[(?P<at>[^\]]+)\] (?P<what>.+)")
_CREATED = re.compile(
    r"Created instance (?P<id>\S+) with (?P<gpus>\d+) GPU\(s\) of type (?P<gpu>\S+) "
    r"in zone (?P<zone>\S+)"
)
_STATE = re.compile(r"Instance (?P<id>\S+) (?P<state>running|not running) in zone \S+")


@dataclass(frozen=True, slots=True)
class _Up:
    zone: str
    gpu: str
    gpus: int
    begin_seconds: float


def read_availability(folder: str | os.PathLike[str]) -> Preemptions:
    """The uptimes in ``PROVIDER/availability/*.out`` of a folder of logs.

    An instance counts as preempted when a check first finds it down; checks are up to 15 minutes
    apart.
    """
    uptimes: list[Uptime] = []
    for file in sorted(Path(folder).glob("*/availability/*.out")):
        uptimes += _uptimes(file, file.parent.parent.name)
    if not uptimes:
        raise InputError(f"{folder}: no instance is created in PROVIDER/availability/*.out")
    return Preemptions(tuple(uptimes))


def _uptimes(file: Path, provider: str) -> Iterable[Uptime]:
    up: dict[str, _Up] = {}
    found = []
    at = 0.0
    for number, line in enumerate(documents.read_text(file).splitlines(), 1):
        logged = _LOGGED.fullmatch(line.strip())
        if logged is None:
            raise InputError(f"{file}:{number}: expected '[time] what happened'")
        at = _timestamp(f"{file}:{number}: ", logged["at"])
        created, state = _CREATED.fullmatch(logged["what"]), _STATE.fullmatch(logged["what"])
        if created is not None:
            gpu = created["gpu"].removeprefix("nvidia-tesla-")
            up[created["id"]] = _Up(created["zone"], gpu, int(created["gpus"]), at)
        elif state is not None and state["state"] == "not running" and state["id"] in up:
            found.append(_ended(provider, up.pop(state["id"]), at, preempted=True))
    found += [_ended(provider, one, at, preempted=False) for one in up.values()]
    return found


def _ended(provider: str, up: _Up, at: float, *, preempted: bool) -> Uptime:
    return Uptime(provider, up.zone, up.gpu, up.gpus, up.begin_seconds, at, preempted)


# --- Throughputs ---------------------------------------------------------------------------------


def read_model_rates(path: str | os.PathLike[str]) -> dict[str, dict[str, float]]:
    """Steps per second by model and kind of GPU, alone on one GPU.

    The table maps kinds of GPU to models to ``"null"`` for the rate alone; a model has its plain
    name, or Gavel's, ``"('ResNet-18 (batch size 16)', 1)"``.
    """
    table = _read_json(path)
    if not isinstance(table, dict) or not all(isinstance(rows, dict) for rows in table.values()):
        raise InputError(f"{path}: a throughput table is an object of kinds of GPU")
    found: dict[str, dict[str, float]] = {}
    for gpu, rows in table.items():
        for name, rates in rows.items():
            alone = rates.get("null") if isinstance(rates, dict) else None
            if not isinstance(alone, int | float) or not 0 <= alone < math.inf:
                raise InputError(f"{path}: {gpu}: {name} has no rate alone ('null')")
            model, scale = _model(name)
            if scale == 1:
                found.setdefault(model, {})[gpu] = float(alone)
    return found


def _model(name: str) -> tuple[str, int]:
    match = re.fullmatch(r"\('(?P<model>.*)', (?P<scale>\d+)\)", name)
    return (match["model"], int(match["scale"])) if match else (name, 1)


# --- Cells ---------------------------------------------------------------------------------------


def _series(
    instance: Instance, points: list[tuple[float, float]], until_seconds: float
) -> PriceSeries:
    """The series without the points at which the price does not change."""
    kept = [point for i, point in enumerate(points) if i == 0 or point[1] != points[i - 1][1]]
    return PriceSeries(
        instance, tuple(at for at, _ in kept), tuple(price for _, price in kept), until_seconds
    )


def _timestamp(place: str, text: Any) -> float:
    try:
        at = datetime.datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise InputError(f"{place}{text!r} is not a time; expected 2020-03-05T09:09:39Z") from None
    return at.replace(tzinfo=at.tzinfo or datetime.UTC).timestamp()


def _dollars(place: str, text: Any) -> float:
    try:
        price = float(text)
    except (TypeError, ValueError):
        raise InputError(f"{place}{text!r} is not a price in dollars per hour") from None
    if not 0 <= price < math.inf:
        raise InputError(f"{place}a price must be finite and not negative, got {price:g}")
    return price
