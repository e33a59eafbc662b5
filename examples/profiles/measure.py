"""Measure a network layer by layer with torch and write a model document.

    python examples/profiles/measure.py gpt -o gpt-12x512.cpu.json

Every layer runs alone on the output of the layer before it. The forward (F), the gradient of its
input alone (I) and its whole backward (B) are timed; the weight gradient is the rest, W = B - I.
The first layer has no input gradient. Rounds over all layers are repeated and medians taken, so
that a disturbance of the machine falls on all layers alike. On a CPU one core works and its
processor time counts, which other processes do not lengthen; on a GPU elapsed time counts.

``saved_bytes`` counts every storage that autograd keeps once, without parameters and buffers. A
tensor that two neighbouring layers keep is counted in both, because a cut between them makes two
copies of it.
"""

import argparse
import os
import platform
import re
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import networks
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stagewright.graphs.chain import Chain, Layer, LayerCost, save_model

NETWORKS = {"gpt": networks.gpt, "resnet50": networks.resnet50}
WARM_UP = 2  # rounds
DIGITS = 4  # significant ones of a time

Floats = NDArray[np.float64]


def main() -> None:
    """Measure one network at every microbatch size and write its document."""
    options = _options()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = NETWORKS[options.network]()
    for layer in network.layers.values():
        layer.to(options.device)
    measured = [_measure(network, size, options) for size in options.sizes]
    chain = Chain(
        name=network.name,
        source=_source(options, [times for times, _ in measured]),
        microbatch_size=max(options.sizes),
        layers=tuple(
            Layer(
                name,
                float(sum(parameter.nbytes for parameter in layer.parameters())),
                tuple(
                    _cost(options, size, times[:, i], bytes_[i])
                    for size, (times, bytes_) in zip(options.sizes, measured, strict=True)
                ),
            )
            for i, (name, layer) in enumerate(network.layers.items())
        ),
        optimizer_bytes_per_parameter_byte=network.optimizer_bytes_per_parameter_byte,
    )
    save_model(chain, options.output)
    print(f"{options.output}: {len(chain)} layers; {chain.source}")


def _measure(
    network: networks.Network, size: int, options: argparse.Namespace
) -> tuple[Floats, list[tuple[int, int]]]:
    """Seconds (F, I, B), shape (repeats, layers, 3), and each layer's (saved, output) bytes."""
    layers = list(network.layers.values())
    inputs = _inputs(layers, network.samples(size).to(options.device))
    rounds = [
        [_times(layer, x, options.device) for layer, x in zip(layers, inputs, strict=True)]
        for _ in range(WARM_UP + options.repeats)
    ]
    bytes_ = [_bytes(layer, x) for layer, x in zip(layers, inputs, strict=True)]
    return np.array(rounds[WARM_UP:]), bytes_


def _inputs(layers: list[nn.Module], x: Tensor) -> list[Tensor]:
    """Each layer's input; all but the first one's need a gradient."""
    inputs = [x]
    with torch.no_grad():
        for layer in layers[:-1]:
            x = layer(x)
            inputs.append(x.detach().clone().requires_grad_())
    return inputs


def _times(layer: nn.Module, x: Tensor, device: str) -> tuple[float, float, float]:
    """Seconds of forward, input gradient and whole backward, once."""
    parameters = list(layer.parameters())
    wanted = [x] if x.requires_grad else []
    forward, output = _timed(lambda: layer(x), device)
    gradient = torch.randn_like(output)
    backward_of_input = 0.0
    if wanted:
        backward_of_input, _ = _timed(
            lambda: torch.autograd.grad(output, wanted, gradient, retain_graph=True), device
        )
    backward, _ = _timed(
        lambda: torch.autograd.grad(output, [*wanted, *parameters], gradient), device
    )
    return forward, backward_of_input, backward


def _timed(work: Callable[[], Any], device: str) -> tuple[float, Any]:
    if device == "cpu":
        start = time.process_time()
        result = work()
        return time.process_time() - start, result
    torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result


def _bytes(layer: nn.Module, x: Tensor) -> tuple[int, int]:
    """Bytes that autograd keeps from forward to backward, and bytes of the output."""
    fixed = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *layer.buffers())}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in fixed:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(x)
    return sum(kept.values()), output.nbytes


def _cost(
    options: argparse.Namespace, size: int, times: Floats, bytes_: tuple[int, int]
) -> LayerCost:
    """The medians of one layer's ``times``, shape (repeats, 3)."""
    forward, backward_of_input, backward = (float(t) for t in np.median(times, axis=0))
    # A difference of two medians may come out below zero for a layer that has little of W.
    backward_of_input = min(backward_of_input, backward)
    return LayerCost(
        microbatch_size=size,
        forward_seconds=_rounded(forward),
        input_gradient_seconds=_rounded(backward_of_input),
        weight_gradient_seconds=_rounded(backward - backward_of_input),
        saved_bytes=float(bytes_[0]),
        output_bytes=float(bytes_[1]),
        device_kind=options.kind,
    )


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{DIGITS}g}")


def _source(options: argparse.Namespace, rounds: list[Floats]) -> str:
    low, middle, high = np.percentile([times[:, :, [0, 2]] for times in rounds], [25, 50, 75], 1)
    spread = (high - low) / middle
    return (
        f"measured: layer by layer with torch {torch.__version__}, float32, "
        f"on {_machine(options)}, {date.today()}; medians of {options.repeats} rounds, "
        f"interquartile range {np.median(spread):.0%} of the median for the typical layer, "
        f"{spread.max():.0%} for the worst"
    )


def _machine(options: argparse.Namespace) -> str:
    if options.device == "cuda":
        return torch.cuda.get_device_name()
    return f"one of {os.cpu_count()} cores of {_processor()}, processor time"


def _processor() -> str:
    """The processor's name, with family and model where the kernel tells them."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor() or platform.machine()
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", cpuinfo.read_text(), re.MULTILINE))
    name = fields.get("model name", platform.machine())
    return f"{name} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("-o", "--output", required=True, type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kind", help="the device kind that clusters will name")
    parser.add_argument("--sizes", type=int, nargs="+", default=(1, 2, 4), help="in samples")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    if options.kind is None:
        name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu core"
        options.kind = name.lower().replace(" ", "-")
    return options


if __name__ == "__main__":
    main()
