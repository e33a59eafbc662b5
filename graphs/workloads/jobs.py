"""The jobs that share a cluster: their remaining steps and their throughputs."""

import itertools
import math
import os
from collections.abc import Iterable
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.documents.units import require_amount, require_count

_MAX_SCALE = 16_384
_MOST_SAMPLES = 1 << 30  # of a step, or tokens of a sample
_MOST_RATIO = 1e9  # of weights
_LAST_ARRIVAL = 1e9  # seconds

Discipline = Literal["fairness", "fifo"]


@documents.record
class Job:
    """A training job: ``steps`` iterations of ``model`` on ``scale`` accelerators at once.

    ``weight`` is its share relative to other jobs, ``arrival_seconds`` its time of arrival,
    ``slo_seconds`` its deadline relative to that, ``entity`` its owner. With ``counts``, in place
    of ``scale``, it runs on any of these numbers of accelerators, in turn on several. Where it
    starts, or goes on with other accelerators, it takes ``restart_seconds`` before its next step,
    and ``checkpoint_seconds`` to write and read its checkpoint; those of trainings are computed.
    ``command`` is what each of its processes runs, in shell syntax, with ``environment``.
    """

    name: str
    model: str
    steps: float
    scale: int = 1
    weight: float = 1.0
    arrival_seconds: float = 0.0
    slo_seconds: float | None = None
    entity: str | None = None
    counts: tuple[int, ...] = ()
    restart_seconds: float = 0.0
    checkpoint_seconds: float | None = None
    command: str | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        place = f"job {self.name!r}: "
        require_count(self.scale, place + "scale", _MAX_SCALE)
        _require_counts(place, self.counts, self.scale)
        require_amount(self.arrival_seconds, place + "arrival_seconds")
        for name in ("restart_seconds", "checkpoint_seconds"):
            require_amount(getattr(self, name) or 0.0, place + name)
        if self.arrival_seconds > _LAST_ARRIVAL:
            raise InputError(
                f"{place}arrival_seconds must be at most {_LAST_ARRIVAL:g}, after which a round is "
                f"less than a float's digits, got {self.arrival_seconds:g}"
            )
        for name in self.environment:
            if not (name.isidentifier() and name.isascii()):
                raise InputError(f"{place}environment: {name!r} is no name of a variable")
        for name in ("steps", "weight", "slo_seconds"):
            value = getattr(self, name)
            if value is not None:
                require_amount(value, place + name)
                if value == 0:
                    raise InputError(f"{place}{name} must be more than zero, got 0")

    @property
    def move_seconds(self) -> float:
        """From its last step on some accelerators to its next step on others."""
        return self.restart_seconds + (self.checkpoint_seconds or 0.0)

    @property
    def kind(self) -> "Kind":
        """What tells jobs apart in throughput: the model, and on how many accelerators it runs."""
        return self.model, self.counts or self.scale


Kind = tuple[str, int | tuple[int, ...]]
"""A model with its scale, or with the counts among which its jobs may choose."""


def counts_of(kind: Kind) -> tuple[int, ...]:
    """The numbers of accelerators on which a job of the kind may run, ascending."""
    return kind[1] if isinstance(kind[1], tuple) else (kind[1],)


def _require_counts(place: str, counts: tuple[int, ...], scale: int) -> None:
    for count in counts:
        require_count(count, place + "counts", _MAX_SCALE)
    if list(counts) != sorted(set(counts)):
        raise InputError(f"{place}counts must ascend, each once, got {list(counts)}")
    if counts and scale != 1:
        raise InputError(f"{place}give either scale, one number, or counts, several")


@documents.record
class Entity:
    """An organisation or user that owns jobs or other entities and divides its share among them.

    ``fairness`` divides by weight; ``fifo`` serves its jobs in order of arrival.
    """

    name: str
    weight: float = 1.0
    discipline: Discipline = "fairness"
    parent: str | None = None

    def __post_init__(self) -> None:
        require_amount(self.weight, f"entity {self.name!r}: weight")
        if self.weight == 0:
            raise InputError(f"entity {self.name!r}: weight must be more than zero, got 0")


@documents.record
class Computed:
    """How a rate was computed: for ``servers``, equally many accelerators on each.

    A run is expected between ``..._low`` and ``..._high``; no layout of the search makes more than
    ``bound_steps_per_second``. Where no ``layout`` fits there is a ``reason``. To write and
    read the checkpoint takes ``checkpoint_seconds``.
    """

    servers: int
    steps_per_second_low: float = 0.0
    steps_per_second_high: float = 0.0
    bound_steps_per_second: float | None = None
    layout: str | None = None
    reason: str | None = None
    checkpoint_seconds: float | None = None


@documents.record
class Rate:
    """Steps per second of ``model`` on ``scale`` accelerators of one type.

    ``spread_steps_per_second`` is the rate on accelerators of different servers, if known; 0
    means that the model does not run there. Rates without ``computed`` are measured.
    """

    model: str
    scale: int
    accelerator: str
    steps_per_second: float
    spread_steps_per_second: float | None = None
    computed: Computed | None = None
    spread_computed: Computed | None = None

    def __post_init__(self) -> None:
        place = f"rate of {self.model!r} x{self.scale} on {self.accelerator!r}: "
        require_count(self.scale, place + "scale", _MAX_SCALE)
        require_amount(self.steps_per_second, place + "steps_per_second")
        if self.spread_steps_per_second is not None:
            require_amount(self.spread_steps_per_second, place + "spread_steps_per_second")
        _require_range(place, self.steps_per_second, self.computed)
        _require_range(place + "spread ", self.spread_steps_per_second, self.spread_computed)


def _require_range(place: str, rate: float | None, how: Computed | None) -> None:
    if how is None:
        return
    low, high = how.steps_per_second_low, how.steps_per_second_high
    if rate is None or not 0 <= low <= rate <= high < math.inf:
        raise InputError(
            f"{place}computed from {low:g} to {high:g} steps per second, the rate is {rate}: leave "
            "`computed` out where it is measured"
        )


@documents.record
class PairRate:
    """Steps per second of two models that share ``scale`` accelerators, in the models' order."""

    models: tuple[str, str]
    scale: int
    accelerator: str
    steps_per_second: tuple[float, float]
    spread_steps_per_second: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        place = f"rate of {' with '.join(self.models)} x{self.scale} on {self.accelerator!r}: "
        require_count(self.scale, place + "scale", _MAX_SCALE)
        for rate in (*self.steps_per_second, *(self.spread_steps_per_second or ())):
            require_amount(rate, place + "steps per second")
        for rates in (self.steps_per_second, self.spread_steps_per_second):
            if self.models[0] == self.models[1] and rates and rates[0] != rates[1]:
                raise InputError(
                    f"{place}two jobs of one model have the same rate, got {rates[0]:g} and "
                    f"{rates[1]:g}; give both the mean"
                )


@documents.record
class Throughputs:
    """How fast models run, alone and in pairs."""

    alone: tuple[Rate, ...]
    pairs: tuple[PairRate, ...] = ()

    def __post_init__(self) -> None:
        _require_unique((rate.model, rate.scale, rate.accelerator) for rate in self.alone)
        _require_unique((*sorted(rate.models), rate.scale, rate.accelerator) for rate in self.pairs)

    def of(self, models: Iterable[tuple[str, int]]) -> "Throughputs":
        """The throughputs of these models at these scales."""
        wanted = set(models)
        return Throughputs(
            tuple(rate for rate in self.alone if (rate.model, rate.scale) in wanted),
            tuple(
                rate
                for rate in self.pairs
                if all((model, rate.scale) in wanted for model in rate.models)
            ),
        )


@documents.record
class Training:
    """A model whose throughputs are computed: the transformer of a ``config.json``.

    One step trains ``global_batch`` samples of ``sequence`` tokens. ``config`` is a configuration,
    or in a file its path (from the file's folder) or the name of its model, OWNER/NAME. The other
    fields are those of ``train-plan``; those that are not given have its defaults.
    """

    model: str
    config: str | dict[str, Any]
    global_batch: int
    sequence: int
    framework: str | None = None
    precision: str | None = None
    attention: str | None = None
    gradients: str | None = None
    lora: int | None = None
    lora_targets: str | None = None
    frozen: str | None = None
    images: int | None = None
    encoder_tokens: int | None = None

    def __post_init__(self) -> None:
        place = f"training {self.model!r}: "
        require_count(self.global_batch, place + "global_batch", _MOST_SAMPLES)
        require_count(self.sequence, place + "sequence", _MOST_SAMPLES)

    def inputs(self) -> dict[str, Any]:
        """The fields that are ``train-plan``'s, where they are given."""
        own = ("model", "config")
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: one for name, one in values.items() if name not in own and one is not None}


def _require_unique(keys: Iterable[tuple[object, ...]]) -> None:
    seen = set()
    for key in keys:
        if key in seen:
            raise InputError(f"throughputs: {key} appears twice")
        seen.add(key)


@documents.record
class Workload:
    """Jobs in order of arrival, their throughputs, and the entities that own them.

    Throughputs that are not given are computed for the models of ``trainings``.
    """

    jobs: tuple[Job, ...]
    throughputs: Throughputs = Throughputs(())
    entities: tuple[Entity, ...] = ()
    trainings: tuple[Training, ...] = ()
    format: Literal["stagewright-jobs"] = "stagewright-jobs"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        if not self.jobs:
            raise InputError("the workload has no jobs")
        _require_unique_names("jobs", [job.name for job in self.jobs])
        _require_unique_names("entities", [entity.name for entity in self.entities])
        _require_unique_names("trainings", [one.model for one in self.trainings])
        _require_trained(self.jobs, self.trainings)
        if not (self.throughputs.alone or self.trainings):
            raise InputError("the workload has neither throughputs nor trainings")
        _require_order(self.jobs)
        _require_tree(self.jobs, self.entities)
        _require_comparable(self.jobs)


def _require_unique_names(what: str, names: list[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        first = names.index(twice)
        second = names.index(twice, first + 1)
        raise InputError(
            f"{what}[{second}]: two {what} are named {twice!r}, the other is {what}[{first}]; "
            "give each a name of its own"
        )


def _require_trained(jobs: tuple[Job, ...], trainings: tuple[Training, ...]) -> None:
    """Refuse a training of a model that no job has."""
    models = {job.model: None for job in jobs}
    for one in trainings:
        if one.model not in models:
            known = ", ".join(map(repr, models))
            raise InputError(f"training {one.model!r}: no job is of this model, only of {known}")


def _require_order(jobs: tuple[Job, ...]) -> None:
    for before, after in itertools.pairwise(jobs):
        if after.arrival_seconds < before.arrival_seconds:
            raise InputError(
                f"job {after.name!r} arrives at {after.arrival_seconds:g} s, before job "
                f"{before.name!r} at {before.arrival_seconds:g} s: list jobs in order of arrival"
            )


def _require_comparable(jobs: tuple[Job, ...]) -> None:
    """Refuse weights of which a solver would round the least to nothing."""
    least, most = (key(jobs, key=lambda job: job.weight) for key in (min, max))
    if most.weight > _MOST_RATIO * least.weight:
        raise InputError(
            f"job {most.name!r} has the weight {most.weight:g}, job {least.name!r} "
            f"{least.weight:g}: weights may differ by a factor of {_MOST_RATIO:g} at most"
        )


def _require_tree(jobs: tuple[Job, ...], entities: tuple[Entity, ...]) -> None:
    parents = {entity.name: entity.parent for entity in entities}
    disciplines = {entity.name: entity.discipline for entity in entities}
    for name, parent in parents.items():
        if parent is not None and parent not in parents:
            raise InputError(f"entity {name!r}: its parent {parent!r} is not an entity")
        if parent is not None and disciplines[parent] == "fifo":
            raise InputError(f"entity {parent!r} serves jobs in order; it cannot own {name!r}")
        if _is_own_owner(name, parents):
            raise InputError(f"entity {name!r} is among its own owners")
    owners = set(parents.values()) - {None}
    for job in jobs:
        if entities and job.entity not in parents:
            raise InputError(
                f"job {job.name!r}: entity {job.entity!r} is not one of "
                f"{', '.join(map(repr, parents))}"
            )
        if job.entity in owners:
            raise InputError(
                f"entity {job.entity!r} owns both entities and job {job.name!r}; "
                "give the jobs a separate entity"
            )


def _is_own_owner(name: str, parents: dict[str, str | None]) -> bool:
    above = parents[name]
    for _ in parents:
        above = parents.get(above) if above is not None else None
    return above is not None


def load_workload(path: str | os.PathLike[str]) -> Workload:
    """Read a jobs file, with the configurations that its trainings name.

    Raises InputError as of :func:`documents.read` and ``importers.hf_config.read_fields``.
    """
    found = documents.read(Workload, path)
    with naming(path):
        trainings = tuple(_with_fields(one, Path(path).parent) for one in found.trainings)
    return replace(found, trainings=trainings) if trainings else found


def _with_fields(training: Training, folder: Path) -> Training:
    """The training with the configuration that it names, from the folder of its file."""
    if not isinstance(training.config, str):
        return training
    from stagewright.graphs.importers.hf_config import read_fields  # it imports networkx
    from stagewright.graphs.importers.hf_hub import is_hub_name

    here, name = folder / training.config, training.config
    with naming(f"training {training.model!r}: config"):
        fields = read_fields(name if is_hub_name(name) and not here.exists() else here)
    return replace(training, config=fields)


def save_workload(workload: Workload, path: str | os.PathLike[str]) -> None:
    """Write ``workload`` to ``path`` atomically."""
    documents.write(Workload, workload, path)
