"""A torch module as a chain of layers; run in order they are the module.

A layer takes every value that is alive before it and returns a tuple of every value alive after
it, so that the chain may be cut between any two layers: skip connections pass through the layers
that they skip. A value that is not a tensor, such as a size, does not pass; the layers that need it
compute it again.

A layer is a leaf of the module tree with the functions called after it. The module itself and every
module that holds blocks are descended into; blocks are modules other than torch's own in a
ModuleList, ModuleDict or Sequential.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from stagewright.executor.capture.cutting import cut_graph
from stagewright.executor.capture.exported.exporting import Example, export
from stagewright.executor.capture.exported.leaves import holds_closed_blocks
from stagewright.executor.capture.in_place import first_step, is_in_place, replace_in_place
from stagewright.executor.capture.layers import CapturedLayer, LayeredModel, Listed
from stagewright.executor.capture.tensor_plans import plans_in
from stagewright.executor.capture.tracer import holds_blocks, inputs_of, trace_twice
from stagewright.graphs.documents.errors import InputError


def capture(model: nn.Module | Sequence[nn.Module], example: Example | None = None) -> LayeredModel:
    """Split ``model``, a module or a list of modules, into layers; every module keeps its mode.

    The layers share the parameters and buffers of ``model``, which may live on any device, meta
    included. Without an ``example`` those of a module's arguments that have no default are its
    inputs. With one, a module that cannot be traced symbolically, or is called with other things
    than tensors by position, is exported for it.

    Raises
    ------
    InputError
        If the module cannot be traced, because its path of execution depends on data, or if the
        layers would differ from it: it keeps Python state, or has hooks that would not be called.
    """
    if isinstance(model, list | tuple | nn.ModuleList):
        found = _capture_list(list(model))
        plans = plans_in(nn.ModuleList(model))
    elif isinstance(model, nn.Module):
        require_plain_tensors(model)
        _require_no_backward_hooks(model)
        found = _traced(model) if example is None else _for_example(model, example)
        plans = plans_in(model)
    else:
        raise InputError(f"the model is a {type(model).__name__}, not a torch module or a list")
    return replace(_require_whole_gradients(found), plans=plans)


def _for_example(model: nn.Module, example: Example) -> LayeredModel:
    """The model traced or exported, the better way first; only a traced model takes any size."""
    if not example.signature.is_positional or example.takes_loss:
        return _exported(model, example)
    ways = [lambda: _traced(model), lambda: _exported(model, example)]
    if holds_closed_blocks(model):
        ways.reverse()
    try:
        return ways[0]()
    except InputError:
        return ways[1]()


def _traced(model: nn.Module) -> LayeredModel:
    graph = trace_twice(model)
    replace_in_place(model, graph)
    return cut_graph(model, graph)


def _exported(model: nn.Module, example: Example) -> LayeredModel:
    found = export(model, example)
    layers = cut_graph(model, found.graph, found.attributes, found.output)

    def again(shapes: Sequence[tuple[int, ...]]) -> LayeredModel:
        pairs = zip(shapes, example.tensors, strict=True)
        tensors = tuple(torch.empty(shape, dtype=one.dtype, device="meta") for shape, one in pairs)
        return _exported(model, replace(example, tensors=tensors))

    return replace(layers, signature=example.signature, guards=found.guards, again=again)


def _capture_list(modules: list[nn.Module]) -> LayeredModel:
    if not modules:
        raise InputError("the list of modules is empty; it needs one module per layer")
    for number, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            kind = type(module).__name__
            raise InputError(f"entry {number} of the list of modules is a {kind}, not a module")
        require_plain_tensors(module, f"{number}.")
        if is_in_place(first_step(module)):  # there may be a cut before it
            first_step(module).inplace = False
    layers = [CapturedLayer(str(i), Listed(i, module)) for i, module in enumerate(modules)]
    inputs = inputs_of(modules[0])
    return LayeredModel(tuple(layers), max(1, len(inputs)), output=None)


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


def _require_no_backward_hooks(model: nn.Module) -> None:
    """Refuse backward hooks of modules that are cut into layers."""
    for name, module in model.named_modules():
        if (module is model or holds_blocks(module)) and (
            module._backward_hooks or module._backward_pre_hooks
        ):
            path = f" {name!r}" if name else ""
            raise InputError(
                f"{type(module).__name__}{path} has a backward hook, but is cut into layers; put "
                "the hook on a module within, or pass a list of modules"
            )


def _require_whole_gradients(model: LayeredModel) -> LayeredModel:
    """``model``, unless a parameter has a hook that would be given its gradient layer by layer."""
    users = Counter(id(one) for layer in model.layers for one in layer.module.parameters())
    for names, one in model.parameters_by_name().items():
        if one._backward_hooks and users[id(one)] > 1:
            raise InputError(
                f"parameter {names[0]!r} has a hook and is used in {users[id(one)]} layers, each "
                "of which would call it with a part of the gradient; remove the hook"
            )
    return model
