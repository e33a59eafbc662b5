"""Plans for a framework against all small ones that its exporter writes."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from launch_oracle import launched
from plans import small_problem
from profiles import examples
from strategies import random_problem

from stagewright.executor.export.runtimes import RUNTIMES
from stagewright.formulations.forms.answers import Limits, Status, silent
from stagewright.formulations.plans.plan_class import class_of
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster
from stagewright.service.pipelines.launching import plan_for, why_not
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planners.structures.arrangements import arrangements


def named(problem):
    """The problem with the layers of a decoder."""
    layers = problem.chain.layers
    blocks = (f"layers.{i}" for i in range(len(layers) - 2))
    names = ("embedding", *blocks, "head")
    renamed = tuple(replace(one, name=name) for one, name in zip(layers, names, strict=True))
    return replace(problem, chain=replace(problem.chain, layers=renamed))


def solved(problem, to, choices=None, compares=False):
    return plan_for(to, problem, "auto", Limits(1.0), silent, choices or Choices(), compares)


@examples(60, quick=3)
@given(
    random_problem(3, 3, 2, tight_memory=True, kinds=("a", "b")),
    st.sampled_from(RUNTIMES),
    st.randoms(use_true_random=False),
)
def test_no_plan_that_is_exported_refutes_a_claim(problem, to, draw) -> None:
    assume(len(problem.chain) >= 2)
    problem = named(problem)
    found = solved(problem, to)
    every = list(launched(problem, to, draw))
    best = min((one.predicted.iteration_seconds for one in every), default=float("inf"))
    assert all(found.restriction.plans.contains(class_of(one)) for one in every)
    if found.status is Status.INFEASIBLE:
        assert not every
    if found.plan is None:
        return
    assert found.restriction.bound <= min(best, found.cost) * (1 + 1e-9)
    if found.status is Status.OPTIMAL:
        assert found.cost <= best * (1 + 1e-6)


@examples(60, quick=3)
@given(random_problem(3, 3, 2, tight_memory=True, kinds=("a", "b")))
def test_a_pipeline_is_found_wherever_one_fits(problem) -> None:
    """Of 1F1B, which DeepSpeed runs, on whatever devices in whatever order."""
    assume(len(problem.chain) >= 2)
    problem = named(problem)
    fits = any(launched(problem, "deepspeed", Random(0)))
    found = solved(problem, "deepspeed")
    assert fits == (found.plan is not None)


def test_optimal_is_the_best_of_what_the_framework_runs() -> None:
    """Not the best of a smaller class: that of disjoint devices has fewer plans than torch's."""
    for to in ("torch-csv", "megatron"):
        found = solved(named(small_problem()), to, compares=True)
        assert (found.status is Status.OPTIMAL) == (found.restriction.gap <= 1e-6)


@pytest.mark.parametrize(
    ("to", "shards", "recompute"),
    [("megatron", "optimizer", None), ("deepspeed", "optimizer", "full"),
     ("torchtitan", "weights", None)],
)  # fmt: skip
def test_plans_with_shards_are_exported(to: str, shards, recompute) -> None:
    problem = named(small_problem())
    found = solved(problem, to, Choices(shards=shards, recompute=recompute))
    assert why_not(found.plan, to, problem.chain) is None


def test_what_the_framework_cannot_do_is_refused() -> None:
    problem = named(small_problem())
    for choices, message in (
        (Choices(recompute="full"), "recompute 'full': plans for torchtitan have none or auto"),
        (Choices(shards="optimizer"), "shards 'optimizer': plans for torchtitan have none or we"),
    ):
        with pytest.raises(InputError, match=message):
            solved(problem, "torchtitan", choices)


@pytest.mark.parametrize(("to", "devices"), [("torchtitan", 1), ("nemo", 1), ("nemo", 3)])
def test_too_few_devices_or_microbatches_are_a_proved_no(to: str, devices: int) -> None:
    found = solved(named(small_problem(devices=devices, microbatches=1)), to)
    assert found.status is Status.INFEASIBLE
    assert "its pipelines have at least 2 ranks" in found.reason


def test_copies_of_a_pipeline_have_equal_shares() -> None:
    """The average of their gradients is the mini-batch's only then."""
    problem = small_problem(devices=4)
    problem = replace(problem, chain=replace(problem.chain, microbatch_size=6))
    found = solved(problem, "torch-csv")
    assert 4 not in found.restriction.plans.equal_groups
    names = tuple(one.name for one in problem.cluster.devices)
    stages = (replace(found.plan.stages[0], layers=(0, len(problem.chain)), devices=names),)
    assert "6 samples cannot be split evenly among 4" in why_not(
        replace(found.plan, stages=stages), "torch-csv", problem.chain
    )


def test_arrangements_are_every_one_of_few_devices_that_differ() -> None:
    alike = small_problem(devices=4)
    first, *others = arrangements(alike, 2, 2)
    assert len({v for group in first for v in group}) == 4
    assert len(others) < 6  # devices or links are alike
    assert isinstance(alike.cluster, Cluster)
    memory = [replace(one, memory_bytes=one.memory_bytes + v)
              for v, one in enumerate(alike.cluster.devices)]  # fmt: skip
    uneven = replace(alike, cluster=replace(alike.cluster, devices=tuple(memory)))
    assert len(list(arrangements(uneven, 2, 2))) == 6
    assert len(list(arrangements(uneven, 1, 4))) == 24
