"""FastT's evaluation on captured graphs of its nine models: tables 1, 2, 4, 5, 6 and figure 2.

``python -m benchmarks fastt``. All times are analytic: no operator has been measured.
"""

from collections import Counter
from functools import cache, partial
from importlib import import_module
from time import process_time

import numpy as np
import torch
from rich.progress import track

from benchmarks.fastt_paper import SPLIT_GAIN, STRATEGY_SECONDS, STRONG, VGG_SPLITS, WEAK
from benchmarks.ready_queue import by_place, fifo, from_queues
from benchmarks.report import Table, percent
from benchmarks.spec import BenchSpec
from stagewright.executor.capture.steps.analytic import with_analytic_seconds
from stagewright.executor.capture.steps.step import capture_step, resized, without_values
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.operators.plan import operator_problem
from stagewright.formulations.operators.problem import GraphTimes, OperatorProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster, Link, uniform_servers
from stagewright.graphs.models.operators.step_graph import StepGraph, data_parallel
from stagewright.solvers.operators.greedy import replica_numbers
from stagewright.solvers.operators.os_dpos import SplitResult, os_dpos
from stagewright.solvers.operators.ranks import bounds_of
from stagewright.solvers.operators.search import METHODS, best_list_schedule, search

KIND, MEMORY = "v100", 16e9
INSIDE, BETWEEN = Link(25e9, 5e-6), Link(1.25e9, 20e-6)
LIMITS = Limits(seconds=120, seed=0)
MOVES = 400_000  # of small graphs
RANDOM_ORDERS = 5

# Factory and batches in examples.fastt, and the mini-batch of table 1; 64 sentences of the
# transformer are its 4,096 tokens.
MODELS = {
    "lenet": ("vision:lenet", "digits", 256),
    "alexnet": ("vision:alexnet", "images", 256),
    "vgg19": ("vision:vgg19", "images", 64),
    "inception_v3": ("vision:inception_v3", "large_images", 64),
    "resnet200": ("vision:resnet200", "images", 32),
    "rnnlm": ("language:rnnlm", "rnnlm_batches", 64),
    "transformer": ("language:transformer", "transformer_batches", 64),
    "bert_large": ("language:bert_large", "bert_batches", 16),
    "gnmt4": ("language:gnmt4", "gnmt_batches", 128),
}
SERVERS = {"2": (1, 2), "4": (1, 4), "8": (1, 8), "8 on 2 servers": (2, 8), "16 on 2": (2, 16)}
STRONG_CASES = BenchSpec(
    "strong", lambda case: case, tuple((model, size) for model in MODELS for size in [*SERVERS][:4])
)
WEAK_CASES = BenchSpec(
    "weak",
    lambda case: case,
    tuple((model, size) for model in MODELS for size in [*SERVERS][:3] + [*SERVERS][4:]),
)
PER_MODEL = BenchSpec("models", lambda case: case, tuple(MODELS), few=1)

# Node of the captured VGG-19 for each operator of table 5.
VGG_NODES = {
    "Conv1_1": "convolution",
    "Conv1_2": "convolution_1",
    "Conv1_2bp": "convolution_backward_14",
    "Relu1_2": "relu_1",
    "Pool1": "max_pool2d_with_indices",
    "Fc6": "addmm",
}


@cache
def captured(model: str, samples: int) -> StepGraph:
    """The step of a model with SGD and momentum on ``samples``, with analytic times."""
    factory, batches, _ = MODELS[model]
    module, name = factory.split(":")
    examples = import_module(f"examples.fastt.{module}")
    batch = resized(next(iter(getattr(examples, batches)())), samples)
    net, inputs = without_values(getattr(examples, name), batch)
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    step = capture_step(net, inputs, optimizer=optimizer, name=model)
    return with_analytic_seconds(step, [KIND])


def cluster(size: str) -> Cluster:
    """Devices of 16 GB on one or two servers."""
    servers, devices = SERVERS[size]
    return uniform_servers(
        servers, devices // servers, INSIDE, BETWEEN, kind=KIND, memory_bytes=MEMORY
    )


def started(model: str, replicas: int) -> StepGraph:
    """The graph that algorithm 2 starts from: replicas of the mini-batch's parts if they fit."""
    samples = MODELS[model][2]
    share = captured(model, samples // replicas)
    return start_graph(captured(model, samples), share, replicas, MEMORY)


@cache
def split(model: str, size: str) -> tuple[SplitResult, int, float]:
    """Algorithm 2 from its start graph: the result, operators before, CPU seconds."""
    graph = started(model, SERVERS[size][1])
    began = process_time()
    found = os_dpos(graph, cluster(size))
    return found, len(graph), process_time() - began


def checked(problem: OperatorProblem, found: GraphTimes | None) -> float:
    """Milliseconds by the rules; raises InvalidPlan if one is broken."""
    assert found is not None
    return 1e3 * problem.evaluate(found)


def ours(model: str, size: str) -> tuple[float, float]:
    """Milliseconds and gap: the best of all starts, then searched.

    They are algorithm 2's answer, and list schedules and data parallelism of as many replicas as
    there are devices, and of fewer down to one. If the best has fewer, the best of as many as there
    are devices is searched too.
    """
    found, _, _ = split(model, size)
    starts = [(found.problem, found.timetable)]
    best: list[tuple[OperatorProblem, GraphTimes]] = []
    for replicas in [2**k for k in range(SERVERS[size][1].bit_length())][::-1]:
        problem = operator_problem(started(model, replicas), cluster(size))
        queued = from_queues(problem, replica_numbers(problem), fifo)
        starts += [(problem, queued), (problem, best_list_schedule(problem)[1])]
        if not best:
            best.append(_shortest(starts))
    if _shortest(starts)[1] is not best[0][1]:
        best.append(_shortest(starts))
    return min(_searched(*one) for one in best)


def _shortest(
    starts: list[tuple[OperatorProblem, GraphTimes | None]],
) -> tuple[OperatorProblem, GraphTimes]:
    fitting = [(one, found) for one, found in starts if found is not None]
    return min(fitting, key=lambda one: one[1].end)


def _searched(problem: OperatorProblem, start: GraphTimes) -> tuple[float, float]:
    """Milliseconds and gap."""
    bound = max(one.seconds for one in bounds_of(problem))
    cost = checked(problem, search(problem, MOVES, LIMITS, start, bound))
    return cost, max(0.0, 1 - 1e3 * bound / cost)


def strong_table(quick: bool) -> Table:
    """Table 1: the mini-batch stays the same."""
    rows = []
    for model, size in track(STRONG_CASES.cases(quick), "strong scaling"):
        problem = operator_problem(started(model, SERVERS[size][1]), cluster(size))
        base = checked(problem, from_queues(problem, replica_numbers(problem), fifo))
        found, _, _ = split(model, size)
        listed = checked(found.problem, found.timetable)
        searched, gap = ours(model, size)
        printed, fastt = STRONG[model][1 + [*SERVERS].index(size)]
        rows.append(
            (model, size, base, listed, searched, percent(base / listed - 1),
             percent(base / searched - 1), percent(fastt / printed - 1), percent(gap))
        )  # fmt: skip
    columns = (
        "model", "devices", "data parallel, ms", "OS-DPOS, ms", "searched, ms",
        "OS-DPOS faster by", "searched faster by", "the paper's FastT by", "certified gap",
    )  # fmt: skip
    title = "FastT's table 1, strong scaling; analytic times"
    return Table("fastt-strong", title, columns, tuple(rows))


def weak_table(quick: bool) -> Table:
    """Table 2: the samples of each device stay the same."""
    rows = []
    for model, size in track(WEAK_CASES.cases(quick), "weak scaling"):
        graph = data_parallel(captured(model, MODELS[model][2]), SERVERS[size][1])
        problem = operator_problem(graph, cluster(size))
        base = checked(problem, from_queues(problem, replica_numbers(problem), fifo))
        found = os_dpos(graph, cluster(size))
        listed = None if found.timetable is None else checked(found.problem, found.timetable)
        bound = 1e3 * max(one.seconds for one in bounds_of(found.problem))
        printed, fastt = WEAK[model][min(4, 1 + [*SERVERS].index(size))]
        rows.append(
            (model, size, base, listed, listed and percent(base / listed - 1),
             percent(fastt / printed - 1), listed and percent(max(0.0, 1 - bound / listed)))
        )  # fmt: skip
    columns = (
        "model", "devices", "data parallel, ms", "OS-DPOS, ms", "OS-DPOS faster by",
        "the paper's FastT by", "certified gap",
    )  # fmt: skip
    title = "FastT's table 2, weak scaling; analytic times"
    return Table("fastt-weak", title, columns, tuple(rows))


def decisions_table() -> Table:
    """Table 5: which operators of VGG-19 are split on 4 devices."""
    model, size = "vgg19", "4"
    graph = captured(model, MODELS[model][2])
    from_replicas = {one.operator.partition("@")[0] for one in split(model, size)[0].splits}
    from_whole = {one.operator for one in os_dpos(graph, cluster(size)).splits}
    rows = []
    for label, name in VGG_NODES.items():
        node = graph.nodes[graph.index[name]]
        milliseconds, kilo, printed = VGG_SPLITS[label]
        rows.append(
            (label, milliseconds, 1e3 * node.seconds[KIND], kilo, _weights(graph, name) / 1e3,
             printed, name in from_replicas, name in from_whole)
        )  # fmt: skip
    columns = (
        "operator", "the paper's ms", "ms", "the paper's weights, K", "weights, K",
        "the paper splits", "split, from replicas", "split, from the model",
    )  # fmt: skip
    title = "FastT's table 5: splits of VGG-19 on 4 devices; analytic times"
    return Table("fastt-splits", title, columns, tuple(rows))


def _weights(graph: StepGraph, name: str) -> int:
    """Numbers in the parameters that a node reads, of one that is a view of it."""
    total = 0
    for source, number in graph.nodes[graph.index[name]].inputs:
        node = graph.nodes[graph.index[source]]
        output = node.outputs[number]
        base = graph.nodes[graph.index[node.inputs[0][0]]] if output.shared else node
        if base.role == "state":
            total += int(np.prod(output.shape))
    return total


def gains_table(quick: bool) -> Table:
    """Table 6: with and without splits."""
    rows = []
    for model in PER_MODEL.cases(quick):
        devices, printed = SPLIT_GAIN[model]
        size = str(devices)
        whole = captured(model, MODELS[model][2])
        from_whole = os_dpos(whole, cluster(size))
        for name, graph, found in (
            ("replicas", started(model, devices), split(model, size)[0]),
            ("model", whole, from_whole),
        ):
            problem = operator_problem(graph, cluster(size))
            none = checked(problem, METHODS["dpos"](problem))
            some = checked(found.problem, found.timetable)
            kinds = {graph.nodes[graph.index[one.operator]].operator for one in found.splits}
            rows.append(
                (model, size, name, none, some, percent(none / some - 1), percent(printed),
                 len(found.splits), ", ".join(sorted(one.removeprefix("aten.") for one in kinds)))
            )  # fmt: skip
    columns = (
        "model", "devices", "start", "DPOS, ms", "OS-DPOS, ms", "gain", "the paper's", "splits",
        "of",
    )  # fmt: skip
    title = "FastT's table 6: with and without splits; analytic times"
    return Table("fastt-gains", title, columns, tuple(rows))


def orders_table(quick: bool) -> Table:
    """Figure 2: the planned order against ready queues, on 2 devices and DPOS's placement."""
    rows = []
    for model in PER_MODEL.cases(quick):
        for name, graph in (
            ("replicas", started(model, 2)),
            ("model", captured(model, MODELS[model][2])),
        ):
            problem = operator_problem(graph, cluster("2"))
            found = METHODS["dpos"](problem)
            assert found is not None
            planned = checked(problem, found)
            queued = [from_queues(problem, found.device, fifo)]
            for seed in range(RANDOM_ORDERS):
                order = np.random.default_rng(seed).permutation(len(problem.names))
                queued.append(from_queues(problem, found.device, by_place(order)))
            ends = [1e3 * one.end for one in queued]
            average = float(np.mean(ends[1:]))
            rows.append(
                (model, name, planned, ends[0], average, percent(1 - planned / ends[0]),
                 percent(1 - planned / average))
            )  # fmt: skip
    columns = (
        "model", "graph", "planned, ms", "FIFO, ms", f"random, mean of {RANDOM_ORDERS}, ms",
        "less than FIFO by", "less than random by",
    )  # fmt: skip
    title = "FastT's figure 2, order enforcement on 2 devices (the paper: up to 26.9 %); analytic"
    return Table("fastt-order", title, columns, tuple(rows))


def seconds_table(quick: bool) -> Table:
    """Table 4: the time of algorithm 2."""
    rows, sizes = [], [*SERVERS][: 1 if quick else 3]
    for model in PER_MODEL.cases(quick):
        row: list[object] = [model]
        for place, size in enumerate(sizes):
            found, operators, seconds = split(model, size)
            row += [operators, found.tried, seconds, STRATEGY_SECONDS[model][place]]
        rows.append(tuple(row))
    columns = ["model"]
    for size in sizes:
        columns += [f"operators on {size}", "lists", "CPU s", "the paper's s"]
    title = "FastT's table 4: seconds of algorithm 2; kernels compiled or loaded before"
    return Table("fastt-time", title, tuple(columns), tuple(rows))


def tables(quick: bool) -> list[Table]:
    """Table 5 is for VGG-19 and not among the quick ones."""
    os_dpos(captured("lenet", 32), cluster("2"))  # compiles
    found = [strong_table(quick), weak_table(quick), gains_table(quick), orders_table(quick)]
    return [*found, seconds_table(quick), *([] if quick else [decisions_table()])]


def start_graph(
    whole: StepGraph, share: StepGraph, replicas: int, memory_bytes: float
) -> StepGraph:
    """Data parallelism if a replica fits into ``memory_bytes``, else the graph of the model.

    ``whole`` has the mini-batch, ``share`` a replica's part of it.

    Raises
    ------
    InputError
        If the two are not about the same mini-batch.
    """
    if share.samples * replicas != whole.samples:
        raise InputError(
            f"{replicas} replicas of {share.samples} samples are not the {whole.samples} samples "
            f"of {whole.name!r}"
        )
    return data_parallel(share, replicas) if peak_bytes(share) <= memory_bytes else whole


def peak_bytes(graph: StepGraph) -> float:
    """Memory on one device that runs the operators in the order of the document."""
    holder: dict[tuple[str, int], tuple[str, int]] = {}  # the output whose memory an output is in
    readers: Counter[tuple[str, int]] = Counter()
    for node in graph.nodes:
        for number, output in enumerate(node.outputs):
            one = (node.name, number)
            holder[one] = holder[node.inputs[0]] if output.shared else one
        readers.update(holder[one] for one in node.inputs)
    size = {
        (node.name, number): output.bytes
        for node in graph.nodes
        for number, output in enumerate(node.outputs)
        if not output.shared and node.role != "state"
    }
    used = sum(node.state_bytes for node in graph.nodes)
    peak = used
    for node in graph.nodes:
        made = [(node.name, number) for number in range(len(node.outputs))]
        used += sum(size.get(one, 0.0) for one in made)
        peak = max(peak, used)
        readers.subtract(holder[one] for one in node.inputs)
        ended = {holder[one] for one in (*node.inputs, *made)}
        used -= sum(size.pop(one, 0.0) for one in ended if not readers[one])
    return peak
