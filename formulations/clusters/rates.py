"""Rates of jobs on the worker types of a pool, alone and in pairs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Throughputs
from stagewright.graphs.workloads.pool import Pool


@dataclass(frozen=True, slots=True)
class WorkerType:
    """An accelerator type (its position in the pool), and the placement where that counts."""

    name: str
    accelerator: int
    placement: str | None = None  # "consolidated", "spread"; None where placement does not count


@dataclass(frozen=True, slots=True, eq=False)
class RateTable:
    """The rates of every kind of job, a (model, scale), on every worker type.

    ``alone`` has shape (kinds, workers), steps per second, 0 where a kind does not run. A pair p
    of kinds ``first[p] <= second[p]`` of equal scale runs on ``worker[p]`` at ``paired[p]``, shape
    (pairs, 2). Pairs that are not faster than time-sharing are left out.
    """

    pool: Pool
    workers: tuple[WorkerType, ...]
    kinds: tuple[tuple[str, int], ...]
    scale: Ints
    alone: Floats
    first: Ints
    second: Ints
    worker: Ints
    paired: Floats
    index: dict[tuple[str, int], int] = field(repr=False)

    @property
    def counts(self) -> Ints:
        """Accelerators of each type in the pool, shape (types,)."""
        return np.array([accelerator.count for accelerator in self.pool.accelerators])

    @property
    def accelerator(self) -> Ints:
        """Position in the pool of each worker type's accelerator, shape (workers,)."""
        return np.array([worker.accelerator for worker in self.workers])

    def agnostic(self) -> "RateTable":
        """The table for a policy that does not distinguish accelerators: best rates, no pairs.

        A kind still runs only where it can.
        """
        best = self.alone.max(axis=1, keepdims=True)
        none = np.zeros(0, dtype=np.int64)
        return replace(
            self,
            alone=np.where(self.alone > 0, best, 0.0),
            first=none,
            second=none,
            worker=none,
            paired=np.zeros((0, 2)),
        )


def rate_table(
    throughputs: Throughputs,
    pool: Pool,
    kinds: Sequence[tuple[str, int]],
    *,
    space_sharing: bool = False,
    placement: bool = False,
) -> RateTable:
    """The table of ``kinds`` on ``pool``.

    Raises
    ------
    InputError
        If a rate is missing, a kind fits nowhere or runs nowhere, or placement is asked for and
        a type of accelerator has no servers.
    """
    workers = _worker_types(pool, placement)
    kinds = tuple(dict.fromkeys(kinds))
    index = {kind: position for position, kind in enumerate(kinds)}
    alone = _alone(throughputs, pool, workers, kinds)
    pairs = _pairs(throughputs, pool, workers, index, alone) if space_sharing else []
    return RateTable(
        pool,
        workers,
        kinds,
        np.array([scale for _, scale in kinds]),
        alone,
        np.array([pair[0] for pair in pairs], dtype=np.int64),
        np.array([pair[1] for pair in pairs], dtype=np.int64),
        np.array([pair[2] for pair in pairs], dtype=np.int64),
        np.array([pair[3:] for pair in pairs], dtype=float).reshape(-1, 2),
        index,
    )


def _worker_types(pool: Pool, placement: bool) -> tuple[WorkerType, ...]:
    if not placement:
        return tuple(WorkerType(name, number) for number, name in enumerate(pool.names))
    workers = []
    for number, accelerator in enumerate(pool.accelerators):
        if accelerator.per_server is None:
            raise InputError(
                f"accelerator {accelerator.name!r}: placement needs servers; write for example "
                f"{accelerator.name}={-(-accelerator.count // 4)}x4"
            )
        workers.append(WorkerType(accelerator.name, number, "consolidated"))
        workers.append(WorkerType(f"{accelerator.name} spread", number, "spread"))
    return tuple(workers)


def _alone(
    throughputs: Throughputs,
    pool: Pool,
    workers: tuple[WorkerType, ...],
    kinds: tuple[tuple[str, int], ...],
) -> Floats:
    rates = {(rate.model, rate.scale, rate.accelerator): rate for rate in throughputs.alone}
    known = {rate.accelerator for rate in throughputs.alone}
    for name in pool.names:
        if name not in known:
            raise InputError(
                f"unknown accelerator {name!r}: the throughputs know {', '.join(sorted(known))}"
            )
    alone = np.zeros((len(kinds), len(workers)))
    for row, (model, scale) in enumerate(kinds):
        for column, worker in enumerate(workers):
            accelerator = pool.accelerators[worker.accelerator]
            rate = rates.get((model, scale, accelerator.name))
            if rate is None:
                raise InputError(
                    f"no throughput of {model!r} on {scale} x {accelerator.name!r}: add it, or 0 "
                    "steps per second if it does not run there"
                )
            if scale > accelerator.count or (worker.placement == "spread" and scale == 1):
                continue  # one accelerator is always consolidated
            found = rate.steps_per_second
            if worker.placement == "spread":
                found = rate.spread_steps_per_second or 0.0
            alone[row, column] = found
        _require_place(pool, (model, scale), alone[row])
    return alone


def _require_place(pool: Pool, kind: tuple[str, int], rates: Floats) -> None:
    if rates.any():
        return
    model, scale = kind
    largest = max(pool.accelerators, key=lambda accelerator: accelerator.count)
    if scale > largest.count:
        raise InputError(
            f"a job of {model!r} asks for {scale} accelerators of one type, the cluster has at "
            f"most {largest.count} ({largest.name!r}): lower the job's scale"
        )
    raise InputError(f"{model!r} on {scale} accelerators runs nowhere in this cluster: all rates 0")


def _pairs(
    throughputs: Throughputs,
    pool: Pool,
    workers: tuple[WorkerType, ...],
    index: dict[tuple[str, int], int],
    alone: Floats,
) -> list[tuple[float, ...]]:
    """Rows (first kind, second kind, worker, its rates) of the pairs that beat taking turns."""
    found: list[tuple[float, ...]] = []
    columns = {
        (pool.names[worker.accelerator], worker.placement): column
        for column, worker in enumerate(workers)
    }
    for pair in throughputs.pairs:
        a, b = (index.get((model, pair.scale)) for model in pair.models)
        if a is None or b is None:
            continue
        for placement in (None, "consolidated", "spread"):
            column = columns.get((pair.accelerator, placement))
            rates = pair.spread_steps_per_second if placement == "spread" else pair.steps_per_second
            if column is None or rates is None:
                continue
            x, y = rates
            if not (alone[a, column] and alone[b, column]):
                continue
            if x / alone[a, column] + y / alone[b, column] > 1 + 1e-9:
                found.append((a, b, column, x, y) if a <= b else (b, a, column, y, x))
    return found


def server_rows(table: RateTable) -> list[tuple[int, Floats, int]]:
    """Servers that consolidated jobs need: (worker, servers per job of each kind, servers).

    Jobs on whole servers are a bin packing. The dual feasible functions u_k of Fekete and
    Schepers (2001) turn sizes into parts of a server such that no packing exceeds one a server.
    """
    rows = []
    for worker, kind in enumerate(table.workers):
        accelerator = table.pool.accelerators[kind.accelerator]
        if kind.placement != "consolidated" or accelerator.per_server is None:
            continue
        size = accelerator.per_server
        seen = {tuple(table.scale / size)}  # as eq. 5.3 has it
        for k in range(1, size):
            parts = np.array([_server_part(int(scale), size, k) for scale in table.scale])
            if tuple(parts) not in seen and (parts > table.scale / size).any():
                seen.add(tuple(parts))
                rows.append((worker, parts, accelerator.servers))
    return rows


def _server_part(scale: int, size: int, k: int) -> float:
    whole, rest = divmod(scale, size)
    times = (k + 1) * rest
    return whole + (rest / size if times % size == 0 else times // size / k)
