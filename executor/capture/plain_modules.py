"""What of a user's modules is made plain before they are captured, or refused."""

from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from stagewright.graphs.documents.errors import InputError


def made_plain(model: Any) -> Any:
    """The module or list that is captured in place of ``model``; its parts are replaced in place.

    Modules that torch.compile wraps take the place of their wrapper, whose kernels cannot run on
    tensors without data; `Executor(compile=True)` compiles layers. Names are those of the plain
    module, as in ``torch.distributed.checkpoint``. Gradients of embeddings are dense: the same
    numbers, which are summed over microbatches and devices.
    """
    if isinstance(model, list | tuple):
        return [made_plain(one) for one in model]
    model = _unwrapped(model)
    if not isinstance(model, nn.Module):
        return model
    for module in model.modules():
        module._compiled_call_impl = None  # of module.compile()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False
        for name, child in module._modules.items():
            module._modules[name] = _unwrapped(child)
    return model


def _unwrapped(module: Any) -> Any:
    while isinstance(module, OptimizedModule):
        module = module._orig_mod
    return module


def require_plain_tensors(model: nn.Module, prefix: str = "") -> None:
    """Refuse parameters whose properties their copies would not have."""
    for name, one in model.named_parameters():
        if isinstance(one, DTensor):
            raise InputError(
                f"parameter {prefix + name!r} is a DTensor, as parallelize_module, fully_shard or "
                "a device mesh of transformers make it: give the plain module, which the plan "
                "divides itself (a stage's tensor degree, by its tp_plan)"
            )
        if is_lazy(one):
            raise InputError(
                f"parameter {prefix + name!r} has no shape yet; call the model once before"
            )
        if one._post_accumulate_grad_hooks:
            raise InputError(
                f"parameter {prefix + name!r} has a hook that runs after its gradient is "
                "accumulated; gradients are summed up over microbatches and devices first: remove "
                "the hook"
            )


def first_step(module: nn.Module) -> Any:
    """``module``, or the first module of a sequence, which is given the input."""
    while isinstance(module, nn.Sequential) and len(module):
        if type(module).forward is not nn.Sequential.forward:
            break
        module = module[0]
    return module


def is_in_place(module: nn.Module) -> bool:
    """Whether a module changes its input."""
    return getattr(module, "inplace", False) is True
