"""A round of a shared cluster as files: a folder for each job that runs, and what starts them.

``round.sh`` ends the jobs that stop and then starts the others, the largest first; ``round.json``
is the round as a document, from which the next one goes on.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stagewright.executor.export.kubernetes import QUEUE, jobset, jobset_name
from stagewright.executor.export.launchers import (
    NAME,
    Launch,
    LaunchNode,
    SharedJob,
    slurm,
    torchrun,
    words_of,
)
from stagewright.executor.export.layouts import SCRIPT, shared_files
from stagewright.executor.export.options import FormatOptions
from stagewright.formulations.clusters.round_document import ClusterRound, RoundEntry
from stagewright.formulations.parallelism.document import LayoutPlan
from stagewright.graphs.documents.documents import to_json
from stagewright.graphs.workloads.jobs import Job

LAYOUT, PATCH, ROUND, START = "layout.json", "patch.json", "round.json", "round.sh"
_SPEC = "/spec/replicatedJobs/0/template/spec"  # of a JobSet's first Job
_WRITERS = {"slurm": slurm, "kueue": jobset, "torchrun": torchrun}

_BY_SLURM = """\
jobs() { squeue --me --noheader --states="$1" --name="$2" --format=%A; }
"""
# Starts a node's processes in a session of their own, says whether they live, and ends them.
_BY_SSH = """\
on() { ssh "$1" "bash -s -- $(printf '%q ' "${@:2}")"; }
begin() { on "$@" <<'END'
mkdir -p ~/.stagewright
cd "$1"
export NODE_RANK=$3 MASTER_ADDR=$4 MASTER_PORT=$5
pid=~/.stagewright/"$2-$3.pid"
setsid bash -c 'bash run.sh; rm -f "$0"' "$pid" >"node-$3.log" 2>&1 </dev/null &
echo $! >"$pid"
END
}
alive() { on "$@" <<'END'
kill -0 -- "-$(cat ~/.stagewright/"$1.pid" 2>/dev/null)" 2>/dev/null
END
}
end() { on "$@" <<'END'
[ -e ~/.stagewright/"$1.pid" ] || exit 0
pid=$(cat ~/.stagewright/"$1.pid")
rm ~/.stagewright/"$1.pid"
kill -- "-$pid" 2>/dev/null || exit 0
for _ in $(seq 60); do kill -0 -- "-$pid" 2>/dev/null || exit 0; sleep 1; done
kill -9 -- "-$pid"
END
}
"""


@dataclass(frozen=True, slots=True)
class PlacedJob:
    """A job on GPUs of a ``kind``: for each server its host and the GPUs' numbers there.

    The servers with the most GPUs come first; a host is None where it is not known. ``framework``
    trains the layout of ``plan`` where the job has no command of its own.
    """

    job: Job
    kind: str
    servers: tuple[tuple[str | None, tuple[int, ...]], ...]
    plan: LayoutPlan | None = None
    framework: str | None = None

    @property
    def name(self) -> str:
        """The name of the job on the cluster."""
        return job_name(self.job.name)

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return self.name.removeprefix(f"{NAME}-")


@dataclass(frozen=True, slots=True)
class RoundOptions:
    """The local ``queue`` of Kueue, the ``label`` of nodes with their kind, and other options."""

    queue: str
    label: str
    format: FormatOptions


def job_name(name: str) -> str:
    """The name of a job on the cluster: a label, as those of its pods are."""
    return jobset_name(name, 10_000)


def servers_of(
    entry: RoundEntry, made: ClusterRound
) -> tuple[tuple[str | None, tuple[int, ...]], ...]:
    """The servers on which an entry runs: host, if known, and GPUs; the most GPUs first."""
    kind = next(one for one in made.pool.accelerators if one.name == entry.accelerator)
    size, hosts = kind.per_server or kind.count, made.nodes.get(kind.name, ())
    found: dict[int, list[int]] = {}
    for number in entry.numbers:
        found.setdefault(number // size, []).append(number % size)
    return tuple(
        (hosts[server] if hosts else None, tuple(gpus))
        for server, gpus in sorted(found.items(), key=lambda one: (-len(one[1]), one[0]))
    )


def round_files(
    made: ClusterRound,
    before: ClusterRound | None,
    jobs: Sequence[PlacedJob],
    options: RoundOptions,
) -> dict[str, str]:
    """The texts of the files of a round by path; ``jobs`` are those that run.

    Raises InputError if a framework cannot express a layout.
    """
    lease = replace(options.format, time=options.format.time or str(_minutes(made)))
    leased = replace(options, format=lease)
    files = {
        f"{one.folder}/{name}": text
        for one in jobs
        for name, text in _files_of(one, made, leased).items()
    }
    return {**files, START: _script(made, before, jobs, options), ROUND: to_json(made) + "\n"}


def _files_of(one: PlacedJob, made: ClusterRound, options: RoundOptions) -> dict[str, str]:
    """The files of a job's folder, by name."""
    files = {} if one.plan is None else {LAYOUT: to_json(one.plan) + "\n"}
    if one.job.name in made.queued:
        return files | {PATCH: json.dumps(_patch(one, options.label), indent=1) + "\n"}
    words: tuple[str, ...] = ("bash", SCRIPT)
    if one.job.command is not None:
        words = words_of(one.job.command, "command")
    elif one.plan is not None and one.framework is not None:
        files |= shared_files(one.plan, one.framework)
    shared = SharedJob(
        name=one.name,
        kind=one.kind,
        queue=options.queue,
        label=options.label,
        files=one.job.command is None,
        environment=one.job.environment,
    )
    # Slurm and Kubernetes number the GPUs that a job has from 0.
    is_own = made.launcher == "torchrun"
    nodes = tuple(
        LaunchNode((host,) if host else (), gpus if is_own else tuple(range(len(gpus))))
        for host, gpus in one.servers
    )
    launch = Launch(one.job.name, nodes, words, options.format, shared=shared)
    return files | _WRITERS[made.launcher](launch)


def _patch(one: PlacedJob, label: str) -> list[dict[str, Any]]:
    """The JSON patch of a user's suspended JobSet: nodes of the kind, and how many."""
    selected = {"path": f"{_SPEC}/template/spec/nodeSelector", "value": {label: one.kind}}
    return [
        {"op": "add", **selected},
        *(
            {"op": "replace", "path": f"{_SPEC}/{field}", "value": len(one.servers)}
            for field in ("parallelism", "completions")
            if one.job.counts
        ),
    ]


def _script(
    made: ClusterRound,
    before: ClusterRound | None,
    jobs: Sequence[PlacedJob],
    options: RoundOptions,
) -> str:
    """The script that ends, keeps and starts jobs; what should run and does not starts again."""
    placed = {one.job.name: one for one in jobs}
    stop, stay, start = _COMMANDS[made.launcher]
    lines = [
        "#!/usr/bin/env bash",
        f"# A round of {made.round_seconds:g} s: {len(made.stops)} jobs stop, "
        f"{len(made.stays)} stay, {len(made.starts)} start.",
        "set -euo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
    ]
    if made.launcher in _FUNCTIONS:
        lines.append(_FUNCTIONS[made.launcher].rstrip())
    for job in made.stops if before is not None else ():
        assert before is not None
        lines += [f"# stops: {json.dumps(job)}", *stop(job, before)]
    for job in made.stays:
        lines += [f"# stays: {json.dumps(job)}", *stay(placed[job], made, options)]
    for job in made.starts:
        lines += [f"# starts: {json.dumps(job)}", *start(placed[job], made, options)]
    return "\n".join(lines) + "\n"


def _minutes(made: ClusterRound) -> int:
    """Of a lease: a minute more than the round, in which the next one is begun."""
    return math.ceil(made.round_seconds / 60) + 1


def _slurm_stop(job: str, before: ClusterRound) -> Iterator[str]:
    yield f"scancel --me --name={job_name(job)}"


def _slurm_stay(one: PlacedJob, made: ClusterRound, options: RoundOptions) -> Iterator[str]:
    """The lease goes on; only operators of Slurm may extend it (man scontrol)."""
    yield from _slurm_start(one, made, options)
    if options.format.time is None:
        yield f"for id in $(jobs RUNNING {one.name}); do"
        yield f'  scontrol update JobId="$id" EndTime=now+{_minutes(made)}minutes'
        yield "done"


def _slurm_start(one: PlacedJob, made: ClusterRound, options: RoundOptions) -> Iterator[str]:
    states = "PENDING,CONFIGURING,RUNNING,SUSPENDED"
    yield f'[ -n "$(jobs {states} {one.name})" ] || (cd {one.folder} && sbatch job.sbatch)'


def _kueue_stop(job: str, before: ClusterRound) -> Iterator[str]:
    """Kueue lets a queue be changed of a JobSet that is suspended, in the same change too."""
    if job in before.queued:
        freed = {"metadata": {"labels": {QUEUE: None}}, "spec": {"suspend": True}}
        yield f"kubectl patch jobset {job} --type=merge --patch='{json.dumps(freed)}'"
    else:
        yield f"kubectl delete jobset {job_name(job)} --ignore-not-found --cascade=foreground"


def _kueue_stay(one: PlacedJob, made: ClusterRound, options: RoundOptions) -> Iterator[str]:
    if one.job.name not in made.queued:
        failed = f"kubectl wait jobset/{one.name} --for=condition=Failed --timeout=1s"
        yield f"if {failed} >/dev/null 2>&1; then"
        yield from _kueue_stop(one.job.name, made)
        yield "fi"
        yield from _kueue_start(one, made, options)


def _kueue_start(one: PlacedJob, made: ClusterRound, options: RoundOptions) -> Iterator[str]:
    if one.job.name in made.queued:
        job = one.job.name
        yield f"kubectl patch jobset {job} --type=json --patch-file={one.folder}/{PATCH}"
        yield f"kubectl label jobset {job} {QUEUE}={options.queue} --overwrite"
        return
    # To apply it again would suspend what Kueue has admitted.
    yield f"if ! kubectl get jobset {one.name} >/dev/null 2>&1; then"
    if one.job.command is None:
        made_of = f"kubectl create configmap {one.name} --from-file={one.folder} --dry-run=client"
        yield f"{made_of} --output=yaml | kubectl apply --filename=-"
    yield f"kubectl create --filename={one.folder}/jobset.yaml"
    yield "fi"


def _ssh_stop(job: str, before: ClusterRound) -> Iterator[str]:
    for rank, (host, _) in enumerate(servers_of(before.running()[job], before)):
        yield f"end {host} {job_name(job)}-{rank}"


def _ssh_stay(one: PlacedJob, made: ClusterRound, options: RoundOptions) -> Iterator[str]:
    ranks = [f"alive {host} {one.name}-{rank}" for rank, (host, _) in enumerate(one.servers)]
    yield f"if ! {{ {' && '.join(ranks)}; }}; then"
    yield from _ssh_stop(one.job.name, made)
    yield from _ssh_start(one, made, options)
    yield "fi"


def _ssh_start(one: PlacedJob, made: ClusterRound, options: RoundOptions) -> Iterator[str]:
    first, _ = one.servers[0]
    port = 20_000 + zlib.crc32(one.name.encode()) % 20_000  # another job's may be on the node
    for rank, (host, _) in enumerate(one.servers):
        yield f'begin {host} "$PWD/{one.folder}" {one.name} {rank} {first} {port}'


_Stop = Callable[[str, ClusterRound], Iterator[str]]
_Go = Callable[[PlacedJob, ClusterRound, RoundOptions], Iterator[str]]
_FUNCTIONS = {"slurm": _BY_SLURM, "torchrun": _BY_SSH}
_COMMANDS: dict[str, tuple[_Stop, _Go, _Go]] = {
    "slurm": (_slurm_stop, _slurm_stay, _slurm_start),
    "kueue": (_kueue_stop, _kueue_stay, _kueue_start),
    "torchrun": (_ssh_stop, _ssh_stay, _ssh_start),
}
