"""Rates of timed layers: the requests, the answers, and who answers."""

from typing import Annotated

from pydantic import Field

from stagewright.executor.export.layouts.common import anchor_script
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.importers.timed_layers import TimedLayers
from stagewright.graphs.machines.rates import RateSet
from stagewright.service.answers import CARRIED, Answer
from stagewright.service.layouts.rates import RateSetAnswer
from stagewright.service.layouts.requests import LayoutRequest
from stagewright.service.requests import Request
from stagewright.solvers.parallelism.anchoring import (
    anchored,
    degrees,
    microbatches,
    require_timeable,
)


class AnchorRequest(Request):
    """Write a script that times the layers of a model on one server."""

    problem: TrainingProblem
    framework: str | None = None
    """What trains; None: our own executor."""
    most_samples: int = Field(default=4, ge=1)
    """The largest microbatch."""


class AnchorAnswer(Answer):
    """A script that times layers; ``degrees`` are tensor, expert and sequence parallel by kind."""

    model: str
    ranks: int
    samples: tuple[int, ...]
    degrees: dict[str, tuple[tuple[int, int, bool], ...]]
    script: Annotated[str, CARRIED] = ""


def anchor_script_of(request: AnchorRequest) -> AnchorAnswer:
    """The script for all degrees and microbatches of the layouts that would be searched."""
    problem, stack = request.problem, request.framework or "plan"
    require_timeable(problem)
    space = LayoutRequest.of(problem=problem, framework=stack).searched
    of_kinds = degrees(problem, space)
    samples = microbatches(problem, space, request.most_samples)
    return AnchorAnswer(
        model=str(problem.timed_model),
        ranks=min(problem.fabric.per_server, problem.fabric.devices),
        samples=samples,
        degrees={str(kind): of for kind, of in of_kinds.items()},
        script=anchor_script(
            problem.timed_model,
            problem.rates,
            stack,
            of_kinds,
            samples,
            problem.precision.gradient_bytes,
        ),
    )


class AnchoredRequest(Request):
    """Make a rate set of timed layers."""

    timed: TimedLayers
    name: str = "anchored"
    source: str = "timed"


class AnchoredAnswer(Answer):
    """The rates of timed layers; ``skipped`` is what had no room. ``document``: for ``--rates``."""

    model: str
    machine: str
    through: str
    timings: int
    server_bytes_per_second: float | None
    server_latency_seconds: float
    skipped: tuple[str, ...]
    rates: RateSetAnswer
    document: Annotated[RateSet | None, CARRIED] = None


def rates_of_timings(request: AnchoredRequest) -> AnchoredAnswer:
    """The rate set of timed layers, for their model alone."""
    timed = request.timed
    rates = anchored(timed, request.name, request.source)
    assert rates.anchor is not None
    return AnchoredAnswer.of(
        timed,
        rates.anchor,
        model=str(timed.model),
        timings=len(timed.layers),
        rates=RateSetAnswer.of(rates),
        document=rates,
    )
