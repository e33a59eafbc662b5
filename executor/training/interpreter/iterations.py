"""The iterations in flight on a rank: their mini-batches, and this rank's samples of them."""

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from stagewright.executor.programs.program import Samples, moved_action, updates_of_iteration
from stagewright.executor.training.data.batches import Batch, mapped_batch
from stagewright.executor.training.ranks.rank import Rank
from stagewright.executor.training.stages.stage import Tensors
from stagewright.formulations.plans.actions import Action


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
