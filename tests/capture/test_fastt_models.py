"""The nine models of FastT's table 1: equal to the plain loop when small, captured when large."""

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from fastt import MODELS, RECURRENT, texts
from profiles import slow_after
from step_loop import assert_equal_to_loop
from torch._subclasses.fake_tensor import FakeTensor

from stagewright.executor.capture.steps.analytic import with_analytic_seconds
from stagewright.executor.capture.steps.step import capture_step, resized, without_values
from stagewright.executor.training.losses import cross_entropy

pytestmark = pytest.mark.real

QUICK = ("lenet", "resnet", "rnnlm", "transformer")  # the others' splits are quick tests
CASES = [
    *((name, torch.float64) for name in sorted(MODELS, key=lambda name: name not in QUICK)),
    *((name, torch.float32) for name in MODELS if name not in RECURRENT),
]


@pytest.mark.parametrize(("name", "dtype"), slow_after(4, CASES))
def test_a_step_is_that_of_the_loop(name: str, dtype: torch.dtype) -> None:
    """To the bit, dropout and batch norm included."""
    build, (inputs, targets) = MODELS[name]
    torch.manual_seed(5)
    if isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
        inputs = inputs.to(dtype)
    assert_equal_to_loop(build().to(dtype), (inputs, targets), cross_entropy)


@pytest.mark.parametrize("name", slow_after(1, RECURRENT))
def test_a_step_in_single_precision_is_close(name: str) -> None:
    """torch runs a recurrent module in one kernel, the graph time step by time step."""
    build, batch = MODELS[name]
    torch.manual_seed(5)
    descent = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    same = partial(torch.allclose, rtol=1e-5, atol=1e-7)
    assert_equal_to_loop(build(), batch, cross_entropy, descent, same)


PUBLISHED = {
    "vision:inception_v3": ("large_images", 64, 23.8),
    "vision:vgg19": ("images", 64, 143.7),
    "vision:resnet200": ("images", 32, 64.7),
    "vision:lenet": ("digits", 256, 3.27),
    "vision:alexnet": ("images", 256, 61.1),
    "language:gnmt4": ("gnmt_batches", 128, 225.6),
    "language:rnnlm": ("rnnlm_batches", 64, 66.0),
    "language:transformer": ("transformer_batches", 64, 61.5),
    "language:bert_large": ("bert_batches", 16, 335.2),
}
"""Data, samples (of the Transformer 64 sentences, 4096 tokens) and millions of parameters."""


@pytest.mark.parametrize("name", slow_after(0, PUBLISHED))
def test_a_published_size_is_captured_without_memory(name: str) -> None:
    data, samples, millions = PUBLISHED[name]
    module, _, factory = name.partition(":")
    found = importlib.import_module(f"examples.fastt.{module}")
    batch = resized(next(getattr(found, data)()), samples)
    model, batch = without_values(getattr(found, factory), batch)
    step = capture_step(model, batch, optimizer=torch.optim.SGD)
    assert all(isinstance(one, FakeTensor) for one in step.states.values())
    parameters = sum(one.numel() for one in model.parameters())
    assert parameters / 1e6 == pytest.approx(millions, rel=0.01)
    graph = with_analytic_seconds(step, ["v100"])
    assert graph.samples == samples
    busy = sum(node.seconds["v100"] for node in graph.nodes)
    divisible = sum(node.seconds["v100"] for node in graph.nodes if node.splits)
    assert divisible > 0.8 * busy


def test_gpt2_of_transformers_is_captured() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 8, "vocab_size": 50}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).double()

    def loss(outputs: Any, targets: Any) -> Any:
        return cross_entropy(outputs.logits.transpose(1, 2), targets)

    assert_equal_to_loop(model, texts(), loss)
