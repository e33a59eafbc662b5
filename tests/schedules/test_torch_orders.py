"""The orders of torch.distributed.pipelining's schedules, computation by computation."""

import pytest

from stagewright.formulations.schedules.published.chimera import dualpipe_v
from stagewright.formulations.schedules.published.one_f_one_b import (
    breadth_first,
    interleaved,
    ragged_interleaved,
)
from stagewright.formulations.schedules.published.zbv import zbv
from stagewright.formulations.schedules.published.zero_bubble import interleaved_zero_bubble

SIZES = [(p, m) for p in (1, 2, 3, 4, 6) for m in range(1, 4 * p + 1)]


@pytest.fixture(scope="module")
def schedules():
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def torchs(schedule, devices, chunks, microbatches):
    """The rows that a class of torch calculates, without idle slots; a pair counts as two.

    Its constructor needs stages with modules and a process group, of which the rows use only the
    numbers.
    """
    rounds = max(1, microbatches // devices)
    rows = []
    for rank in range(devices):
        made = object.__new__(schedule)
        made.__dict__.update(
            pp_group_size=devices, rank=rank, num_stages=devices * chunks,
            _num_stages=devices * chunks, _stages=[None] * chunks, n_local_stages=chunks,
            _n_microbatches=microbatches, number_of_rounds=rounds,
            microbatches_per_round=microbatches // rounds,
        )  # fmt: skip
        slots = [one for one in made._calculate_single_rank_operations(rank) if one is not None]
        rows.append([str(one) for slot in slots for one in (slot.sub_actions or [slot])])
    return rows


def text(order):
    return [[str(action) for action in row] for row in order.rows]


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_loops(schedules, chunks):
    for p, m in SIZES:
        bfs = torchs(schedules.ScheduleLoopedBFS, p, chunks, m)
        assert text(breadth_first(p, chunks, m)) == bfs
        if m % max(1, m // p):
            continue  # torch needs groups of one size
        zero = torchs(schedules.ScheduleInterleavedZeroBubble, p, chunks, m)
        assert text(interleaved_zero_bubble(p, chunks, m)) == zero
        if chunks > 1:
            # With one chunk torch warms up with 2 (p - 1 - rank) forwards, 1F1B with half of it.
            known = torchs(schedules.ScheduleInterleaved1F1B, p, chunks, m)
            assert text(ragged_interleaved(p, chunks, m)) == known
            if m % p == 0:
                assert text(interleaved(p, chunks, m)) == known


def test_v_shapes(schedules):
    for p, m in SIZES:
        assert text(zbv(p, m)) == torchs(schedules.ScheduleZBVZeroBubble, p, 2, m)
        if m >= 2 * p:
            assert text(dualpipe_v(p, m)) == torchs(schedules.ScheduleDualPipeV, p, 2, m)
