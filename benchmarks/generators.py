"""Time to make the published schedules at a large size."""

from collections.abc import Iterator
from time import process_time

from benchmarks.report import Table
from stagewright.formulations.schedules.published.kinds import KINDS, Sizes, schedule_of
from stagewright.graphs.documents.errors import InputError

SIZE, QUICK = (64, 512), (8, 32)  # devices, microbatches
CHUNKS = 4
COLUMNS = ("schedule", "chunks", "computations", "generate s")


def tables(quick: bool) -> Iterator[Table]:
    """One table with a row for every schedule that these sizes allow."""
    devices, count = QUICK if quick else SIZE
    rows = tuple(row for kind in KINDS if (row := _row(kind, devices, count)) is not None)
    title = f"{devices} devices, {count} microbatches, CPU seconds"
    yield Table("generators", title, COLUMNS, rows)


def _row(kind: str, devices: int, count: int) -> tuple[object, ...] | None:
    described = KINDS[kind]
    chunks = described.chunks.step if described.chunks.fixed else CHUNKS
    began = process_time()
    try:
        order = schedule_of(kind, Sizes(devices, count, chunks))
    except InputError:
        return None
    made = process_time()
    size = sum(map(len, order.rows))
    return kind, chunks, size, f"{made - began:.2f}"
