"""Presets of rates and links, and what the cost model's switches do."""

from dataclasses import replace

import numpy as np
import pytest
from model_sizes import total_parameters

from benchmarks.layout_fit import error
from benchmarks.layout_h100 import LLAMA, fit, llama, nemo, teraflops
from benchmarks.layout_runs import gpt, gpt_problem, of_2021
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layer_times import layer_time
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.parts import shares
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.devices import A100, ACCELERATORS, H100, REACHED, reached_on
from stagewright.graphs.models.architecture import Experts
from stagewright.graphs.models.shards import LayerSplit

SPLIT = LayerSplit(tensor=8, sequence_parallel=True)


def test_every_kind_has_rates_with_a_source() -> None:
    assert set(REACHED) == set(ACCELERATORS)
    assert all(one.source for one in REACHED.values())
    assert "not measured" in REACHED["mi300x"].source
    assert reached_on("A100-80GB") is A100
    with pytest.raises(InputError, match="not known"):
        reached_on("abacus")


def test_negative_dispatch_is_refused() -> None:
    with pytest.raises(InputError, match="dispatch_seconds"):
        replace(A100, dispatch_seconds=-1e-6)


def test_exchange_beside_the_backward() -> None:
    """It hides behind the products; with sequence parallelism half of the backward's does not."""
    problem = gpt_problem(gpt(4, 6144, 48), 8, 8)
    alone = replace(problem, overlap_tensor=False)
    for split, hidden in ((LayerSplit(tensor=8), 1.0), (SPLIT, 2 / 3)):
        share = shares(problem, split).kinds[0]
        beside, after = (
            layer_time(one, share, split, 1, "none", False).exchange for one in (problem, alone)
        )
        forward = after / (2 if split.sequence_parallel is False else 2.5)
        assert after - beside == pytest.approx(hidden * (after - forward))


def test_sum_of_gradients_in_another_kernel() -> None:
    """Reads a gradient of 2 bytes, reads and writes a sum of 4."""
    problem = gpt_problem(gpt(4, 6144, 48), 8, 8)
    separate = replace(problem, fused_gradients=False)
    share = shares(problem, SPLIT).kinds[0]
    fused, added = (layer_time(one, share, SPLIT, 1, "none", True) for one in (problem, separate))
    seconds = share.parameters * 10 / (2039e9 * A100.memory)
    assert added.backward - fused.backward == pytest.approx(seconds)
    assert added.weight - fused.weight == pytest.approx(seconds)
    assert added.forward == fused.forward


def test_few_tokens_per_expert_leave_their_gradients_to_the_memory() -> None:
    """A fused product reads and writes a sum of 4 bytes for every weight; 512 tokens are few."""
    experts = Experts(256, 4, 2048)
    of = replace(gpt(1, 4096, 32, sequence=4096), experts=experts)
    problem = gpt_problem(of, 8, 8)
    share = shares(problem, LayerSplit(expert=8)).kinds[0]
    names = [name for name in share.operators if name.startswith("experts")]
    alone = replace(share, operators={name: share.operators[name] for name in names})
    found = layer_time(problem, alone, LayerSplit(expert=8), 1, "none", True).weight
    seconds = share.expert_parameters * 8 / (2039e9 * A100.memory)
    assert found == pytest.approx(seconds + 2 * A100.launch_seconds)
    separate = replace(problem, fused_gradients=False)
    assert layer_time(separate, alone, LayerSplit(expert=8), 1, "none", True).weight > found


def test_a_layer_lasts_as_long_as_its_launches() -> None:
    problem = gpt_problem(gpt(4, 64, 4, sequence=128), 8, 8)
    share = shares(problem, LayerSplit()).kinds[0]
    found = layer_time(problem, share, LayerSplit(), 1, "full", False)
    kernels = len(share.operators)
    products = sum(one.weight_gradients > 0 for one in share.operators.values())
    assert found.forward == pytest.approx(kernels * A100.dispatch_seconds)
    assert found.backward == pytest.approx((2 * kernels + products) * A100.dispatch_seconds)


def test_the_runtime_of_2021_is_slower() -> None:
    problem = gpt_problem(gpt(24, 6144, 48), 64, 16)
    layout = Layout(pipeline=2, tensor=8, recompute="full")
    now, then = (evaluate(one, layout).seconds for one in (problem, of_2021(problem)))
    assert 1.02 < then / now < 1.3


def test_llama_on_h100_which_is_not_fitted() -> None:
    """Its parameters; sequences of 8,192 tokens within 10 % of the printed TFLOP/s."""
    assert total_parameters(LLAMA) / 1e9 == pytest.approx(405.9, abs=0.1)
    short = [one for one in llama() if one.problem.sequence == 8192]
    assert len(short) == 2
    for one in short:
        assert teraflops(one, H100.matmul) == pytest.approx(one.teraflops, rel=0.1)


def test_trainings_in_fp8_which_are_not_fitted() -> None:
    """Their layouts are printed; all are predicted to be somewhat faster than they were."""
    errors = np.array([error(one) for one in nemo()])
    assert np.abs(errors).mean() <= 0.10
    assert np.abs(errors).max() <= 0.25
    assert np.median(errors) == pytest.approx(-0.05, abs=0.05)


@pytest.mark.slow
def test_the_rate_of_the_h100_is_the_fit() -> None:
    assert fit() == pytest.approx(H100.matmul, abs=0.02)
