"""What is known of devices, model types and frameworks, with where it is from."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

from stagewright.executor.export.layouts import EVERY_FORMAT
from stagewright.formulations.parallelism.layout import Layout, parse_layout
from stagewright.formulations.parallelism.training import TrainingProblem, require_layout
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.diffusers_config import CLASSES
from stagewright.graphs.importers.hf_config import architecture_of
from stagewright.graphs.importers.hf_towers import VISION, WRAPPERS
from stagewright.graphs.importers.hf_types import TYPES
from stagewright.graphs.machines.devices import ACCELERATORS, SOURCES, Accelerator
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.rates import rate_sets, rates_of
from stagewright.graphs.models.architecture import Architecture
from stagewright.graphs.models.traits import common_traits, every_trait
from stagewright.service.answers import Answer
from stagewright.service.layouts.problems import training_problem

SOURCE_OF_TYPES = (
    "the configuration classes of transformers 5 and diffusers 0.42, whose modules have these "
    "parameters"
)

_SIZES = {"layers": 48, "hidden": 4096, "heads": 32, "vocabulary": 32_000, "width": 16_384}
_EXPERTS = {"number": 8, "per_token": 2, "width": 1024, "shared": 1024}
_STATES = ("", "zero1", "zero2", "zero3")

FEATURES: dict[str, dict[str, str]] = {
    "degrees": {
        "tensor": "t2 d4", "sequence parallelism": "t2 d4 sp", "pipeline": "p2 d4",
        "context": "c2 d4", "expert": "d8 e2", "ZeRO 1": "d8 zero1", "ZeRO 2": "d8 zero2",
        "ZeRO 3": "d8 zero3",
    },
    "schedules": {
        "1f1b": "p2 d4", "interleaved 1f1b": "p2 d4 v2", "zero-bubble": "p2 d4 zero-bubble",
    },
    "recomputation": {
        "full": "d8 full", "some blocks": "p2 d4 full blocks2", "selective": "d8 selective",
        "modules": "d8 layernorm", "activations in host memory": "d8 offload2",
        "optimizer in host memory": "d8 offload",
    },
}  # fmt: skip
"""Features of layouts, each with a layout that has it."""

PRECISIONS = ("bf16", "fp16", "fp8", "fp32")


class DeviceAnswer(Answer):
    """A kind of device: its figures, their source, the rate sets of it, and the nearest if none."""

    device: Accelerator
    source: str
    rates: tuple[str, ...]
    nearest_rates: str


class ModelAnswer(Answer):
    """A model type, what sets it apart from a plain Llama, and what exports a layout of it."""

    name: str
    traits: tuple[str, ...]
    frameworks: tuple[str, ...]
    source: str = SOURCE_OF_TYPES


class RuleAnswer(Answer):
    """A rule of a framework on layouts, and where its code has it."""

    rule: str
    source: str


class FrameworkAnswer(Answer):
    """A framework, its releases, what its rules let through, and the rules."""

    name: str
    releases: tuple[str, ...]
    models: tuple[str, ...]
    degrees: tuple[str, ...]
    schedules: tuple[str, ...]
    recomputation: tuple[str, ...]
    precisions: tuple[str, ...]
    rules: tuple[RuleAnswer, ...]


class DevicesAnswer(Answer):
    """Kinds of devices."""

    devices: tuple[DeviceAnswer, ...]


class ModelsAnswer(Answer):
    """Model types."""

    models: tuple[ModelAnswer, ...]


class FrameworksAnswer(Answer):
    """Frameworks that layouts are exported to."""

    frameworks: tuple[FrameworkAnswer, ...]


def known_devices(name: str | None = None) -> DevicesAnswer:
    """All kinds of devices, or the one that is named."""
    sets = rate_sets().values()
    return DevicesAnswer(
        devices=tuple(
            DeviceAnswer(
                device=ACCELERATORS[kind],
                source=SOURCES.get(kind) or ACCELERATORS[kind].source or "",
                rates=tuple(sorted(one.name for one in sets if kind in one.devices)),
                nearest_rates=rates_of(kind).name,
            )
            for kind in _chosen(name, ACCELERATORS, "device")
        )
    )


def known_models(name: str | None = None) -> ModelsAnswer:
    """All model types that are read, of transformers and diffusers, or the one that is named."""
    every = sorted([*TYPES, *WRAPPERS, *CLASSES])
    return ModelsAnswer(models=tuple(map(_model, _chosen(name, every, "model type"))))


def known_frameworks(name: str | None = None) -> FrameworksAnswer:
    """All frameworks that layouts are exported to, or the one that is named."""
    return FrameworksAnswer(
        frameworks=tuple(map(_framework, _chosen(name, EVERY_FORMAT, "framework")))
    )


def _chosen(name: str | None, known: Iterable[str], what: str) -> list[str]:
    """All names that are known, or the one of them that is given."""
    names = list(known)
    if name is not None and name not in names:
        raise InputError(f"{what} {name!r} is not known; known are {', '.join(names)}")
    return names if name is None else [name]


def _sample(kind: str) -> Architecture:
    """A model of a type, in sizes of a few billion parameters and otherwise with its defaults."""
    if kind in CLASSES:
        return architecture_of({"_class_name": kind, "caption_channels": 4096})
    if kind not in WRAPPERS:
        return architecture_of(_decoder(kind))
    of = WRAPPERS[kind]
    vision = _sized(VISION[of.vision], _SIZES) | {
        "image_size": 224, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    text = _decoder(of.text or "qwen2")
    return architecture_of({"model_type": kind, "text_config": text, "vision_config": vision})


def _decoder(kind: str) -> dict[str, Any]:
    of = TYPES[kind]
    fields = {"model_type": kind, **_sized(of, _SIZES)}
    for further, sizes in ((of.experts, _EXPERTS), (of.encoder_blocks, _SIZES)):
        fields |= _sized(further, sizes)
    if of.experts is not None and of.experts.normalized is False and of.experts.scores == "sigmoid":
        fields[str(of.experts.per_token)] = 1  # as published: such a router chooses one (Llama 4)
    own = of.recurrent
    if own is not None and own.kinds is not None:  # blocks of every kind
        kinds = ["mamba", "mlp", "moe", "attention"] if own.alone else ["mamba", "attention"]
        fields[own.kinds.split("|")[-1]] = kinds * (_SIZES["layers"] // len(kinds))
    elif own is not None and own.indices is not None:
        fields[own.indices] = [_SIZES["layers"] - 1]
    return fields


def _sized(of: object, sizes: dict[str, int]) -> dict[str, Any]:
    """The required fields among the cells of a type, or of a part of it."""
    cells = ((getattr(of, name, None), size) for name, size in sizes.items())
    return {cell.split("|")[0]: size for cell, size in cells if isinstance(cell, str)}


def _problem(of: Architecture, framework: str, precision: str = "bf16") -> TrainingProblem:
    fabric = fabric_of_kind("h100", 8)
    return training_problem(
        of, fabric, sequence=1024, batch=512, precision=precision, framework=framework
    )


def _keeps(framework: str, problems: Iterable[TrainingProblem], words: str) -> bool:
    """Whether a layout of one of the problems keeps the rules, at some stage of ZeRO."""
    states = ("",) if words.split()[-1] in _STATES else _STATES
    layouts = [parse_layout(f"b1 {words} {state}".strip()) for state in states]
    return any(_runs(framework, *one) for one in product(problems, layouts))


def _runs(framework: str, problem: TrainingProblem, layout: Layout) -> bool:
    try:
        require_layout(problem, layout)
    except InputError:
        return False
    return not any(EVERY_FORMAT[framework].broken(problem, layout))


def _model(kind: str) -> ModelAnswer:
    of = _sample(kind)
    return ModelAnswer(
        name=kind,
        traits=(*common_traits(of), *every_trait(of)),
        frameworks=tuple(name for name in EVERY_FORMAT if _keeps(name, [_problem(of, name)], "d8")),
    )


def _framework(name: str) -> FrameworkAnswer:
    rules = EVERY_FORMAT[name].rules
    problems = [_problem(_sample(one), name) for one in ("llama", "mixtral", "qwen3_moe")]
    problems.append(replace(problems[0], attention="materialized"))
    return FrameworkAnswer(
        name=name,
        releases=tuple(dict.fromkeys(one.source.partition(", ")[0] for one in rules)),
        models=EVERY_FORMAT[name].models,
        **{
            what: tuple(feature for feature, words in of.items() if _keeps(name, problems, words))
            for what, of in FEATURES.items()
        },
        precisions=tuple(
            one for one in PRECISIONS if _keeps(name, [_problem(_sample("llama"), name, one)], "d8")
        ),
        rules=tuple(RuleAnswer(rule=str(one), source=one.source) for one in rules),
    )
