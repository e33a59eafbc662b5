"""``import stagewright``: plan, check, simulate, and the files that other programs read."""

import importlib.metadata
import json
import re
import signal
import sys
import threading
import types
from dataclasses import replace

import pytest
from markets import series
from tokens import After

import stagewright
from stagewright.formulations.forms.answers import Status
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.graphs.workloads.jobs import Job, Rate, Throughputs, Workload
from stagewright.graphs.workloads.prices import Market

GB = 1e9
RATES = Throughputs(tuple(Rate(model, 1, "v100", 1.0) for model in ("a", "b")))


@pytest.fixture
def model():
    """Four layers; a boundary of 100 MB, 1 GB of weights a layer."""
    costs = (LayerCost(4, 0.1, 0.2e9, 0.1e9, 0.2),)
    layers = tuple(Layer(f"l{i}", GB, costs) for i in range(4))
    return Chain("four", "measured: by hand", 4, layers)


@pytest.fixture
def cluster():
    return uniform_servers(2, 2, Link(100 * GB), Link(10 * GB, 1e-5), memory_bytes=32e9)


@pytest.fixture
def files(tmp_path, model, cluster):
    stagewright.save_model(model, tmp_path / "model.json")
    stagewright.save_cluster(cluster, tmp_path / "cluster.json")
    return tmp_path


def test_through_files(files, model, cluster):
    chain = stagewright.load_model(files / "model.json")
    machines = stagewright.load_cluster(files / "cluster.json")
    assert (chain, machines) == (model, cluster)
    result = stagewright.plan(chain, machines, microbatches=3, planner="spp")
    stagewright.save_plan(result.plan, files / "plan.json")
    plan = stagewright.load_plan(files / "plan.json")
    assert plan == result.plan
    assert stagewright.check(plan, chain, machines) == ()
    run = stagewright.simulate(plan, chain, machines)
    assert run.iteration_seconds == pytest.approx(result.cost)
    assert sorted(path.name for path in files.iterdir()) == [
        "cluster.json",
        "model.json",
        "plan.json",
    ]


def test_the_result_agrees_with_its_plan(model, cluster):
    result = stagewright.plan(model, cluster, 3, "gpipe")
    certificate, predicted = result.plan.certificate, result.plan.predicted
    assert result.status is Status.FEASIBLE
    assert result.planner == result.plan.planner == "gpipe"
    assert result.cost == certificate.cost_seconds == predicted.iteration_seconds
    assert (result.bound, result.gap) == (certificate.bound_seconds, certificate.gap)
    assert result.gap == pytest.approx((result.cost - result.bound) / result.cost)
    assert result.proved_by == certificate.proved_by
    assert result.seconds > 0


def test_auto_with_eight_microbatches_is_the_default(model):
    """One device: 8 x 4 x 0.3 s, and nothing to improve, so that SPP is not asked."""
    result = stagewright.plan(model, uniform_servers(1, 1, Link(GB), memory_bytes=64e9))
    assert (result.planner, result.plan.microbatches) == ("auto", 8)
    assert result.status is Status.OPTIMAL
    assert result.cost == pytest.approx(9.6)
    tried = [attempt.planner for attempt in result.attempts]
    assert "balanced" in tried
    assert "spp" not in tried


class TestDocument:
    """GPipe's plan: a layer on each of four devices, microbatches of 100 MB between them."""

    @pytest.fixture
    def document(self, files, model, cluster):
        result = stagewright.plan(model, cluster, 2, "gpipe")
        stagewright.save_plan(result.plan, files / "plan.json")
        return json.loads((files / "plan.json").read_text())

    def entries(self, document, kind):
        return [a for a in document["schedule"]["actions"] if kind in a["action"]]

    def test_frame(self, document):
        assert (document["format"], document["version"]) == ("stagewright-plan", 1)
        assert (document["kind"], document["weights"]) == ("pipeline", "flush")
        assert (document["model"], document["cluster"]) == ("four", "2x2")
        assert document["planner"] == "gpipe"
        assert document["microbatches"] == 2
        assert len(document["digest"]) == 64

    def test_stages(self, document):
        assert [(s["layers"], s["devices"]) for s in document["stages"]] == [
            ([0, 1], ["s0g0"]),
            ([1, 2], ["s0g1"]),
            ([2, 3], ["s1g0"]),
            ([3, 4], ["s1g1"]),
        ]

    def test_every_action_stands_once(self, document):
        found = sorted(a["action"] for a in document["schedule"]["actions"])
        expected = [f"{s}{kind}{m}" for s in range(4) for kind in "FB" for m in range(2)]
        expected += [f"{s}SEND_F{m}" for s in range(3) for m in range(2)]
        expected += [f"{s}SEND_B{m}" for s in range(1, 4) for m in range(2)]
        assert found == sorted(expected)

    def test_computations(self, document):
        for action in document["schedule"]["actions"]:
            if "SEND" not in action["action"]:
                lasting = 0.1 if "F" in action["action"] else 0.2
                assert action["finish_seconds"] - action["start_seconds"] == pytest.approx(lasting)
                assert set(action) == {"device", "action", "start_seconds", "finish_seconds"}

    def test_transfers(self, document):
        devices = ["s0g0", "s0g1", "s1g0", "s1g1"]
        for kind, towards in (("SEND_F", 1), ("SEND_B", -1)):
            for action in self.entries(document, kind):
                stage = int(action["action"][0])
                assert action["device"] == devices[stage]
                assert action["sources"] == [devices[stage]]
                assert action["targets"] == [devices[stage + towards]]
                assert action["bytes"] == 0.1e9
                slow = {stage, stage + towards} == {1, 2}
                lasting = 0.1e9 / (10 * GB) + 1e-5 if slow else 0.1e9 / (100 * GB)
                assert action["finish_seconds"] - action["start_seconds"] == pytest.approx(lasting)

    def test_predicted(self, document):
        predicted = document["predicted"]
        last = max(a["finish_seconds"] for a in document["schedule"]["actions"])
        assert predicted["iteration_seconds"] == pytest.approx(last)
        assert predicted["bubble"] == pytest.approx(1 - 2 * 0.3 / last)
        # Adam: 4 times the weights; two microbatches; buffers of 100 MB, two on each side.
        assert predicted["peak_memory_bytes"] == pytest.approx(
            {"s0g0": 4.6e9, "s0g1": 4.8e9, "s1g0": 4.8e9, "s1g1": 4.6e9}
        )
        assert predicted["link_bytes"] == pytest.approx({"0-1": 4e8, "1-2": 4e8, "2-3": 4e8})

    def test_certificate(self, document):
        certificate = document["certificate"]
        cost, bound = certificate["cost_seconds"], certificate["bound_seconds"]
        assert cost == document["predicted"]["iteration_seconds"]
        assert bound <= cost
        assert certificate["gap"] == pytest.approx((cost - bound) / cost)
        proofs = {b["proved_by"]: (b["seconds"], b["scope"]) for b in certificate["bounds"]}
        assert proofs[certificate["proved_by"]] == (bound, "problem")
        assert certificate["schedule_bound_seconds"] >= bound
        assert {scope for _, scope in proofs.values()} == {"problem", "schedule"}

    def test_all_reduce(self, model, cluster, files):
        """Data parallelism: 4 GB among four devices over the link between servers."""
        result = stagewright.plan(model, cluster, 2, "dp")
        stagewright.save_plan(result.plan, files / "plan.json")
        document = json.loads((files / "plan.json").read_text())
        (reduce,) = self.entries(document, "REDUCE_GRAD")
        everyone = ["s0g0", "s0g1", "s1g0", "s1g1"]
        assert (reduce["action"], reduce["device"]) == ("0REDUCE_GRAD", "s0g0")
        assert (reduce["sources"], reduce["targets"]) == (everyone, everyone)
        assert reduce["bytes"] == 4 * GB
        lasting = 2 * 3 / 4 * 4 * GB / (10 * GB) + 2 * 3 * 1e-5
        assert reduce["finish_seconds"] - reduce["start_seconds"] == pytest.approx(lasting)
        forwards = [a["device"] for a in self.entries(document, "0F0")]
        assert sorted(forwards) == everyone


class TestCheck:
    def test_a_plan_for_another_problem(self, model, cluster):
        plan = stagewright.plan(model, cluster, 2, "dp").plan
        other = replace(model, optimizer_bytes_per_parameter_byte=1.0)
        assert any("digest" in str(v) or "problem" in str(v) for v in
                   stagewright.check(plan, other, cluster))  # fmt: skip

    def test_a_lost_action(self, model, cluster):
        plan = stagewright.plan(model, cluster, 2, "gpipe").plan
        kept = tuple(a for a in plan.actions if a.action != "1F1")
        damaged = replace(plan, schedule=replace(plan.schedule, actions=kept))
        assert any("1F1" in str(violation) for violation in
                   stagewright.check(damaged, model, cluster))  # fmt: skip


class TestSimulate:
    def test_jitter_and_stragglers(self, model, cluster):
        plan = stagewright.plan(model, cluster, 2, "gpipe").plan
        once, again = (
            stagewright.simulate(plan, model, cluster, jitter=0.2, seed=7) for _ in range(2)
        )
        assert once == again
        assert once != stagewright.simulate(plan, model, cluster, jitter=0.2, seed=8)
        slow = stagewright.simulate(plan, model, cluster, stragglers={"s0g1": 2.0})
        assert slow.iteration_seconds > plan.predicted.iteration_seconds


def test_an_unknown_straggler_is_refused(model, cluster):
    plan = stagewright.plan(model, cluster, 2, "gpipe").plan
    with pytest.raises(stagewright.InputError, match="nobody"):
        stagewright.simulate(plan, model, cluster, stragglers={"nobody": 2.0})


def test_infeasible_is_an_answer(model):
    tight = uniform_servers(1, 2, Link(GB), memory_bytes=6e9)
    result = stagewright.plan(model, tight, 2, "gpipe")
    assert result.status is Status.INFEASIBLE
    assert (result.plan, result.cost, result.gap) == (None, None, None)
    assert "bytes short" in result.reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"microbatches": 0}, "microbatches must be at least 1, got 0"),
        ({"planner": "magic"}, "unknown planner 'magic'"),
        ({"planner": []}, "planner must be a str"),
        ({"time_limit": float("nan")}, "time_limit must be a positive number of seconds, got nan"),
        ({"time_limit": float("inf")}, "time_limit must be a positive number of seconds, got inf"),
        ({"time_limit": -1}, "time_limit must be a positive number of seconds, got -1"),
        ({"time_limit": "10"}, "time_limit must be a number, got '10'"),
        ({"time_limit": 10**400}, "time_limit must be a positive number of seconds"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"seed": -1}, "seed must be from 0"),
        ({"memory_limit_bytes": "8GB"}, "memory_limit_bytes must be a number, got '8GB'"),
        ({"memory_limit_bytes": float("nan")}, "memory_limit_bytes must be finite"),
        ({"choices": {"recompute": True}}, "choices must be a Choices"),
        ({"stop": True}, "stop must have is_set"),
    ],
)
def test_bad_arguments_get_one_line(model, cluster, arguments, message):
    with pytest.raises(stagewright.InputError, match=message) as caught:
        stagewright.plan(model, cluster, **arguments)
    assert "\n" not in str(caught.value)


ANYTHING = (None, "8GB", float("nan"), -1, True, [], {}, object(), b"x", "a\0b", 10**400)


def test_arguments_of_another_type_are_refused(tmp_path, monkeypatch, model, cluster):
    monkeypatch.chdir(tmp_path)
    plan = stagewright.plan(model, cluster, 2, "gpipe").plan
    calls = [
        lambda value: stagewright.plan(value, cluster),
        lambda value: stagewright.plan(model, value),
        lambda value: stagewright.check(value, model, cluster),
        lambda value: stagewright.check(plan, value, cluster),
        lambda value: stagewright.simulate(plan, model, value),
        lambda value: stagewright.allocate(value, stagewright.parse_pool("v100=1")),
        lambda value: stagewright.allocate(value, value),
        lambda value: stagewright.rounds(value, value),
        lambda value: stagewright.simulate_cluster(value, value),
        lambda value: stagewright.estimate(value, value),
        lambda value: stagewright.estimate(value, choose="new"),
        lambda value: stagewright.jobshop([value]),
        stagewright.jobshop,
        lambda value: stagewright.cloud(value, {"v100": 1.0}),
        lambda value: stagewright.compare(value, value),
        lambda value: stagewright.partition(value, cluster),
        lambda value: stagewright.schedule(2, value, value),
        lambda value: stagewright.run_cluster(value, value, {}, "jobs"),
        lambda value: stagewright.save_plan(value, "x"),
        lambda value: stagewright.save_model(value, "x"),
        lambda value: stagewright.save_cluster(value, "x"),
        stagewright.load_plan,
        stagewright.load_model,
        stagewright.load_cluster,
        stagewright.load_workload,
        stagewright.parse_pool,
    ]
    for call in calls:
        for value in ANYTHING:
            with pytest.raises(stagewright.InputError) as caught:
                call(value)
            assert "\n" not in str(caught.value)
    for path in (None, -1, 1, True, [], b"x", "a\0b", "", tmp_path):
        with pytest.raises(stagewright.InputError):
            stagewright.save_plan(plan, path)
    for option in ({"jitter": "1"}, {"jitter": 10**400}, {"seed": 0.5}, {"stragglers": ["s0g0"]}):
        with pytest.raises(stagewright.InputError):
            stagewright.simulate(plan, model, cluster, **option)
    assert list(tmp_path.iterdir()) == []


def test_swapped_arguments_are_told(model, cluster):
    with pytest.raises(stagewright.InputError, match=r"chain must be a Chain, got .*Cluster"):
        stagewright.plan(cluster, model)


def test_a_plan_that_is_stopped_keeps_the_best(model, cluster):
    stop = threading.Event()
    stop.set()
    result = stagewright.plan(model, cluster, 3, "exact", 600.0, stop=stop)
    assert (result.status, result.plan) == (Status.INTERRUPTED, None)


def test_a_result_is_a_few_lines_a_picture_and_a_table(model, cluster, tmp_path, monkeypatch):
    result = stagewright.plan(model, cluster, 3, "dp")
    lines = repr(result).splitlines()
    assert len(lines) == 5
    assert lines[0].startswith(f"{result.status.value}, by dp in ")
    assert f"{len(result.plan.stages)} stage" in lines[0]
    assert lines[1].startswith("iteration ")
    assert all(line.startswith("bound ") and "proved by" in line for line in lines[2:4])
    assert lines[4].startswith("layers 0-")
    assert "data:image/png;base64," in result._repr_html_()
    assert "data:image/png;base64," in stagewright.show(result.plan)._repr_html_()
    assert [row["layers"] for row in result.rows()] == [one.layers for one in result.plan.stages]
    frame = types.SimpleNamespace(DataFrame=lambda rows: ("frame", rows))
    monkeypatch.setitem(sys.modules, "pandas", frame)
    assert result.to_frame() == ("frame", result.rows())
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(stagewright.InputError, match="pip install pandas"):
        result.to_frame()
    nothing = stagewright.plan(model, cluster, 3, "dp", memory_limit_bytes=1e6)
    assert repr(nothing).startswith("infeasible, by dp in ")
    assert nothing.reason in repr(nothing)
    assert "<img" not in nothing._repr_html_()


def test_pictures_and_exports_are_written_once(model, cluster, tmp_path):
    plan = stagewright.plan(model, cluster, 3, "gpipe").plan
    for name in ("plan.html", "plan.png", "plan.json"):
        assert stagewright.show(plan, tmp_path / name) is None
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(stagewright.InputError, match=r"must end in \.html, \.png, \.json"):
        stagewright.show(plan, tmp_path / "plan.pdf")
    (path,) = stagewright.export(plan, "torch-csv", tmp_path / "torch")
    assert "0F0" in path.read_text()
    with pytest.raises(stagewright.InputError, match="name a new folder"):
        stagewright.export(plan, "torch-csv", tmp_path / "torch")
    with pytest.raises(stagewright.InputError, match="is not known"):
        stagewright.export(plan, "caffe", tmp_path / "caffe")
    assert not (tmp_path / "caffe").exists()


@pytest.fixture
def heard():
    """Interrupts are heard, even if the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_a_first_ctrl_c_in_an_interactive_session_keeps_the_best(model, cluster, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)

    def interrupt(_):
        signal.raise_signal(signal.SIGINT)

    result = stagewright.plan(model, cluster, 3, "auto", 60.0, on_progress=Once(interrupt))
    assert result.status is Status.INTERRUPTED
    assert result.plan is not None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.delattr(sys, "ps1")
    with pytest.raises(KeyboardInterrupt):
        stagewright.plan(model, cluster, 3, "auto", 60.0, on_progress=Once(interrupt))


class Once:
    """Calls ``work`` at the first progress with a plan."""

    def __init__(self, work):
        self.work = work

    def __call__(self, progress):
        work = self.work if progress.objective is not None else None
        if work is not None:
            self.work = None
            work(progress)


def test_progress_is_printed(model, cluster, capsys):
    stagewright.plan(model, cluster, 3, "exact", on_progress=stagewright.print_progress)
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r" +\d+\.\d s   iteration \S+ \S+   bound \S+ \S+", last)


def test_names():
    for name in stagewright.__all__:
        assert getattr(stagewright, name) is not None
    assert {*stagewright.__all__, "__version__"} <= {*dir(stagewright)}
    assert stagewright.__version__ == importlib.metadata.version("stagewright")
    with pytest.raises(AttributeError, match="no attribute 'magic'"):
        stagewright.magic  # noqa: B018


def test_schedules_several_stages_on_a_device_with_split_backwards():
    answer = stagewright.schedule(2, [1, 1], [1, 1], device=[0, 0], weight_gradient=[1, 1])
    assert (answer.makespan, answer.bound) == (12, 12)
    assert {text[1] for text in answer.order[0]} == {"F", "I", "W"}


def test_a_job_shop_has_the_makespan_of_its_busiest_machine():
    answer = stagewright.jobshop([[(0, 3), (1, 2)], [(1, 2), (0, 4)]])
    assert (answer.status, answer.makespan, answer.bound) == (Status.OPTIMAL, 7, 7)
    assert answer.jobs == answer.machines == 2


def test_pairs_to_measure_are_chosen():
    answer = stagewright.estimate(RATES, choose="new", fraction=1.0)
    assert answer.pairs == tuple(("v100", rate.model) for rate in RATES.alone)
    assert len(stagewright.estimate(RATES, choose="new", fraction=0.01).pairs) == 1
    with pytest.raises(stagewright.InputError, match="either a workload or choose"):
        stagewright.estimate(RATES)


def test_schedules_and_partitions(model, cluster):
    answer = stagewright.schedule(3, (1, 1), (2, 2))
    assert (answer.status, answer.makespan) == (Status.OPTIMAL, 12)
    assert answer.result.timetable.makespan(answer.problem) == 12
    late = stagewright.schedule(3, (1, 1), (2, 2), kind="gpipe", in_flight=(2, 1))
    assert (late.status, late.makespan) == (Status.INFEASIBLE, None)
    exact, program = (
        stagewright.partition(model, cluster, 3, stages=2, backend=backend)
        for backend in ("recurrence", "highs")
    )
    assert program.partitions[0].bottleneck_seconds == pytest.approx(
        exact.partitions[0].bottleneck_seconds
    )


@pytest.fixture
def jobs():
    """Two jobs, one of which gains more from a v100."""
    rates = (("a", "v100", 40.0), ("a", "k80", 10.0), ("b", "v100", 12.0), ("b", "k80", 6.0))
    alone = tuple(Rate(model, 1, kind, rate) for model, kind, rate in rates)
    return Workload(tuple(Job(name, name, 7200.0) for name in "ab"), Throughputs(alone))


def test_jobs_are_allocated_run_in_rounds_and_simulated(jobs):
    pool = stagewright.parse_pool("v100=1,k80=1")
    result = stagewright.allocate(jobs, pool, "max-min")
    assert result.status is Status.OPTIMAL
    answer = stagewright.rounds(jobs, pool, "max-min", rounds=4)
    assert [len(one) for one in answer.rounds] == [2] * 4
    simulated = stagewright.simulate_cluster(pool, jobs, round_seconds=60.0, keep_assignments=True)
    assert (simulated.completed, simulated.jobs) == (2, 2)
    assert simulated.makespan_seconds == simulated.timeline.makespan_seconds
    assert all(one.assignments for one in simulated.timeline.rounds)
    stopped = stagewright.simulate_cluster(pool, jobs, round_seconds=60.0, stop=After(2))
    assert (stopped.status, stopped.rounds, stopped.completed) == ("interrupted", 2, 0)
    with pytest.raises(stagewright.InputError, match="colour: unknown field"):
        stagewright.simulate_cluster(pool, jobs, colour="red")
    with pytest.raises(stagewright.InputError, match="stop must have is_set"):
        stagewright.simulate_cluster(pool, jobs, stop=True)
    with pytest.raises(stagewright.InputError, match="stop must have is_set"):
        stagewright.run_cluster(jobs, pool, {}, "jobs", stop=True)


def test_a_job_is_placed_in_the_cloud():
    market = Market((series([3.0] * 9), series([0.5] * 9, name="p2.xlarge", gpu="k80")))
    answer = stagewright.cloud(market, {"v100": 1.0, "k80": 0.5}, v100_hours=3.0)
    assert answer.strategies["optimal"].dollars == pytest.approx(3.0)
    assert answer.plan[0].instance == "aws/us-east-1/p2.xlarge"
    assert sum(stay.end_seconds - stay.begin_seconds for stay in answer.stays) == 6 * 3600
    stopped = stagewright.cloud(market, {"v100": 1.0, "k80": 0.5}, v100_hours=3.0, stop=After(1))
    assert (stopped.status, list(stopped.strategies)) == (Status.INTERRUPTED, ["1xv100"])
    with pytest.raises(stagewright.InputError, match="stop must have is_set"):
        stagewright.cloud(market, {"v100": 1.0}, stop=True)
