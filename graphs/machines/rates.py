"""Rates: what the kernels of a software stack reach of a device's peaks, from measured iterations.

A *rate set* is a data file of this package (``rate_sets/``) or the user's own: a stack on a kind of
device, the releases whose runs it was fitted to, and how far its predictions were off where a model
was left out of the fit. ``python -m benchmarks.rates`` makes those of the package.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.anchors import Anchor
from stagewright.graphs.machines.devices import Accelerator, accelerator
from stagewright.graphs.machines.stack_memory import STACK_MEMORY, stack_memory

FOLDER = Path(__file__).parent / "rate_sets"

Feature = Literal[
    "ZeRO 2-3 between servers",
    "context parallelism",
    "experts between servers",
    "activation offload",
    "schedules in a V",
    "products in 8 bits",
    "products in 16 bits",
    "products in 32 bits",
]
"""What is not in every stack's measured runs, and then has a price that no run confirms."""
Beyond = Literal["more GPUs", "longer sequences", "recurrent mixers"]
"""In what a training can go beyond all measured runs."""

UNMEASURED: dict[Feature | Beyond, tuple[float, float]] = {
    "ZeRO 2-3 between servers": (1.0, 1.1),
    "context parallelism": (1.2, 1.1),
    "experts between servers": (1.1, 1.25),
    "activation offload": (1.0, 1.1),
    "schedules in a V": (1.0, 1.25),
    "products in 8 bits": (1.0, 1.2),
    "products in 16 bits": (1.0, 1.2),
    "products in 32 bits": (1.0, 1.2),
    "more GPUs": (1.0, 1.05),
    "longer sequences": (1.0, 1.1),
    "recurrent mixers": (1.0, 1.2),
}
"""By how much the range widens at its low and at its high end where a rate set's runs lack it.

Fitted to a set's runs without it (of GPUs and tokens: a fourth of the most), the ranges that are
so much wider hold 9 of 10 of the runs with it, and none is faster (``benchmarks/rates_transfer``).
No run has products in 32 bits or in TF32, nor recurrent mixers, which are priced as products: as
much as of 16 bits is assumed. Of schedules in a V one run is published, DeepSeek-V3's, to which
nothing is fitted: it took a quarter longer (``benchmarks/layout_experts``).
"""

BORROWED, OTHER_KIND, OTHER_DEVICE = 1.25, 2.0, 1.6
"""By how much the range widens on each side where rates are of a similar stack (eager or compiled
torch), of one of another kind (Megatron's beside torch's), and of another family of devices.

So much holds 9 of 10 of the runs that were predicted by borrowed rates
(``benchmarks/rates_transfer``).
"""


@documents.record
class Reached:
    """The achieved part of a device's peaks, by what runs on it.

    A matrix product of F FLOPs reaches ``matmul * F / (F + half_flops)`` of the peak: half of
    ``matmul`` at ``half_flops``; products in 8 bits reach ``fp8_matmul`` of theirs (None: as much).
    Making the operands of products in 8 bits moves ``cast_bytes`` per element, and the head's
    products are in 8 bits only if ``fp8_head``. Fused attention is never in 8 bits, where
    ``attention`` is given: the part of the peak of their type that its forward reaches (backward:
    ``attention_backward``), of the products that a causal mask leaves; a kernel of F such FLOPs
    reaches half of it at ``attention_half_flops``. None: it is a product like others, of the whole
    matrix of scores. ``context_balanced``: every context rank has tokens from both ends of a
    sequence; else the last rank attends to all, and the others wait for it.

    Convolutions reach ``convolution`` of the peak of their type, by default what ResNet-50 tells of
    a V100 (see ``rate_sets/pytorch-v100.json``): fast algorithms save multiplications.

    ``memory`` is the part of the memory bandwidth that other kernels reach, ``launch_seconds`` what
    each kernel takes in addition. ``dispatch_seconds`` is what the host needs to start a kernel
    while the device is at work: a layer lasts at least as long as it takes to start its kernels.
    Experts add ``expert_seconds`` per layer and direction: sorting the tokens and waiting for their
    numbers. They add ``each_expert_seconds`` per expert on the device to the forward and to the
    gradients of inputs and of weights: starting each expert's kernels. The part ``expert_overlap``
    of the way to the experts and back is beside computation; with ``once_per_unit`` a token crosses
    to a server once, and is copied there to its experts.

    The loss moves ``logit_bytes`` per logit in each direction, more where its softmax is not fused;
    None: it reads and writes it once.

    The exchanges of ZeRO 2 and 3 beside a microbatch's computation slow it down by the part
    ``contention`` of the time that both run: they take multiprocessors and memory bandwidth.
    """

    matmul: float
    half_flops: float
    memory: float
    launch_seconds: float
    dispatch_seconds: float = 0.0
    fp8_matmul: float | None = None
    fp8_head: bool = True
    cast_bytes: float = 0.0
    attention: float | None = None
    attention_backward: float | None = None
    attention_half_flops: float = 0.0
    convolution: float = 0.75
    context_balanced: bool = True
    expert_seconds: float = 0.0
    each_expert_seconds: float = 0.0
    expert_overlap: float = 0.0
    once_per_unit: bool = False
    contention: float = 0.0
    logit_bytes: float | None = None

    def __post_init__(self) -> None:
        for name in (
            "matmul", "memory", "fp8_matmul", "attention", "attention_backward", "convolution",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise InputError(f"{name} must be in (0, 1], got {value:g}")
        for name in (
            "half_flops", "launch_seconds", "dispatch_seconds", "cast_bytes",
            "attention_half_flops", "expert_seconds", "each_expert_seconds", "contention",
            "logit_bytes",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1e15:
                raise InputError(f"{name} must not be negative, got {value:g}")
        if not 0 <= self.expert_overlap <= 1:
            raise InputError(f"expert_overlap must be from 0 to 1, got {self.expert_overlap:g}")


@documents.record
class Spread:
    """The least and the largest measured over predicted value that a rate set stands for."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < 1e3:
            raise InputError(
                f"a range is from above 0 to below 1000, got {self.low:g} to {self.high:g}"
            )

    def widened(self, low_by: float, high_by: float | None = None) -> "Spread":
        """The range with more room at its low end, and as much or another at its high end."""
        return Spread(self.low / low_by, self.high * (high_by or low_by))

    def joined(self, other: "Spread") -> "Spread":
        """The range that has both ranges."""
        return Spread(min(self.low, other.low), max(self.high, other.high))


@documents.record
class LeftOut:
    """Errors of ``runs`` of one model, with rates fitted to the other models' runs.

    ``error`` is the mean of the absolute, ``bias`` of predicted over measured seconds less one.
    """

    model: str
    runs: int
    error: float
    bias: float


@documents.record
class RateSet:
    """What a ``stack`` reaches on the kinds of ``devices`` that were measured, in its ``releases``.

    ``dense`` and ``experts`` are the ranges of the seconds of models without and with experts,
    ``memory`` that of the bytes; ``errors`` those of models that were left out of the fit.
    ``borrowed`` says what was not measured, where rates of another stack or device are taken;
    ``measured`` are the features that some of the runs have, of ``most_devices`` at the most and
    sequences of ``longest_sequence``; None: not known. An ``anchor`` has the layers of one model as
    they were timed, and the rates are then of that model alone.
    """

    name: str
    stack: str
    devices: tuple[str, ...]
    releases: str
    source: str
    fitted_to: str
    reached: Reached
    dense: Spread
    experts: Spread
    memory: Spread
    errors: tuple[LeftOut, ...] = ()
    borrowed: str | None = None
    measured: tuple[Feature, ...] = ()
    anchor: Anchor | None = None
    most_devices: int | None = None
    longest_sequence: int | None = None
    format: Literal["stagewright-rates"] = "stagewright-rates"
    version: Literal[1] = 1

    def __str__(self) -> str:
        """The name, with what was borrowed and what it was fitted to."""
        borrowed = "" if self.borrowed is None else f", {self.borrowed}"
        return f"{self.name}{borrowed} ({self.fitted_to})"

    @property
    def left_out_runs(self) -> int:
        """How many runs were left out of a fit."""
        return sum(one.runs for one in self.errors)

    @property
    def mean_error(self) -> float | None:
        """The mean absolute error of the left-out runs, None if none was left out."""
        return self._mean([one.error for one in self.errors])

    @property
    def mean_bias(self) -> float | None:
        """The mean error of the left-out runs, None if none was left out."""
        return self._mean([one.bias for one in self.errors])

    def _mean(self, by_model: Sequence[float]) -> float | None:
        if not self.left_out_runs:
            return None
        weighted = zip(self.errors, by_model, strict=True)
        return sum(one.runs * value for one, value in weighted) / self.left_out_runs


_FAMILIES = {
    "v100": ("v100", "v100-32gb", "t4", "p100", "1080ti", "k80"),
    "a100": ("a100", "a100-80gb", "generic"),
    "h100": ("h100", "h100-pcie", "h100-nvl", "h200", "h800", "h20"),
    "b200": ("b200", "gb200", "b300", "gb300"),
}
_NEXT = {"v100": "a100", "a100": "h100", "h100": "b200", "b200": "h100"}
"""Where a stack has no rates of a family, those of this one are nearest."""

_LIKE = {
    "plan": "megatron", "megatron-2021": "megatron", "deepspeed": "fsdp", "accelerate": "fsdp",
    "automodel": "fsdp",
}  # fmt: skip
"""The stack whose rates are taken for one without its own: for DeepSpeed, Accelerate and Automodel,
which run without compilation too, those of Composer's FSDP."""


def _rates_stack(framework: str) -> str:
    """The stack whose rates are taken for a framework."""
    known = STACK_MEMORY.get(framework)
    stack = framework if known is None else known.name
    return _LIKE.get(stack, stack)


def read_rates(path: str | os.PathLike[str]) -> RateSet:
    """The rate set in the JSON file at ``path``; InputError, in one line, if it is not valid."""
    return documents.read(RateSet, path)


@lru_cache(maxsize=1)
def rate_sets() -> dict[str, RateSet]:
    """The rate sets of the package by name, the newest of a stack and device first."""
    return {one.stem: read_rates(one) for one in sorted(FOLDER.glob("*.json"), reverse=True)}


def rates_named(name: str) -> RateSet:
    """The rate set of the package, or of the JSON file, that is called ``name``."""
    if name.lower().endswith(".json"):
        return read_rates(name)
    return published_rates(name, "; or give the JSON file of your own")


def published_rates(name: str, instead: str = "") -> RateSet:
    """The rate set of the package that is called ``name``; InputError, with the names, if none."""
    if name not in rate_sets():
        known = ", ".join(sorted(rate_sets()))
        raise InputError(f"rates {name!r} are not known; known are {known}{instead}")
    return rate_sets()[name]


def rates_of(kind: str | Accelerator, framework: str | None = None) -> RateSet:
    """The rates for a framework (None: Megatron's) on a kind of device, of the nearest that exist.

    A kind without rates of its own takes those of its family, another than the families' the
    A100's, and a stack without rates of a family plain PyTorch's, or those of the next family.
    What is borrowed is said, and widens the range.

    Raises InputError if the kind or the framework is not known.
    """
    card = accelerator(kind)
    stack = "megatron"
    if framework is not None:
        stack_memory(framework)  # it is known
        stack = _rates_stack(framework)
    family = next((one for one, kinds in _FAMILIES.items() if card.name in kinds), None)
    own = family or "a100"
    places = [(own, stack), (own, "pytorch"), (_NEXT[own], stack), (_NEXT[_NEXT[own]], stack)]
    found = next(
        one
        for device, measured in places
        for one in rate_sets().values()
        if one.stack == measured and not set(one.devices).isdisjoint(_FAMILIES[device])
    )
    return taken_for(found, card, framework)


def rates_for(
    card: Accelerator, rates: RateSet | str | None, framework: str | None = None
) -> RateSet:
    """The given rates, those of a name or a file, or by default those of the kind of device."""
    if rates is None:
        return rates_of(card, framework)
    return taken_for(rates_named(rates), card, framework) if isinstance(rates, str) else rates


def taken_for(found: RateSet, card: Accelerator, framework: str | None = None) -> RateSet:
    """A rate set as it stands for a framework (None: whichever it is of) on a kind of device.

    What is borrowed is said, and widens the range.
    """
    stack = found.stack if framework is None else _rates_stack(framework)
    is_of_it = found.stack == framework or (
        found.stack == stack == "megatron" and framework != "plan"
    )
    lacks, by = [], 1.0
    if framework is not None and not is_of_it:
        lacks.append(f"not measured with {'our executor' if framework == 'plan' else framework}")
        is_alike = framework != "plan" and (found.stack == "megatron") == (stack == "megatron")
        by *= BORROWED if is_alike else OTHER_KIND
    if card.name not in found.devices:
        lacks.append(f"not measured on {card.name}")
        family = next((kinds for kinds in _FAMILIES.values() if card.name in kinds), ())
        by *= OTHER_DEVICE if set(found.devices).isdisjoint(family) else 1.0
    if not lacks:
        return found
    return replace(
        found,
        borrowed="; ".join(filter(None, (found.borrowed, *lacks))),
        dense=found.dense.widened(by),
        experts=found.experts.widened(by),
    )
