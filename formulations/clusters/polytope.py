"""Valid allocations as linear rows, for groups of jobs that are treated equally.

Jobs of one group have the same kind; each has a fixed part of the group's time (``share``). If all
that a policy asks of the jobs of a group is proportional to their shares, nothing is lost: the
average over the group of any allocation is one that the group's totals describe. Space sharing
then costs a variable for a pair of kinds, not of jobs.
"""

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem
from stagewright.formulations.clusters.rates import server_rows
from stagewright.graphs.documents.arrays import Bools, Floats, Ints

_NEGLIGIBLE = 1e-9  # of time: a solver's zero
HALF = 0.5 + 1e-12  # of a group: equal needs of two jobs may differ by rounding


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """``of_job[m]`` is job m's group, ``share[m]`` its part of the group; ``kind`` is by group."""

    of_job: Ints
    share: Floats
    kind: Ints

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def size(self) -> Ints:
        """Number of jobs in each group."""
        return np.bincount(self.of_job, minlength=len(self))

    @property
    def peak(self) -> Floats:
        """The largest share in each group: it bounds the group's time by 1 / peak."""
        peak = np.zeros(len(self))
        np.maximum.at(peak, self.of_job, self.share)
        return peak

    def total(self, values: Floats) -> Floats:
        """Sum of ``values``, by job, over each group."""
        return np.bincount(self.of_job, values, minlength=len(self)).astype(float)


def group_by(
    problem: AllocationProblem, *keys: Floats | Ints, share: Floats | None = None
) -> Groups:
    """Groups of the jobs that agree in kind, in what moves cost and in all ``keys``.

    ``share``, positive and by job, says in what proportion they divide what the group gets; equal
    parts without it.
    """
    of_job = problem.alike
    for key in keys:
        code = np.unique(key, return_inverse=True)[1]
        of_job = np.unique(of_job * len(problem) + code, return_inverse=True)[1]
    of_job = np.unique(of_job, return_inverse=True)[1]
    kind = np.zeros(int(of_job.max()) + 1, dtype=np.int64)
    kind[of_job] = problem.kind
    part = np.ones(len(problem)) if share is None else share
    return Groups(of_job, part / np.bincount(of_job, part)[of_job], kind)


@dataclass(frozen=True, slots=True, eq=False)
class Polytope:
    """Rows ``lower <= matrix @ y <= upper`` over y in [0, ``most``]: the valid totals of groups.

    The first rows are the groups' time, then the accelerators, the servers, and the pairs.
    ``rate @ y`` is each group's throughput in steps per second, shape (groups,).
    ``used @ y`` is how many accelerators of each worker type are in use, shape (workers,).
    """

    problem: AllocationProblem
    groups: Groups
    matrix: sparse.csr_array
    lower: Floats
    upper: Floats
    most: Floats
    rate: sparse.csr_array
    used: sparse.csr_array
    alone_group: Ints
    alone_worker: Ints
    pair: Ints
    side_group: Ints
    side_pair: Ints
    side: Ints
    side_column: Ints
    apart_group: Ints

    @property
    def columns(self) -> int:
        """Number of variables."""
        return len(self.most)

    def relaxed_upper(self) -> Floats:
        """``upper`` of the relaxation in which a group divides its jobs' whole time freely."""
        upper = self.upper.copy()
        upper[: len(self.groups)] = self.groups.size
        if self.apart_group.size:
            rows = np.arange(len(upper) - len(self.apart_group), len(upper))
            upper[rows[self.groups.size[self.apart_group] > 1]] = np.inf
        return upper

    def prices(self, duals: Floats) -> Floats:
        """How much lower one more accelerator of each type makes a bound by ``duals``; (types,).

        ``duals`` are of a minimised form whose first rows are the polytope's.
        """
        types = len(self.problem.table.counts)
        return np.maximum(0.0, -duals[len(self.groups) :][:types])

    def invert(self, y: Floats, *, all_served: bool = False) -> Allocation:
        """The allocation to jobs that has these totals.

        Less than ``_NEGLIGIBLE`` of the time is left out: rounding. ``all_served`` says that every
        job has time, however little; then what is left out is little beside a job's own time.
        """
        groups = self.groups
        order = np.argsort(groups.of_job, kind="stable")
        start = np.searchsorted(groups.of_job[order], np.arange(len(groups) + 1))
        entries: list[tuple[Ints, Ints, Ints, Floats]] = []
        least = np.full(len(groups), _NEGLIGIBLE)
        if all_served:
            least *= np.minimum(1.0, self.matrix[: len(groups)] @ y)
        alone = np.flatnonzero(y[: len(self.alone_group)] > least[self.alone_group])
        column, place = _spans(start, self.alone_group[alone])
        job, column = order[place], alone[column]
        share = y[column] * groups.share[job]
        entries.append(_entries(job, np.full(len(job), -1), self.alone_worker[column], share))
        time = self._pair_time(y)
        least_of_pair = np.full(len(self.pair), _NEGLIGIBLE)
        np.minimum.at(least_of_pair, self.side_pair, least[self.side_group])
        least_of_job = least[groups.of_job] * groups.share
        paired = y[len(self.alone_group) :][: len(self.pair)]
        for number in np.flatnonzero(paired > least_of_pair):
            entries.append(self._matched(int(number), time, order, start, least_of_job))
        merged = [np.concatenate(parts) for parts in zip(*entries, strict=True)]
        return Allocation(*merged)

    def _pair_time(self, y: Floats) -> Floats:
        """Time of each side entry: its variable's, or its pair's whole time without a variable."""
        twice = self.problem.table.first[self.pair] == self.problem.table.second[self.pair]
        direct = y[len(self.alone_group) + self.side_pair] * np.where(
            twice[self.side_pair], 2.0, 1.0
        )
        return np.where(self.side_column >= 0, y[self.side_column], direct)

    def _matched(
        self, number: int, time: Floats, order: Ints, start: Ints, least: Floats
    ) -> tuple[Ints, Ints, Ints, Floats]:
        """Pair the jobs of two kinds: line up both kinds' jobs and cut where either changes.

        For a kind with itself, the second half of the line is paired with the first: no job has
        more than half, so none is paired with itself. Less than ``least``, by job, is rounding.
        """
        worker = self.problem.table.worker[self.pair[number]]
        lines = []
        for side in (0, 1):
            chosen = np.flatnonzero((self.side_pair == number) & (self.side == side))
            members, lengths = [], []
            for entry in chosen:
                group = self.side_group[entry]
                jobs = order[start[group] : start[group + 1]]
                members.append(jobs)
                lengths.append(time[entry] * self.groups.share[jobs])
            if members:
                lines.append((np.concatenate(members), np.cumsum(np.concatenate(lengths))))
        if len(lines) == 1:
            (jobs, ends) = lines[0]
            half = ends[-1] / 2
            cuts = np.unique(np.concatenate([ends[ends < half], ends[ends > half] - half, [half]]))
            middle = (cuts + np.concatenate([[0.0], cuts[:-1]])) / 2
            first, second = (jobs[np.searchsorted(ends, at)] for at in (middle, middle + half))
        else:
            (jobs, ends), (others, other_ends) = lines
            length = min(ends[-1], other_ends[-1])
            cuts = np.unique(np.concatenate([ends, other_ends]).clip(max=length))
            middle = (cuts + np.concatenate([[0.0], cuts[:-1]])) / 2
            first = jobs[np.searchsorted(ends, middle)]
            second = others[np.searchsorted(other_ends, middle)]
        share = np.diff(cuts, prepend=0.0)
        kept = (share > np.minimum(least[first], least[second])) & (first != second)
        return _entries(first[kept], second[kept], np.full(kept.sum(), worker), share[kept])


def _entries(
    job: Ints, partner: Ints, worker: Ints, share: Floats
) -> tuple[Ints, Ints, Ints, Floats]:
    return job.astype(np.int64), partner.astype(np.int64), worker.astype(np.int64), share


def _spans(start: Ints, chosen: Ints) -> tuple[Ints, Ints]:
    """All positions from start[c] to start[c + 1] for each c of ``chosen``: (which c, position)."""
    size = start[chosen + 1] - start[chosen]
    which = np.repeat(np.arange(len(chosen)), size)
    offset = np.arange(len(which)) - np.repeat(np.cumsum(size) - size, size)
    return which, start[chosen][which] + offset


class _Triplets:
    """Entries of a sparse matrix, collected in parts."""

    def __init__(self) -> None:
        self.parts: list[tuple[Ints, Ints, Floats]] = []

    def add(self, rows: Ints, columns: Ints, values: Floats | Ints | float) -> None:
        shape = np.broadcast_shapes(np.shape(rows), np.shape(columns))
        self.parts.append(
            (
                np.broadcast_to(rows, shape).astype(np.int64),
                np.broadcast_to(columns, shape).astype(np.int64),
                np.broadcast_to(np.asarray(values, dtype=float), shape),
            )
        )

    def matrix(self, rows: int, columns: int) -> sparse.csr_array:
        where_row, where_column, values = (
            np.concatenate(part) for part in zip(*self.parts, strict=True)
        )
        return sparse.csr_array(
            sparse.coo_array((values, (where_row, where_column)), shape=(rows, columns))
        )


def polytope(problem: AllocationProblem, groups: Groups) -> Polytope:
    """Equations 5.1 to 5.3 for ``groups`` of the problem's jobs."""
    table = problem.table
    alone_group, alone_worker = np.nonzero(table.alone[groups.kind] > 0)
    pair = _useful_pairs(problem, groups)
    columns_alone, columns_pair = len(alone_group), len(pair)
    sides = _sides(problem, groups, pair)
    side_group, side_pair, side, own = sides
    columns = columns_alone + columns_pair + int(own.sum())
    side_column = np.full(len(side_group), -1)
    side_column[own] = np.arange(columns_alone + columns_pair, columns)
    kept = np.empty((len(groups), len(table.workers)))
    kept[groups.of_job] = problem.kept

    # Rows of time, one for each group, and below them of accelerators, one for each type.
    limits, used, rate = _Triplets(), _Triplets(), _Triplets()
    row_of_worker = len(groups) + table.accelerator
    at = np.arange(columns_alone)
    scale = table.uses[groups.kind[alone_group], alone_worker]
    limits.add(alone_group, at, 1.0)
    limits.add(row_of_worker[alone_worker], at, scale)
    alone = table.alone[groups.kind] * kept
    rate.add(alone_group, at, alone[alone_group, alone_worker])
    used.add(alone_worker, at, scale)

    # A pair holds its accelerators once, and takes time of both of its jobs.
    at = columns_alone + np.arange(columns_pair)
    scale = table.uses[table.first[pair], table.worker[pair]]
    limits.add(row_of_worker[table.worker[pair]], at, scale)
    used.add(table.worker[pair], at, scale)
    itself = table.first[pair] == table.second[pair]
    twice = np.where(itself[side_pair] & ~own, 2.0, 1.0)
    variable = np.where(own, side_column, columns_alone + side_pair)
    limits.add(side_group, variable, twice)
    paired = table.paired[pair][side_pair, side] * kept[side_group, table.worker[pair][side_pair]]
    rate.add(side_group, variable, twice * paired)

    rows: _Rows = []
    count = len(groups)
    upper = np.concatenate([1.0 / groups.peak, table.counts])
    rows.append((limits.matrix(len(upper), columns), np.full(len(upper), -np.inf), upper))
    _add_servers(rows, problem, groups, alone_group, alone_worker, pair, columns)
    apart = _add_coupling(rows, groups, itself, sides, side_column, columns_alone, columns)
    most = np.empty(columns)
    most[:columns_alone] = groups.size[alone_group]
    most[columns_alone : columns_alone + columns_pair] = np.minimum(
        *(
            np.bincount(problem.kind, minlength=len(table.kinds))[kind[pair]]
            for kind in (table.first, table.second)
        )
    )
    most[side_column[own]] = groups.size[side_group[own]]
    return Polytope(
        problem,
        groups,
        *_merged(rows),
        most,
        rate.matrix(count, columns),
        used.matrix(len(table.workers), columns),
        alone_group,
        alone_worker,
        pair,
        side_group,
        side_pair,
        side,
        side_column,
        apart,
    )


_Rows = list[tuple[sparse.csr_array, Floats, Floats]]
"""Matrices of rows with their least and most values."""


def _merged(parts: _Rows) -> tuple[sparse.csr_array, Floats, Floats]:
    if len(parts) == 1:
        return parts[0]
    matrices, lowers, uppers = zip(*parts, strict=True)
    matrix = sparse.csr_array(sparse.vstack(matrices, format="csr"))
    return matrix, np.concatenate(lowers), np.concatenate(uppers)


def _useful_pairs(problem: AllocationProblem, groups: Groups) -> Ints:
    """The pairs in the table for which two jobs exist; a pair of one kind needs two jobs of it."""
    table = problem.table
    present = np.bincount(problem.kind, minlength=len(table.kinds))
    itself = table.first == table.second
    alone_in_kind = np.bincount(groups.kind, minlength=len(table.kinds)) == 1
    peak = np.zeros(len(table.kinds))
    np.maximum.at(peak, groups.kind, groups.peak)
    fits = np.where(
        itself,
        (present[table.first] >= 2) & ~(alone_in_kind[table.first] & (peak[table.first] > HALF)),
        (present[table.first] >= 1) & (present[table.second] >= 1),
    )
    return np.flatnonzero(fits)


def _sides(
    problem: AllocationProblem, groups: Groups, pair: Ints
) -> tuple[Ints, Ints, Ints, Bools]:
    """The groups of every pair: (group, pair, side, whether the group has its own variable).

    The only group of a kind takes all of its side; several have a variable each.
    """
    table = problem.table
    by_kind = np.argsort(groups.kind, kind="stable")
    start = np.searchsorted(groups.kind[by_kind], np.arange(len(table.kinds) + 1))
    found: list[tuple[Ints, Ints, Ints]] = []
    for side, kinds in enumerate((table.first[pair], table.second[pair])):
        number = np.arange(len(pair))
        if side == 1:
            number = number[table.first[pair] != kinds]
            kinds = kinds[table.first[pair] != kinds]
        which, place = _spans(start, kinds)
        found.append((by_kind[place], number[which], np.full(len(place), side)))
    group, number, side_of = (np.concatenate(part) for part in zip(*found, strict=True))
    in_kind = np.bincount(groups.kind, minlength=len(table.kinds))
    return group, number, side_of, in_kind[groups.kind[group]] > 1


def _add_servers(
    rows: _Rows,
    problem: AllocationProblem,
    groups: Groups,
    alone_group: Ints,
    alone_worker: Ints,
    pair: Ints,
    columns: int,
) -> None:
    table = problem.table
    kind = np.concatenate([groups.kind[alone_group], table.first[pair]])
    worker_of = np.concatenate([alone_worker, table.worker[pair]])
    for _, parts, servers in server_rows(table):
        row = sparse.csr_array(parts[kind, worker_of][None, :])
        row.resize(1, columns)
        rows.append((row, np.array([-np.inf]), np.array([float(servers)])))


def _add_coupling(
    rows: _Rows,
    groups: Groups,
    itself: Bools,
    sides: tuple[Ints, Ints, Ints, Bools],
    side_column: Ints,
    columns_alone: int,
    columns: int,
) -> Ints:
    """Rows: groups' parts of a side add up to the pair, and no job is paired with itself.

    Returns the groups of the last rows, those that keep a job from meeting itself.
    """
    group, pair, side, own = sides
    if not own.any():
        return group[:0]
    keys, row = np.unique(2 * pair[own] + side[own], return_inverse=True)
    sums = _Triplets()
    sums.add(row.reshape(-1), side_column[own], 1.0)
    total = np.where(itself[keys // 2], 2.0, 1.0)
    sums.add(np.arange(len(keys)), columns_alone + keys // 2, -total)
    rows.append((sums.matrix(len(keys), columns), np.zeros(len(keys)), np.zeros(len(keys))))
    # Two or more jobs of equal shares have at most half each, whatever the group has.
    at_risk = np.flatnonzero(own & itself[pair] & (groups.peak[group] > 0.5))
    if len(at_risk):
        apart = _Triplets()
        apart.add(np.arange(len(at_risk)), side_column[at_risk], groups.peak[group[at_risk]])
        apart.add(np.arange(len(at_risk)), columns_alone + pair[at_risk], -1.0)
        least, most = np.full(len(at_risk), -np.inf), np.zeros(len(at_risk))
        rows.append((apart.matrix(len(at_risk), columns), least, most))
    return group[at_risk]
