"""Evaluation of the model that a rank trains: forwards through the plan's stages."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.executor.capture.evaluation import evaluating
from stagewright.executor.capture.layers import CapturedLayer, LayeredModel
from stagewright.executor.programs.lower import forwards_of, lower_forwards
from stagewright.executor.programs.program import Row
from stagewright.executor.training.data.batches import (
    Batch,
    mapped_batch,
    pair,
    require_as_many,
    tensors_of_batch,
    typed_inputs,
)
from stagewright.executor.training.interpreter.exchange import RECV_F, StageExchange
from stagewright.executor.training.interpreter.last_stage import Iterations
from stagewright.executor.training.losses import Loss, read_measure
from stagewright.executor.training.preparation import Preparation, crossing_of
from stagewright.executor.training.ranks.rank import Rank, summed
from stagewright.executor.training.stages.stage import StageComputation, Tensors
from stagewright.executor.training.stages.weights import layer_seed
from stagewright.formulations.plans.actions import SEND_F, Action
from stagewright.formulations.plans.shards import share_count
from stagewright.graphs.documents.errors import InputError

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]

KEPT = 16  # passes, for mini-batches of the shapes that came last


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Evaluation of held-out mini-batches by the stages of a rank.

    The loss is that of the training, or the model's own (``takes_loss``); ``dtype`` is the type of
    the parameters.
    """

    prepared: Preparation
    takes_loss: bool
    dtype: torch.dtype
    _passes: "OrderedDict[tuple[int, int, Shapes], _Pass]" = field(
        default_factory=OrderedDict, init=False
    )

    def mean(self, batches: Iterable[Any], measure: Loss | None = None) -> float | None:
        """The mean of ``measure``, by default the loss, on ranks of the last stage; None elsewhere.

        All ranks give the same mini-batches, of any number of samples. Where the measure is a sum
        and its count, the mean is that of all sums; else it is weighted by samples.
        """
        rank, model = self.prepared.rank, self.prepared.model
        last = len(rank.plan.stages) - 1
        modules = [layer.module for layer in model.layers]  # shapes depend on all layers
        try:
            with evaluating(modules), self._same_buffers():
                total, weight = self._sums(batches, measure or self.prepared.loss)
        except BaseException:
            self._passes.clear()  # a pass ended half-way
            raise
        if last not in model.modules:
            return None
        total, weight = summed(rank, (total, weight), self.prepared.groups.get(last))
        if weight == 0:
            raise InputError("the evaluation counts nothing: there is no mini-batch, or no label")
        return total / weight

    def _sums(self, batches: Iterable[Any], measure: Loss) -> tuple[float, float]:
        """The rank's parts of all mini-batches' measures, and the divisors of these sums."""
        total, weight = 0.0, 0.0
        for batch in batches:
            inputs, targets = pair(batch, has_loss=not self.takes_loss)
            for count, samples, given, wanted in self._parts(inputs, targets):
                value, counted = self._pass(count, samples, given).run(given, wanted, measure)
                total, weight = total + value, weight + counted
        return total, weight

    def _parts(
        self, inputs: Batch, targets: Batch
    ) -> Iterator[tuple[int, int, tuple[Tensor, ...], Batch]]:
        """A mini-batch in microbatches: their number and samples, inputs and targets.

        There are as many as in training, if every replica has a sample of each. Some may have one
        sample more: they come first. A model's own loss is computed of the whole mini-batch.
        """
        given, signature = typed_inputs(inputs, self.dtype)
        self.prepared.model.require_called(signature)
        require_as_many(given, tensors_of_batch("targets", targets))
        plan, every = self.prepared.rank.plan, len(given[0])
        least = max(share_count(stage) for stage in plan.stages)
        if every < least:
            raise InputError(
                f"a mini-batch of {every} samples is too small to be evaluated: the plan divides "
                f"microbatches among {least} devices"
            )
        parts = 1 if self.takes_loss else min(plan.microbatches, every // least)
        samples, larger = divmod(every, parts)
        begin = 0
        for count, size in ((larger, samples + 1), (parts - larger, samples)):
            if count:
                own = slice(begin, begin + count * size)
                part = mapped_batch(targets, itemgetter(own))
                yield count, size, tuple(one[own] for one in given), part
                begin = own.stop

    def _pass(self, count: int, samples: int, inputs: tuple[Tensor, ...]) -> "_Pass":
        """The prepared pass for ``count`` microbatches of inputs with these shapes."""
        key = count, samples, tuple((one.shape[1:], one.dtype) for one in inputs)
        if key not in self._passes:
            self._passes[key] = self._made(count, samples, inputs)
            if len(self._passes) > KEPT:
                self._passes.popitem(last=False)
        self._passes.move_to_end(key)
        return self._passes[key]

    def _made(self, count: int, samples: int, inputs: tuple[Tensor, ...]) -> "_Pass":
        prepared, autocast = self.prepared, self.prepared.autocast
        plan = forwards_of(prepared.rank.plan, count)
        rank = replace(prepared.rank, plan=plan)
        found: dict[tuple[tuple[int, ...], ...], LayeredModel] = {}

        def sized(shapes: Sequence[tuple[int, ...]]) -> Sequence[CapturedLayer]:
            found[tuple(shapes)] = prepared.model.in_evaluation(shapes)
            return found[tuple(shapes)].layers

        crossing = crossing_of(plan, samples, inputs, prepared.model, sized, rank.device, autocast)
        whole = tuple(one.shape for one in crossing.entering[samples])
        computations = {
            s: crossing.computation(rank, s, weights, autocast)
            for s, weights in prepared.weights.items()
        }
        iterations = Iterations(rank, crossing.lanes, samples, computations)
        return _Pass(
            rank,
            lower_forwards(plan).rows[rank.number],
            computations,
            iterations,
            StageExchange(rank, iterations, crossing.boundaries(), computations),
            found[whole].result,
            prepared.seed,
        )

    @contextmanager
    def _same_buffers(self) -> Iterator[None]:
        """Let replicas compute with the buffers of a stage's first one, which are saved as well.

        All buffers are afterwards what they were, also those that a forward changes.
        """
        layers = chain.from_iterable(self.prepared.model.modules.values())
        parts = {part for layer in layers for part in layer.module.modules()}
        before = [
            (part._buffers, key, one, one.clone())
            for part in parts
            for key, one in part._buffers.items()
            if one is not None
        ]
        for s, group in self.prepared.groups.items():
            source = dist.get_global_rank(group, 0)
            for one in self.prepared.model.buffers(s).values():
                shared = one.to(self.prepared.rank.wire)
                dist.broadcast(shared, source, group=group)
                one.copy_(shared)
        try:
            yield
        finally:
            for buffers, key, one, own in before:
                one.copy_(own)
                buffers[key] = one


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """A rank's row of forwards, for mini-batches of one shape."""

    rank: Rank
    row: Row
    computations: Mapping[int, StageComputation]
    iterations: Iterations
    exchange: StageExchange
    result: Callable[[Tensors], Any]
    seed: int

    def run(self, inputs: Tensors, targets: Batch, measure: Loss) -> tuple[float, float]:
        """The rank's part of a mini-batch's measure: a sum, and the divisor of the sum."""
        device, last = self.rank.device, len(self.rank.plan.stages) - 1
        if 0 in self.computations:
            inputs = tuple(one.to(device) for one in inputs)
        if last in self.computations:
            targets = mapped_batch(targets, lambda one: one.to(device))
        iteration = self.iterations.begin(inputs, targets, 0)
        total = weight = 0.0
        for one in self.row:
            s, m = one.action.stage, one.action.microbatch
            assert m is not None
            if one.peer is not None:
                self.exchange.transfer(one.action, one.peer)()
                continue
            outputs = self._forward(s, m)
            if s < last:
                self.exchange.give(Action(s, SEND_F, m), outputs)
                continue
            value, counted = self._measured(m, outputs, measure)
            total, weight = total + value, weight + counted
        self.exchange.release_all()
        self.iterations.forget(iteration)
        self.iterations.restart()
        return total, weight

    def _forward(self, s: int, m: int) -> Tensors:
        taken = Action(s, RECV_F, m)
        inputs = self.iterations.inputs(m) if s == 0 else self.exchange.take(taken)
        first = self.rank.plan.stages[s].layers[0]
        return self.computations[s].evaluate(
            inputs, lambda i: layer_seed(self.seed, 0, m, first + i)
        )

    def _measured(self, m: int, outputs: Tensors, measure: Loss) -> tuple[float, float]:
        last = len(self.rank.plan.stages) - 1
        with torch.no_grad(), self.computations[last].cast():
            found = measure(self.result(outputs), self.iterations.targets(m, last))
        value, count = read_measure(found)
        if count is not None:
            return value, count
        samples = self.iterations.share(last, m) * self.iterations.samples
        return value * samples, samples
