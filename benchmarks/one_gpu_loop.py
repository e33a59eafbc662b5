"""Time whole iterations of a model on one device, by layout: torch and a script of anchor alone.

    python one_gpu_loop.py anchor_llama "b1" "b4 full" -o loops.jsonl

The script's own layers are stacked. Weights have 16 bits, sums of gradients and masters 32; fused
AdamW. A row is written as soon as it is known; a layout without memory has an ``error``.
"""

import argparse
import gc
import json
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ON_GPU = torch.cuda.is_available()
WARM_UP = 2  # iterations
BATCH = 8  # samples of an iteration


class Training:
    """All layers of a model, with masters of the weights, to which gradients are added."""

    def __init__(self, anchor: Any, is_compiled: bool) -> None:
        blocks = anchor.MODEL["layers"] * [
            next(k for k in ("experts", "dense") if k in anchor.KINDS)
        ]
        self.layers = [
            anchor.layer_of(kind, anchor.Degrees(1, 1, False))
            for kind in ("embedding", *blocks, "head")
        ]
        self.flipped = getattr(self.layers[1], "samples_first", False)
        weights = [one for layer in self.layers for one in layer.parameters()]
        self.weights = weights
        self.masters = [torch.nn.Parameter(one.detach().float()) for one in weights]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-5, fused=True)
        for weight, master in zip(weights, self.masters, strict=True):
            master.grad = torch.zeros_like(master)
            weight.register_post_accumulate_grad_hook(partial(_add_to, master))
        if is_compiled:
            for layer in self.layers:
                layer.compile(dynamic=False)

    def iteration(self, batch: tuple[Tensor, ...], repeats: bool) -> float:
        """Seconds of the forward and the backward of every microbatch, and of the update."""
        _wait()
        began = perf_counter()
        for tokens in batch:
            (self._loss(tokens, repeats) / len(batch)).backward()
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)
        self.optimizer.zero_grad(set_to_none=False)
        _wait()
        return perf_counter() - began

    def _loss(self, tokens: Tensor, repeats: bool) -> Tensor:
        first, *blocks, last = self.layers
        x = self._flip(first(tokens))
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if repeats else block(x)
        return last(self._flip(x))

    def _flip(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous() if self.flipped else x


def _add_to(master: Tensor, weight: Tensor) -> None:
    assert master.grad is not None
    master.grad += weight.grad
    weight.grad = None


def _wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def _row(anchor: Any, layout: str, steps: int, is_compiled: bool) -> dict[str, object]:
    gc.collect()
    row = {
        "model": anchor.MODEL["name"], "layout": layout, "batch": BATCH, "compiled": is_compiled,
        "through": anchor.through(), "machine": torch.cuda.get_device_name() if ON_GPU else "CPU",
    }  # fmt: skip
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        training = Training(anchor, is_compiled)
        samples, *others = layout.split()
        shape = (BATCH // int(samples[1:]), anchor.TOKENS, int(samples[1:]))
        tokens = torch.randint(anchor.MODEL["vocabulary"], shape).unbind()
        seconds = [training.iteration(tokens, others == ["full"]) for _ in range(WARM_UP + steps)]
    except torch.OutOfMemoryError as error:
        return row | {"error": str(error)[:200]}
    counted = {
        name: torch.cuda.memory_stats().get(f"{name}.all.peak", 0) if ON_GPU else 0
        for name in ("allocated_bytes", "reserved_bytes")
    }
    return row | {"seconds": median(seconds[WARM_UP:]), "all_seconds": seconds, **counted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("anchor")
    parser.add_argument("layouts", nargs="+")
    parser.add_argument("-o", "--output", type=Path, default="loops.jsonl")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    anchor = import_module(given.anchor)  # beside this program
    anchor.start()
    for layout in given.layouts:
        row = _row(anchor, layout, given.steps, given.compile)
        with given.output.open("a") as file:
            print(json.dumps(row), file=file)
        print(layout, row.get("seconds", row.get("error")), flush=True)


if __name__ == "__main__":
    main()
