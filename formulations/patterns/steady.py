"""The steady state of a makespan problem: its blocks as a repetition, and a repetition unrolled.

All-reduces run once, after the last microbatch, and have no place in a repetition.
"""

from itertools import pairwise

from stagewright.formulations.patterns.repetition import (
    Holding,
    Repetition,
    RepetitionProblem,
    Room,
)
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.formulations.schedules.order import B, F, I, Order, W

_COMPUTATIONS = (F, B, I, W)

Block = tuple[ActionKind, int]  # kind and stage


def steady_blocks(problem: MakespanProblem) -> tuple[Block, ...]:
    """The blocks that take time, in the order in which a microbatch passes them.

    Weight gradients come last. A transfer belongs to the stage that sends.
    """
    last, back = problem.stages - 1, I if problem.is_split else B
    there: list[Block] = [(F, 0)]
    home: list[Block] = [(back, 0)]
    for s in range(last):
        if problem.send_forward[s] > 0:
            there.append((ActionKind.SEND_FORWARD, s))
        if problem.send_backward[s] > 0:
            home.append((ActionKind.SEND_BACKWARD, s + 1))
        there.append((F, s + 1))
        home.append((back, s + 1))
    weights = [(W, s) for s in range(problem.stages)] if problem.is_split else []
    return (*there, *reversed(home), *weights)


def steady_problem(problem: MakespanProblem) -> RepetitionProblem:
    """The repetition of a makespan problem's microbatches, block by block of `steady_blocks`.

    Devices come first among the resources, then the channels. Rooms are the memories of the
    devices, and the in-flight limits that are below the number of microbatches.

    Raises
    ------
    InputError
        If a computation takes no time.
    """
    blocks = steady_blocks(problem)
    number = {block: i for i, block in enumerate(blocks)}
    chain = range(len(blocks) - problem.stages * problem.is_split)
    before = [*pairwise(chain)]
    if problem.is_split:
        before += [(number[I, s], number[W, s]) for s in range(problem.stages)]
    return RepetitionProblem(
        names=tuple(f"{s}{kind}" for kind, s in blocks),
        seconds=tuple(_seconds(problem, block) for block in blocks),
        resources=tuple((_resource(problem, block),) for block in blocks),
        before=tuple(before),
        rooms=(*_memories(problem, number), *_flights(problem, number)),
    )


def unrolled(problem: MakespanProblem, repetition: Repetition) -> Order:
    """The order of the problem's microbatches in a repetition of its `steady_problem`.

    Every device runs its computations in the order of their starts, as if the repetition had always
    run and all other microbatches were left out. So memory and in-flight limits are kept.
    """
    blocks, length = steady_blocks(problem), repetition.length
    rows: list[list[tuple[float, Action]]] = [[] for _ in range(1 + max(problem.device))]
    for m in range(problem.microbatches):
        turn, q = divmod(m, length)
        for (kind, s), start in zip(blocks, repetition.starts[q], strict=True):
            if kind in _COMPUTATIONS:
                at = start + turn * repetition.period
                rows[problem.device[s]].append((at, Action(s, kind, m)))
    return Order(tuple(tuple(one for _, one in sorted(row, key=_start)) for row in rows))


def _start(entry: tuple[float, Action]) -> float:
    return entry[0]


def _seconds(problem: MakespanProblem, block: Block) -> float:
    kind, s = block
    if kind is W:
        return problem.last_computation[s]
    if kind is F:
        return problem.forward[s]
    if kind is ActionKind.SEND_FORWARD:
        return problem.send_forward[s]
    if kind is ActionKind.SEND_BACKWARD:
        return problem.send_backward[s - 1]
    return problem.backward[s]


def _resource(problem: MakespanProblem, block: Block) -> int:
    """The device, or the channel after the stage; with full duplex one for each direction."""
    (kind, s), devices = block, 1 + max(problem.device)
    if kind is ActionKind.SEND_FORWARD:
        return devices + s
    if kind is ActionKind.SEND_BACKWARD:
        return devices + s - 1 + (problem.stages if problem.duplex == "full" else 0)
    return problem.device[s]


def _memories(problem: MakespanProblem, number: dict[Block, int]) -> list[Room]:
    found = []
    for d, limit in enumerate(problem.memory):
        holdings = []
        for s in problem.stages_on(d):
            taken, early, late = problem.saved[s]
            if problem.is_split:
                holdings.append(Holding(number[F, s], number[I, s], early))
                holdings.append(Holding(number[F, s], number[W, s], late))
            else:
                holdings.append(Holding(number[F, s], number[B, s], taken))
        kept = tuple(one for one in holdings if one.amount > 0)
        found.append(Room(f"memory of device {d}", limit, kept))
    return [room for room in found if room.holdings]


def _flights(problem: MakespanProblem, number: dict[Block, int]) -> list[Room]:
    final = W if problem.is_split else B
    return [
        Room(f"microbatches of stage {s}", limit, (Holding(number[F, s], number[final, s], 1.0),))
        for s, limit in enumerate(problem.in_flight)
        if limit < problem.microbatches
    ]
