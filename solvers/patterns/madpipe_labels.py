"""Data of MadPipe's exact program: labels, lower bounds and passes."""

from typing import NamedTuple

from stagewright.formulations.patterns.joint_patterns import AllocationTables
from stagewright.graphs.documents.arrays import Floats, Ints


class MadPipeLabels(NamedTuple):
    """The labels of every state, shape (states, room, 7), and their number, shape (states,).

    State (l, p, o) has l layers and p normal groups left; o describes the stage placed last, see
    ``pass_layer``. The fields of a label are those of ``MadPipeLabel``, its parent (state times the
    room plus column), and the recomputation of the stage between them. ``work`` counts comparisons
    and labels for which there was no room.
    """

    rows: Ints
    filled: Ints
    work: Ints


class MadPipeLabel(NamedTuple):
    """One label: the delay, and the load and memory of the special group so far.

    ``load`` is in ticks. In bytes, ``resident`` is kept by its stages at all times, ``group`` while
    the stages of the delay's group are at their peak, and ``peak`` is the largest at any time.
    """

    delay: int
    load: int
    resident: int
    group: int
    peak: int


class Need(NamedTuple):
    """Lower bounds on the special group's part of layers [0, l), with p normal groups.

    ``load`` and ``resident`` are the least values of each, ``both`` the least sum of the two as
    fractions of period and memory; shape (rows, N + 1, L + 1), with a row per interval of delays
    after [0, l). ``delay`` and ``most`` are upper bounds on what [0, l) adds to the delay and to
    the special load; ``crossing`` is the least C(l) between two groups, shape (L + 1,).
    """

    load: Ints
    resident: Ints
    both: Floats
    delay: Ints
    most: Ints
    crossing: Ints


class Pass(NamedTuple):
    """One pass of the program, which searches for an allocation of ``form`` with ``period``.

    It stops after ``steps`` steps. With ``merging``, labels without room are merged with others,
    otherwise they are dropped.
    """

    form: AllocationTables
    need: Need
    period: int
    labels: MadPipeLabels
    merging: bool
    steps: int
