"""Which modules of a model are blocks: called whole, whatever they do inside."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def leaves_of(
    model: nn.Module, opened: Collection[type] = (), closed: Collection[int] = ()
) -> dict[str, nn.Module]:
    """The modules with parameters that are called whole, by their names, each once.

    The model itself, lists and modules that hold a list of like blocks are opened, and those of a
    class in ``opened``. Modules with an id in ``closed`` are not.
    """
    return dict(_NestedWalk(opened, closed, set()).leaves("", model))


@dataclass(frozen=True, slots=True)
class _NestedWalk:
    opened: Collection[type]
    closed: Collection[int]
    seen: set[int]

    def leaves(self, name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in self.seen:
            return
        self.seen.add(id(module))
        is_closed = id(module) in self.closed
        if name and (is_closed or not self._is_open(module)):
            if is_closed or next(module.parameters(), None) is not None:
                yield name, module
            return
        for field, child in module.named_children():
            yield from self.leaves(f"{name}.{field}" if name else field, child)

    def _is_open(self, module: nn.Module) -> bool:
        if isinstance(module, nn.ModuleList | nn.ModuleDict) or type(module) in self.opened:
            return True
        return holds_like_blocks(module)


def holds_like_blocks(module: nn.Module) -> bool:
    """Whether a list within ``module`` has two blocks or more of one class."""
    for container in module.modules():
        if not isinstance(container, CONTAINERS):
            continue
        kinds = Counter(type(child) for child in container.children() if _is_block(child))
        if any(count > 1 for count in kinds.values()):
            return True
    return False


def holds_closed_blocks(model: nn.Module) -> bool:
    """Whether blocks are within a module of torch's own, such as its transformers.

    Tracing does not look into those: their paths depend on how they are called.
    """
    return any(
        _is_torchs(module) and not isinstance(module, CONTAINERS) and holds_like_blocks(module)
        for module in model.modules()
    )


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _is_block(module: nn.Module) -> bool:
    """Whether a module is more than one of torch's own operations, such as a convolution."""
    if isinstance(module, CONTAINERS) and _is_torchs(module):
        return False
    return not _is_torchs(module) or any(True for _ in module.children())


def innermost(
    model: nn.Module, error: BaseException, closed: Mapping[int, nn.Module]
) -> str | None:
    """The innermost module, other than ``model`` and its blocks, in whose forward an error is."""
    inside = {id(one) for leaf in leaves_of(model, (), closed).values() for one in leaf.modules()}
    names = {id(one): name for name, one in model.named_modules() if name}
    found, trace = None, (error.__cause__ or error).__traceback__
    while trace is not None:
        key = id(trace.tb_frame.f_locals.get("self"))
        if key in names and key not in inside:
            found = names[key]
        trace = trace.tb_next
    return found


def like(model: nn.Module, module: nn.Module) -> dict[int, nn.Module]:
    """The modules of the class of ``module``, of torch's classes that one alone."""
    every = [module] if _is_torchs(module) else model.modules()
    return {id(one): one for one in every if type(one) is type(module) and one is not model}
