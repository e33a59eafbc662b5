"""Memory-constrained greedy schedulers of Baechi (Jeon et al., SoCC 2020): m-ETF and m-SCT.

At every step they start the operator and device that can start first, and never fill idle time that
lies in the past. Hence on identical devices with enough memory, without groups,

    end <= load / m + (1 - 1 / m) (longest chain) + (most transfers along a chain)

as for ETF (Hwang, Chow, Anger and Lee, SIAM J. Comput. 1989). m-SCT adds the favourite children of
Hanen and Munier's relaxation: the device of an operator waits for its favourite child as long as
the child could not start elsewhere.
"""

import numpy as np
from scipy import sparse

from stagewright.formulations.forms.answers import Status
from stagewright.formulations.forms.models import LinearProgram
from stagewright.formulations.operators.problem import GraphTimes, OperatorProblem
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.solvers.backends.backend import solve
from stagewright.solvers.operators.insertion import by_devices, by_rank, mean_ranks, sources
from stagewright.solvers.operators.insertion_kernel import ANY, ROUNDING, transfer
from stagewright.solvers.operators.ranks import Arrays, arrays_of, transfers
from stagewright.solvers.pipelines.compiled import entry, inner


def single(problem: OperatorProblem) -> GraphTimes:
    """All operators on the one device that runs them all in the least time."""
    device = int(np.argmin(problem.seconds.sum(axis=0)))
    return _listed(problem, np.full(len(problem.names), device))


def data_parallel(problem: OperatorProblem) -> GraphTimes:
    """Every replica on its device, the next one after the last on the first again."""
    return _listed(problem, replica_numbers(problem) % len(problem.devices))


def replica_numbers(problem: OperatorProblem) -> Ints:
    """The replica of every operator; 0 for shared states, means, updates and their companions."""
    marks = [name.partition("/")[0].rpartition("@")[2] for name in problem.names]
    own = np.array([int(one) if one.isdigit() else 0 for one in marks])
    _, first = np.unique(problem.group, return_index=True)
    return own[first][problem.group]


def m_topo(problem: OperatorProblem) -> GraphTimes:
    """Fill one device after the other in topological order (Baechi, section 3.1).

    Each takes an equal part of all bytes and the largest group, or what its memory holds.
    """
    amount = _group_amounts(problem)
    cap = np.minimum(problem.memory, amount.sum() / len(problem.memory) + amount.max())
    home = np.zeros(len(amount), dtype=np.int64)
    d, filled = 0, 0.0
    for group in dict.fromkeys(problem.group.tolist()):
        if filled + amount[group] > cap[d] and d + 1 < len(cap):
            d, filled = d + 1, 0.0
        home[group] = d
        filled += amount[group]
    return _listed(problem, home[problem.group])


def _listed(problem: OperatorProblem, devices: Ints) -> GraphTimes:
    return by_devices(problem, by_rank(mean_ranks(problem)), devices)


def _group_amounts(problem: OperatorProblem) -> Floats:
    """State and tensors of each group."""
    made = np.bincount(problem.maker, problem.held_bytes, minlength=len(problem.names))
    return np.asarray(np.bincount(problem.group, problem.state_bytes + made), dtype=float)


NONE = -1  # favourite child of an operator without one


def m_etf(problem: OperatorProblem, held: float = 1.0) -> GraphTimes | None:
    """Earliest task first; None if an operator fits in no device's memory."""
    return _greedy(problem, np.full(len(problem.names), NONE), held)


def m_sct(problem: OperatorProblem, held: float = 1.0) -> GraphTimes | None:
    """Small communication times; None if an operator fits in no device's memory."""
    return _greedy(problem, favourite_children(problem), held)


def _greedy(problem: OperatorProblem, favourite: Ints, held: float) -> GraphTimes | None:
    """Devices and order by the kernel; its times without insertion only improve by it."""
    arrays = arrays_of(problem)
    is_done, device, order = _earliest_first(
        arrays, sources(arrays), favourite, transfers(arrays, np.max), held
    )
    return by_devices(problem, order, device) if is_done else None


def favourite_children(problem: OperatorProblem) -> Ints:
    """The favourite child of each operator by the linear relaxation, NONE without one.

    x is 0 for the one follower, and the one maker, that an operator may have on its device. An
    operator's favourite child is a follower with x < 1/2; the rows leave one at most.
    """
    maker, reader, tensor = problem.edges
    pairs, number = np.unique(np.stack([maker, reader]), axis=1, return_inverse=True)
    waits = np.zeros(pairs.shape[1])
    np.maximum.at(waits, number.ravel(), transfers(arrays_of(problem), np.max)[tensor])
    favourite = np.full(len(problem.names), NONE)
    if pairs.size:
        answer = solve(_relaxation(problem, pairs, waits))
        if answer.status is Status.OPTIMAL and answer.values is not None:
            is_local = answer.values[len(problem.names) + 1 :] < 0.5
            favourite[pairs[0, is_local]] = pairs[1, is_local]
    return favourite


def _relaxation(problem: OperatorProblem, pairs: Ints, waits: Floats) -> LinearProgram:
    """Columns: starts, the end, x of each pair of operators (Baechi, section 3.2)."""
    n, k = len(problem.names), pairs.shape[1]
    work = problem.seconds.mean(axis=1)
    scale = max(work.max(), waits.max()) or 1.0  # the solver has absolute tolerances
    work, waits = work / scale, waits / scale
    rows, one = np.arange(k), np.ones(k)

    def matrix(*parts: tuple[Floats, Ints, Ints], size: int) -> sparse.csr_array:
        data, row, column = (np.concatenate(part) for part in zip(*parts, strict=True))
        return sparse.csr_array((data, (row, column)), shape=(size, n + 1 + k))

    operators = np.arange(n)
    before = matrix(
        (one, rows, pairs[1]), (-one, rows, pairs[0]), (-waits, rows, n + 1 + rows), size=k
    )
    ends = matrix(
        (np.ones(n), operators, np.full(n, n)), (-np.ones(n), operators, operators), size=n
    )
    few = [matrix((one, end, n + 1 + rows), size=n) for end in pairs]
    degrees = [np.bincount(end, minlength=n) - 1.0 for end in pairs]
    return LinearProgram(
        cost=np.r_[np.zeros(n), 1.0, np.zeros(k)],
        matrix=sparse.csr_array(sparse.vstack([before, ends, *few])),
        row_lower=np.concatenate([work[pairs[0]], work, *(np.maximum(0.0, d) for d in degrees)]),
        row_upper=np.full(k + 3 * n, np.inf),
        lower=np.zeros(n + 1 + k),
        upper=np.r_[np.full(n + 1, np.inf), np.ones(k)],
        integral=np.zeros(n + 1 + k, dtype=bool),
    )


@entry
def _earliest_first(  # noqa: C901 - one loop over starts
    a: Arrays, is_source: Bools, favourite: Ints, transfer: Floats, held: float
) -> tuple[bool, Ints, Ints]:
    """(every operator is placed, device, order)."""
    n, m = a.seconds.shape
    device = np.full(n, ANY)
    there = np.full((len(a.maker), m), np.inf)
    home, taken, free = np.full(len(a.group_bytes), ANY), np.zeros(m), np.zeros(m)
    reserved, until = np.full(m, NONE), np.zeros(m)
    waits = a.first_input[1:] - a.first_input[:-1]
    ready = np.empty(n, np.int64)
    count = 0
    for i in range(n):
        for t in range(a.first_output[i], a.first_output[i + 1]):
            if is_source[i]:
                for e in range(a.first_reader[t], a.first_reader[t + 1]):
                    waits[a.reader[e]] -= 1
    for i in range(n):
        if waits[i] == 0 and not is_source[i]:
            ready[count] = i
            count += 1
    arrival = np.zeros((n, m))  # when all inputs of an operator can be on a device
    order, listed = np.empty(n, np.int64), 0
    while count > 0:
        best, at, best_start, best_finish = ANY, 0, np.inf, np.inf
        for place in range(count):
            i = ready[place]
            for d in range(m):
                if home[a.group[i]] != ANY and home[a.group[i]] != d:
                    continue
                start = arrival[i, d]
                if a.seconds[i, d] > 0.0:
                    start = max(start, free[d])
                    other = reserved[d]
                    if other != NONE and other != i and device[other] == ANY:
                        start = max(start, until[d])
                finish_ = start + a.seconds[i, d]
                if start > best_start or (start == best_start and finish_ >= best_finish):
                    continue
                if taken[d] + _bytes(a, i, d, device, home, there, held) > a.memory[d] * (
                    1 + ROUNDING
                ):
                    continue
                best, at, best_start, best_finish = d, place, start, finish_
        if best == ANY:
            return False, device, order
        i, d = ready[at], best
        count -= 1
        ready[at] = ready[count]
        taken[d] += _bytes(a, i, d, device, home, there, held)
        home[a.group[i]] = d
        for e in range(a.first_input[i], a.first_input[i + 1]):
            source = a.maker[a.input[e]]
            if device[source] == ANY:  # a source comes along
                if home[a.group[source]] == ANY:
                    home[a.group[source]] = d
                device[source], order[listed] = home[a.group[source]], source
                listed += 1
                for t in range(a.first_output[source], a.first_output[source + 1]):
                    there[t, device[source]] = 0.0
                    _announce(a, t, device[source], 0.0, arrival)
            there[a.input[e], d] = 0.0
        device[i], order[listed] = d, i
        listed += 1
        if a.seconds[i, d] > 0.0:
            free[d], until[d], reserved[d] = best_finish, best_finish, favourite[i]
        for t in range(a.first_output[i], a.first_output[i + 1]):
            there[t, d] = 0.0
            until[d] = max(until[d], best_finish + transfer[t])
            _announce(a, t, d, best_finish, arrival)
            for e in range(a.first_reader[t], a.first_reader[t + 1]):
                j = a.reader[e]
                waits[j] -= 1
                if waits[j] == 0:
                    ready[count] = j
                    count += 1
    for i in range(n):  # sources that nothing reads
        if device[i] == ANY:
            if home[a.group[i]] == ANY:
                d = int(np.argmax(a.memory - taken))
                home[a.group[i]] = d
                taken[d] += a.group_bytes[a.group[i]]
                if taken[d] > a.memory[d] * (1 + ROUNDING):
                    return False, device, order
            device[i], order[listed] = home[a.group[i]], i
            listed += 1
    return True, device, order


@inner
def _announce(a: Arrays, t: int, d: int, made: float, arrival: Floats) -> None:
    """Tensor t is made on device d: when its readers can have it on each device."""
    for e in range(a.first_reader[t], a.first_reader[t + 1]):
        for other in range(len(a.memory)):
            goes = transfer(a, t, d, other)
            arrival[a.reader[e], other] = max(arrival[a.reader[e], other], made + goes)


@inner
def _bytes(
    a: Arrays, i: int, d: int, device: Ints, home: Ints, there: Floats, held: float
) -> float:
    """Bytes that operator i adds on device d, with the sources that come along."""
    need = a.group_bytes[a.group[i]] if home[a.group[i]] == ANY else 0.0
    for t in range(a.first_output[i], a.first_output[i + 1]):
        need += held * a.held_bytes[t]
    for e in range(a.first_input[i], a.first_input[i + 1]):
        source = a.maker[a.input[e]]
        comes_along = device[source] == ANY and home[a.group[source]] == ANY
        if comes_along and a.group[source] != a.group[i]:
            need += a.group_bytes[a.group[source]]
        if there[a.input[e], d] == np.inf:
            need += held * a.sent_bytes[a.input[e]]
    return need
