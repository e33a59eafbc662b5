"""The least cost of a small makespan problem with memory, by a constraint model of its own.

It states the definition once more, with integer times and amounts, and shares no code with the
forms, bounds and searches. Microbatches may overtake each other.
"""

from collections import defaultdict
from itertools import pairwise

from ortools.sat.python import cp_model

from stagewright.formulations.pipelines.makespan import MakespanProblem


def least_cost(problem: MakespanProblem) -> int:
    """The least makespan or span of a problem whose times and amounts are integers."""
    model = _Model(problem)
    for _ in range(problem.microbatches):
        model.add_microbatch()
    return model.least()


class _Model:
    """Microbatches one by one; ``intervals`` by device or channel, ``held`` by device."""

    def __init__(self, problem: MakespanProblem) -> None:
        self.problem, self.model = problem, cp_model.CpModel()
        weights = problem.weight_gradient or (0.0,)
        times = (problem.forward, problem.backward, problem.send_forward, problem.send_backward)
        alone = sum(map(sum, (*times, weights)))
        # One microbatch after another: no schedule need last longer.
        self.horizon = int(problem.microbatches * alone + max(problem.reduce))
        self.intervals = defaultdict(list)
        self.held = defaultdict(list)
        self.firsts, self.ends = defaultdict(list), defaultdict(list)
        self.flying = defaultdict(list)

    def add_microbatch(self) -> None:
        problem = self.problem
        there = self._way(problem.forward, problem.send_forward, "there")
        back = self._way(problem.backward, problem.send_backward, "back")
        steps = [
            (self._start(place, seconds), int(seconds)) for place, seconds in there + back[::-1]
        ]
        for (start, seconds), (following, _) in pairwise(steps):
            self.model.add(following >= start + seconds)
        for s, d in enumerate(problem.device):
            begin, end = steps[2 * s][0], sum(steps[-1 - 2 * s])
            amounts = [(end, problem.saved[s][problem.is_split])] if problem.memory else []
            if problem.weight_gradient is not None:
                start = self._start(f"device {d}", problem.weight_gradient[s])
                self.model.add(start >= end)
                end = start + int(problem.weight_gradient[s])
                amounts += [(end, problem.saved[s][2])] if problem.memory else []
            for until, amount in amounts:
                self.held[d].append((self._between(begin, until), int(amount)))
            self.flying[s].append(self._between(begin, end))
            self.firsts[d].append(begin)
            self.ends[d].append(end + int(problem.reduce[s]))

    def least(self) -> int:
        model, problem = self.model, self.problem
        for intervals in self.intervals.values():
            model.add_no_overlap(intervals)
        for s, flying in self.flying.items():
            model.add_cumulative(flying, [1] * len(flying), problem.in_flight[s])
        for d, limit in enumerate(problem.memory):
            model.add_cumulative(*map(list, zip(*self.held[d], strict=True)), int(limit))
        cost = model.new_int_var(0, 2 * self.horizon, "")
        for d, ends in self.ends.items():
            origin = model.new_int_var(0, self.horizon if problem.objective == "span" else 0, "")
            if problem.objective == "span":
                model.add_min_equality(origin, self.firsts[d])
            for end in ends:
                model.add(cost >= end - origin)
        model.minimize(cost)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        status = solver.solve(model)
        assert status == cp_model.OPTIMAL, solver.status_name(status)
        return int(solver.objective_value)

    def _start(self, place: str, seconds: float) -> cp_model.IntVar:
        start = self.model.new_int_var(0, self.horizon, "")
        if place:
            interval = self.model.new_fixed_size_interval_var(start, int(seconds), "")
            self.intervals[place].append(interval)
        return start

    def _between(self, begin: cp_model.IntVar, end: cp_model.LinearExpr) -> cp_model.IntervalVar:
        length = self.model.new_int_var(0, self.horizon, "")
        return self.model.new_interval_var(begin, length, end, "")

    def _way(self, work: tuple[float, ...], sends: tuple[float, ...], direction: str) -> list:
        """(device or channel, duration) of all stages, with a transfer between every two."""
        device, full = self.problem.device, self.problem.duplex == "full"
        found = [(f"device {device[0]}", work[0])]
        for s, send in enumerate(sends):
            channel = f"channel {s} {direction if full else ''}"
            found.append((channel if device[s] != device[s + 1] else "", send))
            found.append((f"device {device[s + 1]}", work[s + 1]))
        return found
