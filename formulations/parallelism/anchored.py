"""Times and bytes of layers that were timed themselves, in place of computed ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.machines.anchors import TimedLayer, between
from stagewright.graphs.models.shards import LayerKind, LayerShare, LayerSplit, share_of_kind


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """Seconds of a layer without its exchanges, and what these add to a forward and a backward.

    ``waited`` is None where exchanges were not timed.
    """

    forward: float
    input: float
    weight: float
    waited: tuple[float, float] | None = None


ComputedSeconds = Callable[[LayerShare, LayerSplit, int], float]
"""Computed seconds of all a layer's operators, on a number of samples."""


def timed_seconds(
    problem: TrainingProblem,
    share: LayerShare,
    split: LayerSplit,
    samples: int,
    computed: ComputedSeconds,
) -> LayerSeconds:
    """The seconds of a layer, from those that were timed.

    Between two numbers of samples they are interpolated. Outside of all, and at degrees that were
    not timed, they are the nearest timed ones, in proportion to the ``computed`` seconds.
    """
    anchor, kind = problem.rates.anchor, share.kind
    assert anchor is not None
    alone = anchor.at(kind, split, exchanges=False)
    together = anchor.at(kind, split, exchanges=True)
    if alone or together:

        def at(timed: Sequence[TimedLayer]) -> LayerSeconds:
            return _at(timed, samples, lambda count: computed(share, split, count))

        own, whole = at(alone or together), at(together or alone)
        more = whole.input + whole.weight - own.input - own.weight
        waited = max(0.0, whole.forward - own.forward), max(0.0, more)
        return replace(own, waited=waited if together else None)
    near = anchor.nearest(kind, split)
    timed = anchor.at(kind, near, exchanges=False)
    its_share = share_of_kind(problem.architecture, problem.sequence, near, kind)
    own = _at(timed, samples, lambda count: computed(its_share, near, count))
    scale = computed(share, split, samples) / computed(its_share, near, samples)
    return LayerSeconds(scale * own.forward, scale * own.input, scale * own.weight)


def _at(
    timed: Sequence[TimedLayer], samples: int, computed: Callable[[int], float]
) -> LayerSeconds:
    """Seconds at a number of samples; those that were ``timed`` are ascending in them."""
    before, after, part = between([one.samples for one in timed], samples)
    nearest = timed[after].samples
    is_outside = before == after and nearest != samples
    scale = computed(samples) / computed(nearest) if is_outside else 1.0

    def mixed(of: Callable[[TimedLayer], float]) -> float:
        return scale * ((1 - part) * of(timed[before]) + part * of(timed[after]))

    return LayerSeconds(
        forward=mixed(lambda one: one.forward_seconds),
        input=mixed(lambda one: one.input_seconds),
        weight=mixed(lambda one: one.weight_seconds),
    )


def not_timed(problem: TrainingProblem, layout: Layout) -> Iterator[str]:
    """What of a layout was not timed, so that it is computed or scaled; none without an anchor."""
    anchor = problem.rates.anchor
    if anchor is None:
        return
    name, split = problem.rates.name, layout.split
    if layout.context > 1:
        yield f"context parallelism was not timed in {name}: layers are scaled"
    kinds: dict[LayerKind, None] = dict.fromkeys(one.kind for one in anchor.layers)
    for kind in kinds:
        expert = split.expert if kind == "experts" else 1
        at = LayerSplit(split.tensor, 1, expert, split.sequence_parallel)
        timed = [*anchor.at(kind, at, exchanges=True), *anchor.at(kind, at, exchanges=False)]
        words = f"tensor {split.tensor}" + (f", expert {expert}" if expert > 1 else "")
        if not timed:
            yield f"{kind} at {words} was not timed in {name}: scaled from other degrees"
        elif not any(one.exchanges for one in timed) and max(split.tensor, expert) > 1:
            yield f"{kind} at {words} was timed without its exchanges in {name}: these are computed"
        sizes = [one.samples for one in timed]
        if timed and not min(sizes) <= layout.microbatch <= max(sizes):
            yield (
                f"{kind} on {layout.microbatch} samples was not timed in {name}, but on "
                f"{min(sizes)} to {max(sizes)}: scaled"
            )
    if problem.fabric.devices > problem.fabric.per_server:
        yield f"what crosses servers is computed, not timed in {name}"
