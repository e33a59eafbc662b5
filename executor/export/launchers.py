"""Scripts that start a command once per device: torchrun, Slurm, MPI.

Rank r is the r-th device of a plan. ``torchrun`` numbers the ranks node by node, so the devices of
a server must be consecutive in the plan. A job of a shared cluster says which GPUs it asks for.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from stagewright.executor.export.options import FormatOptions
from stagewright.executor.programs.program import plan_devices
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster

NAME = "stagewright"
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
class SharedJob:
    """What a job of a shared cluster asks for: GPUs of a ``kind``; its nodes name hosts.

    ``name`` is its name there. In Kubernetes it waits in the local ``queue`` of Kueue, nodes of the
    kind have it as the value of ``label``, and ``files`` says that the command needs the files of
    the job's folder. ``environment`` has the values of variables.
    """

    name: str
    kind: str
    queue: str = ""
    label: str = ""
    files: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that every device runs: the model's name, the nodes, and the command's words.

    ``environment``: variables that the command needs and the user sets. ``shared``: of a job on
    part of a cluster, whose nodes may have different numbers of GPUs.
    """

    model: str
    nodes: tuple[LaunchNode, ...]
    words: tuple[str, ...]
    options: FormatOptions
    environment: tuple[str, ...] = ()
    shared: SharedJob | None = None


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
    lines = ["#!/usr/bin/env bash", *listed_nodes(nodes)]
    if len(nodes) == 1:
        lines += ["set -euo pipefail", *visible_gpus(nodes, "0")]
        run = f"--standalone --nproc-per-node={len(nodes[0].gpus)}"
    else:
        last = len(nodes) - 1
        lines += [
            "# Start it on every node, with NODE_RANK and MASTER_ADDR, the address of node 0.",
            "set -euo pipefail",
            f': "${{NODE_RANK:?set it to the number of this node, 0 to {last}}}"',
            ': "${MASTER_ADDR:?set it to the address of node 0}"',
            *visible_gpus(nodes, "NODE_RANK"),
            *sizes_of_nodes(nodes),
        ]
        run = torchrun_options(nodes, "$NODE_RANK", f"${{MASTER_PORT:-{PORT}}}")
    lines += [*_exports(launch), f"exec torchrun {run} --no-python {shlex.join(words)}"]
    return {"run.sh": "\n".join(lines) + "\n"}


def slurm(launch: Launch) -> dict[str, str]:
    """A script for sbatch: one torchrun per node.

    Only a heterogeneous job has other numbers of GPUs on other nodes: each of its components has
    nodes of equally many. Slurm numbers the nodes component by component.
    """
    nodes, options = launch.nodes, launch.options
    groups = [tuple(group) for _, group in groupby(nodes, lambda node: len(node.gpus))]
    on_node = [
        *visible_gpus(nodes, "SLURM_NODEID"),
        *sizes_of_nodes(nodes),
        f'exec torchrun {torchrun_options(nodes, "$SLURM_NODEID", _JOB_PORT)} --no-python "$@"',
    ]
    command = ["bash", "-c", "\n".join(on_node), "bash", *launch.words]
    asked: list[str] = []
    steps: list[str] = []
    for n, group in enumerate(groups):
        cpus = cpus_of_task(options, len(group[0].gpus))
        asked += ["hetjob"] * (n > 0) + [*_asked(launch, group, n), *cpus, *time_of_job(options)]
        # Since Slurm 22.05 srun does not take the CPUs from the job (man sbatch).
        step = [f"--het-group={n}"] * (len(groups) > 1) + cpus
        steps.append(" ".join([*step, '"${command[@]}"']))
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {one}" for one in asked),
        *listed_nodes(nodes),
        "set -euo pipefail",
        *_exports(launch),
        'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        'export MASTER_ADDR="${hosts[0]}"',
        f"command=({shlex.join(command)})",
        f"srun {' : '.join(steps)}",
    ]
    return {"job.sbatch": "\n".join(lines) + "\n"}


def _asked(launch: Launch, group: tuple[LaunchNode, ...], number: int) -> list[str]:
    """The options of sbatch for the nodes of a component and their GPUs.

    A job of a shared cluster begins when the job of its name before it has ended. So components
    have different names: of one name, each would wait for the others.
    """
    shared, on_each = launch.shared, [f"--nodes={len(group)}", "--ntasks-per-node=1"]
    if shared is None:
        return [f"--job-name={NAME}", *on_each, f"--gpus-per-node={gpus_of_node(group)}"]
    hosts = hosts_of(group)
    return [
        f"--job-name={shared.name}{f'.{number}' if number else ''}",
        *on_each,
        f"--gres=gpu:{shared.kind}:{len(group[0].gpus)}",
        *([f"--nodelist={','.join(hosts)}"] if hosts else []),
        "--dependency=singleton",
    ]


def hosts_of(nodes: tuple[LaunchNode, ...]) -> list[str]:
    """The hosts that the nodes of a job of a shared cluster name."""
    return [host for node in nodes for host in node.devices]


def _exports(launch: Launch) -> list[str]:
    """Lines of bash that set the variables of a job of a shared cluster."""
    given = launch.shared.environment if launch.shared else {}
    return [f"export {name}={shlex.quote(value)}" for name, value in given.items()]


def cpus_of_task(options: FormatOptions, processes: int) -> list[str]:
    """The option for the CPUs of a task, which is a node's torchrun of so many ``processes``."""
    if options.cpus is None:
        return []
    if options.cpus < 1:
        raise InputError(f"--cpus must be at least 1, got {options.cpus}")
    return [f"--cpus-per-task={options.cpus * processes}"]


def time_of_job(options: FormatOptions) -> list[str]:
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
        *listed_nodes(nodes),
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


def words_of(command: str, place: str) -> tuple[str, ...]:
    """The words of a command in shell syntax; a message about a wrong one begins with ``place``."""
    try:
        return tuple(shlex.split(command))
    except ValueError as error:
        raise InputError(f"{place} {command!r}: {error}") from None


def _command(options: FormatOptions) -> tuple[str, ...]:
    words = words_of(options.command or "", "--command")
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


def torchrun_options(nodes: tuple[LaunchNode, ...], rank: str, port: str) -> str:
    """The options of torchrun on one of several nodes, for a shell."""
    each = f'"${{sizes[{rank}]}}"' if sizes_of_nodes(nodes) else len(nodes[0].gpus)
    return (
        f"--nnodes={len(nodes)} --nproc-per-node={each} "
        f'--node-rank="{rank}" --master-addr="$MASTER_ADDR" --master-port="{port}"'
    )


def sizes_of_nodes(nodes: tuple[LaunchNode, ...]) -> list[str]:
    """A line of bash with the number of GPUs of each node, if they differ."""
    sizes = [len(node.gpus) for node in nodes]
    return [f"sizes=({' '.join(map(str, sizes))})"] if len(set(sizes)) > 1 else []


def visible_gpus(nodes: tuple[LaunchNode, ...], rank: str) -> list[str]:
    """Lines of bash that give local rank i its GPU, if that is not GPU i."""
    if all(node.gpus == tuple(range(len(node.gpus))) for node in nodes):
        return []
    listed = " ".join(",".join(map(str, node.gpus)) for node in nodes)
    return [f"gpus=({listed})", f'export CUDA_VISIBLE_DEVICES="${{gpus[{rank}]}}"']


def gpus_of_node(nodes: tuple[LaunchNode, ...]) -> int:
    """The number of GPUs that each machine must have."""
    return 1 + max(gpu for node in nodes for gpu in node.gpus)


def listed_nodes(nodes: tuple[LaunchNode, ...]) -> list[str]:
    """Comments that list the devices of every server."""
    return [
        f"# node {n}: {', '.join(map(json.dumps, node.devices))}"
        for n, node in enumerate(nodes)
        if node.devices
    ]
