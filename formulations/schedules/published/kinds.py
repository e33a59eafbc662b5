"""The published schedules by name: generator, placement, weight rule, and which sizes work."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from stagewright.formulations.plans.weight_rules import Weights
from stagewright.formulations.schedules.memory import ActivationMemory
from stagewright.formulations.schedules.order import Order
from stagewright.formulations.schedules.placements import line
from stagewright.formulations.schedules.published.automatic import Goal, zb1p, zb2p
from stagewright.formulations.schedules.published.chimera import chimera
from stagewright.formulations.schedules.published.controllable_memory import v_half, v_min
from stagewright.formulations.schedules.published.dualpipe import dualpipe, dualpipe_v
from stagewright.formulations.schedules.published.gpipe import breadth_first, gpipe
from stagewright.formulations.schedules.published.hanayo import hanayo
from stagewright.formulations.schedules.published.interleaved import interleaved, ragged_interleaved
from stagewright.formulations.schedules.published.one_f_one_b import one_f_one_b
from stagewright.formulations.schedules.published.round_robin import round_robin
from stagewright.formulations.schedules.published.zbv import zbv
from stagewright.formulations.schedules.published.zero_bubble import (
    interleaved_zero_bubble,
    zb_h1,
    zb_h2,
)
from stagewright.formulations.schedules.timing import StageTimes
from stagewright.graphs.documents.errors import InputError

Placement = Literal["line", "loop", "V", "wave", "both directions", "replicated line"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that a schedule is generated for: devices, microbatches, chunks.

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

    Raises
    ------
    InputError
        If a number is below 1.
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

    Raises
    ------
    InputError
        If the schedule has no such number of chunks; names its numbers and other schedules.
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
