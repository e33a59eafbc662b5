"""Bounds on every finite plan from the memory of devices: docs/certificates.md has the proofs.

Before the first backward of an iteration devices compute nothing but forwards, whose activations
they keep, or compute again later. So they are idle, or do more work, if memory holds less than
the forwards that they had time for. And a microbatch is on several devices, which takes transfers,
or is computed again where one device cannot hold it. Without offloading.

What must be computed again is bounded at a price of a byte (weak duality): a layer costs the price
of its activations, or its forward; of neighbours that are computed again, the first keeps its
input.
"""

import numpy as np

from stagewright.formulations.pipelines.bounds.every_plan import LeastTimes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.prices.collectives import pace, paced_seconds
from stagewright.graphs.documents.arrays import Floats

MEMORY_LOAD = "load and warm-up in memory"
MEMORY_PATH = "way of one microbatch in memory"
MARGIN = 1e-9  # relative; rounding of sums of bytes
_PRICES = 48  # of a byte, that are tried
_MOST_LAYERS = 2000  # of which the runs on one device are examined, in a second


def memory_load_bound(problem: PipelineProblem) -> float:
    """The load of all devices, and what they cannot use of the time before the first backward.

    No backward starts before all forwards of a microbatch have ended: after F seconds. By then the
    V devices have done forwards of K seconds that they do not compute again. So
    V T >= M sum(work) + sum(steps) + V F - K. Layers that are not done by then are the last ones
    of a microbatch.
    """
    times, inputs = LeastTimes(problem), problem.inputs_per_layer(1)
    numbers = np.array(times.numbers)[:, None]
    work = times.device_seconds(times.occupied).min(axis=0).sum() * problem.microbatches
    warm_up = len(problem.cluster) * float(times.forward.min(axis=(0, 1)).sum())
    done = numbers * np.where(times.possible, _finite(times.forward).max(axis=0), 0.0)
    held = numbers * (times.needs - times.state_bytes)
    room = float(problem.memory_bytes.sum()) * (1 + MARGIN) - float(times.state_bytes.sum())
    prices = _prices(done.max(axis=0), held.min(axis=0))
    # Of a microbatch: what is held at this price, less the seconds done that need not be again.
    kept = least = np.zeros(len(prices))
    again = np.full(len(prices), np.inf)
    for l, bytes_in in enumerate(inputs):
        begun = np.minimum(again, kept + prices * bytes_in)
        kept = np.minimum(kept, again) + (np.outer(prices, held[:, l]) - done[:, l]).min(axis=1)
        again, least = begun, np.minimum(least, np.minimum(kept, begun))
    idle = warm_up * (1 - MARGIN) + float((problem.microbatches * least - prices * room).max())
    steps = float(times.update.min(axis=0).sum())
    return (float(work) + steps + max(0.0, idle)) / len(problem.cluster)


def memory_path_bound(problem: PipelineProblem) -> float:
    """The way of a microbatch, with the transfers or the recomputation that memory asks for.

    A dynamic program over runs of layers on a device. Between one and the next there is a transfer
    in each direction, and in each run the forwards that do not fit are computed again.
    """
    times = LeastTimes(problem)
    fits = times.needs.min(axis=0).sum() <= problem.memory_bytes.max()
    is_plain = fits or len(problem.chain) > _MOST_LAYERS
    # Back to the first layer, whose weight gradient and step follow.
    back, last = times.gradient.min(axis=(0, 1)), times.backward[:, :, 0].min()
    way = times.forward.min(axis=(0, 1)).sum() + back[1:].sum() + last + times.update[:, 0].min()
    return float(way) + (0.0 if is_plain else _detour(times))


def _detour(times: LeastTimes) -> float:
    """The least seconds of transfers, there and back, and of what is computed again."""
    problem = times.problem
    layers, most = len(problem.chain), problem.chain.microbatch_size
    best = problem.cluster.pairs.best_between(np.arange(len(problem.cluster))) or (np.inf, 0.0)
    sends = np.zeros(layers)
    for l in range(1, layers):
        share = problem.share_bytes(problem.boundary_bytes(l), most)
        sends[l] = 2 * paced_seconds(share, pace(best[0]), best[1])
    more = np.append(0.0, np.full(layers, np.inf))
    again = _again(times, problem.inputs_per_layer(most))
    for start in range(layers):
        run = more[start] + sends[start] + again[start, start + 1 :]
        more[start + 1 :] = np.minimum(more[start + 1 :], run)
    return float(more[layers])


def _again(times: LeastTimes, inputs: Floats) -> Floats:
    """The least seconds that a device computes again for layers [start, stop), (L + 1, L + 1).

    inf if their states do not fit.
    """
    forward = times.forward.min(axis=(0, 1))
    saved = (times.needs - times.state_bytes).min(axis=0)
    prices, layers = _prices(forward, saved), len(forward)
    states = np.append(0.0, np.cumsum(times.state_bytes))
    room = float(times.problem.memory_bytes.max()) * (1 + MARGIN) - (states[None] - states[:, None])
    least = np.zeros((layers + 1, layers + 1))
    kept = np.zeros((layers, len(prices)))  # by the first layer of the run
    again = np.full_like(kept, np.inf)
    for l in range(layers):
        on = slice(l + 1)
        begun = np.minimum(again[on], kept[on] + prices * inputs[l]) + forward[l]
        kept[on] = np.minimum(kept[on], again[on]) + prices * saved[l]
        again[on] = begun
        total = np.minimum(kept[on], begun) - prices * room[on, l + 1, None]
        least[on, l + 1] = np.maximum(0.0, total.max(axis=1))
    return np.where(room >= 0, least, np.inf)


def _prices(seconds: Floats, held: Floats) -> Floats:
    """Prices of a byte, by which layers are worth less than what they hold, shape (P,)."""
    paid = (seconds > 0) & (held > 0)
    if not paid.any():
        return np.zeros(1)
    worth = np.sort(seconds[paid] / held[paid])
    return np.append(0.0, np.geomspace(worth[0] / 8, worth[-1] * 8, _PRICES))


def _finite(seconds: Floats) -> Floats:
    return np.where(np.isfinite(seconds), seconds, 0.0)
