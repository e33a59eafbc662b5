"""The exact joint optimum of periodic plans, held against enumerations."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import groupby, product
from math import inf

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from periodic_oracles import brute_force_contiguous, brute_force_period
from profiles import examples, slow_after
from strategies import random_problem

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.patterns.joint_patterns import JointPatterns
from stagewright.formulations.patterns.one_f_one_b import pattern_load_bound
from stagewright.formulations.patterns.order_model import sequential
from stagewright.formulations.patterns.pattern import Pattern, PatternProblem
from stagewright.formulations.patterns.pattern_problems import pattern_problem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.machines.cluster import Cluster, Device, from_matrix
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.patterns.joint_patterns import (
    JointAnswer,
    allocations,
    joint_optimum,
    longest_iteration,
    stages_of,
)
from stagewright.solvers.patterns.pattern import best_pattern

LIMITS = Limits(seconds=60.0)
CLOSE = 3e-6  # relative: what the integer program's tolerance leaves open

few = examples(8, suppress_health_check=list(HealthCheck))

# Seconds there, seconds back, saved gigabytes: early layers keep the most, as in image models.
LAYERS = (
    (28, 61, 1.1), (17, 36, 0.9), (43, 77, 0.8), (25, 58, 0.9), (38, 71, 0.6),
    (12, 27, 0.5), (51, 99, 0.5), (22, 41, 0.3), (33, 70, 0.2), (19, 45, 0.1),
)  # fmt: skip


def chain_of(layers: tuple[tuple[float, float, float], ...], output: float = 60e6) -> Chain:
    costs = [
        LayerCost(
            microbatch_size=8,
            forward_seconds=there * 1e-3,
            backward_seconds=back * 1e-3,
            saved_bytes=saved * 1e9,
            output_bytes=output,
        )
        for there, back, saved in layers
    ]
    named = tuple(Layer(f"layer{i}", 20e6, (cost,)) for i, cost in enumerate(costs))
    return Chain("made up", "measured: by nobody", 8, named)


def equal_devices(count: int, memory: float, bandwidth: float = 12e9) -> Cluster:
    devices = [Device(f"gpu{v}", "v100", memory) for v in range(count)]
    return from_matrix(devices, [[bandwidth] * count] * count)


def question_of(
    layers: int, devices: int, memory: float, recompute: tuple[str, ...] = ("none",), m: int = 8
) -> JointPatterns:
    problem = PipelineProblem(chain_of(LAYERS[-layers:]), equal_devices(devices, memory), m)
    return JointPatterns(problem, tuple((v,) for v in range(devices)), recompute)


def every_plan(question: JointPatterns) -> Iterator[tuple[Stage, ...]]:
    """Each group for each layer, and each way to recompute for each stage."""
    devices = question.problem.cluster.devices
    for chosen in product(question.groups, repeat=len(question.problem.chain)):
        runs = [(group, len(list(layers))) for group, layers in groupby(chosen)]
        for modes in product(question.recompute, repeat=len(runs)):
            stages, start = [], 0
            for (group, count), mode in zip(runs, modes, strict=True):
                names = tuple(devices[v].name for v in group)
                stages.append(Stage((start, start + count), names, recompute=mode))
                start += count
            yield tuple(stages)


def exact_period(problem: PatternProblem) -> float:
    """By enumeration where that is quick, else by the integer program."""
    if len(problem.forward) <= 3:
        return brute_force_period(problem)
    return best_pattern(problem, LIMITS).period or inf


def least_of_all(question: JointPatterns) -> float:
    problems = {pattern_problem(question.problem, stages) for stages in every_plan(question)}
    least = inf
    for problem in sorted(problems, key=pattern_load_bound):
        if pattern_load_bound(problem) < least:
            least = min(least, exact_period(problem))
    return least


def solved(question: JointPatterns, **more: object) -> JointAnswer:
    """The optimum, after its plan was looked at again."""
    answer = joint_optimum(question, LIMITS, **more)
    assert answer.complete
    if answer.stages is not None:
        problem = pattern_problem(question.problem, answer.stages)
        assert problem.iteration_seconds(problem.evaluate(answer.pattern)) == answer.cost
        assert answer.cost * (1 - CLOSE) <= answer.bound <= answer.cost
        stops = [0, *(stage.layers[1] for stage in answer.stages)]
        assert [stage.layers[0] for stage in answer.stages] == stops[:-1]
        assert stops[-1] == len(question.problem.chain)
    return answer


@cache
def optimum_of(layers: int, devices: int, memory: float) -> JointAnswer:
    return solved(question_of(layers, devices, memory))


@few
@given(random_problem(max_layers=4, max_devices=2, max_microbatches=4, tight_memory=True))
def test_the_optimum_is_the_least_of_all_allocations(problem: PipelineProblem) -> None:
    question = JointPatterns(problem, tuple((v,) for v in range(len(problem.cluster))))
    answer, least = solved(question), least_of_all(question)
    if least == inf:
        assert answer.stages is None
        assert answer.bound == inf
    else:
        assert answer.period == pytest.approx(least, rel=CLOSE)


@few
@given(
    random_problem(
        max_layers=3, max_devices=2, max_microbatches=3, tight_memory=True, kinds=("a", "b")
    )
)
def test_the_optimum_with_recomputation_and_two_kinds(problem: PipelineProblem) -> None:
    question = JointPatterns(
        problem, tuple((v,) for v in range(len(problem.cluster))), ("none", "full")
    )
    answer, least = solved(question), least_of_all(question)
    assert (answer.period or inf) == pytest.approx(least, rel=CLOSE)


@pytest.mark.parametrize("memory", slow_after(1, [2e9, 1.2e9]))
def test_three_devices_where_memory_binds(memory: float) -> None:
    question = question_of(4, 3, memory)
    assert solved(question).period == pytest.approx(least_of_all(question), rel=CLOSE)


def test_groups_of_devices_split_microbatches() -> None:
    problem = PipelineProblem(chain_of(LAYERS[-4:]), equal_devices(3, 2e9), 4)
    question = JointPatterns(problem, ((0, 2), (1,)))
    answer = solved(question)
    assert answer.period == pytest.approx(least_of_all(question), rel=CLOSE)
    assert {stage.devices for stage in answer.stages} == {("gpu0", "gpu2"), ("gpu1",)}


@pytest.mark.parametrize(
    ("layers", "devices", "count"),
    [(4, 1, 1), (4, 3, 1 + 7 + 6), (6, 4, 1 + 31 + 90 + 65), (10, 2, 1 + 511)],
)
def test_equal_devices_are_taken_in_order(layers: int, devices: int, count: int) -> None:
    # Partitions of the layers into at most so many sets: Stirling numbers of the second kind.
    form = question_of(layers, devices, 1e12).form
    found = [
        rows for _, rows in allocations(form, 0.0, longest_iteration(form)) if rows is not None
    ]
    assert len(found) == count


def test_unequal_devices_are_all_tried() -> None:
    cluster = from_matrix(
        [Device(f"gpu{v}", "v100", 1e12) for v in range(3)], [[1e9, 1e9, 2e9]] * 2 + [[2e9] * 3]
    )
    problem = PipelineProblem(chain_of(LAYERS[-4:]), cluster, 4)
    question = JointPatterns(problem, ((0,), (1,), (2,)))
    form = question.form
    found = {
        stages_of(question, rows)
        for _, rows in allocations(form, 0.0, longest_iteration(form))
        if rows is not None
    }
    twins = {"gpu0": "gpu1", "gpu1": "gpu0", "gpu2": "gpu2"}
    swapped = {
        tuple(replace(stage, devices=(twins[stage.devices[0]],)) for stage in stages)
        for stages in found
    }
    assert found | swapped == set(every_plan(question))
    assert len(found) < 3**4


@few
@given(
    random_problem(max_layers=5, max_devices=3, max_microbatches=6, tight_memory=True),
    st.randoms(use_true_random=False),
)
def test_no_allocation_is_better_than_its_bound(problem: PipelineProblem, random) -> None:
    question = JointPatterns(problem, tuple((v,) for v in range(len(problem.cluster))))
    form = question.form
    found = [
        pair for pair in allocations(form, 0.0, longest_iteration(form)) if pair[1] is not None
    ]
    for bound, rows in random.sample(found, min(4, len(found))):
        asked = pattern_problem(problem, stages_of(question, rows))
        assert bound <= asked.iteration_seconds(exact_period(asked)) * (1 + CLOSE)


def test_bounds_know_what_is_kept_together() -> None:
    # Stages 0 and 2 are of one group at long periods: both keep a microbatch at one instant.
    problem = PipelineProblem(
        chain_of(((10, 10, 1), (1, 1, 0.01), (10, 10, 1)), output=0.0), equal_devices(2, 1.9e9), 8
    )
    question = JointPatterns(problem, ((0,), (1,)))
    stages = [Stage((i, i + 1), (f"gpu{i % 2}",)) for i in range(3)]
    form = question.form
    found = [
        stages_of(question, rows)
        for _, rows in allocations(form, 0.0, longest_iteration(form))
        if rows is not None
    ]
    assert tuple(stages) not in found
    assert len(found) == 2


def test_one_more_device_never_hurts() -> None:
    periods = [optimum_of(6, devices, 2.5e9).period for devices in (2, 3, 4)]
    assert periods == sorted(periods, reverse=True)
    assert periods[0] > periods[-1]


def test_more_memory_never_hurts() -> None:
    periods = [solved(question_of(6, 3, memory)).period or inf for memory in (1e9, 2e9, 3e9, 9e9)]
    assert periods == sorted(periods, reverse=True)
    assert periods[0] == inf
    assert periods[1] > periods[-1]


def test_recomputation_where_nothing_else_fits() -> None:
    plain = solved(question_of(6, 2, 1.45e9))
    answer = solved(question_of(6, 2, 1.45e9, ("none", "full")))
    assert plain.stages is None
    assert plain.bound == inf
    assert "full" in {stage.recompute for stage in answer.stages}


def test_no_worse_than_contiguous_plans() -> None:
    question = question_of(7, 3, 2.4e9)
    contiguous = brute_force_contiguous(question.problem, 3)
    assert solved(question).period < 0.99 * contiguous < inf


def test_twice_the_times_is_twice_the_period() -> None:
    question = question_of(6, 3, 2.5e9)
    chain = chain_of(tuple((2 * f, 2 * b, kept) for f, b, kept in LAYERS[-6:]))
    slow = replace(question.problem, chain=chain, cluster=equal_devices(3, 2.5e9, 6e9))
    answer = solved(replace(question, problem=slow))
    assert answer.period == pytest.approx(2 * optimum_of(6, 3, 2.5e9).period, rel=CLOSE)


@pytest.mark.parametrize("memory", slow_after(1, [4e9, 6e9]))
def test_ten_layers_on_four_devices(memory: float) -> None:
    answer = optimum_of(10, 4, memory)
    assert answer.bound <= answer.cost
    assert answer.solves <= 60


@pytest.mark.parametrize("seconds", [0.0, 0.05])
def test_a_bound_at_the_time_limit(seconds: float) -> None:
    answer = joint_optimum(question_of(10, 4, 4e9), Limits(seconds=seconds))
    assert 0 < answer.bound <= optimum_of(10, 4, 4e9).cost
    assert seconds > 0 or not answer.complete


def test_a_known_optimum_is_only_proved() -> None:
    question = question_of(8, 3, 3e9)
    known = solved(question)
    again = solved(question, incumbent=(known.stages, known.pattern))
    assert (again.stages, again.period) == (known.stages, known.period)
    assert again.solves <= known.solves


def test_a_known_plan_is_improved() -> None:
    question = question_of(5, 2, 9e9)
    stages = (Stage((0, 5), ("gpu0",)),)
    slow = sequential(pattern_problem(question.problem, stages))
    answer = solved(question, incumbent=(stages, slow))
    assert answer.period == solved(question).period < slow.period


def test_a_wrong_incumbent_is_refused() -> None:
    question = question_of(2, 1, 9e9)
    stages = (Stage((0, 2), ("gpu0",)),)
    with pytest.raises(InvalidPlan, match="starts before"):
        joint_optimum(question, LIMITS, incumbent=(stages, Pattern(1.0, (0.0, 0.0))))


@pytest.mark.parametrize(
    ("groups", "recompute", "message"),
    [
        ((), ("none",), "groups: give at least one"),
        (((0,), ()), ("none",), "each with at least one device"),
        (((0,), (0, 1)), ("none",), "disjoint and of positions 0 to 1"),
        (((0,), (2,)), ("none",), "disjoint and of positions 0 to 1"),
        (((0,),), (), 'of "none" and "full"'),
        (((0,),), ("layer",), 'of "none" and "full"'),
    ],
)
def test_questions_that_make_no_sense(
    groups: tuple[tuple[int, ...], ...], recompute: tuple[str, ...], message: str
) -> None:
    problem = question_of(3, 2, 9e9).problem
    with pytest.raises(InputError, match=message):
        JointPatterns(problem, groups, recompute)
