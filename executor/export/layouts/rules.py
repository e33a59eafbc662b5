"""Rules of frameworks on layouts: what a framework lacks, by its table, and what it asks besides.

Search, explanations and exports ask the same rules, each with its place in the framework's code.
The rules that several frameworks have are here, the others beside the exports.
"""

import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any, TypeAlias

from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import GroupedAttention
from stagewright.graphs.models.modules import modules_of
from stagewright.graphs.models.traits import NEXT_TOKENS, lacking

Require: TypeAlias = Callable[[TrainingProblem, Layout, str], None]
"""Raises InputError, in one line with what would do, of a layout for a framework of that name."""

Files: TypeAlias = Callable[[TrainingProblem, Layout], dict[str, str]]

Told: TypeAlias = Callable[[TrainingProblem, Layout], str | None]


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature: in words if a layout of a problem has it, and what to choose in its place.

    ``of_problem``: the model or the precision alone is asked, whatever the layout.
    """

    told: Told
    instead: str
    of_problem: bool = False


def _some_blocks(problem: TrainingProblem, layout: Layout) -> str | None:
    blocks = layout.blocks_of_stages(problem.architecture.layers)
    again = layout.recomputed_of_stages(problem.architecture.layers)
    some = next((pair for pair in zip(again, blocks, strict=True) if 0 < pair[0] < pair[1]), None)
    return None if some is None else "{} recomputed blocks of {} in a stage".format(*some)


def _if(text: str, has: Callable[[TrainingProblem, Layout], bool]) -> Told:
    return lambda problem, layout: text if has(problem, layout) else None


def _shards(zero: int, _: TrainingProblem, layout: Layout) -> str | None:
    has = layout.zero == zero and layout.data * layout.context > 1
    return f"ZeRO {zero}" if has else None


def _attention_again(problem: TrainingProblem, layout: Layout) -> bool:
    return layout.recompute == "selective" and not problem.memory.by_operator


def _has_encoder(problem: TrainingProblem) -> bool:
    of = problem.architecture
    return of.encoder or (of.tower is not None and of.tower.is_encoder)


_SELECTIVE = "selective recomputation of the attention"

FEATURES = {
    "encoders": Feature(
        lambda of, _: f"an encoder ({of.architecture.name})" if _has_encoder(of) else None,
        "train a decoder", True,
    ),
    NEXT_TOKENS: Feature(
        _if(NEXT_TOKENS, lambda of, _: of.architecture.next_tokens is not None),
        "set num_nextn_predict_layers to 0", True,
    ),
    "products in fp8": Feature(
        _if("products in fp8", lambda of, _: of.precision.fp8_products), "set fp8_products false",
        True,
    ),
    "activations of one byte": Feature(
        _if("activations of 1 byte", lambda of, _: of.precision.activation_bytes == 1),
        "set activation_bytes 2", True,
    ),
    "adapters": Feature(
        _if("LoRA or frozen layers", lambda of, _: of.architecture.tuning is not None),
        "train all weights", True,
    ),
    "pipelines": Feature(
        lambda _, one: f"a pipeline of {one.pipeline}" if one.pipeline > 1 else None,
        "choose pipeline 1",
    ),
    "interleaved stages": Feature(
        lambda _, one: f"{one.chunks} chunks" if one.chunks > 1 else None, "choose chunks 1"
    ),
    "uneven stages": Feature(
        lambda of, one: (
            "stages of unequal numbers of blocks"
            if len(set(one.blocks_of_stages(of.architecture.layers))) > 1
            else None
        ),
        "choose a pipeline that divides the blocks",
    ),
    "tensor ranks": Feature(
        lambda _, one: f"tensor degree {one.tensor}" if one.tensor > 1 else None, "choose tensor 1"
    ),
    "sequence parallelism": Feature(
        _if("sequence parallelism over the tensor ranks", lambda _, one: one.sequence_parallel),
        "choose sequence_parallel false",
    ),
    "context ranks": Feature(
        lambda _, one: f"context degree {one.context}" if one.context > 1 else None,
        "choose context 1",
    ),
    "expert ranks": Feature(
        lambda _, one: f"expert degree {one.expert}" if one.expert > 1 else None, "choose expert 1"
    ),
    "zero bubbles": Feature(
        lambda _, one: f"the schedule {one.schedule}" if one.schedule != "1f1b" else None,
        "choose 1f1b",
    ),
    "ZB-H2 and DualPipe": Feature(
        lambda _, one: (
            f"the schedule {one.schedule}" if one.schedule in ("zb-h2", "dualpipe") else None
        ),
        "choose zero-bubble, zbv or dualpipev",
    ),
    "pipelines inside": Feature(
        _if(
            "the placement pipeline-inside",
            lambda _, one: one.placement == "pipeline-inside" and one.pipeline > 1 < one.data,
        ),
        "choose data-inside",
    ),
    **{
        f"ZeRO {zero}": Feature(
            partial(_shards, zero), "choose another stage of ZeRO"
        )
        for zero in (1, 2, 3)
    },
    "offloaded optimizers": Feature(
        _if("an offloaded optimizer", lambda _, one: one.offload_optimizer),
        "choose offload_optimizer false",
    ),
    "recomputed attention": Feature(_if(_SELECTIVE, _attention_again), "choose none or full"),
    "selective recomputation": Feature(
        _if(_SELECTIVE, lambda _, one: one.recompute == "selective"), "choose none or full"
    ),
    "recomputed modules": Feature(
        lambda _, one: f"recomputation of {one.recompute}" if modules_of(one.recompute) else None,
        "choose none or full",
    ),
    "offloaded activations": Feature(
        lambda _, one: (
            f"activations of {one.offload_blocks} blocks in host memory"
            if one.offload_blocks
            else None
        ),
        "choose offload_blocks 0",
    ),
    "recomputed blocks by stage": Feature(
        _if("recomputed blocks by stage", lambda _, one: one.recomputed_by_stage is not None),
        "choose full, with or without blocks",
    ),
    "some recomputed blocks": Feature(_some_blocks, "choose full for all"),
}  # fmt: skip
"""What ``frameworks.toml`` names."""


@dataclass(frozen=True, slots=True)
class FrameworkRule:
    """A rule of a framework on layouts; ``source``: release and file of the framework's code.

    ``of_problem``: the model or the precision alone is asked, whatever the layout.
    """

    source: str
    require: Require
    of_problem: bool = False
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.require.__name__.strip("_").replace("_", " ")


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework that trains by layouts: its rules, and the files of a layout that keeps them.

    ``models``: those that it has, if they are not whatever a recipe or transformers brings.
    """

    name: str
    rules: tuple[FrameworkRule, ...]
    files: Files
    models: tuple[str, ...] = ()

    def broken(
        self, problem: TrainingProblem, layout: Layout, of_problem: bool = False
    ) -> Iterator[tuple[FrameworkRule, str]]:
        """The rules that a layout breaks, each with the fault and the rule's source.

        With ``of_problem`` those that every layout breaks.
        """
        for rule in self.rules:
            if rule.of_problem or not of_problem:
                try:
                    rule.require(problem, layout, self.name)
                except InputError as error:
                    yield rule, f"{error} ({rule.source})"


@cache
def described(key: str) -> dict[str, Any]:
    """What ``frameworks.toml`` says of a framework, with what it takes from another."""
    table = tomllib.loads(
        (files("stagewright.executor.export.layouts") / "frameworks.toml").read_text("utf-8")
    )
    own = table[key]
    base = described(own["like"]) if "like" in own else {}
    release = own.get("release", base.get("release", ""))
    own_lacks = own.get("lacks", {})
    lacks = {what: [_source(release, file), *why] for what, (file, *why) in own_lacks.items()}
    models = dict(own["models"]) if "models" in own else None
    if models is not None:
        models["file"] = _source(release, models["file"])
    return {
        **base, **own, "release": release, "lacks": base.get("lacks", {}) | lacks,
        "models": [*base.get("models", ()), *([] if models is None else [models])],
    }  # fmt: skip


def _source(release: str, file: str) -> str:
    """A file with the release, if it does not say its own."""
    return file if ", " in file else f"{release}, {file}"


def framework(key: str, write: Files, rules: Collection[FrameworkRule]) -> Framework:
    """The framework that ``frameworks.toml`` describes as ``key``, with further rules.

    Sources of rules are files of its release, unless they begin with another one.
    """
    of = described(key)
    of_table = [_lack(FEATURES[what], what, *said) for what, said in of["lacks"].items()]
    of_models = [_models(**models) for models in of["models"]]
    own = [
        FrameworkRule(_source(of["release"], one.source), one.require, one.of_problem, one.name)
        for one in rules
    ]
    every = (*of_table, *of_models, *own)
    return Framework(
        of["name"],
        (*(one for one in every if one.of_problem), *(one for one in every if not one.of_problem)),
        write,
        tuple(
            name
            for models in of["models"]
            for name in (
                *models.get("recipes", ()),
                *(one for one in models if one not in _OF_MODELS),
            )
        ),
    )


def _lack(feature: Feature, what: str, source: str, why: str = "does not have it") -> FrameworkRule:
    def refuse(problem: TrainingProblem, layout: Layout, framework: str) -> None:
        told = feature.told(problem, layout)
        if told is not None:
            raise InputError(f"{told}: {framework} {why}; {feature.instead}")

    return FrameworkRule(source, refuse, feature.of_problem, f"no {what}")


_OF_MODELS = {"file", "without", "recipes"}


def _models(
    file: str,
    without: Collection[str] = (),
    recipes: Collection[str] = (),
    **has: Mapping[str, Collection[str]],
) -> FrameworkRule:
    def refuse(problem: TrainingProblem, _: Layout, framework: str) -> None:
        of = problem.architecture
        if recipes and of.name not in recipes:
            raise InputError(f"{of.name}: {framework} has no recipe of that model")
        found = lacking(of, problem.sequence, ())
        if not has:
            wrong = [one for one in found if one in without]
        else:
            wrong = min((_beside(found, **one) for one in has.values()), key=len)
        if wrong:
            among = f" among {', '.join(has)}" if len(has) > 1 else ""
            raise InputError(f"{of.name} has {wrong[0]}: {framework} has no such model{among}")

    return FrameworkRule(file, refuse, True, "models")


def _beside(
    found: Collection[str], always: Collection[str] = (), may: Collection[str] = ()
) -> list[str]:
    """What sets the traits of a model apart from one that a framework has."""
    more = [one for one in found if one not in always and one not in may]
    return more + [f"no {one}" for one in always if one not in found]


def require_adapters(problem: TrainingProblem, of: Collection[str], framework: str) -> None:
    """Refuse frozen layers beside which there are no adapters, and adapters of other targets."""
    tuning = problem.architecture.tuning
    if tuning is None:
        return
    if tuning.rank is None or tuning.embedding or tuning.head:
        raise InputError(
            f"frozen layers without LoRA: {framework} takes only adapters from its configuration; "
            "give --lora, or freeze them in your own script"
        )
    others = sorted(tuning.targets - set(of))
    if others:
        raise InputError(
            f"LoRA of {', '.join(others)}: {framework} adapts {', '.join(sorted(of))} together"
        )


def require_bytes(
    problem: TrainingProblem, known: Collection[tuple[int, int, int]], framework: str
) -> None:
    """Raise unless the bytes of weights, gradients and optimizer are among the ``known``."""
    precision = problem.precision
    found = (precision.weight_bytes, precision.gradient_bytes, precision.optimizer_bytes)
    if found not in known:
        works = " or ".join(" + ".join(map(str, one)) for one in known)
        raise InputError(
            f"{' + '.join(map(str, found))} bytes per parameter (weight, gradient, optimizer) with "
            f"activations of {precision.activation_bytes}: {framework} keeps {works}"
        )


def require_whole_heads(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    """Raise where tensor ranks would share a key-value head."""
    attention = problem.architecture.attention
    heads = attention.key_value_heads if isinstance(attention, GroupedAttention) else layout.tensor
    if heads % layout.tensor:
        raise InputError(
            f"tensor degree {layout.tensor} with {heads} key-value heads: {framework} gives every "
            "tensor rank equally many of its own; choose a divisor"
        )


def require_context(problem: TrainingProblem, layout: Layout, framework: str) -> None:
    """Raise unless context ranks get equal parts from both ends of a sequence."""
    if layout.context > 1 and problem.sequence % (2 * layout.context):
        raise InputError(
            f"context degree {layout.context} with {problem.sequence} tokens: {framework} needs a "
            f"multiple of 2 x context = {2 * layout.context} tokens"
        )
