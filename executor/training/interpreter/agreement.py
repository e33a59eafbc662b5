"""Values that ranks agree on before an update: the count of losses, and the gradients' norm."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence

from torch import Tensor

from stagewright.executor.training.interpreter.graph import Joint
from stagewright.executor.training.interpreter.iterations import Iterations
from stagewright.executor.training.interpreter.last_stage import (
    LastStage,
    NonFiniteLoss,
    Total,
    begin_total,
)
from stagewright.executor.training.ranks.rank import Rank, RankProgram
from stagewright.executor.training.stages.weights import Weights
from stagewright.formulations.plans.actions import ActionKind
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
