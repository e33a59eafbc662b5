"""Rate sets: the request, the answer, and who answers."""

from typing import Annotated

from stagewright.graphs.machines.rates import (
    LeftOut,
    Reached,
    Spread,
    rate_sets,
    rates_named,
)
from stagewright.service.answers import Answer
from stagewright.service.options import Option
from stagewright.service.requests import Request


class RatesRequest(Request):
    """List the rate sets."""

    name: Annotated[str | None, Option("NAME", may_be_file=True)] = None
    """One set with its constants and its errors by model; or the JSON file of your own."""


class RateSetAnswer(Answer):
    """A rate set, with the mean of the errors of the ``left_out_runs`` that were left out."""

    name: str
    stack: str
    devices: tuple[str, ...]
    releases: str
    source: str
    fitted_to: str
    left_out_runs: int
    mean_error: float | None
    mean_bias: float | None
    dense: Spread
    experts: Spread
    memory: Spread
    errors: tuple[LeftOut, ...]
    reached: Reached


class RatesAnswer(Answer):
    """Rate sets by name."""

    sets: tuple[RateSetAnswer, ...]


def find_rates(request: RatesRequest) -> RatesAnswer:
    """The rate sets of the package, or the one that is named."""
    one = request.name
    found = (
        [rate_sets()[name] for name in sorted(rate_sets())] if one is None else [rates_named(one)]
    )
    return RatesAnswer(sets=tuple(map(RateSetAnswer.of, found)))
