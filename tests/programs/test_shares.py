from collections import Counter
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from training_plans import even_samples, one_f_one_b, random_stages, straight

from stagewright.executor.programs.program import pieces, rows
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.graphs.documents.errors import InputError

SCHEDULE = one_f_one_b(straight([1]), 1).schedule  # shares do not depend on it


def plan_of(*stages: Stage) -> PipelinePlan:
    return PipelinePlan("", "", "", "", 4, stages, SCHEDULE)


def widths(*counts: int) -> PipelinePlan:
    """Stages on so many devices each, all different."""
    return plan_of(
        *(
            Stage((s, s + 1), tuple(f"d{s}.{v}" for v in range(count)))
            for s, count in enumerate(counts)
        )
    )


def links(plan: PipelinePlan, samples: int) -> list[Counter[tuple[int, int]]]:
    """Per boundary, how many samples go from a lane of the one stage to one of the other."""
    shares = rows(plan, samples)
    return [
        Counter(
            (a, b)
            for a, lane in enumerate(here)
            for b, other in enumerate(there)
            for _ in set(lane) & set(other)
        )
        for here, there in pairwise(shares)
    ]


@examples(100)
@given(random_stages(4, (2, 3, 4, 5)), st.integers(0, 30))
def test_every_stage_works_on_every_sample_once(stages: list[Stage], more: int) -> None:
    samples = max(len(stage.runners(0)) for stage in stages) + more
    for stage, lanes in zip(stages, rows(plan_of(*stages), samples), strict=True):
        assert len(lanes) == len(stage.runners(0))
        assert sorted(i for lane in lanes for i in lane) == list(range(samples))
        assert max(map(len, lanes)) - min(map(len, lanes)) <= 1


def test_figure_3_of_spp() -> None:
    plan = widths(2, 3)
    assert rows(plan, 6) == (((0, 1, 2), (3, 4, 5)), ((0, 3), (1, 4), (2, 5)))
    assert links(plan, 6) == [Counter({(a, b): 1 for a in range(2) for b in range(3)})]


@examples(50)
@given(random_stages(4, (2, 3, 4, 5)), st.integers(1, 3))
def test_every_link_of_a_boundary_carries_the_same(stages: list[Stage], times: int) -> None:
    """What the cost model counts with: 1 / (senders * receivers) of the microbatch."""
    plan, samples = plan_of(*stages), times * even_samples(stages)
    for s, carried in enumerate(links(plan, samples)):
        here, there = stages[s].runners(0), stages[s + 1].runners(0)
        if here != there:
            share = Fraction(samples, len(here) * len(there))
            assert set(carried.values()) == {share}
            assert len(carried) == len(here) * len(there)


def test_equal_groups_hand_over_what_they_have() -> None:
    split = [Stage((s, s + 1), ("a", "b")) for s in range(3)]
    first, *others = rows(plan_of(*split), 5)
    assert others == [first, first]
    turned = Stage((1, 2), ("b", "a"))
    assert rows(plan_of(split[0], turned), 4) == (((0, 1), (2, 3)), ((0, 2), (1, 3)))


def test_devices_that_take_turns_work_on_whole_microbatches() -> None:
    turns = Stage((1, 2), ("b", "c", "d"), "round-robin")
    plan = plan_of(Stage((0, 1), ("a",)), turns, Stage((2, 3), ("e", "f")))
    assert rows(plan, 4) == (((0, 1, 2, 3),), ((0, 1, 2, 3),), ((0, 1), (2, 3)))


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 6))
def test_pieces_tile_what_each_sender_has(lengths: list[int], receivers: int) -> None:
    table = pieces(lengths, receivers)
    for length, ranges in zip(lengths, table, strict=True):
        assert len(ranges) == receivers
        assert [0, *(stop for _, stop in ranges)] == [*(start for start, _ in ranges), length]
        sizes = [stop - start for start, stop in ranges]
        assert min(sizes) >= 0
        assert max(sizes) - min(sizes) <= 1
    given_to = [sum(ranges[b][1] - ranges[b][0] for ranges in table) for b in range(receivers)]
    assert max(given_to) - min(given_to) <= 1


def test_fewer_samples_than_devices_are_refused() -> None:
    assert rows(widths(1, 3), 3)[1] == ((0,), (1,), (2,))
    with pytest.raises(InputError, match=r"stage 1: a microbatch of 2 samples .* 3 devices; take"):
        rows(widths(1, 3), 2)
