"""The schedules of layouts: where their stages are, and the order of every rank in arrays.

Orders are those of ``schedules.published``, of as many microbatches as one likes in a few
operations on arrays; the tests compare both.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stagewright.graphs.documents.arrays import Ints
from stagewright.graphs.documents.errors import InputError

Schedule = Literal["1f1b", "zero-bubble", "zb-h2", "zbv", "dualpipe", "dualpipev"]
"""(Interleaved) 1F1B; ZB-H1 and its interleaved form; ZB-H2, ZBV, DualPipe and DualPipeV."""

USUAL: tuple[Schedule, ...] = ("1f1b", "zero-bubble")
"""Schedules that are searched where none are asked for."""


@dataclass(frozen=True, slots=True)
class ScheduleForm:
    """What sets a schedule apart from 1F1B.

    Attributes
    ----------
    depth
        Rank r puts off its weight gradients by ``depth`` r microbatches, and its warm-up is
        ``depth`` times 1F1B's; with 0 backwards are whole.
    chunks
        The only number of chunks that the schedule has; None for any.
    in_v
        Stages go to the last rank and come back: rank r has the stages r and S - 1 - r.
    copies
        With 2, microbatches enter at both ends, so that the ranks r and P - 1 - r have the same two
        stages: a V on half the ranks, with a second copy on the other half.
    pairs
        Forwards run beside whole backwards of the rank's other stage, which hide the exchange of
        the experts (DeepSeek-AI 2025, section 3.2.1).
    """

    depth: int = 0
    chunks: int | None = None
    in_v: bool = False
    copies: int = 1
    pairs: bool = False

    @property
    def is_split(self) -> bool:
        """Whether weight gradients are put off."""
        return self.depth > 0 or self.in_v


FORMS: dict[Schedule, ScheduleForm] = {
    "1f1b": ScheduleForm(),
    "zero-bubble": ScheduleForm(depth=1),
    "zb-h2": ScheduleForm(depth=2, chunks=1),
    "zbv": ScheduleForm(chunks=2, in_v=True),
    "dualpipe": ScheduleForm(chunks=1, in_v=True, copies=2, pairs=True),
    "dualpipev": ScheduleForm(chunks=2, in_v=True, pairs=True),
}


def positions(schedule: Schedule, pipeline: int) -> list[int]:
    """For every rank of a pipeline, the rank of one copy whose stages it has."""
    both_ways = FORMS[schedule].copies > 1
    return [min(rank, pipeline - 1 - rank) if both_ways else rank for rank in range(pipeline)]


def require_stages(schedule: Schedule, pipeline: int, chunks: int) -> None:
    """Raise InputError, with what works, unless a schedule has so many ranks and chunks."""
    form = FORMS[schedule]
    if pipeline == 1 and chunks > 1:
        raise InputError(f"{chunks} chunks need a pipeline of at least 2 ranks")
    if schedule != "1f1b" and pipeline == 1:
        raise InputError(f"the schedule {schedule} needs a pipeline of at least 2 ranks")
    if form.chunks not in (None, chunks):
        words = "2 chunks on every rank (v2)" if form.chunks == 2 else "1 chunk on every rank"
        raise InputError(f"the schedule {schedule} has {words}, got {chunks}")
    if form.copies > 1 and (pipeline % 2 or pipeline < 4):
        raise InputError(
            f"the schedule {schedule} needs an even pipeline of at least 4 ranks, got {pipeline}"
        )


def require_microbatches(schedule: Schedule, pipeline: int, chunks: int, microbatches: int) -> None:
    """Raise InputError, with what works, unless a schedule has so many microbatches."""
    form = FORMS[schedule]
    if chunks > 1 and not form.in_v and microbatches % pipeline:
        raise InputError(
            f"{chunks} chunks per rank need a multiple of {pipeline} microbatches (the pipeline), "
            f"there are {microbatches}"
        )
    if form.pairs and (microbatches < 2 * pipeline or microbatches % form.copies):
        even = "an even number of " if form.copies > 1 else ""
        raise InputError(
            f"the schedule {schedule} needs {even}at least {2 * pipeline} microbatches (twice the "
            f"pipeline), there are {microbatches}"
        )


Codes: TypeAlias = NDArray[np.int16]

FORWARD, INPUT, WEIGHT, WHOLE, PAIRED = range(5)
"""Kinds of computations: an input gradient, a weight gradient, both as a whole backward, and a
forward beside the whole backward that comes next."""


@lru_cache(maxsize=32)
def order_codes(schedule: Schedule, ranks: int, chunks: int, microbatches: int) -> Codes:
    """(R, n) kind x chunks + chunk of every rank's computations in order, -1 after the last.

    A chunk's microbatches come in order. All are those of one copy.
    """
    if FORMS[schedule].in_v:
        return _v_codes(schedule, ranks, microbatches)
    return _loop_codes(FORMS[schedule].depth, ranks, chunks, microbatches)


def pairs_of_ranks(ranks: int, microbatches: int) -> Ints:
    """(R, 2) how many forwards of a chunk run beside a backward, where some do."""
    rank = np.arange(ranks)
    steady = microbatches - 2 * ranks + rank + 1
    found: Ints = np.stack((steady - (rank == ranks - 1), steady + ranks - 1 - rank), axis=1)
    return found


@lru_cache(maxsize=1024)
def stages_of_ranks(ranks: int, chunks: int, in_v: bool) -> Ints:
    """(ranks, chunks) stages, in a V or in a loop."""
    rank = np.arange(ranks)[:, None]
    if in_v:
        return np.concatenate((rank, 2 * ranks - 1 - rank), axis=1)
    found: Ints = rank + ranks * np.arange(chunks)
    return found


def _loop_codes(depth: int, ranks: int, chunks: int, microbatches: int) -> Codes:
    """(Interleaved) 1F1B, or zero bubbles: forwards run ahead of backwards, weights behind."""
    turn, rank = np.arange(microbatches * chunks), np.arange(ranks)[:, None]
    chunk = turn % (ranks * chunks) // ranks
    turned = chunks - 1 - chunk
    ahead = np.minimum(_ahead(ranks, chunks, depth, rank), len(turn))
    # The k-th backward is in place 3 k + 1, with a forward before it and a weight gradient after.
    most = int(ahead.max())
    found = np.full((ranks, 3 * (most + len(turn) + depth * ranks)), -1, dtype=np.int16)
    found[rank, 3 * (most + turn - ahead)] = FORWARD * chunks + chunk
    found[:, 3 * (most + turn) + 1] = (INPUT if depth else WHOLE) * chunks + turned
    if depth:
        found[rank, 3 * (most + turn + depth * rank) + 2] = WEIGHT * chunks + turned
    return found[found >= 0].reshape(ranks, -1)


def _ahead(ranks: Ints | int, chunks: Ints | int, depth: int, rank: Ints) -> Ints:
    """The warm-up's forwards in a loop; with one chunk there is no group to wait for."""
    after = ranks - rank - 1
    several = (depth or 2) * after + (chunks - 1) * ranks
    found: Ints = np.where(np.equal(chunks, 1), (depth or 1) * after, several)
    return found


def _v_codes(schedule: Schedule, ranks: int, microbatches: int) -> Codes:
    of = _zbv if schedule == "zbv" else _dualpipe
    every = [of(ranks, rank, microbatches) for rank in range(ranks)]
    found = np.full((ranks, max(map(len, every))), -1, dtype=np.int16)
    for row, steps in zip(found, every, strict=True):
        row[: len(steps)] = steps
    return found


_F, _I, _W, _B, _P = ((2 * kind, 2 * kind + 1) for kind in range(5))
"""Codes of the two chunks."""


def _zbv(ranks: int, rank: int, microbatches: int) -> list[int]:
    """See ``schedules.published.zbv``: enough microbatches, without those beyond m."""
    count, left = max(2 * ranks - 1, microbatches), ranks - rank
    there, back = ([_F[one], _I[one], _W[one]] for one in (0, 1))
    steady = count - (2 * left - 1 + rank)
    steps = [_F[0]] * (2 * left - 1) + [_F[1], _F[0]] * rank + back * left
    steps += (there + back) * steady + (there[1:] + back) * (count - ranks - steady)
    steps += [_I[0], _I[1]] * rank + [_I[0], _W[0]] * left + [_W[1]] * rank + [_W[0]] * rank
    if count == microbatches:
        return steps
    found, done = [], [0] * 6
    for one in steps:
        done[one] += 1
        if done[one] <= microbatches:
            found.append(one)
    return found


def _dualpipe(ranks: int, rank: int, microbatches: int) -> list[int]:
    """The eight steps of ``schedules.published.chimera``, with ``microbatches`` of each chunk.

    As in DeepSeek's program, the pairs of steps 4 and 5 overlap, but for the last rank's first.
    """
    after, pair = ranks - rank - 1, [_P[0], _B[1], _P[1], _B[0]]
    steps = [_F[0]] * (2 * after) + [_F[0], _F[1]] * (rank + 1)  # 1, 2
    steps += [_I[1], _W[1], _F[1]] * after  # 3
    first = [_F[0], *pair[1:]] if after == 0 else pair
    steps += first + pair * (microbatches - 2 * ranks + rank)  # 4
    steps += [_B[1], _P[1], _B[0]] * after  # 5
    turns = [1 - i % 2 for i in range(2 * (rank + 1))]
    steps += [_B[chunk] for chunk in turns[: rank + 1]] + [_I[chunk] for chunk in turns[rank + 1 :]]
    weights = [_W[chunk] for chunk in turns[rank + 1 :]] + [_W[0]] * after
    for one in weights[:after]:  # 7
        steps += [one, _I[0]]
    return steps + weights[after:]  # 8


def first_forwards(
    schedule: Schedule,
    ranks: Ints | int,
    chunks: Ints | int,
    microbatches: Ints | int,
    rank: Ints,
    chunk: Ints,
    behind: Ints | int = 0,
) -> Ints:
    """How many forwards of a chunk come before a rank's first backward, and ``behind`` more.

    In a loop the forwards go through the chunks in groups of P microbatches. All arguments but the
    schedule broadcast.
    """
    form = FORMS[schedule]
    if form.in_v:
        alone = form.pairs & (rank == ranks - 1)  # the forward of the pair that does not overlap
        there = np.where(np.equal(chunk, 0), 2 * ranks - 1 - rank + alone, rank + 1)
        return np.minimum(there, microbatches)
    done = _ahead(ranks, chunks, form.depth, rank) + 1 + behind
    done = np.minimum(done, microbatches * chunks)
    groups, rest = np.divmod(done, ranks * chunks)
    mixed = groups * ranks + np.clip(rest - chunk * ranks, 0, ranks)
    found: Ints = np.where(np.equal(chunks, 1), done, mixed)
    return found


def kept_forwards(
    schedule: Schedule,
    ranks: Ints | int,
    chunks: Ints | int,
    microbatches: Ints | int,
    rank: Ints,
    chunk: Ints,
) -> Ints:
    """How many forwards of a chunk a rank keeps at the least when it frees the first.

    In a loop the first weight gradient is put off; in a V it comes at once.
    """
    behind = FORMS[schedule].depth * rank
    return first_forwards(schedule, ranks, chunks, microbatches, rank, chunk, behind)
