"""A captured step computes what the plain loop computes, and says what it cannot capture."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import unusual
from models import EXAMPLES, ResidualMLP, TiedTransformer, UsedTwice, vectors
from step_loop import assert_equal_to_loop
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from unusual import UNUSUAL, InPlace, SettingBuffer

from stagewright.executor.capture.steps.step import ADAM, capture_step
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.operators.step_graph import StepGraph, load_graph, save_graph

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.02),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.1, betas=(0.8, 0.95)),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}
BATCH = vectors(7)


@pytest.mark.covering
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_of_an_optimizer_are_those_of_torch(optimizer: Any, dtype: torch.dtype) -> None:
    batch = BATCH[0].to(dtype), BATCH[1]
    assert_equal_to_loop(ResidualMLP().to(dtype), batch, optimizer=optimizer)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.8, 0.95), (0.5, 0.9999)])
def test_bias_corrections_are_those_of_torch_for_thousands_of_steps(
    betas: tuple[float, float],
) -> None:
    """To the bit in single precision."""
    assert ADAM.scalars is not None
    numbers = range(1, 5001)
    steps = (torch.tensor(number - 1.0, dtype=torch.float64) for number in numbers)
    found = torch.stack([torch.stack(ADAM.scalars({"lr": 0.01, "betas": betas}, s)) for s in steps])
    expected = torch.tensor(
        [[-0.01 / (1 - betas[0] ** n), (1 - betas[1] ** n) ** 0.5] for n in numbers],
        dtype=torch.float64,
    )
    assert torch.equal(found.float(), expected.float())
    assert torch.allclose(found, expected, rtol=1e-13, atol=0)


def test_groups_of_an_optimizer_have_their_own_options() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        groups = [{"params": [first]}, {"params": others, "lr": 0.1, "betas": (0.5, 0.9)}]
        return torch.optim.AdamW(groups, lr=0.01)

    assert_equal_to_loop(ResidualMLP(), BATCH, optimizer=make)


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_steps_of_an_example_are_those_of_the_loop(example: Any) -> None:
    assert_equal_to_loop(example.build(), example.batch(4, 1))


@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss(weight=torch.rand(11))])
def test_dropout_draws_what_the_loop_draws(loss: Any) -> None:
    tokens = torch.arange(15).view(3, 5) % 11
    assert_equal_to_loop(TiedTransformer(2, dropout=0.5), (tokens, tokens), loss)


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_forward_is_captured(name: str) -> None:
    torch.manual_seed(1)
    assert_equal_to_loop(UNUSUAL[name](), BATCH)


def test_a_capture_leaves_the_model_as_it_was() -> None:
    model = InPlace()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    step = capture_step(model, BATCH)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert torch.equal(model.shift, torch.arange(4.0))
    assert "unused.weight" not in step.gradients
    counted = SettingBuffer()
    capture_step(counted, BATCH)
    assert counted.calls == 0


@pytest.mark.covering
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_dropout_between_recurrent_layers(kind: Any, bidirectional: bool) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            options = {"num_layers": 2, "dropout": 0.5, "bidirectional": bidirectional}
            self.layers = kind(6, 4, batch_first=True, **options)

        def forward(self, x: Tensor) -> Tensor:
            found, last = self.layers(x)
            last = last[0] if isinstance(last, tuple) else last
            return found[:, -1, :4] + last.sum(0)

    inputs = torch.randn(7, 2, 6, dtype=torch.float64)
    same = partial(torch.allclose, rtol=1e-12, atol=1e-15)
    assert_equal_to_loop(Recurrent().double(), (inputs, BATCH[1]), same=same)


def test_fake_models_are_captured_as_real_ones() -> None:
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        fake = capture_step(ResidualMLP(), tuple(map(mode.from_tensor, BATCH)))
    real = capture_step(ResidualMLP(), BATCH)
    assert fake.graph == real.graph


# The document


def captured(model: nn.Module | None = None) -> StepGraph:
    return capture_step(model or UsedTwice(), BATCH).graph


def test_the_document_reads_back_and_names_lines(tmp_path: Any) -> None:
    graph = captured()
    save_graph(graph, tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json") == graph
    assert graph.samples == 7
    lines = [node.line for node in graph.nodes if node.role in ("forward", "backward")]
    place = r"(tests/shared/models|stagewright/executor/training/losses)\.py:\d+( \(\S+\))?"
    assert all(re.fullmatch(place, line) for line in lines if line)
    assert lines.count(None) <= 3  # the mean of the loss
    roles = [node.role for node in graph.nodes]
    assert set(roles) == {"input", "state", "forward", "backward", "update"}
    assert "backward" not in roles[: roles.index("forward")]


def test_state_bytes_are_those_of_model_and_optimizer() -> None:
    model = UsedTwice()
    size = sum(one.nbytes for one in model.parameters())
    graph = captured(model)
    states = [node for node in graph.nodes if node.role == "state"]
    assert sum(node.state_bytes for node in states) == 3 * size + 8  # a step, in double precision
    assert all(node.state_bytes == node.outputs[0].bytes for node in states)


def test_what_changes_a_state_is_beside_it_and_after_its_readers() -> None:
    graph = captured()
    node = dict(zip(graph.index, graph.nodes, strict=True))
    base: dict[str, str] = {}
    for name, one in node.items():
        shared = bool(one.outputs) and one.outputs[0].shared
        base[name] = base[one.inputs[0][0]] if shared else name
        if shared:
            assert one.beside == one.inputs[0][0]
    changes = [one for one in graph.nodes if one.operator.endswith("_") and one.role == "update"]
    assert {base[one.name] for one in changes} == {
        one.name for one in graph.nodes if one.role == "state"
    }
    for change in changes:
        changed = base[change.name]
        readers = {
            one.name
            for one in graph.nodes[: graph.index[change.name]]
            if changed in {base[source] for source, _ in one.inputs}
        }
        assert readers <= set(change.after) | {source for source, _ in change.inputs}


# Refusals


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (unusual.Branching, r"unusual.py:LINE: reads a value of a tensor \(aten._local"),
        (unusual.Selecting, r"unusual.py:LINE: makes a tensor whose shape depends on values"),
        (unusual.Counting, r"the forward changes 'calls' of Counting \(keep it in a buffer\)"),
        (unusual.ChangingInput, r"the forward changes tensor 0 of the mini-batch in place"),
        (unusual.ChangingParameter, r"the forward changes the parameter 'layer.weight' in place"),
        (unusual.ChangingConstant, r"neither a parameter nor a buffer; register it as a buffer"),
        (unusual.Replacing, r"neither a parameter nor a buffer; register it as a buffer"),
        (unusual.LeavingTorch, r"unusual.py:LINE: the step cannot be traced: RuntimeError"),
        (unusual.Printing, r"unusual.py:LINE: reads a value of a tensor"),
        (unusual.Hooked, "parameter 'layer.weight' has a hook on its gradient; remove the hook"),
        (unusual.Overlapping, "'layer.weight' and 'part' share memory but are different tensors"),
        (unusual.Sparse, "gradient of 'table.weight' is sparse; make it with sparse=False"),
        (lambda: nn.LazyLinear(4), "parameter 'weight' has no shape yet; call the model once"),
        (unusual.Packed, r"unusual.py:LINE: makes a tensor whose shape depends on values"),
    ],
)
def test_a_model_that_is_no_graph_is_refused_in_one_line(model: Any, message: str) -> None:
    with open(unusual.__file__) as source:
        marked = [number for number, text in enumerate(source, 1) if "# this line" in text]
    first = getattr(model, "forward", test_other_bad_inputs_are_refused).__code__.co_firstlineno
    line = next((number for number in marked if number > first), 0)
    with pytest.raises(InputError, match=message.replace("LINE", str(line))) as caught:
        capture_step(model(), BATCH)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.RMSprop, "RMSprop is not captured; there are SGD, Adam, AdamW"),
        (partial(torch.optim.Adam, amsgrad=True), "Adam with amsgrad=True is not captured"),
        (partial(torch.optim.SGD, momentum=0.9, dampening=0.1), "SGD with dampening=0.1 is not"),
        (partial(torch.optim.AdamW, lr=torch.tensor(0.1)), "AdamW with a tensor as lr is not"),
    ],
)
def test_an_optimizer_that_is_not_known_is_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        capture_step(ResidualMLP(), BATCH, optimizer=optimizer)


def test_other_bad_inputs_are_refused() -> None:
    with pytest.raises(InputError, match="the model is a int, not a torch module"):
        capture_step(3, BATCH)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the loss must be a tensor of one number"):
        capture_step(ResidualMLP(), BATCH, loss=lambda y, _: y)
    with pytest.raises(InputError, match="Flatten has no parameters to train"):
        capture_step(nn.Flatten(), BATCH)
    with pytest.raises(InputError, match=r"a mini-batch is a pair \(inputs, targets\)"):
        capture_step(ResidualMLP(), BATCH[0])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="first tensor of a mini-batch has no samples in axis 0"):
        capture_step(ResidualMLP(), (torch.tensor(1.0), BATCH[1]))
    with pytest.raises(InputError, match="a mini-batch has something other than tensors"):
        capture_step(ResidualMLP(), (BATCH[0], [1, 2]))
