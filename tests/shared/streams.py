"""Problems of one device whose kernels occupy shares of it, and plans with two streams."""

import random
from collections.abc import Iterator, Sequence
from itertools import chain, combinations, permutations

from stagewright.formulations.plans.actions import Action, ActionKind, F, I, W, parse_action
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.formulations.schedules.backward_first import two_stream_starts
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost

Shares = tuple[float | None, float | None, float | None]


def device_problem(
    times: Sequence[tuple[float, float, float]],
    shares: Sequence[Shares],
    updates: Sequence[float] = (),
    microbatches: int = 1,
    memory: float = 1e12,
    assumed: float | None = None,
    devices: int = 1,
) -> PipelineProblem:
    """Layers of (F, I, W) seconds with their shares, and seconds of their optimizer steps."""
    layers = []
    for i, ((forward, of_input, of_weights), (a, b, c)) in enumerate(
        zip(times, shares, strict=True)
    ):
        cost = LayerCost(
            1, forward, 1e6, 1e5, input_gradient_seconds=of_input,
            weight_gradient_seconds=of_weights, update_seconds=updates[i] if updates else None,
            forward_share=a, input_gradient_share=b, weight_gradient_share=c,
        )  # fmt: skip
        layers.append(Layer(f"l{i}", 1e6, (cost,)))
    cluster = uniform_servers(1, devices, Link(1e6), memory_bytes=memory)
    chain_of = Chain("m", "by hand", 1, tuple(layers))
    return PipelineProblem(chain_of, cluster, microbatches, assumed_share=assumed)


def stages_of(problem: PipelineProblem) -> list[Stage]:
    """A stage per layer on the first device."""
    name = problem.cluster.devices[0].name
    return [Stage((i, i + 1), (name,)) for i in range(len(problem.chain))]


def two_stream_plan(problem: PipelineProblem, main: str, sub: str) -> PipelinePlan:
    """The plan of two orders, such as ``2I0 2W0``, everything as early as possible."""
    rows = [[parse_action(text) for text in row.split()] for row in (main, sub)]
    return plan_of_orders(problem, *rows)


def plan_of_orders(
    problem: PipelineProblem, main: Sequence[Action], sub: Sequence[Action]
) -> PipelinePlan:
    """As `two_stream_plan`, of actions."""
    stages = stages_of(problem)
    starts, ends = two_stream_starts(problem, stages, main, sub)
    return assemble(problem, "test", stages, starts, begins="backward", sub_ends=ends)


def every_order(problem: PipelineProblem) -> Iterator[tuple[list[Action], tuple[Action, ...]]]:
    """All orders of both streams of one device that the dependencies of each stream allow."""
    before, weights = _dependencies(problem)
    sizes = range(len(weights) + 1)
    for moved in chain.from_iterable(combinations(weights, size) for size in sizes):
        for main in _sorted([one for one in before if one not in moved], before):
            for sub in permutations(moved):
                yield main, sub


def random_order(
    problem: PipelineProblem, chance: random.Random
) -> tuple[list[Action], list[Action]]:
    """One of them at random; in the sub-stream nearly as it becomes ready."""
    before, weights = _dependencies(problem)
    done: list[Action] = []
    while len(done) < len(before):
        ready = [
            one for one in before if one not in done and all(other in done for other in before[one])
        ]
        done.append(chance.choice(ready))
    moved = {one for one in weights if chance.random() < 0.7}
    main = [one for one in done if one not in moved]
    return main, [one for one in done if one in moved]


def _dependencies(problem: PipelineProblem) -> tuple[dict[Action, list[Action]], list[Action]]:
    """What each computation of the device follows, and the weight gradients."""
    count, every = len(problem.chain), range(problem.microbatches)
    steps = problem.update_per_layer(problem.kinds[0]) > 0
    before: dict[Action, list[Action]] = {}
    for s in range(count):
        gradients = [Action(s, W, m) for m in every]
        step = [Action(s, ActionKind.UPDATE)] if steps[s] else []
        before |= {one: gradients for one in step}
        for m in every:
            before[Action(s, I, m)] = [Action(s + 1, I, m)] if s + 1 < count else []
            before[Action(s, W, m)] = [Action(s, I, m)]
            lower = [Action(s - 1, F, m)] if s else []
            before[Action(s, F, m)] = [*lower, *gradients, *step]
    return before, [one for one in before if one.kind is W]


def _sorted(left: list[Action], before: dict[Action, list[Action]]) -> Iterator[list[Action]]:
    """Every order of ``left`` in which each comes after those before it that are there too."""
    if not left:
        yield []
    for one in left:
        if not any(other in left for other in before[one]):
            for rest in _sorted([other for other in left if other != one], before):
                yield [one, *rest]
