"""Requests about layouts as people send them: a ``config.json``, a kind of GPU, how many, a batch.

Each makes the request of a whole problem that it stands for. Nothing of the sender's is executed: a
configuration is read by the table of model types, and rates and devices are named, not read.
"""

import json
from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.formulations.parallelism.training import CalibrationRun, TrainingProblem
from stagewright.formulations.prices.computing import PrecisionName
from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.machines.stack_memory import STACK_MEMORY
from stagewright.graphs.models.architecture import Architecture
from stagewright.service.layouts.inputs import (
    DegreeInputs,
    FailureInputs,
    Kind,
    MachineInputs,
    NumberInputs,
    Size,
    TrainingInputs,
    needed,
)
from stagewright.service.layouts.problems import training_problem
from stagewright.service.layouts.rates import CalibrateRequest
from stagewright.service.layouts.requests import (
    LayoutRequest,
    LayoutSearch,
    LayoutText,
    MemoryRequest,
)
from stagewright.service.layouts.tuning import TuneRequest, TuneSearch
from stagewright.service.options import Option
from stagewright.service.requests import Request

if TYPE_CHECKING:
    from stagewright.graphs.importers.measured_runs import MeasuredIteration


class ConfiguredRequest(Request):
    """A request with the configuration of a model in place of a problem."""

    config: dict[str, Any] | None = None
    """A Hugging Face config.json of a known model type."""
    architecture: Architecture | None = None
    """The architecture of another model, in place of config."""

    @model_validator(mode="after")
    def _require_model(self) -> "ConfiguredRequest":
        if (self.config is None) == (self.architecture is None):
            raise InputError(
                "config: send the model's config.json, or its `architecture`"
                if self.config is None
                else "architecture: the config says it; leave one of them out"
            )
        return self

    def model(self) -> Architecture:
        """The architecture; InputError names the field that is wrong."""
        if self.architecture is not None:
            return self.architecture
        from stagewright.graphs.importers.hf_config import parse_hf_config  # it imports networkx

        return parse_hf_config(json.dumps(self.config), "config")

    @abstractmethod
    def whole(self) -> Request:
        """The request of the problem that it describes."""


class SpaceInputs(TrainingInputs, MachineInputs, DegreeInputs):
    """A training run, its machines, and the layouts to consider."""

    def problem_for(self, architecture: Architecture, framework: str | None) -> TrainingProblem:
        """The training of an architecture, with the memory and rates of a framework if known."""
        known = framework if framework in STACK_MEMORY else None
        return self.problem(architecture, self.fabric(), known)


class TrainPlanInputs(LayoutSearch, SpaceInputs, FailureInputs):
    """What is asked of an architecture's training on some machines."""

    def layouts_of(self, architecture: Architecture, **changed: Any) -> LayoutRequest:
        """The search for the layouts; ``changed`` are fields of the request with other values.

        Raises
        ------
        InputError
            In one line, which names the field.
        """
        problem = self.problem_for(architecture, self.framework)
        own = {name: getattr(self, name) for name in LayoutSearch.model_fields}
        own["by_stage"] = self.by_stage and not self.alike
        own["failures"] = self.failures_on(problem.fabric)
        return LayoutRequest.of(**own | changed, problem=problem, space=self.space_of(problem))


class TrainPlanRequest(ConfiguredRequest, TrainPlanInputs):
    """Find the fastest layouts that fit: a model's configuration, GPUs, a batch, a sequence."""

    def whole(self) -> LayoutRequest:
        """The search for layouts."""
        return self.layouts_of(self.model())


class TuneInputs(TuneSearch, SpaceInputs):
    """What is asked of the trials of an architecture's layouts."""

    def tune_of(self, architecture: Architecture) -> TuneRequest:
        """The search for the layouts that are worth a trial."""
        problem = self.problem_for(architecture, self.framework)
        own = {name: getattr(self, name) for name in TuneSearch.model_fields}
        return TuneRequest.of(**own, problem=problem, space=self.space_of(problem))


class TuneModelRequest(ConfiguredRequest, TuneInputs):
    """Find the layouts of a model that are worth a trial, and the first ones to try."""

    def whole(self) -> TuneRequest:
        """The search for candidates."""
        return self.tune_of(self.model())


class MemoryInputs(NumberInputs):
    """A layout of a model on as many devices as it has ranks."""

    layout: Annotated[LayoutText, Option(of_text=lambda text, _: parse_layout(text))] = None
    """For example "p8 t8 d2 b1 v3 full sp zero1"."""
    sequence: Annotated[int | None, Option(form="S")] = None
    """Tokens in a sample."""
    global_batch: Annotated[int | None, Option(form="N")] = None
    """Samples between two updates; default: two microbatches for every pipeline rank."""
    device: Kind = None
    """Kind of GPU, or the JSON file of your own; default: h100."""
    memory: Size = None
    """Memory of a GPU; default: that of the kind."""
    framework: Annotated[
        str | None, Option("--for", form="FRAMEWORK", known=tuple(STACK_MEMORY))
    ] = None
    """The software that trains, which decides what is kept: megatron, megatron-bridge, nemo,
    torchtitan, fsdp, deepspeed, accelerate, automodel, megatron-2021; plan: our own executor."""

    def memory_of(self, architecture: Architecture) -> MemoryRequest:
        """The memory of the layout of that architecture."""
        layout = self.layout
        if layout is None:
            raise InputError('layout is missing: for example "p2 t4 d8 b1"')
        machines = MachineInputs(
            device=self.device or "h100",
            gpus=layout.ranks,
            per_server=layout.ranks,
            memory=self.memory,
        )
        problem = self.problem_of(
            architecture,
            machines.fabric(),
            sequence=needed(self.sequence, "sequence", "the tokens in a sample, for example 4096"),
            batch=self.global_batch or layout.data * layout.microbatch * 2 * layout.pipeline,
            framework=self.framework,
        )
        return MemoryRequest.of(problem=problem, layout=layout)


class LayoutMemoryRequest(ConfiguredRequest, MemoryInputs):
    """The memory of one layout of a model's training."""

    def whole(self) -> MemoryRequest:
        """The memory of the layout of that model."""
        return self.memory_of(self.model())


class CalibrateInputs(MachineInputs):
    """On which machines, and with what, iterations were measured, where the runs do not say it."""

    framework: Annotated[str | None, Option("--for", form="FRAMEWORK")] = None
    """What trained, such as torchtitan: the fit starts from its rates; default: megatron."""
    global_batch: Annotated[int | None, Option(form="N")] = None
    """Samples between two updates, where the runs do not say it."""
    sequence: Annotated[int | None, Option(form="S")] = None
    """Tokens in a sample, where the runs do not say it."""
    precision: PrecisionName = "bf16"
    """Type of weights and activations, where the runs do not say it; fp8: of products."""

    def run(self, one: "MeasuredIteration", architecture: Architecture) -> CalibrationRun:
        """A measured iteration of an architecture's training."""
        with naming(one.place):
            layout = parse_layout(one.layout or "")
            sequence, batch = one.sequence or self.sequence, one.batch or self.global_batch
            if sequence is None or batch is None:
                raise InputError(
                    f"no {'sequence' if sequence is None else 'batch'}: give `sequence` and "
                    "`global_batch`, or say them of every run"
                )
            gpus = one.gpus or self.gpus or layout.ranks
            machines = self if self.cluster else self.model_copy(update={"gpus": gpus})
            fabric = machines.fabric()
            problem = training_problem(
                architecture,
                fabric,
                sequence=sequence,
                batch=batch,
                precision=one.precision or self.precision,
                framework=self.framework,
            )
        seconds = one.seconds_of(fabric.devices, sequence, batch)
        return CalibrationRun(one.place, problem, layout, seconds, one.memory_bytes)


class MeasuredRun(Request):
    """A measured iteration: a layout and its seconds; the rest where runs differ in it."""

    layout: str
    seconds: float = Field(gt=0, allow_inf_nan=False)
    gpus: int | None = None
    sequence: int | None = None
    batch: int | None = None
    precision: PrecisionName | None = None
    memory_bytes: float | None = None


def iterations(runs: Iterable[MeasuredRun]) -> "tuple[MeasuredIteration, ...]":
    """The measured iterations, each with its place among the ``runs``."""
    from stagewright.graphs.importers.measured_runs import MeasuredIteration

    return tuple(MeasuredIteration(f"runs[{i}]", **one.given()) for i, one in enumerate(runs))


class CalibrateRunsRequest(ConfiguredRequest, CalibrateInputs):
    """Make a rate set of your own from two or three measured iterations."""

    runs: tuple[MeasuredRun, ...] = Field(min_length=1, max_length=1000)
    """Iterations that were measured, each with its layout and seconds."""
    name: str = "calibrated"
    """Of the rate set."""
    source: str = "measured"
    """Who measured it, and where."""

    def whole(self) -> CalibrateRequest:
        """The fit to the runs."""
        model = self.model()
        runs = tuple(self.run(one, model) for one in iterations(self.runs))
        return CalibrateRequest.of(runs=runs, name=self.name, source=self.source)
