"""The search over the labels of one server-aware relaxation, and its bisection."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from typing import NamedTuple

import numpy as np

from stagewright.formulations.pipelines.bounds.relaxation import least_level
from stagewright.formulations.pipelines.bounds.server_relaxation import (
    Place,
    RelaxedStage,
    ServerRelaxation,
)
from stagewright.formulations.pipelines.bppm import prefix_sums
from stagewright.formulations.prices.collectives import paced_seconds
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.pipelines.servers.conditions import (
    LOADS,
    SHARED_VALUES,
    VALUES,
    Labels,
    Loads,
    Scratch,
)
from stagewright.solvers.pipelines.servers.kernels import GAVE_UP, NONE, find
from stagewright.solvers.pipelines.servers.tables import (
    Before,
    ServerRest,
    fill_before,
    fill_rest,
    fill_shared_rest,
)

MARGIN = 1e-9
FIRST_STEP = 0.005  # relative, above the bound of the tables; doubled until a plan is found
_SHARED_STEP = 0.02  # the largest, for shared devices: a plan is found slowly far above the bound
PRECISION = 5e-4  # relative width at which the bisection stops
MOST_LABELS = 48  # of a state; more are merged
FEW_LABELS = 6  # if devices are shared: a first bound comes early
_FINER = 8  # times as many in the next search
_ARRIVALS = 5  # times as many labels after a channel
LABEL_BYTES = 4e8  # of all states
MOST_STAGES = 1_000_000  # placed stages that are remembered, for the relaxed plans
STEPS_PER_SECOND = 3e5  # a low estimate
_COUNTED_STEPS = 1e8  # of the tables that count the devices of rank 0
_TABLE_STEPS = 5e9  # of the tables for one bound; above, only the load bound is used

OnPlan = Callable[[tuple[RelaxedStage, ...]], None]


class RelaxedAnswer(NamedTuple):
    """The answer of a search: a relaxed plan, a proof that none exists, or neither in time."""

    plan: tuple[RelaxedStage, ...]
    proves: bool


@dataclass
class ServerSearch:
    """The search over the relaxed plans of ``form``.

    ``high`` is the least time for which a search ended without a proof; inf before the first. A
    state has at most ``most_labels``, if there is memory for them.
    """

    form: ServerRelaxation
    high: float = math.inf
    most_labels: int = MOST_LABELS

    def finer(self) -> "ServerSearch | None":
        """A slower search that merges fewer labels; None without memory, or for few labels."""
        most = _FINER * self.most_labels
        if not self.form.shared or most * self._label_bytes > LABEL_BYTES:
            return None
        return ServerSearch(self.form, most_labels=most)

    @property
    def is_small(self) -> bool:
        """Whether the tables are small enough."""
        return self._table_steps <= _TABLE_STEPS

    @property
    def _table_steps(self) -> float:
        choices, layers = self.form.forward.shape
        return float(choices * layers**2 / 2 * self.form.size)

    def raised(self, low: float, most: float, until: float, on_plan: OnPlan) -> float:
        """The largest time from ``low``, which is proved, to ``most`` that is proved too short.

        The tables prove a first bound; then times grow until there is a relaxed plan. Without
        a positive ``low`` there is nothing to grow from.
        """
        if low <= 0:
            return low
        if self.high == math.inf:
            if self.answer(math.inf, 0).proves:
                return most
            low = self._by_tables(low, most)
        growth = FIRST_STEP
        while low < most and self.high == math.inf and monotonic() < until:
            low = self._ask(low, min(most, low * (1 + growth)), self._steps(until), on_plan)
            growth = min(2 * growth, _SHARED_STEP if self.form.shared else math.inf)
        while min(most, self.high) > low * (1 + PRECISION) and monotonic() < until:
            low = self._ask(low, (low + min(most, self.high)) / 2, self._steps(until), on_plan)
        return low

    def proves(self, seconds: float) -> bool:
        """Whether no relaxed plan takes less than ``seconds``."""
        is_open = seconds < self.high or self.high == math.inf
        return is_open and self.answer(seconds, math.inf).proves

    def _ask(self, low: float, seconds: float, steps: float, on_plan: OnPlan) -> float:
        """``seconds`` if no plan is as fast, else ``low``, with ``seconds`` as the new high."""
        found = self.answer(seconds, steps)
        if found.proves:
            return seconds
        self.high = seconds
        if found.plan:
            on_plan(found.plan)
        return low

    def _by_tables(self, low: float, most: float) -> float:
        """The largest time up to ``most`` that the tables alone prove to be too short."""
        high = low
        while low < most and high == low:
            high = min(most, 2 * high)
            low = high if self.answer(high, 0).proves else low
        while high > low * (1 + PRECISION):
            middle = (low + high) / 2
            low, high = (middle, high) if self.answer(middle, 0).proves else (low, middle)
        return low

    def answer(
        self, seconds: float, steps: float, restricted: ServerRelaxation | None = None
    ) -> RelaxedAnswer:
        """A relaxed plan of less than ``seconds``, or the proof that there is none.

        Labels that were merged may give a relaxed plan that takes longer. The search ends after
        ``steps``. ``restricted`` is ``form`` with fewer stages or places.
        """
        form = restricted or self.form
        work = self._work._replace(form=form, until=seconds * (1 - MARGIN))
        fill_before(form, work.until, self._before)
        if not form.shared:
            turned = ServerRest(
                *(np.empty_like(table.transpose(0, 2, 1), order="C") for table in work.rest)
            )
            fill_rest(form, work.until, self._before, turned)
            for table, entries in zip(work.rest, turned, strict=True):
                table[:] = entries.transpose(0, 2, 1)
        else:
            fill_shared_rest(form, work.until, self._before, self._drain, work.rest)
            work = work._replace(loads=_loads(form, work.until, self._drain))
        if not np.isfinite(work.rest.path[-1, self.form.size, 0]):
            return RelaxedAnswer((), True)
        found = find(work, steps)
        if found in (NONE, GAVE_UP):
            return RelaxedAnswer((), found == NONE)
        return RelaxedAnswer(tuple(self._stages(found))[::-1], False)

    def _stages(self, found: int) -> Iterator[RelaxedStage]:
        """The stages from the last one on; some are missing if there were too many to remember."""
        placed = self._work.placed
        while 0 <= found < len(placed):
            found, start, stop, choice, place = placed[found].tolist()
            devices, rank = int(self.form.devices[choice]), int(self.form.rank[choice])
            yield RelaxedStage(start, stop, devices, Place(place), rank)

    def _steps(self, until: float) -> float:
        """The steps of a search until then; each takes longer with more labels."""
        pace = STEPS_PER_SECOND * min(1.0, MOST_LABELS / self.most_labels)
        return max(0.0, until - monotonic()) * pace

    @cached_property
    def _before(self) -> Before:
        return Before(*(np.zeros(self._entries) for _ in range(2)))

    @property
    def _entries(self) -> tuple[int, int]:
        """The shape of the tables, by devices and layers."""
        return self.form.size + 1, self.form.forward.shape[1]

    @property
    def _counted(self) -> int:
        """Devices of rank 0, if the tables count them; otherwise 0."""
        fast = int(self.form.available[0])
        counts = (
            not self.form.shared
            and fast < self.form.size
            and self._table_steps * fast <= _COUNTED_STEPS
        )
        return fast if counts else 0

    @property
    def _states(self) -> tuple[int, int, int]:
        """The states that have labels: the last stage's sort, layers placed, devices used."""
        sorts = len(self.form.available) + (self.form.turns < len(self.form.devices))
        if self.form.shared:
            sorts = len(self.form.devices)
        return sorts, self._entries[1], self._entries[0]

    @property
    def _label_bytes(self) -> float:
        """Bytes of one label in every state."""
        values = SHARED_VALUES if self.form.shared else VALUES
        return float(np.prod(self._states) * 8 * (values + 1))

    @cached_property
    def _drain(self) -> Floats:
        return _drain(self.form) if self.form.shared else np.zeros((0,) * 4)

    @cached_property
    def _work(self) -> Scratch:
        values = SHARED_VALUES if self.form.shared else VALUES
        most = int(np.clip(LABEL_BYTES / self._label_bytes, 4, self.most_labels))
        return Scratch(
            form=self.form,
            until=0.0,
            rest=ServerRest(*(np.zeros((self._counted + 1, *self._entries)) for _ in range(3))),
            loads=_loads(self.form, 1.0, self._drain),
            labels=_empty(self._states, most, values),
            arrivals=_empty((1, 1, 1), _ARRIVALS * self.most_labels, values),
            placed=np.zeros((MOST_STAGES, 5), np.int64),
            steps=np.zeros(2, np.int64),
            values=np.zeros(values),
            tails=np.zeros(self.form.microbatches),
        )


def _empty(states: tuple[int, int, int], most: int, values: int) -> Labels:
    source, known = np.zeros((*states, most), np.int64), np.zeros((*states, most, values))
    return Labels(np.zeros(states, np.int64), source, known)


def _loads(form: ServerRelaxation, until: float, drain: Floats) -> Loads:
    """The measures of loads on shared devices for a time ``until``.

    Long layers are the k longest ones, for the k that accounts for most work.
    """
    seconds = form.microbatches * np.diff(form.forward + form.backward, axis=1)
    layers = np.argsort(-seconds[0])
    layers = layers[: 1 + np.argmax(seconds[0, layers] * np.arange(1, len(layers) + 1))]
    is_long = np.zeros_like(seconds)
    is_long[:, layers] = 1.0
    measures = np.stack([form.devices[:, None] * seconds, is_long])
    alone = np.stack([form.limit[:, l, l + 1] for l in range(seconds.shape[1])], axis=1)
    least = np.where((alone > 0) & (seconds <= until), measures, np.inf).min(axis=1)
    ring = paced_seconds(np.diff(form.parameters), form.ring[:, :, None], 0.0)
    return Loads(
        size=seconds[:, layers].min(axis=1),
        finish=np.array([_least_finish(form, c, layers) for c in range(len(seconds))]),
        taken=prefix_sums(measures),
        rings=prefix_sums(ring),
        need=np.pad(np.cumsum(least[:, ::-1], axis=1)[:, ::-1], ((0, 0), (0, 1))),
        back=form.microbatches * np.diff(form.backward, axis=1)[:, layers].min(axis=1),
        ahead=_least_from(form.forward),
        astern=_least_from(form.gradient),
        boundary=_least_after(form.boundary),
        drain=drain,
        spare=np.zeros(LOADS),
    )


def _drain(form: ServerRelaxation) -> Floats:
    """The backwards and all-reduces of layers [l, m), by [link, choice, l, m].

    The all-reduces of layers up to j follow all input gradients from j on, and all weight gradients
    of one of these layers.
    """
    layers = len(form.parameters) - 1
    drain = np.zeros((len(form.seconds_per_byte), len(form.devices), layers + 1, layers + 1))
    for link, c in np.ndindex(drain.shape[:2]):
        sent, weights = form.gradient[c], np.diff(form.backward[c] - form.gradient[c])
        ring = form.parameters * form.ring[link, c]
        for l in range(layers):
            least = form.microbatches * np.minimum.accumulate(weights[l:])
            alone = ring[l + 1 :] - ring[l] + least - form.microbatches * sent[l:-1]
            drain[link, c, l, l + 1 :] = np.maximum.accumulate(alone)
            drain[link, c, l, l + 1 :] += form.microbatches * sent[l + 1 :]
    return drain


def _least_from(sums: Floats) -> Floats:
    """The least seconds of the layers from l on, by prefix sums of every choice, shape (L + 1,)."""
    return np.append(np.cumsum(np.diff(sums, axis=1).min(axis=0)[::-1])[::-1], 0.0)


def _least_after(boundary: Floats) -> Floats:
    """The least of the boundaries after each one; 0 where there is none, shape (L + 1,)."""
    least = np.minimum.accumulate(boundary[-2:0:-1])[::-1]
    return np.concatenate([least, np.zeros(len(boundary) - len(least))])


def _least_finish(form: ServerRelaxation, c: int, layers: Ints) -> float:
    """The least all-reduce and step of one of the ``layers``."""
    link = least_level(form, form.devices[c])
    weights = form.parameters[layers + 1] - form.parameters[layers]
    step = form.update[c, layers + 1] - form.update[c, layers]
    ring = paced_seconds(weights, form.ring[link, c], form.ring_latency[link, c])
    return float((ring + step).min())
