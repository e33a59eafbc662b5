"""A search in one window: every active schedule, one block after the other.

After Giffler and Thompson (1960). Of the states with the same blocks scheduled it keeps those that
no other dominates (Gromicho et al., 2012), and drops those whose bound exceeds the target.
"""

import numpy as np

from stagewright.formulations.pipelines.windows import Window
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.solvers.pipelines.window_kernels import Parents, Places, advance

UNMERGED = 2**62  # a width that no search reaches
ROUNDING = 1e-12  # relative; sums of the same numbers in another order may exceed the target


class WindowRun:
    """The states of a search, and the way to each.

    Attributes
    ----------
    done
        Number of blocks that are scheduled in every state.
    where, clock
        The states; see :mod:`window_kernels`.
    ends
        The earliest end of every block in any state, shape (n, M).
    is_exact
        Whether no state was left out.
    """

    def __init__(self, form: Window, target: float, width: int = UNMERGED) -> None:
        self.form, self.target, self.width, self.done = form, target, width, 0
        most = 1 + min(form.heads.shape[1], int(form.limits.max()))  # microbatches, and a 0
        self.where = np.zeros((1, most), np.int16)
        self.clock = np.zeros((1, 1 + len(form.members) + most))
        self.ends = np.full(form.heads.shape, np.inf)
        self.is_exact = True
        self._steps: list[tuple[Ints, Parents, Places]] = []

    @property
    def is_finished(self) -> bool:
        """Whether no state is left, or all blocks are scheduled."""
        return self.is_empty or self.done == self.form.heads.size

    @property
    def is_empty(self) -> bool:
        """Whether no state is left."""
        return not len(self.clock)

    def bound(self) -> float:
        """The least bound of all states, infinite without any."""
        return float(self.clock[:, 0].min(initial=np.inf))

    def advance(self, most: int) -> int:
        """Go on until ``most`` states are found; returns their number."""
        self.done, self.where, self.clock, sizes, parents, blocks = advance(
            self.form,
            self.target * (1 + ROUNDING),
            self.width,
            self.done,
            self.where,
            self.clock,
            self.ends,
            most,
        )
        self._steps.append((sizes, parents, blocks))
        return len(parents)

    def leave_out(self, beam: int) -> None:
        """After one step, keep the ``beam`` states with the least bounds and busy machines."""
        if len(self.clock) <= beam:
            return
        machines = self.clock[:, 1 : 1 + len(self.form.members)]
        score = self.clock[:, 0] + machines.mean(axis=1)
        kept = np.sort(np.argpartition(score, beam)[:beam])
        self.where, self.clock = self.where[kept], self.clock[kept]
        _, parents, blocks = self._steps[-1]
        self._steps[-1] = np.array([beam]), parents[kept], blocks[kept]
        self.is_exact = False

    def order(self) -> Ints:
        """The blocks in the sequence that leads to the best state."""
        sizes, parents, blocks = (np.concatenate(part) for part in zip(*self._steps, strict=True))
        state, order = int(self.clock[:, 0].argmin()), np.empty(self.done, np.int64)
        for step, end in zip(reversed(range(self.done)), np.cumsum(sizes)[::-1], strict=True):
            place = end - sizes[step] + state
            order[step], state = blocks[place], int(parents[place])
        return order

    def ranks(self) -> Floats:
        """The position of every block in that sequence, shape (n, M)."""
        ranks = np.empty(self.form.heads.shape)
        done = [0] * len(ranks)
        for rank, j in enumerate(self.order().tolist()):
            ranks[j, done[j]] = rank
            done[j] += 1
        return ranks
