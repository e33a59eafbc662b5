"""The iterations in flight, the losses of their microbatches, and the gradients of losses.

Sums over ranks for an update: the counts of losses, and the squared norm of gradients.

They are made on the host, by gloo, and overlap with computations.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.executor.capture.loss_graph import require_from_outputs
from stagewright.executor.programs.program import Samples, moved_action, updates_of_iteration
from stagewright.executor.training.data.batches import Batch, mapped_batch
from stagewright.executor.training.losses import Loss, LossScale, read_loss
from stagewright.executor.training.ranks.rank import Rank
from stagewright.executor.training.stages.stage import Gradients, StageComputation, Tensors
from stagewright.formulations.plans.actions import Action
from stagewright.graphs.documents.errors import InputError


class Iterations:
    """Iterations are numbered from 0 since the last drain, microbatches across iterations.

    ``lanes``: per stage and device that works on a microbatch, its samples. ``samples``: samples of
    a microbatch. ``stages``: the stages of this rank. ``is_own``: whether mini-batches are given
    without the samples of other replicas.

    ``count``: microbatches of an iteration. ``updates``: of the weights, in an iteration of a
    periodic plan. ``begun``: iterations begun since the last drain. ``first_step``: the training
    step of iteration 0. ``later``: how many iterations after its own the row is carried out now.
    """

    def __init__(
        self,
        rank: Rank,
        lanes: Sequence[Sequence[Samples]],
        samples: int,
        stages: Collection[int],
        *,
        is_own: bool = False,
    ) -> None:
        self.count, self.samples = rank.plan.microbatches, samples
        self.updates = updates_of_iteration(rank.plan)
        self.begun = self.first_step = self.later = 0
        self._rank, self._lanes, self._is_own = rank, lanes, is_own
        last = len(rank.plan.stages) - 1
        self._rows = {s: [_as_index(lane) for lane in lanes[s]] for s in (0, last)}
        # By iteration, until its last forward: the mini-batch, and the forwards still to read it.
        self._batches: dict[int, tuple[Tensors, Batch]] = {}
        self._unread: dict[int, int] = {}
        self._reads = sum(map(self.runs_of, {0, last}.intersection(stages)))

    def begin(self, inputs: Tensors, targets: Batch, step: int) -> int:
        """Take in the mini-batch of the next iteration; the number of that iteration."""
        if self.begun == 0:
            self.first_step = step
        iteration = self.begun
        self._batches[iteration] = inputs, targets
        self._unread[iteration] = self._reads
        self.begun += 1
        return iteration

    def read(self, iteration: int) -> None:
        """Count a forward that has read its samples."""
        self._unread[iteration] -= 1

    def all_read(self) -> list[int]:
        """The iterations whose last forward is done."""
        return [i for i, reads in self._unread.items() if reads == 0]

    def all(self) -> list[int]:
        """The iterations whose mini-batch is held."""
        return list(self._batches)

    def forget(self, iteration: int) -> None:
        """Drop the mini-batch of an iteration."""
        del self._batches[iteration], self._unread[iteration]

    def restart(self) -> None:
        """Number iterations from 0 again."""
        self.begun = 0

    def step(self, iteration: int) -> int:
        """The training step of an iteration, from 0."""
        return self.first_step + iteration

    def moved(self, action: Action) -> Action:
        """An action of the row as it is now: of later microbatches and versions."""
        return moved_action(action, self.later, self.count, self.updates)

    def runs_of(self, s: int) -> int:
        """The microbatches of an iteration that this rank works on in stage ``s``."""
        return sum(self._rank.runs(s, m) for m in range(self.count))

    def share(self, s: int, m: int) -> float:
        """The share that this rank has of the samples of a microbatch."""
        return len(self._lanes[s][self._rank.lane(self._rank.number, s, m)]) / self.samples

    def inputs(self, m: int) -> Tensors:
        """The model's inputs of this rank's samples of a microbatch."""
        inputs, _ = self._batches[m // self.count]
        return tuple(map(self._chooser(0, m), inputs))

    def targets(self, m: int, last: int) -> Batch:
        """The targets of this rank's samples of a microbatch on the ``last`` stage."""
        _, targets = self._batches[m // self.count]
        return mapped_batch(targets, self._chooser(last, m))

    def _chooser(self, s: int, m: int) -> Callable[[Tensor], Tensor]:
        """Choose this rank's samples of a microbatch from a tensor of the mini-batch."""
        place = m % self.count
        if self._is_own:
            own = round(self.share(s, m) * self.samples)
            begin = place // self._rank.plan.stages[s].turns * own
            return lambda batch: batch[begin : begin + own]
        start, stop = place * self.samples, (place + 1) * self.samples
        rows = self._rows[s][self._rank.lane(self._rank.number, s, m)]
        return lambda batch: batch[start:stop][rows]


def _as_index(rows: Samples) -> slice | list[int]:
    """The samples ``rows``; a slice where they are consecutive, which copies nothing."""
    if rows == tuple(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return list(rows)


class NonFiniteLoss(ArithmeticError):  # noqa: N818 - named as InvalidPlan is
    """The loss of a microbatch is nan or infinite, or that of a mini-batch has a count of 0."""


class OutOfMemory(RuntimeError):  # noqa: N818 - named as InvalidPlan is
    """A stage does not fit into its device's memory."""


def is_lack_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether an error means that memory could not be allocated."""
    short = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return short or "can't allocate memory" in str(error)


@dataclass(slots=True)
class Total:
    """A sum over ranks that may be in flight: losses that have a count, counts, squares."""

    numbers: Tensor
    work: dist.Work | None

    def counted(self) -> float | None:
        """Wait for the count of the summed losses; None where they are means."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return float(self.numbers[1]) if self.numbers[0] else None

    def is_finite(self) -> bool:
        """Whether all gradients are finite, by their squares, which 64 bits hold."""
        self.counted()
        return isfinite(self.numbers[2])

    def factor(self, clip_norm: float = inf, share: float = 1.0, loss_scale: float = 1.0) -> float:
        """The factor of summed gradients, for a norm of at most ``clip_norm``.

        ``share`` is the weight of a loss that is a mean; the losses were multiplied by
        ``loss_scale``. The small number in the denominator is that of
        ``torch.nn.utils.clip_grad_norm_``.
        """
        count = self.counted()
        scale = (share if count is None else 1 / count) / loss_scale
        if clip_norm == inf:
            return scale
        norm = scale * sqrt(float(self.numbers[2]))
        return scale * min(1.0, clip_norm / (norm + 1e-6))


def begin_total(
    counts: Iterable[Tensor | None], squares: float, group: dist.ProcessGroup | None
) -> Total:
    """Begin the sums over ranks of the ``counts`` of losses and the ``squares`` of gradients."""
    known = [float(count) for count in counts if count is not None]
    for count in known:
        if not (isfinite(count) and count >= 0):
            raise InputError(f"the loss counts {count:g}; a count must be a number from 0 on")
    numbers = torch.tensor([len(known), sum(known), squares], dtype=torch.float64)
    work = None if group is None else dist.all_reduce(numbers, group=group, async_op=True)
    return Total(numbers, work)


class LastStage:
    """The losses that this rank computes; none of them without the last stage.

    ``computation``: the last stage's, None on other ranks. ``result``: makes the model's result,
    which the loss is given, of the last layer's tensors. ``scale``: weight of the mean loss of a
    microbatch in an update. ``group``: the processes that sum up the counts of losses.
    ``captured``: whether windows are captured: then nothing is read while losses are computed, and
    their gradients are computed with them. ``loss_scale``: what gradients are multiplied by.
    """

    def __init__(
        self,
        rank: Rank,
        iterations: Iterations,
        computation: StageComputation | None,
        loss: Loss,
        *,
        result: Callable[[Tensors], Any],
        scale: float,
        group: dist.ProcessGroup | None,
        captured: bool,
        loss_scale: LossScale | None = None,
    ) -> None:
        self._captured, self._loss_scaling = captured, loss_scale
        self._gradients: dict[int, Gradients] = {}  # of the outputs, where windows are captured
        self._rank, self._iterations, self._computation = rank, iterations, computation
        self._loss, self._result, self._scale = loss, result, scale
        self._group, self._number = group, len(rank.plan.stages) - 1
        self._every_round = rank.plan.weight_rule.updates_every_round
        # By microbatch: until its backward, the loss with the outputs it was computed from.
        self._losses: dict[int, tuple[Tensor, list[Tensor], Tensor | None]] = {}
        self._values: dict[int, Tensor] = {}
        self._counts: dict[int, Tensor | None] = {}
        self._totals: dict[int, Total] = {}  # where each microbatch has its own update
        self._is_checked = False
        self._attached: set[int] = set()

    @property
    def takes_graph(self) -> bool:
        """Whether losses get outputs with their graph, which is only after a first checked loss."""
        return self._is_checked and not self._captured

    def compute(self, m: int, outputs: Tensors) -> None:
        """Compute the loss of a microbatch.

        If the outputs have their graph, its backward is the stage's as well: `backward` does both.
        """
        assert self._computation is not None
        is_attached = any(one.grad_fn is not None for one in outputs)
        leaves = (
            list(outputs)
            if is_attached
            else [
                one.detach().requires_grad_(trained)
                for one, trained in zip(outputs, self._computation.trained, strict=True)
            ]
        )
        targets = self._iterations.targets(m, self._number)
        with torch.enable_grad(), self._computation.cast():
            found = self._loss(self._result(tuple(leaves)), targets)
        loss, count = read_loss(found)
        if is_attached:
            self._attached.add(m)
        else:
            require_from_outputs(loss, leaves)
            self._is_checked = True
        self._values[m], self._counts[m] = loss.detach(), count
        self._losses[m] = (loss, leaves, count)
        if self._captured:
            self._gradients[m] = self._output_gradients(m)
        elif self._rank.device.type == "cpu":  # to read it on a GPU would block
            self._require_finite(m)
        if self._every_round:
            self._totals[m] = begin_total([count], 0.0, self._group)

    def backward(self, m: int) -> Gradients:
        """The whole backward of a microbatch in the last stage: gradients of the stage's inputs."""
        assert self._computation is not None
        if m not in self._attached:
            return self._computation.backward(m, self.output_gradients(m))
        self._attached.remove(m)
        loss, _, count = self._losses.pop(m)
        scale = torch.full_like(loss, self._loss_scale(m, count))
        return self._computation.backward_of(m, loss, scale)

    def output_gradients(self, m: int) -> Gradients:
        """Gradients of the loss with respect to the stage's outputs."""
        return self._gradients.pop(m) if self._captured else self._output_gradients(m)

    def _output_gradients(self, m: int) -> Gradients:
        loss, leaves, count = self._losses.pop(m)
        wanted = [one for one in leaves if one.requires_grad]
        scale = torch.full_like(loss, self._loss_scale(m, count))
        found = iter(torch.autograd.grad(loss, wanted, scale, allow_unused=True))
        return [next(found) if one.requires_grad else None for one in leaves]

    def _loss_scale(self, m: int, count: Tensor | None) -> float:
        """The gradient with respect to the loss of a microbatch.

        A sum is divided by its count as soon as the count is known on all ranks: here where each
        microbatch has its own update, else before the update.
        """
        total = self._totals.pop(m).counted() if self._every_round else 1.0
        scale = 1.0 if self._loss_scaling is None else self._loss_scaling.factor
        if count is None:
            return self._iterations.share(self._number, m) * self._scale * scale
        return scale / total if total else 0.0

    def counts(self, iteration: int) -> list[Tensor | None]:
        """Counts of an iteration's losses by microbatch; a tensor group counts once."""
        own = self._of(iteration)
        return (
            [self._counts[m] for m in own] if own and not self._rank.position(self._number) else []
        )

    def require_finite(self, iteration: int) -> None:
        """Refuse nan and infinite losses of an iteration."""
        self._require_finite(*self._of(iteration))

    def held(self) -> list[Tensor]:
        """The gradients that backwards begin with, where windows are captured."""
        every = (one for gradients in self._gradients.values() for one in gradients)
        return [one for one in every if one is not None]

    def known(self) -> tuple[dict[int, Tensor], dict[int, Tensor | None]]:
        """Losses and their counts, by microbatch."""
        return dict(self._values), dict(self._counts)

    def learn(self, known: tuple[dict[int, Tensor], dict[int, Tensor | None]]) -> None:
        """Take over losses and their counts."""
        self._values |= known[0]
        self._counts |= known[1]

    def pop_loss(self, iteration: int) -> tuple[float, float]:
        """The rank's part of a mini-batch's loss: a sum and its count, or a mean and 0."""
        own = self._of(iteration)
        self._require_finite(*own)
        value = count = 0.0
        for m in own:
            counted, found = self._counts.pop(m), float(self._values.pop(m))
            if counted is None:
                share = self._iterations.share(self._number, m)
                value += share * found / self._iterations.count
            else:
                value, count = value + found, count + float(counted)
        return value, count

    def _of(self, iteration: int) -> list[int]:
        """The microbatches of an iteration whose loss is known here."""
        return [m for m in self._values if m // self._iterations.count == iteration]

    def _require_finite(self, *microbatches: int) -> None:
        for m in microbatches:
            if not isfinite(self._values[m]):
                iteration, place = divmod(m, self._iterations.count)
                raise NonFiniteLoss(
                    f"the loss of microbatch {place} on stage {self._number} is "
                    f"{float(self._values[m])} in step {self._iterations.step(iteration) + 1}"
                )
