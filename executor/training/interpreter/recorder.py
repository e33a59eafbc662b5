"""The loop over a rank's row, when its instructions ran, and what ranks agree on before updates."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.executor.programs.program import RECEIVES, SENDS, Instruction
from stagewright.executor.programs.trace import RankAction
from stagewright.executor.training.interpreter.exchange import (
    RECV_B,
    RECV_F,
    Messages,
    StageExchange,
    Watchers,
)
from stagewright.executor.training.interpreter.last_stage import (
    Iterations,
    LastStage,
    NonFiniteLoss,
    OutOfMemory,
    Total,
    begin_total,
    is_lack_of_memory,
)
from stagewright.executor.training.interpreter.streams import DeviceFactor, Joint
from stagewright.executor.training.ranks.rank import Rank, RankPlace, RankProgram
from stagewright.executor.training.stages.weights import Weights
from stagewright.executor.training.trace_recorder import waited_seconds
from stagewright.formulations.plans.actions import ON_DEVICE, Action, ActionKind
from stagewright.graphs.documents.errors import InputError


class Agreement:
    """The factors of this rank's updates.

    ``weights``: per stage of this rank. ``joint``: sums over ranks for an update.
    """

    def __init__(
        self,
        rank: Rank,
        program: RankProgram,
        iterations: Iterations,
        last_stage: LastStage,
        weights: Mapping[int, Weights],
        joint: Joint,
    ) -> None:
        self._iterations, self._last_stage = iterations, last_stage
        self._weights, self._joint = weights, joint
        self._periodic = program.periodic is not None
        self._staleness = rank.plan.weight_rule.staleness
        self._every_round = rank.plan.weight_rule.updates_every_round
        self._clips = joint.measures
        self._losses = iterations.runs_of(len(rank.plan.stages) - 1)  # of an iteration, here
        updates = (one.action.stage for one in program.row if one.action.kind is ActionKind.UPDATE)
        self._first_together = next((s for s in updates if s in joint.stages), None)
        self._updates = True
        self._factors: dict[int, float | None] = {}
        self._judged: tuple[Total, float, bool] | None = None  # its loss scale, and if it is finite
        self._missing: dict[int, int] = {}  # losses of an iteration that are not computed yet
        self._counts: dict[int, list[Tensor | None]] = {}  # of an iteration, until its gradients
        self._totals: defaultdict[int, deque[Total]] = defaultdict(deque)  # by stage, in order
        self._reduced: Counter[int] = Counter()
        # What the losses are shows in the first step, if that ends before the next one begins.
        self._shows = not (rank.plan.spans_steps or self._clips or self._every_round)
        self._first: Total | None = None

    def begin(self, iteration: int, *, updates: bool) -> None:
        """Wait for an iteration's losses; a rank without any brings its part of the sum now.

        One that does not end with ``updates`` leaves its counts to those after it.
        """
        self._updates = updates
        self._missing[iteration] = self._losses
        if self._losses == 0:
            self._all_computed(iteration)

    def loss_computed(self, iteration: int) -> None:
        """Count a loss; with the last one of an iteration the sum over ranks begins."""
        self._missing[iteration] -= 1
        if self._missing[iteration] == 0:
            self._all_computed(iteration)

    def _all_computed(self, iteration: int) -> None:
        del self._missing[iteration]
        if not self._every_round:
            self._joint.counted.extend(self._last_stage.counts(iteration))
            if not self._updates:
                return
            self._counts[iteration] = [*self._joint.counted]
            self._joint.counted.clear()
            if not self._clips:
                self._begin_total(iteration)

    def reduced(self, s: int) -> None:
        """Follow the begin of a stage's all-reduce by the sums over several stages."""
        if self._joint.tied is not None:
            self._joint.tied.give(s)
        if self._clips and self._periodic:
            iteration = self._reduced[s]
            self._reduced[s] += 1
            if all(self._reduced[one] > iteration for one in self._weights):
                self._begin_total(iteration)

    def _begin_total(self, iteration: int) -> float:
        """Bring this rank's part of an iteration's total; the seconds of computing it."""
        squares = seconds = 0.0
        if self._clips:
            for weights in self._weights.values():
                weights.wait()
            start = time.perf_counter()
            squares = self._joint.squares()
            seconds = time.perf_counter() - start
        total = self._total(self._counts.pop(iteration), squares)
        for s in self._weights:
            self._totals[s].append(total)
        return seconds

    def _total(self, counts: Sequence[Tensor | None], squares: float) -> Total:
        """The sums over ranks; where losses are means, there is nothing to sum up any more."""
        if self._first is not None and self._first.counted() is None:
            if any(count is not None for count in counts):
                raise InputError("the loss is a sum and its count now, and was a mean before")
            return begin_total((), 0.0, None)
        total = begin_total(counts, squares, self._joint.group)
        if self._shows and self._first is None:
            self._first = total
        return total

    def wait(self, s: int) -> float:
        """Wait for the values of other ranks that a stage's update needs; seconds of computing."""
        # Where mini-batches overlap, the newest version is i, or with double-buffer i + 1.
        made = self._weights[s].newest - self._staleness
        iteration = made // self._iterations.updates if self._periodic else 0
        self._last_stage.require_finite(iteration)
        seconds = 0.0
        if self._joint.tied is not None:
            self._joint.tied.take(s)
        elif s == self._first_together:
            self._joint.sum_tied()
            seconds = self._begin_total(iteration) if self._clips else 0.0
        self._factors[s] = 1.0 if self._every_round else self._factor(s, iteration)
        return seconds

    def _factor(self, s: int, iteration: int) -> float | None:
        total = self._totals[s].popleft()
        if total.counted() == 0:
            step = self._iterations.step(iteration)
            raise NonFiniteLoss(f"the loss of step {step + 1} has a sum over a count of 0")
        scale, is_finite = self._judge(total)
        if not is_finite:
            return None
        return total.factor(self._joint.clip_norm, 1 / self._joint.accumulate, scale)

    def _judge(self, total: Total) -> tuple[float, bool]:
        """The scale of an update's losses, and whether it is done; all ranks find the same."""
        scaling = self._joint.loss_scale
        if scaling is None:
            return 1.0, True
        if self._judged is None or self._judged[0] is not total:  # once for all stages
            self._judged = total, scaling.factor, total.is_finite()
            scaling.update(total.counted(), finite=self._judged[2])
        return self._judged[1:]

    def pop_factor(self, s: int) -> float | None:
        """The factor for the gradients of the stage's next update; None leaves it out."""
        if s not in self._factors:
            self.wait(s)
        return self._factors.pop(s)

    def restart(self) -> None:
        """Number iterations from 0 again."""
        self._reduced.clear()


F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I = ActionKind.INPUT_GRADIENT
REDUCE, UPDATE = ActionKind.REDUCE, ActionKind.UPDATE


Call = tuple[Instruction, Callable[[], None]]


def carry_out(
    calls: Iterable[Call],
    record: Callable[[Instruction, Callable[[], None]], None] | None,
    named: Callable[[Instruction], str],
    step: int,
) -> None:
    """Carry out the calls of a row in ``step``, by ``record`` where their times are wanted.

    Raises OutOfMemory with the instruction as ``named``, for any error that means a lack of memory.
    """
    for one, call in calls:
        try:
            if record is None:
                call()
            else:
                record(one, call)
        except (RuntimeError, MemoryError) as error:
            if not is_lack_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
            raise OutOfMemory(
                f"{named(one)} ran out of memory in step {step + 1}: {reason}"
            ) from error


class Recorder:
    """Carries out instructions and notes their times; threads watch the messages in flight.

    ``most``: the most messages that are in flight at one time. ``needed``: the receipts that a
    computation waits for.
    """

    def __init__(
        self,
        place: RankPlace,
        messages: Messages,
        most: int,
        needed: Callable[[Action], Iterable[Action]],
    ) -> None:
        self._place, self._messages, self._needed = place, messages, needed
        self._watchers = Watchers(place, most)

    def record(
        self,
        records: list[RankAction],
        one: Instruction,
        call: Callable[[], None],
        own_seconds: float = 0.0,
    ) -> None:
        """Carry out an instruction, which took ``own_seconds`` before, and note its times."""
        action, number = one.action, self._place.number
        self._record_arrivals(action, records)
        before = len(self._messages.sent_bytes(action))
        waited = waited_seconds() if action.kind in ON_DEVICE else None
        start = time.perf_counter() - own_seconds
        call()
        if action.kind in RECEIVES:
            arrival = self._messages.arrivals(action)[-1]
            arrival.arrived = self._watchers.watch(arrival.works)
        elif action.kind is not ActionKind.FREE:
            if self._place.device.type == "cuda":
                torch.cuda.synchronize(self._place.device)
            times, size = (start, time.perf_counter()), None
            if waited is not None:
                waited = (waited_seconds() or waited) - waited
            if action.kind in SENDS:
                size = float(sum(self._messages.sent_bytes(action)[before:]))
            records.append(RankAction(number, str(action), *times, one.peer, size, waited))

    def _record_arrivals(self, action: Action, records: list[RankAction]) -> None:
        """Wait for the values from other ranks that a computation needs."""
        for needed in self._needed(action):
            for arrival in self._messages.arrivals(needed):
                arrived = arrival.wait()
                if arrival.peer is not None:
                    times = (arrival.posted_seconds, arrived)
                    records.append(
                        RankAction(self._place.number, str(needed), *times, arrival.peer)
                    )


class PipelineRecorder(Recorder):
    """The recorder of a pipeline, where all-reduces are in flight as well.

    ``weights`` are by stage of this rank; ``groups``, by stage on several devices, are the
    processes that sum up its gradients.
    """

    def __init__(
        self,
        rank: Rank,
        iterations: Iterations,
        exchange: StageExchange,
        agreement: Agreement | DeviceFactor,
        weights: Mapping[int, Weights],
        groups: Mapping[int, dist.ProcessGroup],
        most: int,
    ) -> None:
        super().__init__(rank, exchange, most, _needed)
        self._iterations, self._agreement = iterations, agreement
        self._weights, self._groups = weights, groups
        self._reducing: dict[int, tuple[float, Callable[[], float]]] = {}

    def record(
        self,
        records: list[RankAction],
        one: Instruction,
        call: Callable[[], None],
        own_seconds: float = 0.0,
    ) -> None:
        """Carry out an instruction, and note its times and what an update waits for."""
        action = self._iterations.moved(one.action)
        if action.kind is REDUCE:
            start = time.perf_counter()
            call()
            works = self._weights[action.stage].reductions()
            self._reducing[action.stage] = (start, self._watchers.watch(works))
            return
        if action.kind is UPDATE:
            own_seconds = self._await_update(action, records)
        super().record(records, replace(one, action=action), call, own_seconds)

    def _await_update(self, action: Action, records: list[RankAction]) -> float:
        """Wait for the values that an update needs; return the seconds of computing in it."""
        s = action.stage
        if s in self._groups and s in self._reducing:  # else it is a part of the backwards
            since, reduced = self._reducing.pop(s)
            name, size = f"{s}{REDUCE}", float(self._weights[s].gradient_bytes)
            records.append(RankAction(self._place.number, name, since, reduced(), bytes=size))
        return self._agreement.wait(s)


def _needed(action: Action) -> Iterable[Action]:
    """The receipts that a computation waits for."""
    kind = {F: RECV_F, B: RECV_B, I: RECV_B}.get(action.kind)
    return () if kind is None else (Action(action.stage, kind, action.microbatch),)
