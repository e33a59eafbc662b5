"""``devices``, ``models`` and ``frameworks``: what is known, with where it is from."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from stagewright.cli.console import print_table, say, tell
from stagewright.cli.options import Printed
from stagewright.graphs.documents.units import format_bytes
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.service.known import DevicesAnswer, FrameworksAnswer, ModelsAnswer


class KnownOptions(Printed):
    """What the lists are asked."""

    name: Annotated[str | None, Option("NAME")] = None
    """One of them, with its sources."""


def devices(given: KnownOptions) -> int:
    """List the kinds of devices: memory, peaks, links and rates; of one with the source.

    Kinds without rates of their own borrow the nearest, and the range is wider.
    """
    from stagewright.service.known import known_devices

    tell(known_devices(given.name), given, _print_devices)
    return 0


def models(given: KnownOptions) -> int:
    """List the types of models that are read: what sets them apart, and what exports them."""
    from stagewright.service.known import known_models

    tell(known_models(given.name), given, _print_models)
    return 0


def frameworks(given: KnownOptions) -> int:
    """List the frameworks of layouts: releases, and what they run; of one every rule's source."""
    from stagewright.service.known import known_frameworks

    tell(known_frameworks(given.name), given, _print_frameworks)
    return 0


def _print_devices(answer: "DevicesAnswer") -> None:
    print_table(
        ("<device", "memory", "GB/s", "fp32", "fp16", "fp8", "server", "network", "host"),
        [
            (
                one.device.name, format_bytes(one.device.memory_bytes),
                _amount(one.device.memory_bytes_per_second, 1e9),
                _amount(one.device.fp32_flops, 1e12), _amount(one.device.fp16_flops, 1e12),
                _amount(one.device.fp8_flops, 1e12),
                _amount(one.device.server_bytes_per_second, 1e9),
                _amount(one.device.network_bytes_per_second, 1e9),
                _amount(one.device.host_bytes_per_second, 1e9),
            )
            for one in answer.devices
        ],
        tight=True,
    )  # fmt: skip
    say("links in GB/s per direction and device, peaks in TFLOP/s, dense; bf16 has that of fp16")
    if len(answer.devices) > 1:
        say("the source and the rates of each: stagewright devices NAME, or --json")
    else:
        (one,) = answer.devices
        rates = _listed(one.rates) if one.rates else f"borrowed, {one.nearest_rates}"
        say(f"source: {one.source}", f"rates: {rates}")


def _print_models(answer: "ModelsAnswer") -> None:
    print_table(
        ("<model", "<apart from a plain Llama", "<exported to"),
        [(one.name, _listed(one.traits), _listed(one.frameworks)) for one in answer.models],
    )
    say(f"read from {answer.models[0].source}; other types through an installed transformers")


def _print_frameworks(answer: "FrameworksAnswer") -> None:
    print_table(
        (
            "<framework", "<models", "<degrees", "<schedules", "<recomputation, offload",
            "<precisions",
        ),
        [
            (
                one.name, _listed(one.models or ("any",)), _listed(one.degrees),
                _listed(one.schedules), _listed(one.recomputation), _listed(one.precisions),
            )
            for one in answer.frameworks
        ],
    )  # fmt: skip
    if len(answer.frameworks) == 1:
        rules = [(one.rule, one.source) for one in answer.frameworks[0].rules]
        print_table(("<rule on layouts", "<source"), rules)
    else:
        say(
            *(f"{one.name}: {'; '.join(one.releases)}" for one in answer.frameworks),
            "the rules with their sources: stagewright frameworks NAME, or --json",
        )


def _amount(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:g}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "-"
