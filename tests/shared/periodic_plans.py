"""Valid periodic plans: a pattern by hand, and patterns that place one operation after another."""

import math
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import strategies as st
from plans import small_problem

from stagewright.formulations.checking.check import check, require_valid
from stagewright.formulations.patterns.pattern import Pattern, PatternProblem
from stagewright.formulations.patterns.pattern_problems import pattern_problem
from stagewright.formulations.plans.assembly import assemble_pattern
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost


def checked_plan(
    problem: PipelineProblem, stages: Sequence[Stage], pattern: Pattern
) -> PipelinePlan:
    """The plan of a pattern; InvalidPlan if the checker refuses it."""
    plan = assemble_pattern(problem, "test", stages, pattern)
    require_valid(problem, plan)
    return plan


def plan_by_hand(microbatches: int = 4) -> tuple[PipelineProblem, PipelinePlan]:
    """1F1B* on three devices: forwards of 1 s, backwards of 2 s, transfers of 1 s, period 4 s.

    Its items are stage, link, stage, link, stage with 3, 2, 3, 2, 3 s; none has time for a
    neighbour beside it in 4 s, so that stage 2 keeps one microbatch, stage 1 three, stage 0 five.
    """
    layers = tuple(Layer(f"l{i}", 1e6, (LayerCost(840, 1.0, 1e6, 1e9, 2.0),)) for i in range(3))
    cluster = uniform_servers(1, 3, Link(1e9), memory_bytes=16e9)
    problem = PipelineProblem(Chain("three", "test", 840, layers), cluster, microbatches)
    stages = [Stage((i, i + 1), (f"s0g{i}",)) for i in range(3)]
    # 0F, 0SEND_F, 1F, 1SEND_F, 2F, 2B, 2SEND_B, 1B, 1SEND_B, 0B
    starts = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 8.0, 11.0, 14.0, 17.0)
    return problem, checked_plan(problem, stages, Pattern(4.0, starts))


def stages_on(cuts: Sequence[int], devices: Sequence[str]) -> list[Stage]:
    """Stages that end at ``cuts``, each on one device or on several as in ``g0+g1``."""
    return [
        Stage((start, stop), tuple(names.split("+")))
        for (start, stop), names in zip(pairwise([0, *cuts]), devices, strict=True)
    ]


def place_one_by_one(problem: PatternProblem, period: float) -> Pattern | None:
    """Every operation as soon as the one before it has ended and its device or link is free."""
    taken: dict[int, list[tuple[float, float]]] = {}
    starts, ready = [], 0.0
    for job in problem.jobs:
        others = taken.setdefault(job.resource, [])
        start = _first_gap(others, ready, job.seconds, period)
        if start is None:
            return None
        others.append((start % period, job.seconds))
        starts.append(start)
        ready = start + job.seconds
    return Pattern(period, tuple(starts))


def _first_gap(
    others: list[tuple[float, float]], ready: float, seconds: float, period: float
) -> float | None:
    """The first time from ``ready`` on that is free for ``seconds`` in every period."""
    ends = [ready + (start + lasts - ready) % period for start, lasts in others]
    for candidate in sorted([ready, *ends]):
        waits = ((start - candidate) % period for start, _ in others)
        inside = any((candidate - start) % period < lasts - 1e-9 for start, lasts in others)
        if not inside and all(seconds <= wait + 1e-9 for wait in waits) and seconds <= period:
            return candidate
    return None


def placed_plan(
    problem: PipelineProblem, stages: Sequence[Stage], stretch: float = 1.0
) -> PipelinePlan:
    """The plan of the shortest of some periods, the largest load and longer ones, that is valid."""
    pattern = pattern_problem(problem, stages)
    load = max(sum(pattern.jobs[i].seconds for i in members) for members in pattern.shared)
    period = load * stretch
    for _ in range(60):
        found = place_one_by_one(pattern, period)
        if found is not None and not list(pattern._broken(found)):
            return checked_plan(problem, stages, found)
        period *= 1.1
    raise AssertionError("no period is long enough: the memory does not hold these stages")


@st.composite
def periodic(draw: st.DrawFn) -> tuple[PipelineProblem, PipelinePlan]:
    """Stages on devices of their own, on shared ones, or on groups that split a microbatch."""
    layers = draw(st.integers(1, 5))
    inner = draw(st.sets(st.integers(1, layers - 1), max_size=3)) if layers > 1 else set()
    cuts = [*sorted(inner), layers]
    problem = small_problem(layers, 6, draw(st.integers(1, 6)), memory_bytes=64e9)
    groups = st.sampled_from(["g0", "g1", "g2", "g3+g4"])
    stages = stages_on(cuts, [draw(groups) for _ in cuts])
    plan = placed_plan(problem, stages, draw(st.sampled_from([1.0, 1.0, 1.3, 2.5])))
    assert check(problem, plan) == ()
    assert math.isfinite(plan.schedule.period_seconds)  # type: ignore[union-attr]
    return problem, plan
