"""Rules of frameworks on layouts: what a framework lacks, by its table, and what it asks besides.

Search, explanations and exports ask the same rules, each with its place in the framework's code.
The rules that several frameworks have are here, the others beside the exports.
"""

import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

from stagewright.executor.export.layouts.features import FEATURES, Feature
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import GroupedAttention
from stagewright.graphs.models.traits import lacking

Require: TypeAlias = Callable[[TrainingProblem, Layout, str], None]
"""Raises InputError, in one line with what would do, of a layout for a framework of that name."""

Files: TypeAlias = Callable[[TrainingProblem, Layout], dict[str, str]]


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
