"""Proof that pairs of ranks agree on transfers, and computations on versions of weights."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product, zip_longest

from stagewright.executor.programs.program import (
    SENDS,
    Instruction,
    InvalidProgram,
    Program,
    ProgramWork,
    Row,
    received,
    transfers,
)
from stagewright.formulations.plans.actions import (
    COMPUTE,
    SEND_B,
    SEND_F,
    UPDATE,
    Action,
    ActionKind,
    F,
)

STASH, USE, DROP = ActionKind.STASH, ActionKind.USE, ActionKind.DROP


def require_versions(
    work: ProgramWork, rank: int, row: Row, at_first_stage: Mapping[int | None, int]
) -> None:
    """Every version that is used is held and is the right one; none is left at the end."""
    plan, buffered = work.plan, work.plan.weight_rule.staleness > 0
    stages: defaultdict[int, WeightVersions] = defaultdict(lambda: WeightVersions(buffered))
    for one in row:
        weights = stages[one.action.stage]
        try:
            weights.after(one.action)
        except InvalidProgram as error:
            raise InvalidProgram(f"rank {rank}: {one}: {error}") from None
        if one.action.kind is F:
            right = weights.held[-1]
            if not plan.weight_rule.updates_every_round:
                right = work.iteration(one.action.microbatch)
            if plan.weight_rule.follows_first_stage:
                right = at_first_stage[one.action.microbatch]
            if weights.used != right:
                raise InvalidProgram(
                    f"rank {rank}: {one} is computed on version {weights.used} of its weights, "
                    f"{plan.weights!r} asks for version {right}"
                )
    for s, weights in stages.items():
        weights.require_ready_again(f"rank {rank}: stage {s}")


def versions_at_first_stage(program: Program) -> dict[int | None, int]:
    """Per microbatch, how many updates come before the first stage's forward."""
    found = {}
    for row in program.rows:
        updates = 0
        for one in row:
            updates += one.action == Action(0, UPDATE)
            if one.action.stage == 0 and one.action.kind is F:
                found[one.action.microbatch] = updates
    return found


class WeightVersions:
    """The versions of a stage's weights on one rank."""

    def __init__(self, buffered: bool) -> None:
        self.buffered = buffered
        self.held = [0, 1] if buffered else [0]
        self.used = self.held[-1]
        self.stashed: int | None = None
        self.of_forward: dict[int | None, int] = {}

    def after(self, action: Action) -> None:
        """Apply an instruction to the versions."""
        kind, number = action.kind, action.microbatch
        newest = self.held[-1]
        if kind in (USE, STASH, DROP):
            if number not in self.held:
                raise InvalidProgram(f"there is no such version, only {self.held}")
            self._switch(kind, number)
        elif kind is UPDATE:
            if self.stashed != newest:
                self.held.pop()
            self.held.append(newest + 1)
            self.used = newest + 1
        elif kind is F:
            self.of_forward[number] = self.used
        elif kind in COMPUTE and self.used != self.of_forward[number]:
            raise InvalidProgram(
                f"it is computed on version {self.used} of the weights, "
                f"its forward on version {self.of_forward[number]}"
            )
        if kind in COMPUTE and self.used not in self.held:
            raise InvalidProgram(f"version {self.used} of the weights is not there any more")

    def _switch(self, kind: ActionKind, number: int) -> None:
        if kind is USE:
            self.used = number
        elif kind is STASH:
            if number in (self.stashed, *self.held[:-1]):
                raise InvalidProgram("only the newest version is kept, and only once")
            self.stashed = number
        elif number == self.held[-1]:
            raise InvalidProgram("the newest version cannot be dropped")
        else:
            self.held.remove(number)

    def require_ready_again(self, stage: str) -> None:
        """Require that only the newest version is left (``double-buffer``: the two newest)."""
        newest = self.held[-1]
        if self.stashed == newest:
            raise InvalidProgram(f"{stage}: no {UPDATE} follows {STASH} of version {newest}")
        if self.held != [newest - 1, newest][not self.buffered :]:
            raise InvalidProgram(f"{stage} ends with versions {self.held}")


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
