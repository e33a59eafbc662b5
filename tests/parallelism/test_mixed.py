"""Computed layers on servers of several kinds: the times of layouts, more layers for the faster."""

from dataclasses import replace

import numpy as np
import pytest
from layout_problems import LLAMA, MIXTRAL

from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.parts import Parts
from stagewright.formulations.parallelism.profiles.cluster import ServerPools, pool_of_kind
from stagewright.formulations.parallelism.ranges import expected
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.service.layouts.mixed import mixed_problem, within_rates
from stagewright.service.layouts.problems import training_problem
from stagewright.service.layouts.profiled import ProfiledRequest, find_profiled_plan

KINDS = {"a100": 2, "h100": 4}
"""Kinds and the devices of their servers."""


def problems(batch=8):
    return {
        kind: training_problem(
            LLAMA, fabric_of_kind(kind, devices, per_server=devices), sequence=1024, batch=batch
        )
        for kind, devices in KINDS.items()
    }


def pools(**servers):
    return ServerPools(
        tuple(pool_of_kind(kind, number, KINDS[kind]) for kind, number in servers.items())
    )


def planned(cluster, **options):
    mixed = mixed_problem(problems(), cluster, **options)
    request = ProfiledRequest.of(problem=mixed.problem, time_limit=10.0)
    return within_rates(find_profiled_plan(request), mixed)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_layers_take_the_times_of_layouts(tensor: int) -> None:
    """All layers in one stage, whose layout has no exchange but that of the tensor ranks."""
    profiles = mixed_problem(problems(), pools(a100=1, h100=1)).problem.profiles
    for kind, of in problems().items():
        if tensor > KINDS[kind]:
            assert tensor not in profiles.degrees(kind)
            continue
        layout = Layout(tensor=tensor, data=KINDS[kind] // tensor, microbatch=2)
        parts = Parts(of, layout)
        (measured,) = (
            one
            for one in profiles.measured
            if (one.device_kind, one.tensor, one.microbatch_size) == (kind, tensor, 2)
        )
        forward, backward = (float(seconds.sum()) for seconds in parts.seconds)
        assert sum(measured.forward_seconds) == pytest.approx(forward)
        assert sum(measured.backward_seconds) == pytest.approx(backward)
        assert sum(measured.update_seconds) == pytest.approx(parts.longest_update)


def test_the_faster_kind_has_more_layers_and_both_are_faster_than_one() -> None:
    both = planned(pools(a100=2, h100=1), tensor=(2, 4))
    seconds = {kind: planned(pools(**{kind: n})).iteration_seconds
               for kind, n in (("a100", 2), ("h100", 1))}  # fmt: skip
    assert both.iteration_seconds <= min(seconds.values())
    layers: dict[str, list[float]] = {"a100": [], "h100": []}
    for stage in both.stages:
        each = (stage.stop - stage.first) / (stage.replicas * stage.tensor)
        layers[stage.device_kind].append(each)
    if layers["a100"]:
        assert np.mean(layers["h100"]) >= np.mean(layers["a100"])
    low, high = (f(getattr(expected(one, ()), side) for one in problems().values())
                 for f, side in ((min, "low"), (max, "high")))  # fmt: skip
    assert low < 1 < high
    assert f"{both.iteration_seconds * low * 1e3:.4g} ms to" in both.remarks[-3]
    assert "layers are computed, not measured: a100 by megatron-a100" in both.remarks[-2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": (3, 5)}, "no microbatch of 3, 5 samples divides the batch 8"),
        ({"tensor": (3,)}, "tensor degrees 3 do not divide the model"),
        ({"precision": "fp8"}, "precision must be fp32, fp16, bf16, got 'fp8'"),
    ],
)
def test_refusals(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        mixed_problem(problems(), pools(a100=1, h100=1), **options)


def test_experts_are_not_divided_by_tensor_ranks_alone() -> None:
    """Tensor ranks divide experts only with sequence parallelism, which profiles do not have."""
    changed = {kind: replace(one, architecture=MIXTRAL) for kind, one in problems().items()}
    found = mixed_problem(changed, pools(a100=1, h100=1)).problem.profiles
    assert {one.tensor for one in found.measured} == {1}
