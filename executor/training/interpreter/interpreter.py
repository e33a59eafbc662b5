"""The interpreter: a rank's row, made into calls once; an iteration is a loop over them.

Of a periodic program it is a row of the iteration, and one for what is under way at the end.
It knows nothing of planning. Sends and receives are asynchronous: a computation waits for what it
needs and for nothing else.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.executor.capture.loss_graph import require_from_outputs
from stagewright.executor.programs.program import (
    RECEIVES,
    SENDS,
    Instruction,
    moved,
    moved_action,
    received,
    transfers,
)
from stagewright.executor.programs.shares import Rows
from stagewright.executor.programs.trace import RankAction
from stagewright.executor.training.batches import Batch
from stagewright.executor.training.interpreter.arrival import Arrival, waited
from stagewright.executor.training.interpreter.boundary import Boundary
from stagewright.executor.training.interpreter.failures import NonFiniteLoss, explain_memory
from stagewright.executor.training.interpreter.joint import Joint
from stagewright.executor.training.interpreter.totals import Total, begin_total
from stagewright.executor.training.losses import Loss, read_loss
from stagewright.executor.training.ranks.rank import Rank, RankProgram
from stagewright.executor.training.stages.seeding import layer_seed
from stagewright.executor.training.stages.stage import Gradients, StageComputation, Tensors
from stagewright.executor.training.stages.weights import Weights
from stagewright.formulations.plans.actions import COMPUTE, VERSIONED, Action, ActionKind

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I = ActionKind.INPUT_GRADIENT
SEND_F, SEND_B = ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD
RECV_F, RECV_B = ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD
STASH, USE, DROP = ActionKind.STASH, ActionKind.USE, ActionKind.DROP


@dataclass(slots=True)
class _Leaving:
    """What a computation made for other ranks, and how many sends of it are still to come."""

    values: Sequence[Tensor | None]
    sends: int


class Interpreter:
    """One rank's row, for mini-batches of one shape.

    Parameters
    ----------
    program
        What this rank does.
    computations, weights
        Per stage of this rank.
    groups
        Per stage on several devices, the processes that sum up its gradients.
    boundaries
        Boundary s lies between stages s and s + 1.
    lanes
        Per stage and device that works on a microbatch, its samples.
    samples
        In a microbatch.
    scale
        What a microbatch's mean loss counts in an update.
    joint
        What the ranks do together.
    """

    def __init__(
        self,
        rank: Rank,
        program: RankProgram,
        computations: Mapping[int, StageComputation],
        weights: Mapping[int, Weights],
        groups: Mapping[int, dist.ProcessGroup],
        boundaries: Sequence[Boundary],
        lanes: Sequence[Sequence[Rows]],
        samples: int,
        *,
        loss: Loss,
        single_output: bool,
        scale: float,
        seed: int,
        joint: Joint,
    ) -> None:
        self._rank, self._program, self._plan = rank, program, rank.plan
        self._computations, self._weights, self._groups = computations, weights, groups
        self._boundaries, self._samples = boundaries, samples
        self._loss, self._single_output, self._scale = loss, single_output, scale
        self._seed, self._joint = seed, joint
        self._last, self._count = len(rank.plan.stages) - 1, rank.plan.microbatches
        self._lanes = lanes
        self._rows = {s: [_as_index(lane) for lane in lanes[s]] for s in (0, self._last)}
        split = {one.action for one in program.row if one.action.kind is I}
        self._in_two = {(one.stage, (one.microbatch or 0) % self._count) for one in split}
        for s in {s for s, _ in self._in_two}:
            computations[s].split()
        self._tags = max((len(one.values) for one in boundaries), default=0)  # of a transfer
        self._sends = self._count_sends()
        periodic, number = program.periodic, rank.number
        segments = [program.row] if periodic is None else [r[number] for r in periodic.segments]
        drains = [()] if periodic is None else [r[number] for r in periodic.drains]
        self._calls = [[(one, self._call(one)) for one in row] for row in segments]
        self._last_calls = [[(one, self._call(one)) for one in row] for row in drains]
        self._arrivals: defaultdict[Action, list[Arrival]] = defaultdict(list)
        self._leaving: dict[Action, _Leaving] = {}
        self._sent: defaultdict[Action, list[tuple[dist.Work, Tensor]]] = defaultdict(list)
        self._losses: dict[int, tuple[Tensor, list[Tensor], Tensor | None]] = {}
        self._values: dict[int, Tensor] = {}
        self._counts: dict[int, Tensor | None] = {}
        # By microbatch that is an update of its own; else by stage, of the iterations to come.
        self._of_microbatch: dict[int, Total] = {}
        self._of_iteration: defaultdict[int, deque[Total]] = defaultdict(deque)
        self._factors: dict[int, float] = {}
        self._every_round = rank.plan.weight_rule.updates_every_round
        self._first_together = next(
            (
                one.action.stage
                for one in program.row
                if one.action.kind is ActionKind.UPDATE and one.action.stage in joint.stages
            ),
            None,
        )
        # One for every message that may be under way; they start when a run is traced.
        self._watchers = ThreadPoolExecutor(len(program.row) + 1)
        self._reducing: dict[int, tuple[float, Callable[[], float]]] = {}
        # By iteration, until its last forward: the mini-batch, and how many forwards read it yet.
        self._batches: dict[int, tuple[Tensors, Batch]] = {}
        self._unread: dict[int, int] = {}
        self._reads = sum(map(self._runs_of, {0, self._last} & computations.keys()))
        self._unjudged: dict[int, int] = {}
        self._counted: dict[int, list[Tensor | None]] = {}  # by iteration, until its gradients are
        self._given: Counter[int] = Counter()
        self._older_sends: list[Action] = []
        self._begun = self._first_step = self._later = 0

    def run(
        self,
        inputs: Tensors,
        targets: Batch,
        step: int,
        records: list[RankAction] | None = None,
    ) -> list[tuple[float, float]]:
        """One iteration: this rank's part of the losses of the mini-batches that ended.

        A loss is a sum and its count, or a mean and 0. Without a periodic program there is the one
        of this mini-batch; else it may be none. There is none without the last stage.

        ``inputs`` and ``targets`` are whole mini-batches on the device, empty where this rank does
        not need them. What happened when is added to ``records``, in seconds of this process's
        clock.

        Raises
        ------
        NonFiniteLoss
            Naming stage and microbatch.
        OutOfMemory
            Naming stage and instruction.
        """
        if self._begun == 0:
            self._first_step = step
        self._batches[self._begun] = inputs, targets
        self._unread[self._begun] = self._reads
        self._await_losses(self._begun)
        position, self._later = self._place(self._begun)
        self._begun += 1
        self._carry_out(self._calls[position], records)
        if self._program.periodic is None:
            return self.finish()
        for action in self._older_sends:
            self._release(action)
        self._older_sends = list(self._sent)
        return self._ended()

    def finish(self, records: list[RankAction] | None = None) -> list[tuple[float, float]]:
        """End what is under way: this rank's part of the losses that were still open."""
        if self._begun == 0:
            return []
        position, self._later = self._place(self._begun - 1)
        self._carry_out(self._last_calls[position], records)
        for action in list(self._sent):
            self._release(action)
        for weights in self._weights.values():
            weights.begin()
        self._older_sends.clear()
        self._given.clear()
        self._begun = 0
        return self._forgotten(list(self._batches))

    def _place(self, iteration: int) -> tuple[int, int]:
        return (0, 0) if self._program.periodic is None else self._program.periodic.place(iteration)

    def _carry_out(
        self,
        calls: Sequence[tuple[Instruction, Callable[[], None]]],
        records: list[RankAction] | None,
    ) -> None:
        for one, call in calls:
            try:
                if records is None:
                    call()
                else:
                    self._record(one, call, records)
            except (RuntimeError, MemoryError) as error:
                step = self._first_step + self._begun - 1
                explain_memory(error, moved(one, self._later, self._count), step)
                raise

    def _ended(self) -> list[tuple[float, float]]:
        """The losses of iterations whose last forward is done; their mini-batches are forgotten."""
        done = [i for i, reads in self._unread.items() if reads == 0]
        return self._forgotten(done)

    def _forgotten(self, iterations: Sequence[int]) -> list[tuple[float, float]]:
        for i in iterations:
            del self._batches[i], self._unread[i]
        return [self._loss_of(i) for i in iterations if self._last in self._computations]

    def _loss_of(self, iteration: int) -> tuple[float, float]:
        """The part of a mini-batch's loss that this rank has; its microbatches' are forgotten."""
        own = self._losses_of(iteration)
        self._require_finite(*own)
        value = count = 0.0
        for m in own:
            counted, found = self._counts.pop(m), float(self._values.pop(m))
            if counted is None:
                value += self._share(self._last, m) * found / self._count
            else:
                value, count = value + found, count + float(counted)
        return value, count

    def _losses_of(self, iteration: int) -> list[int]:
        """The microbatches of an iteration whose loss is known here."""
        return [m for m in self._values if m // self._count == iteration]

    def _record(
        self, one: Instruction, call: Callable[[], None], records: list[RankAction]
    ) -> None:
        """Carry out an instruction and note its times; threads watch what is under way."""
        action, number = self._moved(one.action), self._rank.number
        needed = _needed(action)
        for arrival in self._arrivals.get(needed, ()) if needed else ():
            arrived = arrival.wait()
            if arrival.peer is not None:
                times = (arrival.posted_seconds, arrived)
                records.append(RankAction(number, str(needed), *times, arrival.peer))
        s, own_seconds = action.stage, 0.0
        if action.kind is ActionKind.UPDATE and s in self._groups:
            since, reduced = self._reducing.pop(s)
            name, size = f"{s}{ActionKind.REDUCE}", float(self._weights[s].gradient_bytes)
            records.append(RankAction(number, name, since, reduced(), bytes=size))
        if action.kind is ActionKind.UPDATE:  # to wait for others is no part of the step
            own_seconds = self._agree(s)
        before = len(self._sent.get(action, ()))
        start = time.perf_counter() - own_seconds
        call()
        if action.kind is ActionKind.REDUCE:
            self._reducing[s] = (start, self._watch(self._weights[s].under_way()))
        elif action.kind in RECEIVES:
            arrival = self._arrivals[action][-1]
            arrival.arrived = self._watch(arrival.works)
        else:
            if self._rank.device.type == "cuda":
                torch.cuda.synchronize(self._rank.device)
            sent = [value.nbytes for _, value in self._sent.get(action, ())[before:]]
            times = (start, time.perf_counter())
            size_sent = float(sum(sent)) if action.kind in SENDS else None
            records.append(RankAction(number, str(action), *times, one.peer, size_sent))

    def _watch(self, works: Sequence[dist.Work]) -> Callable[[], float]:
        """What tells when ``works`` were done.

        Of gloo only a thread that waits learns it in time. A wait for NCCL belongs to the stream of
        this thread, which therefore waits itself, when it must.
        """
        if self._rank.wire.type == "cpu":
            return self._watchers.submit(waited, works).result

        def synchronized() -> float:
            waited(works)
            torch.cuda.synchronize(self._rank.device)
            return time.perf_counter()

        return synchronized

    def _runs_of(self, s: int) -> int:
        """The microbatches of an iteration that this rank works on in stage ``s``."""
        return sum(self._rank.runs(s, m) for m in range(self._count))

    def _count_sends(self) -> Counter[tuple[int, ActionKind, int]]:
        """Per stage, kind, and microbatch of an iteration: the ranks to which this one sends."""
        me, steps = self._rank.devices[self._rank.number], ((SEND_F, 1), (SEND_B, -1))
        return Counter(
            (s, kind, m)
            for s in self._computations
            for kind, way in steps
            for m in range(self._count if 0 <= s + way <= self._last else 0)
            for sender, _ in transfers(self._plan, Action(s, kind, m))
            if sender == me
        )

    # Instructions as calls

    def _call(self, one: Instruction) -> Callable[[], None]:
        """What carries out an instruction; all that is known before is looked up here.

        Microbatches and versions move on by as many iterations as the row is carried out later.
        """
        s, kind, m = one.action.stage, one.action.kind, one.action.microbatch
        if m is None:
            return partial(self._reduce if kind is ActionKind.REDUCE else self._update, s)
        if kind in VERSIONED:
            weights = self._weights[s]
            switch = {STASH: weights.stash, USE: weights.use, DROP: weights.drop}[kind]
            return lambda: switch(m + self._later)
        if kind in COMPUTE:
            computations = {F: self._forward, B: self._backward, I: self._input_gradient}
            compute = computations.get(kind, self._weight_gradient)
            return lambda: compute(s, m + self._later * self._count)
        assert one.peer is not None
        return self._transfer(one.action, one.peer, s, m)

    def _transfer(self, action: Action, peer: int, s: int, m: int) -> Callable[[], None]:
        """A send or receive: which part of which values, under which tags.

        Both ranks number the values of an iteration's microbatches and directions alike, and see
        those of the same number in one order.
        """
        forth = action.kind in (SEND_F, RECV_F)
        lower = s if action.kind in (SEND_F, RECV_B) else s - 1
        boundary = self._boundaries[lower]
        mine = self._rank.lane(self._rank.number, s, m)
        theirs = self._rank.lane(peer, 2 * lower + 1 - s, m)
        below, above = (mine, theirs) if s == lower else (theirs, mine)
        span = boundary.passing(below, above, in_receiver=s != lower)
        chosen = [i for i, value in enumerate(boundary.values) if forth or value.gradient]
        tag = (2 * (lower * self._count + m % self._count) + forth) * self._tags
        if action.kind in SENDS:
            return partial(self._send, action, peer, boundary, span, [(i, tag + i) for i in chosen])
        shapes = [
            (i, tag + i, boundary.shape(i, span[1] - span[0]), boundary.values[i].dtype)
            for i in chosen
        ]
        return partial(self._receive, action, peer, theirs, len(boundary.values), shapes)

    def _forward(self, s: int, m: int) -> None:
        lane = self._rank.lane(self._rank.number, s, m)
        inputs = self._own_inputs(lane, m) if s == 0 else self._take(Action(s, RECV_F, m))
        first = self._plan.stages[s].layers[0]
        iteration, place = divmod(m, self._count)

        def seed(i: int) -> int:
            return layer_seed(self._seed, self._first_step + iteration, place, first + i)

        outputs = self._computations[s].forward(m, inputs, seed, (s, place) in self._in_two)
        if s in (0, self._last):
            self._unread[iteration] -= 1
        if s == self._last:
            self._judge(lane, m, outputs)
            self._judged(iteration)
        else:
            self._pass(Action(s, SEND_F, m), outputs)

    def _backward(self, s: int, m: int) -> None:
        gradients = self._computations[s].backward(m, self._output_gradients(s, m))
        self._pass_back(s, m, gradients)

    def _input_gradient(self, s: int, m: int) -> None:
        gradients = self._computations[s].input_gradient(m, self._output_gradients(s, m))
        self._pass_back(s, m, gradients)

    def _weight_gradient(self, s: int, m: int) -> None:
        self._computations[s].weight_gradient(m)

    def _reduce(self, s: int) -> None:
        # Devices that take turns bring a microbatch each to a round.
        share = 1 / self._plan.stages[s].turns if self._every_round else 1.0
        self._weights[s].reduce(self._groups.get(s), share)
        if self._joint.tied is not None:
            self._joint.tied.give(s)
        if self._clips and self._program.periodic is not None:
            iteration = self._given[s]
            self._given[s] += 1
            if all(self._given[one] > iteration for one in self._weights):
                self._begin_totals(iteration)

    def _update(self, s: int) -> None:
        if s not in self._factors:
            self._agree(s)
        self._weights[s].update(self._factors.pop(s))

    # What the ranks agree on before an update

    @property
    def _clips(self) -> bool:
        return self._joint.clip_norm < inf

    def _await_losses(self, iteration: int) -> None:
        """Begin the sum over ranks of what the losses count, where this rank has none of them."""
        self._unjudged[iteration] = self._runs_of(self._last)
        if self._unjudged[iteration] == 0:
            self._all_judged(iteration)

    def _judged(self, iteration: int) -> None:
        self._unjudged[iteration] -= 1
        if self._unjudged[iteration] == 0:
            self._all_judged(iteration)

    def _all_judged(self, iteration: int) -> None:
        del self._unjudged[iteration]
        if not self._every_round:
            self._counted[iteration] = [self._counts[m] for m in self._losses_of(iteration)]
            if not self._clips:
                self._begin_totals(iteration)

    def _begin_totals(self, iteration: int) -> float:
        """Bring this rank's part of an iteration's totals; the seconds of computing it."""
        squares = seconds = 0.0
        if self._clips:
            for weights in self._weights.values():
                weights.wait()
            start = time.perf_counter()
            squares = self._joint.squares()
            seconds = time.perf_counter() - start
        total = begin_total(self._counted.pop(iteration), squares, self._joint.group)
        for s in self._weights:
            self._of_iteration[s].append(total)
        return seconds

    def _agree(self, s: int) -> float:
        """Wait for what the update of a stage needs of others; the seconds of computing for it."""
        # Of a periodic plan, iteration i makes version i + 2 from the newest, i + 1.
        iteration = 0 if self._program.periodic is None else self._weights[s].newest - 1
        self._require_finite(*self._losses_of(iteration))
        seconds = 0.0
        if self._joint.tied is not None:
            self._joint.tied.take(s)
        elif s == self._first_together:
            self._joint.sum_tied()
            seconds = self._begin_totals(iteration) if self._clips else 0.0
        self._factors[s] = 1.0 if self._every_round else self._factor(s, iteration)
        return seconds

    def _factor(self, s: int, iteration: int) -> float:
        total = self._of_iteration[s].popleft()
        if total.counted() == 0:
            raise NonFiniteLoss(
                f"the loss of step {self._first_step + iteration + 1} has a sum over a count of 0"
            )
        return total.factor(self._joint.clip_norm)

    # The two ends of the pipeline

    def _own_inputs(self, lane: int, m: int) -> Tensors:
        inputs, _ = self._batches[m // self._count]
        return tuple(self._samples_of(one, 0, lane, m) for one in inputs)

    def _samples_of(self, batch: Tensor, s: int, lane: int, m: int) -> Tensor:
        start = m % self._count * self._samples
        return batch[start : start + self._samples][self._rows[s][lane]]

    def _judge(self, lane: int, m: int, outputs: Tensors) -> None:
        """The loss of a microbatch; the microbatch's backward begins with the loss's."""
        leaves = [
            one.detach().requires_grad_(trained)
            for one, trained in zip(outputs, self._computations[self._last].trained, strict=True)
        ]
        _, whole = self._batches[m // self._count]
        if isinstance(whole, tuple):
            targets: Batch = tuple(self._samples_of(one, self._last, lane, m) for one in whole)
        else:
            targets = self._samples_of(whole, self._last, lane, m)
        with torch.enable_grad(), self._computations[self._last].cast():
            found = self._loss(leaves[0] if self._single_output else tuple(leaves), targets)
        loss, count = read_loss(found)
        require_from_outputs(loss, leaves)
        self._values[m], self._counts[m] = loss.detach(), count
        self._losses[m] = (loss, leaves, count)
        if self._rank.device.type == "cpu":  # a GPU would have to be waited for
            self._require_finite(m)
        if self._every_round:
            self._of_microbatch[m] = begin_total([count], 0.0, self._joint.group)

    def _require_finite(self, *microbatches: int) -> None:
        for m in microbatches:
            if not isfinite(self._values[m]):
                iteration, place = divmod(m, self._count)
                raise NonFiniteLoss(
                    f"the loss of microbatch {place} on stage {self._last} is "
                    f"{float(self._values[m])} in step {self._first_step + iteration + 1}"
                )

    def _output_gradients(self, s: int, m: int) -> Gradients:
        if s < self._last:
            gradients = self._take(Action(s, RECV_B, m))
            # What the gradient answers has arrived.
            self._release(Action(s, SEND_F, m))
            return gradients
        loss, leaves, count = self._losses.pop(m)
        wanted = [one for one in leaves if one.requires_grad]
        scale = torch.full_like(loss, self._loss_scale(m, count))
        found = iter(torch.autograd.grad(loss, wanted, scale, allow_unused=True))
        return [next(found) if one.requires_grad else None for one in leaves]

    def _loss_scale(self, m: int, count: Tensor | None) -> float:
        """What the gradient of a microbatch's loss begins with.

        A sum is divided by its count as soon as all of that is known: here where a microbatch is an
        update of its own, else before the update.
        """
        total = self._of_microbatch.pop(m).counted() if self._every_round else 1.0
        if count is None:
            return self._share(self._last, m) * self._scale
        return 1 / total if total else 0.0

    def _share(self, s: int, m: int) -> float:
        """The share that this rank has of the samples of a microbatch."""
        return len(self._lanes[s][self._rank.lane(self._rank.number, s, m)]) / self._samples

    # What passes between stages

    def _pass(self, action: Action, values: Sequence[Tensor | None]) -> None:
        """Keep ``values`` for the sends to come, and hand this rank itself what is its own."""
        there, m = received(action), action.microbatch
        assert m is not None
        sends = self._sends[action.stage, action.kind, m % self._count]
        if sends:
            self._leaving[action] = _Leaving(values, sends)
        if not self._rank.runs(there.stage, m):
            return
        number = self._rank.number
        mine, ahead = (self._rank.lane(number, s, m) for s in (action.stage, there.stage))
        boundary = self._boundaries[min(action.stage, there.stage)]
        if boundary.cut is not None:
            back = action.kind is SEND_B
            below, above = (ahead, mine) if back else (mine, ahead)
            values = boundary.part(values, *boundary.passing(below, above, in_receiver=back))
        self._arrivals[there].append(Arrival(mine, list(values)))

    def _pass_back(self, s: int, m: int, gradients: Gradients) -> None:
        if s == 0:
            return
        boundary, samples = self._boundaries[s - 1], round(self._share(s, m) * self._samples)
        # An input that nothing used still gets an answer.
        filled = [
            torch.zeros(boundary.shape(i, samples), dtype=value.dtype, device=self._rank.device)
            if value.gradient and one is None
            else one
            for i, (value, one) in enumerate(zip(boundary.values, gradients, strict=True))
        ]
        self._pass(Action(s, SEND_B, m), filled)

    def _send(
        self,
        action: Action,
        peer: int,
        boundary: Boundary,
        span: tuple[int, int],
        chosen: Sequence[tuple[int, int]],
    ) -> None:
        action, group = self._moved(action), self._rank.group
        leaving = self._leaving[action]
        assert group is not None
        leaving.sends -= 1
        if leaving.sends == 0:
            del self._leaving[action]
        values = boundary.part(leaving.values, *span)
        for i, tag in chosen:
            one = values[i]
            assert one is not None
            one = one.detach().to(self._rank.wire).contiguous()
            self._sent[action].append((group.send([one], peer, tag), one))

    def _moved(self, action: Action) -> Action:
        return moved_action(action, self._later, self._count)

    def _release(self, action: Action) -> None:
        for work, _ in self._sent.pop(action, ()):
            work.wait()

    def _receive(
        self,
        action: Action,
        peer: int,
        lane: int,
        count: int,
        shapes: Sequence[tuple[int, int, tuple[int, ...], torch.dtype]],
    ) -> None:
        action, group, posted = self._moved(action), self._rank.group, time.perf_counter()
        assert group is not None
        values: list[Tensor | None] = [None] * count
        works = []
        for i, tag, shape, dtype in shapes:
            values[i] = buffer = torch.empty(shape, dtype=dtype, device=self._rank.wire)
            works.append(group.recv([buffer], peer, tag))
        self._arrivals[action].append(Arrival(lane, values, peer, tuple(works), posted))

    def _take(self, action: Action) -> tuple[Any, ...]:
        """What has arrived for a computation, its samples in the senders' order.

        A forward's values are all there; of gradients some may be None.
        """
        arrivals = sorted(self._arrivals.pop(action), key=lambda one: one.lane)
        for arrival in arrivals:
            arrival.wait()
        lower = action.stage if action.kind is RECV_B else action.stage - 1
        values = self._boundaries[lower].joined([one.values for one in arrivals])
        if self._rank.wire != self._rank.device:
            values = [one if one is None else one.to(self._rank.device) for one in values]
        return tuple(values)


def _needed(action: Action) -> Action | None:
    """What must have arrived for a computation."""
    kind = {F: RECV_F, B: RECV_B, I: RECV_B}.get(action.kind)
    return None if kind is None else Action(action.stage, kind, action.microbatch)


def _as_index(rows: Rows) -> slice | list[int]:
    """The samples ``rows``, as a slice where they stand in a row: that copies nothing."""
    if rows == tuple(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return list(rows)
