"""A file of a model's parameters: a pickled state dict, or safetensors."""

import io
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError

_SAFETENSORS = ".safetensors"


def require_format(path: Path | None) -> None:
    """Refuse a safetensors file where the library is not installed."""
    if path is not None and path.suffix == _SAFETENSORS and find_spec("safetensors") is None:
        raise InputError(
            f"{path} needs the package safetensors: pip install 'stagewright[safetensors]', or "
            "name a file that ends in .pt"
        )


def write_parameters(path: Path, parameters: Mapping[str, Tensor]) -> None:
    """Write a state dict, in which tied names have the same tensor."""
    if path.suffix == _SAFETENSORS:
        content = _safetensors(parameters)
    else:
        buffer = io.BytesIO()
        torch.save(parameters, buffer)
        content = buffer.getvalue()
    documents.write_bytes(path, content, "the parameters")


def _safetensors(parameters: Mapping[str, Tensor]) -> bytes:
    """The file that ``safetensors.torch.save_model`` writes, with the format as transformers reads.

    Of tied names the alphabetically first has the tensor; the metadata map the others to it.
    """
    from safetensors.torch import save

    first: dict[int, str] = {}
    metadata = {"format": "pt"}
    for name in sorted(parameters):
        kept = first.setdefault(id(parameters[name]), name)
        if kept != name:
            metadata[name] = kept
    own = {name: parameters[name].contiguous() for name in sorted(first.values())}
    return bytes(save(own, metadata))
