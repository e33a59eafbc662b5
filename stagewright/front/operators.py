"""Placements of operators, for users of Python."""

from typing import TYPE_CHECKING, Literal

from stagewright.formulations.forms.answers import StopToken
from stagewright.front import fields_of
from stagewright.service.operators.plans import CheckPlacementRequest, PlaceRequest

if TYPE_CHECKING:
    from stagewright.formulations.checking.order import Violation
    from stagewright.formulations.operators.plan import OperatorPlan
    from stagewright.formulations.operators.problem import Contention
    from stagewright.graphs.importers.dnn_partitioning import Workload
    from stagewright.graphs.importers.piper import PiperWorkload
    from stagewright.graphs.machines.cluster import Cluster
    from stagewright.graphs.models.operators.step_graph import StepGraph
    from stagewright.service.operators.dividing import DivideAnswer
    from stagewright.service.operators.plans import PlaceAnswer


def place(
    graph: "StepGraph",
    cluster: "Cluster",
    planner: str = "fastt",
    time_limit: float = 10.0,
    *,
    contention: "Contention" = "none",
    threads: int = 1,
    seed: int = 0,
    stop: StopToken | None = None,
) -> "PlaceAnswer":
    """Place the operators of a training step on ``cluster``, and order and split them.

    Parameters
    ----------
    graph, cluster
        See :func:`load_graph`, of what ``stagewright capture`` writes, and :func:`load_cluster`.
    planner
        ``fastt`` or another that ``stagewright planners`` lists for graphs.
    time_limit
        Seconds of the search; list schedules and OS-DPOS are not cut short.
    contention
        ``none``: transfers never wait for each other; ``exclusive``: a directed pair of devices
        carries one at a time.
    threads, seed
        Of the search; with one thread a run is reproducible.
    stop
        Ends the search once it is set; the answer is then the best plan so far.

    Returns
    -------
    PlaceAnswer
        ``plan`` (None if nothing fits, or nothing was found), status, seconds, bounds and gaps.

    Raises
    ------
    InputError
        If an argument is not valid, with the reason in one line.
    """
    fields = fields_of(locals(), "stop")
    from stagewright.service.operators.plans import place as answer

    return answer(PlaceRequest.of(**fields), stop)


def divide(
    workload: "Workload | PiperWorkload",
    *,
    devices: int | None = None,
    memory_bytes: float | None = None,
    hosts: int | None = None,
    any_sets: bool = False,
    replicas: int = 1,
    objective: Literal["load", "phases", "latency"] = "load",
    bandwidth_bytes_per_second: float | None = None,
    samples: int | None = None,
    time_limit: float = 10.0,
    seed: int = 0,
    stop: StopToken | None = None,
) -> "DivideAnswer":
    """Divide a published workload among devices: the least time between two samples, or of one.

    Parameters
    ----------
    workload
        Operators (dnn-partitioning) or layers (Piper); see :func:`load_partition_problem`.
    devices, memory_bytes, hosts, bandwidth_bytes_per_second, samples
        In place of those in its file.
    any_sets
        Operators: whether sets need not be contiguous.
    replicas
        Operators: the most devices of a set, which exchange gradients at
        ``bandwidth_bytes_per_second``.
    objective
        Operators: the largest ``load``; the largest forward load plus the largest backward load
        (``phases``); or the time of one sample (``latency``; ``hosts=0``: on accelerators only).
    time_limit
        Seconds.
    seed
        Of the neighbourhoods that are looked at where there are too many downsets.
    stop
        Ends the search once it is set; the answer is then the best division so far.

    Returns
    -------
    DivideAnswer
        ``sets`` (None if there are none, with a ``reason``), status, cost, bound and gap.

    Raises
    ------
    InputError
        If an argument is not valid for the workload, with the reason in one line.
    """
    fields = fields_of(locals(), "stop")
    from stagewright.service.operators.dividing import DivideRequest
    from stagewright.service.operators.dividing import divide as answer

    return answer(DivideRequest.of(**fields, threads=1), stop=stop)


def check_placement(
    plan: "OperatorPlan", graph: "StepGraph", cluster: "Cluster"
) -> "tuple[Violation, ...]":
    """The first broken rule, or every other fault, of ``plan`` for ``graph`` on ``cluster``."""
    from stagewright.service.operators.plans import check as answer

    return answer(CheckPlacementRequest.of(plan=plan, graph=graph, cluster=cluster)).found
