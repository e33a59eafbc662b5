"""Repetitions by enumeration: every start at a whole tick, tried one block after the other.

It knows nothing of phases, orders and normal forms: two blocks of a resource overlap if they occupy
it in the same tick of the period, and what is held is counted tick by tick in a long schedule.
"""

from collections.abc import Iterator

from stagewright.formulations.patterns.repetition import RepetitionProblem

WAIT = 2  # periods that a block may wait for its predecessors

Starts = dict[tuple[int, int], int]  # (microbatch, block)


def is_possible(problem: RepetitionProblem, length: int, period: int) -> bool:
    """Whether there is a repetition of ``period`` whose starts are integers, as all times are."""
    if period < 1:
        return False
    return any(_fits(problem, starts, period) for starts in _all(problem, length, period))


def _all(problem: RepetitionProblem, length: int, period: int) -> Iterator[Starts]:
    copies = [(q, i) for q in range(length) for i in range(len(problem.seconds))]

    def extend(starts: Starts, busy: frozenset[tuple[int, int]]) -> Iterator[Starts]:
        if len(starts) == len(copies):
            yield starts
            return
        q, i = copies[len(starts)]
        seconds = int(problem.seconds[i])
        for start in _candidates(problem, starts, q, i, period):
            taken = {
                (r, (start + t) % period) for r in problem.resources[i] for t in range(seconds)
            }
            if len(taken) == seconds * len(problem.resources[i]) and not taken & busy:
                yield from extend({**starts, (q, i): start}, busy | taken)

    return extend({}, frozenset())


def _candidates(problem: RepetitionProblem, starts: Starts, q: int, i: int, period: int) -> range:
    ends = [starts[q, j] + int(problem.seconds[j]) for j, k in problem.before if k == i]
    if ends:
        return range(max(ends), max(ends) + WAIT * period)
    if i == 0:  # a shift of all, or of a microbatch by whole periods, changes nothing
        return range(1) if q == 0 else range(period)
    return range(-WAIT * period, WAIT * period)


def _fits(problem: RepetitionProblem, starts: Starts, period: int) -> bool:
    far = 2 + (max(starts.values()) - min(starts.values()) + sum(map(int, problem.seconds)))
    shifts = range(-far // period - 1, far // period + 2)
    for room in problem.rooms:
        for tick in range(period):
            held = 0.0
            for q in {q for q, _ in starts}:
                for one in room.holdings:
                    begin = starts[q, one.first]
                    end = starts[q, one.last] + int(problem.seconds[one.last])
                    held += one.amount * sum(
                        begin + shift * period <= tick < end + shift * period for shift in shifts
                    )
            if held > room.capacity + 1e-9:
                return False
    return True
