"""Models that were written elsewhere are captured as they are: losses, gradients, names."""

from importlib.util import find_spec
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from torch import Tensor, nn  # noqa: E402

import stagewright  # noqa: E402
from benchmarks.any_models import MODELS, AnyModel  # noqa: E402
from benchmarks.plain_loop import gradients  # noqa: E402
from stagewright.executor.capture.layers import LayeredModel  # noqa: E402
from stagewright.executor.measuring.captured import captured_by_size  # noqa: E402
from stagewright.executor.measuring.machine import Machine  # noqa: E402
from stagewright.executor.measuring.profiling import measure_layers  # noqa: E402
from stagewright.executor.training.data.batches import typed_inputs  # noqa: E402
from stagewright.executor.training.losses import cross_entropy, own_loss  # noqa: E402
from stagewright.formulations.checking.check import check  # noqa: E402
from stagewright.formulations.plans.pipeline import PipelineProblem  # noqa: E402
from stagewright.graphs.machines.cluster import Link, uniform_servers  # noqa: E402

QUICK = ("gpt2", "llama", "resnet18", "transformer-encoder", "u-net")
CPU = torch.device("cpu")
SAMPLES = 4


def any_models() -> list[Any]:
    """All of them, of which few are quick; skipped where their package is absent."""
    return [
        pytest.param(
            one,
            id=one.name,
            marks=[
                pytest.mark.skipif(
                    find_spec(one.package) is None, reason=f"{one.package} is not installed"
                ),
                *([] if one.name in QUICK else [pytest.mark.slow]),
            ],
        )
        for one in MODELS.values()
    ]


def captured(model: nn.Module, batch: Any, samples: int = SAMPLES) -> LayeredModel:
    takes_loss = isinstance(batch, dict)
    inputs = batch if takes_loss else batch[0]
    every = captured_by_size(
        lambda: model,
        inputs,
        [samples],
        takes_loss,
        device=CPU,
        dtype=torch.float64,
        autocast=None,
    )
    return every[samples]


def loss_of_layers(layered: LayeredModel, batch: Any) -> Tensor:
    """What the executor computes of a batch."""
    takes_loss = isinstance(batch, dict)
    values, _ = typed_inputs(batch if takes_loss else batch[0], torch.float64)
    for layer in layered.layers:
        values = layer.module(*values)
    result: Tensor = layered.result(values)
    return result if takes_loss else nn.functional.cross_entropy(result, batch[1])


@pytest.mark.parametrize("one", any_models())
def test_layers_have_the_loss_and_gradients_of_the_model(one: AnyModel) -> None:
    example, batch = one.batches(SAMPLES, 2)
    model = one.make()
    loss, expected = gradients(model, batch)
    layered = captured(model, example)
    model.zero_grad()
    found = loss_of_layers(layered, batch)
    found.backward()
    assert len(layered.layers) >= 5
    assert found.item() == pytest.approx(loss, rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-14, msg=name)


@pytest.mark.parametrize("one", any_models())
def test_layers_have_the_names_of_the_state(one: AnyModel) -> None:
    (batch,) = one.batches(SAMPLES, 1)
    model = one.make()
    layered = captured(model, batch)
    names = [name for layer in layered.layers for name in layer.module.state_dict()]
    assert set(names) == set(model.state_dict())
    assert set(one.make().state_dict()) == set(model.state_dict())


@pytest.mark.parametrize("one", any_models())
def test_profiled_models_are_planned(one: AnyModel) -> None:
    (batch,) = one.batches(SAMPLES, 1)
    takes_loss = isinstance(batch, dict)
    pair = (batch, ()) if takes_loss else batch
    chain = measure_layers(
        {SAMPLES: captured(one.make(), batch)},
        pair,
        (SAMPLES,),
        machine=Machine(CPU, kind="core"),
        loss=own_loss if takes_loss else cross_entropy,
        rounds=1,
    )
    state = sum(parameter.nbytes for parameter in one.make().parameters())
    assert chain.parameter_bytes.sum() >= state
    cluster = uniform_servers(1, 2, Link(1e9), kind="core")
    result = stagewright.plan(chain, cluster, 4, "pipedream", time_limit=1)
    assert result.plan is not None
    assert check(PipelineProblem(chain, cluster, 4), result.plan) == ()
