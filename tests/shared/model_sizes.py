"""Parameters of an architecture as model cards count them."""

from stagewright.graphs.models.architecture import Architecture


def total_parameters(of: Architecture) -> int:
    """All parameters."""
    return sum(of.parameters().values())


def active_parameters(of: Architecture) -> int:
    """The parameters that one token uses: all but those of experts not chosen for it."""
    if of.experts is None:
        return total_parameters(of)
    sparse = sum(of.is_sparse(index) for index in range(of.layers))
    idle = of.experts.number - of.experts.per_token
    return total_parameters(of) - sparse * idle * 3 * of.hidden * of.experts.width
