"""Backward-first plans of tiny problems, beside an oracle that was written from the documents.

The oracle checks the plan and knows the best of all orders (two streams: of both streams); no bound
is above it, and a plan that it finds faster is accepted.
"""

import copy
import json
import random

import pytest
import window_oracle as oracle
from profiles import slow_after

import stagewright
from stagewright.formulations.backprop.orders import OutOfOrder
from stagewright.formulations.forms.answers import Status
from stagewright.formulations.plans.plan import load_plan, save_plan
from stagewright.solvers.planners.steps.proposal import Choices

MB = 1e6
KINDS = ("forward", "input_gradient", "weight_gradient")


def documents_of(seed):
    """Training, microbatches, model and cluster; times have no common unit."""
    draw = random.Random(seed)
    training = ("data", "pipeline", "single")[seed % 3]
    count = draw.choice((1, 2, 3) if training == "single" else (2, 3))
    microbatches = 1 if count == 3 else draw.choice((1, 2))
    layers = []
    for number in range(count):
        cost = {f"{kind}_seconds": draw.choice((1, 2, 3, 4, 1.37)) for kind in KINDS}
        if draw.random() < 0.8:
            cost |= {f"{kind}_share": draw.choice((0.1, 0.25, 0.5, 0.9)) for kind in KINDS}
        if draw.random() < 0.4:
            cost["update_seconds"] = draw.choice((0.5, 1))
        cost |= {"microbatch_size": 3, "saved_bytes": draw.randint(1, 20) * MB}
        cost["output_bytes"] = draw.randint(1, 6) * MB
        size = draw.randint(1, 10) * MB
        layers.append({"name": f"l{number}", "parameter_bytes": size, "costs": [cost]})
    names = ("a",) if training == "single" else ("a", "b")
    rate = draw.choice((2 * MB, 10 * MB))
    return (
        training,
        microbatches,
        {
            "format": "stagewright-model",
            "version": 1,
            "name": "tiny",
            "source": "measured: by hand",
            "microbatch_size": 3,
            "layers": layers,
        },
        {
            "format": "stagewright-cluster",
            "version": 1,
            "name": "tiny",
            "devices": [{"name": n, "kind": "k", "memory_bytes": 1e9} for n in names],
            "links": {
                "bandwidth_bytes_per_second": [
                    [None if a == b else rate for b in names] for a in names
                ],
                "latency_seconds": 0.25,
            },
        },
    )


def written(folder, name, document):
    """The path of a document."""
    (folder / name).write_text(json.dumps(document))
    return folder / name


def best_of(training, costs, microbatches):
    """The least time of one stream, and of two."""
    one = oracle.best_order(costs, microbatches)
    return one, oracle.best_of_two_streams(costs, microbatches) if training == "single" else one


@pytest.mark.parametrize("seed", slow_after(8, range(90)))
def test_plans_keep_the_rules_and_are_the_best_order(seed, tmp_path):
    """In one stream always, and proved so; in two streams the order is searched for."""
    training, microbatches, model, cluster = documents_of(seed)
    chain = stagewright.load_model(written(tmp_path, "model.json", model))
    machines = stagewright.load_cluster(written(tmp_path, "cluster.json", cluster))
    choices = Choices(out_of_order=OutOfOrder(training))
    result = stagewright.plan(chain, machines, microbatches, "ooo", choices=choices)
    save_plan(result.plan, tmp_path / "plan.json")
    plan = json.loads((tmp_path / "plan.json").read_text())
    seconds = oracle.verify(plan, model, cluster)
    assert not stagewright.check(result.plan, chain, machines)
    simulated = stagewright.simulate(result.plan, chain, machines)
    assert simulated.iteration_seconds == pytest.approx(seconds)
    best = best_of(training, oracle.costs_of(plan, model, cluster), microbatches)
    assert seconds >= min(best) * (1 - 1e-9)
    if training == "single":
        assert seconds <= min(best) * 1.01
    else:
        assert seconds == pytest.approx(min(best))
        assert result.status is Status.OPTIMAL
    for bound in plan["certificate"]["bounds"]:
        if "backward-first" in bound["plans"]["schedules"]:
            least = min(best[: bound["plans"].get("streams", 1)])
            assert bound["seconds"] <= least * (1 + 1e-9), bound["proved_by"]


@pytest.mark.parametrize("seed", slow_after(6, range(60)))
def test_the_check_and_the_oracle_agree_about_changed_plans(seed, tmp_path):
    training, microbatches, model, cluster = documents_of(seed)
    chain = stagewright.load_model(written(tmp_path, "model.json", model))
    machines = stagewright.load_cluster(written(tmp_path, "cluster.json", cluster))
    choices = Choices(out_of_order=OutOfOrder(training))
    result = stagewright.plan(chain, machines, microbatches, "ooo", choices=choices)
    save_plan(result.plan, tmp_path / "plan.json")
    plan, draw = json.loads((tmp_path / "plan.json").read_text()), random.Random(seed)
    for _ in range(12):
        changed = copy.deepcopy(plan)
        change(changed["schedule"]["actions"], draw)
        found = load_plan(written(tmp_path, "changed.json", changed))
        broken = [v for v in stagewright.check(found, chain, machines) if v.rule != "certificate"]
        assert bool(broken) == refused(changed, model, cluster)


def change(actions, draw):
    """Move, shorten, swap or put into the other stream, on all devices of an action."""
    chosen = draw.choice(actions)["action"]
    other, way = draw.choice(actions)["action"], draw.choice(("move", "shorten", "swap", "stream"))
    for one in actions:
        if way == "swap" and one["action"] in (chosen, other):
            one["action"] = other if one["action"] == chosen else chosen
        elif one["action"] == chosen:
            span = one["finish_seconds"] - one["start_seconds"]
            if way == "move":
                one["start_seconds"] += 0.25
                one["finish_seconds"] += 0.25
            elif way == "shorten":
                one["finish_seconds"] -= span / 100
            elif way == "stream":
                one["stream"] = None if one.get("stream") else "sub"


def refused(plan, model, cluster):
    """Whether the oracle finds a broken rule."""
    try:
        oracle.verify(plan, model, cluster)
    except oracle.WrongError:
        return True
    return False


def two_layers():
    """A layer whose W leaves room, after one whose W takes room; the other kernels take all."""
    layers = []
    for name, shares in (("first", (1, 1, 0.7)), ("last", (1, 1, 0.3))):
        cost = dict(zip((f"{kind}_share" for kind in KINDS), shares, strict=True))
        cost |= dict(zip((f"{kind}_seconds" for kind in KINDS), (1.0, 2.0, 3.0), strict=True))
        cost |= {"microbatch_size": 3, "saved_bytes": MB, "output_bytes": MB}
        layers.append({"name": name, "parameter_bytes": MB, "costs": [cost]})
    _, _, model, cluster = documents_of(2)
    return {**model, "layers": layers}, cluster


def test_a_bound_that_two_streams_undercut_speaks_of_one_stream(tmp_path):
    """Both W side by side, one in either stream, take 9 s; the planner finds 12 s in one stream."""
    model, cluster = two_layers()
    chain = stagewright.load_model(written(tmp_path, "model.json", model))
    machines = stagewright.load_cluster(written(tmp_path, "cluster.json", cluster))
    plan = stagewright.plan(
        chain, machines, 1, "ooo", choices=Choices(out_of_order=OutOfOrder("data"))
    ).plan
    save_plan(plan, tmp_path / "plan.json")
    faster = json.loads((tmp_path / "plan.json").read_text())
    times = {"1I0": (0, 2), "0I0": (2, 4), "1W0": (4, 7), "0W0": (4, 7), "0F0": (7, 8)}
    times["1F0"] = (8, 9)
    for one in faster["schedule"]["actions"]:
        one["start_seconds"], one["finish_seconds"] = times[one["action"]]
        one["stream"] = "sub" if one["action"] == "0W0" else None
    faster["predicted"] |= {"iteration_seconds": 9.0, "bubble": 0.0}
    del faster["certificate"]
    assert oracle.verify(faster, model, cluster) == 9
    found = load_plan(written(tmp_path, "faster.json", faster))
    assert not stagewright.check(found, chain, machines)
    undercut = [one for one in plan.certificate.bounds if one.seconds > 9]
    assert any("backward-first" in one.plans.schedules for one in undercut)
    for one in undercut:
        if "backward-first" in one.plans.schedules:
            assert "one stream" in one.plans.phrase("every")
            assert "one stream" in one.plans.schedule_phrase()


@pytest.mark.parametrize("limits", [{"gap": 0.01}, {"time_limit": 1e-4}])
def test_a_search_that_ends_early_has_tried_two_streams(limits, tmp_path):
    """One stream is optimal in its own class at once, and no answer if two streams are faster."""
    model, cluster = two_layers()
    for layer in model["layers"]:
        layer["costs"][0] |= {"input_gradient_share": 0.2, "forward_share": 0.2}
    chain = stagewright.load_model(written(tmp_path, "model.json", model))
    machines = stagewright.load_cluster(written(tmp_path, "cluster.json", cluster))
    choices = Choices(out_of_order=OutOfOrder("single"))
    result = stagewright.plan(chain, machines, 1, "ooo", choices=choices, **limits)
    assert result.plan.uses_two_streams
    assert result.cost < 12
