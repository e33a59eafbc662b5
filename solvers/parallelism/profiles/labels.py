"""Lower bounds on the time of profiled pipelines, by a dynamic program from the last stage on.

A label stands for the stages from a layer to the end. The way from a stage's first action to its
last is at least ``profiled_time.least_finish``; the stages before it add their forwards at the
beginning, and for the end of the first stage their backwards. All that stages change which are put
in front is known by three numbers (``later``, ``ended``, ``updated``), in all of which the bound
does not fall. So of two labels with the same devices, number of stages and transfer from the next
stage in front, one that is no worse in all three suffices.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import nsmallest

from numba import njit

from stagewright.formulations.parallelism.profiles.pipelines import least_finish
from stagewright.solvers.parallelism.profiles.tables import Tables, TimedStage

finish = njit(cache=True)(least_finish)


@njit(cache=True)
def least_total(
    forward: float,
    backward: float,
    after: float,
    send: float,
    later: float,
    stages_later: int,
    drained: float,
    closed: float,
    microbatches: int,
    before: tuple[float, float, float],
    least_after: float,
) -> float:
    """A lower bound on the seconds of every completion of a label.

    ``before``: least seconds of the layers before the head, of forwards and of backwards; and of a
    microbatch in their slowest stage.
    """
    ahead, back, even = before
    own = finish(forward, backward, (0.0, send), later, stages_later, microbatches)
    total = max(microbatches * even, ahead + back + max(own, drained)) + least_after
    return max(total, ahead + closed, ahead + own + after)


CHUNK = 1024  # labels between two looks at the clock


@dataclass(frozen=True, slots=True, eq=False)
class Tail:
    """The stages after a stage: the next ``label``, None after the last, and seconds.

    Attributes
    ----------
    used
        Devices of each pool, those of the stage in front among them.
    send
        A transfer from the stage in front.
    later
        From the end of a forward of the stage in front to its backward, if it has nothing to do.
    ended, updated
        Since the end of its first forward: until its last backward may start, as the label needs
        it; until a stage of the label has updated.
    """

    label: "ProfileLabel | None"
    used: tuple[int, ...]
    stages_later: int
    send: float
    later: float
    ended: float
    updated: float

    def no_worse(self, other: "Tail") -> bool:
        """Whether a stage before this tail never has a larger bound than before ``other``."""
        return (
            self.later <= other.later
            and self.ended <= other.ended
            and self.updated <= other.updated
        )


@dataclass(frozen=True, slots=True, eq=False)
class ProfileLabel:
    """Stages from ``head`` to the end."""

    head: TimedStage
    tail: Tail

    @property
    def drained(self) -> float:
        """Since the head's first forward begins, until its last backward, as later stages need."""
        return self.head.forward + self.head.backward + self.tail.ended

    @property
    def closed(self) -> float:
        """Since the head's first forward begins, until a later stage has updated."""
        return self.head.forward + self.tail.updated

    def stages(self) -> Iterator[TimedStage]:
        """The stages of the label, from the first to the last."""
        one: ProfileLabel | None = self
        while one is not None:
            yield one.head
            one = one.tail.label


class Overflow(Exception):  # noqa: N818 - no error: the search ends without a proof
    """More labels than are allowed, or no time is left."""


class ProfileLabels:
    """The search at one microbatch size and number of pipelines, below ``cutoff`` seconds."""

    def __init__(
        self,
        tables: Tables,
        cutoff: float,
        most: int,
        *,
        prune: bool,
        width: int | None = None,
        is_late: Callable[[], bool] = lambda: False,
    ) -> None:
        self.tables, self.cutoff, self.most, self.prune = tables, cutoff, most, prune
        self.width, self.is_late = width, is_late
        self.made = 0
        self._heads: dict[tuple[int, int, int], list[TimedStage]] = {}

    def run(self) -> list[tuple[float, ProfileLabel]]:
        """Labels of all layers below the cutoff, by bound; ``Overflow`` if too many, or late.

        Without ``prune`` they are all pipelines whose bound is below it; with it, no pipeline that
        is left out has a smaller bound than the first; but with a ``width`` only so many labels are
        kept for each first layer, and nothing is proved.
        """
        layers = self.tables.layers
        at: list[list[ProfileLabel]] = [[] for _ in range(layers + 1)]
        for start in range(layers, 0, -1):
            at[start] = self._best(at[start])
            for choice in range(len(self.tables.choices)):
                tails = self._last(choice) if start == layers else self._tails(at[start], choice)
                for tail in self._kept(tails):
                    for label in self._labels(tail, start, choice):
                        at[label.head.start].append(label)
        found = ((self._least(one.head, one.tail), one) for one in at[0])
        return sorted(found, key=lambda one: one[0])

    def _best(self, labels: list[ProfileLabel]) -> list[ProfileLabel]:
        """The labels with the least bounds, as many as the width."""
        if self.width is None or len(labels) <= self.width:
            return labels
        return nsmallest(
            self.width,
            labels,
            key=lambda one: self._least(one.head, one.tail, self.tables.worth(one.tail.used)),
        )

    def _last(self, choice: int) -> Iterator[Tail]:
        used = self._use((0,) * len(self.tables.capacity), choice)
        if used is not None:
            yield Tail(None, used, 0, 0.0, 0.0, 0.0, 0.0)

    def _tails(self, labels: Iterable[ProfileLabel], choice: int) -> Iterator[Tail]:
        """The labels behind a stage of ``choice``."""
        tables = self.tables
        for label in labels:
            used = self._use(label.tail.used, choice)
            if used is None:
                continue
            head, tail = label.head, label.tail
            send = tables.send(choice, head.choice, head.start)
            through = finish(
                head.forward,
                head.backward,
                (send, tail.send),
                tail.later,
                tail.stages_later,
                tables.microbatches,
            )
            yield Tail(
                label=label,
                used=used,
                stages_later=tail.stages_later + 1,
                send=send,
                later=head.forward + head.backward + tail.later + 2 * send,
                ended=max(through, label.drained + 2 * send),
                updated=max(through + head.after, label.closed + send),
            )

    def _use(self, used: tuple[int, ...], choice: int) -> tuple[int, ...] | None:
        """Devices in use with another stage; None if there are not as many."""
        pool = self.tables.choices[choice].pool
        after = used[pool] + self.tables.devices[choice]
        if after > self.tables.capacity[pool]:
            return None
        return (*used[:pool], after, *used[pool + 1 :])

    def _kept(self, tails: Iterator[Tail]) -> Iterable[Tail]:
        if not self.prune:
            return tails
        groups: defaultdict[tuple[object, ...], list[Tail]] = defaultdict(list)
        for tail in sorted(tails, key=lambda one: (one.ended, one.updated, one.later)):
            group = groups[tail.used, tail.stages_later, tail.send]
            if not any(one.no_worse(tail) for one in group):
                group.append(tail)
        return [tail for group in groups.values() for tail in group]

    def _labels(self, tail: Tail, stop: int, choice: int) -> Iterator[ProfileLabel]:
        """Stages that end before ``stop`` in front of ``tail``, where some completion may win."""
        worth = self.tables.worth(tail.used)
        for head in self._stages(stop, choice, tail.stages_later):
            self.made += 1
            if self.made > self.most or (self.made % CHUNK == 0 and self.is_late()):
                raise Overflow
            if self._least(head, tail, worth) < self.cutoff:
                yield ProfileLabel(head, tail)

    def _stages(self, stop: int, choice: int, later: int) -> list[TimedStage]:
        """Stages that fit and are quick enough; listed once."""
        key = (stop, choice, later)
        if key not in self._heads:
            most = self.cutoff / self.tables.microbatches
            self._heads[key] = list(self.tables.stages(stop, choice, later, most))
        return self._heads[key]

    def _least(self, head: TimedStage, tail: Tail, worth: float = 0.0) -> float:
        """A lower bound on the seconds of all completions; ``worth`` is of devices not in use."""
        tables = self.tables
        least: float = least_total(
            head.forward,
            head.backward,
            head.after,
            tail.send,
            tail.later,
            tail.stages_later,
            head.forward + head.backward + tail.ended,
            head.forward + tail.updated,
            tables.microbatches,
            tables.before(head.start, worth),
            tables.least_after if head.start else head.after,
        )
        return least
