"""``--server``: a command's answer from the service is the one that it has itself."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from commands import FT06, answered, answered_json, refused, run
from markets import series
from planning_jobs import TWO_JOBS, TWO_OPERATORS, long_request
from processes import PATIENCE, in_a_terminal, wait_for
from profiles import slow_after
from served import served

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx_sse", reason="the client is not installed")

import httpx

import stagewright.client as client_module
from stagewright.cli.options import SERVED_THREADS
from stagewright.client import AsyncClient, Client, LostServiceError, UnansweredError
from stagewright.formulations.forms.answers import Progress
from stagewright.formulations.operators.plan import load_operator_plan
from stagewright.formulations.parallelism.document import load_layout
from stagewright.formulations.plans.plan import load_plan
from stagewright.formulations.prices.analytic import analytic_model
from stagewright.graphs.machines.cluster import Link, save_cluster, uniform_servers
from stagewright.graphs.models.chain import save_model
from stagewright.graphs.models.operators.step_graph import save_graph
from stagewright.graphs.workloads.prices import Market, save_market
from stagewright.service.http.limits import RequestLimits
from stagewright.service.layouts.configured import TrainPlanRequest
from stagewright.service.layouts.requests import LayoutAnswer
from stagewright.service.pipelines.answers import PlanAnswer
from stagewright.service.pipelines.requests import PlanRequest
from stagewright.service.schedules.requests import JobShopAnswer, JobShopRequest

EXAMPLE = Path(__file__).parents[2] / "examples" / "jobs" / "mixed.json"
MODEL = "--model model.json --cluster cluster.json"
STAGES = "--stages 3 --microbatches 4 --times 1,2 --time-limit 30 --threads 1"
JOBS = f"--jobs {EXAMPLE} --cluster v100=2x4,p100=1x4"
TRAINING = "--device h100 --gpus 8 --global-batch 16 --sequence 2048"
PLACE = "--model graph.json --cluster pair.json --planner heft"
COMMANDS = {
    "train-plan": f"train-plan config.json {TRAINING} --tensor 1 --alike --top 3 -o out.json",
    "jobshop": "jobshop ft06.txt --threads 1",
    "plan": f"plan {MODEL} --microbatches 4 --planner dp -o out.json",
    "no plan": f"plan {MODEL} --microbatches 4 --planner dp --memory-limit 1MB",
    "what-if": f"what-if {MODEL} --microbatches 4 --planner dp",
    "place": f"plan {PLACE} -o out.json",
    "partition": f"partition {MODEL} --microbatches 4",
    "schedule": f"schedule {STAGES} --png out.png --csv out.csv",
    "two ways": "schedule --stages 4 --microbatches 4 --times 1,1,1 --kind chimera --html out.html",
    "compare": f"schedule {STAGES} --compare --png out.png",
    "curve": f"schedule {STAGES} --curve --html out.html",
    "sweep": f"sweep {MODEL} --microbatches 2,4 --planner dp --workers 1 --png out.png",
    "divide": "divide workload.json --devices 2",
    "allocate": f"allocate {JOBS} -o out.json",
    "rounds": f"rounds {JOBS} --rounds 3",
    "no rounds": f"rounds --jobs {EXAMPLE} --cluster v100=8@2,p100=4@1 --policy makespan-budget "
    "--budget 0.001",
    "simulate-cluster": f"simulate-cluster {JOBS} --png out.png --completion-png out.other.png",
    "nothing fits": f"train-plan config.json {TRAINING} --memory 3GB --tensor 1 --replicas 8",
    "train-plan-profiles": "train-plan profiles.json --servers a100:1x4 --global-batch 64",
    "memory": "memory config.json --layout d8 --sequence 2048 --png out.png",
    "calibrate": f"calibrate runs.csv --config config.json {TRAINING} -o out.json",
    "cloud": "cloud prices.json --rates v100=1.0,k80=0.4 --v100-hours 6 --png out.png",
}

SMALL_LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32000,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
WORKLOAD = {
    "maxFPGAs": 2, "maxCPUs": 0, "maxSizePerFPGA": 4e3,
    "nodes": [
        {"id": i, "name": f"op{i}", "size": 1e3, "fpgaLatency": 4, "cpuLatency": 20}
        for i in range(2)
    ],
    "edges": [{"sourceId": 0, "destId": 1, "size": 8.0, "cost": 1}],
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("server"), "--workers", "2") as (url, _):
        yield url


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    save_model(analytic_model("vgg19", 8), "model.json")
    save_cluster(uniform_servers(1, 4, Link(10e9)), "cluster.json")
    market = (series([3.0] * 40, name="p3"), series([0.9] * 40, name="p2", gpu="k80"))
    save_market(Market(market), "prices.json")
    save_cluster(uniform_servers(1, 2, Link(1e9), kind="v100", memory_bytes=1e10), "pair.json")
    save_graph(TWO_OPERATORS, "graph.json")
    Path("ft06.txt").write_text(FT06)
    Path("workload.json").write_text(json.dumps(WORKLOAD))
    Path("config.json").write_text(json.dumps(SMALL_LLAMA))
    Path("runs.csv").write_text("layout,seconds\nd8 b1 zero1,0.4\nt2 d4 b1 zero1,0.5\n")
    Path("profiles.json").symlink_to(EXAMPLE.parents[1] / "layers" / "gpt-24x2048.json")
    return tmp_path


def without_times(told: str) -> str:
    """What is printed, but for how long it took."""
    told = re.sub(r"\b\d+\.\d+ s\b", "T s", told)
    return re.sub(r'"wall_seconds": [\d.e+-]+', '"wall_seconds": T', told)


def written(folder: Path) -> dict[str, bytes]:
    """The outputs, which are then deleted."""
    found = {path.name: path.read_bytes() for path in folder.glob("out.*")}
    for name in found:
        (folder / name).unlink()
    return found


@pytest.mark.parametrize("name", slow_after(1, list(COMMANDS)))
def test_a_command_answers_as_it_does_itself(name: str, server: str, files: Path) -> None:
    for form in ([], ["--json"]):
        arguments = [*COMMANDS[name].split(), *form]
        if form and "--csv" in arguments:
            arguments = [one for one in arguments if one not in ("--csv", "out.csv")]
        own, own_files = run(*arguments), written(files)
        there, its_files = run(*arguments, "--server", server), written(files)
        assert own.exit_code in (0, 1), own.output
        assert there.exit_code == own.exit_code, there.output
        assert without_times(there.stdout) == without_times(own.stdout)
        assert there.stderr == own.stderr == ""
        assert its_files.keys() == own_files.keys()
        assert its_files == own_files


def test_the_server_is_named_by_the_environment_and_refuses_in_a_line(
    server: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGEWRIGHT_SERVER", server)
    assert RequestLimits().threads == SERVED_THREADS
    line = refused("jobshop", "ft06.txt", "--threads", 9)
    assert line == f"--server {server}: threads: at most 4 here, got 9"
    asked = ["plan", *MODEL.split(), "--microbatches", 4]
    assert "--microbatches must be at least 1" in refused(*asked[:-1], 0)
    assert "unknown planner 'none'" in refused(*asked, "--planner", "none")
    assert "there is no job 'x'" in refused("jobs", "x")


def test_a_dead_server_and_a_wrong_token(
    tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = "http://127.0.0.1:1"
    told = f"--server {dead}: no service answers there: "
    assert told in refused("jobshop", "ft06.txt", "--server", dead)
    assert "no service answers there" in refused("jobshop", "ft06.txt", "--server", "nonsense")
    assert "--server URL is missing" in refused("jobs")
    with monkeypatch.context() as proxied:
        proxied.setenv("ALL_PROXY", "socks5://127.0.0.1:1")
        assert "names a SOCKS proxy" in refused("jobs", "--server", dead)
    token = answered("token", "ann").strip()
    with served(tmp_path) as (url, _):
        monkeypatch.setenv("STAGEWRIGHT_TOKEN", "wrong")
        line = refused("jobshop", "ft06.txt", "--server", url)
        assert "this token is unknown" in line
        assert line.endswith("a token is read from STAGEWRIGHT_TOKEN")
        monkeypatch.setenv("STAGEWRIGHT_TOKEN", token)
        assert "makespan 55 (optimal)" in answered("jobshop", "ft06.txt", "--server", url)


def long_command(files: Path, server: str) -> list[str]:
    asked = json.loads(long_request())
    for name in ("chain", "cluster"):
        (files / f"{name}.json").write_text(json.dumps(asked[name]))
    given = ["plan", "--model", files / "chain.json", "--cluster", files / "cluster.json"]
    options = ["--microbatches", 16, "--planner", "general", "--time-limit", 600]
    return [*map(str, (*given, *options)), "--server", server]


def test_a_signal_ends_the_job_with_its_best_plan(server: str, files: Path) -> None:
    output = files / "plan.json"
    arguments = [*long_command(files, server), "-o", str(output), "--json"]
    process, shown = in_a_terminal(arguments)
    wait_for(shown, r"planning: \d+ s, best [0-9.]+, bound [0-9.]+, gap [0-9.]+%")
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=PATIENCE)
    document = json.loads(told)
    assert (process.returncode, document["status"]) == (0, "interrupted")
    assert load_plan(output).certificate.cost_seconds == document["cost_seconds"]
    with Client(server) as client:
        assert client.jobs(1)[0].stopped_by == "user"


@pytest.mark.slow
def test_jobs_are_listed_stopped_and_fetched(server: str, files: Path) -> None:
    with Client(server) as client:
        job = client.submit("plan", long_request(seed=1)).id
        while not client.job(job).has_document:
            pass
    listed = answered_json("jobs", "--server", server)["jobs"]
    assert (listed[0]["id"], listed[0]["state"]) == (job, "solving")
    assert job in answered("jobs", "--server", server)
    shown = answered("jobs", job, "--stop", "--server", server, "-o", "best.json")
    assert "stopped by user" in shown
    assert "best.json is written" in shown
    found = answered_json("jobs", job, "--server", server)
    assert found["cost_seconds"] == load_plan("best.json").certificate.cost_seconds
    answered("plan", *PLACE.split(), "--server", server)
    (placed, *_) = answered_json("jobs", "--server", server)["jobs"]
    answered("jobs", placed["id"], "--server", server, "-o", "placed.json")
    assert load_operator_plan("placed.json").certificate.cost_seconds == placed["cost"]
    given = {"config": SMALL_LLAMA, "device": "h100", "gpus": 8, "global_batch": 16,
             "sequence": 2048, "tensor": [1], "alike": True}  # fmt: skip
    with Client(server) as client:
        asked = TrainPlanRequest.parse(json.dumps(given))
        layouts = client.solve(asked)
        assert isinstance(layouts, LayoutAnswer)
        (job, *_) = client.jobs()
    answered("jobs", job.id, "--server", server, "-o", "layout.json")
    assert load_layout("layout.json").iteration_seconds == job.cost == layouts.rows[0].seconds
    assert "--stop is of one job" in refused("jobs", "--stop", "--server", server)


@pytest.mark.slow
def test_both_clients_solve_requests_of_the_library(server: str) -> None:
    request = JobShopRequest.parse(TWO_JOBS)
    with Client(server) as client:
        found = client.solve(request)
    assert isinstance(found, JobShopAnswer)
    assert (found.makespan, found.status) == (6, "optimal")

    async def asked() -> tuple[object, list[Progress]]:
        news: list[Progress] = []
        stop = threading.Event()

        def report(one: Progress) -> None:
            if one.objective is not None:
                news.append(one)
                stop.set()

        async with AsyncClient(server) as client:
            return await client.solve(PlanRequest.parse(long_request(seed=2)), report, stop), news

    answer, news = asyncio.run(asked())
    assert isinstance(answer, PlanAnswer)
    assert answer.status == "interrupted"
    assert answer.plan.certificate.cost_seconds == answer.cost_seconds
    assert news[0].objective >= answer.cost_seconds


JOB = {
    "id": "j", "kind": "jobshop", "user": "ann", "state": "solving", "created": 1.0, "cost": None,
    "bound": None, "gap": None, "stopped_by": None, "reason": "", "waits": "",
    "has_document": False,
    "webhook": None,
}  # fmt: skip


NEWS = {"cost": 2.0, "bound": 1.0, "plans": None}


def sent(number: int, name: str, **data: object) -> str:
    return f"id: {number}\nevent: {name}\ndata: {json.dumps(data)}\n\n"


class Cut(httpx.SyncByteStream):
    """A stream that breaks after a text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __iter__(self) -> Iterator[bytes]:
        yield self.text.encode()
        raise httpx.ReadError("cut")


def test_a_cut_stream_goes_on_after_the_last_event() -> None:
    after: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if not request.url.path.endswith("events"):
            state = "solving" if len(after) < 2 else "optimal"
            return httpx.Response(200, json=JOB | {"state": state})
        after.append(request.headers["Last-Event-ID"])
        stream = {"Content-Type": "text/event-stream"}
        if len(after) == 1:
            news = sent(4, "queued") + sent(7, "progress", cost=2.0, bound=1.0)
            return httpx.Response(200, headers=stream, stream=Cut(news))
        if len(after) == 2:
            return httpx.Response(503, json={"detail": "the store does not answer; try again"})
        return httpx.Response(200, headers=stream, text=": ping\n\n" + sent(9, "optimal"))

    with Client("http://somewhere") as client:
        client.calls.http = httpx.Client(
            transport=httpx.MockTransport(handle), base_url="http://somewhere"
        )
        found = [(one.number, one.name) for one in client.events("j")]
    assert found == [(4, "queued"), (7, "progress"), (9, "optimal")]
    assert after == ["0", "7", "7"]


def test_a_server_that_goes_away_is_named_with_the_job() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            return httpx.Response(202, json=JOB | {"state": "queued"})
        raise httpx.ConnectError("refused")

    with Client("http://somewhere", patience=0.0) as client:
        client.calls.http = httpx.Client(
            transport=httpx.MockTransport(handle), base_url="http://somewhere"
        )
        with pytest.raises(LostServiceError, match="stagewright jobs j --server http://somewhere"):
            client.solve(JobShopRequest.parse(TWO_JOBS))


class Endless(httpx.AsyncByteStream):
    """A stream of a job to which nothing happens."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""


@dataclass
class Patient:
    """A service whose job goes on until it is stopped; the names of the calls it had."""

    slow: str = ""
    is_gone: bool = False
    calls: list[str] = field(default_factory=list)
    slowed: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        name = "events" if request.url.path.endswith("events") else request.method
        if name == self.slow:
            self.slowed.set()
            await asyncio.sleep(60.0 if self.is_gone else 0.05)
        self.calls.append(name)
        if name == "events":
            self.slowed.set()
            stream = {"Content-Type": "text/event-stream"}
            return httpx.Response(200, headers=stream, stream=Endless())
        return httpx.Response(200, json=JOB)

    async def leave(self, cancels: int = 1) -> None:
        """Ask it for an answer, and be cancelled so often."""
        async with AsyncClient("http://somewhere") as client:
            client._http = httpx.AsyncClient(
                transport=httpx.MockTransport(self), base_url="http://somewhere"
            )
            task = asyncio.create_task(client.solve(JobShopRequest.parse(TWO_JOBS)))
            for _ in range(cancels):
                await self.slowed.wait()
                self.slowed.clear()
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


def test_a_task_that_is_cancelled_stops_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    async def leaves() -> None:
        await (waits := Patient()).leave()
        assert waits.calls == ["POST", "GET", "events", "DELETE"]
        await (submits := Patient("POST")).leave()
        assert submits.calls == ["POST", "DELETE"]
        await (twice := Patient("DELETE")).leave(cancels=2)
        assert twice.calls == ["POST", "GET", "events", "DELETE"]
        monkeypatch.setattr(client_module, "LEAVE_SECONDS", 0.05)
        await (gone := Patient("DELETE", is_gone=True)).leave(cancels=2)
        assert gone.calls == ["POST", "GET", "events"]

    asyncio.run(leaves())


def test_an_interrupted_wait_stops_the_job() -> None:
    calls: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        calls.append(request.method)
        if not request.url.path.endswith("events"):
            return httpx.Response(200, json=JOB)
        stream = {"Content-Type": "text/event-stream"}
        return httpx.Response(200, headers=stream, text=sent(4, "progress", **NEWS))

    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    with Client("http://somewhere") as client:
        client.calls.http = httpx.Client(
            transport=httpx.MockTransport(handle), base_url="http://somewhere"
        )
        with pytest.raises(KeyboardInterrupt):
            client.solve(JobShopRequest.parse(TWO_JOBS), interrupt)
    assert calls == ["POST", "GET", "GET", "DELETE"]


@pytest.mark.slow
def test_a_timeout_stops_the_job_on_the_server(server: str) -> None:
    async def asked() -> None:
        async with AsyncClient(server) as client:
            async with asyncio.timeout(2.0):
                await client.solve(PlanRequest.parse(long_request(seed=4)))

    with pytest.raises(TimeoutError):
        asyncio.run(asked())
    with Client(server) as client:
        (job,) = client.jobs(1)
        assert client.wait(job.id, PATIENCE).stopped_by == "user"


def test_a_job_without_an_answer_says_why(server: str) -> None:
    with Client(server) as client:
        job = client.submit("plan", long_request(seed=3)).id
        client.abort(job)
        client.wait(job)
        with pytest.raises(UnansweredError, match=r"ended by the user|before it was begun"):
            client.answer(job)


@pytest.mark.slow
def test_a_killed_server_that_comes_back_goes_on(tmp_path: Path, files: Path) -> None:
    """The job is another worker's once its lease is over; the command waits for it."""
    found: list[Any] = []
    with served(tmp_path) as (url, process):
        port = url.rpartition(":")[2]
        asked = [sys.executable, "-m", "stagewright", *long_command(files, url), "--json"]
        asked[asked.index("600")] = "10"
        command = subprocess.Popen(asked, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        with Client(url) as client:
            while not (client.jobs() and client.jobs()[0].has_document):
                pass
        process.kill()
        process.wait(PATIENCE)
        again = [sys.executable, "-m", "stagewright", "serve", "--port", port]
        other = subprocess.Popen(again, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        try:
            found.append(json.loads(command.communicate(timeout=PATIENCE)[0]))
        finally:
            other.send_signal(signal.SIGINT)
            other.wait(PATIENCE)
    assert found[0]["cost_seconds"] > 0


def test_searches_on_ray_are_of_several_plans_and_here(files: Path) -> None:
    asked = ["plan", *MODEL.split(), "--engine", "ray"]
    assert "--engine ray goes with --global-batch" in refused(*asked, "--microbatches", 4)
    line = refused(*asked, "--global-batch", 8, "--server", "http://127.0.0.1:1")
    assert line == "--engine ray is of searches here; leave it or --server out"
    address = ["--address", "127.0.0.1:1"]
    what_if = ["what-if", *MODEL.split(), "--microbatches", 4]
    assert "--address goes with --engine ray" in refused(*what_if, *address)
    assert "no Ray cluster at" in refused(*what_if, "--engine", "ray", "--planner", "dp", *address)
