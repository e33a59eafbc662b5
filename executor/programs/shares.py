"""Which samples of a microbatch each device of a stage works on.

A replicated stage (split) passes values on as in SPP, figure 3: each of k senders cuts its samples
into as many pieces as there are receivers, and every receiver takes a piece from each sender. So
every link carries the same share, as in the cost model, and the order of the samples changes from
stage to stage.
"""

from collections.abc import Sequence
from itertools import accumulate

from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.plans.tensor import share_count, stays
from stagewright.graphs.documents.errors import InputError

Rows = tuple[int, ...]


def rows(plan: PipelinePlan, samples: int) -> tuple[tuple[Rows, ...], ...]:
    """Per stage and group of ``stage.runners(m)``: the samples of a microbatch, in its order.

    Groups are single devices at tensor degree 1.

    Raises
    ------
    InputError
        If a stage splits a microbatch among more groups than it has samples.
    """
    found: list[tuple[Rows, ...]] = []
    for s, stage in enumerate(plan.stages):
        if not found:
            whole = [tuple(range(samples))]
            lanes = _dealt(whole, share_count(stage))
        elif stays(plan.stages[s - 1], stage, 0):
            lanes = found[-1]
        else:
            lanes = _dealt(found[-1], share_count(stage))
        if not all(lanes):
            raise InputError(
                f"stage {s}: a microbatch of {samples} samples cannot be split among "
                f"{len(lanes)} devices; take larger mini-batches or fewer microbatches"
            )
        found.append(lanes)
    return tuple(found)


def pieces(lengths: Sequence[int], receivers: int) -> list[list[tuple[int, int]]]:
    """Per sender and receiver, the range [start, stop) of the sender's samples that pass.

    ``lengths`` are the senders' numbers of samples. Remainders go to the receivers in
    turn, so that their shares differ by one sample at most.

    Examples
    --------
    >>> pieces([3, 3], 2)
    [[(0, 2), (2, 3)], [(0, 1), (1, 3)]]
    """
    table, turn = [], 0
    for length in lengths:
        each, more = divmod(length, receivers)
        sizes = [each + ((b - turn) % receivers < more) for b in range(receivers)]
        stops = list(accumulate(sizes))
        table.append([(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)])
        turn += more
    return table


def _dealt(senders: Sequence[Rows], receivers: int) -> tuple[Rows, ...]:
    cut = pieces([len(lane) for lane in senders], receivers)
    return tuple(
        tuple(
            row
            for lane, ranges in zip(senders, cut, strict=True)
            for row in lane[slice(*ranges[receiver])]
        )
        for receiver in range(receivers)
    )
