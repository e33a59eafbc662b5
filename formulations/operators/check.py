"""Check a plan of operators from the definitions, independent of all planners."""

from collections.abc import Iterator, Sequence

import numpy as np

from stagewright.formulations.checking.order import Violation
from stagewright.formulations.operators import rules
from stagewright.formulations.operators.bounds import CP_SAT, LOAD, priced_load, static_bounds
from stagewright.formulations.operators.plan import (
    OperatorBound,
    OperatorCertificate,
    OperatorPlan,
    digest_of,
    operator_problem,
)
from stagewright.formulations.operators.problem import GraphTimes, OperatorProblem
from stagewright.formulations.operators.splitting import split_graph
from stagewright.formulations.plans.envelope import relative_gap
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.operators.step_graph import StepGraph


def critical_chain(problem: OperatorProblem, timetable: GraphTimes) -> tuple[int, ...]:
    """Operators up to the last one to end, each of which waited for the one before it.

    It waited for a tensor of that operator, or for its device. If it waited for none, the chain
    begins with it; in a timetable without needless waits that is at time 0.
    """
    return tuple(_Chain(problem, timetable).walk())


class _Chain:
    """The action whose end let an operator or a transfer begin."""

    def __init__(self, problem: OperatorProblem, timetable: GraphTimes) -> None:
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


BOUND_ROUNDING = 1e-6  # relative; a bound further above the cost is a bug


def check(graph: StepGraph, cluster: Cluster, plan: OperatorPlan) -> tuple[Violation, ...]:
    """The first broken rule of the timetable, or all other faults of the plan; none if valid."""
    try:
        cost = require_valid(graph, cluster, plan)
    except InvalidPlan as error:
        return (Violation("rules", "plan", str(error)),)
    problem = problem_of(graph, cluster, plan)
    stated = () if plan.certificate is None else faults(problem, plan.certificate, cost)
    return (
        *(
            Violation("prediction", place, message)
            for place, message in _wrong_predictions(graph, problem, plan)
        ),
        *(Violation("certificate", f"certificate.{place}", message) for place, message in stated),
    )


def expected(
    problem: OperatorProblem, timetable: GraphTimes
) -> tuple[tuple[str, ...], dict[str, float]]:
    """The critical operators of a valid timetable, and the peak memory of each device."""
    critical = tuple(problem.names[i] for i in critical_chain(problem, timetable))
    return critical, dict(zip(problem.devices, rules.peaks(problem, timetable), strict=True))


def _wrong_predictions(
    graph: StepGraph, problem: OperatorProblem, plan: OperatorPlan
) -> Iterator[tuple[str, str]]:
    if plan.structure != graph.structure():
        yield "structure", "is that of another graph"
    critical, peaks = expected(problem, timetable_of(problem, plan))
    if plan.critical != critical:
        yield "critical", f"lists {len(plan.critical)} operators, not the chain of {len(critical)}"
    for device, peak in peaks.items():
        said = plan.peak_memory_bytes.get(device)
        if said is None or abs(said - peak) > RELATIVE_TOLERANCE * peak:
            yield f"peak_memory_bytes.{device}", f"says {said}, the tensors there give {peak:g}"
    for device in plan.peak_memory_bytes.keys() - peaks.keys():
        yield f"peak_memory_bytes.{device}", "there is no such device"
    roles = {node.name: node.role for node in split_graph(graph, plan.splits).nodes}
    for one in plan.operators:
        if one.role != roles[one.operator]:
            yield f"operator {one.operator!r}", f"is {roles[one.operator]}, not {one.role}"


def require_valid(graph: StepGraph, cluster: Cluster, plan: OperatorPlan) -> float:
    """The plan's seconds, recomputed; raises InvalidPlan with the first broken rule."""
    if not plan.answers(digest_of(graph, cluster, plan.contention)):
        raise InvalidPlan("the plan answers another graph, cluster or contention")
    problem = problem_of(graph, cluster, plan)
    if plan.unmeasured != problem.unmeasured:
        raise InvalidPlan(
            f"unmeasured lists {len(plan.unmeasured)} operators, there are "
            f"{len(problem.unmeasured)}"
        )
    return problem.evaluate(timetable_of(problem, plan))


def problem_of(graph: StepGraph, cluster: Cluster, plan: OperatorPlan) -> OperatorProblem:
    """The problem after the plan's splits; raises InvalidPlan if one does not fit."""
    return operator_problem(divided_graph(graph, plan), cluster, plan.contention)


def divided_graph(graph: StepGraph, plan: OperatorPlan) -> StepGraph:
    """The graph after the plan's splits; raises InvalidPlan if one does not fit."""
    try:
        return split_graph(graph, plan.splits)
    except InputError as error:
        raise InvalidPlan(str(error)) from None


def timetable_of(problem: OperatorProblem, plan: OperatorPlan) -> GraphTimes:
    """The times in a plan; raises InvalidPlan if it does not list every operator once."""
    index = {name: i for i, name in enumerate(problem.names)}
    device = {name: d for d, name in enumerate(problem.devices)}
    rows = sorted((_find(index, one.operator, "operator"), one) for one in plan.operators)
    if [i for i, _ in rows] != [*range(len(index))]:
        raise InvalidPlan(f"the plan lists {len(rows)} operators, not each of {len(index)} once")
    tensors = {
        (int(maker), int(number)): t
        for t, (maker, number) in enumerate(zip(problem.maker, problem.output, strict=True))
    }
    sent = []
    for one in plan.transfers:
        pair = (_find(index, one.operator, "operator"), one.output)
        if pair not in tensors:
            raise InvalidPlan(f"operator {one.operator!r} has no output {one.output}")
        sent.append(tensors[pair])
    return GraphTimes(
        device=np.array([_find(device, one.device, "device") for _, one in rows], dtype=np.int64),
        start=np.array([one.start_seconds for _, one in rows], dtype=float),
        finish=np.array([one.finish_seconds for _, one in rows], dtype=float),
        sent=np.array(sent, dtype=np.int64),
        target=np.array(
            [_find(device, one.device, "device") for one in plan.transfers], dtype=np.int64
        ),
        sent_start=np.array([one.start_seconds for one in plan.transfers], dtype=float),
        sent_finish=np.array([one.finish_seconds for one in plan.transfers], dtype=float),
    )


def _find(index: dict[str, int], name: str, what: str) -> int:
    if name not in index:
        raise InvalidPlan(f"there is no {what} {name!r}")
    return index[name]


def certificate(cost: float, bounds: Sequence[OperatorBound]) -> OperatorCertificate:
    """The certificate of a plan of ``cost`` seconds; raises InvalidPlan if a bound exceeds it."""
    for bound in bounds:
        if bound.seconds > cost * (1 + BOUND_ROUNDING):
            raise InvalidPlan(
                f"the cost of {cost} s is below {bound.seconds} s, a bound by {bound.proved_by}"
            )
    best, widest = best_of(bounds), best_of([one for one in bounds if one.plans == "any splits"])
    return OperatorCertificate(
        cost_seconds=cost,
        bound_seconds=best.seconds,
        gap=relative_gap(cost, min(cost, best.seconds)),
        proved_by=best.proved_by,
        any_splits_seconds=widest.seconds,
        any_splits_gap=relative_gap(cost, min(cost, widest.seconds)),
        any_splits_proved_by=widest.proved_by,
        bounds=tuple(bounds),
    )


def best_of(bounds: Sequence[OperatorBound]) -> OperatorBound:
    """The largest bound; among equal bounds the first."""
    return max(bounds, key=lambda bound: bound.seconds)


def faults(
    problem: OperatorProblem, stated: OperatorCertificate, cost: float
) -> Iterator[tuple[str, str]]:
    """Place and message of every claim that does not follow from the bounds or is refuted.

    Bounds by an argument are computed again; those by a solver are taken as stated.
    """
    if not abs(stated.cost_seconds - cost) <= RELATIVE_TOLERANCE * cost:
        yield "cost_seconds", f"says {stated.cost_seconds}, the operators give {cost}"
    if not any(bound.plans == "any splits" for bound in stated.bounds):
        yield "bounds", "has none on plans with any splits"
        return
    refuted = [*_refuted(problem, stated, cost)]
    yield from refuted
    if not refuted:
        yield from _headline_faults(stated, certificate(cost, stated.bounds))


def _refuted(
    problem: OperatorProblem, stated: OperatorCertificate, cost: float
) -> Iterator[tuple[str, str]]:
    for i, bound in enumerate(stated.bounds):
        right = _recomputed(problem, bound)
        if right is not None and bound.seconds > right * (1 + RELATIVE_TOLERANCE):
            yield f"bounds[{i}]", f"{bound.seconds} s by {bound.proved_by}, which gives {right} s"
        elif bound.seconds > cost * (1 + BOUND_ROUNDING):
            yield f"bounds[{i}]", f"{bound.seconds} s is above the cost of {cost} s"


def _headline_faults(
    stated: OperatorCertificate, ours: OperatorCertificate
) -> Iterator[tuple[str, str]]:
    for prefix in ("", "any_splits_"):
        seconds = "bound_seconds" if not prefix else "any_splits_seconds"
        for name in (seconds, f"{prefix}proved_by"):
            if getattr(stated, name) != getattr(ours, name):
                yield name, f"says {getattr(stated, name)}, the bounds give {getattr(ours, name)}"
        gaps = getattr(stated, f"{prefix}gap"), getattr(ours, f"{prefix}gap")
        if not abs(gaps[0] - gaps[1]) <= RELATIVE_TOLERANCE:
            yield f"{prefix}gap", f"says {gaps[0]}, the bounds give {gaps[1]}"


def _recomputed(problem: OperatorProblem, bound: OperatorBound) -> float | None:
    """The bound's value, computed again from its argument; None if a solver proved it.

    The load is the only argument on plans with any splits.
    """
    if bound.proved_by == LOAD:
        if len(bound.prices) != len(problem.devices):
            return 0.0
        return priced_load(problem, bound.prices)
    if bound.plans == "any splits":
        return 0.0
    if bound.proved_by == CP_SAT:
        return None
    uniform = np.ones(len(problem.devices))
    named = {one.proved_by: one.seconds for one in static_bounds(problem, uniform)}
    return named.get(bound.proved_by, 0.0)
