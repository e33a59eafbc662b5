"""Out-of-order backprop: the paper's speed-ups, list schedules against optima, and their seconds.

``python -m benchmarks backprop``.
"""

from collections.abc import Iterator
from time import process_time

import numpy as np
from rich.progress import track

from benchmarks.backprop_report import report_table
from benchmarks.backprop_systems import consecutive_devices
from benchmarks.report import Table, percent
from benchmarks.spec import BenchSpec
from stagewright.formulations.backprop.orders import conventional, fast_forward
from stagewright.formulations.backprop.problem import BackpropProblem
from stagewright.formulations.backprop.regions import Streams, regions_of
from stagewright.formulations.backprop.training import Layers, data_parallel, training
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.solvers.backprop.exact import best_list_schedule, solve
from stagewright.solvers.backprop.list_scheduling import (
    joint_schedule,
    list_schedule,
    reverse_search,
)
from stagewright.solvers.planners.ooo import modulo_devices

LIMITS = Limits(seconds=5, threads=1, seed=0)
LARGE = 500  # layers


def unit_layers(count: int) -> Layers:
    return Layers((1.0,) * count, (0.0, *(1.0,) * (count - 1)), (1.0,) * count)


# Layers, devices, microbatches, transfers, group of the modulo allocation; the printed speed-up.
PIPELINES = BenchSpec(
    "backprop pipelines",
    lambda case: case,
    (
        (("figure 5", 8, 2, 1, 0.0, 1), "1.21, 1.44"),
        (("FFNN-16", 16, 4, 4, 0.0, 1), "1.22, 1.62"),
        (("BERT-24, ratio 0.05", 24, 4, 4, 0.05, 1), "-, 1.70"),
        (("BERT-24, ratio 0.16", 24, 4, 4, 0.16, 1), "-, 1.58"),
        (("BERT-24, ratio 1.8", 24, 4, 4, 1.8, 2), "-, 1.48"),
    ),
)


def pipeline_table(quick: bool) -> Table:
    """Speed-ups over GPipe's order and consecutive layers; equal computations."""
    rows = []
    for (name, count, devices, microbatches, ratio, group), printed in PIPELINES.cases(quick):
        layers, send = unit_layers(count), (ratio,) * (count - 1)
        blocks, modulo = (
            training(layers, device, microbatches, send)
            for device in (
                consecutive_devices(count, devices), modulo_devices(count, devices, group)
            )
        )  # fmt: skip
        base = list_schedule(blocks, conventional(blocks)).end
        fast = list_schedule(blocks, fast_forward(blocks)).end
        both = list_schedule(modulo, fast_forward(modulo)).end
        found = solve(modulo, LIMITS)
        assert found.cost is not None
        ours = f"{base / fast:.2f}, {base / both:.2f}"
        rows.append(
            (name, printed, ours, base / found.cost, base / found.bound, percent(found.gap))
        )
    columns = ("case", "printed", "by the rules", "best found", "at most", "gap")
    title = "Speed-up over GPipe: by fast-forwarding, with modulo allocation, and what is possible"
    return Table("backprop-pipelines", title, columns, tuple(rows))


def random_layers(rng: np.random.Generator, count: int) -> Layers:
    forward, output, weight = (tuple(map(float, row)) for row in rng.integers(5, 50, (3, count)))
    return Layers(forward, (0.0, *output[1:]), weight)


def random_problem(kind: str, seed: int) -> BackpropProblem:
    """Integer times; the synchronisation takes half to twice the time of the computations."""
    rng = np.random.default_rng(seed)
    if kind == "data parallel, 30 layers":
        sync = rng.integers(1, 150, 30) * rng.choice([0.5, 1.0, 2.0])
        return data_parallel(random_layers(rng, 30), np.ceil(sync).tolist())
    layers, send = random_layers(rng, 12), rng.integers(0, 20, 11).astype(float).tolist()
    sync = rng.integers(1, 150, 12).astype(float).tolist() if "data" in kind else ()
    device = modulo_devices(12, 2, int(rng.choice([1, 2, 3, 6])))
    return training(layers, device, 2, send, sync)


STUDY = BenchSpec(
    "backprop study",
    lambda case: case,
    ("data parallel, 30 layers", "pipeline, 12 x 2 x 2", "data and pipeline, 12 x 2 x 2"),
)
INSTANCES = 50


def study_table(quick: bool) -> Table:
    """How far list schedules are from the optimum, or from CP-SAT's bound."""
    rows = []
    for kind in STUDY.cases(quick):
        gaps, proved = [], 0
        for seed in track(range(2 if quick else INSTANCES), kind):
            problem = random_problem(kind, seed)
            found, (_, listed) = solve(problem, LIMITS), best_list_schedule(problem)
            assert listed is not None
            gaps.append(listed.end / found.bound - 1)
            proved += found.status is Status.OPTIMAL
        within = sum(gap <= 0.02 for gap in gaps)
        quartiles = [percent(value) for value in np.quantile(gaps, [0.5, 0.9, 1.0]).tolist()]
        rows.append((kind, len(gaps), proved, *quartiles, within))
    columns = ("instances", "number", "proved", "median", "90 %", "worst", "within 2 %")
    title = f"List schedules above the optimum or its bound; {LIMITS.seconds:g} s, one thread"
    return Table("backprop-study", title, columns, tuple(rows))


def _heuristics(count: int) -> Iterator[tuple[str, float]]:
    rng = np.random.default_rng(0)
    layers, sync = random_layers(rng, count), tuple(rng.uniform(1, 100, count).tolist())
    alone = data_parallel(layers, sync)
    pipeline = training(layers, modulo_devices(count, 4), 1, (0.1,) * (count - 1), sync)
    streams = Streams(layers, (0.7,) * (2 * count), (0.6,) * count, 0.5)
    ends = tuple(np.linspace(0, len(streams.main()), 9).astype(int)[1:].tolist())
    for name, run in (
        ("list schedules, data parallel", lambda: best_list_schedule(alone)),
        ("list schedules, 4 devices", lambda: best_list_schedule(pipeline)),
        ("search for k, data parallel", lambda: reverse_search(alone, count)),
        ("search for k, 4 devices", lambda: reverse_search(pipeline, count, fast_forward)),
        ("Algorithm 1, 8 regions", lambda: joint_schedule(regions_of(streams, ends))),
    ):
        run()  # compiles the kernels
        began = process_time()
        run()
        yield name, 1e3 * (process_time() - began)


def tables(quick: bool) -> list[Table]:
    """The paper's speed-ups, the random study, the report, and milliseconds of the heuristics."""
    rows = tuple(_heuristics(50 if quick else LARGE))
    title = f"CPU milliseconds of the heuristics, {50 if quick else LARGE} layers"
    return [
        pipeline_table(quick),
        study_table(quick),
        report_table(quick),
        Table("backprop-time", title, ("heuristic", "ms"), rows),
    ]
