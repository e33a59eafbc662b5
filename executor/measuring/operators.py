"""Measured times of captured operators, node by node."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only

from stagewright.executor.capture.steps.step import CapturedStep
from stagewright.executor.measuring.machine import MeasuringMachine, Seconds, rounded, threads
from stagewright.executor.measuring.profiling import WARM_UP
from stagewright.graphs.models.operators.step_graph import StepGraph


class _Timing(fx.Interpreter):
    """Times every operator once per run."""

    def __init__(self, module: fx.GraphModule, machine: MeasuringMachine) -> None:
        super().__init__(module)
        self.machine = machine
        self.seconds: dict[str, Seconds] = {}

    def run_node(self, n: fx.Node) -> Any:
        if not isinstance(n.target, torch._ops.OpOverload):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        target = n.target
        self.seconds[n.name], result = self.machine.timed(lambda: target(*args, **kwargs))
        return result


def measure_operators(
    step: CapturedStep,
    batch: tuple[Any, Any],
    machine: MeasuringMachine,
    *,
    rounds: int = 9,
    on_progress: Callable[[str], None] = lambda _: None,
) -> StepGraph:
    """The step's graph with the median time of every operator in ``rounds`` steps.

    The states of ``step`` are real tensors; they stay as they are. The clock's time and, for views,
    the call's are included: on a processor no operator is free.
    """
    states = tree_map_only(Tensor, lambda one: one.to(machine.device, copy=True), step.states)
    inputs = [one.to(machine.device) for one in tree_leaves(batch)]
    timing = _Timing(step.module, machine)
    found: list[dict[str, float]] = []
    with threads(machine.threads), torch.no_grad():
        for i in range(WARM_UP + rounds):
            on_progress(f"step {i + 1} of {WARM_UP + rounds}")
            timing.run(*states.values(), *inputs)
            found.append({name: one() for name, one in timing.seconds.items()})
    medians = {
        name: rounded(float(np.median([one[name] for one in found[WARM_UP:]])))
        for name in timing.seconds
    }
    nodes = tuple(
        replace(node, seconds=node.seconds | {machine.device_kind: medians.get(node.name, 0.0)})
        for node in step.graph.nodes
    )
    return replace(
        step.graph,
        nodes=nodes,
        source=f"measured: {machine}, torch {torch.__version__}, median of {rounds}",
    )
