"""Options of an export."""

import math
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.chain import Chain


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """Options of the formats, each unset unless it is given.

    ``model`` has the layer names and the samples of a microbatch. ``partition_only`` exports only
    the stages and leaves order, weights and recomputation to the framework. ``command`` is the
    command of every process, in shell syntax. The servers of the plan's devices follow from
    ``cluster``, or from ``per_server`` if consecutive ranks fill the nodes. ``image`` is the
    container's. A batch job has ``cpus`` per process, and ``time`` at most, as Slurm writes it.
    """

    model: Chain | None = None
    partition_only: bool = False
    command: str | None = None
    cluster: Cluster | None = None
    per_server: int | None = None
    image: str | None = None
    cpus: int | None = None
    time: str | None = None


def layer_names(plan: PipelinePlan, options: FormatOptions) -> tuple[str, ...]:
    """The names of all layers: the plan's, else the model's."""
    chain = _model(plan, options)
    if plan.layers is not None:
        return tuple(layer.name for layer in plan.layers)
    if chain is None:
        raise InputError("the plan does not name its layers: give the model file (--model)")
    return tuple(layer.name for layer in chain.layers)


def stage_layers(plan: PipelinePlan, options: FormatOptions) -> tuple[tuple[str, ...], ...]:
    """The names of every stage's layers."""
    names = layer_names(plan, options)
    return tuple(names[stage.layers[0] : stage.layers[1]] for stage in plan.stages)


def samples_per_replica(plan: PipelinePlan, options: FormatOptions, replicas: int) -> int:
    """The samples of a microbatch on each of ``replicas`` copies."""
    chain, samples = _model(plan, options), plan.microbatch_size
    if samples is None and chain is not None:
        samples = chain.microbatch_size
    if samples is None:
        raise InputError(
            "the plan does not say how many samples a microbatch has: give the model file (--model)"
        )
    if samples % replicas:
        raise InputError(
            f"a microbatch of {samples} samples cannot be split evenly among "
            f"{replicas} replicas; choose a multiple of {replicas}"
        )
    return samples // replicas


def _model(plan: PipelinePlan, options: FormatOptions) -> Chain | None:
    """The model, if it is given; it must be the plan's."""
    chain = options.model
    if chain is not None:
        given, wanted = (chain.name, len(chain)), (plan.model, plan.stages[-1].layers[1])
        if given != wanted:
            raise InputError(
                f"--model is {given[0]!r} with {given[1]} layers, the plan is for {wanted[0]!r} "
                f"with {wanted[1]}; give the model that was planned"
            )
    return chain


def filled(template: str, /, **values: object) -> str:
    """The text of a Python file for a framework: a template with ``values`` in its places."""
    folder = files("stagewright.executor.export") / "templates"
    return (folder / f"{template}.py.txt").read_text(encoding="utf-8").format(**values)


class _Quoted(str):
    """A string that is always written in double quotes."""


class _Dumper(yaml.SafeDumper):
    pass


_Dumper.add_representer(
    _Quoted,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style='"'),
)


def to_yaml(value: dict[str, Any]) -> str:
    """One document, in ASCII.

    Examples
    --------
    >>> print(to_yaml({"size": 2, "names": ["a", "b: c"]}), end="")
    size: 2
    names:
    - "a"
    - "b: c"
    """
    return yaml.dump(
        _quoted(value), Dumper=_Dumper, sort_keys=False, width=math.inf, allow_unicode=False
    )


def _quoted(value: Any) -> Any:
    """The same data with all strings except keys quoted."""
    if isinstance(value, dict):
        return {key: _quoted(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_quoted(entry) for entry in value]
    return _Quoted(value) if isinstance(value, str) else value
