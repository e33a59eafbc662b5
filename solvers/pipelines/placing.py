"""The devices of stages that share them: the best of given placements, improved by local search."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from time import perf_counter

import numpy as np

from stagewright.formulations.forms.answers import Limits, silent
from stagewright.formulations.pipelines.bounds.placements import BALANCE, Balance, placement_bounds
from stagewright.formulations.pipelines.bounds.stages import plans_of, quick_bound
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.plan import Bound
from stagewright.formulations.schedules.order import Device
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.pipelines.rows.search import RowSearch, compile_row_kernels

_BALANCING = 0.2  # share of the time for the bound by balance
_TRIALS = 100  # placements that are tried if each takes its share of the time
_FEW = 200  # placements that are all solved
_DRAWS = 100  # random neighbours, then random placements, among which one must be new


def search_placement(
    problem_on: Callable[[Device], MakespanProblem],
    first: Collection[Device],
    target: float,
    limits: Limits,
) -> Device:
    """The placement with the best schedule found; it uses all devices of the ``first`` ones.

    A placement is tried with the rows that a short search finds, if its bounds allow better ones.
    The next one differs from the best one in one stage, or in the exchange of two; if all those are
    tried, it is random.
    """
    began = perf_counter()
    compile_row_kernels()
    random = np.random.default_rng(limits.seed)
    trial = replace(limits, seconds=limits.seconds / _TRIALS)

    def cost(device: Device, most: float) -> float:
        """The cost of the placement; infinite if its bound is no better than ``most``."""
        try:
            problem = problem_on(device)
        except InputError:  # no room in memory
            return np.inf
        bound = quick_bound(problem)
        if bound >= most:
            return np.inf
        search = RowSearch(problem, limits.seed)
        search.first()
        search.run(max(bound, target), trial)
        return search.cost

    costs = {device: cost(device, np.inf) for device in first}
    best = min(costs, key=costs.__getitem__)
    while costs[best] > target and limits.left(perf_counter() - began) > 0:
        drawn = [_neighbour(best, random) for _ in range(_DRAWS)]
        drawn += [_numbered(random.integers(1 + max(best), size=len(best))) for _ in range(_DRAWS)]
        new = (one for one in drawn if max(one) == max(best) and one not in costs)
        device = next(new, None)
        if device is None:
            break
        costs[device] = cost(device, costs[best])
        best = device if costs[device] <= costs[best] else best
    return best


def few_placements(stages: int, devices: int) -> list[Device]:
    """Every placement on at most that many equal devices; none if there are too many to solve."""
    found: list[Device] = [()]
    for _ in range(stages):
        found = [
            (*one, d) for one in found for d in range(min(devices, 1 + max(one, default=-1) + 1))
        ]
        if len(found) > _FEW:
            return []
    return found


def placement_bound(problem: MakespanProblem, devices: int, limits: Limits) -> Bound:
    """The best bound for every placement of the stages on that many devices."""
    from stagewright.solvers.backends.cpsat import run_integers  # CP-SAT is slow to import

    plans = plans_of(problem)
    found = placement_bounds(problem, devices, plans)
    balance = Balance.of(problem, devices)
    share = replace(limits, seconds=_BALANCING * limits.seconds, backend=None)
    answer = run_integers(balance.form, share, silent)
    balanced = Bound(answer.bound * balance.unit, BALANCE, "schedule", plans)
    return max((*found, balanced), key=lambda bound: bound.seconds)


def _neighbour(device: Device, random: np.random.Generator) -> Device:
    """A random change; it may leave a device empty."""
    changed = list(device)
    one, other = random.integers(len(device), size=2)
    if random.random() < 0.5:
        changed[one], changed[other] = changed[other], changed[one]
    else:
        changed[one] = int(random.integers(1 + max(device)))
    return _numbered(changed)


def _numbered(homes: Iterable[int]) -> Device:
    """The devices numbered by first use."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(home, len(numbers)) for home in homes)
