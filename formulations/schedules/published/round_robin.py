"""1F1B-RR: 1F1B with replicated stages that take turns (Narayanan's thesis, 2.4.2)."""

import math
from functools import lru_cache

from stagewright.formulations.schedules.order import Order, Row
from stagewright.formulations.schedules.published.one_f_one_b import row_of
from stagewright.graphs.documents.errors import InputError


@lru_cache(maxsize=8)
def round_robin(replicas: tuple[int, ...], microbatches: int) -> Order:
    """1F1B-RR with ``replicas[s]`` copies of stage s: copy m mod r processes microbatch m.

    The devices are numbered stage after stage. Every copy admits as many microbatches as its stage
    and all later ones have devices per copy, rounded up: the thesis's NOAM, for every stage.

    Raises
    ------
    InputError
        If a copy would have no microbatch.
    """
    if microbatches < max(replicas):
        raise InputError(
            f"1F1B-RR needs at least {max(replicas)} microbatches, one for each replica of a "
            f"stage, got {microbatches}"
        )
    rows: list[Row] = []
    left = sum(replicas)
    for s, count in enumerate(replicas):
        depth = math.ceil(left / count)
        rows += [row_of(s, depth, range(copy, microbatches, count)) for copy in range(count)]
        left -= count
    period = math.lcm(*replicas)
    return Order(tuple(rows), tuple(m % period for m in range(microbatches)))
