"""The parts of a rank that are made of a user's model: its stages and their weights."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stagewright.executor.capture.exported.exporting import Example
from stagewright.executor.programs.program import Families, stages_on, updates_of_iteration
from stagewright.executor.training.batches import (
    Batch,
    microbatch_samples,
    require_as_many,
    typed_inputs,
)
from stagewright.executor.training.model_checks import (
    require_joint_steps,
    require_same_model,
    require_sharing,
    require_whole_gradients,
)
from stagewright.executor.training.preparation import needs_two_gradients
from stagewright.executor.training.ranks.groups import Groups
from stagewright.executor.training.ranks.rank import Rank, RankProgram
from stagewright.executor.training.stages.initialise import Model, initialise
from stagewright.executor.training.stages.learning_rates import MakeSchedule
from stagewright.executor.training.stages.parameter_groups import ParameterGroups
from stagewright.executor.training.stages.staged_model import StagedModel
from stagewright.executor.training.stages.stored_weights import StoredWeights
from stagewright.executor.training.stages.weights import MakeOptimizer, Weights
from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.plans.plan import PipelinePlan


@dataclass(frozen=True, slots=True)
class Called:
    """How the model is called: for its own loss or not, in which types."""

    takes_loss: bool
    dtype: torch.dtype
    autocast: torch.dtype | None

    def example(self, rank: Rank, inputs: Batch) -> Example:
        """A microbatch to capture the model with."""
        given, signature = typed_inputs(inputs, self.dtype)
        require_as_many(given, ())
        samples = microbatch_samples(rank.plan, given)
        tensors = tuple(one[:samples] for one in given)
        return Example(tensors, signature, self.takes_loss, rank.device, self.dtype, self.autocast)


def staged_model(
    rank: Rank,
    module: Model | Callable[[], Model],
    example: Example | None,
    weights: StoredWeights | None,
    *,
    seed: int,
    dtype: torch.dtype,
    clips: bool,
) -> StagedModel:
    """The captured model, with the rank's layers alone on its device.

    Raises
    ------
    InputError
        If it is not the model that was planned, or the plan cannot train it.
    """
    plan, stages = rank.plan, stages_on(rank.plan, rank.name)
    own = [plan.stages[s] for s in stages]
    model = initialise(
        module,
        {i for stage in own for i in range(*stage.layers)},
        seed=seed,
        device="cpu" if any(stage.tensor > 1 for stage in own) else rank.device,
        dtype=dtype,
        example=example,
        weights=weights,
    )
    require_same_model(plan, model)
    staged = StagedModel(plan, model, stages)
    require_sharing(plan, staged.tied, staged.stages_of, clips=clips)
    require_whole_gradients(plan, model, staged.stages_of)
    return staged


def families_of(plan: PipelinePlan, model: StagedModel, *, clips: bool) -> set[frozenset[int]]:
    """Stages that share a trained parameter; all stages, if gradients are clipped."""
    found = {frozenset(model.stages_of[name]) for name in model.tied}
    everything = frozenset(range(len(plan.stages)))
    return found | {everything} if clips else found


@dataclass(frozen=True, slots=True, eq=False)
class Making:
    """What the weights of a rank's stages depend on; ``graph``: windows are captured."""

    rank: Rank
    program: RankProgram
    model: StagedModel
    families: Families
    groups: Groups
    graph: bool

    def weights(
        self, optimizer: MakeOptimizer, groups: ParameterGroups, schedule: MakeSchedule | None
    ) -> dict[int, Weights]:
        """The weights of every stage, with their optimizers."""
        plan = self.rank.plan
        made = {
            s: Weights(
                [layer.module for layer in layers],
                self.model.primary,
                self.model.tied,
                optimizer,
                versions=plan.weight_rule.versions,
                groups=groups,
                schedule=schedule,
                updates=self._updates(s),
                two_gradients=needs_two_gradients(plan, self.families, s),
                released=self._releases_gradients(s),
            )
            for s, layers in self.model.modules.items()
        }
        require_joint_steps(plan, (one.optimizer for one in made.values()))
        return made

    def _updates(self, s: int) -> int:
        """How often a step updates the weights of a stage."""
        if self.rank.plan.is_periodic:
            return updates_of_iteration(self.rank.plan)
        own = (one.action for one in self.program.row if one.action.kind is ActionKind.UPDATE)
        return sum(action.stage == s for action in own)

    def _releases_gradients(self, s: int) -> bool:
        """Whether the gradients of a stage are those of autograd, and end with each update.

        They are kept where an all-reduce, later versions, a graph or a second stream use the same
        memory again.
        """
        plan = self.rank.plan
        return not (
            s in self.groups.stages
            or plan.weight_rule.may_overlap
            or needs_two_gradients(plan, self.families, s)
            or self.graph
            or any(one.stream is not None for one in self.program.row)
        )
