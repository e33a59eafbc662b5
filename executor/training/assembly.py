"""The parts of a rank that are made of a user's model: its stages and their weights."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.executor.capture.exported.exporting import Example
from stagewright.executor.programs.program import Families, stages_on, updates_of_iteration
from stagewright.executor.training.data.batches import (
    Batch,
    microbatch_samples,
    require_as_many,
    typed_inputs,
)
from stagewright.executor.training.interpreter.interpreter import Interpreter
from stagewright.executor.training.interpreter.streams import Joint
from stagewright.executor.training.losses import LossScale
from stagewright.executor.training.model_checks import (
    require_joint_steps,
    require_same_model,
    require_sharing,
    require_whole_gradients,
)
from stagewright.executor.training.preparation import Preparation, needs_two_gradients
from stagewright.executor.training.ranks.rank import Rank, RankGroups, RankProgram, make_loss_group
from stagewright.executor.training.stages.initialise import Model, initialise
from stagewright.executor.training.stages.learning_rates import (
    MakeOptimizer,
    MakeSchedule,
    ParameterGroups,
)
from stagewright.executor.training.stages.sharded_weights import (
    DividedWeights,
    GradientShards,
    OptimizerShards,
    WeightShards,
    move,
)
from stagewright.executor.training.stages.staged_model import StagedModel
from stagewright.executor.training.stages.stored_weights import StoredWeights
from stagewright.executor.training.stages.weights import TiedSums, Weights
from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.graphs.documents.errors import InputError


class SharedGradients:
    """The part of a rank in sums of gradients over the stages of a model.

    ``weights`` are by stage of this rank, ``groups`` the processes that hold a tied parameter, by
    its first name.
    """

    def __init__(
        self,
        rank: Rank,
        model: StagedModel,
        weights: dict[int, Weights],
        groups: Mapping[str, dist.ProcessGroup],
    ) -> None:
        self._rank, self._model, self._weights, self._groups = rank, model, weights, groups

    def sum(self) -> None:
        """Sum up the gradients of shared parameters over the devices of all their stages."""
        for name in self._model.tied:
            own = [
                self._weights[s].gradient(name)
                for s in self._model.stages_of[name]
                if s in self._weights
            ]
            found = [one for one in own if one is not None]
            if not found:
                continue
            total = torch.stack(found).sum(0)
            if name in self._groups:
                dist.all_reduce(total, group=self._groups[name])
            for one in found:
                one.copy_(total)

    def overlapping(self) -> TiedSums:
        """The same sums, where they overlap with the next backwards."""
        sharing = {
            name: [s for s in self._model.stages_of[name] if s in self._weights]
            for name in self._model.tied
        }
        own = {name: stages for name, stages in sharing.items() if stages}
        return TiedSums(self._weights, own, self._groups)

    def squares(self) -> float:
        """The squared norm of gradients, each parameter on one rank: the first that has it.

        Of the first tensor group of a stage, the first device brings what is whole on all. Replicas
        that divide the gradients bring their parts.
        """
        divided = {s: one for s, one in self._weights.items() if isinstance(one, DividedWeights)}
        first = {
            s for s in self._weights.keys() - divided if self._rank.first(s) == self._rank.number
        }
        tied = [
            torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            for name in self._model.tied
            if (s := self._model.stages_of[name][0]) in first
            and (gradient := self._weights[s].gradient(name)) is not None
        ]
        shards = [
            torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            for s in self._model.shardings.keys() - first - divided.keys()
            if self._rank.is_in_first_group(s)
            for name in self._model.shardings[s].cuts
            if (gradient := self._weights[s].gradient(name)) is not None
        ]
        whole = sum(self._weights[s].squares() for s in first)
        for s, weights in divided.items():
            own = weights.names if self._rank.position(s) == 0 else self._model.shardings[s].cuts
            whole += float(weights.squares_by_name(own).sum())
        return whole + float(sum(tied)) + float(sum(shards))


SHAPES = 16  # of mini-batches, whose preparation is kept


class Interpreters:
    """One interpreter for each of the shapes that came last.

    ``running``: the one that has mini-batches in flight, in a plan whose mini-batches span steps.
    """

    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation
        self._spans_steps = preparation.rank.plan.spans_steps
        self._found: OrderedDict[object, Interpreter] = OrderedDict()
        self.running: Interpreter | None = None

    def of(self, given: tuple[Tensor, ...]) -> Interpreter:
        """The interpreter for the shapes of ``given``.

        Raises InputError if mini-batches of other shapes are in flight.
        """
        key = tuple((one.shape, one.dtype) for one in given)
        found = self._found.get(key)
        if self.running is not None and found is not self.running:
            raise InputError(
                f"a mini-batch of shape {', '.join(str(tuple(one.shape)) for one in given)} "
                "follows others while they are in flight; call finish() on all ranks before the "
                "shape changes"
            )
        if found is None:
            found = self._found[key] = self._preparation.interpreter(given)
            if len(self._found) > SHAPES:
                self._found.popitem(last=False)
        self._found.move_to_end(key)
        if self._spans_steps:
            self.running = found
        return found

    def pop_running(self) -> Interpreter | None:
        """Return the interpreter with mini-batches in flight, and forget that it has any."""
        found, self.running = self.running, None
        return found


_SHARDED: dict[str, type[DividedWeights]] = {
    "optimizer": OptimizerShards,
    "gradients": GradientShards,
    "weights": WeightShards,
}


def example_of(
    rank: Rank,
    inputs: Batch | None,
    replicas: int,
    *,
    takes_loss: bool,
    dtype: torch.dtype,
    autocast: torch.dtype | None,
) -> Example | None:
    """A microbatch to capture the model with, from ``inputs`` of one of ``replicas`` replicas.

    None without inputs. The rest as in `Example`.
    """
    if inputs is None:
        return None
    given, signature = typed_inputs(inputs, dtype)
    require_as_many(given, ())
    whole = Example(given, signature, takes_loss, rank.device, dtype, autocast)
    return whole.first(microbatch_samples(rank.plan, given, replicas) // replicas)


def staged_model(
    rank: Rank,
    module: Model | Callable[[], Model],
    example: Example | None,
    weights: StoredWeights | None,
    *,
    seed: int,
    dtype: torch.dtype,
    measures: bool,
    evaluates: bool,
) -> StagedModel:
    """The captured model, with the rank's layers alone on its device.

    Raises InputError if it is not the model that was planned, or the plan cannot train it.
    """
    plan, stages = rank.plan, stages_on(rank.plan, rank.name)
    own = [plan.stages[s] for s in stages]
    model = initialise(
        module,
        {i for stage in own for i in range(*stage.layers)},
        seed=seed,
        device="cpu" if any(_is_divided(stage) for stage in own) else rank.device,
        dtype=dtype,
        example=example,
        weights=weights,
        evaluates=evaluates,
    )
    require_same_model(plan, model)
    staged = StagedModel(plan, model, stages)
    require_sharing(plan, staged.tied, staged.stages_of, clips=measures)
    require_whole_gradients(plan, model, staged.stages_of)
    return staged


def families_of(plan: PipelinePlan, model: StagedModel, *, measures: bool) -> set[frozenset[int]]:
    """Stages that share a trained parameter; all stages, if updates need the norm of gradients."""
    found = {frozenset(model.stages_of[name]) for name in model.tied}
    everything = frozenset(range(len(plan.stages)))
    return found | {everything} if measures else found


def weights_of(
    rank: Rank,
    program: RankProgram,
    model: StagedModel,
    families: Families,
    groups: RankGroups,
    *,
    optimizer: MakeOptimizer,
    parameter_groups: ParameterGroups,
    schedule: MakeSchedule | None,
    captured: bool,
) -> dict[int, Weights]:
    """The weights of a rank's stages, with their optimizers; ``captured``: windows are graphs."""
    plan, made = rank.plan, dict[int, Weights]()
    for s, layers in model.modules.items():
        modules = [layer.module for layer in layers]
        shared: dict[str, Any] = {
            "groups": parameter_groups,
            "schedule": schedule,
            "updates": _updates_of_step(plan, program, s),
        }
        if (kind := _SHARDED.get(plan.stages[s].shards)) is not None:
            group = groups.stages[s]
            # Of the same position in its tensor group as this one.
            first = rank.devices.index(plan.stages[s].devices[rank.position(s)])
            first = dist.get_group_rank(group, first)
            made[s] = kind(modules, model.primary, optimizer, group, first, rank.device, **shared)
            continue
        move(modules, rank.device)  # they are on the host where another stage's are divided
        two_gradients = needs_two_gradients(plan, families, s)
        made[s] = Weights(
            modules,
            model.primary,
            model.tied,
            optimizer,
            versions=plan.weight_rule.versions,
            **shared,
            two_gradients=two_gradients,
            # Kept where an all-reduce, later versions, a graph or a second stream use the same
            # memory again.
            released=not (
                s in groups.stages
                or plan.weight_rule.may_overlap
                or two_gradients
                or captured
                or any(one.stream is not None for one in program.row)
            ),
        )
    require_joint_steps(plan, (one.optimizer for one in made.values()))
    return made


def joint_of(
    rank: Rank,
    model: StagedModel,
    weights: dict[int, Weights],
    families: Families,
    groups: RankGroups,
    timeout: timedelta,
    *,
    clip_norm: float,
    accumulate: int,
    loss_scale: LossScale | None,
) -> Joint:
    """The sums over ranks for updates; all ranks call it."""
    shared = SharedGradients(rank, model, weights, groups.tied)
    return Joint(
        make_loss_group(rank, timeout),
        frozenset[int]().union(*families),
        shared.sum,
        shared.squares,
        clip_norm,
        shared.overlapping() if rank.plan.is_periodic else None,
        accumulate,
        loss_scale=loss_scale,
    )


def _is_divided(stage: Stage) -> bool:
    """Whether a device need not hold the whole weights of a stage."""
    return stage.tensor > 1 or stage.shards == "weights"


def _updates_of_step(plan: PipelinePlan, program: RankProgram, s: int) -> int:
    """How often a step updates the weights of a stage."""
    if plan.is_periodic:
        return updates_of_iteration(plan)
    own = (one.action for one in program.row if one.action.kind is ActionKind.UPDATE)
    return sum(action.stage == s for action in own)
