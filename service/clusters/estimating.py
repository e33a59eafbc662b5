"""Rates of new jobs that share accelerators, estimated from a few measurements."""

from dataclasses import replace

from stagewright.graphs.workloads.jobs import PairRate
from stagewright.service.clusters.answers import EstimateAnswer, MeasureAnswer, NewJobAnswer
from stagewright.service.clusters.requests import EstimateRequest, MeasureRequest
from stagewright.solvers.clusters.estimation import Estimator, pairs_to_profile


def estimate(request: EstimateRequest) -> EstimateAnswer:
    """The workload with the rates of all pairs: measured ones as they are, the others estimated.

    Raises
    ------
    InputError
        If a job was measured in a pair but not alone, or no reference job has a new job's scale.
    """
    measured, estimator = request.workload.throughputs, Estimator(request.reference)
    nearest = estimator.nearest(measured)
    whole = estimator.estimate(measured)
    known = {_place(pair) for pair in (*request.reference.pairs, *measured.pairs)}
    found = [pair for pair in whole.pairs if _place(pair) not in known]
    return EstimateAnswer(
        new=tuple(
            NewJobAnswer(model=model, scale=scale, nearest=reference)
            for (model, scale), reference in nearest.items()
        ),
        measured=len(known),
        estimated=found,
        workload=replace(request.workload, throughputs=whole),
    )


def _place(pair: PairRate) -> tuple[object, ...]:
    return (pair.scale, pair.accelerator, *sorted(pair.models))


def measure(request: MeasureRequest) -> MeasureAnswer:
    """A random part of all pairs of a new job with reference jobs, at least one."""
    kind = (request.model, request.scale)
    pairs = pairs_to_profile(request.reference, kind, request.fraction, request.seed)
    return MeasureAnswer(model=request.model, scale=request.scale, pairs=pairs)
