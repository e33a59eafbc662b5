"""Values between stages, and samples of the devices of a stage, by the shapes of a model."""

from collections.abc import Mapping, Sequence

from stagewright.executor.capture.draws import whole_draws
from stagewright.executor.capture.shapes import LayerTrace
from stagewright.executor.programs.shares import Rows, pieces
from stagewright.executor.training.interpreter.boundary import Boundary
from stagewright.executor.training.stages.stage import Share
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.plans.tensor import stays
from stagewright.graphs.documents.errors import InputError


def boundary_of(
    plan: PipelinePlan,
    s: int,
    lanes: Sequence[Sequence[Rows]],
    traces: Mapping[int, LayerTrace],
    samples: int,
) -> Boundary:
    """The values between stages ``s`` and ``s + 1``; ``traces`` by the number of samples."""
    values = traces[samples].outputs
    by_sample = tuple(
        all(trace.outputs[i].shape[:1] == (count,) for count, trace in traces.items())
        for i in range(len(values))
    )
    below, above = lanes[s], lanes[s + 1]
    if len(below) > 1 and stays(plan.stages[s], plan.stages[s + 1], 0):
        return Boundary(values, by_sample, None)
    for i, (value, cut) in enumerate(zip(values, by_sample, strict=True)):
        by_share = value.gradient or any(one.outputs[i] != value for one in traces.values())
        if by_share and not cut and len(below) * len(above) > 1:
            raise InputError(
                f"a value of shape {value.shape} between stages {s} and {s + 1} has no samples in "
                "its first dimension, so that it or its gradient cannot be split among devices; "
                "cut elsewhere, or leave these stages on one device each"
            )
    return Boundary(values, by_sample, pieces([len(lane) for lane in below], len(above)))


def share_of(
    rows: Rows, lane: int, samples: int, traces: Mapping[int, Sequence[LayerTrace]]
) -> Share | None:
    """The samples of a microbatch that a device works on, None if it is all of them in order.

    ``traces`` of the stage's layers, by the number of samples.
    """
    if rows == tuple(range(samples)):
        return None
    fewer = min(traces)
    pairs = zip(traces[samples], traces[fewer], strict=True)
    return Share(
        rows,
        samples,
        lane,
        tuple(
            None if one.draws_again else whole_draws(one.draws, samples, other.draws, fewer)
            for one, other in pairs
        ),
    )
