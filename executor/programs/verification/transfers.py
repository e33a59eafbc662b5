"""Proof that both ranks of a pair see the same transfers in the same order."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product, zip_longest

from stagewright.executor.programs.program import (
    SENDS,
    Instruction,
    InvalidProgram,
    Program,
    ProgramWork,
    received,
    transfers,
)
from stagewright.formulations.plans.actions import SEND_B, SEND_F, Action


def require_transfers(program: Program, wanted: Iterable[tuple[int, int, Action]]) -> None:
    """Every pair of ranks has the ``wanted`` transfers, once each, in the same order on both sides.

    Each is a sender, a receiver and a SEND.
    """
    missing: defaultdict[tuple[int, int], Counter[Action]] = defaultdict(Counter)
    for sender, receiver, action in wanted:
        missing[sender, receiver][action] += 1
    for a, b, here, there in require_same_sides(program):
        _require_once(a, b, here, missing[a, b])
        _require_once(b, a, there, missing[b, a])


def require_same_sides(
    program: Program,
) -> list[tuple[int, int, list[Instruction], list[Instruction]]]:
    """Require that two ranks have the same transfers with each other, in the same order."""
    sides = [by_peer(row) for row in program.rows]
    for a, side in enumerate(sides):
        for b in side:
            if not (0 <= b < len(sides) and b != a):
                raise InvalidProgram(f"rank {a}: {side[b][0]}: there is no such peer")
    pairs = [
        (a, b, sides[a].get(b, []), sides[b].get(a, []))
        for a, b in combinations(range(len(sides)), 2)
    ]
    for a, b, here, there in pairs:
        _require_same_order(a, b, here, there)
    return pairs


def wanted_transfers(work: ProgramWork, program: Program) -> Iterator[tuple[int, int, Action]]:
    """Sender, receiver and SEND of every transfer of a pipeline."""
    plan, rank = work.plan, {name: r for r, name in enumerate(program.devices)}
    for s, m in product(range(len(plan.stages)), range(work.microbatches)):
        for kind, there in ((SEND_F, s + 1), (SEND_B, s - 1)):
            if 0 <= there < len(plan.stages):
                for sender, receiver in transfers(plan, Action(s, kind, m)):
                    yield rank[sender], rank[receiver], Action(s, kind, m)


def by_peer(row: Iterable[Instruction]) -> dict[int, list[Instruction]]:
    """The transfers of a row by the other rank."""
    found: dict[int, list[Instruction]] = {}
    for one in row:
        if one.peer is not None:
            found.setdefault(one.peer, []).append(one)
    return found


def _require_once(a: int, b: int, side: Sequence[Instruction], wanted: Counter[Action]) -> None:
    """Rank a, whose transfers with rank b are ``side``, sends every wanted value once."""
    found = Counter(one.action for one in side if one.action.kind in SENDS)
    for action in sorted(found | wanted):
        if found[action] != wanted[action]:
            raise InvalidProgram(
                f"{action} from rank {a} to rank {b} appears {found[action]} times, "
                f"must appear {wanted[action]} times"
            )


def _require_same_order(
    a: int, b: int, side: Sequence[Instruction], other: Sequence[Instruction]
) -> None:
    for i, (here, there) in enumerate(zip_longest(side, other)):
        if here is None or there is None or not _match(here.action, there.action):
            raise InvalidProgram(
                f"transfer {i} of ranks {a} and {b} is {here or 'missing'} on rank {a} and "
                f"{there or 'missing'} on rank {b}"
            )


def _match(here: Action, there: Action) -> bool:
    if here.kind in SENDS:
        return received(here) == there
    return there.kind in SENDS and received(there) == here
