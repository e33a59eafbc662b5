"""Plans for changed problems: from the plan before in a tenth of the CPU time, and from nothing.

Each row is planned in processes whose planners read a clock of CPU seconds, so that other processes
of the machine change nothing.
"""

import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.anytime import on_cpu_clock
from benchmarks.report import Table, percent
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import load_plan, save_plan
from stagewright.graphs.machines.cluster import Cluster, Link, load_cluster, uniform_servers
from stagewright.graphs.machines.parts import first_devices, with_faster_links
from stagewright.graphs.models.chain import Chain, LayerCost, load_model
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planning import plan

EXAMPLES = Path(__file__).parents[1] / "examples"
SECONDS, WARM = 10.0, 0.1  # CPU seconds, and the share of them from the plan before
TIMES = ("forward_seconds", "backward_seconds", "input_gradient_seconds", "weight_gradient_seconds")

Change = Callable[[PipelineProblem], PipelineProblem]


def fewer(count: int, problem: PipelineProblem) -> PipelineProblem:
    """Without the last ``count`` devices."""
    left = len(problem.cluster) - count
    return replace(problem, cluster=first_devices(problem.cluster, left))


def on(servers: int, problem: PipelineProblem) -> PipelineProblem:
    """On that many servers of four devices."""
    return replace(problem, cluster=servers_of_v100(servers, 4))


def slower_links(problem: PipelineProblem) -> PipelineProblem:
    """Links between servers, or all of a single one, at half the bandwidth."""
    single = len(problem.cluster.servers) == 1
    return replace(problem, cluster=with_faster_links(problem.cluster, 0.5, within=single))


def other_times(spread: float, seed: int, problem: PipelineProblem) -> PipelineProblem:
    """Every layer's times multiplied by a random number in 1 +- ``spread``."""
    numbers = random.Random(seed)

    def changed(cost: LayerCost, by: float) -> LayerCost:
        known: dict[str, Any] = {name: getattr(cost, name) for name in TIMES}
        return replace(cost, **{n: None if one is None else one * by for n, one in known.items()})

    factors = [1 + numbers.uniform(-spread, spread) for _ in problem.chain.layers]
    layers = tuple(
        replace(layer, costs=tuple(changed(cost, by) for cost in layer.costs))
        for layer, by in zip(problem.chain.layers, factors, strict=True)
    )
    return replace(problem, chain=replace(problem.chain, layers=layers))


def batch(microbatches: int, problem: PipelineProblem) -> PipelineProblem:
    """With other microbatches."""
    return replace(problem, microbatches=microbatches)


def servers_of_v100(servers: int, devices: int) -> Cluster:
    """Servers as of `stagewright cluster SERVERSxDEVICES --device v100`."""
    links = Link(2.03e10, 2.4e-6), Link(5.25e9, 4.4e-6)
    return uniform_servers(servers, devices, *links)


CASES: tuple[tuple[str, str, str, Change], ...] = (
    ("bert-48", "2x4", "a device lost", partial(fewer, 1)),
    ("bert-large", "2x4", "a device lost", partial(fewer, 1)),
    ("resnet152", "dgx1", "a device lost", partial(fewer, 1)),
    ("vgg19", "4x4", "a device lost", partial(fewer, 1)),
    ("xlnet-large", "4x4", "a server lost", partial(fewer, 4)),
    ("bert-48", "1x4", "a server more", partial(on, 2)),
    ("transformer", "2x4", "two servers more", partial(on, 4)),
    ("inception-v3", "1x4", "a server more", partial(on, 2)),
    ("bert-large", "4x4", "links half as fast", slower_links),
    ("vgg19", "2x4", "links half as fast", slower_links),
    ("xlnet-large", "dgx1", "links half as fast", slower_links),
    ("bert-48", "4x4", "links half as fast", slower_links),
    ("bert-48", "dgx1", "times within 5 %", partial(other_times, 0.05, 12)),
    ("bert-large", "dgx1", "times within 10 %", partial(other_times, 0.1, 13)),
    ("resnet152", "2x4", "times within 10 %", partial(other_times, 0.1, 14)),
    ("inception-v3", "dgx1", "times within 20 %", partial(other_times, 0.2, 15)),
    ("bert-large", "2x4", "12 microbatches", partial(batch, 12)),
    ("xlnet-large", "2x4", "16 microbatches", partial(batch, 16)),
    ("transformer", "4x4", "6 microbatches", partial(batch, 6)),
)


def problem_of(profile: str, cluster: str) -> PipelineProblem:
    chain: Chain = load_model(EXAMPLES / f"profiles/{profile}.v100.json")
    if cluster == "dgx1":
        return PipelineProblem(chain, load_cluster(EXAMPLES / "clusters/dgx1.json"), 8)
    return PipelineProblem(chain, servers_of_v100(*map(int, cluster.split("x"))), 8)


def measure(number: int, seconds: float, before: str) -> None:
    """Plan a case before its change, then after it in two ways; print costs and gaps as JSON."""
    profile, cluster, _, change = CASES[number]
    problem = problem_of(profile, cluster)
    changed = change(problem)
    plan(changed, "auto", Limits(0.1 * seconds))  # loads what a first plan loads
    known = Path(before)
    if not known.exists():
        first = plan(problem, "auto", Limits(seconds)).plan
        assert first is not None
        save_plan(first, known)
    start = Choices(start=load_plan(known))
    warm = plan(changed, "auto", Limits(WARM * seconds), choices=start)
    cold = plan(changed, "auto", Limits(seconds))
    print(json.dumps([(one.cost, one.bound, one.gap) for one in (warm, cold)]))


def tables(quick: bool) -> list[Table]:
    """Costs and gaps of a plan from the one before and of a plan from nothing."""
    seconds, rows, ratios = 1.0 if quick else SECONDS, [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, (profile, cluster, change, _) in enumerate(CASES[: 2 if quick else None]):
            warm, cold = _measured(number, seconds, f"{folder}/{number}.json")
            ratios.append(warm[0] / cold[0])
            rows.append((
                profile, cluster, change, warm[0], cold[0], f"{warm[0] / cold[0]:.3f}",
                percent(warm[2]), percent(cold[2]),
            ))  # fmt: skip
    title = (
        f"plans for changed problems: from the plan before in {WARM * seconds:g} CPU s, from "
        f"nothing in {seconds:g}; cost ratio {geometric_mean(ratios):.3f} (geometric mean), "
        f"{median(ratios):.3f} (median)"
    )
    columns = (
        "profile", "cluster", "change", "warm s", "cold s", "warm to cold", "warm gap", "cold gap",
    )  # fmt: skip
    return [Table("replanning", title, columns, tuple(rows))]


def _measured(number: int, seconds: float, before: str) -> Sequence[Sequence[float]]:
    said = on_cpu_clock("replanning", f"measure({number}, {seconds}, {before!r})")
    found: Sequence[Sequence[float]] = json.loads(said)
    return found
