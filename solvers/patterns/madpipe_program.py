"""MadPipe's exact program: decides whether an allocation with a given period exists."""

import math
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.patterns.allocation_tables import (
    AllocationTables,
    Placed,
    longest_delays,
)
from stagewright.solvers.patterns.madpipe_kernels import (
    FAR,
    FIELDS,
    OWNERS,
    PARENT,
    PARTS,
    SPECIAL,
    begin,
    needs_of,
    pass_layer,
)
from stagewright.solvers.patterns.madpipe_labels import Labels, Pass

_MOST_GROUPS = 16  # for which Need has rows; the last row is for all larger ones
FIRST_LABELS = 32  # per state
MORE_LABELS = 8
LABEL_BYTES = 1e9
STEPS_PER_SECOND = 3e7
UNLIMITED = Limits(math.inf)


class Outcome(Enum):
    """Outcome of a pass: an allocation, a proof that none exists, or neither."""

    FOUND = 0
    NONE = 1
    OPEN = 2


@dataclass
class AllocationProgram:
    """The exact program with ``room`` labels per state; passes reuse its arrays."""

    form: AllocationTables
    room: int
    merging: bool = False
    labels: Labels = field(init=False)

    def __post_init__(self) -> None:
        states = self.form.seconds.shape[-1] * (len(self.form.normal) + 1) * OWNERS
        self.labels = Labels(
            np.empty((states, self.room, FIELDS), dtype=np.int64),
            np.zeros(states, dtype=np.int64),
            np.zeros(2, dtype=np.int64),
        )

    def test(
        self, period: int, steps: float = math.inf, limits: Limits = UNLIMITED
    ) -> tuple[Outcome, list[Placed]]:
        """Search for an allocation with ``period``; stops after a number of comparisons.

        Of ``limits``, only the stop token is checked, after each layer.
        """
        # Without a special group the tables only determine which layers can be placed.
        rows = min(self.form.versions, _MOST_GROUPS) * PARTS if self.form.special >= 0 else 1
        need = needs_of(self.form, period, rows)._replace(delay=longest_delays(self.form))
        most = int(min(steps, float(FAR)))
        label = self._reach(Pass(self.form, need, period, self.labels, self.merging, most), limits)
        if label >= 0 and not self.merging:
            return Outcome.FOUND, self._placed(label)
        open_ended = label >= 0 or self.labels.work[0] > most or limits.stopped()
        dropped = not self.merging and self.labels.work[1] > 0
        return (Outcome.OPEN if open_ended or dropped else Outcome.NONE), []

    def _reach(self, this: Pass, limits: Limits) -> int:
        """A label of 0 layers left with all loads at most the period; -1 if none is reached."""
        begin(self.form, self.labels)
        for layer in range(self.form.seconds.shape[-1] - 1, 0, -1):
            label: int = pass_layer(this, layer)
            if label >= 0 or self.labels.work[0] > this.steps or limits.stopped():
                return label
        return -1

    def _placed(self, label: int) -> list[Placed]:
        """The stages of a label of 0 layers left, from the first stage."""
        left = len(self.form.normal) + 1
        layers, found = self.form.seconds.shape[-1] - 1, []
        state, column = divmod(label, self.room)
        while state // (OWNERS * left) < layers:
            parent, choice = self.labels.rows[state, column, PARENT:].tolist()
            start, (p, owner) = state // (OWNERS * left), divmod(state % (OWNERS * left), OWNERS)
            group = self.form.special if owner == SPECIAL else int(self.form.normal[p])
            state, column = divmod(parent, self.room)
            found.append(Placed(start, state // (OWNERS * left), group, choice))
        return found


def label_rooms(form: AllocationTables) -> list[int]:
    """Labels per state for successive tries; a single one suffices without a special group."""
    if form.special < 0:
        return [1]
    states = form.seconds.shape[-1] * (len(form.normal) + 1) * OWNERS
    most = max(FIRST_LABELS, int(LABEL_BYTES / (FIELDS * 8 * states)))
    rooms = [FIRST_LABELS]
    while rooms[-1] < most:
        rooms.append(min(most, rooms[-1] * MORE_LABELS))
    return rooms
