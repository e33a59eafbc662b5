"""Write ``jobs/mixed.json``: a generated (not measured) workload for ``stagewright allocate``.

Rates are analytic, from FLOPs, bytes and the accelerators' peak rates.
A job on several accelerators also waits for an all-reduce of its gradients, over the links inside a
server (24 GB/s) or, if it is spread over servers, between servers (3 GB/s). Two jobs that share
accelerators keep their rates if together they do not exceed the accelerator's capacity; otherwise
both slow down by the same factor.
"""

import itertools
import random
from pathlib import Path

from stagewright.formulations.prices.analytic import analytic_model
from stagewright.formulations.prices.collectives import ring_seconds
from stagewright.graphs.machines.devices import accelerator
from stagewright.graphs.workloads.jobs import (
    Entity,
    Job,
    PairRate,
    Rate,
    Throughputs,
    Workload,
    save_workload,
)

MODELS = {"resnet50": 32, "densenet121": 16, "inception-v3": 32, "transformer": 64, "bert-large": 4}
TYPES = ("v100", "p100", "k80")
SCALES = (1, 2, 4)
INSIDE, BETWEEN = 24e9, 3e9  # bytes per second inside a server, between servers
BUSY_ON_V100 = {  # assumed utilisation
    "resnet50": 0.75,
    "densenet121": 0.5,
    "inception-v3": 0.7,
    "transformer": 0.55,
    "bert-large": 0.9,
}
USED = 0.45  # achieved share of the analytic rate, which assumes peak performance
JOBS = 24


def rate(model: str, scale: int, kind: str, bytes_per_second: float) -> float:
    """Iterations per second of data-parallel training on ``scale`` accelerators."""
    chain = analytic_model(model, MODELS[model], [kind], tied_copies=False)  # all in one stage
    costs = [layer.costs[0] for layer in chain.layers]
    seconds = sum(cost.forward_seconds + cost.total_backward_seconds for cost in costs)
    gradients = sum(layer.parameter_bytes for layer in chain.layers)
    return 1 / (seconds / USED + 2 * ring_seconds(scale, gradients, bytes_per_second))


def busy(model: str, kind: str) -> float:
    """The utilisation of an accelerator by a job of ``model``: higher on slower types."""
    slower = accelerator("v100").fp32_flops / accelerator(kind).fp32_flops
    return min(1.0, BUSY_ON_V100[model] * slower**0.5)


def throughputs() -> Throughputs:
    """Rates of every model, scale and type, alone and in pairs."""
    alone, pairs = [], []
    for kind, scale in itertools.product(TYPES, SCALES):
        rates = {model: rate(model, scale, kind, INSIDE) for model in MODELS}
        for model, found in rates.items():
            spread = rate(model, scale, kind, BETWEEN) if scale > 1 else None
            alone.append(Rate(model, scale, kind, found, spread))
        for pair in itertools.combinations_with_replacement(MODELS, 2):
            left = min(1.0, 1.0 / sum(busy(model, kind) for model in pair))
            pairs.append(
                PairRate(pair, scale, kind, (rates[pair[0]] * left, rates[pair[1]] * left))
            )
    return Throughputs(tuple(alone), tuple(pairs))


def workload() -> Workload:
    """Jobs of three teams: two share fairly under ``products``, ``research`` is a FIFO queue."""
    random_ = random.Random(0)
    rates = throughputs()
    on_v100 = {
        (one.model, one.scale): one.steps_per_second
        for one in rates.alone
        if one.accelerator == "v100"
    }
    jobs, arrival = [], 0.0
    for number in range(JOBS):
        model = random_.choice(list(MODELS))
        scale = random_.choices(SCALES, (0.7, 0.15, 0.15))[0]
        hours = random_.choice((0.5, 1, 2, 4))
        jobs.append(
            Job(
                f"{model}-{number}",
                model,
                round(3600 * hours * on_v100[model, scale]),
                scale,
                weight=random_.choice((1.0, 1.0, 2.0)),
                arrival_seconds=round(arrival, 1),
                slo_seconds=random_.choice((None, 3600 * hours * 4)),
                entity=random_.choice(("search", "speech", "research")),
            )
        )
        arrival += random_.expovariate(1 / 900)
    entities = (
        Entity("products", 2.0),
        Entity("search", 1.0, parent="products"),
        Entity("speech", 1.0, parent="products"),
        Entity("research", 1.0, "fifo"),
    )
    return Workload(tuple(jobs), rates, entities)


if __name__ == "__main__":
    folder = Path(__file__).with_name("jobs")
    folder.mkdir(exist_ok=True)
    save_workload(workload(), folder / "mixed.json")
