"""Rates of jobs on the worker types of a pool, alone and in pairs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Kind, Rate, Throughputs, counts_of
from stagewright.graphs.workloads.pool import Pool


@dataclass(frozen=True, slots=True)
class WorkerType:
    """An accelerator type (its position in the pool), and the placement where that counts.

    With a ``count``, that many of the type at once, for the jobs that choose among counts.
    """

    name: str
    accelerator: int
    placement: Literal["consolidated", "spread"] | None = None  # None where it does not count
    count: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RateTable:
    """The rates of every kind of job on every worker type.

    ``alone`` has shape (kinds, workers), steps per second, 0 where a kind does not run. ``uses``,
    of the same shape, is how many accelerators a job of the kind takes there, 0 where its counts
    rule the worker type out. A pair p of kinds ``first[p] <= second[p]`` of equal scale runs on
    ``worker[p]`` at ``paired[p]``, shape (pairs, 2). Pairs that are not faster than time-sharing
    are left out.
    """

    pool: Pool
    workers: tuple[WorkerType, ...]
    kinds: tuple[Kind, ...]
    uses: Ints
    alone: Floats
    first: Ints
    second: Ints
    worker: Ints
    paired: Floats
    index: dict[Kind, int] = field(repr=False)

    @property
    def counts(self) -> Ints:
        """Accelerators of each type in the pool, shape (types,)."""
        return np.array([accelerator.count for accelerator in self.pool.accelerators])

    @property
    def accelerator(self) -> Ints:
        """Position in the pool of each worker type's accelerator, shape (workers,)."""
        return np.array([worker.accelerator for worker in self.workers])

    def with_pairs(self, kept: Bools) -> "RateTable":
        """The table with some of its pairs, shape (pairs,)."""
        parts = {
            name: getattr(self, name)[kept] for name in ("first", "second", "worker", "paired")
        }
        return replace(self, **parts)

    def agnostic(self) -> "RateTable":
        """The table for a policy that does not distinguish accelerators: best rates, no pairs.

        A kind still runs only where it can, and on another count at another rate.
        """
        alone, counts = self.alone.copy(), [worker.count or 0 for worker in self.workers]
        for count in set(counts):
            like = np.flatnonzero(np.equal(counts, count))
            best = self.alone[:, like].max(axis=1, keepdims=True)
            alone[:, like] = np.where(self.alone[:, like] > 0, best, 0.0)
        none = np.zeros(0, dtype=np.int64)
        return replace(
            self,
            alone=alone,
            first=none,
            second=none,
            worker=none,
            paired=np.zeros((0, 2)),
        )


def rate_table(
    throughputs: Throughputs,
    pool: Pool,
    kinds: Sequence[Kind],
    *,
    space_sharing: bool = False,
    placement: bool = False,
) -> RateTable:
    """The table of ``kinds`` on ``pool``; kinds with a choice of counts are not paired.

    Raises
    ------
    InputError
        If a rate is missing, a kind fits nowhere or runs nowhere, or placement is asked for and
        a type of accelerator has no servers.
    """
    kinds = tuple(dict.fromkeys(kinds))
    workers = [
        replace(worker, name=f"{worker.name} x{count}" if count else worker.name, count=count)
        for worker in _worker_types(pool, placement)
        for count in _counts_of_workers(kinds)
    ]
    index = {kind: position for position, kind in enumerate(kinds)}
    alone = _alone(throughputs, pool, workers, kinds)
    pairs = _pairs(throughputs, pool, workers, index, alone) if space_sharing else []
    return RateTable(
        pool,
        tuple(workers),
        kinds,
        np.array([[_uses(kind, worker) for worker in workers] for kind in kinds]),
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


def _counts_of_workers(kinds: tuple[Kind, ...]) -> list[int | None]:
    """The counts of worker types: those of any kind, largest first, and None for a job's own."""
    own = any(isinstance(counts, int) for _, counts in kinds)
    chosen = {count for kind in kinds if isinstance(kind[1], tuple) for count in counts_of(kind)}
    return [*([None] if own else []), *sorted(chosen, reverse=True)]


def _uses(kind: Kind, worker: WorkerType) -> int:
    """Accelerators that a job of ``kind`` takes on ``worker``; 0 where it has no such choice."""
    if isinstance(kind[1], int):
        return kind[1] if worker.count is None else 0
    return worker.count if worker.count in kind[1] else 0


def _alone(
    throughputs: Throughputs,
    pool: Pool,
    workers: Sequence[WorkerType],
    kinds: tuple[Kind, ...],
) -> Floats:
    rates = {(rate.model, rate.scale, rate.accelerator): rate for rate in throughputs.alone}
    known = {rate.accelerator for rate in throughputs.alone}
    for name in pool.names:
        if name not in known:
            raise InputError(
                f"unknown accelerator {name!r}: the throughputs know {', '.join(sorted(known))}"
            )
    alone = np.zeros((len(kinds), len(workers)))
    for row, kind in enumerate(kinds):
        for column, worker in enumerate(workers):
            scale, accelerator = _uses(kind, worker), pool.accelerators[worker.accelerator]
            rate = rates.get((kind[0], scale, accelerator.name))
            if scale and rate is None:
                raise InputError(
                    f"no throughput of {kind[0]!r} on {scale} x {accelerator.name!r}: add it, or 0 "
                    "steps per second if it does not run there"
                )
            if rate is not None and scale <= accelerator.count:
                alone[row, column] = _placed_rate(rate, worker)
        _require_place(throughputs, pool, kind, alone[row])
    return alone


def _placed_rate(rate: Rate, worker: WorkerType) -> float:
    if worker.placement != "spread":
        return rate.steps_per_second
    if rate.scale == 1:
        return 0.0  # one accelerator is always consolidated
    return rate.spread_steps_per_second or 0.0


def _require_place(throughputs: Throughputs, pool: Pool, kind: Kind, rates: Floats) -> None:
    if rates.any():
        return
    model, scale = kind[0], counts_of(kind)[0]
    largest = max(pool.accelerators, key=lambda accelerator: accelerator.count)
    if scale > largest.count:
        raise InputError(
            f"a job of {model!r} asks for {scale} accelerators of one type, the cluster has at "
            f"most {largest.count} ({largest.name!r}): lower the job's scale"
        )
    counts = " or ".join(map(str, counts_of(kind)))
    runs = [
        f"{one.scale} {one.accelerator}"
        for one in throughputs.alone
        if one.model == model and one.steps_per_second
    ]
    would = f"its throughputs know it on {', '.join(runs)}" if runs else "give it a throughput"
    raise InputError(
        f"{model!r} on {counts} accelerators runs nowhere in this cluster: all rates 0; {would}"
    )


def _pairs(
    throughputs: Throughputs,
    pool: Pool,
    workers: Sequence[WorkerType],
    index: dict[Kind, int],
    alone: Floats,
) -> list[tuple[float, ...]]:
    """Rows (first kind, second kind, worker, its rates) of the pairs that beat taking turns."""
    found: list[tuple[float, ...]] = []
    columns = {
        (pool.names[worker.accelerator], worker.placement): column
        for column, worker in enumerate(workers)
        if worker.count is None
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
    """Servers that consolidated jobs need: (type, servers per job of (kinds, workers), servers).

    Jobs on whole servers are a bin packing. The dual feasible functions u_k of Fekete and
    Schepers (2001) turn sizes into parts of a server such that no packing exceeds one a server.
    """
    rows = []
    together = [worker.placement == "consolidated" for worker in table.workers]
    for number, accelerator in enumerate(table.pool.accelerators):
        here = np.flatnonzero(together & (table.accelerator == number))
        size = accelerator.per_server
        if size is None or not len(here):
            continue
        sizes, place = np.unique(table.uses[:, here], return_inverse=True)
        seen = {tuple(sizes / size)}  # as eq. 5.3 has it
        for k in range(1, size):
            part = np.array([_server_part(int(scale), size, k) for scale in sizes])
            if tuple(part) not in seen and (part > sizes / size).any():
                seen.add(tuple(part))
                parts = np.zeros(table.uses.shape)
                parts[:, here] = part[place].reshape(len(table.kinds), len(here))
                rows.append((number, parts, accelerator.servers))
    return rows


def _server_part(scale: int, size: int, k: int) -> float:
    """Part of a server, by the dual feasible function u_k, of a job on ``scale`` of ``size``."""
    whole, rest = divmod(scale, size)
    times = (k + 1) * rest
    return whole + (rest / size if times % size == 0 else times // size / k)
