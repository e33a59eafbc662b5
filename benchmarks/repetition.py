"""Repetitions: Tessel's placements, and the least memory of V schedules at full speed.

``python -m benchmarks repetition``. Tessel's seconds are those of its public search (commit
44f72c3, z3 4.15, the commands of its ``evaluation/search_tessel.sh``) on the same machine, one
core: of the repetend alone, and with the warm-up and cool-down that it solves as well.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import process_time

from rich.progress import track

from benchmarks.report import Table
from benchmarks.spec import BenchSpec
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.patterns.block_placements import (
    k_shape,
    m_shape,
    nn_shape,
    v_shape,
    x_shape,
)
from stagewright.formulations.patterns.repetition import RepetitionProblem
from stagewright.formulations.patterns.steady import steady_problem
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.schedules.controllable_memory import v_half, v_min
from stagewright.formulations.schedules.placements import v_shape as v_devices
from stagewright.formulations.schedules.zbv import zbv
from stagewright.solvers.patterns.repetition import RepetitionAnswer, best_repetition

LIMITS = Limits(seconds=60.0, threads=1, seed=0)
DEVICES = 4
MICROBATCHES = 8  # per device, in the published V schedules


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement of Tessel with the memory of its published case, and Tessel's seconds."""

    name: str
    build: Callable[[int, float], RepetitionProblem]
    memory: float
    theirs: tuple[float, float]  # the repetend, all


PLACEMENTS = (
    Placement("V", v_shape, 4.0, (0.2, 0.7)),
    Placement("X", x_shape, 4.0, (7.3, 15.0)),
    Placement("M", m_shape, 6.0, (10.9, 40.2)),
    Placement("K", k_shape, 6.0, (1.2, 2.8)),
    Placement("NN", nn_shape, 6.0, (77.1, 211.2)),
)

SPEC = BenchSpec("repetition", lambda devices: v_schedule(devices, 0.0), (4, 6, 8, 12, 16), few=3)


def v_schedule(devices: int, memory: float) -> MakespanProblem:
    """Two stages per device in a V, split backwards, all computations of one unit."""
    stages, ones = 2 * devices, (1.0,) * (2 * devices)
    free = (0.0,) * (stages - 1)
    return MakespanProblem(
        microbatches=100 * devices,
        forward=ones,
        backward=ones,
        send_forward=free,
        send_backward=free,
        reduce=(0.0,) * stages,
        in_flight=(100 * devices,) * stages,
        device=v_devices(devices),
        weight_gradient=ones,
        saved=((1.0, 0.0, 1.0),) * stages,
        memory=(memory,) * devices,
    )


def least_memory(
    build: Callable[[float], RepetitionProblem], most: int, least: int, lengths: tuple[int, ...]
) -> tuple[int, RepetitionAnswer, RepetitionAnswer | None]:
    """The least whole memory found at which a repetition reaches the load, and its answer.

    Also the answer for one unit less, None if that is below ``least``, where no problem is.
    """
    memory, found = most, best_repetition(build(float(most)), LIMITS, lengths)
    load = found.general.seconds
    while memory > least:
        answer = best_repetition(build(memory - 1.0), LIMITS, lengths)
        if answer.pace is None or answer.pace > load:
            return memory, found, answer
        memory, found = memory - 1, answer
    return memory, found, None


def tables(quick: bool) -> list[Table]:
    """A row per placement, and a row per number of devices."""
    placed = [_placement_row(one) for one in PLACEMENTS]
    rows = [_v_row(devices) for devices in track(SPEC.cases(quick), "V schedules")]
    return [
        Table(
            "repetition-tessel",
            f"Tessel's placements on {DEVICES} devices: forward 1, backward 3, split blocks 1",
            ("placement", "blocks", "memory", "period", "bound", "proved by", "CPU s",
             "Tessel's repetend, s", "Tessel, s", "least memory", "period with 1 less"),
            tuple(placed),
        ),
        Table(
            "repetition-v",
            "V schedules with F = I = W = 1, load 6: the least memory (microbatches of a stage)",
            ("devices", "1F1B", "V-Half", "V-Min", "ZBV", "repetition of 1", "CPU s",
             "period with 1 less", "at least", "proved"),
            tuple(rows),
        ),
    ]  # fmt: skip


def _placement_row(one: Placement) -> tuple[object, ...]:
    problem = one.build(DEVICES, one.memory)
    began = process_time()
    answer = best_repetition(problem, LIMITS)
    seconds = process_time() - began
    least, _, less = least_memory(
        lambda memory: one.build(DEVICES, memory), int(one.memory), 1, (1,)
    )
    return (
        one.name,
        len(problem.seconds),
        f"{one.memory:g}",
        f"{answer.pace:g}",
        f"{answer.bound:g}",
        _proof(answer),
        f"{seconds:.2f}",
        f"{one.theirs[0]:.1f}",
        f"{one.theirs[1]:.1f}",
        least,
        _period(less),
    )


def _v_row(devices: int) -> tuple[object, ...]:
    def build(memory: float) -> RepetitionProblem:
        return steady_problem(v_schedule(devices, memory))

    began = process_time()
    least, _, less = least_memory(build, 2 * devices, 2, (1,))
    seconds = process_time() - began
    count = MICROBATCHES * devices
    published = (max(make(devices, count).most_on_device()) for make in (v_half, v_min, zbv))
    return (
        devices,
        2 * devices,
        *published,
        least,
        f"{seconds:.1f}",
        _period(less),
        "" if less is None else f"{less.bound:g}",
        "yes" if less is not None and less.status is Status.OPTIMAL else "no",
    )


def _period(answer: RepetitionAnswer | None) -> str:
    if answer is None or answer.status is Status.INFEASIBLE:
        return "none"
    return "unknown" if answer.pace is None else f"{answer.pace:g}"


def _proof(answer: RepetitionAnswer) -> str:
    if answer.is_general:
        return f"{answer.general.proved_by}, for every length"
    return f"{answer.bounds[-1].proved_by}, for lengths {answer.lengths}"
