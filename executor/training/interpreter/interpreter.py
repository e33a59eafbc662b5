"""The interpreter: a rank's row, made into calls once; an iteration is a loop over them.

A periodic program has a row for an iteration and one for the drain at the end. The interpreter
does not know how a plan was made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.executor.programs.program import Instruction, Row, Samples
from stagewright.executor.programs.trace import RankAction
from stagewright.executor.training.data.batches import Batch, mapped_batch, tensors_of_batch
from stagewright.executor.training.interpreter.exchange import (
    RECV_B,
    RECV_F,
    Boundary,
    StageExchange,
)
from stagewright.executor.training.interpreter.last_stage import Iterations, LastStage
from stagewright.executor.training.interpreter.recorder import (
    Agreement,
    Call,
    PipelineRecorder,
    carry_out,
)
from stagewright.executor.training.interpreter.streams import (
    CapturedWindow,
    DeviceFactor,
    DeviceStreams,
    Joint,
    held_by,
    in_streams,
)
from stagewright.executor.training.losses import Loss
from stagewright.executor.training.ranks.rank import Rank, RankProgram
from stagewright.executor.training.stages.stage import Gradients, StageComputation, Tensors
from stagewright.executor.training.stages.weights import Weights, layer_seed
from stagewright.formulations.plans.actions import COMPUTE, SEND_F, VERSIONED, Action, ActionKind

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I = ActionKind.INPUT_GRADIENT
REDUCE, UPDATE = ActionKind.REDUCE, ActionKind.UPDATE
STASH, USE, DROP = ActionKind.STASH, ActionKind.USE, ActionKind.DROP

Known = tuple[dict[int, Tensor], dict[int, Tensor | None]]

WARM_UP = 1
"""Iterations after the first that are not captured: optimizers make their state in them."""


class Interpreter:
    """One rank's row, for mini-batches of one shape.

    Parameters
    ----------
    program
        The row of this rank.
    computations, weights
        Per stage of this rank.
    groups
        Per stage on several devices, the processes that sum up its gradients.
    boundaries
        Boundary s lies between stages s and s + 1.
    lanes
        Per stage and device that works on a microbatch, its samples.
    samples
        Samples of a microbatch.
    scale
        Weight of the mean loss of a microbatch in an update.
    joint
        Sums over ranks for an update.
    streams
        Of the device.
    captured
        Whether windows between two losses are captured and replayed; see `CapturedWindow`.
    is_own
        Whether mini-batches are given without the samples of other replicas.
    """

    def __init__(
        self,
        rank: Rank,
        program: RankProgram,
        computations: Mapping[int, StageComputation],
        weights: Mapping[int, Weights],
        groups: Mapping[int, dist.ProcessGroup],
        boundaries: Sequence[Boundary],
        lanes: Sequence[Sequence[Samples]],
        samples: int,
        *,
        loss: Loss,
        result: Callable[[Tensors], Any],
        scale: float,
        seed: int,
        joint: Joint,
        streams: DeviceStreams,
        captured: bool,
        is_own: bool,
    ) -> None:
        self._streams, self._captured = streams, captured
        self._window: CapturedWindow | None = None
        self._losses: Known = ({}, {})  # where the captured window writes them
        self._rank, self._program, self._plan, self._seed = rank, program, rank.plan, seed
        self._computations, self._weights, self._groups = computations, weights, groups
        self._last, self._count = len(rank.plan.stages) - 1, rank.plan.microbatches
        self._iterations = Iterations(rank, lanes, samples, computations, is_own=is_own)
        self._exchange = StageExchange(rank, self._iterations, boundaries, computations)
        self._last_stage = LastStage(
            rank,
            self._iterations,
            computations.get(self._last),
            loss,
            result=result,
            scale=scale,
            group=joint.group,
            captured=captured,
            loss_scale=joint.loss_scale,
        )
        self._agreement: Agreement | DeviceFactor = (
            DeviceFactor(self._iterations, self._last_stage, self._last)
            if captured
            else Agreement(rank, program, self._iterations, self._last_stage, weights, joint)
        )
        self._recorder = PipelineRecorder(
            rank,
            self._iterations,
            self._exchange,
            self._agreement,
            weights,
            groups,
            most=len(program.row) + 1,
        )
        self._in_two = self._split_backwards()
        self._calls, self._drain_calls = self._make_calls()
        kept = tuple(one for one in program.row if one.action.kind not in (REDUCE, UPDATE))
        self._calls_without_updates = self._calls_of(kept) if joint.accumulate > 1 else []

    def _split_backwards(self) -> set[tuple[int, int]]:
        """Stage and microbatch of an iteration of every backward in two parts."""
        split = {one.action for one in self._program.row if one.action.kind is I}
        found = {(one.stage, (one.microbatch or 0) % self._count) for one in split}
        for s in {s for s, _ in found}:
            # Between two losses the place of W is what the plan is made for.
            first = self._plan.stages[s].layers[0] if self._plan.is_backward_first else None
            self._computations[s].split(required_from=first)
        return found

    def _make_calls(self) -> tuple[list[list[Call]], list[list[Call]]]:
        """Per segment of the program, its instructions and those of a drain after it."""
        periodic, number = self._program.periodic, self._rank.number
        rows, drains = [self._program.row], list[Row]([()])
        if periodic is not None:
            rows = [row[number] for row in periodic.segments]
            drains = [row[number] for row in periodic.drains]
        return list(map(self._calls_of, rows)), list(map(self._calls_of, drains))

    def _calls_of(self, row: Row) -> list[Call]:
        return list(zip(row, in_streams(row, map(self._call, row), self._streams), strict=True))

    def run(
        self,
        inputs: Tensors,
        targets: Batch,
        step: int,
        records: list[RankAction] | None = None,
        *,
        updates: bool = True,
    ) -> list[tuple[float, float]]:
        """One iteration: this rank's part of the losses of the mini-batches that ended.

        A loss is a sum and its count, or a mean and 0. Without a periodic program it is the one of
        this mini-batch; with one, the list may be empty. Ranks without the last stage have none.
        ``inputs`` and ``targets`` are whole mini-batches on the device, empty where this rank does
        not need them. The times of instructions are added to ``records``, in seconds of this
        process's clock. Without ``updates`` gradients are left for the next mini-batch's. Raises
        NonFiniteLoss naming stage and microbatch. Raises OutOfMemory naming stage and instruction.
        """
        if self._window is not None and self._window.is_valid():
            return self._replayed(self._window, [*inputs, *tensors_of_batch("targets", targets)])
        if self._captured:  # what graphs and later windows read is not the caller's
            inputs, targets = tuple(map(torch.clone, inputs)), mapped_batch(targets, torch.clone)
        iteration = self._iterations.begin(inputs, targets, step)
        self._agreement.begin(iteration, updates=updates)
        position, self._iterations.later = self._place(iteration)
        if self._captured and iteration > WARM_UP:
            given = [*inputs, *tensors_of_batch("targets", targets)]
            self._window = self._capture(self._calls[position], given)
        else:
            calls = self._calls[position] if updates else self._calls_without_updates
            self._carry_out(calls, records)
        if self._program.periodic is None:
            return self.finish()
        self._exchange.release_older()
        return self._pop_losses(self._iterations.all_read())

    def finish(self, records: list[RankAction] | None = None) -> list[tuple[float, float]]:
        """Drain the pipeline: this rank's part of the losses not returned before."""
        if self._iterations.begun == 0:
            return []
        self._window = None
        position, self._iterations.later = self._place(self._iterations.begun - 1)
        self._carry_out(self._drain_calls[position], records)
        self._exchange.release_all()
        for weights in self._weights.values():
            weights.begin()
        self._agreement.restart()
        self._iterations.restart()
        return self._pop_losses(self._iterations.all())

    def _capture(self, calls: Sequence[Call], given: list[Tensor]) -> CapturedWindow:
        """Capture a window, and carry it out once."""
        work, weights = partial(self._carry_out, calls, None), self._weights.values()
        window = CapturedWindow(self._streams, work, self._held, given, weights)
        self._losses = self._last_stage.known()
        window.run(given)
        return window

    def _held(self) -> list[Tensor]:
        assert isinstance(self._agreement, DeviceFactor)
        return held_by(self._computations, self._last_stage) + self._agreement.held()

    def _replayed(self, window: CapturedWindow, given: list[Tensor]) -> list[tuple[float, float]]:
        """Run one iteration by replaying the captured window; return the losses it has written."""
        window.run(given)
        self._iterations.first_step += 1
        self._last_stage.learn(self._losses)
        return [self._last_stage.pop_loss(self._iterations.begun - 1)]

    def _place(self, iteration: int) -> tuple[int, int]:
        return (0, 0) if self._program.periodic is None else self._program.periodic.place(iteration)

    def _carry_out(self, calls: Sequence[Call], records: list[RankAction] | None) -> None:
        with self._streams.main():
            record = None if records is None else partial(self._recorder.record, records)
            step = self._iterations.step(self._iterations.begun - 1)
            carry_out(calls, record, self._named, step)

    def _named(self, one: Instruction) -> str:
        now = replace(one, action=self._iterations.moved(one.action))
        return f"stage {one.action.stage} does not fit: {now}"

    def _pop_losses(self, iterations: Sequence[int]) -> list[tuple[float, float]]:
        """The losses of iterations; their mini-batches are forgotten."""
        for i in iterations:
            self._iterations.forget(i)
        if self._last not in self._computations:
            return []
        return [self._last_stage.pop_loss(i) for i in iterations]

    # Instructions as calls

    def _call(self, one: Instruction) -> Callable[[], None]:
        """The function that carries out an instruction, with all that is known beforehand.

        Microbatches and versions move on by as many iterations as the row is carried out later.
        """
        s, kind, m = one.action.stage, one.action.kind, one.action.microbatch
        iterations = self._iterations
        if m is None:
            return partial(self._reduce if kind is ActionKind.REDUCE else self._update, s)
        if kind in VERSIONED:
            weights = self._weights[s]
            switch = {STASH: weights.stash, USE: weights.use, DROP: weights.drop}[kind]
            return lambda: switch(m + iterations.later * iterations.updates)
        if kind in COMPUTE:
            computations = {F: self._forward, B: self._backward, I: self._input_gradient}
            compute = computations.get(kind, self._weight_gradient)
            return lambda: compute(s, m + iterations.later * self._count)
        assert one.peer is not None
        return self._exchange.transfer(one.action, one.peer)

    def _forward(self, s: int, m: int) -> None:
        taken = Action(s, RECV_F, m)
        inputs = self._iterations.inputs(m) if s == 0 else self._exchange.take(taken)
        first = self._plan.stages[s].layers[0]
        iteration, place = divmod(m, self._count)

        def seed(i: int) -> int:
            return layer_seed(self._seed, self._iterations.step(iteration), place, first + i)

        computation, in_two = self._computations[s], (s, place) in self._in_two
        attached = s == self._last and self._last_stage.takes_graph
        outputs = computation.forward(m, inputs, seed, in_two, attached)
        if s in (0, self._last):
            self._iterations.read(iteration)
        if s == self._last:
            self._last_stage.compute(m, outputs)
            self._agreement.loss_computed(iteration)
        else:
            self._exchange.give(Action(s, SEND_F, m), outputs)

    def _backward(self, s: int, m: int) -> None:
        if s == self._last:
            gradients = self._last_stage.backward(m)
        else:
            gradients = self._computations[s].backward(m, self._output_gradients(s, m))
        self._exchange.give_back(s, m, gradients)

    def _input_gradient(self, s: int, m: int) -> None:
        gradients = self._computations[s].input_gradient(m, self._output_gradients(s, m))
        self._exchange.give_back(s, m, gradients)

    def _output_gradients(self, s: int, m: int) -> Gradients:
        if s == self._last:
            return self._last_stage.output_gradients(m)
        gradients = self._exchange.take(Action(s, RECV_B, m))
        # The gradient's arrival implies that the forward values have arrived.
        self._exchange.release(Action(s, SEND_F, m))
        return gradients

    def _weight_gradient(self, s: int, m: int) -> None:
        self._streams.keep(self._computations[s].for_weights(m))
        self._computations[s].weight_gradient(m)

    def _reduce(self, s: int) -> None:
        # Devices in turn (round-robin) contribute one microbatch each to a round.
        turns = self._plan.stages[s].turns
        share = 1 / turns if self._plan.weight_rule.updates_every_round else 1.0
        self._weights[s].reduce(self._groups.get(s), share)
        self._agreement.reduced(s)

    def _update(self, s: int) -> None:
        self._weights[s].update(self._agreement.pop_factor(s))
