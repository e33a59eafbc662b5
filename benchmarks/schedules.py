"""Schedules with memory over time beside those of zero-bubble's heuristics, at equal memory.

The instances and the heuristics' figures, from sail-sg/zero-bubble, are read from the folder
``shared/data/schedules`` beside the checkout and are not part of this repository; the table of
controllable memory needs no file.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.report import Table
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.pipelines.makespan import MakespanProblem, Objective
from stagewright.formulations.schedules.order import v_shape
from stagewright.solvers.pipelines.rows.search import compile_row_kernels
from stagewright.solvers.pipelines.scheduling import ScheduleResult, solve_schedule

DATA = Path(__file__).parents[2] / "shared" / "data" / "schedules"
MISSING = f"skipped: the instances are not in {Path(*DATA.parts[-3:])} beside the checkout"
SECONDS, QUICK_SECONDS, FEW = 60.0, 2.0, 3
OBJECTIVES: tuple[Objective, ...] = ("span", "makespan")
COLUMNS = (
    "instance", "objective", "theirs", "ours", "bound", "gap %", "found by", "proved by",
    "first s", "final s", "result",
)  # fmt: skip
# Hidden size and heads of the models with sequences of 1,024 behind the V-shapes, by devices.
MODELS = {4: (4096, 32), 8: (2304, 24), 16: (4096, 32), 32: (6144, 48)}
SEQUENCE = 1024
CONTROLLED = {(4, 12): {4: (83, 83), 6: (77, 77), 8: (72, 75)},
              (8, 24): {8: (167, 167), 12: (155, 155), 16: (144, 151)}}  # fmt: skip
"""(p, m) -> memory -> span and makespan of zero-bubble's search; below p it finds nothing."""


@dataclass(frozen=True, slots=True)
class Case:
    """A problem and the heuristics' figure; None where they have none."""

    name: str
    problem: MakespanProblem
    theirs: float | None


def tables(quick: bool) -> Iterable[Table]:
    """Zero-bubble's instances, where the data are, and memory from the least possible to 2 p."""
    compile_row_kernels()
    seconds = QUICK_SECONDS if quick else SECONDS
    if DATA.exists():
        cases = instances()[: FEW if quick else None]
        title = f"Zero-bubble's instances, at most {seconds:g} s"
        yield Table("schedules", title, COLUMNS, tuple(_row(one, seconds) for one in cases))
    else:
        print(MISSING)
    sizes = list(CONTROLLED)[:1] if quick else list(CONTROLLED)
    cases = [one for size in sizes for one in controlled(*size)]
    seconds = min(seconds, 10.0)
    title = f"Controllable memory, all times 1, at most {seconds:g} s"
    yield Table("schedules-memory", title, COLUMNS, tuple(_row(one, seconds) for one in cases))


def instances() -> list[Case]:
    """The instances of the data for both objectives; of V-shapes their spans alone are known."""
    lines = json.loads((DATA / "split_backward.json").read_text())
    shapes = json.loads((DATA / "v_shape.json").read_text())
    return [
        *(
            Case(row["name"], split(row, objective), row[f"zb_heur_{objective}"])
            for row in lines
            for objective in OBJECTIVES
        ),
        *(
            Case(
                f"V p{row['p']} m{row['n']} ({row['f']}, {row['b']}, {row['w']}), "
                f"transfer {row['c']}, memory {row['mem_chunks']}",
                shape(row, objective),
                row["span"] if objective == "span" else None,
            )
            for row in shapes
            for objective in OBJECTIVES
        ),
    ]


def split(row: dict, objective: Objective) -> MakespanProblem:  # type: ignore[type-arg]
    """An instance of ``split_backward.json``: a stage on each device."""
    devices, count = row["p"], row["n"]
    forward, backward, weight, taken, early, late, memory = (
        tuple(abs(float(value)) for value in row[name])
        for name in ("cost_f", "cost_b", "cost_w", "mem_f", "mem_b", "mem_w", "max_mem")
    )
    sends = (float(row["comm"]),) * (devices - 1)
    return MakespanProblem(
        microbatches=count,
        forward=forward,
        backward=backward,
        send_forward=sends,
        send_backward=sends,
        reduce=(0.0,) * devices,
        in_flight=(count,) * devices,
        weight_gradient=weight,
        saved=tuple(zip(taken, early, late, strict=True)),
        memory=memory,
        objective=objective,
        duplex="full",
    )


def shape(row: dict, objective: Objective) -> MakespanProblem:  # type: ignore[type-arg]
    """An instance of ``v_shape.json``: its program counts 32 h of 34 h + 5 a s up to W."""
    hidden, heads = MODELS[row["p"]]
    late = 32 * hidden / (34 * hidden + 5 * heads * SEQUENCE)
    times = float(row["f"]), float(row["b"]), float(row["w"]), float(row["c"])
    return vee(row["p"], row["n"], times, late, float(row["mem_chunks"]), objective)


def vee(
    devices: int,
    microbatches: int,
    times: tuple[float, float, float, float],
    late: float,
    memory: float,
    objective: Objective,
) -> MakespanProblem:
    """Equal stages in a V with times F, I, W and of a transfer; ``late`` of 1 is held up to W."""
    stages, home = 2 * devices, v_shape(devices)
    forward, backward, weight, send = times
    sends = tuple(send if a != b else 0.0 for a, b in pairwise(home))
    return MakespanProblem(
        microbatches=microbatches,
        forward=(forward,) * stages,
        backward=(backward,) * stages,
        send_forward=sends,
        send_backward=sends,
        reduce=(0.0,) * stages,
        in_flight=(microbatches,) * stages,
        device=home,
        weight_gradient=(weight,) * stages,
        saved=((1.0, 1.0 - late, late),) * stages,
        memory=(memory,) * devices,
        objective=objective,
        duplex="full",
    )


def controlled(devices: int, microbatches: int) -> list[Case]:
    """Memory from 2, a microbatch of both stages of a device, up to 2 p, which 1F1B needs."""
    known = CONTROLLED[devices, microbatches]
    return [
        Case(
            f"V p{devices} m{microbatches}, memory {memory}",
            vee(devices, microbatches, (1.0, 1.0, 1.0, 0.0), 1.0, float(memory), objective),
            known[memory][OBJECTIVES.index(objective)] if memory in known else None,
        )
        for memory in range(2, 2 * devices + 1)
        for objective in OBJECTIVES
    ]


def _row(case: Case, seconds: float) -> tuple[object, ...]:
    result = solve_schedule(case.problem, "optimal", Limits(seconds=seconds, threads=2))
    first, final = _times(result)
    assert result.cost is not None
    assert result.gap is not None
    return (
        case.name, case.problem.objective, "" if case.theirs is None else f"{case.theirs:.0f}",
        f"{result.cost:.0f}", f"{result.bound:.0f}", f"{100 * result.gap:.2f}", result.source,
        result.proved_by, f"{first:.2f}", f"{final:.2f}", _compared(result.cost, case.theirs),
    )  # fmt: skip


def _times(result: ScheduleResult) -> tuple[float, float]:
    """When the first schedule was there, and the best one."""
    found = [step for step in result.progress if step.objective is not None]
    best = min(step.objective for step in found if step.objective is not None)
    final = next(step for step in found if step.objective == best)
    return found[0].seconds, final.seconds


def _compared(ours: float, theirs: float | None) -> str:
    if theirs is None:
        return ""
    if abs(ours - theirs) <= 1e-9 * theirs:
        return "equal"
    return "BETTER" if ours < theirs else "WORSE"
