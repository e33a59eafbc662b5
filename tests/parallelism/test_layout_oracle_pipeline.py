"""The pipeline's walk against events in the published orders."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_oracle import by_events, kept_by_order, order_of
from profiles import examples

from stagewright.formulations.parallelism.pipeline_time import walk
from stagewright.formulations.parallelism.schedules import (
    FORMS,
    PAIRED,
    first_forwards,
    kept_forwards,
    order_codes,
    pairs_of_ranks,
    stages_of_ranks,
)
from stagewright.formulations.schedules.order import B, F, I, W
from stagewright.formulations.schedules.published.chimera import dualpipe


@st.composite
def pipelines(draw):
    """A schedule, ranks, chunks, microbatches; times and bytes of the stages; the hop."""
    schedule = draw(st.sampled_from([one for one in FORMS if one != "dualpipe"]))
    form = FORMS[schedule]
    ranks, chunks = draw(st.integers(1 + (schedule != "1f1b"), 5)), form.chunks
    microbatches = draw(st.integers(1, 12)) + 2 * ranks * form.pairs
    if chunks is None:
        chunks = 1 if ranks == 1 else draw(st.integers(1, 4))
        if chunks > 1:
            microbatches = ranks * draw(st.integers(1, 4))
    each = st.lists(st.integers(0, 9).map(float), min_size=ranks * chunks, max_size=ranks * chunks)
    forward, inputs, weight, saved = (np.array(draw(each)) for _ in range(4))
    paired = np.array(draw(each)).reshape(ranks, chunks)
    times = forward, inputs + weight, weight, paired
    return (schedule, ranks, chunks, microbatches), times, saved, float(draw(st.integers(0, 5)))


@examples(400)
@given(pipelines())
def test_finish_and_kept_bytes_are_those_of_the_order(example) -> None:
    sizes, times, saved, hop = example
    schedule, ranks, chunks, microbatches = sizes
    stage_of = stages_of_ranks(ranks, chunks, FORMS[schedule].in_v)
    rank_of = np.argsort(stage_of, axis=None) // chunks
    hops = hop * np.diff(rank_of, prepend=rank_of[0]).astype(bool)
    finish, kept = walk(order_codes(*sizes), stage_of, microbatches, *times, hops, saved)
    order = order_of(*sizes)
    assert finish.tolist() == pytest.approx(by_events(order, rank_of, *times, hop, FORMS[schedule]))
    assert kept.tolist() == pytest.approx(kept_by_order(order, saved))


@examples(200)
@given(pipelines())
def test_forwards_before_the_first_backward_and_before_the_first_is_freed(example) -> None:
    (schedule, ranks, chunks, microbatches), _, _, _ = example
    stage_of = stages_of_ranks(ranks, chunks, FORMS[schedule].in_v)
    for rank, row in enumerate(order_of(schedule, ranks, chunks, microbatches).rows):
        sizes = (schedule, ranks, chunks, microbatches, np.full(chunks, rank), np.arange(chunks))
        for first, ends in ((first_forwards, (B, I)), (kept_forwards, (B, W))):
            counted = dict.fromkeys(stage_of[rank].tolist(), 0)
            for action in row:
                if action.kind in ends:
                    break
                counted[action.stage] += action.kind == F
            assert first(*sizes).tolist() == list(counted.values())


@examples(60)
@given(st.integers(2, 4), st.integers(0, 6), st.lists(st.integers(0, 9), min_size=32, max_size=32))
def test_dualpipe_is_dualpipev_on_half_the_ranks_with_a_hop_at_the_turn(half, more, times) -> None:
    """Microbatches of both directions do the same, so that those of one are enough."""
    stages, microbatches = 2 * half, 2 * half + more
    forward, inputs, weight, saved = np.array(times, dtype=float).reshape(4, 8)[:, :stages]
    alone = forward + inputs + weight
    stage_of = stages_of_ranks(half, 2, in_v=True)
    paired = forward[stage_of] + (alone - forward)[stage_of][:, ::-1]
    hops = np.full(stages, 3.0)
    hops[0] = 0.0
    codes = order_codes("dualpipe", half, 2, microbatches)
    assert (
        (codes[:, :, None] == 2 * PAIRED + np.arange(2)).sum(axis=1)
        == (pairs_of_ranks(half, microbatches))
    ).all()
    finish, kept = walk(
        codes, stage_of, microbatches, forward, inputs + weight, weight, paired, hops, saved
    )
    order = dualpipe(stages, 2 * microbatches)
    every = by_events(
        order, np.arange(stages), forward, inputs + weight, weight, paired, 3.0, FORMS["dualpipe"]
    )
    assert every.tolist() == pytest.approx([*finish, *finish[::-1]])
    assert kept_by_order(order, saved).tolist() == pytest.approx([*kept, *kept[::-1]])
