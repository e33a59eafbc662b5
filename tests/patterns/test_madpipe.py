"""MadPipe's allocation against enumeration, and its grid against the recurrence as printed.

Times are multiples of 1/1024 s and bytes of a mebibyte, so that every sum of them is exact.
"""

import math
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from benchmarks.madpipe_grid import Grid, madpipe_dp
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.patterns import one_f_one_b
from stagewright.formulations.patterns.joint_patterns import Placed, all_periods, contiguous
from stagewright.formulations.patterns.madpipe import StageAllocationProblem, delayed
from stagewright.formulations.patterns.pattern_problems import pattern_problem, static_bytes
from stagewright.formulations.plans.memory import kept_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.machines.cluster import Device, Link, from_matrix, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.patterns.madpipe import (
    AllocationProgram,
    PassOutcome,
    allocate,
    least_period,
)
from stagewright.solvers.planners.steps.warm_up import compile_kernels

UNIT = 1 / 1024  # seconds
MIB = 2**20
SPEED = 2.0**30  # bytes per second: a mebibyte takes a unit
ROUNDING = 1e-9


@pytest.fixture(autouse=True, scope="module")
def compiled():
    """Or the time limits of the first questions would pass while numba compiles."""
    compile_kernels("madpipe")


quick = examples(40, derandomize=True)


def chain(times, outputs, saved, weights):
    """Layers with (forward, backward) in units, the rest in mebibytes; plain SGD."""
    layers = tuple(
        Layer(
            f"l{i}",
            weights[i] * MIB,
            (LayerCost(840, f * UNIT, saved[i] * MIB, outputs[i] * MIB, b * UNIT),),
        )
        for i, (f, b) in enumerate(times)
    )
    return Chain("test", "measured: by hand", 840, layers, 0.0)


@st.composite
def chains(draw, most=5):
    count = draw(st.integers(2, most))

    def figures(low, high):
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    times = list(zip(figures(1, 3), figures(1, 4), strict=True))
    return chain(times, figures(0, 3), figures(0, 6), figures(0, 2))


def memories(model):
    """From what the largest layer needs alone, to ample."""
    single = PipelineProblem(model, uniform_servers(1, 1, Link(SPEED), memory_bytes=1e15), 1)
    needs = [
        static_bytes(single, stage) + kept_bytes(single, stage).saved_bytes
        for stage in (Stage((i, i + 1), ("s0g0",)) for i in range(len(model)))
    ]
    floor = max(2, math.ceil(max(needs) / MIB))
    return st.integers(floor, 4 * floor).map(lambda mib: mib * MIB)


@st.composite
def equal_devices(draw, layers=5, devices=3):
    model = draw(chains(layers))
    count = draw(st.integers(2, devices))
    cluster = uniform_servers(1, count, Link(SPEED), memory_bytes=draw(memories(model)))
    return PipelineProblem(model, cluster, draw(st.sampled_from((1, 2, 8))))


@st.composite
def unequal_devices(draw, layers=4, devices=3):
    """Links of several speeds, memories, and two kinds of which one is slower."""
    model = draw(chains(layers))
    both = tuple(
        replace(
            layer,
            costs=tuple(
                replace(
                    layer.costs[0],
                    device_kind=kind,
                    forward_seconds=layer.costs[0].forward_seconds * slower,
                )
                for kind, slower in (("a", 1), ("b", draw(st.integers(1, 3))))
            ),
        )
        for layer in model.layers
    )
    count = draw(st.integers(2, devices))
    names = [
        Device(f"g{i}", draw(st.sampled_from("ab")), draw(memories(model))) for i in range(count)
    ]
    speeds = [[SPEED * draw(st.sampled_from((0.5, 1, 2)))] * count for _ in range(count)]
    cluster = from_matrix(names, speeds)
    return PipelineProblem(replace(model, layers=both), cluster, draw(st.sampled_from((1, 2, 8))))


def with_samples(problem, samples):
    """The same figures for a microbatch of so many samples."""
    layers = tuple(
        replace(layer, costs=tuple(replace(cost, microbatch_size=samples) for cost in layer.costs))
        for layer in problem.chain.layers
    )
    return replace(problem, chain=replace(problem.chain, microbatch_size=samples, layers=layers))


def singles(problem):
    return tuple((v,) for v in range(len(problem.cluster)))


def allocations(question):
    """Every allocation: stages, normal groups in order and once each, the special one anywhere."""
    layers, groups = len(question.problem.chain), range(len(question.groups))
    for count in range(1, layers + 1):
        for cuts in combinations(range(1, layers), count - 1):
            spans = list(pairwise((0, *cuts, layers)))
            for owners in product(groups, repeat=count):
                normal = [g for g in owners if g != question.special]
                if all(one < later for one, later in pairwise(normal)):
                    for choices in product(range(len(question.recompute)), repeat=count):
                        yield tuple(
                            Placed(*span, owner, choice)
                            for span, owner, choice in zip(spans, owners, choices, strict=True)
                        )


def enumerated(question, period=one_f_one_b.period_bound):
    """The least period of all allocations, by the figures of the patterns' own problem."""
    return min(
        period(pattern_problem(question.problem, question.stages(placed)))
        for placed in allocations(question)
    )


def agrees(question, expected):
    answer = least_period(question)
    assert answer.exact
    if expected == math.inf:
        assert answer.stages is None
        assert answer.bound == math.inf
        assert "more" in answer.reason
        return
    assert answer.period == answer.bound == pytest.approx(expected, rel=ROUNDING)
    found = one_f_one_b.period_bound(pattern_problem(question.problem, answer.stages))
    assert found == pytest.approx(answer.period, rel=ROUNDING)


# --- the delay -------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 9), st.integers(0, 9))
def test_addition_is_the_printed_one_and_grows_with_the_delay(period, group, rest, seconds):
    rest, seconds = min(rest, period), min(seconds, period)
    V = (group - 1) * period + rest
    sum_group, sum_rest = delayed(group, rest, seconds, period)
    total = (sum_group - 1) * period + sum_rest
    if V > 0:  # in front of the last stage there is no group yet
        assert total == printed_sum(V, seconds, period)
    assert total >= V + seconds
    later = delayed(*((group, rest + 1) if rest < period else (group + 1, 1)), seconds, period)
    assert later >= (sum_group, sum_rest)


def printed_sum(x, y, period):
    """x (+) y (MadPipe 4.2.2)."""
    groups = math.ceil(Fraction(x) / period)
    if groups == math.ceil(Fraction(x + y) / period):
        return x + y
    return period * groups + y


# --- the exact program -----------------------------------------------------------------------


@quick
@given(equal_devices(), st.sampled_from((("none",), ("full",), ("none", "full"))))
def test_contiguous_optimum_is_that_of_1f1b_star(problem, recompute):
    question = StageAllocationProblem(problem, singles(problem), None, recompute)
    agrees(question, enumerated(question, one_f_one_b.least_period))


@quick
@given(st.data(), equal_devices(4))
def test_special_group_equals_enumeration(data, problem):
    recompute = data.draw(st.sampled_from((("none",), ("none", "full"))))
    special = data.draw(st.integers(0, len(problem.cluster) - 1))
    question = StageAllocationProblem(problem, singles(problem), special, recompute)
    agrees(question, enumerated(question))


@pytest.mark.parametrize(
    ("memory", "forward", "backward", "outputs", "saved", "weights"),
    [
        (22, (3, 2, 2, 2), (4, 1, 3, 1), (0, 1, 1, 1), (5, 5, 5, 3), (0, 1, 0, 1)),
        (15, (3, 1, 3, 2, 3), (1, 1, 2, 3, 1), (1, 1, 0, 0, 0), (4, 4, 5, 5, 5), (0, 1, 0, 0, 1)),
        (
            10,
            (2, 1, 2, 2, 2, 3),
            (1, 2, 3, 1, 4, 4),
            (0, 0, 0, 0, 0, 1),
            (6, 3, 6, 0, 3, 1),
            (0, 0, 0, 1, 1, 1),
        ),
    ],
)
def test_stages_of_one_group_are_at_their_peak_together(
    memory, forward, backward, outputs, saved, weights
):
    """If the special device counted one of them alone, it would take what does not fit."""
    model = chain(zip(forward, backward, strict=True), outputs, saved, weights)
    cluster = uniform_servers(1, 2, Link(SPEED), memory_bytes=memory * MIB)
    problem = PipelineProblem(model, cluster, 8)
    question = StageAllocationProblem(problem, singles(problem), 0)
    agrees(question, enumerated(question))


@quick
@given(st.data(), unequal_devices())
def test_unequal_devices_equal_enumeration(data, problem):
    special = data.draw(st.sampled_from((None, *range(len(problem.cluster)))))
    question = StageAllocationProblem(problem, singles(problem), special)
    agrees(question, enumerated(question))


@quick
@given(equal_devices(4, 4).filter(lambda problem: len(problem.cluster) == 4))
def test_groups_of_devices_leave_time_for_their_all_reduce(problem):
    question = StageAllocationProblem(problem, ((0, 1), (2, 3)), None, ("none", "full"))
    expected = enumerated(question, one_f_one_b.least_period)
    answer = least_period(question)
    assert answer.exact
    assert answer.period == pytest.approx(expected, rel=ROUNDING)


def test_a_delay_leaves_time_for_the_all_reduce_of_an_earlier_stage():
    """It counts although no later transfer or stage starts another group."""
    model = chain(((2, 4), (2, 2), (1, 4), (1, 2)), (0, 0, 0, 1), (2, 2, 1, 1), (6, 6, 6, 6))
    cluster = uniform_servers(1, 4, Link(SPEED), memory_bytes=100 * MIB)
    equals_enumeration(
        StageAllocationProblem(PipelineProblem(model, cluster, 1), ((0, 1), (2,), (3,)), 0)
    )


@quick
@given(equal_devices(4, 4).filter(lambda problem: len(problem.cluster) == 4))
def test_a_special_group_of_devices_equals_enumeration(problem):
    equals_enumeration(StageAllocationProblem(problem, ((0, 1), (2,), (3,)), 0, ("none", "full")))


def equals_enumeration(question):
    periods = []
    for placed in allocations(question):
        with suppress(InvalidPlan):  # fits at no period
            periods.append(question.evaluate(placed))
    answer = least_period(question)
    assert answer.exact
    assert answer.period == min(periods, default=math.inf) * question.tick


@quick
@given(st.data(), equal_devices(5), st.integers(1, 2))
def test_little_room_for_labels_overlooks_or_invents_but_does_not_lie(data, problem, room):
    question = StageAllocationProblem(problem, singles(problem), 0)
    best, tick = least_period(question).period, question.tick
    least = all_periods(question.tables) if best == math.inf else round(best / tick)
    period = data.draw(st.sampled_from((least - 1, least, least + round(UNIT / tick))))
    keeps = best < math.inf and period >= least
    found, placed = AllocationProgram(question.tables, room).test(period)
    assert found is not (PassOutcome.NONE if keeps else PassOutcome.FOUND)
    assert not placed or question.evaluate(placed) <= period
    merged, _ = AllocationProgram(question.tables, room, merging=True).test(period)
    assert merged is PassOutcome.OPEN or (merged is PassOutcome.NONE and not keeps)


def test_one_label_per_state_is_not_enough():
    """Kept apart, two find no room and all is open; merged, two already refute what is not."""
    problem = long_chain(30, memory=60)
    question = StageAllocationProblem(problem, singles(problem), 0)
    below = round(least_period(question).period / question.tick) - 1
    assert AllocationProgram(question.tables, 1).test(below)[0] is PassOutcome.OPEN
    assert AllocationProgram(question.tables, 1, merging=True).test(below)[0] is PassOutcome.OPEN
    assert AllocationProgram(question.tables, 2).test(below)[0] is PassOutcome.OPEN
    assert AllocationProgram(question.tables, 2, merging=True).test(below)[0] is PassOutcome.NONE


def long_chain(layers, memory=60):
    times = [(1 + i * 7 % 5, 2 + i * 5 % 7) for i in range(layers)]
    outputs, saved = ([1 + i * a % 4 for i in range(layers)] for a in (3, 7))
    model = chain(times, outputs, saved, [1] * layers)
    return PipelineProblem(model, uniform_servers(1, 4, Link(SPEED), memory_bytes=memory * MIB), 8)


@quick
@given(st.data(), equal_devices())
def test_more_memory_never_hurts(data, problem):
    special = data.draw(st.sampled_from((None, 0, 1)))
    devices = tuple(
        replace(device, memory_bytes=device.memory_bytes * data.draw(st.sampled_from((1, 1.25, 2))))
        for device in problem.cluster.devices
    )
    larger = replace(problem, cluster=replace(problem.cluster, devices=devices))
    little, much = (
        least_period(StageAllocationProblem(one, singles(one), special)).period
        for one in (problem, larger)
    )
    assert much <= little


@quick
@given(st.data(), equal_devices())
def test_a_special_group_without_memory_leaves_the_contiguous_optimum(data, problem):
    special = data.draw(st.integers(0, len(problem.cluster) - 1))
    devices = list(problem.cluster.devices)
    devices[special] = replace(devices[special], memory_bytes=1e6)
    cluster = replace(problem.cluster, devices=tuple(devices))
    starved = replace(problem, cluster=cluster)
    others = tuple(group for group in singles(problem) if group != (special,))
    alone = least_period(StageAllocationProblem(starved, others)).period
    if all(layer.parameter_bytes > 0 for layer in problem.chain.layers):
        question = StageAllocationProblem(starved, singles(problem), special)
        assert least_period(question).period == pytest.approx(alone, rel=ROUNDING)
    as_one = StageAllocationProblem(problem, singles(problem), special)
    fixed = least_period(StageAllocationProblem(problem, singles(problem)))
    assert least_period(as_one).period <= fixed.period
    assert contiguous(as_one.tables).special == -1


@quick
@given(equal_devices())
def test_allocations_exist_from_the_least_period_on(problem):
    question = StageAllocationProblem(problem, singles(problem), 0)
    answer = least_period(question)
    if answer.stages is None:
        assert allocate(question, 10.0) is None
        return
    assert allocate(question, answer.period * (1 - 1e-6)) is None
    for period in (answer.period, answer.period * 1.3):
        stages = allocate(question, period)
        assert stages is not None
        found = one_f_one_b.period_bound(pattern_problem(problem, stages))
        assert found <= period * (1 + ROUNDING)


def test_a_group_in_the_way_is_left_out():
    model = chain([(1, 2)] * 4, [8] * 4, [1] * 4, [1] * 4)
    devices = [Device(f"g{i}", "v100", memory) for i, memory in enumerate((1e9, 3 * MIB, 1e9))]
    problem = PipelineProblem(model, from_matrix(devices, [[SPEED] * 3] * 3), 4)
    answer = least_period(StageAllocationProblem(problem, singles(problem)))
    assert [stage.devices for stage in answer.stages] == [("g2",)]  # transfers take 16 units
    quick_links = PipelineProblem(model, from_matrix(devices, [[16 * SPEED] * 3] * 3), 4)
    answer = least_period(StageAllocationProblem(quick_links, singles(problem)))
    assert [stage.devices for stage in answer.stages] == [("g0",), ("g2",)]
    assert answer.period == 6 * UNIT


def test_both_transfers_of_a_link_count():
    """The special device on both sides of another: their link carries both boundaries."""
    model = chain([(2, 2), (3, 5), (2, 2)], [2, 2, 2], [0] * 3, [0] * 3)
    problem = PipelineProblem(model, uniform_servers(1, 2, Link(SPEED / 1.5)), 8)
    question = StageAllocationProblem(problem, singles(problem), 0)
    around = [Placed(0, 1, 0, 0), Placed(1, 2, 1, 0), Placed(2, 3, 0, 0)]
    assert question.evaluate(around) * question.tick == 12 * UNIT
    assert least_period(question).period == 12 * UNIT


def test_what_does_not_fit_is_told_with_the_bytes():
    model = chain([(1, 1)] * 4, [1] * 4, [4] * 4, [2] * 4)
    problem = PipelineProblem(model, uniform_servers(1, 2, Link(SPEED), memory_bytes=17 * MIB), 4)
    answer = least_period(StageAllocationProblem(problem, singles(problem), 1))
    assert (answer.stages, answer.period, answer.bound, answer.exact) == (
        None, math.inf, math.inf, True,
    )  # fmt: skip
    # Two layers on each: 12 of weights, 2 of buffers, 8 kept are 22; all on one are 40.
    assert "needs at least 5.2" in answer.reason
    assert answer.reason.endswith("MB more")
    enough = PipelineProblem(model, uniform_servers(1, 2, Link(SPEED), memory_bytes=22 * MIB), 4)
    assert least_period(StageAllocationProblem(enough, singles(enough), 1)).stages is not None


def test_a_short_time_leaves_a_bound():
    problem = long_chain(40, memory=90)
    question = StageAllocationProblem(problem, singles(problem), 0)
    exact = least_period(question)
    hurried = least_period(question, Limits(seconds=1e-3))
    assert exact.exact
    assert hurried.bound <= exact.period <= hurried.period
    assert question.evaluate(placed_of(question, hurried.stages)) * question.tick == hurried.period


def placed_of(question, stages):
    names = [device.name for device in question.problem.cluster.devices]
    return [
        Placed(*stage.layers, names.index(stage.devices[0]), int(stage.recompute == "full"))
        for stage in stages
    ]


@quick
@given(st.data(), unequal_devices())
def test_tables_hold_the_figures_of_the_plan(data, problem):
    size = len(problem.cluster)
    split = data.draw(st.sampled_from((1, size)))
    problem = with_samples(problem, 4)
    groups = (tuple(range(split)), *((v,) for v in range(split, size)))
    question = StageAllocationProblem(problem, groups, None, ("none", "full"))
    form, layers = question.tables, len(problem.chain)
    k = data.draw(st.integers(0, layers - 1))
    one = Placed(
        k,
        data.draw(st.integers(k + 1, layers)),
        data.draw(st.integers(0, len(groups) - 1)),
        data.draw(st.integers(0, 1)),
    )
    stage, sort = question.stages([one])[0], form.sort[one.group]
    asked = pattern_problem(problem, [stage])
    at = (sort, one.choice, one.stop, one.start)
    assert form.seconds[at] * question.tick == pytest.approx(asked.forward[0] + asked.backward[0])
    kept = kept_bytes(problem, stage)
    byte, slack = question.byte, (layers + 2) * question.byte
    for units, size_ in (
        (form.saved[at], kept.saved_bytes),
        (form.working[at], kept.working_bytes),
        (form.static[sort, one.stop, one.start], static_bytes(problem, stage)),
    ):
        assert units * byte <= size_ <= units * byte + slack
    reduce = form.reduce[one.group, one.stop, one.start] * question.tick
    assert reduce == pytest.approx(asked.reduce[0])


def test_false_allocations_are_refused():
    problem = long_chain(4)
    question = StageAllocationProblem(problem, singles(problem), 0)
    with pytest.raises(InvalidPlan, match="every layer once"):
        question.evaluate([Placed(0, 3, 1, 0)])
    with pytest.raises(InvalidPlan, match="in their order"):
        question.evaluate([Placed(0, 3, 2, 0), Placed(3, 4, 1, 0)])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"groups": ()}, "at least one"),
        ({"groups": ((0,), ())}, "at least one"),
        ({"groups": ((0,), (0,))}, "at most once"),
        ({"groups": ((0,), (7,))}, "from 0 to 3"),
        ({"special": 4}, "special must be None or from 0 to 3"),
        ({"recompute": ("layer",)}, "'none', 'full' or both"),
        ({"recompute": ()}, "'none', 'full' or both"),
    ],
)
def test_bad_questions_are_refused(changed, message):
    problem = long_chain(4)
    with pytest.raises(InputError, match=message):
        replace(StageAllocationProblem(problem, singles(problem)), **changed)


# --- the paper's grid ------------------------------------------------------------------------


class Printed:
    """MadPipe 4.2.2 and Algorithm 1, word for word, in units and mebibytes; layers from 1."""

    def __init__(self, problem):
        layers = problem.chain.layers
        costs = [layer.costs[0] for layer in layers]
        self.L, self.P = len(layers), len(problem.cluster)
        self.M = round(problem.cluster.devices[0].memory_bytes / MIB)
        self.u = [0, *(round((c.forward_seconds + c.backward_seconds) / UNIT) for c in costs)]
        self.W = [0, *(round(layer.parameter_bytes / MIB) for layer in layers)]
        self.saved = [0, *(round(c.saved_bytes / MIB) for c in costs)]
        self.a = [0, *(round(c.output_bytes / MIB) for c in costs)]
        self.a[self.L] = 0  # no communication takes place there
        self.longest = self.load(1, self.L) + sum(self.crossing(k) for k in range(1, self.L))

    def load(self, k, l):
        return sum(self.u[k : l + 1])

    def crossing(self, k):
        return 2 * self.a[k]

    def bytes(self, k, l, g):
        kept = sum(3 * self.W[i] + g * self.saved[i] for i in range(k, l + 1))
        return kept + 2 * (self.a[k - 1] + self.a[l])

    def dp(self, target):
        @cache
        def T(l, p, t, m, V):  # noqa: N802 - the paper's name
            if l == 0:
                return t
            best = math.inf
            for k in range(1, l + 1) if p > 0 else (1,):
                g = math.ceil((V + self.load(k, l)) / target)
                through = printed_sum(V, self.load(k, l), target)
                # The grid's last delay stands for all above.
                through = min(printed_sum(through, self.crossing(k - 1), target), self.longest)
                if p > 0 and self.bytes(k, l, g) <= self.M:
                    rest = T(k - 1, p - 1, t, m, through)
                    best = min(best, max(self.load(k, l), self.crossing(k - 1), rest))
                m_special = m + self.bytes(k, l, g - 1)
                if m_special <= self.M:
                    t_special = t + self.load(k, l)
                    rest = T(k - 1, p, t_special, m_special, through)
                    best = min(best, max(t_special, self.crossing(k - 1), rest))
            return best

        return T(self.L, self.P - 1, 0, 0, Fraction(0))

    def fine_grid(self):
        """Every value that whole units and mebibytes can take."""
        return Grid(self.load(1, self.L) + 1, self.M + 1, self.longest + 1)


@pytest.mark.slow
@quick
@given(st.data(), equal_devices(4))
def test_a_grid_of_whole_units_is_the_recurrence(data, problem):
    printed = Printed(problem)
    target = data.draw(st.integers(1, printed.longest))
    expected = printed.dp(target)
    question = StageAllocationProblem(problem, singles(problem), 0)
    period, stages = madpipe_dp(question, target * UNIT, printed.fine_grid())
    if expected == math.inf:
        assert (period, stages) == (math.inf, None)
        return
    assert period == expected * UNIT
    loads = Counter()
    for placed in placed_of(question, stages):
        loads[placed.group] += printed.load(placed.start + 1, placed.stop)
    assert max(loads.values()) <= expected
