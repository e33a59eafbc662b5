"""The placement of stages, and the order of a schedule: the computations on each device."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.graphs.documents.errors import InputError

Device = tuple[int, ...]


def line(devices: int) -> Device:
    """Stage s on device s."""
    return tuple(range(devices))


def loop(devices: int, chunks: int) -> Device:
    """Stage s on device s mod p (Narayanan et al. 2021, section 2.2)."""
    return tuple(range(devices)) * chunks


def v_shape(devices: int) -> Device:
    """Two stages per device, there and back: 0, ..., p - 1, p - 1, ..., 0 (Qi et al. 2024)."""
    return wave(devices, 1)


def wave(devices: int, waves: int) -> Device:
    """The V repeated: 2 w stages per device, neighbouring ones on the same device at each turn.

    Source: Liu et al. 2023 (Hanayo).
    """
    return (*range(devices), *reversed(range(devices))) * waves


def both_directions(devices: int) -> tuple[Device, Device]:
    """Stage s on device s for microbatches that go down, on device p - 1 - s for those that go up.

    Every device keeps the weights of two stages (Li and Hoefler 2021, Chimera).
    """
    return line(devices), tuple(reversed(range(devices)))


def in_turns(replicas: Sequence[int], microbatches: int) -> tuple[Device, ...]:
    """The different ways of microbatches through stages whose copies take them in turn.

    The devices are numbered stage after stage; microbatch m is on copy m mod ``replicas[s]``.
    """
    firsts = [0, *accumulate(replicas)]
    ways = range(min(math.lcm(*replicas), microbatches))
    return tuple(
        tuple(first + m % count for first, count in zip(firsts, replicas, strict=False))
        for m in ways
    )


def placed(placement: str, devices: int, chunks: int) -> Device:
    """A placement with one path by name: ``line``, ``loop``, ``V`` or ``wave``.

    Raises
    ------
    InputError
        If the placement does not have that many stages per device.
    """
    if not allows(placement, chunks):
        needs = {"line": "1 stage", "V": "2 stages", "wave": "an even number of stages"}[placement]
        raise InputError(f"placement {placement} has {needs} per device, got {chunks}")
    if placement in ("V", "wave"):
        return wave(devices, chunks // 2)
    return loop(devices, chunks)


def allows(placement: str, chunks: int) -> bool:
    """Whether a placement with one path can have that many stages per device."""
    allowed = {"line": chunks == 1, "V": chunks == 2, "wave": chunks % 2 == 0}
    return allowed.get(placement, True)


F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT

Row = tuple[Action, ...]

# The next computations allowed for a microbatch, by those that its stage has done.
_STEPS: dict[str, dict[str, str]] = {
    "": {F: "F"}, "F": {B: "FB", I: "FI"}, "FI": {W: "FIW"}, "FB": {}, "FIW": {},
}  # fmt: skip
_DONE = ("FB", "FIW")


@dataclass(frozen=True, slots=True)
class Order:
    """``rows[d]`` is the sequence of computations of device d, which may have several stages.

    For every microbatch each stage does a forward and then either a whole backward or an input
    gradient and a weight gradient. An order has no transfers. It may still contain a deadlock
    between devices, which is detected when the order is scheduled.

    A *path* is the device of each stage as a microbatch passes them. Most schedules have one path;
    bidirectional ones have two, and a stage replicated round-robin has one copy per path.

    Attributes
    ----------
    path_of
        The path of each microbatch, M values; by default all take path 0.
    paths
        ``paths[k][s]`` is the device of stage s for the microbatches of path k.
    microbatches
        Number of microbatches M.

    Raises
    ------
    InputError
        If a stage is on two devices of one path, or an action is missing, duplicate or too early.
    """

    rows: tuple[Row, ...]
    path_of: tuple[int, ...] = ()
    paths: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    microbatches: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        done: dict[tuple[int, int | None], str] = {}
        homes: dict[tuple[int, int], int] = {}
        known = len(self.path_of)
        for d, row in enumerate(self.rows):
            for action in row:
                stage, kind, m = action.stage, action.kind, action.microbatch
                path = self.path_of[m] if m is not None and m < known else 0
                if homes.setdefault((path, stage), d) != d:
                    home = homes[path, stage]
                    raise InputError(f"device {d}: {action}, but stage {stage} is on {home}")
                before = done.get((stage, m), "")
                after = _STEPS[before].get(kind)
                if after is None:
                    raise InputError(f"device {d}: {_refusal(action, before)}")
                done[stage, m] = after
        stages = 1 + max((s for _, s in homes), default=-1)
        count = 1 + max((m for _, m in done if m is not None), default=-1)
        _require_complete(done, stages, count)
        path_of = self.path_of or (0,) * count
        _require_paths(path_of, count)
        paths = [tuple(homes[k, s] for s in range(stages)) for k in range(1 + max(path_of))]
        object.__setattr__(self, "path_of", path_of)
        object.__setattr__(self, "paths", tuple(paths))
        object.__setattr__(self, "microbatches", count)

    @property
    def device(self) -> tuple[int, ...]:
        """The device of each stage. Raises InputError if the order has several paths."""
        if len(self.paths) > 1:
            raise InputError(
                f"the order has {len(self.paths)} paths: a stage is on several devices"
            )
        return self.paths[0]

    @property
    def is_split(self) -> bool:
        """Whether any backward is split into input gradient and weight gradient."""
        return any(action.kind is W for row in self.rows for action in row)

    def split(self) -> "Order":
        """Replace each whole backward by an input gradient and a weight gradient."""
        return Order(tuple(tuple(_split(row)) for row in self.rows), self.path_of)

    def most_in_flight(self) -> tuple[int, ...]:
        """The largest number of microbatches in flight of each stage, from F to the end of B.

        Of several copies of a stage the one with the most counts.
        """
        most = [0] * len(self.paths[0])
        for row in self.rows:
            now = [0] * len(most)
            for action in row:
                if action.kind is not I:
                    now[action.stage] += 1 if action.kind is F else -1
                    most[action.stage] = max(most[action.stage], now[action.stage])
        return tuple(most)


def order_of(device: Sequence[int], actions: Iterable[Action]) -> Order:
    """Distribute one sequence of all computations to the ``device`` of each stage.

    If every action follows those that it depends on, the order has no deadlock.
    """
    rows: list[list[Action]] = [[] for _ in range(1 + max(device))]
    for action in actions:
        rows[device[action.stage]].append(action)
    return Order(tuple(map(tuple, rows)))


def _split(row: Row) -> Iterable[Action]:
    for action in row:
        if action.kind is B:
            yield Action(action.stage, I, action.microbatch)
            yield Action(action.stage, W, action.microbatch)
        else:
            yield action


def _refusal(action: Action, before: str) -> str:
    kind = str(action.kind)
    if kind not in (F, B, I, W):
        return f"{action} is not a computation of a microbatch"
    if kind in before:
        return f"duplicate action {action}"
    if "B" in before or (kind == B and "I" in before):
        return f"{action}, but the backward is {'whole' if 'B' in before else 'split'}"
    needed = Action(action.stage, I if kind == W and "F" in before else F, action.microbatch)
    return f"{action} before {needed}"


def _require_complete(
    done: dict[tuple[int, int | None], str], stages: int, microbatches: int
) -> None:
    if not done:
        raise InputError("an order needs at least one stage and one microbatch")
    for s in range(stages):
        for m in range(microbatches):
            found = done.get((s, m), "")
            if found not in _DONE:
                missing = {"": "forward", "F": "backward", "FI": "weight gradient"}[found]
                raise InputError(f"stage {s} has no {missing} of microbatch {m}")


def _require_paths(path_of: tuple[int, ...], microbatches: int) -> None:
    if len(path_of) != microbatches:
        raise InputError(f"path_of needs {microbatches} values, got {len(path_of)}")
    if sorted(set(path_of)) != [*range(1 + max(path_of))]:
        raise InputError(f"paths must be numbered from 0 without gaps, got {path_of}")
