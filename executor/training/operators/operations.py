"""The operators of a placed graph on real tensors."""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from stagewright.executor.capture.steps.document import operators
from stagewright.executor.capture.steps.parts import captured_outputs, cut, joined, run_part
from stagewright.executor.capture.steps.step import CapturedStep
from stagewright.executor.programs.operators.placed import PlacedGraph, Value
from stagewright.executor.training.operators.layouts import END, Layout
from stagewright.executor.training.operators.matching import replicas_of

Values = list[Tensor | None]
Operation = Callable[[Sequence[Tensor]], Values]


class Operations:
    """The computations of a placed graph's operators.

    Parameters
    ----------
    step
        The captured step whose nodes they are; copies of replicas are called ``NAME@r``.
    """

    def __init__(self, placed: PlacedGraph, step: CapturedStep) -> None:
        self._placed, self._replicas = placed, replicas_of(placed.plan)
        self._captured = {node.name: node for node in operators(step.module.graph)}
        values = (node.meta["val"] for node in step.module.graph.nodes if "val" in node.meta)
        self._mode = next(one.fake_mode for one in values if isinstance(one, FakeTensor))
        self._fakes: dict[int, Values] = {}

    def captured(self, name: str) -> fx.Node:
        """The captured node of an operator, of its parts and of its copies."""
        return self._captured[name.partition("/")[0].partition("@")[0]]

    def operation(self, n: int) -> Operation:
        """The function of operator ``n`` from its inputs to its outputs."""
        node = self._placed.nodes[n]
        whole, _, part = node.name.partition("/")
        if whole not in self._placed.divided or not part:
            if node.operator in ("mean", "all_reduce"):
                return partial(_mean, copies=len(node.outputs))
            if node.operator in ("accumulate", "scale"):
                return partial(_added, over=self._replicas if node.operator == "scale" else 1)
            return partial(run_part, self.captured(node.name))
        split, parts = self._placed.divided[whole]
        if node.operator == "cut":
            axis = split.inputs[int(part.removeprefix("cut"))]
            return lambda inputs: list(cut(inputs[0], axis, parts))
        if node.operator in ("add", "concatenate"):
            number = int(part.removeprefix("join"))
            one = self.captured(node.name)
            return lambda inputs: [joined(one, number, inputs, split.outputs[number])]
        return partial(run_part, self.captured(node.name))

    def draws(self, n: int) -> bool:
        """Whether an operator draws random numbers."""
        node = self._placed.nodes[n]
        if not node.operator.startswith("aten."):
            return False
        target: Any = self.captured(node.name).target
        return torch.Tag.nondeterministic_seeded in target.tags

    def layout(self, value: Value) -> Layout:
        """The layout of a value that is sent."""
        n, output = value
        if value == self._placed.end(n):
            return END
        found = self._fake(n)[output]
        assert found is not None
        # A piece would have the strides of the whole: a copy needs no room for the other pieces.
        return Layout.of(found.contiguous() if self._placed.nodes[n].operator == "cut" else found)

    def _fake(self, n: int) -> Values:
        """The outputs of an operator without values."""
        if n not in self._fakes:
            name = self._placed.nodes[n].name
            if "/" not in name and name.partition("@")[0] in self._captured:
                self._fakes[n] = captured_outputs(self.captured(name))
            else:
                given = [self._fake(maker)[output] for maker, output in self._placed.inputs[n]]
                with self._mode:
                    self._fakes[n] = self.operation(n)(given)  # type: ignore[arg-type]
        return self._fakes[n]


def _added(inputs: Sequence[Tensor], over: int) -> Values:
    """The sum of gradients, over a number of replicas."""
    total = reduce(torch.add, inputs)
    return [total / over if over > 1 else total]


def _mean(inputs: Sequence[Tensor], copies: int) -> Values:
    """The mean of the replicas' gradients, added up in their order."""
    return [reduce(torch.add, inputs) / len(inputs)] * copies
