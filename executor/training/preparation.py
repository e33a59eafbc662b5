"""The interpreter for mini-batches of one shape, from the layers and weights of a rank."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.executor.programs.memory import peak_bytes
from stagewright.executor.programs.program import Families
from stagewright.executor.training.crossing import Crossing, crossing_of
from stagewright.executor.training.data.batches import microbatch_samples
from stagewright.executor.training.interpreter.graph import Joint
from stagewright.executor.training.interpreter.interpreter import Interpreter
from stagewright.executor.training.interpreter.last_stage import OutOfMemory
from stagewright.executor.training.interpreter.streams import DeviceStreams, OneStream, make_streams
from stagewright.executor.training.losses import Loss
from stagewright.executor.training.model_checks import (
    require_capturable_steps,
    require_no_divided_draws,
    require_no_draws,
)
from stagewright.executor.training.ranks.rank import Rank, RankProgram
from stagewright.executor.training.stages.initialise import total_bytes
from stagewright.executor.training.stages.sharded_weights import WeightShards
from stagewright.executor.training.stages.stage import StageComputation
from stagewright.executor.training.stages.staged_model import StagedModel
from stagewright.executor.training.stages.weights import Weights
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.units import format_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Preparation:
    """The parts of a rank that do not depend on the shapes of mini-batches.

    ``weights`` and ``groups`` are by stage; ``families`` are stages whose updates need each other's
    gradients; ``captured`` says whether windows between two losses are captured as graphs, and
    ``compiled`` whether layers are compiled. Mini-batches are of one of ``replicas``, all of them
    if it is 1.
    """

    rank: Rank
    program: RankProgram
    model: StagedModel
    weights: Mapping[int, Weights]
    groups: Mapping[int, dist.ProcessGroup]
    joint: Joint
    families: Families
    loss: Loss
    seed: int
    autocast: torch.dtype | None
    captured: bool
    compiled: bool
    replicas: int

    def interpreter(self, inputs: tuple[Tensor, ...]) -> Interpreter:
        """The interpreter for mini-batches of the shape of ``inputs``."""
        plan, samples = self.rank.plan, microbatch_samples(self.rank.plan, inputs, self.replicas)
        crossing = crossing_of(
            plan, samples, inputs, self.model, self.model.sized, self.rank.device, self.autocast
        )
        traces = crossing.traces
        self.model.require_constant_buffers(traces[samples])
        computations = {s: self._computation(s, crossing) for s in self.weights}
        if self.captured:
            require_no_draws(self.model.layers, traces[samples])
            every = (one.optimizer for one in self.weights.values())
            require_capturable_steps(one for one in every if one is not None)
        self._require_fit(computations)
        self.model.watch(self.weights)
        return Interpreter(
            self.rank,
            self.program,
            computations,
            self.weights,
            self.groups,
            crossing.boundaries(),
            crossing.lanes,
            samples,
            loss=self.loss,
            result=self.model.result,
            scale=1.0 if plan.weight_rule.updates_every_round else 1 / plan.microbatches,
            seed=self.seed,
            joint=self.joint,
            streams=self._streams(),
            captured=self.captured,
            is_own=self.replicas > 1,
        )

    def _streams(self) -> DeviceStreams:
        """One stream, unless the plan has a second one or its windows are captured."""
        is_sub = any(one.stream is not None for one in self.program.row)
        return make_streams(self.rank.device) if is_sub or self.captured else OneStream()

    def _computation(self, s: int, crossing: Crossing) -> StageComputation:
        """Stage ``s`` on this rank's share of a microbatch."""
        stage, lane = self.rank.plan.stages[s], crossing.lane(self.rank, s)
        traces = crossing.traces[len(crossing.lanes[s][lane])]
        # By any layer: a parameter that stages share may get its only gradient in another stage.
        trained = {self.model.primary[name] for one in traces for name in one.trained}
        self.weights[s].leave_out(trained)
        divided = traces[slice(*stage.layers)]
        require_no_divided_draws(f"stage {s}", self.model.modules[s], divided)
        return crossing.computation(
            self.rank,
            s,
            self.weights[s],
            self.autocast,
            recompute=stage.recompute,
            offload=stage.offload,
            compiled=self.compiled,
        )

    def _require_fit(self, computations: Mapping[int, StageComputation]) -> None:
        """Refuse to begin a run that cannot fit into memory."""
        footprints = {s: one.footprint() for s, one in computations.items()}
        for s, weights in self.weights.items():
            if isinstance(weights, WeightShards):
                least = weights.static_bytes
                footprints[s] = replace(footprints[s], static_bytes=least, gradient_bytes=0.0)
                continue
            if weights.releases:
                continue
            more = footprints[s].static_bytes + footprints[s].gradient_bytes
            if needs_two_gradients(self.rank.plan, self.families, s):
                more += weights.gradient_bytes
            footprints[s] = replace(footprints[s], static_bytes=more, gradient_bytes=0.0)
        need, where = peak_bytes(self.rank.plan, self.program.row, footprints)
        room = total_bytes(self.rank.device)
        if need > room:
            one = self.program.row[where]
            raise OutOfMemory(
                f"stage {one.action.stage} does not fit: rank {self.rank.number} "
                f"({self.rank.name}) needs {format_bytes(need)} and more at {one} and has "
                f"{format_bytes(room)}: at least {need - room:.0f} bytes short"
            )


def needs_two_gradients(plan: PipelinePlan, families: Families, s: int) -> bool:
    """Whether a stage's gradients are reduced while the next ones are computed."""
    if not plan.is_periodic or plan.weight_rule.updates_every_round:
        return False
    return plan.stages[s].replicas > 1 or any(s in one for one in families)
