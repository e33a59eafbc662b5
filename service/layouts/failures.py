"""What failures leave of the best layout: the answer."""

from stagewright.service.answers import Answer, Finite


class SmallerAnswer(Answer):
    """The fastest layout with so many ``servers`` too few, and the seconds of its iteration."""

    servers: int
    layout: str
    seconds: float


class GoodputAnswer(Answer):
    """What failures leave of the best layout.

    No layout of ``plan_class`` takes less than ``bound_effective_seconds`` for an iteration with
    failures. ``goodput``, ``stopped`` (for checkpoints), ``lost`` (work done again), ``restarting``
    and ``away`` (servers: waiting, or training slower) are shares of time that add up to 1.
    Checkpoints come every ``iterations``, ``interval_seconds``; ``other_goodput`` is with the other
    kind of checkpoints. Without ``smaller`` layouts the run waits for servers. With 95 % confidence
    the mean of simulated runs is between ``simulated_low`` and ``simulated_high``.
    """

    goodput: float
    effective_seconds: Finite
    bound_effective_seconds: Finite
    gap: Finite
    proved_by: str
    plan_class: str
    stopped: float
    lost: float
    restarting: float
    away: float
    mean_seconds: float
    checkpoint_bytes: float
    stop_seconds: float
    write_seconds: float
    restart_seconds: float
    iterations: int
    interval_seconds: float
    young_seconds: float
    daly_seconds: float
    exact_seconds: float
    other_goodput: float | None
    smaller: tuple[SmallerAnswer, ...]
    simulated_low: float | None
    simulated_high: float | None
