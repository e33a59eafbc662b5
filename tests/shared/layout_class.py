"""Every layout of the class that ``train-plan`` names, for random tiny problems.

The layouts are listed by plain loops from the words of the class and priced by ``evaluate``; the
search's own code has no part in it.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations_with_replacement, islice, pairwise, product
from random import Random
from typing import get_args

from own_rates import PRECISIONS, drawn_rates

from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.schedules import Schedule
from stagewright.formulations.parallelism.training import TrainingProblem, require_layout
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.fabric import Fabric, Level
from stagewright.graphs.models.architecture import (
    Architecture,
    Experts,
    FeedForward,
    GroupedAttention,
    Variant,
)
from stagewright.graphs.models.recurrences import Recurrence
from stagewright.graphs.models.shards import LayerSplit
from stagewright.graphs.models.splits import require_split
from stagewright.graphs.models.towers import Projection, Tower
from stagewright.graphs.models.tuning import tuned_with
from stagewright.solvers.parallelism.space import Space


@lru_cache(maxsize=1024)
def divisions(blocks: int, pipeline: int, chunks: int) -> tuple[tuple[int | None, int | None], ...]:
    """First and last blocks with which ``Layout`` divides in another way than with others."""
    some: tuple[int | None, ...] = (None, *range(blocks + 1))
    found: dict[tuple[int, ...], tuple[int | None, int | None]] = {}
    for first, last in product(some if pipeline > 1 else (None,), repeat=2):
        layout = Layout(pipeline, chunks=chunks, first_blocks=first, last_blocks=last)
        try:
            found.setdefault(layout.blocks_of_stages(blocks), (first, last))
        except InputError:
            continue
    return tuple(found.values())


def every_layout(problem: TrainingProblem, space: Space) -> Iterator[Layout]:
    """All of the space, in which a dimension that changes nothing has its first value."""
    for base in undivided(problem, space):
        blocks = problem.architecture.layers
        for first, last in divisions(blocks, base.pipeline, base.chunks):
            some = replace(base, first_blocks=first, last_blocks=last)
            for again in numbers(space, base, blocks):
                layout = replace(some, recompute_blocks=again)
                try:
                    require_layout(problem, layout)
                except InputError:
                    continue
                yield layout


def numbers(space: Space, base: Layout, blocks: int) -> tuple[int | None, ...]:
    """How many blocks of every stage may be recomputed; None for all or for not one."""
    return (*range(1, blocks), None) if space.partial and base.recompute == "full" else (None,)


def undivided(problem: TrainingProblem, space: Space) -> Iterator[Layout]:
    """The layouts without their blocks by stage."""
    devices, experts = problem.fabric.devices, problem.architecture.experts
    sizes = range(1, devices + 1)
    for p, t, c, d in product(sizes, repeat=4):
        if p * t * c * d != devices or not has(space, pipeline=p, tensor=t, context=c, data=d):
            continue
        for e, b, v in product(
            range(1, 1 + (experts.number if experts else 1)),
            range(1, problem.batch + 1),
            range(1, 1 + (space.chunks if p > 1 else 1)),
        ):
            if not has(space, expert=e, microbatch=b):
                continue
            for s, kind, sp, zero, offload, place in product(
                space.schedules,
                space.recompute,
                sequence_parallel(problem, space, LayerSplit(t, c, e)),
                space.zero,
                space.offload,
                space.placements if p > 1 and d > 1 else ("data-inside",),
            ):
                copies = most_copies(problem, t, c, d, e) * (2 if s == "dualpipe" else 1)
                if copies == 1 and zero != min(space.zero):
                    continue
                try:
                    yield Layout(p, t, c, d, e, b, v, s, kind, None, sp, zero, offload, place)
                except InputError:
                    continue


def has(space: Space, **degrees: int) -> bool:
    """Whether the space has the degrees."""
    limits = {name: getattr(space, name) for name in degrees}
    return all(limits[name] is None or value in limits[name] for name, value in degrees.items())


def sequence_parallel(
    problem: TrainingProblem, space: Space, split: LayerSplit
) -> tuple[bool, ...]:
    """With and without, or ``always`` with it wherever the tokens can be divided."""
    divided = replace(split, sequence_parallel=True)
    if split.tensor == 1 or space.sequence_parallel == "never" or not is_split(problem, divided):
        return (False,)
    return (True,) if space.sequence_parallel == "always" else (False, True)


def is_split(problem: TrainingProblem, split: LayerSplit) -> bool:
    try:
        require_split(problem.architecture, problem.sequence, split)
    except InputError:
        return False
    return True


def most_copies(problem: TrainingProblem, t: int, c: int, d: int, e: int) -> int:
    """The most ranks with the same parameters, which ZeRO could divide."""
    return max(c * d, t * c * d // e) if problem.architecture.experts is not None else c * d


@lru_cache(maxsize=256)
def compositions(blocks: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Any blocks of every stage, at least one between the first and the last."""
    least = [0, *[1] * (stages - 2), 0][:stages]
    free = blocks - sum(least)
    return tuple(
        tuple(low + b - a for low, (a, b) in zip(least, pairwise((0, *cuts, free)), strict=True))
        for cuts in combinations_with_replacement(range(free + 1), stages - 1)
    )


def every_division(problem: TrainingProblem, space: Space) -> Iterator[Layout]:
    """All of the space with any blocks, and any recomputed blocks, of every stage."""
    blocks = problem.architecture.layers
    for base in undivided(problem, space):
        for has in compositions(blocks, base.stages):
            counts = [numbers_of(count, space) for count in has]
            for again in product(*counts) if base.recompute != "none" else (None,):
                layout = replace(base, blocks_by_stage=has, recomputed_by_stage=again)
                try:
                    require_layout(problem, layout)
                except InputError:
                    continue
                yield layout


def numbers_of(count: int, space: Space) -> tuple[int, ...]:
    """How many of so many blocks of a stage may be recomputed."""
    least = 0 if "none" in space.recompute else min(1, count)
    return tuple(range(least, count + 1)) if space.partial else (least * count, count)


@dataclass(frozen=True, slots=True)
class Priced:
    """A layout with its time and memory; ``alike`` is the same for other recomputed blocks."""

    layout: Layout
    seconds: float
    peak_bytes: float
    alike: Layout
    recomputed: float


def priced(problem: TrainingProblem, layout: Layout) -> Priced:
    one, recomputed = evaluate(problem, layout), 0.0
    alike = replace(
        layout, recompute_blocks=None, recomputed_by_stage=None,
        recompute="selective" if layout.recompute == "selective" else "none",
    )  # fmt: skip
    if layout.recomputed_by_stage is not None:
        recomputed = sum(layout.recomputed_by_stage)
    elif layout.recompute == "full":
        recomputed = layout.recompute_blocks or math.inf
    return Priced(layout, one.seconds, one.peak_bytes, alike, recomputed)


def fewest(every: Iterable[Priced], memory: float) -> list[Priced]:
    """By time, those that fit with the fewest recomputed blocks."""
    found: dict[Layout, Priced] = {}
    for one in every:
        if one.peak_bytes <= memory and (
            one.alike not in found or one.recomputed < found[one.alike].recomputed
        ):
            found[one.alike] = one
    return sorted(found.values(), key=by_time)


def by_time(one: Priced) -> float:
    return one.seconds


def random_problem(chance: Random) -> TrainingProblem:
    """Two to eight devices; memory is not limited yet."""
    per_server, servers = chance.choice(
        ((1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 2), (4, 1), (2, 4), (4, 2), (8, 1))
    )
    rates = (1e7, 1e8, 1e9, 1e11)
    levels = [Level("server", per_server, chance.choice(rates), chance.choice((0.0, 1e-6, 1e-4)))]
    if servers > 1:
        network = chance.choice(rates)
        levels.append(Level("network", per_server * servers, network, chance.choice((0.0, 1e-5))))
    return TrainingProblem(
        random_architecture(chance),
        sequence=chance.choice((12, 32, 64)),
        batch=chance.choice((1, 2, 3, 4, 6, 8, 12, 16)),
        fabric=Fabric("h100", 80e9, tuple(levels), 20e9),
        rates=drawn_rates(chance.choice),
        precision=chance.choice(PRECISIONS),
        attention=chance.choice(("fused", "materialized")),
        overlap=chance.random() < 0.5,
        overlap_tensor=chance.random() < 0.5,
        fused_gradients=chance.random() < 0.5,
        reserve_bytes=0.0,
    )


def random_architecture(chance: Random) -> Architecture:
    """One to seven blocks, dense or of experts after dense ones, some with a window."""
    blocks, heads = chance.choice((1, 2, 3, 4, 5, 5, 6, 7, 7)), chance.choice((2, 4))
    experts = None
    if chance.random() < 0.5:
        dense = frozenset(range(chance.choice((0, 0, 1, 2, blocks))))
        number = chance.choice((2, 4))
        experts = Experts(
            number, chance.randint(1, number), chance.choice((32, 256)),
            shared_width=chance.choice((None, 96)), dense_layers=dense,
        )  # fmt: skip
    architecture = Architecture(
        "tiny",
        blocks,
        hidden=heads * 16,
        vocabulary=chance.choice((60, 997, 20000)),
        attention=GroupedAttention(heads, chance.choice((1, heads)), 16),
        feed_forward=FeedForward(96 * chance.randint(1, 4), gated=chance.random() < 0.5),
        experts=experts,
        tied=chance.random() < 0.5,
        window=chance.choice((None, None, 8)),
        full_layers=frozenset({0}),
        dropout=chance.random() < 0.3,
    )
    other = Random(chance.getstate()[1][0])
    changed = with_other_blocks(with_some_frozen(architecture, other), other)
    return changed if changed.tuning else in_front(changed, other.choice(TOWERS), other.random())


ENCODER = Tower(
    2, 32, GroupedAttention(2, 2, 16), FeedForward(96, gated=False), norm="rms", score_table=4
)
VISION = Tower(
    2, 64, GroupedAttention(4, 4, 16), FeedForward(192), tokens=16, positions=16, input_norm=True,
    stem=(Projection(16, 12, 64),), projector=(Projection(4, 256, 32, norm=256),), outputs=4,
)  # fmt: skip
TOWERS = (None, None, None, ENCODER, VISION)


def in_front(architecture: Architecture, tower: Tower | None, draw: float) -> Architecture:
    """The architecture behind a tower of its heads, or sometimes with further tokens."""
    if tower is None or not isinstance(architecture.attention, GroupedAttention):
        return replace(architecture, next_tokens=1) if draw < 0.2 else architecture
    heads = architecture.attention.heads
    tower = replace(tower, attention=replace(tower.attention, heads=heads, key_value_heads=heads))
    if tower.is_encoder:
        tower = replace(tower, hidden=architecture.hidden)
    return replace(architecture, layers=architecture.layers + tower.layers, tower=tower)


def with_other_blocks(architecture: Architecture, chance: Random) -> Architecture:
    """The architecture, or one with recurrent mixers in some blocks; a few have nothing else."""
    if chance.random() < 0.7 or architecture.tuning is not None:
        return architecture
    number = chance.randint(1, architecture.layers)
    blocks = frozenset(chance.sample(range(architecture.layers), number))
    scan = Recurrence("ssd", 4, 16, 8, 2, chunk=16, kernel_size=4)
    other = Variant(blocks, mixers=(scan,), fed=chance.random() < 0.5)
    return replace(architecture, variants=(other,))


def with_some_frozen(architecture: Architecture, chance: Random) -> Architecture:
    """The model, or one in four times with adapters, frozen layers, or both."""
    first, last = sorted(chance.choices(range(architecture.layers), k=2))
    ends = "embedding,head," if architecture.tied else chance.choice(("embedding,", "head,", ""))
    options = chance.choice(
        (
            {"lora": 4, "targets": chance.choice((None, "q_proj", "down_proj,gate_proj"))},
            {"frozen": f"{ends}blocks.{first}-{last}"},
            {"lora": 8, "frozen": f"blocks.{first}-{last}"},
        )
    )
    try:
        return tuned_with(architecture, **options) if chance.random() < 0.25 else architecture
    except InputError:  # nothing is trained, or the feed-forward has no gate
        return architecture


SCHEDULES = (
    ("1f1b",), ("1f1b", "zero-bubble"), ("zero-bubble",), ("zb-h2",), ("zbv",), ("dualpipev",),
    ("dualpipe",), ("1f1b", "dualpipe", "dualpipev"), get_args(Schedule),
)  # fmt: skip


def random_space(chance: Random, problem: TrainingProblem) -> Space:
    """All values of a dimension, or some."""
    kinds = ("none", "full"), ("none", "selective", "full"), ("none",), ("full",)
    devices, batch = problem.fabric.devices, problem.batch
    degrees = {
        name: None if chance.random() < 0.3 else (1, chance.randint(1, devices))
        for name in ("tensor", "context", "expert", "data")
    }
    return Space(
        pipeline=chance.choice((None, None, tuple(range(2, devices + 1)))),
        **degrees,
        microbatch=chance.choice((None, (1,), (1, chance.randint(1, batch)))),
        chunks=chance.choice((1, 2, 3)),
        schedules=chance.choice(SCHEDULES),
        recompute=chance.choice(kinds if problem.attention != "fused" else kinds[::2] + kinds[3:]),
        partial=chance.random() < 0.6,
        sequence_parallel=chance.choice(("always", "any", "never")),
        zero=chance.choice(((0,), (1,), (0, 3), (0, 1, 2, 3))),
        offload=chance.choice(((False,), (False,), (False, True))),
        placements=chance.choice((("data-inside",), ("data-inside", "pipeline-inside"))),
    )


@dataclass(frozen=True)
class Case:
    """A problem, a space of it and all layouts of that, whether they fit or not."""

    problem: TrainingProblem
    space: Space
    every: tuple[Priced, ...]

    def fitting(self, memory: float) -> list[Priced]:
        """By time, what the class has in so much memory."""
        if self.space.partial:
            return fewest(self.every, memory)
        return sorted((one for one in self.every if one.peak_bytes <= memory), key=by_time)

    def limited(self, memory: float) -> TrainingProblem:
        """The problem with devices of so much memory."""
        return replace(self.problem, fabric=replace(self.problem.fabric, memory_bytes=memory))

    def draw_memory(self, chance: Random) -> float:
        """Memory that is enough for few of the layouts, for some or for all."""
        peaks = sorted(one.peak_bytes for one in self.every)
        most = chance.choice((1, 8, len(peaks)))
        return peaks[chance.randrange(min(most, len(peaks)))]


def random_case(chance: Random, listed: Callable[..., Iterator[Layout]], most: int) -> Case:
    """A case of at least one layout, and at most so many."""
    while True:
        problem = random_problem(chance)
        for _ in range(20):
            space = random_space(chance, problem)
            layouts = list(islice(listed(problem, space), most + 1))
            if 0 < len(layouts) <= most:
                return Case(problem, space, tuple(priced(problem, one) for one in layouts))
