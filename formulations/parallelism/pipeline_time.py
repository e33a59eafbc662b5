"""Start to finish of a flushed pipeline: (interleaved) 1F1B, or with zero bubbles.

:func:`walk` is plain Python that Numba can compile as it is; solvers do so.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from stagewright.graphs.documents.arrays import Floats, Ints


def first_forwards(
    ranks: Ints | int,
    chunks: Ints | int,
    microbatches: Ints | int,
    split: bool,
    rank: Ints,
    chunk: Ints,
    behind: Ints | int = 0,
) -> Ints:
    """How many forwards of a chunk are among the first W of a rank.

    W are the warm-up and one more, after which comes the first backward, and ``behind`` more. The
    forwards go through the chunks in groups of P microbatches. All arguments broadcast.
    """
    ahead = ranks - rank - 1
    several = (ahead if split else 2 * ahead) + (chunks - 1) * ranks
    done = np.where(np.equal(chunks, 1), ahead, several) + 1 + behind
    done = np.minimum(done, microbatches * chunks)
    groups, rest = np.divmod(done, ranks * chunks)
    mixed = groups * ranks + np.clip(rest - chunk * ranks, 0, ranks)
    found: Ints = np.where(np.equal(chunks, 1), done, mixed)
    return found


def kept_forwards(
    ranks: Ints | int,
    chunks: Ints | int,
    microbatches: Ints | int,
    split: bool,
    rank: Ints,
    chunk: Ints,
) -> Ints:
    """How many forwards of a chunk a rank keeps at the least when it frees the first.

    With ``split`` backwards the first weight gradient is put off by as many as the rank's number.
    """
    behind = rank if split else 0
    return first_forwards(ranks, chunks, microbatches, split, rank, chunk, behind)


Walk: TypeAlias = Callable[
    [int, int, int, bool, Floats, Floats, Floats, float, Floats], tuple[Floats, Floats]
]


def walk(  # noqa: C901 - one flat pass, which is compiled
    ranks: int,
    chunks: int,
    microbatches: int,
    split: bool,
    forward: Floats,
    backward: Floats,
    weight: Floats,
    hop: float,
    saved: Floats,
) -> tuple[Floats, Floats]:
    """Per rank, when its last computation ends (s), and the most that its forwards keep (bytes).

    Stage s is chunk s // P on rank s mod P. The order is Megatron-LM's (interleaved) 1F1B
    (Narayanan et al. 2021, section 2.2; ``schedules.interleaved``), or with ``split`` backwards
    that of ZB-H1 (Qi et al. 2024, section 2.3; ``schedules.zero_bubble``): rank r puts off its
    weight gradients by r. Every computation starts as soon as the one before it on its rank is done
    and its input has arrived, ``hop`` seconds after it was made. A forward's activations are freed
    when the last of its gradients is done.

    Parameters
    ----------
    forward, backward, weight
        (P * v,) seconds of every stage; ``weight`` is the weight gradients' part of the backward.
    saved
        (P * v,) bytes that a forward keeps.
    """
    stages, passes = ranks * chunks, microbatches * chunks
    forward_end = np.full((stages, microbatches), -1.0)
    backward_end = np.full((stages, microbatches), -1.0)
    next_f = np.zeros(ranks, dtype=np.int64)
    next_b = np.zeros(ranks, dtype=np.int64)
    next_w = np.zeros(ranks, dtype=np.int64)
    clock, kept, most = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    left = (3 if split else 2) * passes * ranks
    while left > 0:
        for rank in range(ranks):
            ahead, behind = ranks - rank - 1, rank
            if chunks > 1:
                ahead = (ahead if split else 2 * ahead) + (chunks - 1) * ranks
            while True:
                # Forwards run ``ahead`` of backwards, and weight gradients ``behind`` them.
                if next_f[rank] < passes and next_f[rank] < ahead:
                    kind = 0
                elif split and next_w[rank] < next_b[rank] - behind:
                    kind = 2
                elif next_f[rank] < passes and next_f[rank] <= ahead + next_b[rank]:
                    kind = 0
                elif next_b[rank] < passes:
                    kind = 1
                elif split and next_w[rank] < passes:
                    kind = 2
                else:
                    break
                turn = next_f[rank] if kind == 0 else next_b[rank] if kind == 1 else next_w[rank]
                chunk, microbatch = 0, turn
                if chunks > 1:
                    group, within = turn // stages, turn % stages
                    chunk, microbatch = within // ranks, group * ranks + within % ranks
                    if kind > 0:
                        chunk = chunks - 1 - chunk
                stage = chunk * ranks + rank
                if kind == 0:
                    ready = 0.0
                    if stage > 0:
                        ready = forward_end[stage - 1, microbatch]
                        if ready < 0:
                            break
                        ready += hop
                    clock[rank] = max(clock[rank], ready) + forward[stage]
                    forward_end[stage, microbatch] = clock[rank]
                    next_f[rank] += 1
                    kept[rank] += saved[stage]
                    most[rank] = max(most[rank], kept[rank])
                elif kind == 1:
                    ready = forward_end[stage, microbatch]
                    if stage < stages - 1:
                        ready = backward_end[stage + 1, microbatch]
                        if ready < 0:
                            break
                        ready += hop
                    own = backward[stage] - (weight[stage] if split else 0.0)
                    clock[rank] = max(clock[rank], ready) + own
                    backward_end[stage, microbatch] = clock[rank]
                    next_b[rank] += 1
                    if not split:
                        kept[rank] -= saved[stage]
                else:
                    clock[rank] += weight[stage]
                    next_w[rank] += 1
                    kept[rank] -= saved[stage]
                left -= 1
    return clock, most
