"""Rate sets of constants that a test chooses."""

from stagewright.graphs.machines.rates import RateSet, Reached, Spread


def own_rates(reached: Reached) -> RateSet:
    """A set with these constants, by hand."""
    return RateSet(
        "by-hand", "megatron", ("h100",), "none", "by hand", "not fitted", reached,
        Spread(0.9, 1.2), Spread(0.8, 1.3), Spread(0.95, 1.05),
    )  # fmt: skip
