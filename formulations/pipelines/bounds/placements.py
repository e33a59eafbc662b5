"""Lower bounds on the makespan and the span of given stages, wherever they are placed.

No transfers count, since neighbouring stages may share a device. For M microbatches of S stages
with times F, B (or I, W) on at most D devices:

* Load: all computations are done by D devices, and no stage is divided. With more stages than
  devices, two of the D + 1 stages that take longest share a device.
* Start and end: only the device of stage 0 computes at once. The first computation of a device is
  the forward of some stage s, after the forwards of 0, ..., s - 1, and devices have different ones,
  so that together they wait at least as long as the first D of these sums. The last computation of
  a device is the backward of another stage each, if backwards are whole, and the same holds for
  what follows it. A device without stages is idle all the time, which is longer.
* One stage: its computations are on one device, between the forwards before it and, if backwards
  are whole, the backwards that follow its last one.
* Balance: each device has the work of its stages, and waits as above for its first one. An integer
  program places the stages so that the longest such time is as short as possible.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from stagewright.formulations.forms.models import LinearProgram
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.plan import Bound
from stagewright.formulations.plans.plan_class import PlanClass
from stagewright.graphs.documents.arrays import Floats

LOAD = "load of all devices in every placement"
ENDS = "load, start and end of all devices in every placement"
_ONE_STAGE = "one stage in every placement"
BALANCE = "balance of load, start and end in every placement"

TICKS = 2**30  # of the time of all computations


def placement_bounds(problem: MakespanProblem, devices: int, plans: PlanClass) -> tuple[Bound, ...]:
    """Bounds on the objective of ``problem`` with its stages on at most that many devices."""
    found = [(LOAD, _load(problem, devices))]
    if problem.objective == "makespan":
        found += _with_ends(problem, devices)
    return tuple(Bound(seconds, name, "schedule", plans) for name, seconds in found)


def _work(problem: MakespanProblem) -> Floats:
    """The time of all microbatches on each stage."""
    work = np.array(problem.forward) + problem.backward
    return problem.microbatches * (work + (problem.weight_gradient or 0.0))


def _load(problem: MakespanProblem, devices: int) -> float:
    work = np.sort(_work(problem))[::-1]
    pair = work[devices - 1 : devices + 1].sum() if len(work) > devices else 0.0
    return float(max(work.sum() / devices, work[0], pair))


@dataclass(frozen=True, slots=True, eq=False)
class Balance:
    """The integer program of ``BALANCE``; its objective is in units of ``unit``.

    Columns: the longest time T; for every stage and device whether it is there, then whether it is
    the device's first. Times are rounded down.
    """

    form: LinearProgram
    unit: float

    @classmethod
    def of(cls, problem: MakespanProblem, devices: int) -> "Balance":
        """The program for at most that many devices."""
        work, stages = _work(problem), problem.stages
        heads, tails = _ends(problem)
        waits = heads + tails if problem.objective == "makespan" else np.zeros(stages)
        unit = float((work + waits).sum()) / TICKS or 1.0
        work_ticks, wait_ticks = np.floor(work / unit), np.floor(waits / unit)
        here, alike = sparse.eye_array(devices), sparse.eye_array(stages)
        each, earlier = np.ones((1, devices)), np.tril(np.ones((stages, stages)))
        rows = [
            # Every stage has one device; a device has at most one first stage, which it has.
            [None, sparse.kron(alike, each), None],
            [None, None, sparse.kron(np.ones((1, stages)), here)],
            [None, sparse.kron(alike, here), -sparse.kron(alike, here)],
            # The first stage on the device of s is s or an earlier one.
            [None, -sparse.kron(alike, here), sparse.kron(earlier, here)],
            [
                np.ones((devices, 1)),
                -sparse.kron(work_ticks[None, :], here),
                -sparse.kron(wait_ticks[None, :], here),
            ],
        ]
        pairs = stages * devices
        most = np.r_[np.ones(stages + devices), np.full(2 * pairs + devices, np.inf)]
        lower = np.zeros(1 + 2 * pairs)
        lower[1] = 1  # devices are alike: stage 0 is on 0
        return cls(
            form=LinearProgram(
                cost=np.r_[1.0, np.zeros(2 * pairs)],
                matrix=sparse.csr_array(sparse.block_array(rows)),
                row_lower=np.r_[np.ones(stages), np.zeros(devices + 2 * pairs + devices)],
                row_upper=most,
                lower=lower,
                upper=np.r_[2.0 * TICKS, np.ones(2 * pairs)],
                integral=np.ones(1 + 2 * pairs, dtype=bool),
            ),
            unit=unit,
        )


def _ends(problem: MakespanProblem) -> tuple[Floats, Floats]:
    """The forwards before every stage, and the whole backwards after it."""
    heads = np.cumsum([0.0, *problem.forward[:-1]])
    if problem.is_split:
        return heads, np.zeros_like(heads)
    return heads, np.cumsum([0.0, *problem.backward[:-1]])


def _with_ends(problem: MakespanProblem, devices: int) -> Iterator[tuple[str, float]]:
    work = _work(problem)
    heads, tails = _ends(problem)
    ends = np.sort(heads)[:devices].sum() + np.sort(tails)[:devices].sum()
    if problem.stages >= devices:
        yield ENDS, float((work.sum() + ends) / devices)
    yield _ONE_STAGE, float((heads + work + tails).max())
