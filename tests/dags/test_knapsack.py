"""The best options within a capacity, against every choice; what is read of Piper's files."""

import json
from itertools import pairwise, product
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.formulations.dags.piper import Edge, LayerOption, piper_problem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.piper import read_piper
from stagewright.solvers.dags.knapsack import choose

ITEMS = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    min_size=1,
    max_size=6,
)


@examples(400)
@given(items=ITEMS, capacity=st.integers(0, 40), most=st.sampled_from([3.0, 12.0, inf]))
def test_the_best_options_equal_every_choice(items, capacity, most):
    fitting = [one for one in product(*items) if sum(size for _, size in one) <= capacity]
    right = min((sum(time for time, _ in one) for one in fitting), default=inf)
    first = np.cumsum([0, *map(len, items)])
    time, size = np.array([one for its in items for one in its], dtype=float).T.copy()
    chosen = choose(first, time, size, float(capacity), most)
    if right == inf or right > most:
        assert not len(chosen)
        return
    assert all(a <= o < b for a, o, b in zip(first[:-1], chosen, first[1:], strict=True))
    assert time[chosen].sum() == right
    assert size[chosen].sum() <= capacity


@examples(400)
@given(seed=st.integers(0, 10**6))
def test_the_best_options_of_more_items(seed):
    """Against the least time for every whole capacity."""
    random = np.random.default_rng(seed)
    counts = random.integers(1, 4, 12)
    first = np.cumsum([0, *counts])
    time, size = random.integers(1, 60, (2, first[-1])).astype(float)
    capacity = int(random.integers(12, 60) * 6)
    best = np.zeros(capacity + 1)
    for a, b in pairwise(first):
        rows = [np.full(capacity + 1, inf) for _ in range(a, b)]
        for row, o in zip(rows, range(a, b), strict=True):
            row[int(size[o]) :] = time[o] + best[: capacity + 1 - int(size[o])]
        best = np.min(rows, axis=0)
    assert not len(choose(first, time, size, float(capacity), best[capacity] - 1))
    for most in (best[capacity], inf) if best[capacity] < inf else ():
        chosen = choose(first, time, size, float(capacity), most)
        assert time[chosen].sum() == best[capacity]
        assert size[chosen].sum() <= capacity


def document():
    def way(name, fw, bw):
        return {"id": name, "timePerSample": 2.0, "parameterSize": 3.0, "memoryUsageA": 4.0,
                "memoryUsageB": 5.0, "syncTimeFw": fw, "syncTimeBw": bw}  # fmt: skip

    return {
        "maxDevices": 2, "maxMemoryPerDevice": 9.0, "bandwidth": 8.0, "mbsInBatch": 6,
        "nodes": [
            {"id": 7, "name": "x", "TMPCs": {"1": [way("vanilla", {}, {"5": 1.0})]}},
            {"id": 5, "name": "x", "TMPCs": {"2": [way("vanilla", {"7": 2.0}, {})]}},
        ],
        "edges": [{"sourceId": 7, "destId": 5, "communicationCost": 10.0}],
    }  # fmt: skip


def read(tmp_path, content):
    file = tmp_path / "workload.json"
    file.write_text(json.dumps(content))
    return read_piper(file)


def test_a_workload_becomes_a_problem(tmp_path):
    problem = piper_problem(read(tmp_path, document()), devices=3)
    assert [layer.name for layer in problem.layers] == ["x#7", "x#5"]
    assert problem.edges == (Edge(0, 1, 10.0),)
    assert (problem.devices, problem.memory, problem.bandwidth, problem.samples) == (3, 9, 8, 6)
    assert problem.layers[0].options[1] == (LayerOption("vanilla", 2, 3, 4, 5, {0: 1.0}),)
    assert problem.layers[1].options[2] == (LayerOption("vanilla", 2, 3, 4, 5, {0: 2.0}),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("bandwidth"), "bandwidth"),
        (lambda d: d["nodes"][1].update(id=7), "two nodes have the same id"),
        (lambda d: d["edges"][0].update(destId=4), r"edges\[0\] names node 4"),
        (lambda d: d["edges"].append(d["edges"][0]), r"edges\[0\] appears twice"),
        (lambda d: d["nodes"][0]["TMPCs"]["1"][0]["syncTimeBw"].clear(), r"node 7, TMPCs\[1\]"),
        (lambda d: d["nodes"][0]["TMPCs"]["1"][0].update(timePerSample=-1), "timePerSample"),
    ],
)
def test_what_makes_no_workload_is_refused(tmp_path, change, message):
    content = document()
    change(content)
    with pytest.raises(InputError, match=message):
        read(tmp_path, content)
