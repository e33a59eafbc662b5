"""Inputs of ``cloud``: prices, rates of work, preemptions, times."""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.graphs.workloads.prices import Market, Preemptions


def read_market(paths: list[Path], places: str | None) -> "Market":
    """The prices of files and folders; only of ``places``, if any are given."""
    from stagewright.graphs.importers.cloud_prices import read_cloud_logs
    from stagewright.graphs.workloads.prices import load_market, merge

    read = (read_cloud_logs(path) if path.is_dir() else load_market(path) for path in paths)
    return _only(merge(read), places)


def _only(market: "Market", places: str | None) -> "Market":
    if places is None:
        return market
    wanted = [part.strip() for part in places.split(",")]
    known = {
        place
        for one in market.series
        for place in (one.instance.provider, f"{one.instance.provider}/{one.instance.region}")
    }
    for place in wanted:
        if place not in known:
            raise InputError(f"--only: no prices of {place!r}; known: {', '.join(sorted(known))}")
    return market.of(lambda one: one.provider in wanted or f"{one.provider}/{one.region}" in wanted)


def read_rates(
    text: str | None, model: str | None, throughputs: Path | None, market: "Market"
) -> dict[str, float]:
    """Work per hour of each kind of GPU, relative to a V100."""
    if (text is None) == (model is None) or (model is None) != (throughputs is None):
        raise InputError("give --rates, or --job-type with --throughputs")
    if text is not None:
        return _spelled_rates(text)
    from stagewright.graphs.importers.cloud_prices import read_model_rates

    table = read_model_rates(str(throughputs))
    found = table.get(str(model), {})
    if not found.get("v100"):
        known = "; ".join(sorted(name for name, rates in table.items() if rates.get("v100")))
        raise InputError(f"{throughputs}: no rate of {model!r} on a v100; models: {known}")
    kinds = {one.instance.gpu for one in market.series}
    return {gpu: rate / found["v100"] for gpu, rate in found.items() if gpu in kinds}


def _spelled_rates(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z][\w.-]*)=([\d.eE+-]+)\s*", part)
        try:
            rate = float(match[2]) if match else math.nan
        except ValueError:
            rate = math.nan
        if match is None or not (math.isfinite(rate) and rate >= 0):
            raise InputError(f"--rates: {part.strip()!r} is no rate; write v100=1.0,p100=0.4")
        if match[1] in found:
            raise InputError(f"--rates: {match[1]!r} appears twice")
        found[match[1]] = rate
    return found


def read_preemptions(paths: list[Path]) -> "Preemptions":
    """The uptimes in the availability logs of the folders."""
    from stagewright.graphs.importers.cloud_prices import read_availability
    from stagewright.graphs.workloads.prices import Preemptions

    logs = [read_availability(path) for path in paths if path.is_dir()]
    if not logs:
        raise InputError("--preempted needs a folder of logs with PROVIDER/availability in it")
    return Preemptions(tuple(up for log in logs for up in log.uptimes))
