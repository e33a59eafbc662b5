"""Random tiny instances: documents of a model and a cluster, and a number of microbatches.

Every duration at every share is a whole number of microseconds, and every size a whole number of
bytes: times are multiples of 60 us and bytes of 60, which the shares of at most 6 samples divide.
"""

import random
from dataclasses import replace
from itertools import pairwise

from language_prices import Stage

MICROSECOND = 1e-6


def random_instance(seed):
    """(model, cluster, microbatches) of 1 to 3 layers, devices and microbatches."""
    draw = random.Random(seed)
    layers, devices = draw.choice((1, 2, 2, 3)), draw.choice((1, 2, 2, 2, 3))
    microbatches = draw.choice((1, 2, 2, 3))
    kinds = ["a"] * devices if draw.random() < 0.5 else [draw.choice("ab") for _ in range(devices)]
    samples = draw.randint(1, 6)
    model = _model(draw, layers, sorted(set(kinds)), samples)
    return model, _cluster(draw, kinds, model, microbatches), microbatches


def _microseconds(draw, low, high):
    return draw.randint(low, high) * 60 * MICROSECOND


def _model(draw, count, kinds, samples):
    sizes = sorted({samples, *draw.sample(range(1, 7), draw.choice((0, 0, 1, 2)))})
    parts, updates = draw.random() < 0.5, draw.random() < 1 / 3
    layers = []
    for index in range(count):
        costs = []
        for kind in kinds:
            update = _microseconds(draw, 1, 20)
            costs += [_entry(draw, size, kind, parts, update if updates else 0) for size in sizes]
        layer = {
            "name": f"l{index}",
            "parameter_bytes": draw.choice((1, 20, 100)) * 6000.0,
            "costs": _equal_bytes(costs, kinds),
        }
        if samples > 1 and draw.random() < 0.2:
            layer["min_samples"] = 2
        layers.append(layer)
    return {
        "name": "m",
        "source": "random",
        "microbatch_size": samples,
        "layers": layers,
        "optimizer_bytes_per_parameter_byte": draw.choice((0.0, 1.0, 2.0)),
        "format": "stagewright-model",
        "version": 1,
    }


def _entry(draw, size, kind, parts, update):
    entry = {
        "microbatch_size": size,
        "device_kind": kind,
        "forward_seconds": _microseconds(draw, 3 * size, 12 + 3 * size),
        # Bytes are drawn per size alone, see _equal_bytes.
        "saved_bytes": draw.randint(size, 4 * size) * 60000.0,
        "output_bytes": draw.choice((1, 10, 60)) * size * 600.0,
    }
    if parts:
        entry["input_gradient_seconds"] = _microseconds(draw, 3 * size, 12 + 3 * size)
        entry["weight_gradient_seconds"] = _microseconds(draw, 2 * size, 8 + 2 * size)
    if not parts or draw.random() < 0.3:
        entry["backward_seconds"] = _microseconds(draw, 5 * size, 20 + 5 * size)
    if update:
        entry["update_seconds"] = update
    return entry


def _equal_bytes(costs, kinds):
    """A kind has its own times; for most layers bytes are the same on every kind."""
    first = {entry["microbatch_size"]: entry for entry in costs if entry["device_kind"] == kinds[0]}
    for entry in costs:
        for field in ("saved_bytes", "output_bytes"):
            entry[field] = first[entry["microbatch_size"]][field]
    return costs


def _cluster(draw, kinds, model, microbatches):
    count = len(kinds)
    speeds = draw.choice(((1e9,), (1e8,), (1e9, 1e8)))
    bandwidth = [
        [None if i == j else draw.choice(speeds) for j in range(count)] for i in range(count)
    ]
    devices = [
        {"name": f"d{index}", "kind": kind, "memory_bytes": 1e9} for index, kind in enumerate(kinds)
    ]
    if draw.random() < 0.5:
        for device in devices:
            device["host_bytes_per_second"] = draw.choice((1e10, 2e9))
    if draw.random() < 1 / 3:
        _tighten(draw, devices, model, microbatches)
    cluster = {
        "name": "c",
        "devices": devices,
        "links": {
            "bandwidth_bytes_per_second": bandwidth,
            "latency_seconds": draw.choice((0, 10, 100)) * MICROSECOND,
        },
        "format": "stagewright-cluster",
        "version": 1,
    }
    if draw.random() < 1 / 3:
        cluster["all_reduce_share"] = draw.choice((0.5, 0.25))  # times are whole ticks
    if draw.random() < 1 / 3:
        cluster["message_seconds"] = draw.choice((20, 300)) * MICROSECOND
    return cluster


def _tighten(draw, devices, model, microbatches):
    """Memory that may be short, for the parameters or for the microbatches in flight.

    Saved bytes grow tenfold, so that a microbatch weighs as much as a layer's parameters.
    """
    for layer in model["layers"]:
        for entry in layer["costs"]:
            entry["saved_bytes"] *= 10
    copies = 2 + model["optimizer_bytes_per_parameter_byte"]
    static = copies * sum(layer["parameter_bytes"] for layer in model["layers"])
    saved = sum(_saved(layer, model["microbatch_size"]) for layer in model["layers"])
    limit = static * draw.choice((0.4, 0.7, 1.0)) + microbatches * saved * draw.uniform(0.1, 0.8)
    for device in devices:
        # A cluster's document asks for at least a megabyte.
        device["memory_bytes"] = max(1e6, float(int(limit)))


def _saved(layer, samples):
    return min(e["saved_bytes"] for e in layer["costs"] if e["microbatch_size"] >= samples)


def random_stages(seed, instance):
    """Stages of any kind that the language has, without regard to memory or speed."""
    draw = random.Random(seed)
    count, devices = len(instance.layers), range(len(instance.names))
    cuts = sorted(draw.sample(range(1, count), draw.randint(0, count - 1)))
    stages = []
    for start, stop in pairwise([0, *cuts, count]):
        group = tuple(draw.sample(devices, draw.randint(1, len(devices))))
        stage = Stage(start, stop, group, draw.choice(("split", "round-robin")))
        if not instance.enough_samples(stage):
            stage = replace(stage, devices=group[:1])
        kinds = ("none", "full", "layer", "offload")
        kind = draw.choice(kinds if all(instance.host) else kinds[:3])
        if kind == "offload":
            stages.append(replace(stage, offload=True))
        else:
            stages.append(replace(stage, recompute=kind))
    return tuple(stages)
