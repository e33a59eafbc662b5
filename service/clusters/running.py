"""Real clusters: the jobs of a workload trained in rounds on Ray."""

from collections.abc import Mapping

from stagewright.executor.clusters.rates import ClusterJob, TrainingFunction
from stagewright.executor.clusters.report import ClusterReport
from stagewright.executor.clusters.runtime import run_cluster as run
from stagewright.formulations.forms.answers import Status, StopToken, is_stopped
from stagewright.graphs.documents.errors import InputError
from stagewright.service.clusters.allocating import policy_allocator, with_throughputs
from stagewright.service.clusters.answers import RunClusterAnswer
from stagewright.service.clusters.requests import RunClusterRequest
from stagewright.solvers.clusters.policies import policy_named


def run_cluster(
    request: RunClusterRequest,
    programs: Mapping[str, TrainingFunction],
    stop: StopToken | None = None,
) -> RunClusterAnswer:
    """Train all jobs; ``programs`` has what trains each model: a function of a lease.

    Once ``stop`` is set, all jobs save a checkpoint and end; the same folder continues them.

    Raises
    ------
    InputError
        If a model has no program, the policy has no allocation, or as for the cluster runtime.
    """
    policy_named(request.policy)
    request, _ = with_throughputs(request, stop=stop)
    for job in request.workload.jobs:
        if job.model not in programs:
            known = ", ".join(map(repr, programs))
            raise InputError(f"job {job.name!r}: no program trains {job.model!r}; given: {known}")
    report = run(
        [ClusterJob(job, programs[job.model]) for job in request.workload.jobs],
        request.workload.throughputs,
        request.pool,
        policy_allocator(request.policy, request.budget_dollars),
        folder=request.folder,
        round_seconds=request.round_seconds,
        grace_seconds=request.grace_seconds,
        patience_seconds=request.patience_seconds,
        retries=request.retries,
        feedback=request.feedback,
        space_sharing=request.space_sharing,
        placement=request.placement,
        address=request.address,
        stop=stop,
    )
    return _answer(request.policy, report, is_stopped(stop))


def _answer(policy: str, report: ClusterReport, stopped: bool) -> RunClusterAnswer:
    states = {job.state for job in report.jobs}
    status: str = next(state for state in ("failed", "waiting", "done") if state in states)
    return RunClusterAnswer.of(
        report,
        status=Status.INTERRUPTED if stopped and status == "waiting" else status,
        policy=policy,
        rounds=len(report.rounds),
        report=report,
    )
