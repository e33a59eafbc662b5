"""Plans of one device between two losses: weight gradients in its sub-stream, by Algorithm 1.

Oh et al. (EuroSys 2022), section 4.1. Every layer is a stage. The main stream has the input
gradients, then the optimizer steps and forwards; microbatches follow each other within a layer.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, product
from operator import itemgetter

import numpy as np

from stagewright.formulations.backprop.models import two_streams_bound
from stagewright.formulations.backprop.regions import Streams
from stagewright.formulations.backprop.training import Layers
from stagewright.formulations.plans.actions import FLUSH, UPDATE, Action, B, F, I, W
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.timing import Blocks, durations, kernel_shares, updated_stages
from stagewright.formulations.schedules.backward_first import earliest_starts, two_stream_starts
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.documents.units import format_seconds
from stagewright.solvers.backprop.list_scheduling import schedule_streams
from stagewright.solvers.planners.steps.proposal import Proposal, cost_of

_Sub = tuple[Action, ...]
"""Weight gradients in the order of the sub-stream."""

_Main = tuple[Action, ...]
"""Gradients in the order of the main stream."""

_MOST_REGIONS = 64  # of equal time
_MOST_TRIED = 600  # sub-streams of the local search
_MOST_PLACES = 16  # of a weight gradient
ROUNDING = 1e-9  # relative; what is shorter by less is not
_MOST_KERNELS = 128  # with a region each; Algorithm 1 takes cubic time in their number


def require_one_device(problem: PipelineProblem) -> None:
    """Refuse a cluster of several devices."""
    if len(problem.cluster) > 1:
        raise InputError(
            f"training on a single device, and the cluster has {len(problem.cluster)}: use data "
            "or pipeline"
        )


def one_device_proposals(problem: PipelineProblem, ended: Callable[[], bool]) -> Iterator[Proposal]:
    """One stream, two in the usual order, Algorithm 1 on several regionings, and a local search.

    The local search asks ``ended`` before every step whether its time is over.
    """
    require_one_device(problem)
    yield from _OneDevice(problem, ended).proposals()


@dataclass(frozen=True)
class _OneDevice:
    problem: PipelineProblem
    ended: Callable[[], bool]

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the plan: one per layer."""
        name = self.problem.cluster.devices[0].name
        return tuple(Stage((i, i + 1), (name,)) for i in range(len(self.problem.chain)))

    @cached_property
    def splits(self) -> tuple[bool, ...]:
        """Whether a layer has the times of both parts of its backward."""
        whole = self.problem.layer_with_whole_backward
        return tuple(whole(*stage.layers) is None for stage in self.stages)

    @cached_property
    def seconds(self) -> Blocks:
        """Seconds of all actions; backwards are split where the layer allows it."""
        split = np.repeat(np.array(self.splits)[:, None], self.problem.microbatches, axis=1)
        return durations(self.problem, self.stages, split)

    @cached_property
    def streams(self) -> Streams:
        """The kernels of a layer for all microbatches, one after another; without optimizer steps.

        A whole backward counts as an output gradient.
        """
        total = {kind: np.nan_to_num(self.seconds[kind]).sum(axis=1) for kind in (F, B, I, W)}
        shares = [kernel_shares(self.problem, stage) for stage in self.stages]
        gradients = [one[I if parts else B] for one, parts in zip(shares, self.splits, strict=True)]
        return Streams(
            Layers(
                tuple(total[F].tolist()),
                tuple((total[I] + total[B]).tolist()),
                tuple(total[W].tolist()),
            ),
            (*gradients, *(one[F] for one in shares)),
            tuple(one[W] for one in shares),
        )

    @cached_property
    def movable(self) -> _Sub:
        """The weight gradients that take time, of the last layer first."""
        seconds = np.nan_to_num(self.seconds[W][:, 0])
        layers = (s for s in reversed(range(len(self.stages))) if seconds[s] > 0)
        return tuple(Action(s, W, m) for s, m in product(layers, self.microbatches))

    @property
    def microbatches(self) -> range:
        return range(self.problem.microbatches)

    def proposals(self) -> Iterator[Proposal]:
        """Proposals, each with the costs of the earlier proposals in its notes."""
        one = self._one_stream()
        if not (self.problem.knows_shares and self.movable):
            yield one
            return
        spent = [f"one stream takes {format_seconds(cost_of(self.problem, one))}"]
        usual = self._two_streams("two streams in the usual order", self.movable, spent)
        # The faster one first: what comes first may be all that is priced within the limits.
        faster = cost_of(self.problem, usual) < cost_of(self.problem, one) * (1 - ROUNDING)
        yield from (usual, one) if faster else (one, usual)
        spent.append(f"in the usual order {format_seconds(cost_of(self.problem, usual))}")
        best, least = self.movable, self._end(self.movable)
        for name, ends in self._regionings():
            order = [layer - 1 for layer in schedule_streams(self.streams, ends).order]
            every = (Action(s, W, m) for s, m in product(order, self.microbatches))
            sub = tuple(one for one in every if one in set(self.movable))
            yield self._two_streams(f"two streams, {name}", sub, spent)
            if self._end(sub) < least:
                best, least = sub, self._end(sub)
        for improved, main in self._climb(best, least):
            yield self._two_streams("two streams, improved", improved, spent, main)

    def _climb(self, sub: _Sub, least: float) -> Iterator[tuple[_Sub, _Main]]:
        """Better streams: one weight gradient at a time goes elsewhere, in either."""
        floor, main = two_streams_bound(self.problem) or 0.0, self._gradients(sub)
        tried = unchanged = 0
        for moved in cycle(self.movable[::-1]):
            if tried >= _MOST_TRIED or unchanged == len(self.movable):
                return
            if least <= floor * (1 + ROUNDING):
                return
            places = [(self._end(*one), one) for one in self._with(sub, main, moved)]
            if not places:  # the time is over
                return
            end, found = min(places, key=itemgetter(0))
            tried, unchanged = tried + len(places), unchanged + 1
            if end < least * (1 - ROUNDING):
                (sub, main), least, unchanged = found, end, 0
                yield found

    def _with(self, sub: _Sub, main: _Main, moved: Action) -> Iterator[tuple[_Sub, _Main]]:
        """Both streams with ``moved`` in every place (or some of many) of either, in time."""
        others, gradients = (tuple(one for one in row if one != moved) for row in (sub, main))
        after = gradients.index(replace(moved, kind=I)) + 1
        for row, first in ((gradients, after), (others, 0)):
            step = max(1, (len(row) - first) // _MOST_PLACES)
            for place in range(first, len(row) + 1, step):
                if self.ended():
                    return
                placed = (*row[:place], moved, *row[place:])
                yield (placed, gradients) if row is others else (others, placed)

    def _end(self, sub: _Sub, main: _Main | None = None) -> float:
        """Seconds of the window; inf if the streams wait for each other."""
        try:
            starts, _ = self._timed(sub, main)
        except InvalidPlan:
            return math.inf
        return float(np.nanmax(starts[F] + self.seconds[F]))

    def _regionings(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Ends of regions among the main kernels: of equal time, and a region per kernel."""
        until = np.cumsum([seconds for _, _, seconds, _ in self.streams.main()])
        if len(until) == 0:
            return
        count, known = 1, set[tuple[int, ...]]()
        while count <= min(_MOST_REGIONS, len(until)):
            targets = until[-1] * np.arange(1, count + 1) / count
            cuts = np.searchsorted(until, targets * (1 - 1e-9)) + 1
            ends = tuple(sorted({*cuts.tolist(), len(until)}))
            if ends not in known:
                yield f"{len(ends)} regions", ends
            known.add(ends)
            count *= 2
        if len(until) <= _MOST_KERNELS:
            yield "a region per kernel", tuple(range(1, len(until) + 1))

    def _one_stream(self) -> Proposal:
        row = [*self._gradients(()), *self._forwards()]
        starts = earliest_starts(self.problem, self.stages, {self.stages[0].devices[0]: row})
        if not self.movable:
            note = "no weight gradient has a time of its own"
        elif self.problem.knows_shares:
            note = "one stream; two streams in the usual order are no faster, or do not fit"
        else:
            note = (
                "one stream: streams overlap only where kernels leave a share of the device; give "
                "the layers' forward_share, input_gradient_share and weight_gradient_share in the "
                "profile, or assume one with --share"
            )
        return Proposal(self.stages, starts, notes=(note, *self._notes()), begins="backward")

    def _two_streams(
        self, name: str, sub: _Sub, spent: Sequence[str], main: _Main | None = None
    ) -> Proposal:
        """Weight gradients ``sub``, in this order, in the sub-stream."""
        starts, ends = self._timed(sub, main)
        notes = f"{name} ({', '.join(spent)})", *self._notes()
        return Proposal(self.stages, starts, notes=notes, begins="backward", sub_ends=ends)

    def _timed(self, sub: _Sub, main: _Main | None = None) -> tuple[Blocks, Floats]:
        """Starts of all actions, everything as early as possible, and ends in the sub-stream."""
        row = [*(self._gradients(sub) if main is None else main), *self._forwards()]
        return two_stream_starts(self.problem, self.stages, row, sub)

    def _gradients(self, sub: _Sub) -> _Main:
        """Those of the main stream in the usual order: all weight gradients not in ``sub``."""
        beside, row = set(sub), list[Action]()
        for s, m in product(reversed(range(len(self.stages))), self.microbatches):
            parts = (I, W) if self.splits[s] else (B,)
            row += [one for kind in parts if (one := Action(s, kind, m)) not in beside]
        return tuple(row)

    def _forwards(self) -> list[Action]:
        """The optimizer steps and forwards, which follow the gradients in the main stream."""
        updated, row = updated_stages(self.problem, self.stages, FLUSH), list[Action]()
        for s in range(len(self.stages)):
            row += [Action(s, UPDATE)] if s in updated else []
            row += [Action(s, F, m) for m in self.microbatches]
        return row

    def _notes(self) -> Iterator[str]:
        """Notes on the assumptions behind the figures: whole backwards, assumed shares."""
        whole = [s for s, parts in enumerate(self.splits) if not parts]
        if whole:
            yield (
                f"{len(whole)} of {len(self.stages)} layers have whole backwards, the first is "
                f"{self.problem.chain.layers[whole[0]].name!r}: the profile has no separate times"
            )
        share = self.problem.assumed_share
        if share is not None:
            yield f"shares are assumed, not measured: {share:g} where the profile has none"
