"""Costs that are learned from runs, and the rounds of planning by them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from random_steps import graphs
from scipy.optimize import lsq_linear

from stagewright.executor.programs.operators.placed import scheduled_operators
from stagewright.executor.programs.trace import Trace, TracedStep
from stagewright.formulations.operators.plan import operator_problem
from stagewright.formulations.operators.splitting import split_graph
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MIN_BANDWIDTH
from stagewright.graphs.machines.cluster import Link, from_matrix, uniform_servers
from stagewright.graphs.models.operators.cost_book import (
    CostBook,
    Drift,
    Observation,
    Sent,
    known_as,
)
from stagewright.graphs.models.operators.step_graph import (
    DividedTimes,
    Node,
    Output,
    Split,
    StepGraph,
    data_parallel,
)
from stagewright.service.operators.rounds import OperatorRounds
from stagewright.solvers.operators.greedy import _listed
from stagewright.solvers.operators.planning import plan_operators

TWO = uniform_servers(1, 2, Link(1e9, 1e-6), kind="a")
GIVEN = Link(5e8, 3e-5)


def sent(pairs):
    found = None
    for size, seconds in pairs:
        one = Sent("x", "y", 1, size, seconds, size * size, size * seconds)
        found = one if found is None else found.plus(one)
    return found


@given(
    st.floats(1e-6, 1e-2),
    st.floats(1e7, 1e11),
    st.lists(st.integers(1, 1000), min_size=2, max_size=20, unique=True),
)
@examples(500)
def test_a_planted_line_is_found(latency, bandwidth, sizes):
    pairs = [(1e5 * size, latency + 1e5 * size / bandwidth) for size in sizes]
    line = sent(pairs).line(GIVEN)
    for size, seconds in pairs:
        predicted = line.latency_seconds + size / line.bandwidth_bytes_per_second
        assert predicted == pytest.approx(seconds, rel=1e-5)


@given(
    st.floats(1e2, 1e9),
    st.lists(
        st.tuples(st.floats(0, 1), st.floats(1e-6, 10.0)), min_size=2, max_size=20, unique=True
    ),
)
@examples(500)
def test_the_line_has_the_least_squares_of_lines_that_a_link_may_have(largest, pairs):
    """The reference is SciPy's bounded least squares on the samples themselves."""
    pairs = [(largest * share, seconds) for share, seconds in pairs]
    line = sent(pairs).line(GIVEN)
    if line.bandwidth_bytes_per_second == GIVEN.bandwidth_bytes_per_second:
        return  # sizes do not tell
    sizes, seconds = (np.array(column) for column in zip(*pairs, strict=True))
    columns = np.column_stack([np.ones(len(sizes)), sizes / largest])
    most = [np.inf, largest / MIN_BANDWIDTH]
    best = lsq_linear(columns, seconds, (0, most), method="bvls")
    predicted = line.latency_seconds + sizes / line.bandwidth_bytes_per_second
    assert ((predicted - seconds) ** 2).sum() <= 2 * best.cost * (1 + 1e-6) + 1e-12


def test_a_link_slower_than_clusters_may_have_keeps_its_mean_time():
    """100 kB/s becomes 1 MB/s, with what is missing in the latency."""
    line = sent([(1e3, 1e-2), (3e3, 3e-2)]).line(GIVEN)
    assert line.bandwidth_bytes_per_second == MIN_BANDWIDTH
    assert line.latency_seconds + 2e3 / MIN_BANDWIDTH == pytest.approx(2e-2)


def test_sizes_that_do_not_tell_the_bandwidth():
    rate = GIVEN.bandwidth_bytes_per_second
    for pairs in ([(1e6, 3e-3)], [(1e6, 3e-3), (1e6, 3e-3)], [(1e5, 4e-3), (1.9e6, 2e-3)]):
        line = sent(pairs).line(GIVEN)
        assert line.bandwidth_bytes_per_second == rate
        assert line.latency_seconds == pytest.approx(3e-3 - 1e6 / rate)
    assert sent([(1e6, 1e-4)]).line(GIVEN).latency_seconds == 0


def test_replicas_are_one_operator():
    names = ("conv", "conv@2", "conv/part1", "conv@0/part1", "conv.0@mean", "a@b@1")
    assert [known_as(name) for name in names] == [
        "conv", "conv", "conv/part1", "conv/part1", "conv.0@mean", "a@b",
    ]  # fmt: skip
    seen = Observation((("conv@0", "s0g0", 1.0), ("conv@1", "s0g1", 3.0)), (), 4)
    (one,) = CostBook().updated(seen, TWO)[0].computed
    assert (one.operator, one.kind, one.count, one.seconds) == ("conv", "a", 8, 2.0)


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 5)), min_size=1, max_size=6))
@examples(200)
def test_the_mean_is_over_all_steps(rounds):
    book = CostBook()
    for count, seconds in rounds:
        book, _ = book.updated(Observation((("f", "s0g0", seconds),), (), count), TWO)
    (one,) = book.computed
    counts, values = zip(*rounds, strict=True)
    assert one.count == sum(counts)
    assert one.seconds == pytest.approx(np.average(values, weights=counts), abs=1e-12)


def test_drift_is_the_distance_from_what_was_known():
    def seen(f, g, link):
        operators = (("f", "s0g0", f), ("g", "s0g0", g))[: 2 if g else 1]
        return Observation(operators, (("s0g0", "s0g1", 1e6, link),), 1)

    book, drift = CostBook().updated(seen(2.0, None, 0.1), TWO)
    assert drift == Drift(0.0, 0.0, 2)
    assert not drift.is_stable(1.0)
    book, drift = book.updated(seen(4.0, 1.0, 0.1), TWO)
    assert (drift.operators, drift.learned) == (1.0, 1)  # f is 3 now
    book, drift = book.updated(seen(2.0, 1.6, 0.3), TWO)
    assert drift.operators == pytest.approx((1.0 + 0.6) / 4.0)
    assert drift.links == pytest.approx((0.3 - 0.1) / 0.1)
    assert drift.learned == 0
    assert not drift.is_stable(1.9)
    assert drift.is_stable(2.1)


def test_many_rounds_do_not_hide_a_change():
    book = CostBook()
    for _ in range(50):
        book, _ = book.updated(Observation((("f", "s0g0", 1.0),), (), 10), TWO)
    _, drift = book.updated(Observation((("f", "s0g0", 2.0),), (), 10), TWO)
    assert drift.operators == pytest.approx(1.0)


def test_a_change_from_nothing_is_not_stable():
    book, _ = CostBook().updated(Observation((("f", "s0g0", 0.0),), (), 1), TWO)
    _, same = book.updated(Observation((("f", "s0g0", 0.0),), (), 1), TWO)
    _, drift = book.updated(Observation((("f", "s0g0", 5.0),), (), 1), TWO)
    assert same.is_stable(0.0)
    assert not drift.is_stable(1e9)


ROUNDS = st.lists(
    st.builds(
        Observation,
        st.lists(
            st.tuples(
                st.sampled_from(["f", "f@1", "g", "f/batch/2/part"]),
                st.sampled_from(["s0g0", "s0g1"]),
                st.floats(1e-6, 10.0),
            ),
            max_size=4,
        ).map(tuple),
        st.lists(
            st.tuples(
                st.just("s0g0"), st.just("s0g1"), st.floats(1, 1e9), st.floats(1e-6, 10.0)
            ),
            max_size=4,
        ).map(tuple),
        st.just(3),
    ),
    min_size=1,
    max_size=5,
)  # fmt: skip


@given(ROUNDS, st.data())
@examples(200)
def test_rounds_in_any_order_are_one_large_round(rounds, data):
    def learned(observations):
        book = CostBook()
        for one in observations:
            book, _ = book.updated(one, TWO)
        return book

    books = [learned(rounds), learned(data.draw(st.permutations(rounds)))]
    operators = tuple(each for one in rounds for each in one.operators)
    transfers = tuple(each for one in rounds for each in one.transfers)
    books.append(learned([Observation(operators, transfers, 3)]))
    first, *others = (
        {(one.operator, one.kind): (one.count, one.seconds) for one in book.computed}
        | {
            (one.source, one.target): (
                one.count, one.bytes, one.seconds, one.bytes_squared, one.bytes_seconds,
            )
            for one in book.sent
        }
        for book in books
    )  # fmt: skip
    for other in others:
        assert first.keys() == other.keys()
        for key, values in first.items():
            assert other[key] == pytest.approx(values, rel=1e-9)


@pytest.mark.parametrize(
    ("operators", "transfers", "count", "message"),
    [
        ([("f", "s0g0", -1.0)], [], 1, "'f' on 's0g0': seconds must be finite and not negative"),
        ([], [("s0g0", "s0g1", -1.0, 1.0)], 1, "'s0g0' to 's0g1': bytes must be finite and not"),
        ([], [("s0g0", "s0g1", 1.0, -1.0)], 1, "'s0g0' to 's0g1': seconds must be finite and"),
        ([], [("s0g0", "s0g0", 1.0, 1.0)], 1, "'s0g0' to 's0g0': they are between two devices"),
        ([("f", "s0g0", 1.0)], [], 0, "count must be at least 1, got 0"),
        ([("f", "zz", 1.0)], [], 1, "'zz' was measured, which is no device of '1x2'"),
        ([], [("zz", "s0g1", 1.0, 1.0)], 1, "'zz' was measured, which is no device of '1x2'"),
        ([], [("s0g0", "zz", 1.0, 1.0)], 1, "'zz' was measured, which is no device of '1x2'"),
    ],
)
def test_samples_that_cannot_be_are_refused(operators, transfers, count, message):
    with pytest.raises(InputError, match=message) as caught:
        CostBook().updated(Observation((*operators,), (*transfers,), count), TWO)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda book: book["computed"].append(book["computed"][0]), "'f', 'a' is listed twice"),
        (lambda book: book["sent"].append(book["sent"][0]), "'s0g0', 's0g1' is listed twice"),
        (lambda book: book["computed"][0].update(seconds=-1.0), r"computed\[0\].*not negative"),
        (
            lambda book: book["computed"][0].update(operator="f/0"),
            r"computed\[0\].*'f/batch/2/part'",
        ),
        (lambda book: book["computed"][0].update(mean=1.0), r"computed\[0\].mean: unknown field"),
        (lambda book: book.update(version=2), "version 2 is not known"),
    ],
)
def test_a_broken_book_is_named_in_one_line(change, message, tmp_path):
    seen = Observation((("f", "s0g0", 1.0),), (("s0g0", "s0g1", 1e6, 2e-3),), 1)
    path = tmp_path / "costs.json"
    documents.write(CostBook, CostBook().updated(seen, TWO)[0], path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(InputError, match=message) as caught:
        documents.read(CostBook, path)
    assert "\n" not in str(caught.value)


def test_a_book_of_other_devices_is_refused():
    book = CostBook(sent=(sent([(1e6, 2e-3)]),))
    with pytest.raises(InputError, match="'x' was measured, which is no device of '1x2'"):
        book.priced(one_operator(), TWO)


@given(graphs(8))
@examples(100)
def test_what_is_not_known_takes_no_time(graph):
    names = [node.name for node in graph.nodes if node.role == "forward"]
    seen = Observation(tuple((name, "s0g0", 0.5) for name in names[::2]), (), 1)
    book, _ = CostBook().updated(seen, TWO)
    priced, cluster = book.priced(graph, TWO)
    assert cluster == TWO
    problem = operator_problem(priced, cluster)
    assert problem.unmeasured == tuple(names[1::2])
    expected = [0.5 if node.name in names[::2] else 0.0 for node in graph.nodes]
    assert problem.seconds.tolist() == [[one, one] for one in expected]
    assert priced.structure() == graph.structure()
    left = len(names) - len(names[::2])
    assert priced.source == f"learned; operators not measured: {left} of {len(names)} on a"


def test_only_measured_pairs_get_new_links(tmp_path):
    seen = Observation((), (("s0g0", "s0g1", 1e6, 2e-3), ("s0g0", "s0g1", 3e6, 5e-3)), 1)
    book, _ = CostBook().updated(seen, TWO)
    documents.write(CostBook, book, tmp_path / "costs.json")
    assert documents.read(CostBook, tmp_path / "costs.json") == book
    _, cluster = book.priced(data_parallel(one_operator(), 1), TWO)
    assert cluster.bandwidth[0, 1] == pytest.approx(1e6 / 1.5e-3)
    assert cluster.latency[0, 1] == pytest.approx(5e-4)
    assert (cluster.bandwidth[1, 0], cluster.latency[1, 0]) == (1e9, 1e-6)
    assert cluster.devices == TWO.devices


def one_operator():
    return StepGraph("one", "", 8, (Node("f", "mm", "forward", (), (Output(4.0),)),))


class Machine:
    """A cluster whose true times are known: it carries out a plan's placement."""

    def __init__(self, graph, cluster):
        self.graph, self.cluster, self.plans = graph, cluster, []

    def measure(self, plan):
        self.plans.append(plan)
        placement = {one.operator: one.device for one in plan.operators}
        graph = split_graph(self.graph, plan.splits)
        problem = operator_problem(graph, self.cluster)
        devices = np.array([problem.devices.index(placement[name]) for name in problem.names])
        table = _listed(problem, devices)
        start = dict(zip(problem.names, table.start.tolist(), strict=True))
        finish = dict(zip(problem.names, table.finish.tolist(), strict=True))
        operators = tuple(
            replace(one, start_seconds=start[one.operator], finish_seconds=finish[one.operator])
            for one in plan.operators
        )
        transfers, sizes = [], {}
        for one in plan.transfers:
            outputs = graph.nodes[graph.index[one.operator]].outputs
            size = outputs[one.output].bytes if one.output < len(outputs) else 0.0
            link = self.cluster.index[placement[one.operator]], self.cluster.index[one.device]
            took = self.cluster.latency[link] + size / self.cluster.bandwidth[link]
            begun = finish[one.operator]
            transfers.append(replace(one, start_seconds=begun, finish_seconds=begun + took))
            sizes[one.operator, one.output, one.device] = size
        timed = replace(plan, operators=operators, transfers=tuple(transfers))

        def with_bytes(action):
            if not action.targets:
                return action
            n, _, output = action.action.partition("SEND_O")
            name = plan.operators[int(n)].operator
            return replace(action, bytes=sizes[name, int(output), action.targets[0]])

        actions = tuple(with_bytes(one) for one in scheduled_operators(timed))
        steps = tuple(TracedStep(number, table.end, 0.0, actions) for number in range(3))
        return Trace(plan.digest, plan.model, "test", "none", 2, "float32", steps)


MEMORY = 1e9


def order(plan):
    return [(one.operator, one.device) for one in plan.operators]


@given(graphs(10), st.integers(1, 3), st.integers(1, 3), st.data())
@examples(300, quick=40)
def test_rounds_learn_the_machine_and_keep_the_best_plan(graph, devices, replicas, data):
    graph = data_parallel(graph, replicas)
    kinds = data.draw(st.sampled_from([("a", "a", "a"), ("a", "b", "a")]))
    slow = uniform_servers(1, devices, Link(1e9, 1e-5), memory_bytes=MEMORY, kind="a")
    cluster = replace(
        slow, devices=tuple(replace(one, kind=kinds[i]) for i, one in enumerate(slow.devices))
    )
    true = replace(
        graph,
        nodes=tuple(
            replace(node, seconds={"a": s, "b": 2 * s})
            for node in graph.nodes
            for s in [node.seconds.get("a", 0.0)]
        ),
    )
    slower = Link(2e8, 5e-5)
    there = uniform_servers(1, devices, slower, memory_bytes=MEMORY, kind="a")
    machine = Machine(true, replace(there, devices=cluster.devices))
    bare = replace(graph, nodes=tuple(replace(node, seconds={}) for node in graph.nodes))
    rounds = OperatorRounds(bare, cluster, "heft", most=6)
    start = rounds.start()
    assert start is not None
    found = list(rounds.run(start, machine.measure))
    assert 1 <= len(found) <= 6
    assert [one.plan for one in found] == machine.plans
    assert found[0].is_kept
    kept = [one for one in found if one.is_kept]
    assert kept[-1].seconds.measured == min(one.seconds.measured for one in found)
    for one in found[-1].costs.computed:
        node = next(node for node in true.nodes if known_as(node.name) == one.operator)
        assert one.seconds == pytest.approx(node.seconds[one.kind], abs=1e-9)
    for pair in found[-1].costs.sent:
        line = pair.line(Link(1e9, 1e-5))
        mean = pair.bytes / pair.count
        took = line.latency_seconds + mean / line.bandwidth_bytes_per_second
        truth = slower.latency_seconds + mean / slower.bandwidth_bytes_per_second
        assert took == pytest.approx(truth, rel=1e-6)
    last = found[-1]
    ended = last.number == 5 or last.is_stable
    if not ended:  # planning again gives what has been measured
        again = plan_operators(*last.costs.priced(bare, cluster), "heft").plan
        measured = [
            [(one.operator, one.device) for one in plan.operators] for plan in machine.plans
        ]
        assert again is not None
        assert [(one.operator, one.device) for one in again.operators] in measured


@pytest.mark.parametrize("join_seconds", [0.0, 1.0])
def test_a_division_that_was_slow_is_taken_back(join_seconds):
    """One operator of 2 s, halved at no cost, or with a join of 1 s that only a run shows."""
    cluster = uniform_servers(1, 2, Link(1e9, 1e-6), memory_bytes=MEMORY, kind="a")
    divided = DividedTimes(2, {"a": 1.2}, ({"a": 0.1},), ({"a": join_seconds},))
    graph = StepGraph(
        "one", "", 8,
        (
            Node("x", "placeholder", "input", (), (Output(4.0),)),
            Node("f", "mm", "forward", (("x", 0),), (Output(4.0),), {"a": 2.0},
                 splits=(Split("batch", 2, (0,), (0,), (divided,)),)),
            Node("g", "mm", "forward", (("f", 0),), (), {"a": 0.5}),
        ),
    )  # fmt: skip
    machine = Machine(graph, cluster)
    bare, _ = CostBook().priced(graph, cluster)
    assert bare.nodes[1].splits[0].measured == ()
    rounds = OperatorRounds(bare, cluster, "os-dpos")
    found = list(rounds.run(rounds.start(), machine.measure))
    names = [known_as(one.operator) for one in found[-1].costs.computed]
    assert set(names) == {
        "f", "g", "f/batch/2/cut0", "f/batch/2/part", "f/batch/2/join0",
    }  # fmt: skip
    priced, _ = found[-1].costs.priced(bare, cluster)
    assert priced.nodes == graph.nodes
    again = plan_operators(priced, cluster, "os-dpos").plan
    assert [len(one.plan.splits) for one in found] == [0, 1]
    assert len(again.splits) == (0 if join_seconds else 1)
    assert [one.is_kept for one in found] == [True, not join_seconds]


def test_nothing_fits():
    tiny = uniform_servers(1, 2, Link(1e9), memory_bytes=1e6, kind="a")
    node = one_operator().nodes[0]
    graph = replace(one_operator(), nodes=(replace(node, role="state", state_bytes=4e6),))
    assert OperatorRounds(graph, tiny).start() is None


def test_links_of_a_matrix_stay():
    cluster = from_matrix(TWO.devices, [[None, 2e9], [1e9, None]], servers=[["s0g0", "s0g1"]])
    seen = Observation((), (("s0g0", "s0g1", 1e6, 2e-3),), 1)
    book, _ = CostBook().updated(seen, cluster)
    _, linked = book.priced(one_operator(), cluster)
    assert linked.bandwidth[1, 0] == 1e9
    assert linked.servers == cluster.servers
