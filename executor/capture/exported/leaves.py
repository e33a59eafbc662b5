"""Which modules of a model are called whole: those that hold its parameters, block by block."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def leaves_of(
    model: nn.Module, opened: Collection[type] = (), *, outermost: bool = False
) -> dict[str, nn.Module]:
    """The modules with parameters that are called whole, by their names, each once.

    The model itself, lists and modules that hold a list of like blocks are opened, and those of a
    class in ``opened``. With ``outermost`` no block of a list is opened for the blocks in it.
    """
    return dict(_Walk(opened, outermost, set()).leaves("", model))


@dataclass(frozen=True, slots=True)
class _Walk:
    opened: Collection[type]
    outermost: bool
    seen: set[int]

    def leaves(
        self, name: str, module: nn.Module, is_listed: bool = False
    ) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in self.seen:
            return
        self.seen.add(id(module))
        if name and not self._is_open(module, is_listed):
            if next(module.parameters(), None) is not None:
                yield name, module
            return
        for field, child in module.named_children():
            listed = isinstance(module, CONTAINERS) and _is_block(child)
            yield from self.leaves(f"{name}.{field}" if name else field, child, listed)

    def _is_open(self, module: nn.Module, is_listed: bool) -> bool:
        if isinstance(module, nn.ModuleList | nn.ModuleDict) or type(module) in self.opened:
            return True
        return holds_like_blocks(module) and not (self.outermost and is_listed)


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
