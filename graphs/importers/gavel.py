r"""Gavel's traces and throughput tables (github.com/stanford-futuredata/gavel).

A trace has a line per job, tab-separated: job type, command, working directory, the name of the
argument for the steps, whether it needs data, steps, scale factor, priority weight, SLO, arrival
(s).
A table maps worker type to ``"('ResNet-18 (batch size 16)', 1)"`` to ``"null"`` for the steps per
second alone, and to other job types for the two rates together; the worker types
``v100_unconsolidated`` hold the rates on accelerators of different servers.
"""

import json
import math
import os
import re
import reprlib
from typing import Any

from pydantic_core import from_json

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.documents import format_name, not_json
from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.workloads.jobs import (
    Job,
    PairRate,
    Rate,
    Throughputs,
    Workload,
    load_workload,
)

_SPREAD = "_unconsolidated"
_FIELDS = 10
_KIND = re.compile(r"\((?P<quote>['\"])(?P<model>[^'\"]+)(?P=quote), (?P<scale>\d{1,9})\)")


def read_gavel(trace: str | os.PathLike[str], throughputs: str | os.PathLike[str]) -> Workload:
    """The jobs of a trace with their throughputs.

    Raises InputError with file and line, if a field is missing or not a number, arrivals are out of
    order, or a job's type has no throughputs at its scale.
    """
    jobs = read_trace(trace)
    table = read_throughputs(throughputs)
    known = {(rate.model, rate.scale) for rate in table.alone}
    for line, job in enumerate(jobs, 1):
        if (job.model, job.scale) not in known:
            raise InputError(
                f"{trace}:{line}: {throughputs} has no throughput of {job.model!r} on "
                f"{job.scale} accelerators; add it to the table, or correct the job's type or scale"
            )
    return Workload(jobs, table.of((job.model, job.scale) for job in jobs))


def read_trace(path: str | os.PathLike[str]) -> tuple[Job, ...]:
    """The jobs of a trace, named by their position; see :func:`read_gavel`."""
    jobs: list[Job] = []
    lines = documents.read_text(path).splitlines()
    for number, line in enumerate(lines):
        place = f"{path}:{number + 1}: "
        if not line.strip():
            raise InputError(f"{place}the line is empty; a trace has one job on each line")
        try:
            job = _job(str(number), line.split("\t"))
        except InputError as error:
            raise InputError(place + str(error)) from None
        if jobs and job.arrival_seconds < jobs[-1].arrival_seconds:
            raise InputError(
                f"{place}arrives at {job.arrival_seconds:g} s, before the line above at "
                f"{jobs[-1].arrival_seconds:g} s: sort the trace by arrival"
            )
        jobs.append(job)
    if not jobs:
        raise InputError(f"{path}: the trace has no jobs")
    return tuple(jobs)


def _job(name: str, fields: list[str]) -> Job:
    if len(fields) != _FIELDS:
        raise InputError(f"{len(fields)} tab-separated fields, a trace has {_FIELDS}")
    model, steps, scale, weight, slo, arrival = fields[0], *fields[5:]
    target = _number(slo, "SLO")
    return Job(
        name,
        model,
        _number(steps, "steps"),
        int(_number(scale, "scale factor", whole=True)),
        _number(weight, "priority weight"),
        _number(arrival, "arrival"),
        None if target <= 0 else target,
    )


def _number(text: str, what: str, *, whole: bool = False) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (whole and value != int(value)):
        raise InputError(f"{what} {text.strip()!r} is not a {'whole ' if whole else ''}number")
    return value


def read_throughputs(path: str | os.PathLike[str]) -> Throughputs:
    """A throughput table. Raises InputError in one line, if the file is not such a table."""
    text = documents.read_text(path)
    try:
        from_json(text)  # refuses deep nesting, into which the json module recurses
        table = json.loads(text, parse_int=float)
    except ValueError as error:
        raise InputError(f"{path}: {not_json(text, error)}") from None
    if not isinstance(table, dict):
        raise InputError(f"{path}: a throughput table is an object of worker types")
    with naming(path):
        return _throughputs(table)


def read_reference(path: str | os.PathLike[str]) -> Throughputs:
    """The throughputs of a jobs file, or of a table of Gavel's."""
    if f'"{format_name(Workload)}"' in documents.read_text(path):
        return load_workload(path).throughputs
    return read_throughputs(path)


def _throughputs(table: dict[str, Any]) -> Throughputs:
    alone, pairs = [], []
    for accelerator in table:
        if accelerator.endswith(_SPREAD):
            continue
        spread = _items(table.get(accelerator + _SPREAD, {}), accelerator + _SPREAD)
        for kind, rates in _items(table[accelerator], accelerator).items():
            model, scale = _kind(kind, accelerator)
            apart = spread.get(kind, {})
            place = f"{accelerator}: {kind}"
            if "null" not in rates:
                raise InputError(f"{place} has no rate alone ('null')")
            spread_rate = _rate(apart["null"], place) if "null" in apart else None
            rate = _rate(rates["null"], place)
            alone.append(Rate(model, scale, accelerator, rate, spread_rate))
            for other, together in rates.items():
                if other == "null":
                    continue
                partner, other_scale = _kind(other, accelerator)
                both = _both(together, f"{place} with {other}")
                # Both orders are in the table; the pair is kept once, by its first model.
                if other_scale == scale and model <= partner:
                    spread_both = apart.get(other)
                    pairs.append(
                        PairRate(
                            (model, partner),
                            scale,
                            accelerator,
                            both,
                            None if spread_both is None else _both(spread_both, place),
                        )
                    )
    return Throughputs(tuple(alone), tuple(pairs))


def _items(types: Any, accelerator: str) -> dict[str, dict[str, Any]]:
    if not isinstance(types, dict) or not all(isinstance(rates, dict) for rates in types.values()):
        raise InputError(f"{accelerator}: expected an object of job types")
    return types


def _kind(text: str, accelerator: str) -> tuple[str, int]:
    match = _KIND.fullmatch(text)
    if match is None:
        raise InputError(f"{accelerator}: {reprlib.repr(text)} is not a job type ('model', scale)")
    return match["model"], int(match["scale"])


def _both(rates: Any, place: str) -> tuple[float, float]:
    if not isinstance(rates, list) or len(rates) != 2:
        raise InputError(f"{place}: expected two rates, got {reprlib.repr(rates)}")
    return _rate(rates[0], place), _rate(rates[1], place)


def _rate(value: Any, place: str) -> float:
    if not isinstance(value, float):
        raise InputError(f"{place}: {reprlib.repr(value)} is not a rate in steps per second")
    return value
