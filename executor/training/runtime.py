"""The executor: one process per device carries out its row of a plan's program."""

from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from stagewright.executor.capture.loss_graph import require_no_parameters
from stagewright.executor.programs.program import stages_on
from stagewright.executor.programs.trace import RankAction, traced_step
from stagewright.executor.training.assembly import (
    Interpreters,
    example_of,
    families_of,
    joint_of,
    staged_model,
    weights_of,
)
from stagewright.executor.training.checkpoint_share import CheckpointShare, Stateful
from stagewright.executor.training.data.batches import (
    Batch,
    mapped_batch,
    replica_of,
    require_as_many,
    tensors_of_batch,
    typed_inputs,
)
from stagewright.executor.training.evaluation import Evaluation
from stagewright.executor.training.losses import MIXED, Loss, loss_of_run, loss_scale_of
from stagewright.executor.training.model_checks import (
    require_capturable,
    require_trainable,
    warn_of_divided_loss,
)
from stagewright.executor.training.preparation import Preparation
from stagewright.executor.training.rank_executor import RankExecutor
from stagewright.executor.training.ranks.launch import require_torch
from stagewright.executor.training.ranks.rank import make_groups, rank_program, summed, this_rank
from stagewright.executor.training.stages.initialise import Model
from stagewright.executor.training.stages.learning_rates import (
    MakeOptimizer,
    MakeSchedule,
    ParameterGroups,
    require_groups,
    require_not_captured,
)
from stagewright.executor.training.stages.stored_weights import find_weights
from stagewright.executor.training.trace_recorder import MemoryMeter, TraceRecorder
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InputError

OPTIMIZER: MakeOptimizer = partial(torch.optim.SGD, lr=0.01)


class Executor(RankExecutor):
    """One rank of a plan, among the processes of torch's default group; alone if there is none.

    Parameters
    ----------
    plan
        Rank r is the r-th device in the order in which the plan's stages name them.
    module
        A module, a list of modules, or a function without arguments that makes one. A rank keeps
        only the layers of its own stages.
    loss
        ``loss(output, targets)``: a mean over samples, one number; or a pair ``(sum, count)``,
        which is normalised over the whole mini-batch, whatever the plan. With ``stash`` weights,
        which are updated after every microbatch, it is normalised over each. By default
        cross-entropy, without the labels that are -100; or, where the ``example`` is of keywords,
        the loss that the model returns, a mean over each microbatch.
    schedule
        Makes a scheduler of torch.optim.lr_scheduler for an optimizer: ``Schedule("cosine",
        total=1000, warmup=100)``, or ``partial(StepLR, step_size=10)``. It goes on with every
        mini-batch, also where each microbatch is an update; its state is a part of `state`.
    extra
        What else belongs to a checkpoint: an object with ``state_dict()`` and
        ``load_state_dict(state)``, the same on every rank. The state, of anything that can be
        pickled, is rank 0's.
    accumulate
        The number of mini-batches whose gradients make an update: that of the mean of their
        losses, or where losses are sums, of the sum over all counts. `step` takes one of them.
    example
        The inputs of a mini-batch, whose values do not count. It is needed for a module that is
        called with keywords or plain values, or cannot be traced without sizes, as the models of
        ``transformers``; all mini-batches then have its structure.
    optimizer
        Makes an optimizer for a list of parameters; there is one for each stage.
    groups
        Other arguments of the optimizer for some parameters, by regular expression:
        ``{"norm|bias": {"weight_decay": 0.0}}``. A parameter belongs to the first one that is found
        in its name. The optimizer is then made of a list of torch's mappings.
    clip_norm
        The maximum of the norm of all gradients together, as in
        ``torch.nn.utils.clip_grad_norm_`` for the whole model.
    seed
        Seed of parameters, where ``module`` is a function, and of random draws of layers.
    dtype
        Type of parameters and inputs. With bfloat16 and float16, computations are cast to it and
        the parameters stay float32.
    scaler
        Scales the loss, and leaves an update of all stages out if a gradient of any is not finite;
        of finite plans with ``flush`` weights. With float16 it is torch's GradScaler by default.
    weights
        A ``.safetensors`` file, an index of several, or a folder: values for all parameters and
        buffers of the state dict, of which a rank reads those of its stages.
    device
        Device of this rank; by default its GPU, or the CPU where there is none.
    timeout_seconds
        How long a rank waits for another in an all-reduce; elsewhere the limit of the default
        group applies.
    trace
        Whether to record when each action ran, in all steps, and the peak of memory; see
        `trace_on_first_rank`.
    graph
        Whether to replay the window between two losses as a CUDA graph; of a plan on one device.
    compile
        Whether layers are compiled by ``torch.compile``, where their backward is whole.
    own_samples
        Whether `step` is given the samples of this rank's replica alone, a part of the mini-batch,
        as by torch's ``DistributedSampler``; `replica` says which it is.
    evaluates
        Whether `evaluate` will be called: the model is then captured as it is in evaluation, too.

    Raises
    ------
    InputError
        If model or number of processes differ from the plan's, or torch is not of this version.
    InvalidPlan
        If the plan cannot be carried out.

    Examples
    --------
    As every rank under ``torchrun``::

        dist.init_process_group()
        executor = Executor(load_plan("plan.json"), make_model, optimizer=partial(SGD, lr=0.1))
        for inputs, targets in batches:
            loss = executor.step(inputs, targets)
        losses = executor.finish()

    With a periodic plan mini-batches overlap: `step` begins one, and the loss that it returns is of
    an earlier one. With a plan that begins with the backwards, a step ends with the loss; the
    next step or `finish` does the mini-batch's backwards and updates.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        module: Model | Callable[[], Model],
        loss: Loss | None = None,
        optimizer: MakeOptimizer = OPTIMIZER,
        *,
        groups: ParameterGroups = MappingProxyType({}),
        schedule: MakeSchedule | None = None,
        extra: Stateful | None = None,
        accumulate: int = 1,
        example: Batch | None = None,
        clip_norm: float | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        scaler: torch.amp.GradScaler | None = None,
        weights: Path | str | None = None,
        device: torch.device | str | None = None,
        timeout_seconds: float = 60.0,
        trace: bool = False,
        graph: bool = False,
        compile: bool = False,
        own_samples: bool = False,
        evaluates: bool = False,
    ) -> None:
        require_torch()
        self._scale = scale = loss_scale_of(scaler, dtype)
        checked = {"compiled": compile, "traced": trace, "scaled": scale is not None}
        require_trainable(plan, clip_norm, accumulate, **checked)
        self._accumulate = accumulate
        loss, takes_loss = loss_of_run(loss, example)
        require_no_parameters(loss)
        most = inf if clip_norm is None else clip_norm
        self.plan, self.steps_done, self._failed = plan, 0, False
        self._place = self._rank = this_rank(plan, device)
        meter = MemoryMeter(self._rank.device) if trace else None  # before the model is made
        if takes_loss and self.rank == 0:
            warn_of_divided_loss(plan)
        replicas = plan.stages[0].replicas if own_samples else 1
        if own_samples:
            replica_of(plan, self._rank.name)
        if graph:
            require_capturable(plan, self._rank.device, traced=trace)
        self._stages = stages_on(plan, self._rank.name)
        measures, autocast = most < inf or scale is not None, dtype if dtype in MIXED else None
        self._parameter_type = dtype if autocast is None else torch.float32
        shown = example_of(
            *(self._rank, example, replicas),
            takes_loss=takes_loss,
            dtype=self._parameter_type,
            autocast=autocast,
        )
        self._model = staged_model(
            *(self._rank, module, shown),
            None if weights is None else find_weights(Path(weights)),
            seed=seed,
            dtype=self._parameter_type,
            measures=measures,
            evaluates=evaluates,
        )
        # Known only from the captured model.
        families = families_of(plan, self._model, measures=measures)
        program = rank_program(plan, self.rank, families)
        timeout = timedelta(seconds=timeout_seconds)
        holders = {name: self._model.holders(name) for name in self._model.tied}
        self._groups = make_groups(self._rank, holders, timeout)
        self._model.shard(self._rank, self._groups.tensor)
        require_groups(groups, self._model.trained)
        require_not_captured(schedule, captured=graph)
        self._weights = weights_of(
            self._rank,
            program,
            self._model,
            families,
            self._groups,
            optimizer=optimizer,
            parameter_groups=groups,
            schedule=schedule,
            captured=graph,
        )
        preparation = Preparation(
            rank=self._rank,
            program=program,
            model=self._model,
            weights=self._weights,
            groups=self._groups.stages,
            joint=joint_of(
                *(self._rank, self._model, self._weights, families, self._groups, timeout),
                clip_norm=most,
                accumulate=accumulate,
                loss_scale=scale,
            ),
            families=families,
            loss=loss,
            seed=seed,
            autocast=autocast,
            captured=graph,
            compiled=compile,
            replicas=replicas,
        )
        self._interpreters = Interpreters(preparation)
        self._own = CheckpointShare(self._rank, self._model, self._weights, extra, scale)
        self._evaluation = Evaluation(preparation, takes_loss, self._parameter_type)
        traced = partial(traced_step, plan)
        self._recorder = TraceRecorder(
            self._rank, plan, dtype, traced, self.reporter, on=trace, meter=meter
        )

    @property
    def reporter(self) -> int:
        """A rank that knows the losses."""
        return self._rank.first(len(self.plan.stages) - 1)

    @property
    def replica(self) -> int:
        """The replica whose samples this rank takes if data are given by replica."""
        return replica_of(self.plan, self._rank.name)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of this rank's stages."""
        every = (weights.optimizer for weights in self._weights.values())
        return [one for one in every if one is not None]

    @property
    def updates_left_out(self) -> int:
        """The updates that were left out, as gradients of the scaled loss were infinite."""
        return 0 if self._scale is None else self._scale.left_out

    def step(self, inputs: Batch, targets: Batch = ()) -> float | None:
        """One iteration on a mini-batch; its mean loss on ranks of the last stage, else None.

        Every rank gives the same mini-batch: ``inputs`` are the model's, a tensor, a tuple of
        arguments or a dict of keywords, with the samples in dimension 0 of every tensor. They are
        cut into the plan's microbatches in order. ``targets`` are the loss's. A rank without the
        first and the last stage reads the shapes alone: tensors on ``meta`` do.

        With a periodic plan the mini-batch is begun, and those in flight proceed. The loss is of
        the mini-batch whose last forward was done in this call, in the order of the calls; None if
        there was none, as in the first calls. `finish` returns the remaining ones.

        Raises
        ------
        InputError
            If the samples do not divide into the plan's microbatches, or the model or the loss do
            not take them; if the shape changes while mini-batches are in flight.
        NonFiniteLoss, OutOfMemory
            Naming the stage. Weights and gradients are then undefined: the executor cannot be used
            again.
        """
        self._require_sound()
        # A run's first step has no backwards: of a plan between two losses it is only a part.
        is_whole = self._interpreters.running is not None or not self.plan.is_backward_first
        given, signature = typed_inputs(inputs, self._parameter_type)
        self._model.require_called(signature)
        require_as_many(given, tensors_of_batch("targets", targets))
        interpreter = self._interpreters.of(given)
        wanted: Batch = ()
        if len(self.plan.stages) - 1 in self._stages:
            wanted = mapped_batch(targets, lambda one: one.to(self._rank.device))
        if is_whole:
            self._recorder.begin(self.steps_done)
        own = tuple(one.to(self._rank.device) for one in given if 0 in self._stages)
        updates = (self.steps_done + 1) % self._accumulate == 0
        run = partial(interpreter.run, own, wanted, self.steps_done, updates=updates)
        losses = self._carried_out(run)
        self._model.require_same_gradients(self._weights)
        self.steps_done += 1
        if not self.plan.is_periodic:
            self._recorder.end(self.steps_done)
        return next(iter(losses), None)

    def finish(self) -> list[float]:
        """Complete the mini-batches in flight; their mean losses on ranks of the last stage.

        Losses that `step` has returned are not among them: only periodic plans have others.
        The weights are then those after all updates, as without a pipeline, and the next `step`
        begins with an empty pipeline. All ranks call it.

        Raises
        ------
        NonFiniteLoss, OutOfMemory
            As `step`.
        """
        self._require_sound()
        interpreter = self._interpreters.pop_running()
        if interpreter is None:
            return []
        losses = self._carried_out(interpreter.finish)
        self._recorder.end(self.steps_done)
        return losses

    def evaluate(self, batches: Iterable[Any], measure: Loss | None = None) -> float | None:
        """The mean loss of mini-batches in evaluation, on ranks of the last stage; None elsewhere.

        The model computes as after ``model.eval()``, with its newest weights and, in replicas of a
        stage, the buffers of the first one. Nothing is trained, and all weights and buffers are
        afterwards what they were. All ranks give the same ``batches`` of ``(inputs, targets)``, or
        of keywords, of any number of samples.

        ``measure`` is another function of the model's result and the targets, such as the number
        of correct answers with the number of all: a sum and its count, or one number, of which
        the mean over samples is returned. It is of parts of a mini-batch, as microbatches are; the
        loss of a model's own is of each mini-batch, or of each replica's samples of it.

        Raises
        ------
        InputError
            If the executor was not made for it, mini-batches are in flight or gradients are
            accumulated, or a mini-batch has fewer samples than devices that divide it.
        """
        self._require_sound()
        self._require_finished()
        with self._own_draws():
            return self._evaluation.mean(batches, measure)

    def _require_sound(self) -> None:
        if self._failed:
            raise InputError("a step failed before; make a new executor and load a checkpoint")

    def _require_finished(self) -> None:
        if self._interpreters.running is not None:
            raise InputError(
                f"mini-batches are in flight after step {self.steps_done}: call finish() on all "
                "ranks first"
            )
        if self.steps_done % self._accumulate:
            raise InputError(
                f"after {self.steps_done} mini-batches the update of the last "
                f"{self.steps_done % self._accumulate} is missing: it takes {self._accumulate}"
            )

    def _carried_out(
        self, run: Callable[[list[RankAction] | None], list[tuple[float, float]]]
    ) -> list[float]:
        """Call ``run`` with the list of the trace's records, None without one; the mean losses.

        Losses are summed over the ranks of the last stage.
        """
        last = len(self.plan.stages) - 1
        self._failed = True
        with self._own_draws():
            found = run(self._recorder.records)
        self._failed = False
        parts = [summed(self._rank, part, self._groups.stages.get(last)) for part in found]
        losses = [value / count if count else value for value, count in parts]
        self._recorder.add_losses(losses)
        return losses
