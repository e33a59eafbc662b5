"""Hypothesis strategies for tiny instances of realistic magnitudes.

Times are whole milliseconds or so and bytes are chosen such that, at the drawn bandwidths, a
transfer and an all-reduce take about as long as a computation. Ties and zeros do occur.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise

import numpy as np
from hypothesis import strategies as st

from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.units import MIN_MEMORY
from stagewright.graphs.machines.cluster import Cluster, Device, from_matrix
from stagewright.graphs.models.chain import Chain, Layer, LayerCost

MILLISECOND = 1e-3
MEGABYTE = 1e6
AMPLE_MEMORY = 1e12

# A megabyte takes 4, 1 or 0.25 ms on these; stages take 1 to 60 ms.
BANDWIDTHS = (0.25e9, 1e9, 4e9)


@st.composite
def random_chain(
    draw: st.DrawFn,
    max_layers: int = 4,
    sizes: Sequence[int] = (840,),
    kinds: Sequence[str | None] = (None,),
) -> Chain:
    """Layers of 1-20 ms, 0-12 MB between them, 0-120 MB of parameters; a cost per kind and size.

    The first of ``sizes`` is the chain's microbatch size.
    """
    layers = []
    for i in range(draw(_sizes(max_layers))):
        costs = []
        for kind in kinds:
            output = draw(st.integers(0, 12)) * MEGABYTE
            saved = draw(st.integers(0, 30)) * MEGABYTE
            for size in sizes:
                share = size / sizes[0]
                costs.append(
                    LayerCost(
                        microbatch_size=size,
                        forward_seconds=draw(st.integers(1, 20)) * MILLISECOND,
                        backward_seconds=draw(st.integers(1, 40)) * MILLISECOND,
                        saved_bytes=saved * share,
                        output_bytes=output * share,
                        device_kind=kind,
                    )
                )
        parameters = draw(st.sampled_from((0, 4, 40, 120))) * MEGABYTE
        layers.append(Layer(f"layer{i}", parameters, tuple(costs)))
    optimizer = draw(st.sampled_from((0.0, 1.0, 2.0)))
    return Chain("random", "measured: drawn at random", sizes[0], tuple(layers), optimizer)


@st.composite
def random_cluster(
    draw: st.DrawFn,
    max_devices: int = 3,
    latency: bool = False,
    symmetric: bool = True,
    kinds: Sequence[str] = ("v100",),
    memory: st.SearchStrategy[float] | None = None,
) -> Cluster:
    """Devices with uneven links between all of them."""
    count = draw(_sizes(max_devices))
    memory = st.just(AMPLE_MEMORY) if memory is None else memory
    devices = [
        Device(f"gpu{v}", draw(st.sampled_from(list(kinds))), draw(memory)) for v in range(count)
    ]
    bandwidth = _matrix(draw, count, symmetric, st.sampled_from(BANDWIDTHS))
    milliseconds = st.sampled_from((0.0, 1.0, 3.0)).map(lambda x: x * MILLISECOND)
    delays = _matrix(draw, count, symmetric, milliseconds) if latency else 0.0
    messages = draw(st.sampled_from((None, 0.5 * MILLISECOND))) if latency else None
    rate = draw(st.sampled_from((None, *BANDWIDTHS))) if messages else None
    return from_matrix(
        devices, bandwidth, delays, message_seconds=messages, message_bytes_per_second=rate
    )


@st.composite
def random_problem(
    draw: st.DrawFn,
    max_layers: int = 4,
    max_devices: int = 3,
    max_microbatches: int = 3,
    latency: bool = False,
    symmetric: bool = True,
    tight_memory: bool = False,
    kinds: Sequence[str] = ("v100",),
    sizes: Sequence[int] = (840,),
) -> PipelineProblem:
    """A problem whose every layer fits on every device alone; the whole model may fit on none.

    ``tight_memory`` makes memory bind; ``kinds`` and ``sizes`` give several costs per layer.
    """
    chain = draw(random_chain(max_layers, sizes, kinds if len(kinds) > 1 else (None,)))
    microbatches = draw(st.integers(1, max_microbatches))
    memory = _memories(chain, microbatches) if tight_memory else None
    cluster = draw(random_cluster(max_devices, latency, symmetric, kinds, memory))
    return PipelineProblem(chain, cluster, microbatches)


def paper_problem(
    max_layers: int = 4, max_devices: int = 3, max_microbatches: int = 3
) -> st.SearchStrategy[PipelineProblem]:
    """SPP's own setting: one device kind, no latency, both directions alike, memory ample."""
    return random_problem(max_layers, max_devices, max_microbatches)


@st.composite
def random_makespan(
    draw: st.DrawFn,
    max_stages: int = 3,
    max_microbatches: int = 3,
    limited: bool = True,
    tie_free: bool = False,
) -> MakespanProblem:
    """Computations of 1-12 units, transfers and all-reduces of 0-12.

    ``limited`` draws limits in flight, otherwise they are M. ``tie_free`` draws times of which no
    two sums coincide, for procedures whose ties the papers leave open.
    """
    stages = draw(st.integers(1, max_stages))
    microbatches = draw(st.integers(1, max_microbatches))
    if tie_free:
        random = draw(st.randoms(use_true_random=False))
        computation = transfer = st.builds(lambda: random.uniform(0.5, 12))
    else:
        computation, transfer = st.integers(1, 12).map(float), st.integers(0, 12).map(float)
    reduce = st.just(0.0) | transfer
    limit = st.integers(1, microbatches) if limited else st.just(microbatches)

    def values(strategy: st.SearchStrategy, count: int) -> tuple:
        return tuple(draw(strategy) for _ in range(count))

    return MakespanProblem(
        microbatches,
        values(computation, stages),
        values(computation, stages),
        values(transfer, stages - 1),
        values(transfer, stages - 1),
        values(reduce, stages),
        values(limit, stages),
    )


@st.composite
def random_placed_makespan(
    draw: st.DrawFn, max_stages: int = 3, max_microbatches: int = 3, max_devices: int = 2
) -> MakespanProblem:
    """As :func:`random_makespan`, with any number of stages on a device and perhaps I and W."""
    problem = draw(random_makespan(max_stages, max_microbatches))
    device: list[int] = []
    for _ in range(problem.stages):
        used = 1 + max(device, default=-1)
        device.append(draw(st.integers(0, min(used, max_devices - 1))))
    moved = [one != following for one, following in pairwise(device)]
    weights = st.tuples(*[st.integers(0, 8).map(float)] * problem.stages)
    return replace(
        problem,
        device=tuple(device),
        send_forward=tuple(np.where(moved, problem.send_forward, 0.0).tolist()),
        send_backward=tuple(np.where(moved, problem.send_backward, 0.0).tolist()),
        weight_gradient=draw(st.none() | weights),
    )


@st.composite
def random_memory_makespan(
    draw: st.DrawFn, max_stages: int = 3, max_microbatches: int = 3, max_devices: int = 2
) -> MakespanProblem:
    """As :func:`random_placed_makespan`, with memory, either objective and either duplex."""
    problem = draw(random_placed_makespan(max_stages, max_microbatches, max_devices))
    unlimited = (problem.microbatches,) * problem.stages
    saved = []
    for _ in range(problem.stages):
        early, late = float(draw(st.integers(0, 3))), float(draw(st.integers(0, 3)))
        saved.append((early + late, early, late))
    memory = []
    for d in range(1 + max(problem.device)):
        least = sum(saved[s][0] for s in problem.stages_on(d))
        memory.append(least + draw(st.integers(0, 8)))
    return replace(
        problem,
        in_flight=draw(st.sampled_from((problem.in_flight, unlimited))),
        saved=tuple(saved),
        memory=tuple(memory),
        objective=draw(st.sampled_from(("makespan", "span"))),
        duplex=draw(st.sampled_from(("half", "full"))),
    )


def _memories(chain: Chain, microbatches: int) -> st.SearchStrategy[float]:
    """Just enough for some stage on one device with some number of microbatches in flight."""
    count = len(chain)
    floor = max(MIN_MEMORY, *(_need(chain, i, i + 1, 1) for i in range(count)))
    needs = {
        max(floor, _need(chain, start, stop, in_flight))
        for start, stop in combinations(range(count + 1), 2)
        for in_flight in range(1, microbatches + 1)
    }
    return st.sampled_from(sorted(needs))


def _need(chain: Chain, start: int, stop: int, in_flight: int) -> float:
    """Bytes of layers [start, stop), and half a megabyte to be clear of rounding."""
    planned = [
        [cost for cost in layer.costs if cost.microbatch_size == chain.microbatch_size]
        for layer in chain.layers
    ]
    outputs = [0.0] + [max(cost.output_bytes for cost in costs) for costs in planned[:-1]] + [0.0]
    saved = max(sum(c.saved_bytes for c in kind) for kind in zip(*planned[start:stop], strict=True))
    states = 2 + chain.optimizer_bytes_per_parameter_byte
    weights = states * float(chain.parameter_bytes[start:stop].sum())
    buffers = 2 * (outputs[start] + outputs[stop])
    return weights + buffers + in_flight * saved + MEGABYTE / 2


def _sizes(largest: int) -> st.SearchStrategy[int]:
    """1..largest, with few ones: a single layer or device decides little."""
    return st.integers(min(2, largest), largest) | st.integers(1, largest)


def _matrix(
    draw: st.DrawFn, count: int, symmetric: bool, entries: st.SearchStrategy[float]
) -> list[list[float]]:
    matrix = [[draw(entries) for _ in range(count)] for _ in range(count)]
    if symmetric:
        matrix = [[matrix[min(i, j)][max(i, j)] for j in range(count)] for i in range(count)]
    return matrix


# Beside SPP's own setting, one with latencies, messages that take time of their devices, links that
# differ by direction, two device kinds, times that are not proportional to the microbatch size, and
# memory that binds.
hard_problem = partial(
    random_problem,
    latency=True,
    symmetric=False,
    tight_memory=True,
    kinds=("a", "b"),
    sizes=(3, 2, 1),
)
PROBLEMS = {"paper": paper_problem, "hard": hard_problem}
