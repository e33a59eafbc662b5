"""Lower bounds on the time of profiled pipelines, by a dynamic program from the last stage on.

A label stands for the stages from a layer to the end. The way from a stage's first action to its
last is at least :func:`least_finish`; the stages before it add their forwards at the beginning,
and for the end of the first stage their backwards. Of the stages in a label, all that later
prepended ones change is known by three numbers (``later``, ``drained``, ``closed``), in all of
which the bound does not fall. So of two labels with the same head and devices, one that is no worse
in all three suffices.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from stagewright.formulations.parallelism.profiled_time import least_finish
from stagewright.solvers.parallelism.profiled_tables import Stage, Tables


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """Stages from ``head`` to the end; seconds since the head's first forward begins.

    Attributes
    ----------
    later
        From the end of a forward of the head to its backward, if nothing else is to do.
    drained
        Until the head's last backward, as later stages need it.
    closed
        Until a later stage has updated.
    send
        A transfer from the head to the next stage.
    """

    head: Stage
    rest: "Label | None"
    used: tuple[int, ...]
    stages_later: int
    send: float
    later: float
    drained: float
    closed: float

    def no_worse(self, other: "Label") -> bool:
        """Whether no completion of ``other`` has a smaller bound than that of this label."""
        return (
            self.later <= other.later
            and self.drained <= other.drained
            and self.closed <= other.closed
        )

    def stages(self) -> Iterator[Stage]:
        """From the head to the last."""
        one: Label | None = self
        while one is not None:
            yield one.head
            one = one.rest


class Overflow(Exception):  # noqa: N818 - no error: the search ends without a proof
    """More labels than are allowed."""


class Labels:
    """The search at one microbatch size and number of pipelines, below ``cutoff`` seconds."""

    def __init__(self, tables: Tables, cutoff: float, most: int, *, prune: bool) -> None:
        self.tables, self.cutoff, self.most, self.prune = tables, cutoff, most, prune
        self.made = 0

    def run(self) -> list[tuple[float, Label]]:
        """Bounds and labels of all layers, by ascending bound; all below the cutoff.

        Without ``prune`` they are all pipelines whose bound is below it; with it, no pipeline that
        is left out has a smaller bound than the first.

        Raises
        ------
        Overflow
            If there are more than ``most`` labels.
        """
        at: list[list[Label]] = [[] for _ in range(self.tables.layers + 1)]
        done: list[tuple[float, Label]] = []
        for label in self._first():
            at[label.head.start].append(label)
        for start in range(self.tables.layers, 0, -1):
            for label in self._kept(at[start]):
                for longer in self._prepended(label):
                    at[longer.head.start].append(longer)
        for label in self._kept(at[0]):
            bound = self.bound(label)
            if bound < self.cutoff:
                done.append((bound, label))
        return sorted(done, key=lambda one: one[0])

    def bound(self, label: Label) -> float:
        """A lower bound on the seconds of the pipelines of a complete label."""
        finish = max(self._finish(label, 0.0), label.drained)
        return max(label.closed, finish + label.head.after)

    def _first(self) -> Iterator[Label]:
        tables = self.tables
        unused = (0,) * len(tables.capacity)
        for choice in range(len(tables.choices)):
            used = self._use(unused, choice)
            if used is None:
                continue
            for head in tables.stages(tables.layers, choice, 0, self._most_seconds):
                label = Label(head, None, used, 0, 0.0, 0.0, 0.0, 0.0)
                if self._may_win(label):
                    yield label

    @property
    def _most_seconds(self) -> float:
        return self.cutoff / self.tables.microbatches

    def _prepended(self, label: Label) -> Iterator[Label]:
        tables, next_ = self.tables, label.head
        for choice in range(len(tables.choices)):
            used = self._use(label.used, choice)
            if used is None:
                continue
            send = tables.send(choice, next_.choice, next_.start)
            finish = self._finish(label, send)
            later = next_.forward + next_.backward + label.later + 2 * send
            for head in tables.stages(
                next_.start, choice, label.stages_later + 1, self._most_seconds
            ):
                longer = Label(
                    head=head,
                    rest=label,
                    used=used,
                    stages_later=label.stages_later + 1,
                    send=send,
                    later=later,
                    drained=head.forward
                    + head.backward
                    + max(finish, label.drained + 2 * send if label.rest else 0.0),
                    closed=head.forward
                    + max(finish + next_.after, label.closed + send if label.rest else 0.0),
                )
                if self._may_win(longer):
                    yield longer

    def _use(self, used: tuple[int, ...], choice: int) -> tuple[int, ...] | None:
        """Devices in use with another stage; None if there are not as many."""
        pool = self.tables.choices[choice].pool
        after = used[pool] + self.tables.devices[choice]
        if after > self.tables.capacity[pool]:
            return None
        return (*used[:pool], after, *used[pool + 1 :])

    def _finish(self, label: Label, before: float) -> float:
        head = label.head
        return least_finish(
            head.forward,
            head.backward,
            (before, label.send),
            label.later,
            label.stages_later,
            self.tables.microbatches,
        )

    def _may_win(self, label: Label) -> bool:
        """Whether the bound of some completion may be below the cutoff."""
        self.made += 1
        if self.made > self.most:
            raise Overflow
        tables, start = self.tables, label.head.start
        if start == 0:
            return self.bound(label) < self.cutoff
        even = tables.microbatches * tables.even(start, label.used)
        ahead = float(tables.least_forward[start])
        finish = self._finish(label, 0.0)
        drained = ahead + float(tables.least_backward[start]) + max(finish, label.drained)
        least = max(
            max(even, drained) + tables.least_after,
            ahead + label.closed,
            ahead + finish + label.head.after,
        )
        return least < self.cutoff

    def _kept(self, labels: list[Label]) -> list[Label]:
        if not self.prune:
            return labels
        groups: defaultdict[tuple[object, ...], list[Label]] = defaultdict(list)
        for label in sorted(labels, key=lambda one: (one.drained, one.closed, one.later)):
            head = label.head
            group = groups[head.stop, head.choice, label.used, label.stages_later, label.send]
            if not any(one.no_worse(label) for one in group):
                group.append(label)
        return [label for group in groups.values() for label in group]
