"""Torchvision beside a torch of another build.

The registry's torchvision is built for CUDA: beside torch for CPUs its C++ operators do not load,
and without the schemas of two of them neither it nor what imports it, such as transformers, can be
imported. Once this module has been imported, an import of torchvision defines them.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

OPERATORS = ("nms", "qnms")
LIBRARIES: list[object] = []  # the definitions end with them
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class TorchvisionSchemas(MetaPathFinder):
    """Finds nothing, but defines the operators when torchvision is looked for."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None."""
        if name == "torchvision":
            sys.meta_path.remove(self)
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None and spec.origin is not None:
                LIBRARIES.append(_defined(Path(spec.origin).parent))
        return None


def _defined(package: Path) -> object:
    """The operators' library, None where torchvision's own is loaded."""
    import torch

    try:
        torch.ops.load_library(next(package.glob("_C.*")))
    except (OSError, StopIteration):
        library = torch.library.Library("torchvision", "DEF")
        for name in OPERATORS:
            library.define(f"{name}{SCHEMA}")
        return library
    return None


# Python may have started with this very file, as a module of another name.
NAMES = {type(one).__name__ for one in sys.meta_path}
if TorchvisionSchemas.__name__ not in NAMES and "torchvision" not in sys.modules:
    sys.meta_path.insert(0, TorchvisionSchemas())
