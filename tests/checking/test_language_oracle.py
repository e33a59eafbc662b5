"""The oracle of the language of plans: hand-computed optima, relations, an exhaustive schedule."""

import copy
import json
import random
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from language_instances import random_instance
from language_oracle import Language, best, evaluate, least_memory_fits
from language_prices import Instance, Stage
from language_schedule import TICK, best_schedule, build_tasks, fits, static_bytes
from profiles import slow_after
from schedule_oracle import Action, least_time

PROOFS = Path(__file__).resolve().parents[3] / "shared" / "data" / "proofs"
NONE = frozenset({"none"})
SINGLE = Language(False, frozenset(), False, NONE, False)  # disjoint single devices
MS = 1e-3
MB = 1e6


# Documents of hand-made cases, in milliseconds and megabytes.


def layer(forward, *backward, saved=0, output=0, parameters=0, samples=1, **further):
    """A layer measured at one size; ``backward`` is whole, or its two parts."""
    names = (
        ("backward_seconds",)
        if len(backward) == 1
        else ("input_gradient_seconds", "weight_gradient_seconds")
    )
    entry = {
        "microbatch_size": samples,
        "forward_seconds": forward * MS,
        "saved_bytes": saved * MB,
        "output_bytes": output * MB,
        **{name: time * MS for name, time in zip(names, backward, strict=True)},
    }
    if "update" in further:
        entry["update_seconds"] = further.pop("update") * MS
    return {"name": "l", "parameter_bytes": parameters * MB, "costs": [entry], **further}


def kinds(**costs):
    """A layer of several kinds: forward and backward times by kind."""
    entries = []
    for kind, times in costs.items():
        entries.append({**layer(*times)["costs"][0], "device_kind": kind})
    return {"name": "l", "parameter_bytes": 0.0, "costs": entries}


def model(*layers, samples=1, optimizer=0.0):
    return {
        "name": "m",
        "microbatch_size": samples,
        "layers": list(layers),
        "optimizer_bytes_per_parameter_byte": optimizer,
    }


def cluster(names="aa", latency=0, memory=1e6, host=None):
    """Devices of one-letter kinds; links carry a megabyte in a millisecond."""
    devices = [
        {"name": f"d{i}", "kind": kind, "memory_bytes": memory * MB} for i, kind in enumerate(names)
    ]
    for device in devices if host else ():
        device["host_bytes_per_second"] = host * MB / MS
    rows = [[None if i == j else MB / MS for j in range(len(names))] for i in range(len(names))]
    links = {"bandwidth_bytes_per_second": rows, "latency_seconds": latency * MS}
    return {"name": "c", "devices": devices, "links": links}


def optimum(language, microbatches, documents):
    """Milliseconds of the best plan, which keeps every rule."""
    found = best(*documents, microbatches, language)
    assert found is not None
    cost, broken = evaluate(*documents, microbatches, found[1])
    assert not broken
    assert cost == pytest.approx(found[0], rel=1e-9)
    return pytest.approx(found[0] / MS, rel=1e-9)


def fixed(documents, microbatches, *stages, split_backward=False):
    """Milliseconds of the best schedule of given stages."""
    instance = Instance(*documents, microbatches)
    tasks = build_tasks(instance, stages, split_backward)
    ticks, _ = best_schedule(instance, stages, tasks, inf)
    return pytest.approx(ticks * TICK / MS, rel=1e-9)


# Optima computed by hand.


def test_one_layer_on_one_device_is_the_sum():
    # 3 x (1 + 2); a second device without replication does not help.
    assert optimum(SINGLE, 3, (model(layer(1, 2)), cluster("a"))) == 9
    assert optimum(SINGLE, 3, (model(layer(1, 2)), cluster("aa"))) == 9


def test_two_stages_wait_for_the_first_and_the_last_transfer():
    # d1 works 3 x 2 from 1 + 1 on; the last gradient travels 1 and d0 works 1: 2 + 6 + 1 + 1.
    # One device alone would need 3 x 4 = 12.
    documents = model(layer(1, 1), layer(1, 1)), cluster(latency=1)
    assert optimum(SINGLE, 3, documents) == 10


def test_split_shares_are_whole_samples():
    # 3 samples over 2 devices: the larger share has 2, so F and B take 2 each; the all-reduce
    # carries 2 x (1/2) x 1 MB in 1: 2 + 2 + 1. One device alone: 3 + 3.
    split = Language(False, frozenset({"split"}), False, NONE, False)
    one = layer(3, 3, parameters=1, samples=3)
    assert optimum(split, 1, (model(one, samples=3), cluster())) == 5
    # The smaller share has 1 sample, fewer than 2.
    assert optimum(split, 1, (model({**one, "min_samples": 2}, samples=3), cluster())) == 6


def test_costs_between_and_below_measured_sizes():
    # Sizes 2 and 4 take 4 and 6: 3 samples take 5, 1 sample takes 2 (half of size 2).
    small, large = layer(4, 4, samples=2), layer(6, 6, samples=4)
    both = {**small, "costs": small["costs"] + large["costs"]}
    for samples, seconds in ((4, 6), (3, 5), (2, 4)):
        assert optimum(SINGLE, 1, (model(both, samples=samples), cluster("a"))) == 2 * seconds
    instance = Instance(model(both, samples=3), cluster(), 1)
    share = instance.seconds(Stage(0, 1, (0, 1)), (0, 1), "F")  # ceil(3 / 2) = 2 samples
    assert share == pytest.approx(4 * MS)
    instance = Instance(model(both, samples=2), cluster(), 1)
    assert instance.seconds(Stage(0, 1, (0, 1)), (0, 1), "F") == pytest.approx(2 * MS)


def test_split_over_two_kinds_waits_for_the_slower():
    # Proportional halves: max(1, 2) forward and backward, no parameters to reduce.
    documents = model(kinds(a=(2, 2), b=(4, 4)), samples=1), cluster("ab")
    documents[0]["microbatch_size"] = 2
    for entry in documents[0]["layers"][0]["costs"]:
        entry["microbatch_size"] = 2
    assert fixed(documents, 1, Stage(0, 1, (0, 1))) == 4


def test_round_robin_gives_the_faster_device_more():
    # d0 (1 + 1) takes two microbatches, d1 (2 + 2) takes one: 4, then the all-reduce takes 1.
    one = kinds(a=(1, 1), b=(2, 2))
    one["parameter_bytes"] = MB
    documents = model(one), cluster("ba")
    assert optimum(Language(), 3, documents) == 5
    assert optimum(SINGLE, 3, documents) == 6


def test_split_backward_lets_the_gradient_leave_earlier():
    # F 1, send 0.1, F 1, I 1, send 0.1, I 1, W 1. Whole backwards: one device alone, 2 x 3.
    documents = model(layer(1, 1, 1), layer(1, 1, 1)), cluster(latency=0.1)
    assert optimum(replace(SINGLE, split_backward=True), 1, documents) == 5.2
    assert optimum(SINGLE, 1, documents) == 6


def test_memory_for_one_microbatch_runs_one_after_the_other():
    # Parameters 1 MB twice, saved 1 MB: 3 MB hold one microbatch, and never both layers.
    # One microbatch takes 1 + 0.5 + 1 + 1 + 0.5 + 1 = 5. With 4 MB two are in flight: d1 works
    # 4 from 1.5 on, then 0.5 + 1.
    layers = layer(1, 1, saved=1, parameters=1), layer(1, 1, saved=1, parameters=1)
    assert optimum(SINGLE, 2, (model(*layers), cluster(latency=0.5, memory=3))) == 10
    assert optimum(SINGLE, 2, (model(*layers), cluster(latency=0.5, memory=4))) == 7
    assert best(model(*layers), cluster(memory=2.9), 2) is None
    assert not least_memory_fits(model(*layers), cluster(memory=2.9), 2)
    assert best(model(*layers), cluster(), 2, SINGLE, memory_limit=2.9 * MB) is None


def test_recomputation_holds_only_the_input():
    # As above with 3 MB: stage 0 has no input to hold. d1 works until 5.5, the gradient travels
    # 0.5, and B of d0 takes 1 + 1.
    layers = layer(1, 1, saved=1, parameters=1), layer(1, 1, saved=1, parameters=1)
    documents = model(*layers), cluster(latency=0.5, memory=3)
    for kind in ("full", "layer"):
        language = replace(SINGLE, recompute=frozenset({"none", kind}))
        assert optimum(language, 2, documents) == 8


def test_recomputation_layer_by_layer_needs_the_largest_layer():
    # One device, layers save 2 and 3 MB, inputs 0 and 1 MB. Whole stage: 5 MB during B; layer by
    # layer: 1 MB held and 3 more during B. F 2, B 2 + 2.
    documents = model(layer(1, 1, saved=2, output=1), layer(1, 1, saved=3)), cluster("a", memory=4)
    language = replace(SINGLE, recompute=frozenset({"none", "full", "layer"}))
    assert optimum(language, 1, documents) == 6
    full = replace(SINGLE, recompute=frozenset({"none", "full"}))
    # Two stages on the device hold 2 and then recompute 3: no boundary buffers fit beside them.
    assert best(*documents, 1, full) is None
    tight = documents[0], cluster("a", memory=3.9)
    assert not least_memory_fits(*tight, 1, language)


def test_offloading_frees_the_memory_between():
    # As above with 3 MB, a write takes 0.25: F of d0 at 0 and 1.25, the second output arrives at
    # 2.75, before d1 is done with the first at 3.5. d1 works until 5.5, then 0.5 + 1.
    layers = layer(1, 1, saved=1, parameters=1), layer(1, 1, saved=1, parameters=1)
    documents = model(*layers), cluster(latency=0.5, memory=3, host=4)
    assert optimum(replace(SINGLE, offload=True), 2, documents) == 7


def test_a_device_with_two_stages():
    # a, b, a: 1 + 0.5 + 1 + 0.5 + 1 each way. Without sharing all on a is best: 2 x (1 + 10 + 1).
    layers = kinds(a=(1, 1), b=(10, 10)), kinds(a=(10, 10), b=(1, 1)), kinds(a=(1, 1), b=(10, 10))
    documents = model(*layers), cluster("ab", latency=0.5)
    assert optimum(SINGLE, 1, documents) == 24
    assert optimum(replace(SINGLE, device_sharing=True), 1, documents) == 8


def test_all_reduces_take_turns():
    # Shares of a half: F 0.5 twice, B of stage 1 until 1.5, its all-reduce 1.5 to 4.5 beside B of
    # stage 0; then the other, 4.5 to 7.5.
    one = layer(1, 1, parameters=3, samples=2)
    stages = Stage(0, 1, (0, 1)), Stage(1, 2, (0, 1))
    assert fixed((model(one, one, samples=2), cluster()), 1, *stages) == 7.5


def test_optimizers_step_follows_the_all_reduce():
    # Alone: 2 x (1 + 1) + 2. Round-robin: 1 + 1, all-reduce 1, step 2.
    one = model(layer(1, 1, parameters=1, update=2))
    assert optimum(SINGLE, 2, (one, cluster("a"))) == 6
    assert optimum(Language(), 2, (one, cluster("aa"))) == 5


def test_a_channel_is_half_duplex():
    # Four transfers of 3 on one channel, F before the first, B after the last: 1 + 12 + 1.
    documents = model(layer(1, 1), layer(1, 1)), cluster(latency=3)
    assert fixed(documents, 2, Stage(0, 1, (0,)), Stage(1, 2, (1,))) == 14


def test_transfers_between_shares_divide_into_whole_samples():
    # 5 samples from 2 to 1 devices: ceil(5 / 2) = 3 samples a pair, 3/5 of 5 MB in 3.
    one = layer(5, 5, output=5, samples=5)
    instance = Instance(model(one, one, samples=5), cluster("aaa"), 1)
    assert instance.transfer_seconds(0, (0, 1), (2,)) == pytest.approx(3 * MS)
    # 6 pairs, one of them a device and itself: a sample a pair.
    assert instance.transfer_seconds(0, (0, 1, 2), (0, 1)) == pytest.approx(1 * MS)


# Relations.

SEEDS = range(24)
SMALLER = (
    replace(Language(), device_sharing=False),
    replace(Language(), replications=frozenset({"split"})),
    replace(Language(), split_backward=False),
    replace(Language(), recompute=NONE, offload=False),
    SINGLE,
)


def seconds(*arguments):
    found = best(*arguments)
    return inf if found is None else found[0]


@pytest.mark.parametrize("seed", slow_after(9, SEEDS))
def test_best_plans_keep_the_rules_and_larger_languages_are_no_slower(seed):
    documents = random_instance(seed)
    found = best(*documents)
    assert (found is not None) == least_memory_fits(*documents)
    if found is not None:
        cost, broken = evaluate(*documents, found[1])
        assert not broken
        assert cost == pytest.approx(found[0], rel=1e-9)
    whole = seconds(*documents)
    for language in SMALLER:
        part = seconds(*documents, language)
        assert whole <= part * (1 + 1e-9)
        assert (part < inf) == least_memory_fits(*documents, language)


@pytest.mark.parametrize("seed", slow_after(6, SEEDS[:15]))
def test_twice_the_times_is_twice_the_cost(seed):
    model, cluster, microbatches = random_instance(seed)
    slower, links = copy.deepcopy(model), copy.deepcopy(cluster)
    for entry in (entry for layer in slower["layers"] for entry in layer["costs"]):
        entry.update({key: 2 * time for key, time in entry.items() if key.endswith("_seconds")})
    rows = links["links"]["bandwidth_bytes_per_second"]
    rows[:] = [[value and value / 2 for value in row] for row in rows]
    links["links"]["latency_seconds"] *= 2
    for device in links["devices"]:
        if "host_bytes_per_second" in device:
            device["host_bytes_per_second"] /= 2
    double = seconds(slower, links, microbatches)
    assert double == pytest.approx(2 * seconds(model, cluster, microbatches), rel=1e-9)


@pytest.mark.parametrize("seed", slow_after(6, SEEDS[:15]))
def test_one_more_device_never_hurts(seed):
    model, cluster, microbatches = random_instance(seed)
    if len(cluster["devices"]) == 3:
        cluster["devices"].pop()
    more = copy.deepcopy(cluster)
    more["devices"].append({**cluster["devices"][0], "name": "more"})
    rows = more["links"]["bandwidth_bytes_per_second"]
    for row in rows:
        row[len(cluster["devices"]) :] = [1e9]
    rows[len(cluster["devices"]) :] = [[1e9] * len(cluster["devices"]) + [None]]
    assert seconds(model, more, microbatches) <= seconds(model, cluster, microbatches) * (1 + 1e-9)


# The schedule of fixed stages against an exhaustive search.


def by_every_order(instance, stages, tasks):
    """Ticks of the best schedule of fixed stages, by :mod:`schedule_oracle`."""
    actions = {}
    for (kind, index, microbatch), task in tasks.items():
        last = "B" if ("B", index, microbatch) in tasks else "W", index, microbatch
        stage = stages[index]
        size = instance.held(stage) if kind == "F" else 0
        if kind in ("B", "I"):
            size = instance.recomputed(stage, kind == "B")
        holds = [(device, size, last) for device in stage.runners(microbatch)] if size else []
        resources, before = frozenset(task.resources), tuple(task.after)
        actions[kind, index, microbatch] = Action(task.ticks, resources, before, tuple(holds))
    static = static_bytes(instance, stages)
    room = [have - used for have, used in zip(instance.memory, static, strict=True)]
    return least_time(actions, dict(enumerate(room)))


@pytest.mark.parametrize("seed", slow_after(20, range(50)))
def test_schedules_equal_an_exhaustive_search(seed):
    draw = random.Random(seed)
    model, cluster, _ = random_instance(seed)
    instance = Instance(model, cluster, 2)
    count, devices = len(model["layers"]), range(len(cluster["devices"]))
    cut = draw.randint(1, count)
    stages = []
    for start, stop in ((0, cut), (cut, count)) if cut < count else ((0, count),):
        group = tuple(sorted(draw.sample(devices, draw.randint(1, len(devices)))))
        replication = draw.choice(("split", "round-robin"))
        stage = Stage(start, stop, group, replication, draw.choice(("none", "none", "full")))
        stages.append(
            stage if instance.enough_samples(stage) else replace(stage, devices=group[:1])
        )
    stages = tuple(stages)
    # As much memory as one microbatch after the other needs, and a bit of what all need.
    part = draw.random() ** 2
    for device, (least, most) in enumerate(memory_range(instance, stages)):
        instance.memory[device] = least + part * (most - least)
    tasks = build_tasks(instance, stages, split_backward=len(stages) == 1)
    assert fits(instance, stages)
    found = best_schedule(instance, stages, tasks, inf)
    assert found[0] == by_every_order(instance, stages, tasks)


def memory_range(instance, stages):
    """Least bytes of each device for one microbatch at a time, and bytes for two at once."""
    for device, static in enumerate(static_bytes(instance, stages)):
        needs = [0, 0]
        for microbatch in (0, 1):
            mine = [stage for stage in stages if device in stage.runners(microbatch)]
            held = [instance.held(stage) for stage in mine]
            extra = [instance.recomputed(stage, whole=True) for stage in mine]
            needs[microbatch] = max(
                (sum(held[: index + 1]) + extra[index] for index in range(len(mine))), default=0
            )
        yield static + max(needs), static + sum(needs)


# The checker.


def test_the_checker_rejects_broken_plans():
    draw = random.Random(5)
    rejected = 0
    for seed in range(10):
        documents = random_instance(seed)
        found = best(*documents)
        if found is None:
            continue
        for broken in mutations(draw, found[1]):
            assert evaluate(*documents, broken)[1]
            rejected += 1
    assert rejected > 20


def mutations(draw, plan):
    """Plans that are surely broken."""
    count = len(plan["schedule"]["actions"])
    chosen = draw.randrange(count)
    missing, twice, long, early = (copy.deepcopy(plan) for _ in range(4))
    del missing["schedule"]["actions"][chosen]
    twice["schedule"]["actions"].append(twice["schedule"]["actions"][chosen])
    long["schedule"]["actions"][chosen]["finish_seconds"] += 1e-5
    for entry in early["schedule"]["actions"]:
        if entry["action"] == early["schedule"]["actions"][-1]["action"]:
            entry["start_seconds"] = entry["start_seconds"] - entry["finish_seconds"]
            entry["finish_seconds"] = 0.0
    yield from (missing, twice, long, early)


# Plans that were found by hand.


@pytest.mark.skipif(not PROOFS.exists(), reason="the plans found by hand are not here")
@pytest.mark.parametrize("name", ["interleaved", "roundrobin", "iw", "infeasible"])
def test_plans_found_by_hand_are_reached(name):
    model, cluster, plan = (
        json.loads((PROOFS / f"{name}.{kind}.json").read_text())
        for kind in ("model", "cluster", "plan")
    )
    cost, broken = evaluate(model, cluster, plan["microbatches"], plan)
    assert not broken
    assert seconds(model, cluster, plan["microbatches"]) <= cost * (1 + 1e-9)
