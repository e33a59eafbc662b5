"""Rate sets, and what the cost model's switches do."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from model_sizes import total_parameters
from own_rates import own_rates

from benchmarks.layout_h100 import LLAMA, llama, megatron, teraflops
from benchmarks.layout_runs import gpt, gpt_problem, of_2021
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layer_times import layer_time
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.parts import shares
from stagewright.graphs.documents.documents import to_json, write
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.devices import ACCELERATORS
from stagewright.graphs.machines.rates import (
    OTHER_DEVICE,
    RateSet,
    Spread,
    rate_sets,
    rates_named,
    rates_of,
    read_rates,
)
from stagewright.graphs.models.architecture import Experts
from stagewright.graphs.models.shards import LayerSplit

SPLIT = LayerSplit(tensor=8, sequence_parallel=True)


A100 = rates_of("a100-80gb").reached


@pytest.mark.parametrize("framework", [None, "plan", "megatron", "nemo", "torchtitan", "deepspeed"])
def test_every_kind_has_rates_with_a_source_and_a_range(framework: str | None) -> None:
    for kind in ACCELERATORS:
        found = rates_of(kind, framework)
        assert found.source
        assert found.fitted_to.startswith("fitted to")
        assert 0 < found.dense.low <= 1 <= found.dense.high
        measured = rate_sets()[found.name]
        alien = kind not in measured.devices
        assert (f"not measured on {kind}" in (found.borrowed or "")) == alien
        if found.borrowed is None:
            assert found is measured


def test_the_nearest_rates_are_taken_and_their_range_widens() -> None:
    own = rates_of("h100")
    assert own.name == max(one for one in rate_sets() if one.startswith("megatron-h100"))
    family, other = rates_of("h200"), rates_of("mi300x")
    assert (family.reached, family.dense) == (own.reached, own.dense)
    assert other.name.startswith("megatron-a100")
    assert other.dense == rates_of("a100").dense.widened(OTHER_DEVICE)
    assert rates_of("b200", "torchtitan").name == "torchtitan-h100"
    assert "not measured with deepspeed" in str(rates_of("a100", "deepspeed"))
    with pytest.raises(InputError, match="not known"):
        rates_of("abacus")
    with pytest.raises(InputError, match="stack 'mesh' is not known; known are accelerate"):
        rates_of("h100", "mesh")


def test_rates_by_name_and_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    own = replace(rates_of("h100"), name="mine", dense=Spread(0.9, 1.05))
    write(RateSet, own, path)
    assert rates_named(str(path)) == read_rates(path) == own
    with pytest.raises(InputError, match="rates 'fast' are not known; known are fsdp-a100"):
        rates_named("fast")
    for change, wrong in (
        ('"matmul": 7.0', r"matmul must be in \(0, 1\], got 7"),
        ('"contention": -1.0', "contention must not be negative, got -1"),
    ):
        name, _, _ = change.partition(":")
        path.write_text(re.sub(rf"{name}: [0-9.]+", change, to_json(own)))
        with pytest.raises(InputError, match=wrong):
            read_rates(path)
    with pytest.raises(InputError, match="a range is from above 0 to below 1000, got 2 to 1"):
        Spread(2.0, 1.0)


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
    problem = replace(gpt_problem(of, 8, 8), rates=own_rates(replace(A100, half_flops=0.0)))
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


def test_trainings_on_h100_of_2024() -> None:
    """Llama 3 405B, not fitted, and Megatron-LM's table of GPTs; what is not printed is chosen."""
    assert total_parameters(LLAMA) / 1e9 == pytest.approx(405.9, abs=0.1)
    # At 131,072 tokens the printed count of FLOPs is another.
    runs = [one for one in (*llama(), *megatron()) if one.problem.sequence <= 8192]
    errors = np.abs([teraflops(one) / one.teraflops - 1 for one in runs])
    assert len(errors) == 11
    assert errors.mean() <= 0.07
    assert errors.max() <= 0.12
