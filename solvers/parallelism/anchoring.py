"""Rates of timed layers: what to time for a problem, and the rate set of what was timed."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from stagewright.formulations.parallelism.ranges import products
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.prices.collectives import ring_part
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.timed_layers import TimedCollective, TimedLayers
from stagewright.graphs.machines.anchors import Anchor, layer_kinds
from stagewright.graphs.machines.rates import BORROWED, RateSet, Spread
from stagewright.graphs.models.shards import LayerKind, LayerSplit
from stagewright.graphs.models.traits import lacking
from stagewright.solvers.parallelism.space import Space, chosen

COMPOSED = 1.1
"""How far a training is from the sum of its timed layers: AMD's Primus, which projects trainings of
64 GPUs from layers timed on one node, is within 10 % in its four published runs."""

Degree = tuple[int, int, bool]
"""Tensor and expert degree, and whether tensor ranks divide the tokens."""


def degrees(problem: TrainingProblem, space: Space) -> dict[LayerKind, tuple[Degree, ...]]:
    """The degrees of every kind of layer that the layouts of a space have, without context ranks.

    Tensor degrees are those within a server. Raises InputError if the space has no layouts.
    """
    server = problem.fabric.per_server
    splits = [
        split for split in replace(space, context=(1,)).families(problem) if split.tensor <= server
    ]
    if not splits:
        raise InputError(space.why_none(problem))
    plain = _degrees(replace(split, expert=1) for split in splits)
    return {
        kind: _degrees(splits) if kind == "experts" else plain
        for kind in layer_kinds(problem.architecture)
    }


def _degrees(splits: Iterable[LayerSplit]) -> tuple[Degree, ...]:
    """Different degrees ascending, the undivided layer first, which all others are scaled from."""
    found = {(split.tensor, split.expert, split.sequence_parallel) for split in splits}
    return tuple(sorted(found | {(1, 1, False)}))


def microbatches(problem: TrainingProblem, space: Space, most: int) -> tuple[int, ...]:
    """The samples of a microbatch that a space has, up to ``most``.

    Raises InputError if there are none.
    """
    found = tuple(one for one in chosen(space.microbatch, problem.batch) if one <= most)
    if not found:
        raise InputError(f"no microbatch of the layouts has at most {most} samples")
    return found


TIMED = (
    "experts", "shared experts", "biases of attention", "biases of the feed-forward",
    "norms of heads", "a feed-forward without gates", "learned positions", "tied embeddings",
    "layer norms",
)  # fmt: skip
"""Traits of models whose layers the script can make."""


def require_timeable(problem: TrainingProblem) -> None:
    """Refuse a model whose layers the script cannot make. Raises InputError with what it has."""
    of = problem.architecture
    run = {
        "dropout": of.dropout,
        "products in fp8": problem.precision.fp8_products,
        "materialized attention": problem.attention != "fused",
    }
    others = lacking(of, problem.sequence, {*TIMED, *of.traits})
    for what in (*others, *(what for what, has in run.items() if has)):
        raise InputError(
            f"{of.name} with {what}: anchor times decoders with grouped attention over all "
            "tokens and two norms in a block, in bf16 or fp32; use calibrate, with whole "
            "iterations"
        )


def anchored(timed: TimedLayers, name: str, source: str) -> RateSet:
    """The rates of timed layers, for their model alone.

    The range is the scatter of the repetitions, by the seconds of the layers, wider by
    :data:`COMPOSED`, and by a quarter if the layers are not those of the stack.

    Raises InputError if a kind of layer was not timed.
    """
    pace, latency = _server(timed.collectives)
    anchor = Anchor(
        model=timed.model,
        layers=timed.layers,
        update_seconds_per_parameter=timed.update.seconds / timed.update.parameters,
        server_bytes_per_second=None if pace is None else 1 / pace,
        server_latency_seconds=latency,
    )
    seconds = [one.forward_seconds + one.input_seconds + one.weight_seconds for one in timed.layers]
    low, high = (
        float(np.average([getattr(one, end) for one in timed.layers], weights=seconds))
        for end in ("low", "high")
    )
    spread = Spread(low, high).widened(COMPOSED)
    is_other = timed.stack != "plan" and timed.through.startswith("torch ")
    if is_other:
        spread = spread.widened(BORROWED)
    return replace(
        timed.rates,
        name=name,
        stack=timed.stack,
        devices=(timed.model.device,),
        releases=timed.through,
        source=source,
        fitted_to=f"{len(timed.layers)} timings of layers on {timed.machine}, no whole iteration",
        dense=spread,
        experts=spread,
        errors=(),
        measured=(products(timed.model),),
        borrowed=f"timed through {timed.through}, not {timed.stack}" if is_other else None,
        anchor=anchor,
    )


def _server(timed: Sequence[TimedCollective]) -> tuple[float | None, float]:
    """Seconds per byte and latency of a server's links, by relative least squares; None of none.

    As collectives are priced: see ``formulations.prices.collectives``.
    """
    if not timed:
        return None, 0.0
    rows = np.array([_latencies_and_bytes(one) for one in timed])
    seconds = np.array([one.seconds for one in timed])
    scale = rows.max(axis=0)
    (latency, pace), _ = nnls(rows / scale / seconds[:, None] * seconds.max(), np.ones(len(rows)))
    found = np.array([latency, pace]) * seconds.max() / scale
    if found[1] <= 0:
        raise InputError("collectives: larger ones do not take longer; time them again")
    return float(found[1]), float(found[0])


def _latencies_and_bytes(one: TimedCollective) -> tuple[float, float]:
    """How many latencies a collective has, and how many bytes each rank sends."""
    sent = ring_part(one.ranks, float(one.bytes))
    if one.operation == "all-to-all":
        return 1.0, sent
    halves = 2 if one.operation == "all-reduce" else 1
    return halves * (one.ranks - 1.0), halves * sent
