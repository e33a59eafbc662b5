"""Shares of a device that kernels occupy: what is not known is all of it, the largest counts."""

from dataclasses import replace

import numpy as np
import pytest

from stagewright.formulations.plans.actions import UPDATE, B, F, I, W
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.timing import covered_seconds, kernel_shares
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost, load_model, save_model


def cost(size: int, *shares: float | None) -> LayerCost:
    names = ("forward_share", "input_gradient_share", "weight_gradient_share")
    given = dict(zip(names, shares, strict=False))
    return LayerCost(size, 1.0, 1.0, 1.0, input_gradient_seconds=1.0, weight_gradient_seconds=1.0,
                     **given)  # fmt: skip


def problem(assumed: float | None = None) -> PipelineProblem:
    """Two layers: shares at 2 and 8 samples; at 8 samples, only of the forward."""
    layers = (
        Layer("one", 1.0, (cost(2, 0.2, 0.3, 0.4), cost(8, 0.6, 0.5, 0.9))),
        Layer("two", 1.0, (cost(8, 0.7),)),
    )
    cluster = uniform_servers(1, 8, Link(1e9))
    return PipelineProblem(Chain("m", "by hand", 8, layers), cluster, 1, assumed_share=assumed)


@pytest.mark.parametrize(
    ("replicas", "first"),
    [
        (1, [0.6, 0.5, 0.9]),
        (2, [0.6, 0.5, 0.9]),  # 4 samples: the larger of both neighbours
        (4, [0.2, 0.3, 0.4]),
        (8, [0.2, 0.3, 0.4]),  # 1 sample: below the smallest
    ],
)
def test_shares_at_other_sizes(replicas: int, first: list[float]) -> None:
    found: Floats = problem().layer_shares("v100", replicas)
    assert found[:, 0].tolist() == first
    assert found[:, 1].tolist() == [0.7, 1, 1]
    assert problem(0.3).layer_shares("v100", replicas)[:, 1].tolist() == [0.7, 0.3, 0.3]


def test_the_largest_share_of_a_stage_counts() -> None:
    stage = Stage((0, 2), ("s0g0",))
    assert kernel_shares(problem(0.3), stage) == {F: 0.7, I: 0.5, W: 0.9, B: 0.9, UPDATE: 1}
    again = kernel_shares(problem(0.3), replace(stage, recompute="full"))
    assert (again[I], again[B]) == (0.7, 0.9)
    assert set(kernel_shares(problem(), stage).values()) == {0.7, 1.0}


def test_shares_are_above_0_and_at_most_1(tmp_path) -> None:
    for wrong in (0.0, 1.1):
        with pytest.raises(InputError, match="weight_gradient_share must be above 0 and at most 1"):
            cost(1, 0.5, 0.5, wrong)
    save_model(problem().chain, tmp_path / "m.json")
    assert load_model(tmp_path / "m.json") == problem().chain
    assert problem(0.3).digest != problem().digest != problem(0.4).digest


def test_covered_seconds() -> None:
    nan = float("nan")
    starts, ends = [[4.0, 0.0, nan, 1.0, 9.0], [5.0, 2.0, nan, 3.0, 9.0]]
    assert covered_seconds(np.array(starts), np.array(ends)) == 4
    assert covered_seconds(np.array([nan]), np.array([nan])) == 0
