"""Modules that cannot run on tensors without data: they are run on tensors with values.

Their path depends on values, or a kernel has no rule for shapes alone, or another than it obeys.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.utils.stateless import _reparametrize_module

SCALE = 0.02  # of random numbers, as of common initialisations
Sizes = Callable[[Any], int]


def in_example(size: Any) -> int:
    """A size that may vary, in the example."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def elsewhere(given: Iterable[Any]) -> Sizes:
    """Distinct sizes, larger than the example's, for the ``given`` sizes that vary."""
    varying = [size.node for size in given if isinstance(size, torch.SymInt)]
    symbols = sorted({one for node in varying for one in node.expr.free_symbols}, key=str)
    least = 1 + max((int(node.hint) for node in varying), default=0)
    other = {symbol: least + place for place, symbol in enumerate(symbols)}

    def sized(size: Any) -> int:
        return int(size.node.expr.subs(other) if isinstance(size, torch.SymInt) else size)

    return sized


@contextmanager
def with_values(module: nn.Module) -> Iterator[None]:
    """While the body runs, ``module`` has parameters and buffers with values; none is fake.

    Of one module at a time, so that a model need not fit into memory.
    """
    with unset_fake_temporarily():
        every = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        with _reparametrize_module(module, valued_all(dict(every)), tie_weights=False):
            yield


def valued_all(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors with values in place of a module's tensors; a shared tensor stays shared."""
    made = {id(one): _like(one) for one in state.values()}
    return {name: made[id(one)] for name, one in state.items()}


def valued(one: Tensor, sizes: Sizes = in_example) -> Tensor:
    """A tensor with values of the shape, type and device of ``one``: random, zero or true.

    ``sizes`` tells what its varying sizes are.
    """
    shape, device = tuple(map(sizes, one.shape)), one.device
    if device.type == "meta":
        device = torch.device("cpu")
    if one.is_floating_point() or one.is_complex():
        generator = torch.Generator(device).manual_seed(0)
        made = torch.empty(shape, dtype=one.dtype, device=device)
        return made.normal_(0.0, SCALE, generator=generator)
    fill = torch.ones if one.dtype == torch.bool else torch.zeros
    return fill(shape, dtype=one.dtype, device=device)


def _like(one: Tensor) -> Tensor:
    made = valued(one).requires_grad_(one.requires_grad)
    return nn.Parameter(made, one.requires_grad) if isinstance(one, nn.Parameter) else made
