"""Rounds as files: what the scripts ask for is the allocation, and carried out they are the rounds.

The commands of Slurm, Kubernetes and ssh are stand-ins that note what they are asked.
"""

import json
import os
import re
import shlex
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from layout_problems import LLAMA as ARCHITECTURE
from layout_problems import make_problem
from profiles import examples
from round_files import answered, document, write
from strategies_allocation import random_pool, random_workload

from stagewright.executor.export.layouts import export_layout
from stagewright.executor.export.rounds import job_name
from stagewright.formulations.parallelism.document import LayoutPlan, violations
from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.workloads.jobs import (
    Job,
    PairRate,
    Rate,
    Throughputs,
    Training,
    Workload,
)
from stagewright.graphs.workloads.pool import Pool, parse_pool
from stagewright.service.clusters.answers import AssignmentAnswer, RoundFilesAnswer
from stagewright.service.clusters.requests import RoundsRequest
from stagewright.service.clusters.rounds import rounds
from stagewright.service.jobs.kinds import parse_request
from stagewright.service.whole_answers import read, written

OPTIONS: dict[str, dict[str, Any]] = {
    "slurm": {},
    "kueue": {"queue": "user-queue", "image": "repo/image:1"},
    "torchrun": {},
}
ENVIRONMENT = {"A": "it's $x"}
STUBS = r"""
note() { printf '%s\n' "$*" >>"$NOTES"; }
sbatch() { note sbatch "$(sed -n 's/^#SBATCH --job-name=//p' "$1")"; }
scancel() { sed -i "/^${2#--name=}$/d" "$RUNNING"; note scancel "$@"; }
scontrol() { note scontrol "$@"; }
squeue() { grep -x "${4#--name=}" "$RUNNING" || true; }
kubectl() {
  [ "$2" != --filename=- ] || cat >/dev/null
  case $1 in
    wait) grep -qx "${2#jobset/}" "$RUNNING.failed" ;;
    get) grep -qx "$3" "$RUNNING" "$RUNNING.failed" ;;
    delete) sed -i "/^$3$/d" "$RUNNING" "$RUNNING.failed"; note kubectl "$@" ;;
    *) note kubectl "$@" ;;
  esac
}
ssh() {
  read -r first
  local words=($2)
  if [[ $first = kill* ]]; then grep -qx "${words[3]%-*} ${words[3]##*-} $1" "$RUNNING"; return; fi
  cat >/dev/null
  note ssh "$1" "$2"
}
"""


def hosts_of(pool: Pool) -> dict[str, tuple[str, ...]]:
    return {
        one.name: tuple(f"{one.name}-{server}" for server in range(one.servers))
        for one in pool.accelerators
    }


class Cluster:
    """The jobs that run on a cluster, as the commands of the scripts start and end them."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.failed: set[str] = set()

    def carry_out(self, folder: Path) -> None:
        notes, running = folder / "notes", folder / "running"
        notes.touch()
        running.write_text("".join(f"{one}\n" for one in self.running))
        Path(f"{running}.failed").write_text("".join(f"{one}\n" for one in self.failed))
        subprocess.run(
            ["bash", "-c", STUBS + 'source "$1"', "bash", folder / "round.sh"],
            env=os.environ | {"NOTES": str(notes), "RUNNING": str(running)},
            check=True,
        )
        for line in notes.read_text().splitlines():
            command, *words = line.split(maxsplit=2)
            getattr(self, command)(*words)
        self.failed = set()

    def start(self, name: str) -> None:
        assert name not in self.running
        self.running.add(name)

    def sbatch(self, name: str) -> None:
        self.start(name)

    def scancel(self, _: str, named: str) -> None:
        self.running.discard(named.removeprefix("--name="))

    def scontrol(self, _: str, what: str) -> None:
        assert what.split()[0].removeprefix("JobId=") in self.running

    def kubectl(self, verb: str, rest: str) -> None:
        word, name = re.fullmatch(r"(jobset )?(\S+).*", rest).groups()  # type: ignore[union-attr]
        if verb == "delete" or "--type=merge" in rest:
            self.running.discard(name)
        elif verb == "label" or rest.endswith("jobset.yaml"):
            folder = name.removeprefix("--filename=").removesuffix("/jobset.yaml")
            self.start(name if word else f"stagewright-{folder}")

    def ssh(self, host: str, script: str) -> None:
        words = shlex.split(script)[3:]
        if len(words) == 1:
            name, _, rank = words[0].rpartition("-")
            self.running.discard(f"{name} {rank} {host}")
        else:
            self.start(f"{words[1]} {words[2]} {host}")


def gpus_on(one: AssignmentAnswer, pool: Pool) -> Counter[str]:
    """GPUs on each host, from the numbers of an assignment."""
    size = next(a.per_server for a in pool.accelerators if a.name == one.accelerator)
    assert size is not None
    return Counter(f"{one.accelerator}-{number // size}" for number in one.numbers)


def require_slurm(files: dict[str, str], one: AssignmentAnswer, on: Counter[str]) -> None:
    """Every component asks for as many GPUs on each of its nodes as the assignment has there."""
    found: list[tuple[str, int]] = []
    for part in files["job.sbatch"].split("#SBATCH hetjob\n"):
        asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", part, re.MULTILINE))
        hosts, (_, kind, each) = asked["nodelist"].split(","), asked["gres"].split(":")
        assert (int(asked["nodes"]), kind) == (len(hosts), one.accelerator)
        found += [(host, int(each)) for host in hosts]
    assert found == on.most_common()
    assert f"\nexport A={shlex.quote(ENVIRONMENT['A'])}\n" in files["job.sbatch"]


def require_kueue(files: dict[str, str], one: AssignmentAnswer, on: Counter[str]) -> None:
    jobset = yaml.safe_load(files["jobset.yaml"])
    assert jobset["spec"]["suspend"] is True
    assert jobset["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "user-queue"}
    sizes: list[int] = []
    for job in jobset["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        pod = spec["template"]["spec"]
        limit = pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
        sizes += [limit] * job["replicas"] * spec["parallelism"]
        assert pod["nodeSelector"] == {"accelerator": one.accelerator}
        (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
            "nodeSelectorTerms"
        ]
        assert {*term["matchExpressions"][0]["values"]} == {*on}
    assert sizes == sorted(on.values(), reverse=True)


RANK = r"""
exec() { "$@"; }
torchrun() {
  for word in "$@"; do case $word in --nproc-per-node=*) each=${word#*=};; esac; done
  [ "$A" = "it's \$x" ] || return 1
  echo "$each ${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((each - 1)))}"
}
export MASTER_ADDR=first
"""


def gpus_of_ranks(files: dict[str, str], on: Counter[str]) -> dict[str, set[int]]:
    """The GPUs that torchrun's ranks see on each host."""
    found = {}
    for rank, host in enumerate(sorted(on, key=lambda host: (-on[host], host))):
        script = f"{RANK}export NODE_RANK={rank}\n{files['run.sh']}"
        ran = subprocess.run(["bash", "-c", script], text=True, capture_output=True, check=True)
        each, listed = ran.stdout.split()
        found[host] = {int(gpu) for gpu in listed.split(",")}
        assert int(each) == len(found[host]) == on[host]
    return found


@examples(40, quick=2)
@given(
    st.sampled_from(list(OPTIONS)),
    st.integers(1, 3),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_rounds_that_are_carried_out_are_the_rounds_of_the_allocation(
    tmp_path_factory: pytest.TempPathFactory,
    to: str,
    types: int,
    jobs: int,
    named: bool,
    seed: int,
) -> None:
    """Round after round, each from the document of the one before, as many rounds at once.

    Nothing is asked for but the allocation, no GPU twice, and nothing of a server beyond its own.
    """
    folder, rng = tmp_path_factory.mktemp("rounds"), Random(seed)
    pool = random_pool(rng, types)
    workload = random_workload(rng, pool, 3, jobs)
    command = None if to == "kueue" and named else "python train.py '$x y'"
    own = tuple(
        replace(job, name=job.name.replace(" ", "-"), command=command, environment=ENVIRONMENT)
        for job in workload.jobs
    )
    asked: dict[str, Any] = {
        "workload": replace(workload, jobs=own), "pool": pool, "to": to, "nodes": hosts_of(pool),
        "policy": "max-min", "space_sharing": to == "torchrun" and rng.random() < 0.5,
        **OPTIONS[to],
    }  # fmt: skip
    if not named and to != "torchrun":
        del asked["nodes"]
    at_once = answered(RoundsRequest.of(**asked, rounds=4))
    cluster, before = Cluster(), None
    for number, expected in enumerate(at_once.rounds):
        answer = answered(RoundsRequest.of(**asked, rounds=1, after=before))
        assert answer.launch is not None
        assert answer.rounds == (expected,)
        files, before = answer.launch.files, document(answer)
        write(files, folder / str(number))
        if cluster.running and rng.random() < 0.3 and command:  # one of its own accord
            cluster.failed = {rng.choice(sorted(cluster.running))}
            cluster.running -= cluster.failed
        cluster.carry_out(folder / str(number))
        require_running(cluster, to, expected, pool, command)
        if named and command:
            require_what_is_asked(to, files, expected, pool)
    assert answer.mean_deviation == pytest.approx(at_once.mean_deviation)


def require_running(
    cluster: Cluster,
    to: str,
    assigned: tuple[AssignmentAnswer, ...],
    pool: Pool,
    command: str | None,
) -> None:
    names = {job: job_name(job) if command else job for one in assigned for job in one.jobs}
    if to != "torchrun":
        assert cluster.running == {*names.values()}
        return
    assert cluster.running == {
        f"{names[job]} {rank} {host}"
        for one in assigned
        for job in one.jobs
        for rank, (host, _) in enumerate(
            sorted(gpus_on(one, pool).items(), key=lambda each: (-each[1], each[0]))
        )
    }


def require_what_is_asked(
    to: str, files: dict[str, str], assigned: tuple[AssignmentAnswer, ...], pool: Pool
) -> None:
    taken: set[tuple[str, int]] = set()
    used: Counter[str] = Counter()
    for one in assigned:
        folder = job_name(one.jobs[0]).removeprefix("stagewright-") + "/"
        own = {n.removeprefix(folder): text for n, text in files.items() if n.startswith(folder)}
        on = gpus_on(one, pool)
        used.update(on)
        if to == "torchrun":
            for host, gpus in gpus_of_ranks(own, on).items():
                assert not taken & {(host, gpu) for gpu in gpus}
                taken |= {(host, gpu) for gpu in gpus}
        else:
            {"slurm": require_slurm, "kueue": require_kueue}[to](own, one, on)
    sizes = {host: a.per_server for a in pool.accelerators for host in hosts_of(pool)[a.name]}
    assert all(count <= (sizes[host] or 0) for host, count in used.items())


# ---------------------------------------------------------------- trainings

LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 32000,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4,
    "rope_scaling": None,
}  # fmt: skip
TRAINING = Training("small", LLAMA, global_batch=16, sequence=1024, framework="torchtitan")
TRAINED = Job("my run", "small", 100.0, 6, environment={"BASE": "mine.config:it's"})


@pytest.fixture(scope="module")
def launch() -> RoundFilesAnswer:
    """6 GPUs of servers of 4: the layout is of twice 3, the round gives 4 and 2."""
    training = replace(TRAINING, global_batch=12)
    asked = RoundsRequest.of(
        workload=Workload((TRAINED,), trainings=(training,)), pool=parse_pool("h100=2x4"),
        to="kueue", **OPTIONS["kueue"],
    )  # fmt: skip
    found = answered(asked).launch
    assert found is not None
    return found


def test_a_training_has_its_layout_and_what_runs_it(
    launch: RoundFilesAnswer, tmp_path: Path
) -> None:
    write(launch.files, tmp_path)
    layout = documents.parse(LayoutPlan, launch.files["my-run/layout.json"], "it")
    assert not violations(layout)
    assert layout.layout.ranks == 6
    assert launch.remarks == (
        "my run has 4+2 h100 of 2 servers; its layout was priced with 3 on each",
    )
    assert launch.bound is not None
    assert launch.one_more is not None
    given = {"PATH": os.environ["PATH"], "BASE": "x"}
    script = 'exec() { echo "$@"; }\n' + launch.files["my-run/train.sh"]
    ran = subprocess.run(["bash", "-c", script], env=given, text=True, capture_output=True)
    assert ran.stdout.startswith("python -m torchtitan.train --module stagewright_torchtitan")
    assert "my-run/stagewright_torchtitan.py" in launch.files
    jobset = yaml.safe_load(launch.files["my-run/jobset.yaml"])
    pod = jobset["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["env"][1] == {"name": "BASE", "value": "mine.config:it's"}
    assert pod["containers"][0]["workingDir"] == "/stagewright"
    assert pod["volumes"][1]["configMap"] == {"name": "stagewright-my-run"}
    assert "create configmap stagewright-my-run --from-file=my-run " in launch.files["round.sh"]


def test_jobsets_are_those_of_their_schema(launch: RoundFilesAnswer) -> None:
    """That of JobSet v1alpha2, with the Jobs and pods in it: what it does not know is lost."""
    models = pytest.importorskip("kubeflow_trainer_api.models.jobset_v1alpha2_job_set")
    read_as = models.JobsetV1alpha2JobSet.from_dict
    pool, layout = parse_pool("h100=2x1"), parse_layout("d16 b1 zero1")
    options = {"pool": pool, "nodes": hosts_of(pool), "to": "kueue", **OPTIONS["kueue"]}
    named = answered(RoundsRequest.of(workload=Workload((RUNS,), RATES), **options)).launch
    assert named is not None
    exported = export_layout(make_problem(ARCHITECTURE, layout), layout, "megatron")
    for text in (
        launch.files["my-run/jobset.yaml"], named.files["a/jobset.yaml"], exported["jobset.yaml"]
    ):  # fmt: skip
        given = yaml.safe_load(text)
        assert read_as(given).to_dict() == given
        given["spec"]["replicatedJobs"][0]["template"]["spec"]["completion"] = 1
        assert read_as(given).to_dict() != given


# ---------------------------------------------------------------- a JobSet that waits


def test_a_jobset_that_waits_is_patched_queued_and_taken_back() -> None:
    """A recommender before admission; applied to the JobSet by the rules of JSON patches."""
    rates = Throughputs(tuple(Rate("m", n, "h100", float(n)) for n in (4, 8)))
    workload = Workload((Job("mine", "m", 100.0, counts=(4, 8)),), rates)
    asked = {"workload": workload, "pool": parse_pool("h100=2x4"), "to": "kueue", "queue": "q"}
    answer = answered(RoundsRequest.of(**asked))
    assert answer.launch is not None
    spec: dict[str, Any] = {
        "parallelism": 1, "completions": 1, "template": {"spec": {"containers": []}},
    }  # fmt: skip
    jobset = {"spec": {"replicatedJobs": [{"template": {"spec": spec}}]}}
    for one in json.loads(answer.launch.files["mine/patch.json"]):
        *path, last = one["path"].strip("/").split("/")
        place: Any = jobset
        for part in path:
            place = place[int(part)] if isinstance(place, list) else place[part]
        assert one["op"] == ("replace" if last in place else "add")
        place[last] = one["value"]
    assert (spec["parallelism"], spec["completions"]) == (2, 2)
    assert spec["template"]["spec"]["nodeSelector"] == {"accelerator": "h100"}
    other = replace(workload, jobs=(Job("other", "m", 1.0, counts=(8,)),))
    later = answered(RoundsRequest.of(**asked | {"workload": other}, after=document(answer)))
    assert later.launch is not None
    assert (later.launch.stops, later.launch.starts) == (("mine",), ("other",))
    (freed,) = re.findall("jobset mine --type=merge --patch='(.*)'", later.launch.files["round.sh"])
    assert json.loads(freed) == {
        "metadata": {"labels": {"kueue.x-k8s.io/queue-name": None}}, "spec": {"suspend": True},
    }  # fmt: skip


# ---------------------------------------------------------------- what is refused

RATES = Throughputs((Rate("m", 1, "h100", 1.0), Rate("small", 1, "h100", 1.0)))
PAIR = PairRate(("m", "m"), 1, "h100", (0.9, 0.9))
RUNS = Job("a", "m", 1.0, command="run")


@pytest.mark.parametrize(
    ("to", "job", "more", "message"),
    [
        ("slurm", replace(RUNS, command=None), {}, "job 'a': slurm needs its `command` in"),
        ("slurm", replace(RUNS, command=" "), {}, "job 'a': the command is empty"),
        ("slurm", replace(RUNS, command="a '"), {}, "job 'a': command .*No closing quotation"),
        ("slurm", replace(TRAINED, scale=1, environment={}), {},
         "job 'my run': torchtitan needs BASE, the configuration, such as"),
        ("slurm", replace(TRAINED, scale=1), {}, "job 'my run': the jobs file has throughputs of"),
        ("slurm", RUNS, {"image": "x"}, "image does not apply to slurm, it is of kueue"),
        ("slurm", RUNS, {"time": "4h"}, "--time '4h' is no time of Slurm"),
        ("slurm", RUNS, {"cpus": 0}, "--cpus must be at least 1"),
        ("slurm", RUNS, {"nodes": {"k80": ("a",)}}, "nodes: 'k80' is none of h100"),
        ("slurm", RUNS, {"nodes": {"h100": ("a",)}}, "h100 has 2 servers and 1 names; write for"),
        ("slurm", RUNS, {"nodes": {"h100": ("a", "a")}}, "nodes: a name is given twice"),
        ("slurm", RUNS, {"nodes": {"h100": ("a", "b;c")}}, "'b;c' is no name of a node"),
        ("torchrun", RUNS, {}, "nodes: h100 has 2 servers and 0 names"),
        ("kueue", RUNS, {"queue": "q"}, "image: kueue needs the container that has the command"),
        ("kueue", RUNS, {"image": "x"}, "queue: kueue needs the name of the local queue"),
        ("kueue", RUNS, {"queue": "q", "image": "x", "node_label": "a b"}, "is no key of a label"),
        ("kueue", replace(RUNS, name="A_1", command=None), {"queue": "q"},
         "kueue needs its `command` in the jobs file, or the name of a JobSet that is there"),
        ("slurm", RUNS, {"space_sharing": True}, "slurm gives a GPU to one job at a time"),
        (None, RUNS, {"cpus": 2}, "cpus is of launch files: say of which with to"),
    ],
)  # fmt: skip
def test_what_has_no_launch_files_is_refused_in_a_line(
    to: str | None, job: Job, more: dict[str, Any], message: str
) -> None:
    trainings = (TRAINING,) if job.model == "small" else ()
    rates = RATES if not more.get("space_sharing") else replace(RATES, pairs=(PAIR,))
    workload = Workload((job,), rates, trainings=trainings)
    with pytest.raises(InputError, match=message) as refused:
        rounds(RoundsRequest.of(workload=workload, pool=parse_pool("h100=2x1"), to=to, **more))
    assert "\n" not in str(refused.value)


def test_names_of_jobs_and_rounds_must_go_together() -> None:
    with pytest.raises(InputError, match="job 'a': environment: 'A-B' is no name of a variable"):
        replace(RUNS, environment={"A-B": ""})
    pool, hosts = parse_pool("h100=2x1"), {"h100": ("a", "b")}
    two = Workload((RUNS, replace(RUNS, name="A")), RATES)
    with pytest.raises(InputError, match="jobs 'a' and 'A' would both be stagewright-a: rename"):
        RoundsRequest.of(workload=two, pool=pool, to="slurm")
    workload = Workload((RUNS,), RATES)
    before = document(answered(RoundsRequest.of(workload=workload, pool=pool, to="slurm")))
    with pytest.raises(InputError, match="to: the round that runs was launched by slurm"):
        RoundsRequest.of(workload=workload, pool=pool, to="torchrun", nodes=hosts, after=before)
    for wrong, message in (
        ({"queued": ("a; reboot",)}, "queued: 'a; reboot' is no name of a JobSet"),
        ({"nodes": {"h100": ("a", "$(b)")}}, "nodes: h100 needs 2 names of servers"),
        ({"entries": (*before.entries, *before.entries)}, r"entries\[1\]: 0 is no free h100"),
    ):
        with pytest.raises(InputError, match=message):
            replace(before, **wrong)
    with pytest.raises(InputError, match="after: that round is of another cluster"):
        RoundsRequest.of(workload=workload, pool=parse_pool("h100=3x1"), after=before)


def test_a_round_travels_as_a_job_of_the_service() -> None:
    workload, pool = Workload((RUNS,), RATES), parse_pool("h100=2x1")
    before = document(answered(RoundsRequest.of(workload=workload, pool=pool, to="slurm")))
    request = RoundsRequest.of(
        workload=workload, pool=pool, to="slurm", after=before, nodes={"h100": ("a", "b")}
    )
    assert parse_request("rounds", request.model_dump_json()) == request
    answer = answered(request)
    assert read(written(answer), request) == answer
    assert answer.launch is not None
    assert answer.launch.stays == ("a",)


# ---------------------------------------------------------------- processes

REACHED = """\
#!/usr/bin/env bash
shift
exec bash -c "$1"
"""
SLEEPS = """\
#!/usr/bin/env bash
echo $$ >"$HOME/rank-$MASTER_PORT-$NODE_RANK"
exec sleep 1000
"""


@pytest.mark.real
def test_by_ssh_jobs_start_and_end_with_all_their_processes(tmp_path: Path) -> None:
    """A job on two nodes starts, stays, and stops: no process is left, and another has started."""
    from launches import is_running, until  # with torch

    for name, text in (("ssh", REACHED), ("torchrun", SLEEPS)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    rates = Throughputs((Rate("m", 2, "h100", 1.0),))
    pool, first = parse_pool("h100=2x1"), replace(RUNS, scale=2)
    asked: dict[str, Any] = {"pool": pool, "to": "torchrun", "nodes": {"h100": ("n0", "n1")}}
    before, pids = None, []
    for number, name in enumerate(("a", "a", "b")):
        workload = Workload((replace(first, name=name),), rates)
        answer = answered(RoundsRequest.of(workload=workload, after=before, **asked))
        assert answer.launch is not None
        before, folder = document(answer), tmp_path / f"a round's {number}"
        write(answer.launch.files, folder)
        subprocess.run(["bash", folder / "round.sh"], env=environment, check=True, timeout=60)
        many = 2 if name == "a" else 4
        until(lambda many=many: sum(bool(p.read_text()) for p in tmp_path.glob("rank-*")) == many)
        pids.append({int(path.read_text()) for path in tmp_path.glob("rank-*")})
    assert pids[0] == pids[1]  # it stayed
    assert not any(map(is_running, pids[0]))
    started = pids[2] - pids[0]
    assert len(started) == 2
    assert all(map(is_running, started))
    for pid in started:
        os.kill(pid, 9)
