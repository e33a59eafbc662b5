"""A command once per device on Kubernetes: an indexed Job, or a JobSet, which Kueue may hold."""

import re
import secrets
from itertools import groupby
from typing import Any

from stagewright.executor.export.launchers import (
    NAME,
    PORT,
    Launch,
    LaunchNode,
    gpus_of_node,
    hosts_of,
    listed_nodes,
    sizes_of_nodes,
    torchrun_options,
    visible_gpus,
)
from stagewright.executor.export.options import to_yaml
from stagewright.graphs.documents.errors import InputError

QUEUE = "kueue.x-k8s.io/queue-name"  # the label with the local queue of a JobSet
FILES = "/stagewright"  # where a container has the files of its job's folder
_LABEL = 63  # characters of a DNS label


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
        "spec": _indexed(launch, nodes, 0, f"{name}-0.{name}", {"subdomain": name}),
    }
    again = "# To run it again, export it again: the name is of this export alone."
    told = "".join(f"{line}\n" for line in (again, *listed_nodes(nodes)))
    return {"job.yaml": f"{told}{to_yaml(service)}---\n{to_yaml(job)}"}


def jobset(launch: Launch) -> dict[str, str]:
    """A JobSet with one pod per node; it makes the names by which its pods find each other.

    That of a shared cluster is suspended, in a queue of Kueue.
    """
    shared = launch.shared
    name = shared.name if shared else jobset_name(launch.model, len(launch.nodes))
    metadata: dict[str, Any] = {"name": name}
    spec: dict[str, Any] = {}
    if shared:
        metadata["labels"] = {QUEUE: shared.queue}
        spec["suspend"] = True
    jobs, offset = [], 0
    for size, group in groupby(launch.nodes, lambda node: len(node.gpus)):
        nodes = tuple(group)
        made = _indexed(launch, nodes, offset, f"{name}-node-0-0.{name}", _of_pod(launch))
        of_size = {"name": f"node{size}" if offset else "node", "replicas": 1}
        jobs.append({**of_size, "template": {"spec": made}})
        offset += len(nodes)
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {**spec, "replicatedJobs": jobs},
    }
    told = f"# To add to the container: an image, {', '.join(launch.environment)} in env.\n"
    return {"jobset.yaml": ("" if shared else told) + to_yaml(document)}


def jobset_name(text: str, nodes: int) -> str:
    """The name of a JobSet with ``text`` in it; those of its pods are labels, too."""
    return _label(text, len(f"{NAME}--node-0-{nodes - 1}-abcde"))


def _of_pod(launch: Launch) -> dict[str, Any]:
    """What a pod has of a job of a shared cluster: nodes of its kind, on its hosts."""
    shared = launch.shared
    if shared is None:
        return {}
    found: dict[str, Any] = {"nodeSelector": {shared.label: shared.kind}}
    if hosts := hosts_of(launch.nodes):
        on = {"key": "kubernetes.io/hostname", "operator": "In", "values": hosts}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [on]}]}
        asked = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
        found["affinity"] = {"nodeAffinity": asked}
    return found


def _indexed(
    launch: Launch, nodes: tuple[LaunchNode, ...], before: int, first: str, of_pod: dict[str, Any]
) -> dict[str, Any]:
    """The specification of a Job with a pod for each of ``nodes``, which have equally many GPUs.

    ``before`` of the launch's nodes come before them; ``first`` is the address of node 0.
    """
    words, shared = launch.words, launch.shared
    rank = f"$((JOB_COMPLETION_INDEX + {before}))" if before else "$JOB_COMPLETION_INDEX"
    sizes = [f"sizes[{rank}]={len(nodes[0].gpus)}"] if sizes_of_nodes(launch.nodes) else []
    script = [
        *visible_gpus(nodes, "JOB_COMPLETION_INDEX"),
        *sizes,
        f'exec torchrun {torchrun_options(launch.nodes, rank, str(PORT))} --no-python "$@"',
    ]
    given = shared.environment if shared else {}
    # NCCL and data loaders need more shared memory than a container's default.
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    container = {
        "name": NAME,
        "image": launch.options.image or "IMAGE",
        # Kubernetes reads $$ as $, and $(NAME) as a variable.
        "command": [
            word.replace("$", "$$") for word in ("bash", "-c", "\n".join(script), "bash", *words)
        ],
        "env": [
            {"name": name, "value": value.replace("$", "$$")}
            for name, value in {"MASTER_ADDR": first, **given}.items()
        ],
        "resources": {"limits": {"nvidia.com/gpu": gpus_of_node(nodes)}},
        "volumeMounts": mounts,
    }
    if shared and shared.files:
        container["workingDir"] = FILES
        mounts.append({"name": "files", "mountPath": FILES})
        volumes.append({"name": "files", "configMap": {"name": shared.name}})
    pod = {
        **of_pod,
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": volumes,
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
