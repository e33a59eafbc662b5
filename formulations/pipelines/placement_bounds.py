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
"""

from collections.abc import Iterator

import numpy as np

from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.plan import Bound
from stagewright.formulations.plans.plan_class import PlanClass
from stagewright.graphs.documents.arrays import Floats

LOAD = "load of all devices in every placement"
ENDS = "load, start and end of all devices in every placement"
ONE_STAGE = "one stage in every placement"


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


def _with_ends(problem: MakespanProblem, devices: int) -> Iterator[tuple[str, float]]:
    work = _work(problem)
    heads = np.cumsum([0.0, *problem.forward[:-1]])
    tails = np.zeros_like(heads)
    if not problem.is_split:
        tails = np.cumsum([0.0, *problem.backward[:-1]])
    ends = np.sort(heads)[:devices].sum() + np.sort(tails)[:devices].sum()
    if problem.stages >= devices:
        yield ENDS, float((work.sum() + ends) / devices)
    yield ONE_STAGE, float((heads + work + tails).max())
