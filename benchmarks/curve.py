"""The best makespan for every limit of memory, beside the published schedules.

Unit costs, two chunks per device in a V; a microbatch holds one unit of memory per chunk until
its weight gradient ends.
"""

from collections.abc import Iterator

from benchmarks.report import Table, percent
from stagewright.service.schedules.comparing import schedule_curve
from stagewright.service.schedules.requests import MemoryCurveRequest

CASES = ((4, 12, 40.0), (8, 32, 270.0))  # devices, microbatches, seconds
COLUMNS = (
    "devices",
    "M",
    "memory",
    "makespan",
    "bound",
    "gap",
    "proved by",
    "published",
    "seconds",
)


def tables(quick: bool) -> Iterator[Table]:
    """One table with a row for every limit."""
    cases = ((2, 4, 5.0),) if quick else CASES
    yield Table(
        "curve",
        "Memory and makespan with unit costs in a V, two cores",
        COLUMNS,
        tuple(row for case in cases for row in _rows(*case)),
    )


def _rows(devices: int, count: int, seconds: float) -> Iterator[tuple[object, ...]]:
    request = MemoryCurveRequest.of(
        microbatches=count, forward=(2.0,) * devices, backward=(2.0,) * devices,
        weight_gradient=(2.0,) * devices, chunks=2, placement="V", saved=(2.0,) * devices,
        time_limit=seconds, threads=2,
    )  # fmt: skip
    found = schedule_curve(request)
    for point in found.points:
        kinds = [
            f"{kind.kind} {kind.makespan:g}"
            for kind in found.kinds
            if kind.peak_memory == point.memory
        ]
        yield (
            devices, count, f"{point.memory:g}", f"{point.makespan:g}", f"{point.bound:g}",
            percent(point.gap), point.proved_by, ", ".join(kinds), f"{found.wall_seconds:.0f}",
        )  # fmt: skip
