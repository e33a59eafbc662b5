"""What the passes of MadPipe's exact program read and write."""

from typing import NamedTuple

from stagewright.formulations.patterns.allocation_tables import AllocationTables
from stagewright.graphs.documents.arrays import Floats, Ints


class Labels(NamedTuple):
    """The labels of every state, shape (states, room, 7), and their number, shape (states,).

    State (l, p, o) has l layers and p normal groups left; o tells of the stage placed last, see
    ``pass_layer``. A label's fields are those of ``Label``, the label that it comes from (its state
    times the room, plus its column), and how the stage between them is recomputed. ``work`` counts
    comparisons, and labels that found no room.
    """

    rows: Ints
    filled: Ints
    work: Ints


class Label(NamedTuple):
    """One label: the delay, and what the special group does and keeps so far.

    ``load`` in ticks; in bytes ``resident``, what its stages keep at all times; ``group``, what it
    keeps while the stages of the delay's group are at their peak; ``peak``, at any time.
    """

    delay: int
    load: int
    resident: int
    group: int
    peak: int


class Need(NamedTuple):
    """What layers [0, l) on p normal groups and the special one ask of the special one at least.

    ``load`` and ``resident`` each at its least, ``both`` the least sum of the two as shares of the
    period and the memory; shape (rows, N + 1, L + 1), where a row stands for delays behind [0, l)
    of one part of a period. ``delay`` and ``most`` are at most what [0, l) can add to the delay and
    the special load, ``crossing`` is C(l) at its least between two groups, shape (L + 1,).
    """

    load: Ints
    resident: Ints
    both: Floats
    delay: Ints
    most: Ints
    crossing: Ints


class Pass(NamedTuple):
    """One pass of the program, on whether an allocation of ``form`` keeps the ``period``.

    It gives up after so many ``steps``. With ``merging`` labels that find no room are merged with
    others, else dropped.
    """

    form: AllocationTables
    need: Need
    period: int
    labels: Labels
    merging: bool
    steps: int
