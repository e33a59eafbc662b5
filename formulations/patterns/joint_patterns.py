"""Allocation and pattern at once: every way to put the layers on groups of devices, and bounds.

A plan gives every layer to one group; maximal runs of neighbouring layers on one group are the
stages, any number of them on a group. Plans are built from the last stage backwards, as 1F1B*
forms its groups (MadPipe section 4.1): what the stages behind it take tells how many microbatches
a stage keeps at least. :class:`JointForm` holds all figures that the bounds need.

What is least is an iteration: a period per microbatch, and a pause in which the group with the most
updates makes them.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from stagewright.formulations.patterns.pattern_problems import static_bytes
from stagewright.formulations.plans.memory import kept_bytes, state_factor
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.weight_rules import DOUBLE_BUFFER
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError

Records = NDArray[np.void]

ALLOCATIONS = "search over all allocations"
MODES = ("none", "full")


STAGE = np.dtype([(name, np.float64) for name in (
    "forward", "work", "reduce", "update", "static", "saved", "working",
)])  # fmt: skip
LINK = np.dtype([("there", np.float64), ("back", np.float64)])
GROUP = np.dtype([("memory", np.float64), ("like", np.int64)])
AHEAD = np.dtype([(name, np.float64) for name in ("work", "update", "static", "saved", "kept")])


class JointForm(NamedTuple):
    """The figures of every stage on every group, and bounds on the layers in front of stages.

    G groups, R ways to recompute, L layers; times and bytes of a microbatch. Records, as compiled
    code takes few arrays quicker than many.

    Attributes
    ----------
    stages
        Layers [k, l) on a group, shape (G, R, L + 1, L + 1): seconds of the ``forward``, of all
        ``work`` (backward and recomputation too), of the ``reduce`` and the ``update`` once an
        iteration; bytes that are ``static``, ``saved`` and ``working`` (as in `Kept`). Infinite
        ``work`` where a microbatch has too few samples for the group.
    links
        Seconds of a transfer from one group to another in front of layer l, and of its gradient
        back, shape (G, G, L + 1).
    groups
        The ``memory`` of a group's smallest device, and the first group that this one is ``like``:
        the two can trade places. Shape (G,).
    ahead
        Sums over the first l layers, each on the group that is best for it, shape (L + 1,):
        ``work`` and ``update`` seconds, ``static`` bytes without buffers, ``saved`` bytes; and
        ``kept``, byte seconds from the forwards to the backwards if what follows layer l takes no
        time.
    sends
        Seconds there and back between a group and another in front of it, at best, shape
        (G, L + 1).
    microbatches
        In an iteration.
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
    """Which stages on which groups, in which pattern, have the least period.

    Attributes
    ----------
    groups
        Positions of devices in the cluster; those of a group split every microbatch. Groups may
        stay idle.
    recompute
        What a stage may do: ``none``, ``full`` or both (see `Stage`).
    """

    problem: PipelineProblem
    groups: tuple[tuple[int, ...], ...]
    recompute: tuple[str, ...] = ("none",)

    def __post_init__(self) -> None:
        positions = [v for group in self.groups for v in group]
        size = len(self.problem.cluster)
        if not self.groups or not all(self.groups):
            raise InputError("groups: at least one is needed, and a device in each")
        if len(set(positions)) < len(positions) or not set(positions) <= set(range(size)):
            raise InputError(
                f"groups must be disjoint and of positions 0 to {size - 1}, got {self.groups}"
            )
        if not self.recompute or not set(self.recompute) <= set(MODES):
            raise InputError(f'recompute must be of "none" and "full", got {self.recompute}')

    def stage(self, start: int, stop: int, group: int, mode: int) -> Stage:
        """The stage of layers [start, stop) on a group, by its number."""
        devices = self.problem.cluster.devices
        names = tuple(devices[v].name for v in self.groups[group])
        kind = cast(Literal["none", "full"], self.recompute[mode])
        return Stage((start, stop), names, recompute=kind)

    @cached_property
    def form(self) -> JointForm:
        """The figures, for the search."""
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

    def _links(self) -> Records:
        count, size = len(self.groups), len(self.problem.chain) + 1
        links = np.zeros((count, count, size), dtype=LINK)
        for g, h in permutations(range(count), 2):
            for l in range(1, size - 1):
                pair = self.groups[g], self.groups[h]
                links[g, h, l] = self.problem.transfer_seconds(l, *pair)
        return links

    def _ahead(self) -> Records:
        """Sums over layers that hold however they are put into stages."""
        problem, sizes = self.problem, sorted({len(group) for group in self.groups})
        kinds = {
            (problem.cluster.devices[v].kind, len(group)) for group in self.groups for v in group
        }
        costs = [problem.costs(*key) for key in sorted(kinds)]
        updates = [problem.update_per_layer(kind) for kind, _ in sorted(kinds)]
        work = np.min([cost.forward_seconds + cost.backward_seconds for cost in costs], axis=0)
        saved = np.min([problem.saved_per_layer(size) for size in sizes], axis=0)
        if "full" in self.recompute:
            saved = np.zeros_like(saved)  # all but a stage's input may be forgotten
        factor = min(state_factor(problem, size, DOUBLE_BUFFER, overlapping=True) for size in sizes)
        ahead = np.zeros(len(work) + 1, dtype=AHEAD)
        ahead["work"][1:] = np.cumsum(work)
        ahead["update"][1:] = np.cumsum(np.min(updates, axis=0))
        ahead["static"][1:] = np.cumsum(factor * problem.chain.parameter_bytes)
        ahead["saved"][1:] = np.cumsum(saved)
        # Layer i keeps its bytes for the work of all layers from it to l.
        ahead["kept"] = ahead["saved"] * ahead["work"]
        ahead["kept"][1:] -= np.cumsum(saved * ahead["work"][:-1])
        return ahead


def _least_sends(links: Records) -> Floats:
    """The best of all groups in front of each; 0 if there is no other."""
    both = links["there"] + links["back"]
    count = len(both)
    others = np.where(np.eye(count, dtype=bool)[:, :, None], np.inf, both)
    return np.asarray(others.min(axis=0) if count > 1 else both[0])


def _like(form: JointForm) -> Ints:
    """Of each group the first that is its equal: trading the two changes no figure."""
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
