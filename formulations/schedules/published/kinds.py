"""The published schedules by name: generator, placement, weight rule, and which sizes work."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, get_args

from stagewright.formulations.plans.actions import Weights
from stagewright.formulations.schedules.order import Order, line, placed
from stagewright.formulations.schedules.published.automatic import Goal, zb1p, zb2p
from stagewright.formulations.schedules.published.chimera import (
    chimera,
    dualpipe,
    dualpipe_v,
    hanayo,
)
from stagewright.formulations.schedules.published.controllable_memory import v_half, v_min
from stagewright.formulations.schedules.published.one_f_one_b import (
    breadth_first,
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    one_f_one_b,
    ragged_interleaved,
    round_robin,
    zb_h1,
    zb_h2,
)
from stagewright.formulations.schedules.published.zbv import zbv
from stagewright.formulations.schedules.timing import ActivationMemory, StageTimes
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_LAYERS, require_count

OPTIMAL: Final = "optimal"
USUAL_CHUNKS = 2
"""Chunks of a stage where a kind allows several and none are asked for."""

_OnePath = Literal["line", "loop", "V", "wave"]
PLACEMENTS: tuple[_OnePath, ...] = get_args(_OnePath)


@documents.record
class ScheduleChoice:
    """One of `KINDS`, or ``optimal``: the best order found, with a proved bound.

    Attributes
    ----------
    chunks
        Stages per device; by default 2 if the kind allows several.
    replicas
        Devices of each stage, for 1f1b-rr.
    placement
        For ``optimal``; by default a line, or a loop if there are several chunks.
    """

    kind: str = "1f1b"
    chunks: int | None = None
    replicas: tuple[int, ...] = ()
    placement: _OnePath | None = None

    def __post_init__(self) -> None:
        if self.kind not in (OPTIMAL, *KINDS):
            hint = (
                "; pe is the order of planner spp, on its own stages" if self.kind == "pe" else ""
            )
            known = ", ".join((OPTIMAL, *KINDS))
            raise InputError(f"unknown schedule {self.kind!r}; known are {known}{hint}")
        self._require_placement()
        if self.chunks is not None:
            require_count(self.chunks, "chunks", MAX_LAYERS)
            if self.kind != OPTIMAL:
                require_chunks(self.kind, self.chunks)
        if self.kind == OPTIMAL:
            placed(self.way, 1, self.count)
        if self.replicas and self.kind != "1f1b-rr":
            raise InputError(f"{self.kind} has no replicas; 1f1b-rr has")
        for count in self.replicas:
            require_count(count, "replicas", MAX_LAYERS)

    def _require_placement(self) -> None:
        if self.placement not in (None, *PLACEMENTS):
            raise InputError(
                f"placement must be one of {', '.join(PLACEMENTS)}, got {self.placement!r}"
            )
        if self.kind != OPTIMAL and self.placement is not None:
            raise InputError(
                f"{self.kind} has its own placement, {KINDS[self.kind].placement}; only "
                f"{OPTIMAL} can be placed"
            )

    @property
    def count(self) -> int:
        """Stages per device."""
        if self.chunks is not None:
            return self.chunks
        if self.kind == OPTIMAL:
            return 2 if self.placement in ("V", "wave") else 1
        allowed = KINDS[self.kind].chunks
        return allowed.step if allowed.fixed else max(allowed.step, USUAL_CHUNKS)

    @property
    def way(self) -> str:
        """The kind of placement for an ``optimal`` schedule."""
        return self.placement or ("line" if self.count == 1 else "loop")


Placement = Literal["line", "loop", "V", "wave", "both directions", "replicated line"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a schedule is generated for: devices, microbatches, chunks.

    Raises InputError if a number is below 1.

    Attributes
    ----------
    devices, microbatches, chunks
        p, m, and the stages per device v; by default the least that the schedule allows.
    replicas
        Devices of each stage, for 1F1B-RR; their sum is ``devices``.
    times
        For schedules that depend on times; by default all are equal.
    memory, goal
        For the same schedules, if ``times`` are given: limits of the devices, and what is shortest.
    """

    devices: int
    microbatches: int
    chunks: int | None = None
    replicas: tuple[int, ...] = ()
    times: StageTimes | None = None
    memory: ActivationMemory | None = None
    goal: Goal = "makespan"

    def __post_init__(self) -> None:
        for name in ("devices", "microbatches", "chunks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        if self.replicas and (min(self.replicas) < 1 or sum(self.replicas) != self.devices):
            raise InputError(
                f"replicas must be at least 1 and add up to the {self.devices} devices, "
                f"got {self.replicas}"
            )


@dataclass(frozen=True, slots=True)
class Chunks:
    """The numbers of stages per device that a schedule allows: multiples of ``step``."""

    step: int
    fixed: bool

    def allows(self, chunks: int) -> bool:
        """Whether a schedule may have that many stages per device."""
        return chunks == self.step if self.fixed else chunks % self.step == 0

    def __str__(self) -> str:
        if self.fixed:
            return "1 stage" if self.step == 1 else f"{self.step} stages"
        return "any number of stages" if self.step == 1 else "an even number of stages"


@dataclass(frozen=True, slots=True)
class ScheduleKind:
    """A published schedule.

    Attributes
    ----------
    generate
        The order for given sizes and stages per device, or `InputError`.
    source
        Where it was published.
    placement
        Where its stages are.
    chunks
        The numbers of stages per device that it allows.
    rule
        Which p and m work, in words; empty if all do.
    is_split
        Whether it splits backwards into input gradients and weight gradients.
    weights
        The weight rule of the publication.
    depends_on_times
        Whether its order depends on the times of the stages, and on memory.
    """

    generate: Callable[[Sizes, int], Order]
    source: str
    placement: Placement
    chunks: Chunks
    rule: str = ""
    is_split: bool = False
    weights: Weights = "flush"
    depends_on_times: bool = False


ONE, TWO = Chunks(1, fixed=True), Chunks(2, fixed=True)
ANY, EVEN = Chunks(1, fixed=False), Chunks(2, fixed=False)


def _timed(generate: Callable[..., Order]) -> Callable[[Sizes, int], Order]:
    """A generator whose order depends on times and memory."""
    return lambda of, v: generate(of.devices, of.microbatches, of.times, of.memory, of.goal)


_ZERO_BUBBLE = "Qi et al., ICLR 2024"

KINDS: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind(
        lambda of, v: gpipe(line(of.devices), of.microbatches), "Huang et al. 2019", "line", ONE
    ),
    "1f1b": ScheduleKind(
        lambda of, v: one_f_one_b(of.devices, of.microbatches),
        "Narayanan et al. 2021 (PipeDream-Flush); Fan et al. 2021 (DAPPLE)", "line", ONE,
    ),
    "pipedream": ScheduleKind(
        lambda of, v: one_f_one_b(of.devices, of.microbatches),
        "Narayanan et al. 2019", "line", ONE, weights="stash",
    ),
    "1f1b-rr": ScheduleKind(
        lambda of, v: round_robin(of.replicas or (1,) * of.devices, of.microbatches),
        "Narayanan et al. 2019", "replicated line", ONE,
        rule="m at least the replicas of each stage", weights="stash",
    ),
    "2bw": ScheduleKind(
        lambda of, v: one_f_one_b(of.devices, of.microbatches),
        "Narayanan et al. 2021 (PipeDream-2BW)", "line", ONE, weights="double-buffer",
    ),
    "interleaved": ScheduleKind(
        lambda of, v: interleaved(of.devices, v, of.microbatches),
        "Narayanan et al. 2021 (Megatron-LM)", "loop", ANY, rule="m a multiple of p if v > 1",
    ),
    "interleaved-ragged": ScheduleKind(
        lambda of, v: ragged_interleaved(of.devices, v, of.microbatches),
        "Narayanan et al. 2021, with groups of torch.distributed.pipelining", "loop", ANY,
    ),
    "looped-bfs": ScheduleKind(
        lambda of, v: breadth_first(of.devices, v, of.microbatches),
        "Lamy-Poirier 2023", "loop", ANY,
    ),
    "zb-h1": ScheduleKind(
        lambda of, v: zb_h1(of.devices, of.microbatches), _ZERO_BUBBLE, "line", ONE, is_split=True
    ),
    "zb-h2": ScheduleKind(
        lambda of, v: zb_h2(of.devices, of.microbatches), _ZERO_BUBBLE, "line", ONE, is_split=True
    ),
    "interleaved-zb": ScheduleKind(
        lambda of, v: interleaved_zero_bubble(of.devices, v, of.microbatches),
        f"{_ZERO_BUBBLE}, with chunks of torch.distributed.pipelining", "loop", ANY, is_split=True,
    ),
    "zb1p": ScheduleKind(
        _timed(zb1p),
        _ZERO_BUBBLE, "line", ONE, is_split=True, depends_on_times=True,
    ),
    "zb2p": ScheduleKind(
        _timed(zb2p),
        _ZERO_BUBBLE, "line", ONE, is_split=True, depends_on_times=True,
    ),
    "zbv": ScheduleKind(
        _timed(zbv),
        "Qi et al., arXiv 2401.10241 (2024)", "V", TWO, is_split=True, depends_on_times=True,
    ),
    "v-half": ScheduleKind(
        lambda of, v: v_half(of.devices, of.microbatches),
        "Qi et al., NeurIPS 2024 (controllable memory)", "V", TWO, is_split=True,
    ),
    "v-min": ScheduleKind(
        lambda of, v: v_min(of.devices, of.microbatches),
        "Qi et al., NeurIPS 2024 (controllable memory)", "V", TWO, is_split=True,
    ),
    "dualpipe": ScheduleKind(
        lambda of, v: dualpipe(of.devices, of.microbatches),
        "DeepSeek-AI 2025", "both directions", ONE, rule="p and m even, m at least 2 p",
        is_split=True,
    ),
    "dualpipev": ScheduleKind(
        lambda of, v: dualpipe_v(of.devices, of.microbatches),
        "DeepSeek-AI 2025; Sea AI Lab 2025", "V", TWO, rule="m at least 2 p", is_split=True,
    ),
    "hanayo": ScheduleKind(
        lambda of, v: hanayo(of.devices, v // 2, of.microbatches),
        "Liu et al. 2023", "wave", EVEN,
    ),
    "chimera": ScheduleKind(
        lambda of, v: chimera(of.devices, of.microbatches),
        "Li and Hoefler 2021", "both directions", ONE, rule="p and m even",
    ),
}  # fmt: skip
"""Adding a schedule is one module and one entry."""


def require_chunks(name: str, chunks: int) -> None:
    """Refuse a number of stages per device that a schedule does not have.

    Raises InputError if the schedule has no such number of chunks; names its numbers and other
    schedules.
    """
    if not KINDS[name].chunks.allows(chunks):
        others = [other for other, kind in KINDS.items() if kind.chunks.allows(chunks)]
        raise InputError(
            f"{name} has {KINDS[name].chunks} per device, got {chunks}; {', '.join(others)} may "
            f"have {chunks}"
        )


def schedule_of(name: str, sizes: Sizes) -> Order:
    """The order of a schedule by name.

    Raises
    ------
    InputError
        If there is no schedule of that name, or it does not exist for these sizes.
    """
    if name not in KINDS:
        raise InputError(f"unknown schedule {name!r}; known are {', '.join(KINDS)}")
    kind = KINDS[name]
    chunks = sizes.chunks or kind.chunks.step
    require_chunks(name, chunks)
    if sizes.replicas and kind.placement != "replicated line":
        raise InputError(f"{name} has no replicas; 1f1b-rr has")
    return kind.generate(sizes, chunks)
