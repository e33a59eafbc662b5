"""Modules that change their input, and copies of them that do not."""

from typing import Any

from torch import fx, nn


def replace_in_place(model: nn.Module, graph: fx.Graph) -> None:
    """Make ReLU(inplace=True) and the like return a new value, as a cut may precede them."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    calls = [node for node in graph.nodes if node.op == "call_module" and node.all_input_nodes]
    modules = [model.get_submodule(str(node.target)) for node in calls]
    made_new = []
    for node, module in zip(calls, modules, strict=True):
        changed = node.all_input_nodes[0]
        if is_in_place(module):
            changed.replace_all_uses_with(
                node, lambda user, after=position[node]: position[user] > after
            )
        if is_in_place(first_step(module)) and (
            module is first_step(module) or len(changed.users) == 1
        ):
            made_new.append(first_step(module))
    for module in made_new:
        module.inplace = False


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
