"""1F1B (PipeDream-Flush): a warm-up of forwards, then alternately one forward, one backward.

In the handcrafted zero-bubble schedules (Qi et al. 2024) weight gradients fill its bubbles.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.formulations.schedules.order import B, F, I, Order, Row, W, loop, order_of
from stagewright.graphs.documents.errors import InputError


@lru_cache(maxsize=8)
def zb_h1(devices: int, microbatches: int) -> Order:
    """ZB-H1: 1F1B whose stage s puts off its weight gradients by s microbatches (section 2.3).

    Every stage keeps at most p microbatches in flight, as many as the first stage of 1F1B. If no
    weight gradient takes longer than an input gradient or a forward, the bubble is
    (p - 1) (tF + tI - tW).
    """
    return _put_off(devices, 1, (microbatches,), 1)


@lru_cache(maxsize=8)
def zb_h2(devices: int, microbatches: int) -> Order:
    """ZB-H2: up to 2 p - 1 microbatches in flight; stage s puts off W by 2 s (section 2.3).

    With equal times and m >= 2 p - 1 no device is idle from its first to its last computation; the
    makespan is 3 m + p - 1.
    """
    return _put_off(devices, 1, (microbatches,), 2)


@lru_cache(maxsize=8)
def interleaved_zero_bubble(devices: int, chunks: int, microbatches: int) -> Order:
    """ZB-H1 with several stages per device, microbatches in the groups of interleaved 1F1B.

    Stage s is on device s mod p. Groups are those of `ragged_interleaved`.
    """
    return _put_off(devices, chunks, groups_of(devices, microbatches), 1)


def _put_off(devices: int, chunks: int, groups: Sequence[int], depth: int) -> Order:
    passes = passes_of(chunks, groups)
    turned = [(chunks - 1 - chunk, m) for chunk, m in passes]
    warm_up = (chunks - 1) * groups[0]
    rows = []
    for d in range(devices):
        forwards = [Action(chunk * devices + d, F, m) for chunk, m in passes]
        inputs = [Action(chunk * devices + d, I, m) for chunk, m in turned]
        weights = [Action(chunk * devices + d, W, m) for chunk, m in turned]
        ahead = warm_up + depth * (devices - 1 - d)
        rows.append(_row(forwards, inputs, weights, ahead, depth * d))
    return Order(tuple(rows))


def _row(
    forwards: list[Action], inputs: list[Action], weights: list[Action], ahead: int, behind: int
) -> Row:
    """Forwards run ``ahead`` of input gradients, weight gradients ``behind`` them."""
    row = forwards[:ahead]
    for k, one in enumerate(inputs):
        row += forwards[ahead + k : ahead + k + 1]
        row.append(one)
        row += weights[k - behind : k - behind + 1] if k >= behind else []
    return (*row, *weights[max(0, len(weights) - behind) :])


@lru_cache(maxsize=8)
def round_robin(replicas: tuple[int, ...], microbatches: int) -> Order:
    """1F1B-RR with ``replicas[s]`` copies of stage s: copy m mod r processes microbatch m.

    The devices are numbered stage after stage. Every copy admits as many microbatches as its stage
    and all later ones have devices per copy, rounded up: the thesis's NOAM, for every stage.

    Raises InputError if a copy would have no microbatch.
    """
    if microbatches < max(replicas):
        raise InputError(
            f"1F1B-RR needs at least {max(replicas)} microbatches, one for each replica of a "
            f"stage, got {microbatches}"
        )
    rows: list[Row] = []
    left = sum(replicas)
    for s, count in enumerate(replicas):
        depth = math.ceil(left / count)
        rows += [row_of(s, depth, range(copy, microbatches, count)) for copy in range(count)]
        left -= count
    period = math.lcm(*replicas)
    return Order(tuple(rows), tuple(m % period for m in range(microbatches)))


@lru_cache(maxsize=8)
def pe(device: tuple[int, ...], microbatches: int, in_flight: tuple[int, ...]) -> Order:
    """PE's order: in every round each block with a waiting microbatch processes one.

    Stage s is on ``device[s]``. The last stage's forward and backward form one block. A forward
    that would exceed its stage's limit ``in_flight`` waits for a later round.
    """
    return order_of(device, _rounds(len(device), microbatches, in_flight))


def _rounds(stages: int, microbatches: int, in_flight: tuple[int, ...]) -> Iterator[Action]:
    # Blocks in order of dependence: F0, send, F1, ..., F+B of the last stage, send, ..., B0.
    blocks: list[tuple[int, tuple[ActionKind, ...]]] = [(s, (F,)) for s in range(stages - 1)]
    blocks += [(stages - 1, (F, B)), *((s, (B,)) for s in reversed(range(stages - 1)))]
    available = [0] * (2 * len(blocks) - 1)  # even places: blocks; odd: the transfers after them
    available[0] = microbatches
    started = {F: [0] * stages, B: [0] * stages}
    while started[B][0] < microbatches:
        for place in [j for j, count in enumerate(available) if count]:
            if place % 2 == 0:
                stage, kinds = blocks[place // 2]
                flying = started[F][stage] - started[B][stage]
                if kinds == (F,) and flying >= in_flight[stage]:
                    continue
                for kind in kinds:
                    yield Action(stage, kind, started[kind][stage])
                    started[kind][stage] += 1
            available[place] -= 1
            if place + 1 < len(available):
                available[place + 1] += 1


@lru_cache(maxsize=8)
def interleaved(ranks: int, chunks: int, microbatches: int) -> Order:
    """Interleaved 1F1B: stage s is chunk s // P on rank s mod P; with one chunk it is 1F1B.

    Microbatches pass the chunks in groups of P (Narayanan et al. 2021, section 2.2). The bubble is
    (p - 1) / (v m) of the work.

    Raises
    ------
    InputError
        If ``microbatches`` is not a multiple of ``ranks`` and there are several chunks.
    """
    if chunks > 1 and microbatches % ranks:
        below = microbatches // ranks * ranks
        near = f"{below} or {below + ranks}" if below else f"{ranks}"
        raise InputError(
            f"interleaved 1F1B needs a multiple of {ranks} microbatches (the devices), got "
            f"{microbatches}; the nearest are {near}"
        )
    return _by_groups(ranks, chunks, groups_of(ranks, microbatches))


@lru_cache(maxsize=8)
def ragged_interleaved(ranks: int, chunks: int, microbatches: int) -> Order:
    """Interleaved 1F1B for any number of microbatches: max(1, m // p) groups of nearly equal size.

    The larger groups come first. Where m is a multiple of p it is Megatron's order, where m is a
    multiple of the number of groups torch's ("flexible" interleaving).
    """
    return _by_groups(ranks, chunks, groups_of(ranks, microbatches))


def groups_of(ranks: int, microbatches: int) -> tuple[int, ...]:
    """The sizes of max(1, m // p) groups of nearly equal size, the larger ones first."""
    rounds = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, rounds)
    return (size + 1,) * larger + (size,) * (rounds - larger)


def passes_of(chunks: int, groups: Sequence[int]) -> list[tuple[int, int]]:
    """The (chunk, microbatch) pairs in the order in which a device does their forwards."""
    passes: list[tuple[int, int]] = []
    first = 0
    for size in groups:
        group = range(first, first + size)
        passes += [(chunk, m) for chunk in range(chunks) for m in group]
        first += size
    return passes


def _by_groups(ranks: int, chunks: int, groups: Sequence[int]) -> Order:
    passes = passes_of(chunks, groups)
    rows = []
    for rank in range(ranks):
        warm_up = ranks - rank - 1
        if chunks > 1:
            warm_up = 2 * warm_up + (chunks - 1) * groups[0]
        forwards = [Action(chunk * ranks + rank, F, m) for chunk, m in passes]
        backwards = [Action((chunks - 1 - chunk) * ranks + rank, B, m) for chunk, m in passes]
        steady = zip(forwards[warm_up:], backwards, strict=False)
        row = [*forwards[:warm_up], *(action for pair in steady for action in pair)]
        rows.append((*row, *backwards[max(0, len(forwards) - warm_up) :]))
    return Order(tuple(rows))


@lru_cache(maxsize=8)
def breadth_first(devices: int, chunks: int, microbatches: int) -> Order:
    """Looped GPipe: stage s is on device s mod p; every stage keeps all microbatches in flight.

    A device does all forwards of its first stage, then all of its second; backwards are in reverse,
    the last microbatch first. With m >= p microbatches the bubble is (p - 1) / (v m) of the work
    (section 4.2).
    """
    stages = range(devices * chunks)
    forwards = [Action(s, F, m) for s in stages for m in range(microbatches)]
    backwards = [Action(s, B, m) for s in reversed(stages) for m in reversed(range(microbatches))]
    return order_of(loop(devices, chunks), forwards + backwards)


@lru_cache(maxsize=8)
def gpipe(device: tuple[int, ...], microbatches: int) -> Order:
    """GPipe's order with stage s on ``device[s]``; every stage keeps all microbatches in flight."""
    stages = range(len(device))
    forwards = [Action(s, F, m) for s in stages for m in range(microbatches)]
    backwards = [Action(s, B, m) for s in reversed(stages) for m in range(microbatches)]
    return order_of(device, forwards + backwards)


@lru_cache(maxsize=8)
def one_f_one_b(stages: int, microbatches: int, in_flight: tuple[int, ...] | None = None) -> Order:
    """1F1B with stage s on device s, S - s microbatches in flight (Narayanan's thesis, 4.2.2).

    A lower limit ``in_flight`` shortens the warm-up of its stage and of all later stages: a stage
    that waits for more forwards than its predecessor may send would deadlock.
    """
    rows, depth = [], microbatches
    for s in range(stages):
        depth = min(depth, stages - s, depth if in_flight is None else in_flight[s])
        rows.append(row_of(s, depth, range(microbatches)))
    return Order(tuple(rows))


def row_of(stage: int, depth: int, microbatches: Sequence[int]) -> Row:
    """1F1B of one stage with at most ``depth`` of its ``microbatches`` in flight."""
    forwards = [Action(stage, F, m) for m in microbatches]
    backwards = [Action(stage, B, m) for m in microbatches]
    steady = zip(backwards, forwards[depth:], strict=False)
    alternating = [action for pair in steady for action in pair]
    return (*forwards[:depth], *alternating, *backwards[max(0, len(backwards) - depth) :])
