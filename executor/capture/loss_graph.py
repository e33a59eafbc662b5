"""The dependencies of a loss: the model's outputs, and nothing else that is trained."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from stagewright.graphs.documents.errors import InputError

CURE = "let the model's last module hold them and return them, or its part of the loss"


def require_no_parameters(loss: Callable[..., Any]) -> None:
    """Refuse a loss that is a module with parameters to train, or a function that holds one."""
    for module in _modules(loss):
        for name, one in module.named_parameters():
            if one.requires_grad:
                raise InputError(
                    f"the loss has its own parameter {name!r} of {type(module).__name__}, "
                    f"which no stage trains; {CURE}"
                )


def require_from_outputs(loss: Tensor, outputs: Sequence[Tensor]) -> None:
    """Refuse a loss whose gradient would go to a tensor that is not in ``outputs``."""
    own = {id(one) for one in outputs}
    for leaf in _leaves(loss):
        if id(leaf) not in own:
            raise InputError(
                f"the loss depends on a parameter of shape {tuple(leaf.shape)} that is not an "
                f"output of the model, so that no stage gets its gradient; {CURE}"
            )


def backward_nodes(tensor: Tensor) -> Iterator[Any]:
    """The nodes of autograd's graph that a backward of ``tensor`` goes through, each once."""
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [before for before, _ in node.next_functions]


def _leaves(loss: Tensor) -> list[Tensor]:
    """The tensors that a backward of ``loss`` gives gradients to."""
    found = [node.variable for node in backward_nodes(loss) if hasattr(node, "variable")]
    return [loss] if loss.grad_fn is None else found


def _modules(loss: Any) -> Iterator[nn.Module]:
    """The modules that ``loss`` is, or is made of."""
    if isinstance(loss, nn.Module):
        yield loss
    elif isinstance(loss, partial):
        for one in (loss.func, *loss.args, *loss.keywords.values()):
            yield from _modules(one)
    elif isinstance(loss, MethodType):
        yield from _modules(loss.__self__)
    elif isinstance(loss, FunctionType):
        for cell in loss.__closure__ or ():
            if isinstance(cell.cell_contents, nn.Module):
                yield cell.cell_contents
