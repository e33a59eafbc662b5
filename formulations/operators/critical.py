"""The chain of operators and transfers that a plan's time is the sum of."""

import numpy as np

from stagewright.formulations.operators.problem import OperatorProblem, Timetable
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE


def critical_chain(problem: OperatorProblem, timetable: Timetable) -> tuple[int, ...]:
    """Operators up to the last one to end, each of which waited for the one before it.

    It waited for a tensor of that operator, or for its device. If it waited for none, the chain
    begins with it; in a timetable without needless waits that is at time 0.
    """
    return tuple(_Chain(problem, timetable).walk())


class _Chain:
    """The action whose end let an operator or a transfer begin."""

    def __init__(self, problem: OperatorProblem, timetable: Timetable) -> None:
        self.problem, self.timetable = problem, timetable
        self.slack = RELATIVE_TOLERANCE * timetable.end
        self.place = np.empty(len(problem.names), dtype=np.int64)
        self.place[timetable.order] = np.arange(len(problem.names))
        self.sent = {
            (int(t), int(target)): k
            for k, (t, target) in enumerate(zip(timetable.sent, timetable.target, strict=True))
        }
        lasting = np.flatnonzero(timetable.finish > timetable.start)
        self.on_device = [
            lasting[timetable.device[lasting] == d] for d in range(len(problem.devices))
        ]
        self.by_finish = [
            own[np.argsort(timetable.finish[own], kind="stable")] for own in self.on_device
        ]

    def walk(self) -> list[int]:
        """The chain, first operator first."""
        found = [int(np.argmax(self.timetable.finish))]
        while (before := self._before(found[-1])) is not None:
            found.append(before)
        return found[::-1]

    def _before(self, i: int) -> int | None:
        start, device = self.timetable.start[i], int(self.timetable.device[i])
        first, tensors = self.problem.inputs
        for t in tensors[first[i] : first[i + 1]].tolist():
            maker = int(self.problem.maker[t])
            k = self.sent.get((t, device))
            if k is None and self._ends(self.timetable.finish[maker], start):
                return maker
            if k is not None and self._ends(self.timetable.sent_finish[k], start):
                return self._before_transfer(k)
        return self._on_device(i, device, start)

    def _before_transfer(self, k: int) -> int:
        """The maker of the sent tensor, or of the tensor that its pair of devices sent before."""
        table, maker = self.timetable, self.problem.maker
        seen = {k}
        while True:
            i = int(maker[table.sent[k]])
            if self._ends(table.finish[i], table.sent_start[k]):
                return i
            source = table.device[maker[table.sent]]
            same = (source == table.device[i]) & (table.target == table.target[k])
            near = np.abs(table.sent_finish - table.sent_start[k]) <= self.slack
            earlier = [j for j in np.flatnonzero(same & near).tolist() if j not in seen]
            if not earlier:
                return i
            k = earlier[0]
            seen.add(k)

    def _on_device(self, i: int, device: int, start: float) -> int | None:
        """The operator that its device ran until ``start``."""
        own = self.by_finish[device]
        ends = self.timetable.finish[own]
        at = int(np.searchsorted(ends, start - self.slack))
        while at < len(own) and ends[at] <= start + self.slack:
            if own[at] != i and self.place[own[at]] < self.place[i]:
                return int(own[at])
            at += 1
        return None

    def _ends(self, finish: float, start: float) -> bool:
        return bool(abs(finish - start) <= self.slack)
