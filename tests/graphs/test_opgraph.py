import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.operators.opgraph import (
    Operator,
    OpGraph,
    linearise,
    topological_order,
)


def graph(edges: str, names: str | None = None, **fields: object) -> OpGraph:
    """Operators of a letter each; the k-th takes k s and k B in every respect."""
    pairs = tuple((edge[0], edge[1]) for edge in edges.split())
    letters = names or "".join(sorted({name for edge in pairs for name in edge}))
    operators = tuple(
        Operator(name, k, 2 * k, parameter_bytes=k, output_bytes=10 * k, saved_bytes=k)
        for k, name in enumerate(letters, start=1)
    )
    return OpGraph("test", "by hand", operators, pairs, **fields)  # type: ignore[arg-type]


def order(edges: str) -> str:
    return "".join(topological_order(graph(edges)))


def outputs(chain) -> list[float]:
    return [layer.costs[0].output_bytes for layer in chain.layers]


def names(chain) -> list[str]:
    return [layer.name for layer in chain.layers]


def test_branches_stay_in_one_piece():
    assert order("ab bc cf ad de ef") == "abcdef"


def test_a_late_source_stands_right_before_its_reader():
    assert order("bc cd ae de") == "bcdae"


def test_a_side_output_stands_right_behind_what_it_reads():
    assert order("ab bc cd bz") == "abzcd"


def test_numbers_in_names_count_by_value():
    operators = tuple(Operator(f"node{i}", 1, 1) for i in (1, 10, 9, 11))
    edges = tuple(pair for i in (9, 10) for pair in (("node1", f"node{i}"), (f"node{i}", "node11")))
    wide = OpGraph("wide", "by hand", operators, edges)
    assert topological_order(wide) == ("node1", "node9", "node10", "node11")


def test_an_output_crosses_every_cut_until_its_last_reader_and_counts_once():
    # a -> b -> c -> d, and a is read by c and d too.
    chain = linearise(graph("ab bc cd ac ad"))
    assert names(chain) == list("abcd")
    assert outputs(chain) == [10, 10 + 20, 10 + 30, 40]


def test_an_output_that_nobody_reads_crosses_no_cut():
    chain = linearise(graph("ab ac"))
    assert outputs(chain) == [10, 10, 30]


def test_layers_carry_the_operators_costs():
    chain = linearise(
        graph("ab", microbatch_size=8, device_kind="v100", optimizer_bytes_per_parameter_byte=1.0)
    )
    cost = chain.layers[1].costs[0]
    assert (cost.forward_seconds, cost.backward_seconds, cost.saved_bytes) == (2, 4, 2)
    assert cost.device_kind == "v100"
    assert chain.microbatch_size == cost.microbatch_size == 8
    assert chain.optimizer_bytes_per_parameter_byte == 1
    assert chain.parameter_bytes.tolist() == [1, 2]


def test_contraction_merges_parallel_branches():
    chain = linearise(graph("ab bc cf ad de ef fg"), contract=True)
    assert names(chain) == ["a", "b..f", "g"]
    assert outputs(chain) == [10, 60, 70]
    assert chain.layers[1].costs[0].forward_seconds == 2 + 3 + 4 + 5 + 6
    assert chain.layers[1].parameter_bytes == 2 + 3 + 4 + 5 + 6


def test_contraction_of_a_residual_block():
    chain = linearise(graph("ab bc cd ad de"), contract=True)
    assert names(chain) == ["a", "b..d", "e"]


def test_contraction_passes_over_outputs_of_no_bytes():
    operators = (*graph("ab bc").operators, Operator("z", 0, 0))
    masked = OpGraph("m", "by hand", operators, (("a", "b"), ("b", "c"), ("z", "a"), ("z", "c")))
    assert names(linearise(masked, contract=True)) == ["z", "a", "b", "c"]


def test_a_single_operator_and_unconnected_ones():
    assert names(linearise(graph("", "a"))) == ["a"]
    apart = linearise(graph("ab cd"))
    assert outputs(apart) == [10, 0, 30, 40]


def test_nine_hundred_operators_in_deep_and_wide_graphs():
    count = 900
    operators = tuple(Operator(f"n{i}", 1, 1, output_bytes=1) for i in range(count))
    line = tuple((f"n{i}", f"n{i + 1}") for i in range(count - 1))
    fan = tuple((f"n{i}", f"n{count - 1}") for i in range(count - 1))
    deep = linearise(OpGraph("deep", "by hand", operators, line + fan))
    assert outputs(deep)[-2] == count - 1
    wide = linearise(OpGraph("wide", "by hand", operators, fan))
    assert outputs(wide)[-2] == count - 1


@st.composite
def random_graphs(draw) -> OpGraph:
    size = draw(st.integers(1, 9))
    labels = draw(st.permutations([f"n{i}" for i in range(size)]))
    operators = tuple(
        Operator(label, draw(st.integers(0, 5)), 1, 1, draw(st.integers(0, 3)), 1)
        for label in sorted(labels)
    )
    pairs = [(a, b) for i, a in enumerate(labels) for b in labels[i + 1 :]]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=15)) if pairs else []
    return OpGraph("random", "by hand", operators, tuple(edges))


@given(random_graphs(), st.randoms())
def test_linearisation_equals_its_definition(given_graph: OpGraph, random):
    chain = linearise(given_graph)
    position = {name: i for i, name in enumerate(names(chain))}
    assert sorted(position) == sorted(operator.name for operator in given_graph.operators)
    assert all(position[a] < position[b] for a, b in given_graph.edges)
    by_name = {operator.name: operator for operator in given_graph.operators}
    for i, crossing in enumerate(outputs(chain)[:-1]):
        alive = {a for a, b in given_graph.edges if position[a] <= i < position[b]}
        assert crossing == sum(by_name[name].output_bytes for name in alive)
    # The order of what is given does not matter.
    operators, edges = list(given_graph.operators), list(given_graph.edges)
    random.shuffle(operators)
    random.shuffle(edges)
    shuffled = OpGraph("random", "by hand", tuple(operators), tuple(edges))
    assert linearise(shuffled) == chain


@given(random_graphs())
def test_contraction_keeps_every_cost_and_cuts_single_outputs_only(given_graph: OpGraph):
    whole, merged = linearise(given_graph), linearise(given_graph, contract=True)
    for field in ("forward_seconds", "backward_seconds", "saved_bytes"):
        totals = [
            sum(getattr(layer.costs[0], field) for layer in chain.layers)
            for chain in (whole, merged)
        ]
        assert totals[0] == pytest.approx(totals[1])
    assert whole.parameter_bytes.sum() == merged.parameter_bytes.sum()
    sizes = {operator.output_bytes for operator in given_graph.operators} | {0.0}
    assert set(outputs(merged)) <= sizes


@given(random_graphs())
def test_order_agrees_with_networkx(given_graph: OpGraph):
    digraph = nx.DiGraph(given_graph.edges)
    digraph.add_nodes_from(operator.name for operator in given_graph.operators)
    position = {name: i for i, name in enumerate(topological_order(given_graph))}
    closure = nx.transitive_closure_dag(digraph)
    assert np.all([position[a] < position[b] for a, b in closure.edges])


@pytest.mark.parametrize(
    ("edges", "letters", "message"),
    [
        ("", "", "has no operators"),
        ("", "aa", "two operators are named 'a'"),
        ("ax", "a", "edge a -> x names 'x', which is not an operator"),
        ("aa", "a", "form a cycle: a -> a"),
        ("ab bc cb", "abc", "form a cycle: b -> c -> b"),
    ],
)
def test_bad_graphs_are_refused(edges, letters, message):
    operators = tuple(Operator(letter, 1, 1) for letter in letters)
    pairs = tuple((edge[0], edge[1]) for edge in edges.split())
    with pytest.raises(InputError, match=message):
        OpGraph("bad", "by hand", operators, pairs)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_bad_costs_are_refused(value):
    with pytest.raises(InputError, match="operator 'a': forward_seconds must be finite"):
        Operator("a", value, 0)
    with pytest.raises(InputError, match="operator 'a': output_bytes must be finite"):
        Operator("a", 0, 0, output_bytes=value)
