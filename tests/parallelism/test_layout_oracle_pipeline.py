"""The pipeline's walk against events in the published order of 1F1B and interleaved 1F1B."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_oracle import by_events, kept_by_order, order_of
from profiles import examples

from stagewright.formulations.parallelism.pipeline_time import first_forwards, kept_forwards, walk
from stagewright.formulations.schedules.order import B, F, I, W


@st.composite
def pipelines(draw):
    """Ranks, chunks, microbatches; times and bytes of the stages; the hop."""
    ranks, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    microbatches = draw(st.integers(1, 12))
    if ranks == 1:
        chunks = 1
    if chunks > 1:
        microbatches = ranks * draw(st.integers(1, 4))
    each = st.lists(st.integers(0, 9).map(float), min_size=ranks * chunks, max_size=ranks * chunks)
    forward, inputs, weight, saved = (np.array(draw(each)) for _ in range(4))
    split = ranks > 1 and draw(st.booleans())
    times = forward, inputs + weight, weight, saved
    return (ranks, chunks, microbatches), split, times, float(draw(st.integers(0, 5)))


@examples(600)
@given(pipelines())
def test_finish_and_kept_bytes_are_those_of_the_order(example) -> None:
    sizes, split, (*times, saved), hop = example
    if sizes[0] == 1:
        hop = 0.0
    finish, kept = walk(*sizes, split, *times, hop, saved)
    assert finish.tolist() == pytest.approx(by_events(sizes, *times, hop, split))
    assert kept.tolist() == pytest.approx(kept_by_order(sizes, saved, split))


@examples(300)
@given(pipelines())
def test_forwards_before_the_first_backward_and_before_the_first_is_freed(example) -> None:
    (ranks, chunks, microbatches), split, _, _ = example
    for rank, row in enumerate(order_of((ranks, chunks, microbatches), split).rows):
        sizes = (ranks, chunks, microbatches, split, np.full(chunks, rank), np.arange(chunks))
        for first, ends in ((first_forwards, (B, I)), (kept_forwards, (B, W))):
            counted = [0] * chunks
            for action in row:
                if action.kind in ends:
                    break
                counted[action.stage // ranks] += action.kind == F
            assert first(*sizes).tolist() == counted
