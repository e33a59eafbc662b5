"""The pipeline's walk against events in the published order of 1F1B and interleaved 1F1B."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_oracle import by_events, kept_by_order
from profiles import examples

from stagewright.formulations.parallelism.pipeline_time import kept_forwards, walk
from stagewright.formulations.schedules.interleaved import interleaved
from stagewright.formulations.schedules.order import F


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
    times = np.array(draw(each)), np.array(draw(each)), np.array(draw(each))
    return (ranks, chunks, microbatches), times, float(draw(st.integers(0, 5)))


@examples(600)
@given(pipelines())
def test_finish_and_kept_bytes_are_those_of_the_order(example) -> None:
    sizes, (forward, backward, saved), hop = example
    if sizes[0] == 1:
        hop = 0.0
    finish, kept = walk(*sizes, forward, backward, hop, saved)
    assert finish.tolist() == pytest.approx(by_events(sizes, forward, backward, hop))
    assert kept.tolist() == pytest.approx(kept_by_order(sizes, saved))


@examples(300)
@given(pipelines())
def test_forwards_kept_after_the_first_of_the_steady_state(example) -> None:
    """``kept_forwards`` counts the forwards of every chunk before the first backward of a rank."""
    (ranks, chunks, microbatches), _, _ = example
    for rank, row in enumerate(interleaved(ranks, chunks, microbatches).rows):
        counted = [0] * chunks
        for action in row:
            if action.kind != F:
                break
            counted[action.stage // ranks] += 1
        found = kept_forwards(ranks, chunks, microbatches, np.full(chunks, rank), np.arange(chunks))
        assert found.tolist() == counted
