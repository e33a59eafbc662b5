"""Random tiny problems by family, to attack bounds on plans whose stages share devices.

As documents for the oracle of the language of plans, and its stages as the package's. Times and
bytes are such that shares of a microbatch take whole ticks of the oracle.
"""

import json
import math
import random
from dataclasses import dataclass

from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.documents.documents import to_json
from stagewright.graphs.machines.cluster import Device, from_matrix
from stagewright.graphs.models.chain import Chain, Layer, LayerCost

MS, MB = 1e-3, 1e6
TIME, SIZE = 6e-5, 1200.0  # what times and bytes are multiples of


@dataclass(frozen=True, slots=True)
class Family:
    """What the instances of a family choose from."""

    layers: tuple = (2, 3, 4, 5)
    samples: tuple = (1, 2, 2, 3, 4, 4)
    microbatches: tuple = (1, 2, 2, 3, 3, 4)
    devices: tuple = (2, 3, 3, 4)
    servers: tuple = (1, 2, 2, 3)
    heavy: tuple = (0, 0, 0.1, 1)  # scale of the parameters
    wide: tuple = (0, 0, 0.1, 1)  # scale of the transfers
    unlike: float = 0.6  # probability that devices are of two kinds
    racks: bool = False
    uneven: tuple = ((1.0,),)  # factors of the links
    short: float = 0.1  # probability that memory is short
    hosts: tuple = (None,)


FAMILIES = {
    "mixed": Family(layers=(2, 3, 3, 4), uneven=((1.0,), (1.0,), (0.5, 1.0))),
    "plain": Family(servers=(1, 1, 2), unlike=0.0),
    "embedding": Family(microbatches=(1, 2, 3), heavy=(0, 0.1, 1)),
    "around": Family(layers=(3, 4, 5)),
    "equal": Family(
        layers=(4, 5, 6),
        samples=(1, 1, 2),
        microbatches=(2, 3, 4),
        devices=(2, 2, 3),
        servers=(1, 1, 2),
        wide=(0, 0, 0.2),
        unlike=0.0,
    ),
    "apart": Family(
        layers=(4, 5, 6),
        samples=(1, 1, 2),
        microbatches=(2, 3, 4),
        devices=(2, 3, 4),
        servers=(2, 3),
        wide=(0.1, 0.3, 1),
        unlike=0.0,
    ),
    "slow": Family(wide=(0.5, 1, 2, 5), unlike=0.0),
    "few": Family(microbatches=(1, 2), unlike=0.0),
    "reduces": Family(heavy=(1, 5, 10)),
    "memory": Family(layers=(2, 3), devices=(2, 2, 3), short=1.0, hosts=(None, None, 2e9, 2e10)),
    "levels": Family(layers=(2, 3, 4), devices=(3, 4), racks=True),
    "zeros": Family(),
}


def documents_of(problem):
    """The model, the cluster and the number of microbatches."""
    chain, cluster = (json.loads(to_json(one)) for one in (problem.chain, problem.cluster))
    return chain, cluster, problem.microbatches


def named_stages(instance, stages):
    """Stages of the oracle, whose devices are numbers."""
    return [
        Stage((one.start, one.stop), tuple(instance.names[d] for d in one.devices),
              one.replication, one.recompute, one.offload)
        for one in stages
    ]  # fmt: skip


def random_problem(name, seed):
    """A problem of the family with this name."""
    draw, family = random.Random(f"{name} {seed}"), FAMILIES[name]
    chain = _chain(draw, name, family)
    cluster = _cluster(draw, family, chain)
    return PipelineProblem(chain, cluster, draw.choice(family.microbatches))


def _cluster(draw, family, chain):
    count, servers = draw.choice(family.devices), draw.choice(family.servers)
    home = sorted(draw.randrange(servers) for _ in range(count))
    if family.racks:  # of two servers each
        home = draw.choice(([0, 0, 1, 2], [0, 1, 2, 3]))[:count]
    unlike = draw.random() < family.unlike
    memory, host = _memory(draw, family, chain), draw.choice(family.hosts)
    devices = [
        Device(
            f"d{v}",
            draw.choice("ab") if unlike else "a",
            draw.choice(memory) if unlike else memory[0],
            host_bytes_per_second=host,
        )
        for v in range(count)
    ]
    places = sorted(set(home))
    named = [[d.name for d, h in zip(devices, home, strict=True) if h == one] for one in places]
    return from_matrix(devices, *_links(draw, family, home), servers=named)


def _links(draw, family, home):
    """Bandwidths and latencies inside servers, between them, and between racks."""
    near, far = draw.choice(((1e9, 1e8), (1e9, 5e8), (1e9, 1e9), (1e10, 1e8)))
    widths = near, far, far / draw.choice((2, 10)) if family.racks else far
    uneven = draw.choice(family.uneven)
    delays = draw.choice(((0.0,) * 3, (0.0,) * 3, (0.0, MS, 2 * MS), (MS, 3 * MS, 3 * MS)))
    levels = [[0 if v == w else 1 if v // 2 == w // 2 else 2 for w in home] for v in home]
    bandwidth = [[widths[level] * draw.choice(uneven) for level in row] for row in levels]
    return bandwidth, [[delays[level] for level in row] for row in levels]


def _memory(draw, family, chain):
    """Of two devices: ample, or too little for all of the model with all its microbatches."""
    if draw.random() >= family.short:
        return [1e12, 1e12]
    static = sum(chain.parameter_bytes) * (2 + chain.optimizer_bytes_per_parameter_byte)
    kept = sum(max(cost.saved_bytes for cost in layer.costs) for layer in chain.layers)
    sent = max(cost.output_bytes for layer in chain.layers for cost in layer.costs)
    shares = draw.choice((0.4, 0.6, 1.0)), draw.choice((0.3, 0.6, 1.0, 2.0))
    short = static * shares[0] + kept * shares[1] + 4 * sent + MB
    return [short, draw.choice((short, 2 * short))]


def _times(draw, name, layers):
    """Forward and backward of every layer."""
    if name == "equal":
        return [draw.choice(((1, 2), (2, 2), (1, 1), (3, 4), (2, 4)))] * layers
    if name == "around":
        longest = draw.randrange(layers)
        return [
            (draw.randint(10, 20), draw.randint(10, 30))
            if i == longest or draw.random() < 0.2
            else (draw.randint(0, 2), draw.randint(0, 2))
            for i in range(layers)
        ]
    if name == "zeros":
        return [(draw.choice((0, 0, 5)), draw.choice((0, 5, 8))) for _ in range(layers)]
    some = [(draw.randint(0, 12), draw.randint(0, 20)) for _ in range(layers)]
    if name == "embedding":
        return [(0, 0), *some[1:]]
    return [some[0]] * layers if draw.random() < 0.3 else some


def _chain(draw, name, family):
    samples, layers = draw.choice(family.samples), draw.choice(family.layers)
    few = draw.sample(range(1, samples + 1), draw.randint(0, samples - 1))
    sizes, even = sorted({samples, *few}), draw.random() < 0.6
    heavy, wide = draw.choice(family.heavy), draw.choice(family.wide)
    updates, parts = draw.choice((0, 0, 0, 3, 10)), draw.choice(("all", "all", "some", "none"))
    rows = []
    for i, times in enumerate(_times(draw, name, layers)):
        own = heavy * (1 if name == "equal" else draw.choice((0, 1, 2, 5, 10)))
        if name == "embedding" and i == 0:
            own = draw.choice((5, 20, 100))
        whole = parts == "none" or (parts == "some" and draw.random() < 0.4)
        costs = _costs(draw, times, sizes, even, whole, wide, draw.randint(0, updates))
        least = min(samples, draw.choice((1, 1, 1, 1, 2)))
        rows.append(Layer(f"l{i}", _whole(own * MB, SIZE), tuple(costs), least))
    return Chain("m", "random", samples, tuple(rows), draw.choice((0.0, 2.0)))


def _costs(draw, times, sizes, even, whole, wide, update):
    """Costs on two kinds, whose times need not be proportional to the samples."""
    saved, output = draw.randint(0, 10), draw.choice((1, draw.randint(0, 10))) * wide
    share = draw.choice((0, 0.5, 0.5, 1, draw.random()))
    ratio_of_whole = draw.choice((None, 0.8, 1.3))
    for kind, speed in (("a", 1.0), ("b", draw.choice((1.0, 0.5, 2.0, 3.0)))):
        for size in sizes:
            part = size / sizes[-1]
            ratio = draw.choice((part, part if even else math.sqrt(part), part if even else 1.0))
            ratio = 1.0 if size == sizes[-1] else ratio
            forward, backward = (_whole(one * ratio * speed * MS, TIME) for one in times)
            first, second = (_whole(backward * one, TIME) for one in (share, 1 - share))
            of_input = {
                "input_gradient_seconds": first,
                "weight_gradient_seconds": second,
                "backward_seconds": max(first, _whole(backward * ratio_of_whole, TIME))
                if ratio_of_whole
                else None,  # never less than its first part
            }
            yield LayerCost(
                size,
                forward,
                _whole(saved * part * MB, SIZE),
                _whole(output * part * MB, SIZE),
                **({"backward_seconds": backward} if whole else of_input),
                update_seconds=_whole(update * speed * MS, TIME) or None,
                device_kind=kind,
            )


def _whole(value, unit):
    """The nearest multiple of ``unit``, as exact as a float can be."""
    return round(round(value / unit) * unit, 9)
