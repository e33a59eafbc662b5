"""The search against every layout of the space, on tiny problems."""

import math
from collections.abc import Hashable, Set
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from layout_oracle import CHUNKS, copies, enumerable, every_layout, fewest_recomputed
from profiles import UNSHRUNK, examples

from stagewright.formulations.parallelism.estimate import Estimate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.solvers.parallelism.search import Found, search, work_alike
from stagewright.solvers.parallelism.space import Space

SPACE = Space(chunks=CHUNKS, sequence_parallel="any")


def require_best(
    problem: TrainingProblem, every: list[Estimate], memory: float, space: Space, keep: int
) -> Found:
    """The times of the best, and what is claimed of them, by the list of all layouts."""
    found = search(problem, space, keep=keep, memory_bytes=memory)
    fitting = fewest_recomputed(every, memory, space.recompute)
    times = sorted(one.seconds for one in fitting)
    assert found.proved
    assert [one.seconds for one in found.best] == pytest.approx(times[:keep], rel=1e-12)
    assert all(one.peak_bytes <= memory for one in found.best)
    assert len({str(one.layout) for one in found.best}) == len(found.best)
    if times:
        assert found.bound == pytest.approx(times[0], rel=1e-9)
        assert found.bound <= times[0]
    else:
        assert found.bound == math.inf
    return found


@examples(60, phases=UNSHRUNK)
@given(enumerable(12, 16), st.integers(1, 12), st.data())
def test_the_best_of_every_memory_are_those_of_all_layouts(problem, keep, data) -> None:
    every = list(every_layout(problem))
    assume(every)
    peaks = np.sort([one.peak_bytes for one in every])
    tight = peaks[data.draw(st.integers(0, min(8, len(peaks) - 1)))]
    limits = (0.99 * peaks[0], peaks[0], tight, peaks[len(peaks) // 3], math.inf)
    before = math.inf
    for memory in sorted(limits):  # more memory is never slower
        found = require_best(problem, every, float(memory), SPACE, keep)
        if found.best:
            assert found.best[0].seconds <= before
            before = found.best[0].seconds


@examples(30, phases=UNSHRUNK)
@given(enumerable(8, 8, (False, True)), st.data())
def test_the_optimizer_in_host_memory_is_chosen_where_memory_is_small(problem, data) -> None:
    every = list(every_layout(problem, (False, True)))
    assume(every)
    peaks = sorted(one.peak_bytes for one in every)
    memory = peaks[data.draw(st.integers(0, min(20, len(peaks) - 1)))]
    for limit in (memory, math.inf):
        require_best(problem, every, limit, replace(SPACE, offload=(False, True)), 3)


CHOICES = (
    "pipeline",
    "tensor",
    "context",
    "expert",
    "data",
    "microbatch",
    "schedule",
    "recompute",
    "zero",
    "placement",
)


def is_chosen(problem: TrainingProblem, layout: Layout, name: str, values: Set[object]) -> bool:
    """Whether a dimension has one of the values, or is one that changes nothing in this layout."""
    if name == "zero" and copies(problem, layout) == 1:
        return True
    if name == "recompute":
        return True  # `require_best` leaves the others out
    if name == "placement" and (layout.pipeline == 1 or layout.data == 1):
        return True
    return getattr(layout, name) in values


@examples(50, phases=UNSHRUNK)
@given(enumerable(12, 12), st.data())
def test_of_a_part_of_the_space_the_best_are_those_with_its_values(problem, data) -> None:
    every = list(every_layout(problem))
    assume(every)
    example = data.draw(st.sampled_from(every)).layout
    chosen = {}
    for name in data.draw(st.sets(st.sampled_from(CHOICES), min_size=1, max_size=3)):
        others = sorted({getattr(one.layout, name) for one in every})
        chosen[name] = {getattr(example, name), data.draw(st.sampled_from(others))}
        if name == "pipeline":
            chosen[name].add(1)
    inside = [
        one
        for one in every
        if all(is_chosen(problem, one.layout, name, values) for name, values in chosen.items())
    ]
    names = {"placement": "placements", "schedule": "schedules"}
    space = replace(SPACE, **{names.get(name, name): tuple(each) for name, each in chosen.items()})
    require_best(problem, inside, math.inf, space, 5)


class SetAfter:
    """A token that is set when it has been looked at some times."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@examples(30, phases=UNSHRUNK)
@given(enumerable(8, 8), st.integers(0, 40))
def test_the_bound_of_a_search_that_was_stopped_holds(problem, looks) -> None:
    layouts = list(every_layout(problem))
    assume(layouts)
    every = sorted(one.seconds for one in fewest_recomputed(layouts, math.inf))
    found = search(problem, SPACE, keep=3, memory_bytes=math.inf, stop=SetAfter(looks))
    assert found.bound <= every[0] * (1 + 1e-12)
    assert found.best  # some layout, however early the stop
    assert found.best[0].seconds >= every[0] * (1 - 1e-12)
    if found.proved:
        assert [one.seconds for one in found.best] == pytest.approx(every[:3], rel=1e-12)


@examples(30, phases=UNSHRUNK)
@given(enumerable(12, 12), st.integers(1, 8))
def test_of_layouts_that_are_alike_the_fastest_is_kept(problem, keep) -> None:
    layouts = list(every_layout(problem))
    assume(layouts)
    groups: dict[Hashable, float] = {}
    for one in fewest_recomputed(layouts, math.inf):
        key = work_alike(one.layout)
        groups[key] = min(groups.get(key, math.inf), one.seconds)
    found = search(problem, SPACE, keep=keep, memory_bytes=math.inf, alike=work_alike)
    assert found.proved
    times = sorted(groups.values())[:keep]
    assert [one.seconds for one in found.best] == pytest.approx(times, rel=1e-8)
    assert found.bound <= times[0]
    kept = {work_alike(one.layout): one for one in found.best}
    assert len(kept) == len(found.best)
    for one in found.folded:
        assert one.layout != kept[work_alike(one.layout)].layout
        assert one.seconds >= kept[work_alike(one.layout)].seconds * (1 - 1e-8)
