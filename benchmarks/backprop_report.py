"""Sections 8.2 to 8.4 in one table: printed speed-ups, ours, and what any order could reach.

The paper's profiles are not published, so every row states its assumptions; where one decides the
figure, the row has a range.
"""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from benchmarks.backprop_models import (
    CAPACITY,
    WEIGHT_BLOCKS,
    Convolution,
    densenet,
    layers_of,
    mobilenet,
    resnet,
    streams_of,
)
from benchmarks.backprop_systems import SyncLink, baseline, by_layer, consecutive_devices, in_chunks
from benchmarks.report import Table
from stagewright.formulations.backprop.of_stages import window_bounds
from stagewright.formulations.backprop.orders import conventional, reverse_first_k
from stagewright.formulations.backprop.regions import Streams
from stagewright.formulations.backprop.training import Layers, data_parallel, training
from stagewright.solvers.backprop.exact import best_list_schedule
from stagewright.solvers.backprop.list_scheduling import list_schedule, schedule_streams
from stagewright.solvers.planners.ooo import modulo_devices

Row = tuple[object, ...]
Pair = tuple[float, float]

GAP = 2e-6  # seconds between two kernels of a stream that are issued in advance
ISSUE = (5e-6, 20e-6)  # to issue a kernel, else
REGIONS = 8

# Model, samples, printed; weight gradients that the published order runs last, from the end.
SINGLE: tuple[tuple[str, list[Convolution], int, str, int], ...] = (
    ("DenseNet-121, k = 12", densenet(12), 32, "1.54 (1.39 without reordering)", 32),
    ("DenseNet-121, k = 24", densenet(24), 32, "1.09 to 1.21", 32),
    ("DenseNet-121, k = 32", densenet(32), 32, "1.09 to 1.21", 32),
    ("DenseNet-121, k = 32", densenet(32), 64, "1.09 to 1.21", 32),
    ("MobileNet-V3, 0.25", mobilenet(0.25), 32, "1.58 (1.15 by streams)", 0),
    ("MobileNet-V3, 0.5", mobilenet(0.5), 32, "1.07 to 1.19", 0),
    ("MobileNet-V3, 1", mobilenet(1.0), 64, "1.07 to 1.19", 0),
    ("ResNet-50", resnet(50), 64, "1.03 to 1.06 (1.01 to 1.02 by streams)", 0),
    ("ResNet-101", resnet(101), 64, "1.03 to 1.06 (1.01 to 1.02 by streams)", 0),
)

COMPUTED = 0.380  # seconds of ResNet-50 with 128 samples, section 8.3
BANDWIDTHS = (0.2e9, 0.3e9, 0.6e9)  # of all gradients on the slowest link
LATENCY = 1e-4
QUEUED = 0.350  # seconds of the first layer's message on 16 GPUs
SYSTEMS = ("wait-free", "DDP", "Horovod", "BytePS")

# Layers, devices, microbatches (the last is the published scripts'), ratios of transfers, printed.
PRETRAINING = (
    ("BERT-12", 12, 8, (8, 30), (0.05,), "1.73"),
    ("BERT-24", 24, 16, (16, 32), (0.05, 0.5), "1.41 to 1.45"),
    ("BERT-48", 48, 32, (32, 40), (0.05, 0.5), "1.41 to 1.45"),
)


def _range(values: Sequence[float]) -> str:
    low, high = (f"{value:.2f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _published(streams: Streams, last: int) -> float:
    """Seconds if the weight gradients of the ``last`` layers come after all others."""
    count = streams.layers.count
    early = range(count - last, 0, -1)
    return streams.evaluate([*early, *range(count - last + 1, count + 1)])


def single_rows(quick: bool) -> Iterator[Row]:
    """Section 8.2: issue in advance and two streams over one stream; streams alone in brackets."""
    for name, model, samples, printed, last in SINGLE[: 2 if quick else None]:
        total, alone, most, above = [], [], [], []
        for blocks in (WEIGHT_BLOCKS, CAPACITY):
            streams = streams_of(model, samples, GAP, blocks)
            ends = np.linspace(0, len(streams.main()), REGIONS + 1).astype(int)[1:].tolist()
            found = schedule_streams(streams, tuple(ends))
            cost = min(found.cost, streams.evaluate(range(len(model), 0, -1)))
            times = streams.layers
            kernels = (*times.forward, *times.output_gradient, *times.weight_gradient)
            issued = [sum(max(t + GAP, issue) for t in kernels if t > 0) for issue in ISSUE]
            total += [one / cost for one in issued]
            most += [one / streams.bound() for one in issued]
            alone.append(sum(t + GAP for t in kernels if t > 0) / cost)
            above.append(100 * (_published(streams, last) / cost - 1))
        yield (
            "8.2", f"{name}, batch {samples}", "one stream", printed,
            f"{_range(total)} ({_range(alone)} by streams)", _range(most),
            f"{_range(above)} %" if last else None,
        )  # fmt: skip


def _data_parallel(layers: Layers, amounts: Sequence[float], bandwidth: float, k: int) -> Row:
    """Ours over each system, the most by the bound, and the published k above ours."""
    link = SyncLink(bandwidth, LATENCY)
    problems = in_chunks(layers, amounts, link), by_layer(layers, amounts, link)
    found = [best_list_schedule(problem)[1] for problem in problems]
    ours = min(one.end for one in found if one is not None)
    # With no latency and any split nothing takes longer: the bound holds for both.
    free = data_parallel(layers, [one / bandwidth for one in amounts], chunk_seconds=0.0)
    least = max(bound for _, bound in window_bounds(free))
    theirs = [baseline(name, layers, amounts, link)[1].end for name in SYSTEMS]
    order = list_schedule(problems[0], reverse_first_k(problems[0], k))
    published = problems[0].evaluate(order)
    return (
        " / ".join(f"{one / ours:.2f}" for one in theirs),
        " / ".join(f"{one / least:.2f}" for one in theirs),
        f"k = {k}: {100 * (published / ours - 1):.1f} %",
    )


def data_rows(quick: bool) -> Iterator[Row]:
    """Section 8.3 on links of several bandwidths, which the paper does not give."""
    scale = COMPUTED / sum(sum(row) for row in _times(layers_of(resnet(50), 128)))
    for depth, samples, k in ((50, 128, 45), (101, 96, 70)):
        model = resnet(depth)
        layers = layers_of(model, samples, scale)
        amounts = [4.0 * one.weights for one in model]
        for bandwidth in BANDWIDTHS[: 1 if quick else None]:
            name = f"ResNet-{depth}, {bandwidth / 1e9:g} GB/s"
            printed = "BytePS 1.10 to 1.27, Horovod to 3.5"
            figures = _data_parallel(layers, amounts, bandwidth, k)
            yield ("8.3", name, " / ".join(SYSTEMS), printed, *figures)
    yield _first_message(layers_of(resnet(50), 128, scale))


def _first_message(layers: Layers) -> Row:
    """The paper's own account: the first layer's message alone, and all others hidden."""
    problem = data_parallel(layers, (QUEUED, *(0.0,) * (layers.count - 1)))
    base = list_schedule(problem, conventional(problem)).end
    _, found = best_list_schedule(problem)
    assert found is not None
    published = problem.evaluate(list_schedule(problem, reverse_first_k(problem, 45)))
    return (
        "8.3", "ResNet-50, the first message alone, 350 ms", "layer by layer", "1.27",
        f"{base / found.end:.2f}",
        f"{base / max(bound for _, bound in window_bounds(problem)):.2f}",
        f"k = 45: {100 * (published / found.end - 1):.1f} %",
    )  # fmt: skip


def _times(layers: Layers) -> tuple[tuple[float, ...], ...]:
    return layers.forward, layers.output_gradient, layers.weight_gradient


def pipeline_rows(quick: bool) -> Iterator[Row]:
    """Section 8.4: pre-training; fine-tuning is in the table of pipelines."""
    for name, count, devices, microbatches, ratios, printed in PRETRAINING[: 1 if quick else None]:
        cases = product(microbatches[: 1 if quick else None], ratios)
        pairs = [_pipeline(count, devices, number, ratio) for number, ratio in cases]
        ours, most = zip(*pairs, strict=True)
        case = f"{name}, {devices} GPUs, {' or '.join(map(str, microbatches))} microbatches"
        yield "8.4", case, "GPipe's order", printed, _range(ours), _range(most), None


def _pipeline(count: int, devices: int, microbatches: int, ratio: float) -> Pair:
    """The best of both allocations over GPipe's order, and at most."""
    layers = Layers((1.0,) * count, (0.0, *(1.0,) * (count - 1)), (1.0,) * count)
    blocks, modulo = (
        training(layers, device, microbatches, (ratio,) * (count - 1))
        for device in (consecutive_devices(count, devices), modulo_devices(count, devices))
    )
    base = list_schedule(blocks, conventional(blocks)).end
    found = [best_list_schedule(one)[1] for one in (blocks, modulo)]
    best = min(one.end for one in found if one is not None)
    least = min(max(bound for _, bound in window_bounds(one)) for one in (blocks, modulo))
    return base / best, base / least


def report_table(quick: bool) -> Table:
    """All three sections."""
    columns = (
        "section",
        "case",
        "over",
        "printed",
        "ours",
        "at most",
        "published order above ours",
    )
    rows = (*single_rows(quick), *data_rows(quick), *pipeline_rows(quick))
    title = "Speed-ups of sections 8.2 to 8.4: printed, by our schedules, and at most in any order"
    return Table("backprop-report", title, columns, rows)
