"""Time of one-forward-one-backward pipelines whose transfers keep both sides busy.

The order is that of DeepSpeed's ``TrainSchedule``: in turn t, a stage whose number has the parity
of t is in a forward turn, the others are in a backward turn. A turn begins with the exchange
between a stage in a backward turn and the next stage, which is in a forward turn: a gradient back,
an activation ahead, each if there is one. Then both compute.
"""

import numpy as np

from stagewright.graphs.documents.arrays import Floats


def pipeline_seconds(
    forward: Floats, backward: Floats, transfer: Floats, microbatches: int
) -> Floats:
    """When every stage has done and sent its last backward, shape (p,).

    Parameters
    ----------
    forward, backward
        Seconds of a microbatch on each stage, shape (p,).
    transfer
        Seconds to send it from a stage to the next, and its gradient back, shape (p - 1,).
    """
    p, m = len(forward), microbatches
    clock = [0.0] * p
    ahead, back, sent = forward.tolist(), backward.tolist(), transfer.tolist()
    for turn in range(2 * (m + p - 1)):
        for s in range((turn + 1) % 2, p - 1, 2):  # s in a backward turn, s + 1 in a forward turn
            gradient = (turn - (2 * p - 1 - s)) // 2
            activation = (turn - s - 1) // 2
            exchanged = (0 <= gradient < m) + (0 <= activation < m)
            if exchanged:
                clock[s] = clock[s + 1] = max(clock[s], clock[s + 1]) + exchanged * sent[s]
        for s in range(p):
            if turn % 2 == s % 2:
                clock[s] += ahead[s] if 0 <= turn - s < 2 * m else 0.0
            else:
                clock[s] += back[s] if 0 <= turn - (2 * p - 1 - s) < 2 * m else 0.0
    return np.array(clock)


def least_finish(
    forward: float,
    backward: float,
    sends: tuple[float, float],
    later: float,
    stages_later: int,
    microbatches: int,
) -> float:
    """A lower bound on the time from a stage's first action to its last, in this order.

    A stage runs ``w = stages_later`` forwards ahead. Between the first forward and its backward
    lies the way through the ``later`` stages, in which the stage has w forwards to do at most; and
    between the last forward and its backward again, with w backwards. With no more than w + 1
    microbatches both are the same time, and only one of them counts.

    Parameters
    ----------
    sends
        Seconds of a transfer from the stage before, and to the stage after.
    later
        Seconds from the end of a forward to the start of its backward if nothing else is to do:
        both transfers, and forward and backward of all later stages.
    """
    before, after = sends
    m, w = microbatches, min(stages_later, microbatches - 1)
    busy = m * (forward + backward + 2 * before + 2 * after)
    own = w * before + (w + 2) * after
    idle = (max(0.0, later - own - w * forward), max(0.0, later - own - w * backward))
    return busy + (sum(idle) if m > stages_later + 1 else max(idle))
