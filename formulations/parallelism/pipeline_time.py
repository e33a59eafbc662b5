"""Start to finish of a flushed pipeline: 1F1B, or interleaved 1F1B with several chunks.

:func:`walk` is plain Python that Numba can compile as it is; solvers do so.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from stagewright.graphs.documents.arrays import Floats, Ints


def kept_forwards(
    ranks: Ints | int, chunks: Ints | int, microbatches: Ints | int, rank: Ints, chunk: Ints
) -> Ints:
    """How many forwards of a chunk a rank keeps when its warm-up and one forward are done.

    These W forwards go through the chunks in groups of P microbatches, and no backward is done yet.
    All arguments broadcast.
    """
    ahead = ranks - rank - 1
    done = np.where(np.equal(chunks, 1), ahead, 2 * ahead + (chunks - 1) * ranks) + 1
    done = np.minimum(done, microbatches * chunks)
    groups, rest = np.divmod(done, ranks * chunks)
    several = groups * ranks + np.clip(rest - chunk * ranks, 0, ranks)
    kept: Ints = np.where(np.equal(chunks, 1), done, several)
    return kept


Walk: TypeAlias = Callable[[int, int, int, Floats, Floats, float, Floats], tuple[Floats, Floats]]


def walk(  # noqa: C901 - one flat pass, which is compiled
    ranks: int,
    chunks: int,
    microbatches: int,
    forward: Floats,
    backward: Floats,
    hop: float,
    saved: Floats,
) -> tuple[Floats, Floats]:
    """Per rank, the finish of its last backward (s) and the most that its forwards keep (bytes).

    Stage s is chunk s // P on rank s mod P. The order is Megatron-LM's (Narayanan et al. 2021,
    section 2.2; see ``schedules.interleaved``); every computation starts as soon as the one before
    it on its rank is done and its input has arrived, ``hop`` seconds after it was made.

    Parameters
    ----------
    forward, backward
        (P * v,) seconds of every stage.
    saved
        (P * v,) bytes that a forward keeps until its backward is done.
    """
    stages, passes = ranks * chunks, microbatches * chunks
    forward_end = np.full((stages, microbatches), -1.0)
    backward_end = np.full((stages, microbatches), -1.0)
    done = np.zeros(ranks, dtype=np.int64)
    clock, kept, most = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    left = 2 * passes * ranks
    while left > 0:
        for rank in range(ranks):
            warm_up = ranks - rank - 1
            if chunks > 1:
                warm_up = 2 * warm_up + (chunks - 1) * ranks
            warm_up = min(warm_up, passes)
            while done[rank] < 2 * passes:
                # Warm-up forwards, then forward and backward in turn, then the other backwards.
                k = done[rank]
                steady = k - warm_up
                is_forward = k < warm_up or (steady < 2 * (passes - warm_up) and steady % 2 == 0)
                if is_forward:
                    turn = k if k < warm_up else warm_up + steady // 2
                else:
                    turn = steady // 2 if steady < 2 * (passes - warm_up) else k - passes
                chunk, microbatch = 0, turn
                if chunks > 1:
                    group, within = turn // stages, turn % stages
                    chunk, microbatch = within // ranks, group * ranks + within % ranks
                    if not is_forward:
                        chunk = chunks - 1 - chunk
                stage = chunk * ranks + rank
                if is_forward:
                    ready = 0.0
                    if stage > 0:
                        ready = forward_end[stage - 1, microbatch]
                        if ready < 0:
                            break
                        ready += hop
                    clock[rank] = max(clock[rank], ready) + forward[stage]
                    forward_end[stage, microbatch] = clock[rank]
                    kept[rank] += saved[stage]
                    most[rank] = max(most[rank], kept[rank])
                else:
                    ready = forward_end[stage, microbatch]
                    if stage < stages - 1:
                        ready = backward_end[stage + 1, microbatch]
                        if ready < 0:
                            break
                        ready += hop
                    clock[rank] = max(clock[rank], ready) + backward[stage]
                    backward_end[stage, microbatch] = clock[rank]
                    kept[rank] -= saved[stage]
                done[rank] += 1
                left -= 1
    return clock, most
