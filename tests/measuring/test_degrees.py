"""Costs of layers that ranks divide are measured by dividing them."""

from functools import partial
from typing import Any

import pytest
from profiles import slow_after

torch = pytest.importorskip("torch", reason="measuring needs torch")

from ranks import Ranks  # noqa: E402
from tensor_runs import ENTROPY, batches, gpt, llama  # noqa: E402

from stagewright.executor.measuring.machine import MeasuringMachine  # noqa: E402
from stagewright.executor.measuring.whole_models import Profiled  # noqa: E402
from stagewright.graphs.documents.errors import InputError  # noqa: E402
from stagewright.graphs.models.chain import Chain  # noqa: E402


def profiled(make: Any) -> Profiled:
    """Of microbatches of one and two samples."""
    return Profiled(
        make=make,
        name="small",
        batch=batches(4, 1)[0],
        sizes=(1, 2),
        loss=ENTROPY,
        takes_loss=False,
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        clips=True,
        rounds=1,
        machine=MeasuringMachine(torch.device("cpu"), kind="core"),
        dtype=torch.float64,
        autocast=None,
    )


def measured(_: Any, __: int, make: Any, degree: int) -> Chain | str:
    try:
        return profiled(make).measure_degree(degree)
    except InputError as error:
        return str(error)


def noisy() -> Any:
    model = gpt()
    for block in model.blocks:
        block.feed_forward.insert(3, torch.nn.Dropout(0.5))
        block.tp_plan = {"feed_forward.1": "colwise", "feed_forward.4": "rowwise"}
    return model


@pytest.mark.parametrize(("world", "degree"), slow_after(1, [(2, 2), (4, 2)]))
def test_divided_layers_are_measured(ranks: Ranks, world: int, degree: int) -> None:
    chain, *others = ranks.run(measured, world, llama, degree)
    assert all(one.layers == chain.layers for one in others)
    assert "divided among 2 of them" in chain.source
    assert chain.source.endswith(f"by {world} ranks at once")
    model = llama().double()
    parts = model.embedding, *model.blocks, model.head
    for layer, part in zip(chain.layers, parts, strict=True):
        sizes = {name: one.nbytes for name, one in part.named_parameters()}
        whole = sum(size for name, size in sizes.items() if "norm" in name)
        assert layer.parameter_bytes == sum(sizes.values())
        assert layer.degrees == (1, degree)
        assert [cost.microbatch_size for cost in layer.costs_at(degree)] == [1, 2]
        for one, own in zip(layer.costs_at(1), layer.costs_at(degree), strict=True):
            shard = own.shard_parameter_bytes
            assert shard == whole + (layer.parameter_bytes - whole) / degree
            assert own.output_bytes == one.output_bytes
            assert own.forward_seconds > 0
            assert own.update_seconds is not None
    for layer in chain.layers[1:3]:  # a device keeps the values of its own heads and features
        assert layer.costs_at(2)[0].saved_bytes < layer.costs_at(1)[0].saved_bytes


def unplanned() -> Any:
    model = gpt()
    for module in model.modules():
        module.tp_plan = {}
    return model


@pytest.mark.parametrize(
    ("make", "world", "degree", "message"),
    [
        (noisy, 2, 2, "'blocks.0' draws random numbers and is divided among the devices of the "),
        (unplanned, 2, 2, "the model has tensor degree 2, but none of its layers (embedding, "),
        (llama, 3, 2, "--ranks 3 are no groups of --tensor 2"),
    ],
)
def test_what_a_run_would_not_divide_is_not_measured(
    ranks: Ranks, make: Any, world: int, degree: int, message: str
) -> None:
    assert all(message in told for told in ranks.run(measured, world, make, degree))
