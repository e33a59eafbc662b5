"""Rounds and batch scripts on a real Slurm, whose nodes are daemons of the present user here.

``torchrun`` is a stand-in that writes what a node was given, and becomes the command.
"""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from round_files import answered, document, write

from stagewright.executor.export.launchers import Launch, LaunchNode, slurm
from stagewright.executor.export.options import FormatOptions
from stagewright.formulations.clusters.round_document import ClusterRound
from stagewright.graphs.workloads.jobs import Job, Rate, Throughputs, Workload
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.service.clusters.requests import RoundsRequest

PATH = f"{os.environ['PATH']}:/usr/sbin"
MISSING = [
    one for one in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(one, path=PATH)
]
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} is not installed"),
]

HOSTS = ("127.0.0.2", "127.0.0.3")  # torchrun would find them
DEVICES = "/dev/null,/dev/zero,/dev/full,/dev/random"  # of four GPUs, which every machine has
SETTINGS = """\
ClusterName=test
SlurmctldHost={name}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=1
NodeName={hosts[0]} NodeHostname={name} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 Gres=gpu:h100:4
NodeName={hosts[1]} NodeHostname={name} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 Gres=gpu:h100:4
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
TORCHRUN = """\
#!/usr/bin/env bash
given="$SLURMD_NODENAME $MASTER_ADDR $CUDA_VISIBLE_DEVICES $SLURM_CPUS_ON_NODE $*"
own="$HOME/$SLURM_JOB_ID-$SLURM_NODEID"
echo "$given" >"$own.part" && mv "$own.part" "$own"
while [ "$1" != --no-python ]; do shift; done
exec "${@:2}"
"""


def until(holds: Callable[[], object]) -> None:
    """Wait for what takes a second, with a patience that no busy machine needs."""
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@dataclass(frozen=True)
class Given:
    """What a node of a job was given: addresses, GPUs, CPUs, torchrun's options."""

    host: str
    master: str
    gpus: tuple[int, ...]
    cpus: str
    options: dict[str, str]


class Slurm:
    """The commands of a cluster that runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        home = {"HOME": str(folder), "PATH": f"{folder}:{PATH}"}
        self.environment = os.environ | home | {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *words: str | Path) -> str:
        done = subprocess.run(
            words,
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def jobs(self, name: str, form: str = "%A") -> list[str]:
        """Of the running jobs of a name."""
        return self.run("squeue", "-h", "-t", "R", "-n", name, "-o", form).split()

    def await_job(self, name: str, nodes: int) -> None:
        """Until a job of a name runs on so many nodes."""
        until(lambda: any(len(self.given(job)) == nodes for job in self.jobs(name)))

    def given(self, job: str) -> list[Given]:
        """What the nodes of a job were given, by number."""
        found = []
        for path in sorted(self.folder.glob(f"{job}-?")):
            host, master, gpus, cpus, *options = path.read_text().split()
            named = dict(one[2:].split("=") for one in options if "=" in one)
            numbers = tuple(map(int, gpus.split(",")))
            found.append(Given(host, master, numbers, cpus, named))
        return found


def ports(count: int) -> list[int]:
    """Ports that are free now."""
    with ExitStack() as taken:
        sockets = [taken.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    found = Slurm(folder)
    settings = {"folder": folder, "user": getpass.getuser(), "hosts": HOSTS, "ports": ports(3)}
    (folder / "slurm.conf").write_text(SETTINGS.format(name=socket.gethostname(), **settings))
    (folder / "gres.conf").write_text(f"Name=gpu Type=h100 File={DEVICES}\n")
    (folder / "torchrun").write_text(TORCHRUN)
    (folder / "torchrun").chmod(0o755)
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o600)
    (folder / "state").mkdir()
    own = [f"--{one}-file={folder}/munge.{one}" for one in ("key", "pid", "log", "seed")]
    daemons = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *own],
        ["slurmctld", "-D", "-c"],
        *(["slurmd", "-D", "-N", host] for host in HOSTS),
    ]
    with ExitStack() as ended:
        log = ended.enter_context((folder / "log").open("w"))
        try:
            for words in daemons:
                began = subprocess.Popen(words, env=found.environment, stdout=log, stderr=log)
                ended.callback(began.wait, 60)
                ended.callback(began.terminate)
                until((folder / "munge.socket").exists)
            until(lambda: _idle(found))
        except AssertionError:
            said = (folder / "log").read_text().splitlines()[-3:]
            pytest.skip(f"Slurm does not start on this machine: {' '.join(said)}")
        yield found
        found.run("scancel", "--me")
        until(lambda: not found.run("squeue", "-h"))


def _idle(cluster: Slurm) -> bool:
    asked = ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"]
    told = subprocess.run(asked, env=cluster.environment, capture_output=True, text=True)
    return told.stdout.split() == [*HOSTS]


RATES = Throughputs(tuple(Rate("m", scale, "h100", 1.0) for scale in (2, 6, 8)))
LONG, SIDE = (
    Job("long", "m", 1e6, 6, command="sleep 1000"),
    Job("side", "m", 1e6, 2, command="sleep 1000"),
)


def carried_out(
    cluster: Slurm, jobs: tuple[Job, ...], before: ClusterRound | None, minutes: int
) -> ClusterRound:
    """A round after another one, once the jobs that it names run as it says."""
    asked: dict[str, Any] = {
        "pool": parse_pool("h100=2x4"), "to": "slurm", "nodes": {"h100": HOSTS}, "cpus": 2,
        "policy": "max-min", "rounds": 1, "after": before, "round_seconds": minutes * 60.0,
    }  # fmt: skip
    answer = answered(RoundsRequest.of(workload=Workload(jobs, RATES), **asked))
    assert answer.launch is not None
    folder = cluster.folder / f"round of {minutes}"
    write(answer.launch.files, folder)
    for _ in range(2):  # what is begun is not begun again
        cluster.run("bash", folder / "round.sh")
    taken: Counter[tuple[str, int]] = Counter()
    for one in answer.rounds[0]:
        name, on = f"stagewright-{one.jobs[0]}", Counter(HOSTS[n // 4] for n in one.numbers)
        cluster.await_job(name, len(on))
        (job,) = cluster.jobs(name)
        nodes = cluster.given(job)
        assert [(node.host, len(node.gpus)) for node in nodes] == on.most_common()
        taken.update((node.host, gpu) for node in nodes for gpu in node.gpus)
        for number, node in enumerate(nodes):
            assert node.master == nodes[0].host
            assert node.options["node-rank"] == str(number)
            assert int(node.options["nproc-per-node"]) == len(node.gpus)
            assert int(node.cpus) == 2 * len(node.gpus)
    assert max(taken.values()) == 1
    return document(answer)


def test_rounds_are_carried_out(cluster: Slurm) -> None:
    """A job on 4 + 2 GPUs beside one on 2; it stays, with a longer lease; dies; and changes."""
    first = carried_out(cluster, (LONG, SIDE), None, 10)
    (job,) = cluster.jobs("stagewright-long")
    assert cluster.jobs("stagewright-long", "%l") == ["11:00"]
    other = replace(SIDE, name="other")
    second = carried_out(cluster, (LONG, other), first, 30)
    assert cluster.jobs("stagewright-long") == [job]
    assert cluster.jobs("stagewright-side") == []
    (lease,) = cluster.jobs("stagewright-long", "%l")
    assert int(lease.split(":")[0]) >= 31
    cluster.run("scancel", job)
    third = carried_out(cluster, (LONG, other), second, 40)
    assert cluster.jobs("stagewright-long") != [job]
    carried_out(cluster, (replace(LONG, scale=8),), third, 50)
    assert cluster.jobs("stagewright-other") == []


def test_a_batch_script_waits_for_a_command_on_all_nodes(cluster: Slurm, tmp_path: Path) -> None:
    nodes = (LaunchNode(("a", "b"), (1, 0)), LaunchNode(("c", "d"), (0, 1)))
    launch = Launch("net", nodes, ("bash", "-c", "exit $((SLURM_NODEID * 3))"), FormatOptions())
    cluster.run("scancel", "--me")
    (tmp_path / "job.sbatch").write_text(slurm(launch)["job.sbatch"])
    asked = ["sbatch", "--wait", "--parsable", tmp_path / "job.sbatch"]
    done = subprocess.run(
        asked, env=cluster.environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 3
    assert [one.gpus for one in cluster.given(done.stdout.strip())] == [(1, 0), (0, 1)]
