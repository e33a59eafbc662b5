"""Joint allocation and pattern: all mappings of layers to groups of devices, and their bounds.

A plan assigns every layer to one group; maximal runs of consecutive layers on one group are the
stages, and a group may have any number of them. Plans are built from the last stage to the first,
as 1F1B* forms its groups (MadPipe section 4.1): the times of the later stages give a lower bound on
the microbatches that a stage keeps in flight. :class:`JointForm` holds the tables for the bounds.

The objective is the iteration time: one period per microbatch, plus the pause, which is the longest
time of the updates on a group.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise, permutations
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.patterns.pattern_problems import static_bytes
from stagewright.formulations.plans.memory import kept_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError

RESOLUTION = 44  # all times together are at most 2**44 ticks
BYTE_RESOLUTION = 52  # and all bytes, of all microbatches in flight, 2**52 units
FORBIDDEN = 1 << 45  # ticks of an infeasible stage


class Placed(NamedTuple):
    """Layers [start, stop) on a group; ``choice`` is an index into the problem's ``recompute``."""

    start: int
    stop: int
    group: int
    choice: int


class AllocationTables(NamedTuple):
    """The problem in integers; G groups of K types, R recomputation modes, L layers.

    Attributes
    ----------
    sort
        The row of ``seconds`` ... ``static`` for every group, shape (G,).
    seconds
        U(k, l): ticks of forward and backward of layers [k, l), shape (K, R, L + 1, L + 1);
        FORBIDDEN where they cannot form a stage.
    saved, working
        Bytes per microbatch in flight, and additional bytes during a backward, in the same shape.
        All bytes are in units (`StageAllocationProblem.byte`).
    static
        Bytes that are resident at all times, shape (K, L + 1, L + 1).
    transfer
        C(l): ticks of the transfers in both directions between layer l - 1 on one group and layer
        l on another, shape (G, G, L + 1); 0 within a group.
    reduce
        Ticks of the all-reduce of layers [k, l), shape (G, L + 1, L + 1).
    memory
        Bytes per group, shape (G,).
    normal
        The normal groups in order, shape (N,).
    skips
        Whether plans may use normal group j and leave out groups that follow it; False where the
        next group is identical. Shape (N,).
    special
        The special group, or -1.
    versions
        The largest number of microbatches in flight, m + 1.
    """

    sort: Ints
    seconds: Ints
    saved: Ints
    working: Ints
    static: Ints
    transfer: Ints
    reduce: Ints
    memory: Ints
    normal: Ints
    skips: NDArray[np.bool_]
    special: int
    versions: int


def contiguous(tables: AllocationTables) -> AllocationTables:
    """The same problem with the special group as a normal group at its position."""
    everyone = tables._replace(normal=np.arange(len(tables.sort)), special=-1)
    return everyone._replace(skips=worth_skipping(everyone))


def all_periods(tables: AllocationTables) -> int:
    """A period above which feasibility is constant: all operations in sequence, an all-reduce."""
    return int(latest_ends(tables)[-1])


def _longest_delays(tables: AllocationTables) -> Ints:
    """Upper bounds on the delay of layers [0, l), shape (L + 1,): each a stage of slowest type."""
    layers = np.arange(tables.seconds.shape[-1] - 1)
    single = tables.seconds[:, :, layers + 1, layers]
    slowest = np.where(single < FORBIDDEN, single, 0).max(axis=(0, 1))
    crossing = tables.transfer.max(axis=(0, 1))
    return np.asarray(np.cumsum(np.append(0, slowest)) + np.cumsum(crossing))


def latest_ends(tables: AllocationTables) -> Ints:
    """Upper bounds on the delay of layers [0, l) and an all-reduce after it, shape (L + 1,)."""
    reduces = np.maximum.accumulate(tables.reduce.max(axis=(0, 2)))
    return np.asarray(_longest_delays(tables) + reduces)


def worth_skipping(tables: AllocationTables) -> NDArray[np.bool_]:
    """Whether each normal group differs from the next one, shape (N,).

    A plan that uses a group and leaves out an identical next group can use the next one instead.
    """
    pairs = pairwise(tables.normal.tolist())
    return np.array([not _equals(tables, a, b) for a, b in pairs] + [False], dtype=np.bool_)


def _equals(tables: AllocationTables, a: int, b: int) -> bool:
    """Whether the neighbouring normal groups a and b have identical tables."""
    transfer = tables.transfer
    before = [x for x in range(len(tables.sort)) if x < a or x == tables.special]
    after = [x for x in range(len(tables.sort)) if x > b or x == tables.special]
    return bool(
        tables.sort[a] == tables.sort[b]
        and tables.memory[a] == tables.memory[b]
        and np.array_equal(tables.reduce[a], tables.reduce[b])
        and np.array_equal(transfer[before, a], transfer[before, b])
        and np.array_equal(transfer[a, after], transfer[b, after])
    )


def layer_sums(values: NDArray[Any]) -> NDArray[Any]:
    """out[l, k] = the sum of values[k:l], 0 where l <= k; shape (L + 1, L + 1)."""
    sums = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
    return np.tril(np.subtract.outer(sums, sums))


Records = NDArray[np.void]

ALLOCATIONS = "search over all allocations"
MODES = ("none", "full")


STAGE = np.dtype([(name, np.float64) for name in (
    "forward", "work", "reduce", "update", "static", "saved", "working",
)])  # fmt: skip
LINK = np.dtype([("there", np.float64), ("back", np.float64)])
GROUP = np.dtype([("memory", np.float64), ("like", np.int64)])
AHEAD = np.dtype([(name, np.float64) for name in ("work", "update")])


class JointForm(NamedTuple):
    """Costs of every stage on every group, and bounds on the layers before a stage.

    G groups, R recomputation modes, L layers; times and bytes are per microbatch. The arrays are
    records, as calls of compiled code are faster with few arrays.

    Attributes
    ----------
    stages
        Layers [k, l) on a group, shape (G, R, L + 1, L + 1): seconds of the ``forward``, of all
        ``work`` (forward, backward and recomputation), and of the ``reduce`` and the ``update``
        once per iteration; ``static``, ``saved`` and ``working`` bytes (as in `Kept`). ``work`` is
        infinite where a microbatch has too few samples for the group.
    links
        Seconds of a transfer from one group to another before layer l, and of its gradient, shape
        (G, G, L + 1).
    groups
        The ``memory`` of a group's smallest device, and the first group that it is ``like``: the
        two are interchangeable. Shape (G,).
    ahead
        Sums over the first l layers, each on its best group, shape (L + 1,): ``work`` and
        ``update`` seconds.
    sends
        Least seconds of both transfers between a group and another one before it, shape (G, L + 1).
    microbatches
        Microbatches per iteration.
    updated
        Whether any update takes time.
    """

    stages: Records
    links: Records
    groups: Records
    ahead: Records
    sends: Floats
    microbatches: int
    updated: bool


@dataclass(frozen=True)
class JointPatterns:
    """Find the stages, their groups and the pattern of the least iteration time.

    ``groups``: indices of devices in the cluster; the devices of a group split every microbatch.
    Groups may stay idle. ``recompute``: allowed recomputation of a stage: ``none``, ``full`` or
    both (see `Stage`).
    """

    problem: PipelineProblem
    groups: tuple[tuple[int, ...], ...]
    recompute: tuple[str, ...] = ("none",)

    def __post_init__(self) -> None:
        positions = [v for group in self.groups for v in group]
        size = len(self.problem.cluster)
        if not self.groups or not all(self.groups):
            raise InputError("groups: give at least one, each with at least one device")
        if len(set(positions)) < len(positions) or not set(positions) <= set(range(size)):
            raise InputError(
                f"groups must be disjoint and of positions 0 to {size - 1}, got {self.groups}"
            )
        if not self.recompute or not set(self.recompute) <= set(MODES):
            raise InputError(f'recompute must be of "none" and "full", got {self.recompute}')

    def stage(self, start: int, stop: int, group: int, mode: int) -> Stage:
        """The stage of layers [start, stop) on group number ``group``."""
        devices = self.problem.cluster.devices
        names = tuple(devices[v].name for v in self.groups[group])
        kind = cast(Literal["none", "full"], self.recompute[mode])
        return Stage((start, stop), names, recompute=kind)

    @cached_property
    def form(self) -> JointForm:
        """The tables for the search."""
        links = self._links()
        groups = np.zeros(len(self.groups), dtype=GROUP)
        for g, group in enumerate(self.groups):
            groups[g]["memory"] = self.problem.memory_bytes[list(group)].min()
        stages = self._stages()
        form = JointForm(
            stages=stages,
            links=links,
            groups=groups,
            ahead=self._ahead(),
            sends=_least_sends(links),
            microbatches=self.problem.microbatches,
            updated=bool(stages["update"].any()),
        )
        groups["like"] = _like(form)
        return form

    def _stages(self) -> Records:
        problem, size = self.problem, len(self.problem.chain) + 1
        stages = np.zeros((len(self.groups), len(self.recompute), size, size), dtype=STAGE)
        for g, group in enumerate(self.groups):
            like = next(h for h in range(g + 1) if self._costs_as(self.groups[h], group))
            if like < g:
                stages[g] = stages[like]
                continue
            for k, l in combinations(range(size), 2):
                forward, backward = problem.compute_seconds(k, l, group)
                if len(group) > problem.most_replicas(k, l):
                    backward = math.inf
                for r, mode in enumerate(self.recompute):
                    stage = self.stage(k, l, g, r)
                    kept = kept_bytes(problem, stage)
                    stages[g, r, k, l] = (
                        forward,
                        forward + backward + (0.0 if mode == "none" else forward),
                        problem.reduce_seconds(k, l, group),
                        problem.update_seconds(k, l, group),
                        static_bytes(problem, stage),
                        kept.saved_bytes,
                        kept.working_bytes,
                    )
        return stages

    def _costs_as(self, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        """Whether all stages cost the same on both: one group, or single devices of a kind."""
        devices = self.problem.cluster.devices
        alike = len(one) == len(other) == 1 and devices[one[0]].kind == devices[other[0]].kind
        return one == other or alike

    def _links(self) -> Records:
        count, size = len(self.groups), len(self.problem.chain) + 1
        links = np.zeros((count, count, size), dtype=LINK)
        known: dict[tuple[object, ...], tuple[int, int]] = {}
        for g, h in permutations(range(count), 2):
            pair = self.groups[g], self.groups[h]
            like = known.setdefault(self._link_key(*pair), (g, h))
            if like != (g, h):
                links[g, h] = links[like]
                continue
            for l in range(1, size - 1):
                links[g, h, l] = self.problem.transfer_seconds(l, *pair)
        return links

    def _link_key(self, one: tuple[int, ...], other: tuple[int, ...]) -> tuple[object, ...]:
        """Key of the links between two groups: equal keys have equal transfer times."""
        if not len(one) == len(other) == 1:
            return one, other
        there, back = (one[0], other[0]), (other[0], one[0])
        rows = self.problem.cluster.bandwidth, self.problem.cluster.latency
        return tuple(float(values[way]) for values in rows for way in (there, back))

    def _ahead(self) -> Records:
        """Sums over the first layers that hold for every partition into stages."""
        problem = self.problem
        kinds = {
            (problem.cluster.devices[v].kind, len(group)) for group in self.groups for v in group
        }
        costs = [problem.costs(*key) for key in sorted(kinds)]
        updates = [problem.update_per_layer(kind) for kind, _ in sorted(kinds)]
        work = np.min([cost.forward_seconds + cost.backward_seconds for cost in costs], axis=0)
        ahead = np.zeros(len(work) + 1, dtype=AHEAD)
        ahead["work"][1:] = np.cumsum(work)
        ahead["update"][1:] = np.cumsum(np.min(updates, axis=0))
        return ahead


def _least_sends(links: Records) -> Floats:
    """The least transfer time from another group; 0 with a single group."""
    both = links["there"] + links["back"]
    count = len(both)
    others = np.where(np.eye(count, dtype=bool)[:, :, None], np.inf, both)
    return np.asarray(others.min(axis=0) if count > 1 else both[0])


def _like(form: JointForm) -> Ints:
    """For each group the first group that is interchangeable with it."""
    like = np.arange(len(form.groups))
    for g in range(len(like)):
        like[g] = next(h for h in range(g + 1) if like[h] == h and _can_trade(form, g, h))
    return like


def _can_trade(form: JointForm, g: int, h: int) -> bool:
    swapped = np.arange(len(form.groups))
    swapped[[g, h]] = h, g
    return (
        np.array_equal(form.stages[g], form.stages[h])
        and bool(form.groups["memory"][g] == form.groups["memory"][h])
        and np.array_equal(form.links, form.links[np.ix_(swapped, swapped)])
    )
