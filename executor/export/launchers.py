"""Scripts that start a command once per device: torchrun, Slurm, Kubernetes, MPI.

Rank r is the r-th device of a plan. ``torchrun`` numbers the ranks node by node, so the devices of
a server must be consecutive in the plan.
"""

import json
import re
import secrets
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from stagewright.executor.export.options import FormatOptions, to_yaml
from stagewright.executor.programs.program import plan_devices
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster

NAME = "stagewright"
_LABEL = 63  # characters of a DNS label
PORT = 29500  # torchrun's default
_JOB_PORT = "$((20000 + SLURM_JOB_ID % 20000))"  # two jobs on one node use different ports


# Minutes, with seconds, or with hours; or days and hours, with minutes and seconds (man sbatch).
TIME = r"\d+(:\d\d){0,2}|\d+-\d\d?(:\d\d){0,2}"


@dataclass(frozen=True, slots=True)
class LaunchNode:
    """A machine: its devices by rank, if they have names, and their indices among its GPUs."""

    devices: tuple[str, ...]
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that every device runs: the model's name, the nodes, and the command's words.

    ``environment``: variables that the command needs.
    """

    model: str
    nodes: tuple[LaunchNode, ...]
    words: tuple[str, ...]
    options: FormatOptions
    environment: tuple[str, ...] = ()


def of_plan(
    write: Callable[[Launch], dict[str, str]],
) -> Callable[[PipelinePlan, FormatOptions], dict[str, str]]:
    """A script for the devices of a plan."""

    def written(plan: PipelinePlan, options: FormatOptions) -> dict[str, str]:
        nodes = _nodes(plan, options)
        return write(Launch(plan.model, nodes, _command(options), options))

    return written


def torchrun(launch: Launch) -> dict[str, str]:
    """A script to start on every node."""
    nodes, words = launch.nodes, launch.words
    lines = ["#!/usr/bin/env bash", *_told(nodes)]
    if len(nodes) == 1:
        lines += ["set -euo pipefail", *_visible(nodes, "0")]
        run = f"--standalone --nproc-per-node={len(nodes[0].gpus)}"
    else:
        last = len(nodes) - 1
        lines += [
            "# Start it on every node, with NODE_RANK and MASTER_ADDR, the address of node 0.",
            "set -euo pipefail",
            f': "${{NODE_RANK:?set it to the number of this node, 0 to {last}}}"',
            ': "${MASTER_ADDR:?set it to the address of node 0}"',
            *_visible(nodes, "NODE_RANK"),
        ]
        run = _several(nodes, "$NODE_RANK", f"${{MASTER_PORT:-{PORT}}}")
    lines.append(f"exec torchrun {run} --no-python {shlex.join(words)}")
    return {"run.sh": "\n".join(lines) + "\n"}


def slurm(launch: Launch) -> dict[str, str]:
    """A script for sbatch: one torchrun per node."""
    nodes, words, options = launch.nodes, launch.words, launch.options
    cpus = _cpus(options, len(nodes[0].gpus))
    on_node = [
        *_visible(nodes, "SLURM_NODEID"),
        f'exec torchrun {_several(nodes, "$SLURM_NODEID", _JOB_PORT)} --no-python "$@"',
    ]
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={NAME}",
        f"#SBATCH --nodes={len(nodes)}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={_gpus(nodes)}",
        *(f"#SBATCH {one}" for one in (*cpus, *_limit(options))),
        *_told(nodes),
        "set -euo pipefail",
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        'export MASTER_ADDR="${hosts[0]}"',
        # Since Slurm 22.05 srun does not take the CPUs from the job (man sbatch).
        shlex.join(["srun", *cpus, "bash", "-c", "\n".join(on_node), "bash", *words]),
    ]
    return {"job.sbatch": "\n".join(lines) + "\n"}


def _cpus(options: FormatOptions, processes: int) -> list[str]:
    """The option for the CPUs of a task, which is a node's torchrun of so many ``processes``."""
    if options.cpus is None:
        return []
    if options.cpus < 1:
        raise InputError(f"--cpus must be at least 1, got {options.cpus}")
    return [f"--cpus-per-task={options.cpus * processes}"]


def _limit(options: FormatOptions) -> list[str]:
    """The option for the time of a job."""
    if options.time is None:
        return []
    if re.fullmatch(TIME, options.time) is None or not re.search("[1-9]", options.time):
        raise InputError(
            f"--time {options.time!r} is no time of Slurm; write for example 30 (minutes), "
            "4:00:00 or 2-12:00:00 (days)"
        )
    return [f"--time={options.time}"]


def mpi(launch: Launch) -> dict[str, str]:
    """A script for Open MPI, which starts all ranks."""
    nodes = launch.nodes
    each = len(nodes[0].gpus)
    ranks = (
        "export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE\n"
        "export LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK\n"
        "export LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE\n"
        'exec "$@"'
    )
    lines = [
        "#!/usr/bin/env bash",
        f"# Start it on node 0, with HOSTS, the {len(nodes)} nodes: node0:{each},node1:{each}",
        *_told(nodes),
        "set -euo pipefail",
        ': "${HOSTS:?set it to the nodes and their slots}"',
        'export MASTER_ADDR="${MASTER_ADDR:-${HOSTS%%:*}}"',
        f'export MASTER_PORT="${{MASTER_PORT:-{PORT}}}"',
        f'exec mpirun -np {len(nodes) * each} --host "$HOSTS" --map-by ppr:{each}:node'
        " --bind-to none"
        + "".join(f" -x {name}" for name in ("MASTER_ADDR", "MASTER_PORT", *launch.environment))
        + " "
        + shlex.join(["bash", "-c", ranks, "bash", *launch.words]),
    ]
    return {"mpirun.sh": "\n".join(lines) + "\n"}


def kubernetes(launch: Launch) -> dict[str, str]:
    """An indexed Job of one pod per node, and the Service for their rendezvous.

    Every export has another name, so that two of them can be in one namespace.
    """
    nodes = launch.nodes
    if not launch.options.image:
        raise InputError("--to kubernetes needs --image, the container that has the command")
    name = _job_name(launch.model, len(nodes))
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": name},
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": _indexed(launch, f"{name}-0.{name}", {"subdomain": name}),
    }
    again = "# To run it again, export it again: the name is of this export alone."
    told = "".join(f"{line}\n" for line in (again, *_told(nodes)))
    return {"job.yaml": f"{told}{to_yaml(service)}---\n{to_yaml(job)}"}


def jobset(launch: Launch) -> dict[str, str]:
    """A JobSet with one pod per node; it makes the names by which its pods find each other."""
    name = _label(launch.model, len(f"{NAME}--node-0-{len(launch.nodes) - 1}"))
    spec = _indexed(launch, f"{name}-node-0-0.{name}", {})
    jobs = [{"name": "node", "replicas": 1, "template": {"spec": spec}}]
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {"replicatedJobs": jobs},
    }
    told = f"# To add to the container: an image, {', '.join(launch.environment)} in env.\n"
    return {"jobset.yaml": told + to_yaml(document)}


def _indexed(launch: Launch, first: str, of_pod: dict[str, Any]) -> dict[str, Any]:
    """The specification of a Job with one pod per node; ``first`` is the address of node 0."""
    nodes, words = launch.nodes, launch.words
    script = [
        *_visible(nodes, "JOB_COMPLETION_INDEX"),
        f'exec torchrun {_several(nodes, "$JOB_COMPLETION_INDEX", str(PORT))} --no-python "$@"',
    ]
    container = {
        "name": NAME,
        "image": launch.options.image or "IMAGE",
        # Kubernetes reads $$ as $, and $(NAME) as a variable.
        "command": [
            word.replace("$", "$$") for word in ("bash", "-c", "\n".join(script), "bash", *words)
        ],
        "env": [{"name": "MASTER_ADDR", "value": first}],
        "resources": {"limits": {"nvidia.com/gpu": _gpus(nodes)}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        **of_pod,
        "restartPolicy": "Never",
        "containers": [container],
        # NCCL and data loaders need more shared memory than a container's default.
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    return {
        "completionMode": "Indexed",
        "completions": len(nodes),
        "parallelism": len(nodes),
        "backoffLimit": 0,
        "template": {"spec": pod},
    }


def _job_name(model: str, nodes: int) -> str:
    """A name that no other export has, with the model's in it.

    It is a DNS label (RFC 1123, at most 63 characters), as are the pods' names, which end with
    their index.
    """
    tag = secrets.token_hex(5)
    return f"{_label(model, len(f'{NAME}--{tag}-{nodes - 1}'))}-{tag}"


def _label(model: str, rest: int) -> str:
    """The beginning of a name with the model's in it, which leaves room for so many characters."""
    words = re.sub("[^a-z0-9]+", "-", model.lower())[: _LABEL - rest].strip("-")
    return "-".join(filter(None, (NAME, words)))


def _command(options: FormatOptions) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(options.command or ""))
    except ValueError as error:
        raise InputError(f"--command {options.command!r}: {error}") from None
    if not words:
        raise InputError(
            "a launch script needs --command, the command of every process, such as "
            "--command 'stagewright run plan.json --module net:build --data net:batches'"
        )
    return words


def _nodes(plan: PipelinePlan, options: FormatOptions) -> tuple[LaunchNode, ...]:
    devices, each = plan_devices(plan), options.per_server
    if options.cluster is not None:
        if each is not None:
            raise InputError("--per-server: the servers follow from --cluster; give one of them")
        return _servers(devices, options.cluster)
    each = len(devices) if each is None else each
    if each < 1 or len(devices) % each:
        raise InputError(
            f"--per-server {each}: the plan's {len(devices)} devices do not fill nodes of {each}"
        )
    starts = range(0, len(devices), each)
    return tuple(LaunchNode(devices[i : i + each], tuple(range(each))) for i in starts)


def _servers(devices: tuple[str, ...], cluster: Cluster) -> tuple[LaunchNode, ...]:
    """The servers of ``devices``, which must be consecutive and use equally many devices each."""
    if cluster.links.servers is None:
        raise InputError(f"cluster {cluster.name!r} names no servers: give --per-server")
    place = {
        name: (n, gpu)
        for n, server in enumerate(cluster.links.servers)
        for gpu, name in enumerate(server)
    }
    for name in devices:
        if name not in place:
            raise InputError(f"cluster {cluster.name!r} has no device {name!r} of the plan")
    nodes: dict[int, LaunchNode] = {}
    for n, group in groupby(devices, lambda name: place[name][0]):
        names = tuple(group)
        if n in nodes:
            raise InputError(
                f"rank {devices.index(names[0])} ({names[0]!r}) is on the server of "
                f"{nodes[n].devices[0]!r} after another one: torchrun numbers the ranks server by "
                "server; order the plan's devices by server"
            )
        nodes[n] = LaunchNode(names, tuple(place[name][1] for name in names))
    first, *others = nodes.values()
    for node in others:
        if len(node.devices) != len(first.devices):
            raise InputError(
                f"the plan uses {len(node.devices)} devices of the server of {node.devices[0]!r} "
                f"and {len(first.devices)} of that of {first.devices[0]!r}: plan with equally many"
            )
    return tuple(nodes.values())


def _several(nodes: tuple[LaunchNode, ...], rank: str, port: str) -> str:
    """The options of torchrun on one of several nodes, for a shell."""
    return (
        f"--nnodes={len(nodes)} --nproc-per-node={len(nodes[0].gpus)} "
        f'--node-rank="{rank}" --master-addr="$MASTER_ADDR" --master-port="{port}"'
    )


def _visible(nodes: tuple[LaunchNode, ...], rank: str) -> list[str]:
    """Lines of bash that give local rank i its GPU, if that is not GPU i."""
    if all(node.gpus == tuple(range(len(node.gpus))) for node in nodes):
        return []
    listed = " ".join(",".join(map(str, node.gpus)) for node in nodes)
    return [f"gpus=({listed})", f'export CUDA_VISIBLE_DEVICES="${{gpus[{rank}]}}"']


def _gpus(nodes: tuple[LaunchNode, ...]) -> int:
    """The number of GPUs that each machine must have."""
    return 1 + max(gpu for node in nodes for gpu in node.gpus)


def _told(nodes: tuple[LaunchNode, ...]) -> list[str]:
    """Comments that list the devices of every server."""
    return [
        f"# node {n}: {', '.join(map(json.dumps, node.devices))}"
        for n, node in enumerate(nodes)
        if node.devices
    ]
