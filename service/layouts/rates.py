"""Rate sets, and those of measured iterations: the requests, the answers, and who answers."""

from typing import Annotated

from pydantic import Field, model_validator

from stagewright.formulations.forms.answers import StopToken
from stagewright.formulations.parallelism.training import CalibrationRun
from stagewright.graphs.machines.rates import (
    LeftOut,
    RateSet,
    Reached,
    Spread,
    rate_sets,
    rates_named,
)
from stagewright.service.answers import CARRIED, Answer, Finite, NotebookAnswer, ShownAnswer
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


class CalibrateRequest(Request):
    """Make a rate set of measured iterations."""

    runs: tuple[CalibrationRun, ...] = Field(min_length=1)
    """All on the same devices and with the same rates, from which the fit starts."""
    name: str = "calibrated"
    source: str = "measured"

    @model_validator(mode="after")
    def _require_runs(self) -> "CalibrateRequest":
        from stagewright.solvers.parallelism.calibrating import require_runs  # it imports scipy

        require_runs(self.runs)
        return self


class CalibratedRow(Answer):
    """A run: measured seconds, and predicted ones by the rates of the start and the fitted ones.

    ``left_out_seconds`` are predicted by the fit to the other runs, None if there is no other.
    """

    place: str
    layout: str
    seconds: float
    before_seconds: float
    after_seconds: float
    left_out_seconds: Finite


class CalibrateAnswer(NotebookAnswer):
    """The rates of measured runs; ``factors`` of the constants of the set that it started from.

    Constants ``at_peak`` reach all that the device has: runs may be faster than any rates explain.
    ``document`` is the rate set, for ``--rates``.
    """

    started_from: str
    factors: dict[str, float]
    at_peak: tuple[str, ...]
    rows: tuple[CalibratedRow, ...]
    rates: RateSetAnswer
    document: Annotated[RateSet | None, CARRIED] = None

    def shown(self) -> ShownAnswer:
        """What a notebook shows."""
        from stagewright.service.layouts.told.measured import shown_calibration

        return shown_calibration(self)


def calibrate(request: CalibrateRequest, stop: StopToken | None = None) -> CalibrateAnswer:
    """Rates fitted to the runs, with their error where each run is left out."""
    from stagewright.solvers.parallelism.calibrating import calibrated  # it imports scipy

    found = calibrated(request.runs, request.name, request.source)
    left_out = found.left_out or (None,) * len(found.runs)
    return CalibrateAnswer(
        started_from=str(request.runs[0].problem.rates),
        factors=found.factors,
        at_peak=found.at_peak,
        rows=tuple(
            CalibratedRow(
                place=run.place,
                layout=str(run.layout),
                seconds=run.seconds,
                before_seconds=before * run.seconds,
                after_seconds=after * run.seconds,
                left_out_seconds=None if left is None else left * run.seconds,
            )
            for run, before, after, left in zip(
                found.runs, found.before, found.after, left_out, strict=True
            )
        ),
        rates=RateSetAnswer.of(found.rates),
        document=found.rates,
    )
