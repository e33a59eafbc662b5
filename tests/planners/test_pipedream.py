"""PipeDream's planner against its authors' optimizer; what its recurrence predicts, by hand."""

import numpy as np
import pytest

from benchmarks.pipedream import (
    DATA,
    REFERENCES,
    Reference,
    hierarchies_table,
    public_code_seconds,
    reference_problem,
    thesis_seconds,
)
from benchmarks.pipedream_thesis import CHOICES, FORMULAS, Choice, chosen, costs_on, price
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planners.baselines.hierarchy import hierarchy_of, optimize
from stagewright.solvers.planners.baselines.pipedream import optimum, partition
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planning import plan

pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="the public profiles are not beside the checkout"
)
REFERENCE_DIGITS = 5e-7  # the references are given to six decimals


def name(reference: Reference) -> str:
    return f"{reference.profile}-{reference.devices}"


@pytest.mark.parametrize("reference", REFERENCES, ids=name)
def test_partition_is_that_of_the_authors(reference: Reference):
    stages = partition(reference_problem(reference))
    assert tuple(len(stage.devices) for stage in stages) == reference.replicas
    if reference.cuts is not None:
        assert tuple(stage.stop for stage in stages[:-1]) == reference.cuts


@pytest.mark.parametrize("reference", REFERENCES, ids=name)
def test_slowest_stage_by_the_formula_of_the_public_code(reference: Reference):
    problem = reference_problem(reference)
    seconds = public_code_seconds(problem, partition(problem))
    assert seconds == pytest.approx(reference.slowest_seconds, abs=REFERENCE_DIGITS)


def test_the_slowest_stage_on_levels_is_that_of_the_authors():
    """GNMT-large on 16 devices, and ResNet-50 on 4 servers of 4."""
    rows = {(row[0], row[1]): row for row in hierarchies_table().rows}
    assert rows["gnmt_large", "1x16"][3] == 13
    assert rows["gnmt_large", "1x16"][5] == "0.058971"
    assert rows["resnet50", "4x4"][5] == "0.028667"


@pytest.mark.parametrize(
    ("reference", "agrees"), [*zip(REFERENCES, (True, False, False, True), strict=True)]
)
def test_the_thesis_overlaps_the_all_reduce(reference: Reference, agrees: bool):
    """The formulas agree exactly where no replicated stage is the slowest."""
    seconds = thesis_seconds(reference_problem(reference))
    assert seconds <= reference.slowest_seconds + REFERENCE_DIGITS
    assert np.isclose(seconds, reference.slowest_seconds, rtol=0, atol=REFERENCE_DIGITS) == agrees


def test_straight_pipelines_and_data_parallelism():
    """VGG-16 on 16 devices: as many stages as devices, one stage, and the optimum between."""
    problem = reference_problem(REFERENCES[1])
    assert [len(one.devices) for one in partition(problem, "straight")] == [1] * 16
    assert [len(one.devices) for one in partition(problem, "data")] == [16]
    assert [len(one.devices) for one in partition(problem)] == [15, 1]


# Of table 2.2: the lines that the public profiles give by the code's formula on one level.
AGREEING = [CHOICES[i] for i in (0, 1, 2, 6, 9, 10)]


@pytest.mark.parametrize("choice", AGREEING, ids=lambda one: f"{one.profile}-{one.where}")
def test_configurations_of_table_2_2(choice: Choice):
    assert chosen(costs_on(choice), choice.one_level, overlapped=False) == choice.printed


def test_resnet_is_data_parallel_on_two_levels_by_the_formula_of_the_thesis():
    choice = CHOICES[3]
    levels = hierarchy_of(choice.machines)
    assert chosen(costs_on(choice), levels, overlapped=True) == choice.printed == (16,)


@pytest.mark.parametrize("overlapped", FORMULAS.values(), ids=FORMULAS)
@pytest.mark.parametrize("choice", CHOICES, ids=lambda one: f"{one.profile}-{one.where}")
def test_no_configuration_of_table_2_2_is_better_than_the_optimum(choice: Choice, overlapped: bool):
    costs, level = costs_on(choice), choice.one_level
    optimum = optimize(costs, level, overlapped=overlapped)[-1].slowest[0, -1, -1]
    ours = price(costs, chosen(costs, level, overlapped=overlapped), level, overlapped=overlapped)
    assert ours.seconds == pytest.approx(optimum)
    printed = price(costs, choice.printed, level, overlapped=overlapped)
    assert printed.seconds >= optimum * (1 - 1e-9)


MB = 1e6


def problem_of(memory: float, parameters: float, layers: int = 2) -> PipelineProblem:
    """Layers of F = 1 s and B = 2 s on two devices at 10 MB/s; SGD without momentum."""
    cost = LayerCost(8, 1.0, 3 * MB, 0.0, 2.0)
    chain = Chain(
        "small",
        "by hand",
        8,
        tuple(Layer(f"l{i}", parameters * MB, (cost,)) for i in range(layers)),
        0.0,
    )
    devices = uniform_servers(1, 2, Link(10 * MB), memory_bytes=memory * MB)
    return PipelineProblem(chain, devices, 4)


def reason(problem: PipelineProblem, planner: str, **choices) -> str:
    return plan(problem, planner, Limits(10.0), choices=Choices(**choices)).reason


def test_a_straight_pipeline_takes_what_is_predicted_and_its_drain():
    """3 s per microbatch; 4 of them take 15 s with the drain, 3.75 s each."""
    assert reason(problem_of(1e6, 50.0), "pipedream") == (
        "PipeDream's recurrence: 3 s per microbatch, checked: 3.75 s, of which slowest device or "
        "channel 3 s, filling, draining and waiting 750 ms"
    )


def test_an_all_reduce_after_the_backward_is_no_prediction_of_the_recurrence():
    """One layer on two devices: max(3 / 2, 10 MB / 10 MB/s) = 1.5 s; the plan takes 1.5 + 1 s."""
    problem = problem_of(1e6, 10.0, layers=1)
    assert optimum(problem).seconds == pytest.approx(1.5)
    assert reason(problem, "pipedream-async").endswith(
        "PipeDream's recurrence: 1.5 s per microbatch, checked: 2.5 s, because: all-reduce and "
        "update after the backward, shared channels +1 s"
    )


def test_an_agreement_has_no_causes():
    assert reason(problem_of(1e6, 50.0), "pipedream-async").endswith(
        "PipeDream's recurrence: 3 s per microbatch, checked: 3 s"
    )


def test_memory_makes_a_period_longer():
    """The first stage has no room for a second microbatch and its version: 6 s instead of 3."""
    assert reason(problem_of(120.0, 50.0), "pipedream-async").endswith(
        "PipeDream's recurrence: 3 s per microbatch, checked: 6 s, because: memory +3 s"
    )


def test_other_groups_than_the_recurrence_are_not_explained():
    assert "recurrence" not in reason(problem_of(1e6, 50.0), "pipedream-async", group_size=1)


def test_recomputation_is_of_the_plan_alone():
    """A forward again, 4 s for each of 4 microbatches, and a drain of 4 s."""
    assert reason(problem_of(1e6, 50.0), "pipedream", recompute="full") == (
        "PipeDream's recurrence: 3 s per microbatch, checked: 5 s, of which slowest device or "
        "channel 4 s, filling, draining and waiting 1 s"
    )
