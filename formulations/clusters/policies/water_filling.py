"""Water filling (thesis 5.4.3): max-min fairness that goes on until no job can be raised.

Each round raises all jobs that are not stuck, at the speed of their weights:

    maximise theta  such that  throughput(m, X) >= floor_m + theta * need_m  for every job m

where floor_m is what the rounds before have guaranteed to m (the thesis's t_m), and need_m is the
weight of m this round times the throughput at which m's normalised throughput is 1; it is 0 for
stuck jobs and those that wait. Then jobs that no valid allocation raises while all others keep
their floors are stuck for good: their weights go to others, by the policy. A floor is what was
guaranteed, not what the last allocation happened to give (``throughput(m, X_prev)``): the answer
then depends on the problem alone, and with constant weights it is the lexicographic optimum.

The *level* of a job is the round in which it got stuck; rounds that raise nobody count as part of
the one before. ``verify`` proves an allocation from its levels, whatever found them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem, throughput
from stagewright.formulations.clusters.policies import max_min
from stagewright.formulations.clusters.polytope import Groups, Polytope, group_by, polytope
from stagewright.formulations.forms.models import LinearProgram, weak_duality_bound
from stagewright.graphs.documents.arrays import Bools, Floats, Ints

Needs = Callable[[Bools], Floats]
"""From which jobs are stuck to the need of each job, steps per second for a level of 1."""

TOLERANCE = 1e-5
"""By how much levels may be off, as a part of what an equal share of the cluster gives."""
_BLOCK = 32  # levels that share their groups in the verifier
ROUNDING = 1e-13  # of a bound


def flat(problem: AllocationProblem) -> Needs:
    """The needs of a single level: the jobs' own weights, as in max-min fairness."""
    needs = max_min.needs(problem)
    return lambda stuck: np.where(stuck, 0.0, needs)


def normalised(problem: AllocationProblem, allocation: Allocation) -> Floats:
    """Each job's normalised throughput, without its weight (5.4.1)."""
    return np.asarray(throughput(problem, allocation) / problem.fair_throughput())


def objective(problem: AllocationProblem, allocation: Allocation, needs: Needs) -> float:
    """The least normalised throughput by weight, of the jobs that the first round raises."""
    need = needs(np.zeros(len(problem), dtype=bool))
    return float((throughput(problem, allocation)[need > 0] / need[need > 0]).min())


def units(problem: AllocationProblem) -> Floats:
    """Each job's approximate throughput, steps per second: a unit that scales rows to about 1."""
    crowding = min(1.0, float(problem.table.counts.sum() / problem.scale.sum()))
    return np.asarray(problem.fair_throughput() * crowding)


def key(values: Floats) -> Floats:
    """Equal numbers for ``values`` that only rounding tells apart, for ``group_by``."""
    positive = values > 0
    return np.where(positive, np.round(np.log(np.where(positive, values, 1.0)), 10), -1e9)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The programs over the totals of groups of equal jobs, and theta in the last column.

    Rows are those of the polytope, and then one for each group: its mean throughput ``rate @ y``
    in units, ``unit`` steps per second of one of its jobs, less theta times its speed.
    """

    valid: Polytope
    unit: Floats
    rate: sparse.csr_array
    matrix: sparse.csr_array

    def raising(self, need: Floats, floor: Floats) -> LinearProgram:
        """The program of a round, minimising -theta; ``need``, ``floor`` of a job of each group."""
        size = self.valid.groups.size
        speed, start = need / self.unit, floor / self.unit
        fastest = self.rate.max(axis=1).toarray().reshape(-1) * size
        # Never reached, so that what holds theta is told by the rows' duals alone.
        most = 1.0 + 2.0 * ((fastest - start)[speed > 0] / speed[speed > 0]).min()
        cost = np.zeros(self.valid.columns + 1)
        cost[-1] = -1.0
        return self._form(cost, speed, start, max(most, 1.0))

    def gaining(self, weight: Floats, floor: Floats) -> LinearProgram:
        """The most total throughput in units of groups that count ``weight``, negative."""
        cost = np.append(-(self.rate.T @ weight), 0.0)
        return self._form(cost, np.zeros(len(self.unit)), floor / self.unit, 0.0)

    def _form(self, cost: Floats, speed: Floats, start: Floats, most: float) -> LinearProgram:
        matrix = self.matrix.copy()
        matrix.data[matrix.indptr[-len(speed) :] - 1] = -speed
        return LinearProgram(
            cost,
            matrix,
            np.concatenate([self.valid.lower, start]),
            np.concatenate([self.valid.upper, np.full(len(speed), np.inf)]),
            np.zeros(len(cost)),
            np.append(self.valid.most, most),
            np.zeros(len(cost), dtype=bool),
        )

    def proved_gain(self, form: LinearProgram, duals: Floats, theta: float) -> Floats:
        """The most that a job of each group can gain, in units, if all other jobs stay level.

        By weak duality: an allocation in which group g gains x has a theta of at most the bound,
        less x times g's dual, less x times what the use of g's cheapest column costs the bound.
        """
        reduced = np.maximum(form.cost - form.matrix.T @ duals, 0.0)
        worth = reduced[self.rate.indices] / self.rate.data
        worth = np.minimum.reduceat(worth, self.rate.indptr[:-1])
        worth += np.maximum(duals[len(duals) - len(worth) :], 0.0)
        gap = max(-weak_duality_bound(form, duals) - theta, ROUNDING)
        with np.errstate(divide="ignore"):
            return np.asarray(gap * self.valid.groups.size / worth)


def rows(problem: AllocationProblem, groups: Groups) -> Rows:
    """The rows for ``groups``, whose jobs have equal shares."""
    valid = polytope(problem, groups)
    unit = groups.total(units(problem))
    rate = sparse.csr_array(sparse.diags_array(1 / unit) @ valid.rate)
    rate.eliminate_zeros()
    theta = sparse.csr_array(np.ones((len(groups), 1)))
    matrix = sparse.csr_array(
        sparse.block_array([[valid.matrix, None], [rate, theta]], format="csr")
    )
    matrix.sort_indices()  # theta's entry is the last of its row
    return Rows(valid, unit / groups.size, rate, matrix)


def replay(problem: AllocationProblem, reached: Floats, levels: Ints, needs: Needs) -> str | None:
    """Why rounds with these levels do not give the throughputs ``reached``; None if they do.

    The jobs that rise and get stuck in a round must agree on how far it went; the others get
    stuck where they were.
    """
    unit = units(problem)
    floor = np.zeros(len(problem))
    for level in np.unique(levels):
        need = needs(levels < level)
        last = levels == level
        rising = last & (need > 0)
        if not rising.any():
            return f"no job of level {level} was raised"
        theta = float(((reached - floor)[rising] / need[rising]).mean())
        floor = floor + theta * need
        off = np.where(last, np.abs(reached - floor), 0.0) / unit
        if theta < 0 or off.max() > TOLERANCE:
            name = problem.names[int(off.argmax())]
            return f"job {name!r} is {off.max():.2g} off the others of level {level}"
    return None


def _gain_programs(
    problem: AllocationProblem, reached: Floats, levels: Ints
) -> Iterator[tuple[int, LinearProgram, float]]:
    """For each level, the program of its jobs' largest total if no lower job loses; and the total.

    In units, negative, to be minimised. Jobs above the level may lose all that they have: in a
    mixture with what they have they still keep more than they had when the level got stuck.
    """
    distinct = np.unique(levels)
    unit = units(problem)
    for start in range(0, len(distinct), _BLOCK):
        block = distinct[start : start + _BLOCK]
        # Jobs above all of the block's levels need no rows of their own, nor do levels below it.
        above = levels > block[-1]
        side = np.where(levels < block[0], -1, np.where(above, np.inf, levels))
        groups = group_by(problem, side, key(np.where(above, 0.0, reached)))
        program = rows(problem, groups)
        size = groups.size
        floor = groups.total(reached) / size
        level_of = np.zeros(len(groups), dtype=np.int64)
        level_of[groups.of_job] = levels  # of a block's or lower groups; those above mix
        for level in block:
            weight = np.where(level_of == level, size, 0).astype(float)
            form = program.gaining(weight, np.where(level_of <= level, floor, 0.0))
            yield int(level), form, float((reached / unit)[levels == level].sum())


def verify(
    problem: AllocationProblem,
    allocation: Allocation,
    levels: Ints,
    needs: Needs,
    duals: Callable[[LinearProgram], Floats | None],
) -> str | None:
    """The first fault of ``allocation`` as the end of water filling; None proves the allocation.

    The rounds are replayed without solving anything, and for each level a linear program proves
    that none of its jobs can gain unless one of an equal or lower level loses. ``duals`` solves:
    it gives a number per row, of which weak duality makes a bound whatever they are.
    """
    reached = throughput(problem, allocation)
    wrong = replay(problem, reached, levels, needs)
    if wrong is not None:
        return wrong
    for level, form, have in _gain_programs(problem, reached, levels):
        found = duals(form)
        if found is None:
            return f"no proof that the jobs of level {level} are stuck"
        gain = -weak_duality_bound(form, found) - have
        if gain > TOLERANCE:
            return f"jobs of level {level} may gain {gain:.2g} while no job below loses"
    return None
