"""The orders of torch.distributed.pipelining's schedules, computation by computation."""

from collections import Counter

import pytest

from stagewright.formulations.parallelism.schedules import PAIRED, order_codes, stages_of_ranks
from stagewright.formulations.schedules.published.chimera import dualpipe_v
from stagewright.formulations.schedules.published.one_f_one_b import (
    breadth_first,
    interleaved,
    interleaved_zero_bubble,
    ragged_interleaved,
)
from stagewright.formulations.schedules.published.zbv import zbv

SIZES = [(p, m) for p in (1, 2, 3, 4, 6) for m in range(1, 4 * p + 1)]


@pytest.fixture(scope="module")
def schedules():
    return pytest.importorskip("torch.distributed.pipelining.schedules")


def torchs(schedule, devices, chunks, microbatches):
    """The rows that a class of torch calculates, without idle slots; a pair counts as two.

    Its constructor needs stages with modules and a process group, of which the rows use only the
    numbers.
    """
    rows = []
    for rank in range(devices):
        slots = made_slots(schedule, devices, chunks, microbatches, rank)
        rows.append([str(one) for slot in slots for one in (slot.sub_actions or [slot])])
    return rows


def made_slots(schedule, devices, chunks, microbatches, rank):
    rounds = max(1, microbatches // devices)
    made = object.__new__(schedule)
    made.__dict__.update(
        pp_group_size=devices, rank=rank, num_stages=devices * chunks,
        _num_stages=devices * chunks, _stages=[None] * chunks, n_local_stages=chunks,
        _n_microbatches=microbatches, number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
    )  # fmt: skip
    return [one for one in made._calculate_single_rank_operations(rank) if one is not None]


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


def with_pairs(schedule, devices, microbatches):
    """The codes of a layout's rows as text; a forward beside the next backward is a pair."""
    stage_of, rows = stages_of_ranks(devices, 2, in_v=True), []
    for rank, codes in enumerate(order_codes(schedule, devices, 2, microbatches)):
        done, row = Counter(), []
        for kind, chunk in (divmod(int(code), 2) for code in codes if code >= 0):
            part = "FIWBF"[kind]
            done[part, chunk] += 1
            done["W", chunk] += part == "B"
            done["I", chunk] += part == "B"
            turn = done["I" if part == "B" else part, chunk] - 1
            row.append(f"{stage_of[rank, chunk]}{part}{turn}{'+' * (kind == PAIRED)}")
        rows.append(row)
    return rows


def torchs_pairs(schedule, devices, microbatches):
    """The rows of torch, the first of a pair marked."""
    rows = []
    for rank in range(devices):
        slots = made_slots(schedule, devices, 2, microbatches, rank)
        parts = [(str(one), one) for slot in slots for one in (slot.sub_actions or [slot])]
        pairs = {id(slot.sub_actions[0]) for slot in slots if slot.sub_actions}
        rows.append([text + "+" * (id(one) in pairs) for text, one in parts])
    return rows


def test_v_shapes(schedules):
    for p, m in SIZES:
        if p > 1:
            zero = torchs(schedules.ScheduleZBVZeroBubble, p, 2, m)
            assert with_pairs("zbv", p, m) == zero
            if m >= 2 * p:
                found = torchs_pairs(schedules.ScheduleDualPipeV, p, m)
                assert with_pairs("dualpipev", p, m) == found
        assert text(zbv(p, m)) == torchs(schedules.ScheduleZBVZeroBubble, p, 2, m)
        if m >= 2 * p:
            assert text(dualpipe_v(p, m)) == torchs(schedules.ScheduleDualPipeV, p, 2, m)
