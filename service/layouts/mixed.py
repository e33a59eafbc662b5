"""Training on servers of several kinds by computed layers: what their profiles would be.

Each kind computes the model's layers at its own rates, by tensor degree and microbatch, as
``train-plan`` prices them on one kind. The search by layer profiles then divides the model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagewright.formulations.parallelism.layer_times import layer_time
from stagewright.formulations.parallelism.profiles.cluster import ServerPools
from stagewright.formulations.parallelism.profiles.pipelines import ProfiledProblem
from stagewright.formulations.parallelism.ranges import expected
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_seconds
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.machines.rates import Spread
from stagewright.graphs.models.layer_profiles import LayerProfiles, Measured, with_sizes
from stagewright.graphs.models.shards import LayerSplit, shares_of
from stagewright.graphs.models.splits import require_split
from stagewright.service.layouts.problems import profiled_problem
from stagewright.service.layouts.profiled import ProfiledAnswer

MICROBATCHES = (1, 2, 4, 8)
"""Samples of a microbatch to consider, of which those that divide the batch are taken."""
TENSOR_DEGREES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class MixedProblem:
    """The problem by computed profiles; the least and the most measured over predicted seconds.

    The ``spread`` is that of the kinds together: an iteration in which each kind is within the
    range of its rates is within it. ``remarks`` say what was computed and what is assumed.
    """

    problem: ProfiledProblem
    spread: Spread
    remarks: tuple[str, ...]


def mixed_problem(
    problems: Mapping[str, TrainingProblem],
    cluster: Cluster | ServerPools,
    *,
    precision: str = "bf16",
    tensor: Sequence[int] = TENSOR_DEGREES,
    microbatches: Sequence[int] = MICROBATCHES,
    reserve_bytes: float | None = None,
) -> MixedProblem:
    """The training of one model on servers of several kinds.

    Parameters
    ----------
    problems
        For each kind of device the same training on one of its servers, the largest; see
        :func:`training_problem`.
    cluster
        Servers of equal devices each, of these kinds.
    precision
        ``fp32``, ``fp16`` or ``bf16``, as that of the problems.
    tensor, microbatches
        Degrees and samples to consider.
    reserve_bytes
        Memory of a device that is not for the plan; see :func:`profiled_problem`.

    Raises
    ------
    InputError
        If nothing considered divides the model or the batch, or the precision is another.
    """
    first = next(iter(problems.values()))
    sizes = [one for one in microbatches if first.batch % one == 0]
    if not sizes:
        raise InputError(
            f"no microbatch of {', '.join(map(str, microbatches))} samples divides the batch "
            f"{first.batch}"
        )
    measured = [
        _layers(kind, problem, degree, samples)
        for kind, problem in problems.items()
        for degree in tensor
        if degree <= problem.fabric.per_server and _divides(problem, degree)
        for samples in sizes
    ]
    if not measured:
        raise InputError(f"tensor degrees {', '.join(map(str, tensor))} do not divide the model")
    rates = "; ".join(f"{kind} by {problem.rates}" for kind, problem in problems.items())
    profiles = LayerProfiles(first.architecture.name, f"analytic: {rates}", tuple(measured))
    sized = with_sizes(
        profiles,
        first.architecture,
        sequence=first.sequence,
        precision=precision,
        attention=first.attention,
    )
    spreads = [expected(problem, ()) for problem in problems.values()]
    return MixedProblem(
        profiled_problem(sized, cluster, batch=first.batch, reserve_bytes=reserve_bytes),
        Spread(min(one.low for one in spreads), max(one.high for one in spreads)),
        (
            f"layers are computed, not measured: {rates}",
            "the class has no recomputation, ZeRO, virtual stages or sequence parallelism; memory "
            "follows the rule of layer profiles",
        ),
    )


def _divides(problem: TrainingProblem, degree: int) -> bool:
    try:
        require_split(problem.architecture, problem.sequence, LayerSplit(tensor=degree))
    except InputError:
        return False
    return True


def _layers(kind: str, problem: TrainingProblem, degree: int, samples: int) -> Measured:
    """The computed times of every layer on a tensor group of a kind."""
    split = LayerSplit(tensor=degree)
    shares = shares_of(
        problem.architecture,
        problem.sequence,
        split,
        problem.attention,
        by_operator=problem.memory.by_operator,
    ).every
    times = [layer_time(problem, one, split, samples, "none", False) for one in shares]
    return Measured(
        kind,
        samples,
        degree,
        forward_seconds=tuple(one.forward for one in times),
        backward_seconds=tuple(one.backward for one in times),
        update_seconds=tuple(
            float(problem.processor.update_seconds(one.parameters + one.expert_parameters))
            for one in shares
        ),
    )


def within_rates(answer: ProfiledAnswer, mixed: MixedProblem) -> ProfiledAnswer:
    """The answer with the range of its seconds, and what is assumed."""
    remarks = list(mixed.remarks)
    if answer.iteration_seconds is not None:
        low, high = (
            format_seconds(answer.iteration_seconds * one)
            for one in (mixed.spread.low, mixed.spread.high)
        )
        remarks.insert(0, f"{low} to {high} when measured, if each kind is within its rates' range")
    return answer.model_copy(update={"remarks": (*answer.remarks, *remarks)})
