"""The launch files of a round: what is asked of its jobs, and the files of those that run."""

import re
from collections.abc import Iterator, Mapping

from stagewright.executor.export.launchers import cpus_of_task, time_of_job, words_of
from stagewright.executor.export.layouts import LAYOUT_FORMATS, added
from stagewright.executor.export.options import FormatOptions
from stagewright.executor.export.rounds import (
    PlacedJob,
    RoundOptions,
    job_name,
    round_files,
    servers_of,
)
from stagewright.formulations.clusters.allocation_plan import AllocationPlan
from stagewright.formulations.clusters.round_document import (
    DNS_LABEL,
    NAME,
    ClusterRound,
    RoundEntry,
)
from stagewright.formulations.parallelism.document import LayoutPlan
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import Job, Training
from stagewright.service.clusters.answers import (
    AllocateAnswer,
    PriceJobsAnswer,
    RoundFilesAnswer,
)
from stagewright.service.clusters.requests import RoundsRequest

_OWN = {"queue": "kueue", "node_label": "kueue", "image": "kueue", "cpus": "slurm", "time": "slurm"}
"""The launcher that has an option."""
LABEL = "accelerator"
"""Of nodes, as Kubernetes's own documentation names the type of their accelerators."""
_KEY = r"([a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"


def require_launchable(request: RoundsRequest) -> None:
    """Refuse jobs and options of which there are no launch files.

    Raises
    ------
    InputError
        In one line, with the job or the option.
    """
    to, after = request.to, request.after
    for name, launcher in _OWN.items():
        if getattr(request, name) is not None and launcher != to:
            raise InputError(f"{name} does not apply to {to}, it is of {launcher}")
    if after is not None and after.launcher != to:
        raise InputError(f"to: the round that runs was launched by {after.launcher}")
    shared = request.space_sharing or (request.allocation and request.allocation.space_sharing)
    if shared and to != "torchrun":
        raise InputError(f"space_sharing: {to} gives a GPU to one job at a time")
    _require_cluster(request)
    cpus_of_task(_format(request), 1)
    time_of_job(_format(request))
    trainings = {one.model: one for one in request.workload.trainings}
    names: dict[str, str] = {}
    for job in request.workload.jobs:
        _require_job(request, job, trainings.get(job.model))
        other = names.setdefault(job_name(job.name), job.name)
        if other != job.name:
            raise InputError(
                f"jobs {other!r} and {job.name!r} would both be {job_name(job.name)}: rename one"
            )


def _require_cluster(request: RoundsRequest) -> None:
    """Refuse names that the cluster cannot have."""
    _require_nodes(request)
    for one in request.pool.accelerators:
        if not NAME.fullmatch(one.name):
            raise InputError(f"accelerator {one.name!r}: {request.to} takes letters, digits, -_.")
    if request.to == "kueue" and not DNS_LABEL.fullmatch(request.queue or ""):
        raise InputError("queue: kueue needs the name of the local queue, such as user-queue")
    if not re.fullmatch(_KEY, request.node_label or LABEL):
        raise InputError(f"node_label {request.node_label!r} is no key of a label")


def _require_nodes(request: RoundsRequest) -> None:
    """Refuse nodes that are not the servers."""
    hosts = request.nodes or {}
    for name in hosts:
        if name not in request.pool.names:
            raise InputError(f"nodes: {name!r} is none of {', '.join(request.pool.names)}")
    for one in request.pool.accelerators:
        names = hosts.get(one.name, ())
        if one.per_server is None:
            raise InputError(
                f"accelerator {one.name!r}: launch files need its servers; write for example "
                f"{one.name}=1x{one.count}"
            )
        if (names or request.to == "torchrun") and len(names) != one.servers:
            raise InputError(
                f"nodes: {one.name} has {one.servers} servers and {len(names)} names; write for "
                f"example {one.name}=gpu[01-{one.servers:02}]"
            )
    every = [host for names in hosts.values() for host in names]
    wrong = next((host for host in every if not NAME.fullmatch(host)), None)
    if wrong is not None:
        raise InputError(f"nodes: {wrong!r} is no name of a node")
    if len({*every}) < len(every):
        raise InputError("nodes: a name is given twice")


def _require_job(request: RoundsRequest, job: Job, training: Training | None) -> None:
    """Refuse a job whose processes nobody could start."""
    place = f"job {job.name!r}: "
    framework = None if training is None else training.framework
    if job.command is not None:
        if not words_of(job.command, f"{place}command"):
            raise InputError(f"{place}the command is empty")
    elif framework in LAYOUT_FORMATS:
        _require_layout(request, job, framework)
    elif request.to == "kueue" and DNS_LABEL.fullmatch(job.name):
        return  # a JobSet of this name, which its user has made
    else:
        hint = " or the `framework` of its training" if training else ""
        also = ", or the name of a JobSet that is there" * (request.to == "kueue")
        raise InputError(f"{place}{request.to} needs its `command`{hint} in the jobs file{also}")
    if request.to == "kueue" and request.image is None:
        raise InputError(f"image: kueue needs the container that has the command of {job.name!r}")


def _require_layout(request: RoundsRequest, job: Job, framework: str) -> None:
    """Refuse a training that lacks what its framework needs, or has a rate without a layout."""
    place = f"job {job.name!r}: "
    for name, what in added(framework).items():
        if name not in job.environment:
            given = "give it in the job's environment"
            raise InputError(f"{place}{framework} needs {name}, {what}: {given}")
    if any(one.model == job.model for one in request.workload.throughputs.alone):
        raise InputError(
            f"{place}the jobs file has throughputs of {job.model!r}, and so no layout for them: "
            "leave them out, or give the job a command"
        )


def _format(request: RoundsRequest) -> FormatOptions:
    return FormatOptions(image=request.image, cpus=request.cpus, time=request.time)


def launched(
    request: RoundsRequest,
    source: AllocateAnswer | AllocationPlan,
    entries: tuple[RoundEntry, ...],
    elapsed_seconds: float,
    priced: PriceJobsAnswer | None,
) -> RoundFilesAnswer:
    """The files of a round, of which the ``entries`` say who runs where."""
    assert request.to is not None
    trainings = {one.model: one for one in request.workload.trainings}
    queued = tuple(
        job.name
        for job in request.workload.jobs
        if job.command is None
        and (job.model not in trainings or trainings[job.model].framework not in LAYOUT_FORMATS)
    )
    places = {job: one for one in entries if one.numbers for job in one.jobs}
    before = {} if request.after is None else request.after.running()
    stays = {job for job, one in places.items() if _is_same(one, before.get(job))}
    sizes = {job: -len(one.numbers) for job, one in places.items()}
    more = {name: getattr(source, name) for name in ("objective", "bound", "proved_by")}
    more["one_more"] = source.one_more if isinstance(source, AllocateAnswer) else None
    made = ClusterRound(
        launcher=request.to,
        policy=source.policy,
        round_seconds=request.round_seconds,
        pool=request.pool,
        jobs=tuple(job.name for job in request.workload.jobs),
        stops=tuple(job for job in before if job not in stays),
        stays=tuple(job for job in places if job in stays),
        starts=tuple(sorted(places.keys() - stays, key=lambda job: (sizes[job], job))),
        entries=entries,
        elapsed_seconds=elapsed_seconds,
        queued=queued,
        nodes=request.nodes or {},
        **more,
    )
    known = () if priced is None else zip(priced.prices, priced.plans, strict=True)
    plans: dict[tuple[object, ...], LayoutPlan | None] = {
        (one.model, one.accelerator, one.count, one.placement): plan for one, plan in known
    }
    jobs = [
        _placed(job, places[job.name], made, trainings.get(job.model), plans)
        for job in request.workload.jobs
        if job.name in places
    ]
    options = RoundOptions(request.queue or "", request.node_label or LABEL, _format(request))
    return RoundFilesAnswer.of(
        made,
        waits=tuple(job for job in made.jobs if job not in places),
        remarks=tuple(_remarks(jobs)),
        files=round_files(made, request.after, jobs, options),
    )


def _is_same(now: RoundEntry, before: RoundEntry | None) -> bool:
    return before is not None and (now.jobs, now.accelerator, now.numbers) == (
        before.jobs, before.accelerator, before.numbers,
    )  # fmt: skip


def _placed(
    job: Job,
    entry: RoundEntry,
    made: ClusterRound,
    training: Training | None,
    plans: Mapping[tuple[object, ...], LayoutPlan | None],
) -> PlacedJob:
    """The job where it runs, with the layout of its training there."""
    asked = (job.model, entry.accelerator, len(entry.numbers), entry.placement or "consolidated")
    framework = None if training is None else training.framework
    return PlacedJob(job, entry.accelerator, servers_of(entry, made), plans.get(asked), framework)


def _remarks(jobs: list[PlacedJob]) -> Iterator[str]:
    """Where a job is on other servers than its rate is of."""
    for one in jobs:
        if one.plan is not None:
            each = one.plan.problem.fabric.levels[0].devices
            sizes = [len(gpus) for _, gpus in one.servers]
            if any(size != each for size in sizes):
                given = "+".join(map(str, sizes))
                yield (
                    f"{one.job.name} has {given} {one.kind} of {len(sizes)} servers; its layout "
                    f"was priced with {each} on each"
                )
