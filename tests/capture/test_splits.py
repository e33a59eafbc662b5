"""Every split that an operator claims gives what the whole operator gives."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fastt import MODELS
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples, slow_after
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from stagewright.executor.capture.steps.document import RULES, results_of, splits_of, tensor_inputs
from stagewright.executor.capture.steps.parts import cut, joined, run_part
from stagewright.executor.capture.steps.step import capture_step
from stagewright.graphs.models.operators.step_graph import Split

aten = torch.ops.aten
SIZES = st.integers(1, 5)
QUICK = ("alexnet", "vgg", "rnnlm", "bert")  # the others' steps are quick tests


def run_split(
    node: fx.Node, split: Split, inputs: Sequence[Tensor], parts: int
) -> list[Tensor | None]:
    """The outputs of ``node``, computed in ``parts`` along ``split`` and put together."""
    pieces = [cut(one, axis, parts) for one, axis in zip(inputs, split.inputs, strict=True)]
    results = [run_part(node, given) for given in zip(*pieces, strict=True)]
    return [
        joined(node, number, [result[number] for result in results], axis)
        for number, axis in enumerate(split.outputs)
    ]


def assert_splits_hold(node: fx.Node, inputs: list[Tensor], whole: list[Any]) -> int:
    """Compare with 2 parts and with several; the number of splits."""
    splits = splits_of(node)
    for split in splits:
        for parts in {2, min(split.size, 5)}:
            found = run_split(node, split, inputs, parts)
            for one, other, axis in zip(found, whole, split.outputs, strict=True):
                assert (one is None) == (other is None)
                if one is None:
                    continue
                assert one.shape == other.shape
                assert axis is None or one.shape[axis] >= 2
                assert torch.allclose(one, other, rtol=1e-9, atol=1e-9), (node, split, parts)
    return len(splits)


class Checking(fx.Interpreter):
    """Runs a graph, and every operator again in parts."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(n.target, torch._ops.OpOverload) and splits_of(n):
            inputs = [self.env_of(*one) for one in tensor_inputs(n)]
            whole = list(result) if isinstance(result, list | tuple) else [result]
            self.checked = getattr(self, "checked", 0) + assert_splits_hold(n, inputs, whole)
        return result

    def env_of(self, node: fx.Node, number: int) -> Tensor:
        value = self.env[node]
        return value[number] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("name", slow_after(4, sorted(MODELS, key=lambda name: name not in QUICK)))
def test_splits_of_a_model_hold(name: str) -> None:
    build, (inputs, targets) = MODELS[name]
    torch.manual_seed(0)
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        inputs = inputs.double()
    step = capture_step(build().double(), (inputs, targets))
    given_inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    values = [one.clone() for one in step.states.values()]
    interpreter = Checking(step.module, garbage_collect_values=False)
    interpreter.run(*values, *given_inputs, targets)
    assert interpreter.checked == sum(len(node.splits) for node in step.graph.nodes) > 20


# Operators by themselves


def traced(function: Callable[..., Any], *tensors: Tensor, role: str = "forward") -> fx.Node:
    """The last operator of ``function``."""
    graph = make_fx(function)(*tensors).graph
    nodes = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    for node in graph.nodes:
        node.meta["role"] = "input" if node.op == "placeholder" else role
    return nodes[-1]


def check(function: Callable[..., Any], *tensors: Tensor, role: str = "forward") -> int:
    node = traced(function, *tensors, role=role)
    found = dict(zip(node.graph.find_nodes(op="placeholder"), tensors, strict=True))
    inputs = [found[one] for one, _ in tensor_inputs(node)]
    result = function(*tensors)
    whole = list(result) if isinstance(result, list | tuple) else [result]
    assert len(whole) == len(results_of(node))
    return assert_splits_hold(node, inputs, whole)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@examples(40)
@given(SIZES, SIZES, SIZES, SIZES)
def test_products(b: int, m: int, k: int, n: int) -> None:
    assert check(aten.mm.default, drawn(m, k), drawn(k, n)) == (m > 1) + (n > 1)
    assert check(aten.bmm.default, drawn(b, m, k), drawn(b, k, n)) == (b > 1) + (n > 1)
    for bias in ((n,), (1, n), (m, n), (m, 1), ()):
        check(aten.addmm.default, drawn(*bias), drawn(m, k), drawn(k, n))


@examples(40)
@given(SIZES, SIZES, SIZES)
def test_gradients_of_weights_are_added_over_the_batch(n: int, k: int, m: int) -> None:
    def weight(gradient: Tensor, x: Tensor) -> Tensor:
        return aten.mm.default(aten.t.default(gradient), x)

    gradient, x = drawn(n, m), drawn(n, k)
    node = traced(weight, gradient, x, role="backward")
    whole = weight(gradient, x)
    assert assert_splits_hold(node, [gradient.t(), x], [whole]) == (n > 1) + (m > 1)


@examples(40)
@given(SIZES, SIZES, SIZES, st.integers(1, 3), st.booleans(), st.booleans())
def test_convolutions(n: int, c: int, o: int, size: int, bias: bool, transposed: bool) -> None:
    x = drawn(n, c, 6, 5)
    weight = drawn(c, o, size, size) if transposed else drawn(o, c, size, size)
    options = ([1, 2], [1, 1], [1, 1], transposed, [0, 0], 1)

    def forward(x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return aten.convolution.default(x, weight, bias[0] if bias else None, *options)

    given_bias = [drawn(o)] if bias else []
    assert check(forward, x, weight, *given_bias) == (n > 1) + (o > 1)
    gradient = torch.randn_like(forward(x, weight, *given_bias))
    for mask in ([True, True, True], [False, True, bias]):
        backward = convolution_backward(o, options, mask)
        assert check(backward, gradient, x, weight) == (n > 1) + (o > 1)


def convolution_backward(channels: int, options: Any, mask: list[bool]) -> Callable[..., Any]:
    def backward(gradient: Tensor, x: Tensor, weight: Tensor) -> Any:
        operator = aten.convolution_backward.default
        return operator(gradient, x, weight, [channels], *options, mask)

    return backward


def test_a_grouped_convolution_is_not_split() -> None:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return aten.convolution.default(x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 2)

    assert check(forward, drawn(4, 4, 5, 5), drawn(4, 2, 3, 3)) == 0


@examples(30)
@given(SIZES, SIZES, SIZES)
def test_norms(n: int, c: int, s: int) -> None:
    x, scale, shift = drawn(n, c, s + 1), drawn(c), drawn(c)
    mean, variance = drawn(c), drawn(c).abs()

    def batch_norm(*given: Tensor) -> Any:
        return aten._native_batch_norm_legit_functional.default(*given, True, 0.1, 1e-5)

    assert check(batch_norm, x, scale, shift, mean, variance) == (c > 1)
    _, saved, deviation, *_ = batch_norm(x, scale, shift, mean, variance)

    def batch_norm_backward(*given: Tensor) -> Any:
        return aten.native_batch_norm_backward.default(*given, True, 1e-5, [True] * 3)

    given_all = (drawn(*x.shape), x, scale, mean, variance, saved, deviation)
    assert check(batch_norm_backward, *given_all) == (c > 1)
    scale, shift = drawn(s + 1), drawn(s + 1)

    def layer_norm(x: Tensor, scale: Tensor, shift: Tensor) -> Any:
        return aten.native_layer_norm.default(x, [s + 1], scale, shift, 1e-5)

    assert check(layer_norm, x, scale, shift) == (n > 1)
    _, mean, deviation = layer_norm(x, scale, shift)

    def layer_norm_backward(
        gradient: Tensor, x: Tensor, mean: Tensor, deviation: Tensor, a: Tensor, b: Tensor
    ) -> Any:
        return aten.native_layer_norm_backward.default(
            gradient, x, [s + 1], mean, deviation, a, b, [True] * 3
        )

    assert check(layer_norm_backward, drawn(*x.shape), x, mean, deviation, scale, shift) == (n > 1)


def test_a_norm_of_whole_tensors_is_not_split() -> None:
    def layer_norm(x: Tensor) -> Any:
        return aten.native_layer_norm.default(x, [4, 3], None, None, 1e-5)

    assert check(layer_norm, drawn(4, 3)) == 0


@examples(30)
@given(SIZES, SIZES)
def test_pooling(n: int, c: int) -> None:
    x = drawn(n, c, 6, 6)
    expected = (n > 1) + (c > 1)

    def pool(x: Tensor) -> Any:
        return aten.max_pool2d_with_indices.default(x, [3, 3], [2, 2], [1, 1])

    assert check(pool, x) == expected
    y, indices = pool(x)

    def unpool(gradient: Tensor, x: Tensor, indices: Tensor) -> Any:
        return aten.max_pool2d_with_indices_backward.default(
            gradient, x, [3, 3], [2, 2], [1, 1], [1, 1], False, indices
        )

    assert check(unpool, torch.randn_like(y), x, indices) == expected
    assert check(lambda x: aten.avg_pool2d.default(x, [2, 2]), x) == expected

    def spread(gradient: Tensor, x: Tensor) -> Any:
        return aten.avg_pool2d_backward.default(
            gradient, x, [2, 2], [2, 2], [0, 0], False, True, None
        )

    assert check(spread, drawn(n, c, 3, 3), x) == expected
    assert check(lambda x: aten._adaptive_avg_pool2d.default(x, [4, 4]), x) == expected
    backward = aten._adaptive_avg_pool2d_backward.default
    assert check(backward, drawn(n, c, 4, 4), x) == expected


@examples(60)
@given(st.lists(SIZES, min_size=1, max_size=4), st.data())
def test_operators_along_an_axis(shape: list[int], data: Any) -> None:
    x, y = drawn(*shape), drawn(*shape)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    keeps = data.draw(st.booleans())
    axes = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True))
    check(lambda x: aten._softmax.default(x, axis, False), x)
    check(lambda x: aten._log_softmax.default(x, axis, False), x)
    double = torch.float64
    check(lambda x, y: aten._softmax_backward_data.default(x, y, axis, double), x, y)
    check(lambda x, y: aten._log_softmax_backward_data.default(x, y, axis, double), x, y)
    check(lambda x, y: aten.cat.default([x, y], axis), x, y)
    check(lambda none, x, y: aten.cat.default([none, x, y], axis), drawn(0), x, y)
    check(lambda x: aten.sum.dim_IntList(x, axes, keeps), x)
    check(lambda x: aten.mean.dim(x, axes, keeps), x)
    check(aten.clone.default, x)
    check(lambda x, y: aten.native_dropout_backward.default(x, y, 2.0), x, y > 0)


@examples(40)
@given(st.lists(SIZES, min_size=1, max_size=4), st.data())
def test_elementwise_operators_that_broadcast(shape: list[int], data: Any) -> None:
    other = [data.draw(st.sampled_from([1, size])) for size in shape]
    other = other[data.draw(st.integers(0, len(shape))) :]
    x, y = drawn(*shape), drawn(*other)
    for function in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.maximum.default):
        check(function, x, y)
        check(function, y, x)
    check(lambda x: aten.threshold_backward.default(x, x, 0), x)
    check(aten.gelu.default, x)
    check(aten.where.self, y > 0, x, y)


@examples(30)
@given(SIZES, SIZES, SIZES, st.booleans())
def test_embeddings(n: int, length: int, width: int, one_axis: bool) -> None:
    tokens = torch.randint(7, (n,) if one_axis else (n, length))
    assert check(aten.embedding.default, drawn(7, width), tokens) == (n > 1) + (width > 1)

    backward = aten.embedding_dense_backward.default
    gradient = drawn(*tokens.shape, width)
    assert check(lambda x, y: backward(x, y, 7, 3, False), gradient, tokens) == (n > 1) + (
        width > 1
    )
    assert check(lambda x, y: backward(x, y, 7, 3, True), gradient, tokens) == 0


@examples(30)
@given(SIZES, st.integers(0, 2), st.booleans(), st.booleans())
def test_cross_entropy(n: int, reduction: int, plane: bool, weighted: bool) -> None:
    shape = (n, 4, 2, 3) if plane else (n, 4)
    x = drawn(*shape).log_softmax(1)
    targets = torch.randint(4, (n, *shape[2:]))
    targets[0] = -100
    forward = aten.nll_loss2d_forward.default if plane else aten.nll_loss_forward.default
    backward = aten.nll_loss2d_backward.default if plane else aten.nll_loss_backward.default
    weight = [drawn(4).abs()] if weighted else []

    def loss(x: Tensor, targets: Tensor, *weight: Tensor) -> Any:
        return forward(x, targets, weight[0] if weight else None, reduction, -100)

    def gradient(one: Tensor, x: Tensor, targets: Tensor, total: Tensor, *weight: Tensor) -> Any:
        given_weight = weight[0] if weight else None
        return backward(one, x, targets, given_weight, reduction, -100, total)

    assert check(loss, x, targets, *weight) == (reduction == 2 and n > 1)
    y, total = loss(x, targets, *weight)
    found = check(gradient, torch.ones_like(y), x, targets, total, *weight)
    assert found == (reduction > 0 and n > 1)


@examples(10)
@given(SIZES, SIZES, st.booleans())
def test_fused_attention(n: int, heads: int, causal: bool) -> None:
    query, key, value = (drawn(n, heads, 5, 4) for _ in range(3))
    expected = (n > 1) + (heads > 1)

    def forward(*given: Tensor) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu.default(*given, 0.0, causal)

    assert check(forward, query, key, value) == expected
    out, sums = forward(query, key, value)

    def backward(*given: Tensor) -> Any:
        operator = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        return operator(*given, 0.0, causal)

    assert check(backward, torch.randn_like(out), query, key, value, out, sums) == expected


def test_operators_that_draw_are_not_split() -> None:
    def dropout(x: Tensor) -> Any:
        return aten.native_dropout.default(x, 0.5, True)

    assert splits_of(traced(dropout, drawn(4, 4))) == ()
    assert splits_of(traced(lambda x: aten.bernoulli.p(x, 0.5), drawn(4, 4))) == ()


def test_every_rule_is_tested() -> None:
    with open(__file__) as source:
        text = source.read()
    assert all(f"aten.{str(one).removeprefix('aten.')}" in text for one in RULES)
