"""What a block of transformers keeps of a forward, as torch's hooks of saved tensors count it.

The blocks run on torch's meta device. Operators that run as one kernel where models are trained,
and as several in transformers' Python, are replaced by one that keeps what the kernel keeps: norms
and activations their input, rotations nothing, attention queries, keys and values. Recurrences keep
what their projections do: their kernels' share is not compared. A view counts its own elements: a
projection that makes queries, keys and values at once keeps all of its output in eager torch.
"""

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.executor.capture.mixers import mixer_of
from stagewright.graphs.models.architecture import Architecture, Operators
from stagewright.graphs.models.recurrences import RECURRENT, SelectiveScan
from stagewright.graphs.models.shards import LayerSplit, shares_of

TOKENS = 16

MORE = {
    "bloom": 4.0,  # scores of its own attention, and their copy in bf16
    "falcon": 2.0,  # scores of its own attention
    "falcon_h1": 1.0,  # the attention's input times a factor
    "gpt_oss": 9.0,  # gates and values before they are clamped
    "llama4_text": 24.0,  # queries and keys before norms without weights
}
"""Hidden states that eager torch keeps more of, by operators that the architecture leaves out."""

_CASTS = ("TBackward0", "ToCopyBackward0")  # of bf16 to fp32, for the router
_ACTIVATIONS = ("NewGELUActivation", "BloomGelu")
_KERNELS = ("convolution", "scan")


class _Kernel(torch.autograd.Function):
    """An operator that keeps some of its inputs."""

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], given: Tensor, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(*kept)
        return given.new_empty(shape)


def _keeping(given: Tensor, *_: Any, **__: Any) -> Tensor:
    return _Kernel.apply(given.shape, given, given)


def _attention(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> Any:
    batch, heads, tokens, _size = query.shape
    return _Kernel.apply((batch, tokens, heads, value.shape[-1]), query, query, key, value), None


def _rotated(first: Tensor, second: Tensor, *_: Any, **__: Any) -> Any:
    one = _Kernel.apply(first.shape, first)
    return (one, _Kernel.apply(second.shape, second)) if second.dim() == first.dim() else one


class _Kept:
    """Elements of saved tensors while a block runs, but for those inside a recurrence."""

    def __init__(self, model: nn.Module) -> None:
        every = [*model.parameters(), *model.buffers()]
        self.weights = {one.untyped_storage()._cdata for one in every}
        self.views: dict[int, dict[tuple[int, int], int]] = {}
        self.storages: list[torch.UntypedStorage] = []  # whose addresses are not used again
        self.counts = False

    def pack(self, saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        is_cast = saved.grad_fn is not None and saved.grad_fn.name() in _CASTS
        if not self.counts or is_cast or storage._cdata in self.weights:
            return saved
        if saved.dtype.is_floating_point:
            self.storages.append(storage)
            whole = storage.nbytes() // saved.element_size()
            views = self.views.setdefault(storage._cdata, {})
            others = sum(views.values())
            views.setdefault(
                (saved.storage_offset(), saved.numel()), min(saved.numel(), whole - others)
            )
        return saved

    def set(self, counts: bool, *_: Any) -> None:
        self.counts = counts

    def take(self, found: dict[int, int], index: int, *_: Any) -> None:
        found[index] = sum(sum(one.values()) for one in self.views.values())
        self.views, self.counts = {}, False


def kept_elements(model: Any, blocks: list[nn.Module], of: Architecture) -> dict[int, int]:
    """Elements that the first block of every kind keeps, by its index."""
    model.to(torch.bfloat16).train()
    kept, found = _Kept(model), dict[int, int]()
    config = model.config.get_text_config()
    config._attn_implementation, config._experts_implementation = "kernel", "grouped_mm"
    for index in {of.kind(index): index for index in reversed(range(of.layers))}.values():
        block = blocks[index]
        block.register_forward_pre_hook(partial(kept.set, True))
        block.register_forward_hook(partial(kept.take, found, index))
        for name, one in block.named_children():
            if isinstance(mixer_of(name, one, config, of.hidden), RECURRENT):
                _leave_out(one, kept)
    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda one: one):
        _run(model, kept)
    return found


def _leave_out(mixer: nn.Module, kept: _Kept) -> None:
    """Count nothing of a recurrence but its projections."""
    mixer.register_forward_pre_hook(partial(kept.set, False))
    mixer.register_forward_hook(partial(kept.set, True))
    for name, one in mixer.named_children():
        if isinstance(one, nn.Linear) and (not hasattr(mixer, "x_proj") or name == "in_proj"):
            one.register_forward_pre_hook(partial(kept.set, True))
            one.register_forward_hook(partial(kept.set, False))


def _run(model: Any, kept: _Kept) -> None:
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    try:
        mask = torch.zeros(1, 1, TOKENS, TOKENS)
        model(input_ids=tokens, use_cache=False, attention_mask=mask)
    except (ValueError, RuntimeError):  # masks of two dimensions alone
        kept.views, kept.counts = {}, False
        model(input_ids=tokens, use_cache=False)


def with_kernels(model: Any, blocks: list[nn.Module], monkeypatch: Any) -> None:
    """Replace operators by kernels, and drop nothing."""
    import transformers

    transformers.AttentionInterface.register("kernel", _attention)
    module = sys.modules[type(blocks[0]).__module__]
    for name in dir(module):
        if name.startswith("apply_rotary"):
            monkeypatch.setattr(module, name, _rotated)
    for block in blocks:
        vars(block).pop("forward", None)
    for one in model.modules():
        if "norm" in type(one).__name__.lower() or type(one).__name__ in _ACTIVATIONS:
            one.forward = _keeping
        for name, value in vars(one).items():
            if isinstance(value, float) and ("dropout" in name or name == "p"):
                setattr(one, name, 0.0)


def counted_elements(of: Architecture, index: int) -> float:
    """What the architecture says that a block keeps, but for the kernels of recurrences."""
    operators: Mapping[str, Any] = shares_of(of, TOKENS, LayerSplit()).every[1 + index].operators
    return sum(one.saved for name, one in _compared(of, index, dict(operators)).items())


def _compared(of: Architecture, index: int, operators: Operators) -> Operators:
    left_out = _KERNELS
    if any(isinstance(one, SelectiveScan) for one in of.parts(index).mixers):
        left_out = (*left_out, "step", "recurrent out")  # its kernel makes their inputs again
    return {name: one for name, one in operators.items() if not name.startswith(left_out)}
