"""Arrangements of devices into equal groups of a pipeline, in some order.

SPP's order of devices, cut into groups of neighbours, is the first arrangement. Where devices
differ there are others: every one of a few devices, else the order from its end and that of falling
memory, as the first stages keep the most microbatches.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise, tee

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.pipelines.bounds.server_relaxation import levels_of
from stagewright.formulations.pipelines.bppm import earliest_starts, prefix_sums, range_sums
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.structure import Structure
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.machines.ordering import recursive_device_order

MOST_ROUNDS = 4  # stages that a group of devices gets
_FEW_WAYS = 8  # to divide devices among stages, up to which every one is tried
_EVERY_LENGTH = 16  # groups up to which every number is tried; above, divisors and the half


def balanced_pipelines(problem: PipelineProblem) -> Iterator[Structure]:
    """The pipelines in SPP's order of devices: searches take copies of this iterator.

    They are made once, as the first copy asks for them.
    """
    return tee(pipelines(problem, recursive_device_order(problem.cluster)), 1)[0]


def pipelines(problem: PipelineProblem, order: Sequence[int]) -> Iterator[Structure]:
    """Balanced pipelines on groups of neighbours in ``order``, in one or several rounds.

    A round visits the groups in the same direction as the previous one (interleaved) or in the
    opposite one (V-shaped). Groups of several devices split microbatches or take them round-robin.
    With round-robin, every round may start with the next device, so that no device waits for its
    own microbatch. Last come pipelines of which every server has a copy.
    """
    layers = len(problem.chain)
    for length in lengths(len(order), layers):
        groups = [tuple(int(v) for v in part) for part in np.array_split(np.array(order), length)]
        for rounds in range(1, MOST_ROUNDS + 1):
            if rounds * length <= layers:
                yield from _folded(problem, groups, groups * rounds)
        if 2 * length - 1 <= layers and length > 1:
            yield from _folded(problem, groups, groups + groups[-2::-1])
    yield from _copies(problem, order)


def _copies(problem: PipelineProblem, order: Sequence[int]) -> Iterator[Structure]:
    """Pipelines within one server that several servers run, each with its own microbatches.

    The servers take the microbatches in turn, and so do the devices of a stage in a server.
    """
    layers = len(problem.chain)
    for level in levels_of(problem.cluster):
        servers = [[v for v in order if level.home[v] == one] for one in {*level.home}]
        count = len(servers)
        while count > 1:
            slots = [*zip(*servers[:count], strict=False)]
            for parts in _parts(slots, layers):
                groups = [tuple(v for slot in part for v in slot) for part in parts]
                for rounds in range(1, 3):
                    if rounds * len(groups) <= layers:
                        yield from _folded(problem, groups, groups * rounds, (True,))
            count //= 2


def _parts(slots: list[tuple[int, ...]], most: int) -> Iterator[list[list[tuple[int, ...]]]]:
    """The slots divided among at most so many stages, in every way if these are few."""
    size = len(slots)
    for length in lengths(size, most):
        if math.comb(size - 1, length - 1) <= _FEW_WAYS:
            ways: Iterable[tuple[int, ...]] = combinations(range(1, size), length - 1)
        else:
            ways = [tuple(size * i // length for i in range(1, length))]
        for cuts in ways:
            yield [slots[i:j] for i, j in pairwise((0, *cuts, size))]


def lengths(devices: int, layers: int) -> list[int]:
    """The numbers of groups to try, ascending."""
    most = min(devices, layers)
    if most <= _EVERY_LENGTH:
        return list(range(1, most + 1))
    divisors = [n for n in range(1, most + 1) if devices % n == 0]
    return sorted({*divisors, most, most // 2})


def _folded(
    problem: PipelineProblem,
    groups: Sequence[tuple[int, ...]],
    placed: Sequence[tuple[int, ...]],
    kinds: Sequence[bool] = (False, True),
) -> Iterator[Structure]:
    """Balanced stages on the groups ``placed``, for each of the kinds: whether round-robin.

    No more devices take turns than there are microbatches.
    """
    several = any(len(group) > 1 for group in groups)
    again = len(placed) > len(groups)
    names = [device.name for device in problem.cluster.devices]
    for round_robin in kinds if several else (False,):
        cuts = balanced_cuts(problem, placed, round_robin)
        if cuts is None:
            continue
        most = problem.microbatches if round_robin else None
        for step in (0, 1) if round_robin and again else (0,):
            if len(placed[0]) == 1 and len(groups) == 1 and again:
                continue  # the stages would merge into one
            yield Structure.whole([
                Stage(
                    (cuts[s], cuts[s + 1]),
                    tuple(names[v] for v in _rotated(group, step * (s // len(groups)))[:most]),
                    "round-robin" if round_robin and len(group) > 1 else "split",
                )
                for s, group in enumerate(placed)
            ])  # fmt: skip


def _rotated(group: tuple[int, ...], by: int) -> tuple[int, ...]:
    first = by % len(group)
    return group[first:] + group[:first]


def balanced_cuts(
    problem: PipelineProblem, placed: Sequence[tuple[int, ...]], round_robin: bool
) -> list[int] | None:
    """Cuts that minimise the slowest stage; None if a group is too large for a microbatch."""
    tables: dict[tuple[str, ...], Floats] = {}
    keys = [tuple(sorted(problem.cluster.devices[v].kind for v in group)) for group in placed]
    for key, group in zip(keys, placed, strict=True):
        if key not in tables:
            tables[key] = stage_seconds(problem, group, round_robin)
    return every_balanced_cuts([tables[key] for key in keys])[-1]


def every_balanced_cuts(tables: Sequence[Floats]) -> list[list[int] | None]:
    """Cuts for the first 1, 2, ... of the stages that minimise the slowest; None if infeasible.

    ``tables`` has the seconds of layers [start, stop) as each of the stages, shape (L + 1, L + 1),
    inf where it is impossible.
    """
    layers = len(tables[0]) - 1
    best = np.append(0.0, np.full(layers, np.inf))
    choices: list[NDArray[np.int64]] = []
    found: list[list[int] | None] = []
    for table in tables:
        through = np.maximum(best[:, None], table)
        choices.append(through.argmin(axis=0))
        best = through.min(axis=0)
        found.append(_traced(choices, layers) if np.isfinite(best[layers]) else None)
    return found


def _traced(choices: Sequence[NDArray[np.int64]], layers: int) -> list[int]:
    """The cuts that the choices lead to from the last layer."""
    cuts = [layers]
    for row in reversed(choices):
        cuts.append(int(row[cuts[-1]]))
    return cuts[::-1]


def stage_seconds(
    problem: PipelineProblem, group: tuple[int, ...], round_robin: bool, recomputes: bool = False
) -> Floats:
    """Seconds per microbatch of layers [start, stop) on a group; inf if infeasible."""
    shares = 1 if round_robin else len(group)
    layers = len(problem.chain)
    kinds = {problem.cluster.devices[v].kind for v in group}
    tables = []
    for kind in sorted(kinds):
        costs = problem.costs(kind, shares)
        forward = costs.forward_seconds * (2 if recomputes else 1)
        tables.append(range_sums(prefix_sums(forward + costs.backward_seconds)))
    seconds = np.max(tables, axis=0) / (len(group) if round_robin else 1)
    first = earliest_starts(problem.replicas_per_layer, shares)[-1]
    possible = np.triu(first[None, :] <= np.arange(layers + 1)[:, None], 1)
    return np.where(possible, seconds, np.inf)


MOST = 120  # arrangements of which every one is tried

Groups = tuple[tuple[int, ...], ...]


def arrangements(problem: PipelineProblem, size: int, ranks: int) -> Iterator[Groups]:
    """Disjoint groups of ``size`` devices for all ``ranks``; none that costs the same as another.

    The first is of neighbours in SPP's order.
    """
    order = recursive_device_order(problem.cluster)
    seen = set()
    few = _count(len(order), size, ranks) <= MOST
    for groups in (_neighbours(order, size, ranks), *_others(problem, order, size, ranks, few)):
        key = _costs(problem, groups, few)
        if key not in seen:
            seen.add(key)
            yield groups


def _count(devices: int, size: int, ranks: int) -> int:
    repeated: int = math.factorial(size) ** ranks
    return math.perm(devices, size * ranks) // repeated


def _neighbours(order: Sequence[int], size: int, ranks: int) -> Groups:
    return tuple(tuple(order[i * size : (i + 1) * size]) for i in range(ranks))


def _others(
    problem: PipelineProblem, order: Sequence[int], size: int, ranks: int, few: bool
) -> Iterator[Groups]:
    if few:
        yield from _every(order, size, ranks)
        return
    memory = problem.memory_bytes
    yield _neighbours(order[::-1], size, ranks)
    yield _neighbours(sorted(order, key=lambda v: -float(memory[v])), size, ranks)


def _every(devices: Sequence[int], size: int, ranks: int) -> Iterator[Groups]:
    if ranks == 0:
        yield ()
        return
    for group in combinations(devices, size):
        rest = [v for v in devices if v not in group]
        for groups in _every(rest, size, ranks - 1):
            yield (group, *groups)


def _costs(problem: PipelineProblem, groups: Groups, linked: bool) -> tuple[object, ...]:
    """Key of the costs of stages on the groups; without links, if not ``linked``."""
    cluster, devices = problem.cluster, [v for group in groups for v in group]
    kinds = tuple((cluster.devices[v].kind, float(problem.memory_bytes[v])) for v in devices)
    if not linked:
        return kinds
    links = tuple(
        (float(cluster.bandwidth[v, w]), float(cluster.latency[v, w]))
        for v in devices
        for w in devices
        if v != w
    )
    return kinds, links
