"""Out-of-order backprop: weight gradients and all-reduces in the order that hides the most.

Oh et al. (EuroSys 2022), sections 5.1 and 5.2; `one_device` has 4.1. The plan lies between two
losses. For data parallelism every layer is a stage on all devices; for pipelines groups of layers
go around the devices. Orders come from the common problem of these stages, optimizer steps among
them; each is priced as the plan that follows it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import monotonic
from typing import NamedTuple

import numpy as np

from stagewright.formulations.backprop.of_stages import (
    ORDERS_BETWEEN_LOSSES,
    SEARCHED_BETWEEN_LOSSES,
    common_problem,
    splits,
    stage_bounds,
)
from stagewright.formulations.backprop.orders import OutOfOrder, fast_forward, reverse_first_k
from stagewright.formulations.backprop.problem import BackpropProblem, WindowTimes
from stagewright.formulations.checking.peaks import memory_exceeded, peaks
from stagewright.formulations.checking.times import read_times
from stagewright.formulations.forms.answers import Limits, OnProgress, Progress
from stagewright.formulations.pipelines.makespan_models import CP_SAT
from stagewright.formulations.plans.actions import (
    BARE,
    COMPUTE,
    REDUCE,
    SEND_B,
    SEND_F,
    UPDATE,
    Action,
    ActionKind,
    B,
    F,
    I,
    W,
)
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, Stage
from stagewright.formulations.plans.timing import Blocks
from stagewright.formulations.schedules.backward_first import Orders, earliest_starts
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.solvers.backprop.exact import best_list_schedule, solve
from stagewright.solvers.backprop.list_scheduling import list_schedule, reverse_search
from stagewright.solvers.planners.one_device import (
    ROUNDING,
    one_device_proposals,
    require_one_device,
)
from stagewright.solvers.planners.steps.planner import PlannerOptions, SearchPlanner
from stagewright.solvers.planners.steps.proposal import Choices, NoPlan, Proposal, cost_of


def require_out_of_order(problem: PipelineProblem, choices: Choices) -> None:
    """Refuse training on a single device on several."""
    if choices.out_of_order is not None and choices.out_of_order.training == "single":
        require_one_device(problem)


def modulo_devices(layers: int, devices: int, group: int = 1) -> tuple[int, ...]:
    """Modulo allocation: groups of consecutive layers go around the devices (section 5.2.1)."""
    if not 1 <= group <= layers:
        raise InputError(f"group must be from 1 to {layers}, the number of layers, got {group}")
    return tuple(i // group % devices for i in range(layers))


def plan_ooo(
    problem: PipelineProblem, limits: Limits, on_progress: OnProgress, choices: Choices
) -> Proposal | NoPlan:
    """The best plan found between two losses.

    Raises
    ------
    InputError
        If there are fewer layers than k, or than a group has, or fewer samples in a microbatch than
        devices share them, or several devices where a single one is asked for.
    """
    asked, began = choices.out_of_order or OutOfOrder(), monotonic()
    best: Proposal | None = None
    cost, short = math.inf, _Shortage(math.inf, "the time limit came before any plan was found")

    def ended() -> bool:
        return limits.left(monotonic() - began) <= 0

    for found in _proposals(problem, asked, ended):
        if isinstance(found, _Shortage):
            short = min(short, found)
        elif (seconds := cost_of(problem, found)) < cost * (1 - ROUNDING):
            best, cost = found, seconds
            made = partial(replace, found, notes=())
            on_progress(Progress(monotonic() - began, cost, 0.0, made))
        if ended():
            break
    if best is None:
        return NoPlan(short.reason, proved=not ended())
    if asked.training == "single" or asked.reversed_layers is not None or ended():
        return best
    left = replace(limits, seconds=limits.left(monotonic() - began))
    return _Setting(problem, best.stages).searched(best, left)


_DONE_BY: dict[str, tuple[ActionKind, ...]] = {
    "F": (F,), "U": (UPDATE,), "S[F]": (SEND_F,), "S[dO]": (SEND_B,), "S[dW]": (REDUCE,)
}  # fmt: skip


class _Shortage(NamedTuple):
    """The most bytes that a device lacks, and which one does."""

    bytes: float
    reason: str


def _proposals(
    problem: PipelineProblem, asked: OutOfOrder, ended: Callable[[], bool]
) -> Iterator[Proposal | _Shortage]:
    """Proposals that fit in memory, and the shortage of every proposal that does not."""
    if asked.training == "single":
        for found in one_device_proposals(problem, ended):
            yield _shortage(problem, found) or found
        return
    for setting in _settings(problem, asked):
        yield from setting.proposals(asked)


def _shortage(problem: PipelineProblem, found: Proposal) -> _Shortage | None:
    """The memory that the proposal lacks; None if the proposal fits."""
    plan = assemble(problem, "ooo", found.stages, found.starts, begins=found.begins)
    times = read_times(problem, plan)
    short = next(iter(memory_exceeded(times)), None)
    if short is None:
        return None
    memory = problem.memory_bytes
    most = max(
        static + held - float(memory[problem.cluster.index[name]])
        for name, static, held in peaks(times)
    )
    return _Shortage(most, f"{short.place} {short.message}")


def _settings(problem: PipelineProblem, asked: OutOfOrder) -> Iterator["_Setting"]:
    """The stages that are tried: one setting for data parallelism, one per size of groups."""
    layers, devices = len(problem.chain), recursive_device_order(problem.cluster)
    names = [problem.cluster.devices[v].name for v in devices]
    if asked.training == "data":
        if asked.reversed_layers is not None and asked.reversed_layers > layers:
            raise InputError(
                f"k must be from 0 to {layers}, the number of layers, got {asked.reversed_layers}"
            )
        _require_samples(problem)
        stages = tuple(Stage((i, i + 1), tuple(names)) for i in range(layers))
        yield _Setting(problem, stages)
        return
    most = math.ceil(layers / len(names))
    for group in range(1, most + 1) if asked.group is None else (asked.group,):
        home = modulo_devices(layers, len(names), group)[::group]
        stages = tuple(
            Stage((s * group, min(layers, (s + 1) * group)), (names[d],))
            for s, d in enumerate(home)
        )
        yield _Setting(problem, stages)


def _require_samples(problem: PipelineProblem) -> None:
    most, count = problem.most_replicas(0, len(problem.chain)), len(problem.cluster)
    if count > most:
        raise InputError(
            f"data parallelism on {count} devices needs as many samples in a microbatch; layers "
            f"can be split into {most} at most: use a larger microbatch or fewer devices"
        )


@dataclass(frozen=True)
class _Setting:
    """Stages whose order is looked for."""

    problem: PipelineProblem
    stages: tuple[Stage, ...]

    @cached_property
    def splits(self) -> tuple[bool, ...]:
        """Whether a stage has the times of both parts of its backward."""
        return splits(self.problem, self.stages)

    @cached_property
    def common(self) -> BackpropProblem:
        """The common problem of the stages."""
        return common_problem(self.problem, self.stages)

    def proposals(self, asked: OutOfOrder) -> Iterator[Proposal | _Shortage]:
        """The plans of the timetables that fit in memory; if none does, with fewer delays."""
        shortages = []
        for name, timetable in self.timetables(asked):
            found = self.proposal(name, timetable)
            short = _shortage(self.problem, found)
            if short is None:
                yield found
            else:
                shortages.append(short)
        if not shortages:
            return
        k = asked.reversed_layers
        most = len(self.stages) if k is None else k
        fits = self.most_reversed(most if asked.training == "data" else 0)
        if isinstance(fits, _Shortage):
            yield min(fits, *shortages)
        elif k is None:
            yield fits[1]
        else:
            short = shortages[0]
            reason = f"with k = {k}, {short.reason}; the largest k that fits is {fits[0]}"
            yield _Shortage(short.bytes, reason)

    def most_reversed(self, most: int) -> tuple[int, Proposal] | _Shortage:
        """Reverse first-k scheduling with the largest k up to ``most`` that fits in memory."""
        least = self.reversed(0)
        short = _shortage(self.problem, least)
        if short is not None:
            return short
        found = ((k, self.reversed(k)) for k in range(most, 0, -1))
        fit = (one for one in found if _shortage(self.problem, one[1]) is None)
        return next(fit, (0, least))

    def reversed(self, k: int) -> Proposal:
        """The plan of reverse first-k scheduling."""
        order = list_schedule(self.common, reverse_first_k(self.common, k))
        return self.proposal(f"reverse first {k}", order)

    def timetables(self, asked: OutOfOrder) -> Iterator[tuple[str, WindowTimes]]:
        """Named timetables of the common problem; a given k is the only one."""
        common, count = self.common, len(self.stages)
        if asked.reversed_layers is not None:
            k = asked.reversed_layers
            yield f"reverse first {k}", list_schedule(common, reverse_first_k(common, k))
            return
        if asked.training == "data":
            found = reverse_search(common, count)
            yield f"reverse first {found.k}, the best of {found.tried} tried", found.timetable
        else:
            yield "fast-forward", list_schedule(common, fast_forward(common))
        source, timetable = best_list_schedule(common)
        assert timetable is not None  # the common problem has no limit of memory here
        yield source, timetable

    def searched(self, best: Proposal, limits: Limits) -> Proposal:
        """The best proposal after a search over all orders, with its bound on them."""
        cost = cost_of(self.problem, best)
        if not best.bounds or max(one.seconds for one in best.bounds) >= cost * (1 - ROUNDING):
            return best
        began, relaxed = monotonic(), common_problem(self.problem, self.stages, relaxed=True)
        of_all = np.array_equal(relaxed.seconds, self.common.seconds)  # whole backwards, too
        share = limits if of_all else replace(limits, seconds=limits.seconds / 2)
        proof = found = solve(self.common, share, (best.notes[0], self._window(best.starts)))
        if found.timetable is not None and found.source != best.notes[0]:
            other = self.proposal(found.source, found.timetable)
            if _shortage(self.problem, other) is None and cost_of(self.problem, other) < cost:
                best = other
        if not of_all:
            left = limits.left(monotonic() - began)
            proof = solve(relaxed, replace(limits, seconds=left))
        if proof.proved_by != CP_SAT:
            return best
        proved = Bound(proof.bound, SEARCHED_BETWEEN_LOSSES, "schedule", ORDERS_BETWEEN_LOSSES)
        return replace(best, bounds=(*best.bounds, proved))

    def proposal(self, name: str, timetable: WindowTimes) -> Proposal:
        """The plan that follows a timetable, everything as early as possible."""
        orders, reductions = self._orders(timetable)
        starts = earliest_starts(self.problem, self.stages, orders, reductions)
        group = self.stages[0].layers[1] - self.stages[0].layers[0]
        notes = [name if len(self.stages[0].devices) > 1 else f"groups of {group}, {name}"]
        whole = [s for s, parts in enumerate(self.splits) if not parts]
        if whole:
            layer = self.problem.layer_with_whole_backward(*self.stages[whole[0]].layers)
            notes.append(
                f"{len(whole)} of {len(self.stages)} stages have whole backwards, the first for "
                f"layer {layer!r}: the profile has no separate times (`stagewright import --from "
                "stagewright --split-backward 0.5` assumes a ratio)"
            )
        bounds = stage_bounds(self.problem, self.stages)
        return Proposal(self.stages, starts, bounds, notes=tuple(notes), begins="backward")

    def _window(self, starts: Blocks) -> WindowTimes:
        """The common problem's timetable of a plan; what the plan lacks ends when it is ready."""
        common, found = self.common, np.zeros(len(self.common.operations))
        first, earlier = common.preceding
        for i in common.topological:
            one = common.operations[i]
            for kind in self._done_by(one.kind, one.layer - 1):
                found[i] = np.nan_to_num(starts[kind][one.layer - 1, one.microbatch])
            if common.seconds[i] == 0:
                before = earlier[first[i] : first[i + 1]]
                found[i] = (found[before] + common.seconds[before]).max(initial=0.0)
        return WindowTimes.of_starts(common, found)

    def _orders(self, timetable: WindowTimes) -> tuple[Orders, tuple[int, ...] | None]:
        """Computations of every device and all-reduces by their start."""
        common, place = self.common, np.empty(len(self.common.operations))
        place[list(common.topological)] = np.arange(len(place))
        rows: dict[str, list[Action]] = {
            name: [] for stage in self.stages for name in stage.devices
        }
        reductions = []
        for i in np.lexsort((place, timetable.starts)).tolist():
            one = common.operations[i]
            stage = one.layer - 1
            if one.kind == "S[dW]" and len(self.stages[stage].devices) > 1:
                reductions.append(stage)
            for kind in self._done_by(one.kind, stage):
                m = None if kind in BARE else one.microbatch
                for name in self.stages[stage].devices if kind in (*COMPUTE, UPDATE) else ():
                    rows[name].append(Action(stage, kind, m))
        return rows, tuple(reductions) or None

    def _done_by(self, kind: str, stage: int) -> tuple[ActionKind, ...]:
        """The action of a stage that an operation stands for, if any."""
        if kind not in ("dO", "dW"):
            return _DONE_BY.get(kind, ())
        if self.splits[stage]:
            return {"dO": (I,), "dW": (W,)}.get(kind, ())
        return (B,) if kind == ("dO" if stage > 0 else "dW") else ()


PLANNER = SearchPlanner(
    "ooo",
    "out-of-order backprop from loss to loss: reverse first-k for data parallelism, "
    "fast-forwarding and modulo allocation for pipelines, two streams on a single device",
    "Oh et al., EuroSys 2022, 4.1, 5.1 and 5.2",
    plan_ooo,
    PlannerOptions(out_of_order=True),
)
