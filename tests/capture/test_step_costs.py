"""Times of captured operators, which run in any order, and whose plan divides a model."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fastt import MODELS
from models import ResidualMLP, WithBatchNorm, vectors
from profiles import slow_after
from step_loop import STEPS, plain_loop
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from stagewright.executor.capture.layers import PLANS, plans_in
from stagewright.executor.capture.steps.analytic import operation, with_analytic_seconds
from stagewright.executor.capture.steps.document import operators
from stagewright.executor.capture.steps.joint import identifier
from stagewright.executor.capture.steps.parts import run_part
from stagewright.executor.capture.steps.step import (
    CapturedStep,
    capture_step,
    resized,
    without_values,
)
from stagewright.executor.measuring.machine import MeasuringMachine
from stagewright.executor.measuring.profiling import measure_operators
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.operators.step_graph import Node, StepGraph, data_parallel

DESCENT = torch.optim.SGD


def works(step: CapturedStep) -> dict[str, Any]:
    return {node.name: operation(node, 4) for node in operators(step.module.graph)}


@pytest.mark.parametrize("name", ["vgg", "bert"])
def test_flops_are_those_that_torch_counts_in_the_loop(name: str) -> None:
    build, batch = MODELS[name]
    model = build()
    step = capture_step(model, batch, optimizer=DESCENT)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(batch[0]), batch[1]).backward()
    assert sum(one.flops for one in works(step).values()) == counter.get_total_flops()


def test_seconds_of_known_operators() -> None:
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.ReLU())
    batch = torch.randn(16, 64), torch.randint(32, (16,))
    step = capture_step(model, batch, optimizer=DESCENT)
    found = {node.name: node for node in with_analytic_seconds(step, ["V100", "k80"]).nodes}
    moved = 4 * (16 * 64 + 64 * 32 + 16 * 32)
    assert works(step)["mm"].flops == 2 * 16 * 64 * 32
    bounds = 2 * 16 * 64 * 32 / (15.7e12 * 0.5), moved / (900e9 * 0.75)
    assert found["mm"].seconds["v100"] == pytest.approx(max(bounds))
    assert found["relu"].seconds["k80"] == pytest.approx(4 * 2 * 16 * 32 / (240e9 * 0.75))
    free = [one.name for one in found.values() if one.seconds["v100"] == 0]
    assert free == [
        one.name
        for one in found.values()
        if one.role in ("state", "input") or one.operator in ("aten.t", "aten.view")
    ]
    with pytest.raises(InputError, match="device 'abacus' is not known"):
        with_analytic_seconds(step, ["abacus"])


def test_a_look_up_reads_rows_and_not_the_table() -> None:
    model = nn.Sequential(nn.Embedding(1000, 8), nn.Flatten())
    batch = torch.randint(1000, (4, 2)), torch.randint(16, (4,))
    found = works(capture_step(model, batch, optimizer=DESCENT))
    assert found["embedding"].moved * 4 == 2 * 4 * 2 * 8 * 4 + 4 * 2 * 8


def test_measured_seconds_leave_the_states_as_they_are() -> None:
    step = capture_step(ResidualMLP(), vectors(8))
    before = {name: one.clone() for name, one in step.states.items()}
    graph = measure_operators(
        step, vectors(8), MeasuringMachine(torch.device("cpu"), 1, "cpu"), rounds=2
    )
    assert all(torch.equal(step.states[name], one) for name, one in before.items())
    assert graph.source.startswith("measured: ")
    for node in graph.nodes:
        assert (node.seconds["cpu"] > 0) == (node.role not in ("state", "input")), node.name


# Models and mini-batches of factories


def test_a_factory_that_reads_values_makes_a_real_model() -> None:
    def make() -> nn.Module:
        widths = torch.linspace(6, 4, 2).int().tolist()
        return nn.Linear(*widths)

    model, batch = without_values(make, vectors(3))
    assert not isinstance(next(model.parameters()), FakeTensor)
    assert capture_step(model, batch).graph == capture_step(nn.Linear(6, 4), vectors(3)).graph
    model, batch = without_values(ResidualMLP, vectors(3))
    assert all(isinstance(one, FakeTensor) for one in (*model.parameters(), *batch))


def test_a_batch_is_repeated_or_cut() -> None:
    inputs, targets = vectors(3)
    (first, second), last = resized(((inputs, targets), targets), 5)
    assert torch.equal(first, inputs[[0, 1, 2, 0, 1]])
    assert torch.equal(second, last)
    assert torch.equal(resized((inputs, targets), 2)[0], inputs[:2])
    with pytest.raises(InputError, match=r"tensors of a mini-batch have \[2, 3\] samples"):
        resized((inputs, targets[:2]), 5)
    with pytest.raises(InputError, match="other than tensors with samples in axis 0"):
        resized((inputs, torch.tensor(3)), 5)


class OfLibrary(nn.Linear):
    """A model with the plan of its architecture, as those of transformers have it."""

    def __init__(self, plan: Any) -> None:
        super().__init__(2, 2)
        self._tp_plan = plan

    @property
    def tp_plan(self) -> Any:
        """The plan."""
        return self._tp_plan


class Wrapper(nn.Module):
    """A module around another."""

    def __init__(self, inner: nn.Module, plan: Any = None) -> None:
        super().__init__()
        self.inner = inner
        if plan is not None:
            self.tp_plan = plan


def outer(plan: Any, inner: nn.Module) -> OfLibrary:
    model = OfLibrary(plan)
    model.inner = inner
    return model


def found(model: nn.Module) -> list[tuple[str, str, Any, bool]]:
    return [(one.path, one.kind, one.rules, one.is_of_architecture) for one in plans_in(model)]


ONE, OTHER = {"a": "colwise"}, {"b": "rowwise"}


def test_the_outermost_model_of_the_library_has_the_plan() -> None:
    model = outer(ONE, Wrapper(OfLibrary(OTHER)))
    assert found(model) == [("", "OfLibrary", ONE, True)]
    assert found(Wrapper(model)) == [("inner", "OfLibrary", ONE, True)]
    assert found(outer({}, OfLibrary(OTHER))) == [("inner", "OfLibrary", OTHER, True)]
    assert found(OfLibrary(None)) == []


def test_a_module_of_the_users_has_its_own() -> None:
    model = outer(ONE, Wrapper(nn.Linear(2, 2), OTHER))
    assert found(model) == [("", "OfLibrary", ONE, True), ("inner", "Wrapper", OTHER, False)]
    assert found(Wrapper(nn.Linear(2, 2), {})) == [("", "Wrapper", {}, False)]


def test_an_architecture_without_a_plan_may_have_one_here() -> None:
    (name,) = PLANS
    module, _, kind = name.rpartition(".")
    block = type(kind, (nn.Linear,), {"__module__": module, "__qualname__": kind})(2, 2)
    assert found(Wrapper(block)) == [("inner", kind, PLANS[name], False)]
    block.tp_plan = ONE
    assert found(Wrapper(block)) == [("inner", kind, ONE, False)]


@pytest.mark.parametrize(
    ("path", "name", "inner"),
    [
        ("", "a.b", "a.b"),
        ("a", "a.b", "b"),
        ("a", "a", ""),
        ("a", "ab.c", None),
        ("a.b", "a", None),
    ],
)
def test_names_within_a_module(path: str, name: str, inner: str | None) -> None:
    model: nn.Module = Wrapper(nn.Linear(2, 2), ONE)
    for part in reversed(path.split(".") if path else []):
        around = nn.Module()
        around.add_module(part, model)
        model = around
    (plan,) = plans_in(model)
    assert plan.path == path
    assert plan.inner(name) == inner


def any_order(graph: StepGraph, seed: int, *, keep_after: bool = True) -> list[Node]:
    """The operators in a random order in which each is after those that the document names."""
    chosen = random.Random(seed)
    left = {
        node.name: {name for name, _ in node.inputs} | set(node.after if keep_after else ())
        for node in graph.nodes
    }
    found = []
    while left:
        ready = [name for name, before in left.items() if not before & left.keys()]
        for name in chosen.sample(ready, (len(ready) + 1) // 2):
            found.append(graph.nodes[graph.index[name]])
            del left[name]
    return found


def carried_out(
    nodes: Sequence[Node], step: CapturedStep, batch: Any, states: dict[str, Tensor]
) -> None:
    """Run operators, of which replica r has the r-th part of the batch."""
    traced = {one.name: one for one in operators(step.module.graph)}
    share = step.graph.samples
    made: dict[tuple[str, int], Any] = {}
    for node in nodes:
        name, _, place = node.name.partition("@")
        given = [made[source] for source in node.inputs]
        if node.role == "input":
            first = int(place or 0) * share
            made[node.name, 0] = tree_leaves(batch)[int(name[-1])][first : first + share]
        elif node.role == "state":
            made[node.name, 0] = states[node.name]
        elif node.operator in ("mean", "all_reduce"):
            mean = torch.stack(given).mean(0)
            made |= {(node.name, i): mean.clone() for i in range(len(node.outputs))}
        else:
            results = enumerate(run_part(traced[name], given))
            made |= {(node.name, i): result for i, result in results}


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.double()


CASES = {
    "mlp": (ResidualMLP, vectors(7)),
    "batch-norm": (WithBatchNorm, vectors(7)),
    "lenet": MODELS["lenet"],
    "transformer": MODELS["transformer"],
}


@pytest.mark.parametrize("name", slow_after(3, CASES))
def test_any_order_of_the_document_takes_the_step(name: str) -> None:
    """And without ``after`` some order does not: a weight is updated before it is read."""
    build, batch = CASES[name]
    inputs, targets = batch
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        inputs = inputs.double()
    torch.manual_seed(2)
    step = capture_step(without_dropout(build()), (inputs, targets))
    expected = {key: one.clone() for key, one in step.states.items()}
    step.run(expected, (inputs, targets))

    def is_step(seed: int, **options: bool) -> bool:
        states = {key: one.clone() for key, one in step.states.items()}
        order = any_order(step.graph, seed, **options)
        carried_out(order, step, (inputs, targets), states)
        return all(torch.equal(states[key], one) for key, one in expected.items())

    assert all(is_step(seed) for seed in range(5))
    assert not all(is_step(seed, keep_after=False) for seed in range(20))


@pytest.mark.parametrize("weights", ["shared", "mirrored"])
def test_replicas_together_take_the_step_of_the_whole_batch(weights: Any) -> None:
    model = ResidualMLP().double()
    inputs, targets = vectors(12)
    batch = inputs.double(), targets
    step = capture_step(model, (batch[0][:4], targets[:4]), loss=F.cross_entropy)
    graph = data_parallel(step.graph, 3, weights)
    places = [f"@{i}" for i in range(3)] if weights == "mirrored" else [""]
    states = {name + place: one.clone() for name, one in step.states.items() for place in places}
    for seed in range(STEPS):
        carried_out(any_order(graph, seed), step, batch, states)
    plain_loop(model, batch, F.cross_entropy, torch.optim.AdamW)
    for name, one in model.named_parameters():
        for place in places:
            found = states[identifier(name) + place]
            assert torch.allclose(found, one, rtol=1e-9, atol=1e-12), name
