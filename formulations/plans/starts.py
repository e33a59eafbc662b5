"""Convert start times between the checker's blocks and timetables of SPP's problem."""

from collections.abc import Sequence

import numpy as np

from stagewright.formulations.pipelines.makespan import Timetable
from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.timing import Blocks, durations


def starts_of(problem: PipelineProblem, stages: Sequence[Stage], times: Timetable) -> Blocks:
    """The start times of ``times`` as the checker's blocks.

    The all-reduce and the optimizer step, which a makespan problem combines, are separated, and
    transfers between stages on the same devices, which are no actions, are removed.
    """
    lasting = durations(problem, stages)
    nowhere = np.full((1, problem.microbatches), np.nan)
    reduced = np.nan_to_num(lasting[ActionKind.REDUCE])
    starts = {
        ActionKind.FORWARD: times.forward,
        ActionKind.BACKWARD: times.backward,
        ActionKind.SEND_FORWARD: np.concatenate([times.send_forward, nowhere]),
        ActionKind.SEND_BACKWARD: np.concatenate([nowhere, times.send_backward]),
        ActionKind.REDUCE: times.reduce[:, None],
        ActionKind.UPDATE: times.reduce[:, None] + reduced,
    }
    return {
        kind: np.where(np.isnan(seconds), np.nan, starts.get(kind, np.nan))
        for kind, seconds in lasting.items()
    }


def timetable_of(starts: Blocks) -> Timetable:
    """The inverse of :func:`starts_of`, for split stages on disjoint devices, whole backwards."""
    begun = np.fmin(starts[ActionKind.REDUCE], starts[ActionKind.UPDATE])[:, 0]
    return Timetable(
        starts[ActionKind.FORWARD],
        starts[ActionKind.BACKWARD],
        starts[ActionKind.SEND_FORWARD][:-1],
        starts[ActionKind.SEND_BACKWARD][1:],
        np.where(np.isnan(begun), starts[ActionKind.BACKWARD].max(axis=1), begun),
    )
