"""Updates of a rate table in a running cluster: lost accelerators, measured rates."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stagewright.formulations.clusters.rates import RateTable
from stagewright.graphs.workloads.pool import Pool

_NOTEWORTHY = 0.1  # relative change of a rate that triggers a new target


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps per second of a kind on a worker type, alone or sharing with a job of another kind."""

    kind: int
    beside: int | None
    worker: int
    steps_per_second: float


def surviving(table: RateTable, left: Sequence[int]) -> RateTable:
    """The table of a pool with only ``left`` working accelerators of each type.

    A type without working accelerators stays in the pool, with all rates 0.
    """
    if list(left) == table.counts.tolist():
        return table
    accelerators = []
    for accelerator, count in zip(table.pool.accelerators, left, strict=True):
        size = accelerator.per_server
        if count < accelerator.count:
            has_whole_servers = size is not None and count > 0 and count % size == 0
            accelerator = replace(
                accelerator, count=max(count, 1), per_server=size if has_whole_servers else None
            )
        accelerators.append(accelerator)
    room = np.array(left)[table.accelerator]
    alone = np.where(table.scale[:, None] <= room, table.alone, 0.0)
    kept = (alone[table.first, table.worker] > 0) & (alone[table.second, table.worker] > 0)
    return replace(
        table,
        pool=Pool(tuple(accelerators)),
        alone=alone,
        first=table.first[kept],
        second=table.second[kept],
        worker=table.worker[kept],
        paired=table.paired[kept],
    )


def measured(table: RateTable, rates: Iterable[Measured], weight: float) -> RateTable:
    """The table updated by ``rates``: an exponential average with ``weight`` for the newest."""
    alone, paired = table.alone.copy(), table.paired.copy()
    for rate in rates:
        if rate.beside is None:
            values, place = alone, (rate.kind, rate.worker)
        else:
            first, second = sorted((rate.kind, rate.beside))
            row = np.flatnonzero(
                (table.first == first) & (table.second == second) & (table.worker == rate.worker)
            )
            values, place = paired, (int(row[0]), int(rate.kind != first))
        values[place] += weight * (rate.steps_per_second - values[place])
    return replace(table, alone=alone, paired=paired)


def has_moved(table: RateTable, before: RateTable) -> bool:
    """Whether a rate differs enough from ``before`` to trigger a new target."""
    return any(
        bool((np.abs(now - then) > _NOTEWORTHY * then).any())
        for now, then in ((table.alone, before.alone), (table.paired, before.paired))
    )
