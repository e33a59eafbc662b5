"""Models that were written elsewhere are captured as they are: losses, gradients, names."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from torch import Tensor, nn  # noqa: E402

import stagewright  # noqa: E402
from benchmarks.any_models import MODELS, AnyModel, Batch  # noqa: E402
from benchmarks.plain_loop import gradients  # noqa: E402
from stagewright.executor.capture.layers import LayeredModel  # noqa: E402
from stagewright.executor.measuring.machine import MeasuringMachine  # noqa: E402
from stagewright.executor.measuring.profiling import measure_layers  # noqa: E402
from stagewright.executor.measuring.whole_models import captured_by_size  # noqa: E402
from stagewright.executor.training.data.batches import typed_inputs  # noqa: E402
from stagewright.executor.training.losses import cross_entropy, own_loss  # noqa: E402
from stagewright.formulations.checking.check import check  # noqa: E402
from stagewright.formulations.plans.pipeline import PipelineProblem  # noqa: E402
from stagewright.graphs.machines.cluster import Link, uniform_servers  # noqa: E402

pytestmark = pytest.mark.real

QUICK = ("gpt2", "resnet18", "u-net")
CPU = torch.device("cpu")
SAMPLES = 4


@dataclass(frozen=True)
class Case:
    """A model, of which ``layered`` is captured with a mini-batch."""

    one: AnyModel
    model: nn.Module
    batch: Batch
    layered: LayeredModel


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
        lambda: model, inputs, [samples], takes_loss, device=CPU, dtype=torch.float64, autocast=None
    )
    return every[samples]


@pytest.fixture(scope="module", params=any_models())
def case(request: pytest.FixtureRequest) -> Case:
    """Captured once for all tests, none of which changes what the capture has found."""
    one = request.param
    (batch,) = one.batches(SAMPLES, 1)
    model = one.make()
    return Case(one, model, batch, captured(model, batch))


def loss_of_layers(layered: LayeredModel, batch: Any) -> Tensor:
    """What the executor computes of a batch."""
    takes_loss = isinstance(batch, dict)
    values, _ = typed_inputs(batch if takes_loss else batch[0], torch.float64)
    for layer in layered.layers:
        values = layer.module(*values)
    result: Tensor = layered.result(values)
    return result if takes_loss else nn.functional.cross_entropy(result, batch[1])


def test_layers_have_the_loss_and_gradients_of_the_model(case: Case) -> None:
    """Of another mini-batch than that of the capture."""
    _, batch = case.one.batches(SAMPLES, 2)
    loss, expected = gradients(case.one.make(), batch)
    found = loss_of_layers(case.layered, batch)
    case.model.zero_grad()
    found.backward()
    assert len(case.layered.layers) >= 5
    assert found.item() == pytest.approx(loss, rel=1e-12)
    for name, parameter in case.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-14, msg=name)


def test_layers_have_the_names_of_the_state(case: Case) -> None:
    names = [name for layer in case.layered.layers for name in layer.module.state_dict()]
    assert set(names) == set(case.model.state_dict())
    assert set(case.one.make().state_dict()) == set(case.model.state_dict())


def test_profiled_models_are_planned(case: Case) -> None:
    takes_loss = isinstance(case.batch, dict)
    pair = (case.batch, ()) if takes_loss else case.batch
    chain = measure_layers(
        {SAMPLES: case.layered},
        pair,
        (SAMPLES,),
        machine=MeasuringMachine(CPU, kind="core"),
        loss=own_loss if takes_loss else cross_entropy,
        rounds=1,
    )
    state = sum(parameter.nbytes for parameter in case.model.parameters())
    assert chain.parameter_bytes.sum() >= state
    cluster = uniform_servers(1, 2, Link(1e9), kind="core")
    result = stagewright.plan(chain, cluster, 4, "pipedream", time_limit=1)
    assert result.plan is not None
    assert check(PipelineProblem(chain, cluster, 4), result.plan) == ()
