"""Water filling (thesis 5.4.3): max-min fairness that goes on until no job can be raised.

Each round raises all jobs that are not stuck, at the speed of their weights:

    maximise theta  such that  throughput(m, X) >= floor_m + theta * need_m  for every job m

where floor_m is what the rounds before have guaranteed to m (the thesis's t_m), and need_m is the
weight of m this round times the throughput at which m's normalised throughput is 1; it is 0 for
stuck jobs and those that wait. Then jobs that no valid allocation raises while all others keep
their floors are stuck for good: their weights go to others, by the policy. A floor is what was
guaranteed, not what the last allocation happened to give (``throughput(m, X_prev)``): the answer
then depends on the problem alone, and with constant weights it is the lexicographic optimum.

Most rounds need no program. A job is stuck at its *cap*: its best rate, all of the time. And
while accelerators suffice, the caps tell what the next rounds are (``rounds_of_caps``). Whether
they do is a question about floors alone, and the duals of any program answer it for many floors
(``Cut``). They also say which worker types cost lower jobs what they have: rising jobs have no time
there, which lowers their caps (``time_left``).

The *level* of a job is the round in which it got stuck; rounds that raise nobody count as part of
the one before. ``verify`` proves an allocation from its levels, whatever found them.

Water filling over a tree of entities (thesis 5.4.3, figure 5.6).

An entity's weight goes to those of its members, entities or jobs, that are not stuck: under
``fairness`` by their weights, under ``fifo`` all of it to the first job. The cluster is shared by
the entities without a parent, by their weights. An entity whose jobs are all stuck has nothing to
give on, and its weight goes to its siblings.
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
RELAXED = (0.0, 1e-9, 1e-7)  # parts of the floors to give up if rounding makes them infeasible
SAME_LEVEL = 1e-7  # units: a round that raises the fastest by less raises nobody; it is rounding
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


def caps(problem: AllocationProblem, time: Floats) -> Floats:
    """The most throughput of each job, steps per second, in ``time`` on each worker type.

    ``time``: parts of the time, (jobs, workers). Where jobs may share accelerators, a job's cap is
    its best rate in any company.
    """
    if len(problem.table.paired):
        return problem.best_rates()
    rates = problem.rates * problem.kept
    order = np.argsort(-rates, axis=1)
    until = np.cumsum(np.take_along_axis(time, order, axis=1), axis=1).clip(max=1.0)
    return np.asarray(
        (np.take_along_axis(rates, order, axis=1) * np.diff(until, axis=1, prepend=0.0)).sum(axis=1)
    )


def rounds_of_caps(
    problem: AllocationProblem, needs: Needs, floor: Floats, levels: Ints, cap: Floats
) -> Iterator[tuple[Floats, Ints]]:
    """Floors and levels after each round from here on, if accelerators sufficed; by job.

    Levels are -1 of jobs that are not stuck.
    """
    unit = units(problem)
    while (levels < 0).any():
        need = needs(levels >= 0)
        room = np.divide(cap - floor, need, out=np.full(len(need), np.inf), where=need > 0)
        theta = max(0.0, float(room.min()))
        floor = floor + theta * need
        level = max(0, levels.max()) + (theta * (need / unit).max() > SAME_LEVEL)
        levels = np.where((room <= theta) & (levels < 0), level, levels)
        yield floor, levels


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Of every valid allocation, ``weight`` @ throughput is at most ``most``; weights by job."""

    weight: Floats
    most: float

    def excludes(self, floor: Floats) -> bool:
        """Whether no valid allocation reaches these throughputs, by more than rounding."""
        return bool(self.weight @ floor > self.most * (1 + RELAXED[1]))


def cut_of_accelerators(problem: AllocationProblem) -> Cut:
    """What jobs do takes at least the accelerators that it takes where it takes fewest."""
    rates = np.where(problem.uses > 0, problem.rates, 0.0)
    rates /= np.maximum(problem.uses, 1)
    best = rates.max(axis=1)
    if len(problem.table.paired):
        # Two jobs take as much as one.
        best = 2 * np.maximum(best, problem.best_rates() / problem.uses.max(axis=1))
    return Cut(1 / best, float(problem.table.counts.sum()))


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

    def raising(self, need: Floats, floor: Floats, end: float = np.inf) -> LinearProgram:
        """The program of a round, minimising -theta; ``need``, ``floor`` of a job of each group.

        It goes no further than ``end``.
        """
        size = self.valid.groups.size
        speed, start = need / self.unit, floor / self.unit
        fastest = self.rate.max(axis=1).toarray().reshape(-1) * size
        # Never reached, so that what holds theta is told by the rows' duals alone.
        most = 1.0 + 2.0 * ((fastest - start)[speed > 0] / speed[speed > 0]).min()
        cost = np.zeros(self.valid.columns + 1)
        cost[-1] = -1.0
        return self._form(cost, speed, start, min(end, max(most, 1.0)))

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

    def time_left(self, form: LinearProgram, duals: Floats, gap: float) -> Floats:
        """The most time of a job on each worker type, alone, if no job has less than its floor.

        For a job of each group, (groups, workers). By weak duality: time in a column costs the
        bound the column's reduced cost, and it has ``gap`` to lose.
        """
        valid = self.valid
        alone = valid.alone_group, valid.alone_worker
        reduced = np.maximum(form.cost - form.matrix.T @ duals, 0.0)[: len(valid.alone_group)]
        time = np.ones((len(valid.groups), len(valid.problem.table.workers)))
        time[alone] = np.divide(gap, reduced, out=time[alone], where=reduced > gap)
        return time

    def cut(self, duals: Floats) -> Cut:
        """The cut by the duals of any of the programs."""
        groups = self.valid.groups
        of_groups = duals.copy()
        of_groups[-len(groups) :] = np.maximum(of_groups[-len(groups) :], 0.0)
        weight = of_groups[-len(groups) :] / (groups.size * self.unit)
        none = np.zeros(len(groups))
        most = -weak_duality_bound(self.gaining(none, none), of_groups)
        return Cut(weight[groups.of_job], most)

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


def verify(
    problem: AllocationProblem,
    allocation: Allocation,
    levels: Ints,
    needs: Needs,
    duals: Callable[[LinearProgram], Floats | None],
) -> str | None:
    """The first fault of ``allocation`` as the end of water filling; None proves the allocation.

    The rounds are replayed without solving anything. For each level it is proved that none of its
    jobs can gain unless one of an equal or lower level loses: by their caps, or by a linear
    program. ``duals`` solves: it gives a number per row, of which weak duality makes a bound
    whatever they are.
    """
    reached = throughput(problem, allocation)
    wrong = replay(problem, reached, levels, needs)
    if wrong is not None:
        return wrong
    unit = units(problem)
    time = np.ones(problem.rates.shape)
    room = (caps(problem, time) - reached) / unit
    for level in np.unique(levels).tolist():
        here = levels == level
        if room[here].clip(min=0.0).sum() <= TOLERANCE:
            continue
        # Jobs above the level may lose all that they have, and need no rows of their own: in a
        # mixture with what they have they still keep more than they had when it got stuck.
        groups = group_by(problem, np.minimum(levels, level + 1), key(reached * (levels <= level)))
        program, size = rows(problem, groups), groups.size
        weight, floor = groups.total(here), groups.total(reached * (levels <= level)) / size
        solved = (duals(program.gaining(weight, floor * (1 - part))) for part in RELAXED)
        found = next((one for one in solved if one is not None), None)
        if found is None:
            return f"no proof that the jobs of level {level} are stuck"
        form = program.gaining(weight, floor)
        gain = -weak_duality_bound(form, found) - float((reached / unit)[here].sum())
        if gain > TOLERANCE:
            return f"jobs of level {level} may gain {gain:.2g} while no job below loses"
        left = program.time_left(form, found, max(gain, ROUNDING))
        time = np.minimum(time, left[groups.of_job])
        room = (caps(problem, time) - reached) / unit
    return None


def tree(problem: AllocationProblem) -> Needs:
    """The needs of jobs within entities; without entities the needs of ``flat``."""
    if not problem.entities:
        return flat(problem)
    entities = problem.entities
    number = {entity.name: place for place, entity in enumerate(entities)}
    # The cluster is the entity after the last.
    parent = np.array([number.get(entity.parent or "", len(entities)) for entity in entities])
    fifo = np.array([entity.discipline == "fifo" for entity in entities])
    weight = np.array([entity.weight for entity in entities])
    own = np.where(fifo[problem.entity], 1.0, problem.weight)
    fair = problem.fair_throughput()
    order = _top_down(parent)

    def needs(stuck: Bools) -> Floats:
        claims = np.where(stuck, 0.0, own)
        waiting = np.flatnonzero(~stuck & fifo[problem.entity])
        _, first = np.unique(problem.entity[waiting], return_index=True)
        claims[np.delete(waiting, first)] = 0.0
        return fair * _job_weights(problem.entity, claims, parent, weight, order)

    return needs


def _job_weights(entity: Ints, claims: Floats, parent: Ints, weight: Floats, order: Ints) -> Floats:
    """``claims`` of jobs and ``weight`` of entities turned into parts of the whole weight."""
    cluster = len(parent)
    claimed = np.bincount(entity, claims, minlength=cluster + 1)
    for place in order[::-1]:
        if claimed[place] > 0:
            claimed[parent[place]] += weight[place]
    given = np.zeros(cluster + 1)
    given[cluster] = weight[parent == cluster].sum()
    for place in order:
        if claimed[place] > 0:
            above = parent[place]
            given[place] = given[above] * weight[place] / claimed[above]
    return np.asarray(given[entity] * claims / np.where(claimed > 0, claimed, 1.0)[entity])


def _top_down(parent: Ints) -> Ints:
    """The entities, each after its parent."""
    depth = np.zeros(len(parent), dtype=np.int64)
    above = parent.copy()
    while (above < len(parent)).any():
        inside = above < len(parent)
        depth += inside
        above[inside] = parent[above[inside]]
    return np.argsort(depth, kind="stable")
