"""Gradients of parameters that stages share, and the norm of all gradients."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from stagewright.executor.training.ranks.rank import Rank
from stagewright.executor.training.stages.sharded_weights import DividedWeights
from stagewright.executor.training.stages.staged_model import StagedModel
from stagewright.executor.training.stages.weights import TiedSums, Weights


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
