"""What each member of ``auto`` reaches alone, and the promises that are learnt from it.

A member has all the time after the balanced pipelines, on the CPU clock of ``anytime``. Promises
are learnt from instances that are not among the 60: the turns of the portfolio are simulated on the
courses of its members, and promises changed while plans get better by more than a change costs.
What members gain from each other's plans is not simulated.
"""

import json
import math
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from multiprocessing import get_context

import numpy as np

from benchmarks import anytime
from benchmarks.anytime import Course, Step
from benchmarks.report import Table
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.solvers.planners import auto
from stagewright.solvers.planners.steps.members import (
    PROMISES,
    Member,
    PlanWithin,
    member_of,
    promises_of,
)
from stagewright.solvers.planners.steps.proposal import NoPlan

SECONDS = 2.0
NAMES = ("published", "servers", "grouped", "general", "spp")
MOST_DEVICES = 128
NEAR = 1.01  # times the best cost
TIMES = 0.85, 1.75, 2.4  # CPU seconds at which plans are compared
MOST, LOST = 0.3, 0.03  # logarithm of a cost that counts at most, and of a plan that is not near
CHANGE = 0.003  # mean logarithm for which a promise may double
TRIES = 1500
Promises = dict[str, dict[str, float]]
Courses = dict[str, Course]


@cache
def others() -> dict[str, PipelineProblem]:
    """Drawn models and profiles elsewhere, which are not among the 60."""
    found = {f"drawn {seed}": anytime.drawn(seed) for seed in range(100, 150)}
    for i, profile in enumerate(anytime.PROFILES):
        for j, slack in ((4, None), (5, 1.6)):
            shape = anytime.SHAPES[(2 * i + j) % len(anytime.SHAPES)]
            chain, cluster = anytime.profiled(profile), anytime.servers_of(*shape)
            problem = PipelineProblem(chain, cluster, 24)
            one = problem if slack is None else anytime.tight(problem, slack)
            found[f"{profile} {shape[0]}x{shape[1]}, 24"] = one
    return {name: one for name, one in found.items() if len(one.cluster) <= MOST_DEVICES}


def courses(name: str, planners: tuple[str, ...]) -> Courses:
    """The courses of members alone, or of the portfolio (``auto``)."""
    said = json.loads(anytime.on_cpu_clock("anytime_members", f"child({name!r}, {planners})"))
    return {one: Course(tuple(map(tuple, steps))) for one, steps in said.items()}


def child(name: str, planners: tuple[str, ...]) -> None:
    """Write the steps of all as JSON, each in a process that begins with loaded kernels."""
    anytime.load_kernels()
    problem = (others() | anytime.instances())[name]
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        steps = pool.starmap(alone, [(problem, one) for one in planners], chunksize=1)
    print(json.dumps(dict(zip(planners, steps, strict=True))))


def alone(problem: PipelineProblem, planner: str) -> list[Step]:
    """The steps of a member in one turn, or of the portfolio."""

    def one_of(
        name: str, run: PlanWithin, is_wanted: Callable[[], bool], follows: bool, devices: int
    ) -> Member:
        mine = is_wanted if name == planner else lambda: False
        return Member(name, run, mine, follows, first=SECONDS)

    if planner != "auto":
        auto.member_of = one_of
    return anytime.steps_of(problem, "auto", SECONDS)


def tables(quick: bool) -> Iterator[Table]:
    """The members and the portfolio side by side; the promises learnt from other instances."""
    every = anytime.instances()
    names = [name for name, one in every.items() if len(one.cluster) <= MOST_DEVICES]
    yield side_by_side({one: courses(one, ("auto", *NAMES)) for one in names[: 2 if quick else 99]})
    if not quick:
        learnt = fitted({name: courses(name, NAMES) for name in others()})
        rows = [(kind or "any", *(f"{known[one]:.2g}" if one in known else "" for one in NAMES))
                for kind, known in learnt.items()]  # fmt: skip
        yield Table("anytime-promises", "Promises learnt", ("problem", *NAMES), (*rows,))


def side_by_side(found: dict[str, Courses]) -> Table:
    """How near each comes to the best of all."""
    costs = np.array([[one.at(math.inf)[0] for one in its.values()] for its in found.values()])
    rows = []
    for one, slower in zip(("auto", *NAMES), (costs / costs.min(axis=1)[:, None]).T, strict=True):
        known = slower[np.isfinite(slower)]
        mean, worst = math.expm1(np.log(known).mean()), known.max() - 1
        near, missing = (slower <= NEAR).sum(), len(slower) - len(known)
        rows.append((one, str(near), f"{100 * mean:.1f}", f"{100 * worst:.0f}", str(missing)))
    columns = "alone", "within 1 %", "mean, % slower", "worst, % slower", "no plan"
    return Table("anytime-members", f"{len(found)} instances, {SECONDS:g} CPU s", columns, (*rows,))


def fitted(found: dict[str, Courses]) -> Promises:
    """The promises with which simulated plans are the fastest."""
    rng, best, learnt = random.Random(0), math.inf, deepcopy(PROMISES)
    keys = [(kind, one) for kind, known in PROMISES.items() for one in NAMES if one in known]
    for attempt in range(TRIES):
        tried = deepcopy(learnt)
        kind, member = rng.choice(keys)
        tried[kind][member] *= 2 ** rng.choice((-1, -0.5, 0.5, 1)) if attempt else 1.0
        changes = [math.log2(tried[kind][one] / PROMISES[kind][one]) for kind, one in keys]
        score = _slower(found, tried) + CHANGE * sum(map(abs, changes))
        if score < best:
            best, learnt = score, tried
    return learnt


def _slower(found: dict[str, Courses], known: Promises) -> float:
    """The mean logarithm of simulated costs over those of the best member alone."""
    every = others()
    slower = [
        simulated(every[name], its, known, end) / min(one.at(end)[0] for one in its.values())
        for name, its in found.items()
        if any(math.isfinite(one.at(math.inf)[0]) for one in its.values())
        for end in TIMES
    ]
    return float(np.mean([min(math.log(one), MOST) + LOST * (one > NEAR) for one in slower]))


def simulated(problem: PipelineProblem, its: Courses, known: Promises, end: float) -> float:
    """The cost that the portfolio of members with these courses has after ``end`` CPU seconds."""
    began, best = _balanced(its)
    now, devices = began, len(problem.cluster)
    promises = promises_of(problem, math.isfinite(best), known)
    every = [member_of(name, _nothing, bool, False, devices) for name in promises]
    for one in every:
        one.promise = promises[one.name]
    while now < end:
        one = max(every, key=Member.expected)
        turn, cost = min(max(one.spent, one.first), end - now), best
        if one.name in its:
            spent = turn if one.anew else one.spent + turn
            cost = min(best, its[one.name].at(began + spent)[0])
        one.gain = (1 - cost / best if math.isfinite(best) else float(cost < best)) / turn
        one.spent, now, best = one.spent + turn, now + turn, cost
    return best


def _balanced(its: Courses) -> tuple[float, float]:
    """When the members begin, and the cost of the plan that they begin with; inf if none does."""
    firsts = [next(((when, cost) for when, cost, _ in one.steps if cost is not None),
                   (one.steps[0][0], math.inf)) for one in its.values()]  # fmt: skip
    return min(when for when, _ in firsts), max(cost for _, cost in firsts)


def _nothing(limits: Limits) -> NoPlan:
    return NoPlan(f"only simulated for {limits.seconds} s")
