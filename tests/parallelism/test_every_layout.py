"""What ``train-plan`` claims of tiny problems, against every layout of the class that it names."""

import math
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, zip_longest
from random import Random
from typing import get_args

import pytest
from layout_class import (
    Case,
    Priced,
    every_division,
    every_layout,
    fewest,
    priced,
    random_case,
    random_problem,
)
from own_rates import own_rates
from profiles import slow_after

from stagewright.formulations.parallelism.layout import Layout, parse_layout
from stagewright.formulations.parallelism.training import TrainingProblem, require_layout
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.rates import Feature, Reached
from stagewright.graphs.machines.stack_memory import STACK_MEMORY
from stagewright.graphs.models.architecture import (
    Architecture,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
)
from stagewright.graphs.models.modules import MODULES
from stagewright.graphs.models.traits import remarks_on
from stagewright.service.layouts.further import LESS_MEMORY, smallest_of
from stagewright.service.layouts.problems import training_problem
from stagewright.service.layouts.requests import FrontPoint, LayoutRequest, LayoutRow, RefinedRow
from stagewright.service.layouts.searching import find_layouts
from stagewright.solvers.parallelism.family import LayerFamily
from stagewright.solvers.parallelism.refining import search
from stagewright.solvers.parallelism.space import Space

EXACT, ROUNDED = 1 + 1e-9, 1 + 1e-8
MOST = 400
"""Layouts of a case."""


def same_work(layout: Layout) -> Hashable:
    """What layouts have in common that differ in placement, or in how c x d ranks divide tokens."""
    ranks = layout.context * layout.data
    same = replace(layout, placement="data-inside", context=1, data=ranks, microbatch=1)
    return same, layout.microbatch / layout.context


def without_blocks(layout: Layout) -> Layout:
    return replace(
        layout,
        recompute_blocks=None,
        first_blocks=None,
        last_blocks=None,
        blocks_by_stage=None,
        recomputed_by_stage=None,
    )


def wrong_search(case: Case, memory: float, keep: int) -> Iterator[str]:
    """The search's best layouts and its bound, and the bytes without which nothing fits."""
    least_bytes = case.space.least_bytes(case.problem)
    if min(one.peak_bytes for one in case.every) * EXACT < least_bytes:
        yield f"a layout takes less than {least_bytes} bytes"
    found = search(case.problem, case.space, keep=keep, memory_bytes=memory)
    fitting = case.fitting(memory)
    for one in fitting:
        if one.seconds < found.bound * (1 - 1e-12):
            yield f"bound {found.bound}: {said(one)}"
    if bool(found.best) != bool(fitting) or (fitting and not found.fastest):
        yield f"{found.fastest} of {len(found.best)} are the fastest, of {len(fitting)} that fit"
    for one, best in zip_longest(found.best[: found.fastest], fitting[: found.fastest]):
        if one is None or best is None or one.seconds != pytest.approx(best.seconds, rel=1e-9):
            yield f"best {keep}: {said(best)} is searched as {said(one)}"
    least = fitting[0].seconds if fitting else math.inf
    if not found.proved or found.bound != pytest.approx(least, rel=1e-9):
        yield f"bound {found.bound} is not the least time {least}"


def wrong_answer(case: Case, memory: float, top: int, front: bool) -> Iterator[str]:
    """What the command prints: layouts of other work, the bound and the front."""
    request = LayoutRequest(
        problem=case.limited(memory), space=case.space, top=top, by_stage=False, front=front
    )
    answer = find_layouts(request)
    groups: dict[Hashable, Priced] = {}
    for one in case.fitting(memory):
        groups.setdefault(same_work(one.layout), one)
    fastest = answer.fastest_rows
    for row, one in zip_longest(answer.rows[:fastest], [*groups.values()][:fastest]):
        if row is None or one is None or row.seconds != pytest.approx(one.seconds, rel=1e-8):
            yield f"alike: {said(one)} is answered as {row and (row.seconds, row.layout)}"
    for one in groups.values():
        if answer.bound_seconds is None or one.seconds < answer.bound_seconds * (1 - 1e-12):
            yield f"bound {answer.bound_seconds}: {said(one)}"
    if len({same_work(parse_layout(row.layout)) for row in answer.rows}) < len(answer.rows):
        yield "alike: two rows are of the same work"
    if front:
        yield from wrong_front(case, answer.front)


def wrong_surest(case: Case, memory: float, chance: Random) -> Iterator[str]:
    """The fastest layout with known prices, asked for alone and beside the fastest of all."""
    lacks = set(chance.choice((FEATURES, FEATURES[:1], FEATURES[1:])))
    measured = tuple(one for one in get_args(Feature) if one not in lacks)
    limited = case.limited(memory)
    problem = replace(limited, rates=replace(limited.rates, measured=measured))
    sure = [one for one in case.every if lacks.isdisjoint(features_of(problem, one.layout))]
    best = next(iter(replace(case, every=tuple(sure)).fitting(memory)), None)
    request = LayoutRequest(problem=problem, space=case.space, top=1, by_stage=False)
    answer = find_layouts(request)
    unsure = not lacks.isdisjoint(features_of(problem, parse_layout(answer.rows[0].layout)))
    known = {*remarks_on(problem.architecture, problem.sequence)}
    told = [one for one in answer.remarks if one not in known and not one.startswith("less sure")]
    if len(told) != unsure or (answer.surest is not None and not unsure):
        yield f"{answer.rows[0].layout} is said to be {answer.remarks}"
    yield from wrong_sure_row(best, answer.surest if unsure else answer.rows[0])
    try:
        alone = find_layouts(request.model_copy(update={"prefer": "surest"}))
    except InputError as error:
        if sure or "prices that by-hand knows" not in str(error):
            yield f"{len(sure)} sure layouts, but {error}"
    else:
        yield from wrong_sure_row(best, next(iter(alone.rows), None))
        least = math.inf if best is None else best.seconds
        bound = math.inf if alone.bound_seconds is None else alone.bound_seconds
        if bound != pytest.approx(least, rel=1e-9):
            yield f"surest: bound {alone.bound_seconds} is not the least time {least}"


def wrong_sure_row(best: Priced | None, row: LayoutRow | None) -> Iterator[str]:
    """Another time than the best layout with known prices has."""
    found = None if row is None else pytest.approx(row.seconds, rel=1e-9)
    if found != (None if best is None else best.seconds):
        yield f"surest: {said(best)} is answered as {row and (row.seconds, row.layout)}"


FEATURES = get_args(Feature)[:3]


def features_of(problem: TrainingProblem, layout: Layout) -> set[str]:
    """What of a layout a rate set may not know, by the server of every rank."""
    per_server, found = problem.fabric.per_server, set()
    copies, experts = defaultdict(set), defaultdict(set)
    for rank in range(layout.ranks):
        outer = rank // layout.tensor // layout.context
        inside = layout.placement == "data-inside"
        stage = outer // layout.data if inside else outer % layout.pipeline
        held = min(stage, layout.pipeline - 1 - stage) if layout.schedule == "dualpipe" else stage
        copies[rank % layout.tensor, held].add(rank // per_server)
        experts[rank // layout.expert].add(rank // per_server)
    if layout.zero >= 2 and max(map(len, copies.values())) > 1:
        found.add("ZeRO 2-3 between servers")
    if max(map(len, experts.values())) > 1:
        found.add("experts between servers")
    return found | ({"context parallelism"} if layout.context > 1 else set())


def wrong_front(case: Case, front: Sequence[FrontPoint]) -> Iterator[str]:
    """Layouts that are better than a point in both, or that are better than all in one."""
    for point in front:
        for one in case.fitting(point.peak_bytes):
            if one.seconds * EXACT < point.seconds:
                yield f"front: {said(one)} beats {point.layout} {point.seconds}"
    peaks = sorted({one.peak_bytes for one in case.every})
    bests = {one for memory in peaks[:: 1 + len(peaks) // 30] for one in case.fitting(memory)[:1]}
    for best in bests:
        if not any(
            point.seconds <= best.seconds * ROUNDED
            and point.peak_bytes * LESS_MEMORY < best.peak_bytes * EXACT
            for point in front
        ):
            yield f"front: no point is as good as {said(best)}"


def wrong_smallest(case: Case, memory: float) -> Iterator[str]:
    """A layout that needs little more than memory in which none fits."""
    least, problem = min(one.peak_bytes for one in case.every), case.limited(memory)
    (point,) = smallest_of(
        lambda *asked, **more: search(asked[0], case.space, **more), problem, None
    )
    limit = point.limit_bytes
    if not least <= point.peak_bytes * EXACT <= limit * ROUNDED or least < limit * LESS_MEMORY:
        yield f"{point} is said to be about the smallest; {least} bytes are enough"


def wrong_refined(case: Case, memory: float) -> Iterator[str]:
    """The bounds on pipelines of any blocks and recomputed blocks of every stage."""
    problem = case.limited(memory)
    answer = find_layouts(LayoutRequest(problem=problem, space=case.space, top=2)).refined
    if answer is None:
        return
    fitting = [one for one in case.every if one.peak_bytes <= memory]
    for one in fitting:
        if one.seconds * EXACT < answer.bound_seconds:
            yield f"any pipeline {answer.bound_seconds}: {said(one)}"
    alone = (one for one in case.every if one.layout.chunks == 1 and not one.layout.form.in_v)
    plain = fewest(alone, memory)
    for one in plain:
        if one.seconds * EXACT < answer.plain_bound_seconds:
            yield f"plain pipelines {answer.plain_bound_seconds}: {said(one)}"
    for row in answer.rows:
        yield from wrong_row(case, row, memory, plain)


def wrong_row(case: Case, row: RefinedRow, memory: float, plain: Sequence[Priced]) -> Iterator[str]:
    """A refined layout, and the bound on other blocks by stage of the same pipeline."""
    layout = parse_layout(row.layout)
    one = priced(case.problem, layout)
    if one.peak_bytes > memory or one.seconds != pytest.approx(row.seconds, rel=1e-9):
        yield f"{row.layout} {row.seconds} does not fit or is {said(one)}"
    for one in plain:
        same = without_blocks(one.layout) == without_blocks(layout)
        if same and one.seconds * EXACT < row.bound_seconds:
            yield f"blocks of {row.layout} {row.bound_seconds}: {said(one)}"


def said(one: Priced | None) -> str:
    return "nothing" if one is None else f"{one.seconds} {one.peak_bytes} {one.layout}"


def wrong_alike(seed: int) -> list[str]:
    """What is wrong with the search of a random case, and with its answer."""
    chance = Random(seed)
    case = random_case(chance, every_layout, MOST)
    memory, keep = case.draw_memory(chance), chance.choice((1, 3, 20))
    return [
        *wrong_search(case, chance.choice((memory, math.inf)), keep),
        *wrong_answer(case, memory, keep, front=chance.random() < 0.3),
        *wrong_surest(case, memory, chance),
        *wrong_smallest(
            case, chance.uniform(0.2, 0.99) * min(one.peak_bytes for one in case.every)
        ),
    ]


def wrong_divided(seed: int) -> list[str]:
    """What is wrong with the bounds on any division of a random case."""
    chance = Random(seed)
    case = random_case(chance, every_division, 2 * MOST)
    return [*wrong_refined(case, case.draw_memory(chance))]


@pytest.mark.parametrize("seed", slow_after(6, (15, *range(15), *range(16, 150))))
def test_no_layout_of_the_class_is_below_its_bound_or_beats_the_best(seed: int) -> None:
    assert wrong_alike(seed) == []


@pytest.mark.parametrize("seed", slow_after(4, range(50)))
def test_no_division_is_below_the_bounds_on_any(seed: int) -> None:
    assert wrong_divided(seed) == []


SOME = [one for one in MODULES if one != "mla_up_proj"]  # which Megatron always recomputes
EVERY_SET = ["+".join(one) for n in range(6) for one in combinations(SOME, n)][1:]
LATENT = LatentAttention(4, 16, 16, 8, 16)


def with_offload(problem: TrainingProblem, layout: Layout) -> Iterator[Layout]:
    """The layout with activations of some blocks in host memory, if it may."""
    for blocks in range(1, problem.architecture.layers):
        try:
            one = replace(layout, offload_blocks=blocks)
            require_layout(problem, one)
        except InputError:
            return
        yield one


@pytest.mark.parametrize("seed", slow_after(3, (39, 4, 51, *range(38))))
def test_no_set_of_modules_or_offload_is_below_the_bound_or_beats_the_best(seed: int) -> None:
    """All sets of Megatron's modules, also those that the search leaves out."""
    chance, memory = Random(seed), STACK_MEMORY["megatron"]
    drawn = random_problem(chance)
    attention = chance.choice((drawn.architecture.attention, LATENT))
    model = replace(drawn.architecture, attention=attention, window=None)
    host = replace(drawn.fabric, host_bytes_per_second=chance.choice((1e8, 1e9, 2e10)))
    problem = replace(drawn, memory=memory, architecture=model, fabric=host)
    kinds = chance.choice((("none",), ("none", "full"), ("full",), ()))
    others = chance.choice((("modules",), ("offload",), ("modules", "offload")))
    degrees = {name: (1,) for name in ("context", "expert", "microbatch")}
    space = Space(
        **degrees, chunks=1, schedules=("1f1b",), recompute=(*kinds, *others), zero=(0, 3),
        placements=("data-inside",), tensor=(1, 2),
    )  # fmt: skip
    every = []
    for one in every_layout(problem, replace(space, recompute=("none", "full", *EVERY_SET))):
        if one.recompute in kinds or (one.recompute in EVERY_SET and "modules" in others):
            every.append(priced(problem, one))
        if one.recompute == "none" and "offload" in others:
            every += [priced(problem, away) for away in with_offload(problem, one)]
    peaks = sorted({one.peak_bytes for one in every})
    for limit in (peaks[0], chance.choice(peaks), chance.choice(peaks)) if peaks else ():
        found = search(problem, space, keep=1, memory_bytes=limit)
        times = sorted(one.seconds for one in every if one.peak_bytes <= limit)
        assert found.proved
        assert [one.seconds for one in found.best] == pytest.approx(times[:1])
        assert found.bound == pytest.approx(times[0])


class SetAfter:
    """A token that is set when it has been looked at some times."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize("seed", slow_after(3, range(30)))
def test_the_bound_of_a_search_that_was_stopped_holds(seed: int) -> None:
    chance = Random(seed)
    case = random_case(chance, every_layout, MOST)
    times = [one.seconds for one in case.fitting(math.inf)]
    stop = SetAfter(chance.randint(0, 40))
    found = search(case.problem, case.space, keep=3, memory_bytes=math.inf, stop=stop)
    assert found.bound <= times[0] * (1 + 1e-12)
    assert found.best  # some layout, however early the stop
    assert found.best[0].seconds >= times[0] * (1 - 1e-12)
    if found.proved:
        best = [one.seconds for one in found.best[: found.fastest]]
        assert best == pytest.approx(times[: found.fastest], rel=1e-12)


def test_a_search_out_of_time_answers_with_its_bound() -> None:
    case = random_case(Random(0), every_layout, MOST)
    fastest = case.fitting(math.inf)[0].seconds
    roomy = case.limited(1e15)
    request = LayoutRequest(problem=roomy, space=case.space, time_limit=1e-6, what_if=True)
    answer = find_layouts(request)
    assert answer.status == "feasible"
    assert answer.bound_seconds is not None
    assert answer.bound_seconds <= fastest <= answer.rows[0].seconds
    assert "the time limit of 1e-06 s ended the search" in answer.remarks[-1]
    assert answer.what_if == ()


@pytest.mark.parametrize("seed", slow_after(2, (120, 0, *range(1, 60))))
def test_a_sample_takes_the_least_in_the_largest_microbatch(seed: int) -> None:
    """The bound on a way to divide layers; 120: a ring outlasts the attention that hides it."""
    problem = random_problem(Random(seed))
    sizes = [size for size in range(1, problem.batch + 1) if problem.batch % size == 0]
    for split in Space(sequence_parallel="any").families(problem):
        family = LayerFamily(problem, split)
        for recompute in ("none", "full"):
            each = [family.work(size, recompute).total / size for size in sizes]
            for smaller, larger in pairwise(each):
                assert (larger <= smaller * (1 + 1e-12)).all()


def test_stages_between_the_ends_may_have_fewer_blocks() -> None:
    """Two blocks in the first stage and one in each other, where only few layouts fit."""
    attention, experts = GroupedAttention(4, 4, 64), Experts(4, 2, 1024)
    model = Architecture(
        "moe", 5, 256, 32000, attention, FeedForward(1024), experts=experts, tied=True
    )
    fabric = fabric_of_kind(
        "a100", 8, per_server=2, server_bandwidth=200e9, network_bandwidth=1e9,
        memory_bytes=644_977_528,
    )  # fmt: skip
    problem = training_problem(
        model, fabric, sequence=8192, batch=8, reserve_bytes=0,
        rates=own_rates(Reached(0.7, 1e10, 0.6, 7e-6, 1e-4)),
    )  # fmt: skip
    layout = parse_layout("p2 t2 c2 d1 e2 b1 v2 zero1 blocks1 first2 last1 full sp")
    one = priced(problem, layout)
    assert one.peak_bytes <= fabric.memory_bytes
    assert one.seconds == pytest.approx(0.2655, rel=1e-3)
    found = search(
        problem, Space(chunks=2, schedules=("1f1b",), recompute=("none", "full"), zero=(1,)), keep=1
    )
    assert found.bound <= one.seconds


if __name__ == "__main__":  # python test_every_layout.py FIRST LAST: what is wrong, by seed
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        for wrong in (*wrong_alike(number), *wrong_divided(number)):
            print(number, wrong, flush=True)
