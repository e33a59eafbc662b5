"""Requests about layouts of a training run, and their answers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from stagewright.formulations.forms.answers import Limits, Status, require_limits
from stagewright.formulations.parallelism.document import LayoutPlan
from stagewright.formulations.parallelism.goodput import Failures
from stagewright.formulations.parallelism.layout import Layout, parse_layout
from stagewright.formulations.parallelism.ranges import Fits, unmeasured
from stagewright.formulations.parallelism.training import TrainingProblem, require_layout
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.rates import Feature
from stagewright.service.answers import CARRIED, Answer, Finite, NotebookAnswer, ShownAnswer
from stagewright.service.layouts.failures import GoodputAnswer
from stagewright.service.options import Option
from stagewright.service.requests import Request
from stagewright.solvers.parallelism.space import Space

if TYPE_CHECKING:
    from stagewright.executor.export.layouts.rules import FrameworkRule

_DEGREES = {"pipelines": "pipeline", "context ranks": "context", "expert ranks": "expert"}
"""The degree that is 1 where a framework lacks the feature."""

LayoutText = Annotated[
    Layout | None,
    BeforeValidator(
        lambda given: parse_layout(given) if isinstance(given, str) else given,
        json_schema_input_type=str | Layout | None,
    ),
]
"""A layout, or its text such as "p8 t8 d2 b1 v3 full sp zero1"."""


def frameworks() -> list[Any]:
    """The names of frameworks, for completion; last that of a plan."""
    from stagewright.executor.export.layouts import EVERY_FORMAT

    return [*EVERY_FORMAT]


class LayoutSearch(Request):
    """What is searched for, of any problem."""

    top: int = Field(default=10, ge=1, le=1000)
    """Layouts in the table."""
    framework: Annotated[
        str | None,
        Option("--for", form="FRAMEWORK"),
        Field(json_schema_extra=lambda schema: schema.update(examples=frameworks())),
    ] = None
    """Only layouts that can be exported to it: megatron, megatron-bridge, nemo, torchtitan,
    deepspeed, accelerate, axolotl, trl, transformers, nnscaler; plan: a plan of stages, for
    `stagewright run`, of which some may then not fit in memory."""
    time_limit: float = 60.0
    """Time limit of the search in seconds."""
    prefer: Literal["fastest", "surest"] = "fastest"
    """fastest: of all layouts; surest: of those whose prices the rates have measured."""
    by_stage: bool = True
    """Whether to find blocks and recomputed blocks of every stage after the search."""
    explain: Annotated[LayoutText, Option(of_text=lambda text, _: parse_layout(text))] = None
    """Why not this layout, for example "p8 t8 d2 b1 v3 full sp zero1"."""
    front: bool = False
    """The fastest layouts with less and with more memory."""
    what_if: bool = False
    """What more memory and faster links would buy."""
    unfolded: bool = False
    """List layouts, too, that differ from a faster one only in placement, or in whether ranks
    divide samples or their tokens."""
    tokens: float | None = Field(default=None, ge=1, le=1e18, allow_inf_nan=False)
    """Tokens of the whole training, such as 15e12: how many days it takes."""
    simulations: Annotated[int, Option("--simulate", form="N")] = Field(default=0, ge=0, le=1000)
    """Simulate so many runs of the best layout with failures, as a check of its goodput."""

    @model_validator(mode="after")
    def _require_limit(self) -> Self:
        require_limits(Limits(self.time_limit))
        return self

    @model_validator(mode="after")
    def _require_framework(self) -> Self:
        from stagewright.executor.export.layouts import EVERY_FORMAT

        name = self.framework
        if name is not None and name not in EVERY_FORMAT:
            hint = "; torch's FSDP is that of torchtitan, or of accelerate" * ("fsdp" in name)
            raise InputError(
                f"framework {name!r} is not known; there are {', '.join(EVERY_FORMAT)}{hint}"
            )
        return self


class LayoutRequest(LayoutSearch):
    """Find the fastest layouts of a problem that fit."""

    problem: TrainingProblem
    space: Space = Space()
    failures: Failures | None = None
    """How often devices fail: rank layouts by their time with failures."""

    @model_validator(mode="after")
    def _require_failures(self) -> Self:
        if self.failures is not None:
            self.failures.require_host(self.problem.fabric)
        if self.simulations == 1 or (self.simulations and self.failures is None):
            raise InputError("simulations must be 2 or more, of runs with failures")
        return self

    @property
    def asks_more(self) -> bool:
        """Whether anything is searched for after the best layouts whose stages are alike."""
        return self.by_stage or self.front or self.what_if

    @property
    def searched(self) -> Space:
        """The space, without what the framework cannot express."""
        from stagewright.executor.export.layouts.rules import described

        space = self.space
        if self.framework == "plan":
            return replace(space, sequence_parallel="never", partial=False)
        lacks = {} if self.framework is None else described(self.framework)["lacks"]
        limits: dict[str, Any] = {
            name: (1,)
            for what, name in _DEGREES.items()
            if what in lacks and getattr(space, name) is None
        }
        if "sequence parallelism" in lacks:
            limits["sequence_parallel"] = "never"
        return replace(space, **limits)

    @property
    def searched_features(self) -> tuple[Feature, ...]:
        """The features that layouts of the search may have."""
        unknown = unmeasured(self.problem) if self.prefer == "surest" else ()
        return tuple(one for one in self.searched.features(self.problem) if one not in unknown)

    def require_problem(self) -> None:
        """Refuse a model or a precision of which the framework can express no layout."""
        from stagewright.executor.export.layouts import require_framework

        if self.framework is None:
            return
        try:
            require_framework(self.framework, self.problem)
        except InputError as error:
            raise InputError(f"{self.framework} can express no layout of it: {error}") from None

    def wrong(self, layout: Layout) -> "Iterator[tuple[FrameworkRule, str]]":
        """The framework's rules that a possible layout breaks, with what is wrong."""
        from stagewright.executor.export.layouts import EVERY_FORMAT

        if self.framework is not None:
            yield from EVERY_FORMAT[self.framework].broken(self.problem, layout)


def require_problem(request: "LayoutRequest | MemoryRequest") -> None:
    """Refuse what no search can answer; see the request's own."""
    request.require_problem()


class RankMemoryAnswer(Answer):
    """Peak bytes of the ranks at one position in the pipeline, by kind."""

    rank: int
    total_bytes: float
    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    buffers_bytes: float
    reserve_bytes: float


class LayoutRow(Answer):
    """A layout: an iteration and its parts on the busiest rank (s), and the fullest rank's memory.

    Measured seconds and bytes are expected between ``..._low`` and ``..._high``; ``fits`` is "yes"
    or "no" if the device's memory is above or below that range of bytes. ``loses_by`` is the
    largest loss against the best, in words; ``alike`` are layouts that were evaluated too and are
    folded into this one. ``effective_seconds`` have failures in them; ``goodput`` of them trains.
    """

    layout: str
    microbatches: int
    seconds: float
    seconds_low: float
    seconds_high: float
    peak_bytes: float
    peak_bytes_low: float
    peak_bytes_high: float
    fits: Fits
    mfu: float
    flops_per_device: float
    compute_seconds: float
    exchange_seconds: float
    repeated_seconds: float
    zero_seconds: float
    bubble_seconds: float
    gradient_seconds: float
    update_seconds: float
    memory: RankMemoryAnswer
    loses_by: str
    tokens_per_second: float
    alike: tuple[str, ...] = ()
    goodput: float | None = None
    effective_seconds: Finite = None


class PartAnswer(Answer):
    """A part of an iteration, in the explained layout and in the best."""

    part: str
    seconds: float
    best_seconds: Finite


class PriceAnswer(Answer):
    """A price: by how many ``seconds`` the iteration is longer than without it, and its source."""

    price: str
    seconds: float
    without_seconds: float
    source: str


class ExplainAnswer(Answer):
    """Why a layout is not the best: the rule it breaks, what does not fit, or what takes longer.

    ``differs`` are the fields in which the best layout is another, such as ``tensor 8 -> 4``. The
    seconds and bytes are the row's. They rest on ``rates``; ``causes`` are why the time may be
    farther off than the runs that these were fitted to. Each of ``prices`` is switched off alone:
    what runs beside something longer adds nothing, and their seconds do not add up.
    """

    layout: str
    refused: str | None = None
    seconds: float | None = None
    seconds_low: float | None = None
    seconds_high: float | None = None
    peak_bytes: float | None = None
    peak_bytes_low: float | None = None
    peak_bytes_high: float | None = None
    fits: Fits | None = None
    rates: str
    causes: tuple[str, ...] = ()
    row: LayoutRow | None = None
    shortages: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    parts: tuple[PartAnswer, ...] = ()
    prices: tuple[PriceAnswer, ...] = ()


class FrontPoint(Answer):
    """The fastest layout whose peak is at most ``limit_bytes``."""

    limit_bytes: Finite
    peak_bytes: float
    seconds: float
    layout: str


class WhatIf(Answer):
    """The fastest layout on changed machines; None if none fits."""

    change: str
    seconds: Finite
    layout: str | None


class RefinedRow(Answer):
    """A layout with blocks and recomputed blocks of every stage.

    ``before_seconds`` is its time with stages that are alike, None if that is not among the best.
    No blocks by stage, with the fewest recomputed of each that fit, make it faster than
    ``bound_seconds``.
    """

    layout: str
    seconds: float
    before_seconds: Finite
    bound_seconds: float
    mfu: float
    peak_bytes: float


class RefinedAnswer(Answer):
    """The best refined layouts, if any is faster, and bounds on all pipelines of any division.

    ``plain_bound_seconds`` is of pipelines with one stage on a rank and the fewest recomputed
    blocks of each stage that fit; ``bound_seconds`` of interleaved ones too, with any
    recomputation. ``examined`` layouts were divided.
    """

    rows: tuple[RefinedRow, ...]
    plain_bound_seconds: float
    bound_seconds: float
    proved_by: str
    plan_class: str
    examined: int
    wall_seconds: float


class LayoutAnswer(NotebookAnswer):
    """The best layouts by time, with a bound on every layout of the space that fits.

    With failures rows, plan, status and ``fastest_rows`` are by ``effective_seconds``, whose bound
    is in ``failures``; ``bound_seconds`` and ``gap`` are of an iteration without failures.

    The times rest on ``rates``, and so does ``bound_seconds``; ``bound_fastest_seconds`` is the
    bound on a machine as fast as the fastest measured. ``surest`` is the fastest layout with known
    prices, if it is not the first row's.

    ``plan_class`` is what the bound speaks of: stages that are alike. The first ``fastest_rows`` of
    the rows are the fastest of that class; a layout that is not listed may be faster than a row
    below them. ``refined`` are layouts whose stages differ, None if none were asked for; ``plan``
    is the best of both. If no layout whose stages are alike fits, but a refined one does, there are
    no rows, and bound and gap are the refined one's. With status ``infeasible`` no layout of the
    space fits, for the ``reason``; if ``interrupted`` before it is proved the rows are the best so
    far. ``training_days`` are those of the request's tokens with the best layout.
    """

    status: Status
    rates: str
    bound_seconds: Finite
    bound_fastest_seconds: Finite
    gap: Finite
    proved_by: str
    plan_class: str
    rows: tuple[LayoutRow, ...]
    fastest_rows: int = 0
    surest: LayoutRow | None = None
    refined: RefinedAnswer | None = None
    explained: ExplainAnswer | None = None
    front: tuple[FrontPoint, ...] = ()
    what_if: tuple[WhatIf, ...] = ()
    remarks: tuple[str, ...] = ()
    reason: str | None = None
    training_days: float | None = None
    failures: GoodputAnswer | None = None
    examined: int
    wall_seconds: float
    plan: Annotated[LayoutPlan | None, CARRIED] = None

    def shown(self) -> ShownAnswer:
        """What a notebook shows."""
        from stagewright.service.layouts.told.layouts import shown_layouts

        return shown_layouts(self)


class CheckLayoutAnswer(Answer):
    """What is wrong with a layout's document; nothing if it is valid.

    Its bound is compared with the time, but the search is not run again.
    """

    status: str
    is_bound_verified: bool = False
    violations: tuple[str, ...]


class MemoryRequest(Request):
    """The memory of one layout of a problem."""

    problem: TrainingProblem
    layout: Layout

    def require_problem(self) -> None:
        """Refuse a layout that breaks a rule of the model, the batch or the devices."""
        require_layout(self.problem, self.layout)


class LayoutMemoryAnswer(NotebookAnswer):
    """Peak bytes at every position in the pipeline, and who has how much too little.

    The peak of a run is expected between ``peak_bytes_low`` and ``peak_bytes_high``.
    """

    layout: str
    memory_bytes: float
    peak_bytes: float
    peak_bytes_low: float
    peak_bytes_high: float
    fits: Fits
    rates: str
    ranks: tuple[RankMemoryAnswer, ...]
    shortages: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    def shown(self) -> ShownAnswer:
        """What a notebook shows."""
        from stagewright.service.layouts.told.layouts import shown_memory

        return shown_memory(self)
