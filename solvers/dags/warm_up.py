"""Compilation of the kernels of operator graphs before a time limit starts."""

from functools import cache, partial

import numpy as np

from stagewright.formulations.dags.latency import LatencyProblem
from stagewright.formulations.dags.piper import Edge, LayerOption, PiperLayer, PiperProblem
from stagewright.formulations.dags.problem import DagProblem, DevicePool, Tensor
from stagewright.solvers.dags.latency_search import LatencySearch
from stagewright.solvers.dags.partition import partition
from stagewright.solvers.dags.phases import partition_phases
from stagewright.solvers.dags.piper import piper_pipeline


@cache
def compile_partition() -> None:
    """The programs over downsets, once per process."""
    seconds = np.ones((2, 1))
    tensors = (Tensor((0, 1), 1.0), Tensor((1, 0), 1.0, backward=True))
    problem = DagProblem(
        names=("a", "b"),
        edges=((0, 1),),
        seconds=seconds,
        bytes=np.ones(2),
        tensors=tensors,
        pools=(DevicePool("device", 2, 2.0),),
        backward=seconds / 2,
    )
    partition(problem)
    partition_phases(problem)


@cache
def compile_latency() -> None:
    """The division of orders and annealing, once per process."""
    problem = LatencyProblem(
        names=("a", "b"),
        edges=((0, 1),),
        on_accelerator=np.ones(2),
        on_host=np.full(2, 2.0),
        transfer=np.ones(2),
        bytes=np.ones(2),
        supported=np.ones(2, dtype=bool),
        groups=(),
        accelerators=1,
        memory=1.0,
    )
    search = LatencySearch(problem, 0, lambda _: None)
    for step in (search.divide_orders, search.anneal):
        once = iter((False,))
        step(partial(next, once, True))


@cache
def compile_piper() -> None:
    """The program over upsets and its knapsacks, once per process."""
    keep, less = (LayerOption(str(x), x, 1.0, 3.0 - x, 1.0, {}) for x in (1.0, 2.0))
    options = {1: (keep, less)}
    layers = (PiperLayer("a", options), PiperLayer("b", options))
    piper_pipeline(PiperProblem(layers, (Edge(0, 1, 1.0),), 2, 9.0, 1.0, 4))
