"""Bounds of labels, compiled."""

from numba import njit

from stagewright.formulations.parallelism.profiled_time import least_finish

finish = njit(cache=True)(least_finish)


@njit(cache=True)
def least_total(
    forward: float,
    backward: float,
    after: float,
    send: float,
    later: float,
    stages_later: int,
    drained: float,
    closed: float,
    microbatches: int,
    before: tuple[float, float, float],
    least_after: float,
) -> float:
    """A lower bound on the seconds of every completion of a label.

    ``before``: least seconds of the layers before the head, of forwards and of backwards; and of a
    microbatch in their slowest stage.
    """
    ahead, back, even = before
    own = finish(forward, backward, (0.0, send), later, stages_later, microbatches)
    total = max(microbatches * even, ahead + back + max(own, drained)) + least_after
    return max(total, ahead + closed, ahead + own + after)
