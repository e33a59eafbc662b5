"""The tables that prune allocations never ask for more than an allocation has."""

from collections.abc import Iterator
from itertools import combinations, groupby, pairwise, product
from math import inf

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from plans import small_problem
from profiles import examples
from strategies import random_problem

from stagewright.formulations.patterns.joint_patterns import JointForm, JointPatterns
from stagewright.formulations.patterns.one_f_one_b import period_bound
from stagewright.formulations.patterns.pattern_problems import pattern_problem, static_bytes
from stagewright.formulations.plans.memory import kept_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.solvers.patterns import joint_patterns
from stagewright.solvers.patterns.completion import STEPS, UNITS, Completion, completion, row_of
from stagewright.solvers.patterns.joint_patterns import allocations, longest_iteration

ROUNDING = 1e-9

some = examples(20, suppress_health_check=list(HealthCheck))
tight = random_problem(max_layers=5, max_devices=3, max_microbatches=6, tight_memory=True)
mixed = random_problem(
    max_layers=4, max_devices=3, max_microbatches=4, tight_memory=True, kinds=("a", "b")
)


def question_of(problem: PipelineProblem, recompute: tuple[str, ...] = ("none",)) -> JointPatterns:
    return JointPatterns(problem, tuple((v,) for v in range(len(problem.cluster))), recompute)


def every_allocation(problem: PipelineProblem) -> Iterator[tuple[Stage, ...]]:
    devices = [device.name for device in problem.cluster.devices]
    for chosen in product(devices, repeat=len(problem.chain)):
        stages, start = [], 0
        for name, layers in groupby(chosen):
            stop = start + len(list(layers))
            stages.append(Stage((start, stop), (name,)))
            start = stop
        yield tuple(stages)


def delays(seconds: list[float], period: float) -> list[float]:
    """Periods from the forward to the backward of every item, both included, as 1F1B* has them."""
    found, group, taken = [], 0, inf
    for item in reversed(seconds):
        if taken + item > period * (1 + ROUNDING):
            group, taken = group + 1, 0.0
        taken += item
        found.append(group - 1 + taken / period)
    return found[::-1]


def averages(
    problem: PipelineProblem, stages: tuple[Stage, ...], period: float
) -> tuple[list[float], list[float]]:
    """Microbatches that each stage keeps on average, and its bytes with them."""
    asked = pattern_problem(problem, stages)
    work = [there + back for there, back in zip(asked.forward, asked.backward, strict=True)]
    sends = [there + back for there, back in zip(asked.there, asked.back, strict=True)]
    items = [seconds for pair in zip(work, [*sends, 0.0], strict=True) for seconds in pair][:-1]
    kept = delays(items, period)[::2]
    return kept, [
        static_bytes(problem, stage) + periods * kept_bytes(problem, stage).saved_bytes
        for stage, periods in zip(stages, kept, strict=True)
    ]


def require_less(
    problem: PipelineProblem, stages: tuple[Stage, ...], period: float, tables: Completion
) -> None:
    """The stages before each stage need at least what the tables say."""
    kept, bytes_of = averages(problem, stages, period)
    asked = pattern_problem(problem, stages)
    work = [there + back for there, back in zip(asked.forward, asked.backward, strict=True)]
    for s, stage in enumerate(stages):
        whole = int(kept[s] * (1 - ROUNDING))
        row = row_of(whole + 1, (kept[s] - whole) * period, period)
        assert tables.needed[stage.layers[0], row] <= sum(bytes_of[:s]) * (1 + ROUNDING)
        for v, device in enumerate(problem.cluster.devices):
            own = [r for r, one in enumerate(stages) if one.devices == (device.name,)]
            free = problem.memory_bytes[v] - sum(bytes_of[r] for r in own if r >= s)
            if sum(bytes_of[r] for r in own) <= problem.memory_bytes[v]:
                units = min(UNITS, int(free / tables.unit * (1 + ROUNDING)))
                most = tables.placeable[stage.layers[0], row, units]
                assert sum(work[r] for r in own if r < s) <= most * (1 + ROUNDING)


@some
@given(tight, st.sampled_from((1.0, 1.1, 1.7)))
def test_no_allocation_needs_less(problem: PipelineProblem, longer: float) -> None:
    form = question_of(problem).form
    for stages in every_allocation(problem):
        period = period_bound(pattern_problem(problem, stages)) * longer
        if period < inf:
            # Tables of a longer period hold for shorter ones.
            for more in (1.0, 1.3):
                require_less(problem, stages, period, completion(form, period * more))


@some
@given(tight | mixed, st.floats(0.1, 0.9), st.sampled_from((("none",), ("none", "full"))))
def test_nothing_is_lost_by_pruning(
    problem: PipelineProblem, share: float, recompute: tuple[str, ...]
) -> None:
    form = question_of(problem, recompute).form
    longest = longest_iteration(form)

    def found(high: float) -> dict[bytes, float]:
        pairs = allocations(form, 0.0, high)
        return {rows.tobytes(): bound for bound, rows in pairs if rows is not None}

    least = min(found(longest).values(), default=longest)
    for high in (least * (1 - share) + longest * share, least * (1 + share / 10)):
        pruned = found(high)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(joint_patterns, "completion", without_tables)
            # Where memory is exactly full, rounding at another period may keep more of them.
            assert found(high).items() <= pruned.items()


def without_tables(form: JointForm, period: float, noise: None = None) -> Completion:
    """Tables of an infinite period, which allow everything that fits in memory."""
    found = completion(form, period, noise)
    return found._replace(
        period=inf, needed=np.zeros_like(found.needed), placeable=np.full_like(found.placeable, inf)
    )


def test_the_least_bytes_of_all_cuts() -> None:
    # Two devices in turns, with any number of cuts; memory is ample.
    problem = small_problem(devices=2)
    period, least = 0.29, inf
    for count in range(6):
        for cuts in combinations(range(1, 6), count):
            spans = pairwise((0, *cuts, 6))
            stages = tuple(Stage(layers, (f"g{s % 2}",)) for s, layers in enumerate(spans))
            asked = pattern_problem(problem, stages)
            if max(map(sum, zip(asked.forward, asked.backward, strict=True))) <= period:
                least = min(least, sum(averages(problem, stages, period)[1]))
    needed = completion(question_of(problem).form, period).needed[-1, 0]
    # Each of at most six delays is rounded down to a part of the period.
    assert least - 6 * problem.saved_bytes(0, 6, 1) / STEPS <= needed <= least
