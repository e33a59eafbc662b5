"""Random training steps as graphs of operators."""

from hypothesis import strategies as st

from stagewright.graphs.models.operators.step_graph import (
    DividedTimes,
    Node,
    Output,
    Split,
    StepGraph,
)

MEGABYTE = 1e6


@st.composite
def graphs(draw, most=8):
    """Operators in topological order; parameters, updates beside them, and orders without data."""
    nodes: list[Node] = []
    for i in range(draw(st.integers(2, most))):
        before = draw(st.lists(st.integers(0, max(0, i - 1)), max_size=min(i, 3)))
        sources = [nodes[j] for j in before if nodes[j].outputs]
        inputs = tuple((one.name, draw(st.integers(0, len(one.outputs) - 1))) for one in sources)
        role = "state" if not inputs and draw(st.booleans()) else "forward"
        hosts = [one.name for one in nodes if one.role == "state"]
        beside = draw(st.sampled_from(hosts)) if hosts and draw(st.integers(0, 4)) == 0 else None
        outputs = tuple(
            Output(draw(st.integers(0, 20)) * MEGABYTE) for _ in range(draw(st.integers(1, 2)))
        )
        ended = [one.name for one in nodes]
        after = draw(st.lists(st.sampled_from(ended), max_size=2, unique=True)) if i else ()
        nodes.append(
            Node(
                f"n{i}", "mm", role, inputs, outputs,
                {} if role == "state" else {"a": draw(st.integers(0, 20)) * 1e-3},
                state_bytes=draw(st.integers(1, 20)) * MEGABYTE if role == "state" else 0.0,
                beside=beside,
                after=tuple(after),
                splits=draw(splits(len(inputs), len(outputs))) if role == "forward" else (),
            )
        )  # fmt: skip
    return StepGraph("random", "test", 8, tuple(nodes))


@st.composite
def splits(draw, inputs, outputs):
    axis = st.sampled_from([None, 0])
    times = st.dictionaries(st.just("a"), st.integers(0, 9).map(lambda n: n * 1e-3))

    def measured(parts):
        return st.builds(
            DividedTimes,
            st.just(parts),
            times,
            st.tuples(*(times,) * inputs),
            st.tuples(*(times,) * outputs),
        )

    dimensions = draw(st.lists(st.sampled_from(["batch", "channel"]), unique=True))
    return tuple(
        Split(
            dimension,
            draw(st.sampled_from([2, 4, 6])),
            tuple(draw(axis) for _ in range(inputs)),
            tuple(draw(axis) for _ in range(outputs)),
            draw(st.sampled_from([2, 3]).flatmap(measured).map(lambda one: (one,)) | st.just(())),
        )
        for dimension in dimensions
    )
