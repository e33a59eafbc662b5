"""Torchvision beside a torch of another build.

The registry's torchvision is built for CUDA: beside torch for CPUs its C++ operators do not load,
and without the schemas of two of them it cannot be imported. Import this module before torchvision,
or transformers, which imports it.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def _loads(package: str) -> bool:
    """Whether torchvision's own operators load, which define the schemas themselves."""
    library = next(Path(package).parent.glob("_C.*"), None)
    try:
        torch.ops.load_library(library)
    except OSError:
        return False
    return library is not None


def _define(names: tuple[str, ...]) -> torch.library.Library | None:
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None or _loads(spec.origin):
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in names:
        library.define(f"{name}{SCHEMA}")
    return library


# The definitions end with the library.
LIBRARY = _define(("nms", "qnms"))
