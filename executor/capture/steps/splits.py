"""The dimensions along which aten operators can be divided without changing their results."""

from torch import fx

from stagewright.graphs.models.step_graph import Split


def splits_of(node: fx.Node) -> tuple[Split, ...]:
    """The splits."""
    return ()
