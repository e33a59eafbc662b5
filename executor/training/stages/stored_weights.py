"""Weights in files of the safetensors format, of which a rank reads its own alone.

A file is the length of its header in 8 bytes, the header, and the bytes of the tensors; the header
is JSON and tells type, shape and place of each (the format's README, "Format"). Tensors are read
into memory of their own: a mapped file would count as this process's memory, whole.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stagewright.graphs.documents.errors import InputError

TYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"
SHOWN = 5  # names in an error


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file, at byte ``start``."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """The tensor, on the CPU."""
        held = torch.empty(self.nbytes, dtype=torch.uint8)
        into: Any = held.numpy()
        with self.path.open("rb") as file:
            file.seek(self.start)
            if file.readinto(into) != self.nbytes:
                raise InputError(f"{self.path} ends within {self.name!r}")
        return held.view(self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The tensors at ``path`` by name."""

    path: Path
    entries: Mapping[str, Entry]

    def require(self, model: nn.Module) -> None:
        """Refuse other names or shapes than those of the model's state dict.

        Of a tensor with several names, one is enough.
        """
        named = _names(model)
        known = {name for names, _ in named for name in names}
        missing = [names[0] for names, _ in named if self.entry(names) is None]
        self._refuse("has no tensor", missing)
        self._refuse("has tensors that the model has not:", self.entries.keys() - known)
        for names, tensor in named:
            for entry in self._entries(names):
                if entry.shape != tuple(tensor.shape):
                    raise InputError(
                        f"{entry.path}: {entry.name!r} has shape {entry.shape}, the model's "
                        f"{tuple(tensor.shape)}"
                    )
                if entry.dtype.is_floating_point != tensor.is_floating_point():
                    raise InputError(
                        f"{entry.path}: {entry.name!r} is {entry.dtype}, the model's {tensor.dtype}"
                    )

    def entry(self, names: Iterable[str]) -> Entry | None:
        """The tensor under the first of ``names`` that there is."""
        return next(iter(self._entries(names)), None)

    def read(self, names: Iterable[str]) -> Tensor:
        """The tensor under all of ``names`` that there are."""
        first, *others = self._entries(names)
        values = first.read()
        for other in others:
            if not torch.equal(values, other.read()):
                raise InputError(
                    f"{self.path}: {first.name!r} and {other.name!r} are one tensor in the model, "
                    "and differ here"
                )
        return values

    def _entries(self, names: Iterable[str]) -> list[Entry]:
        return [self.entries[name] for name in names if name in self.entries]

    def _refuse(self, what: str, names: Iterable[str]) -> None:
        listed = sorted(names)
        if listed:
            more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
            shown = ", ".join(map(repr, listed[:SHOWN]))
            raise InputError(f"{self.path} {what} {shown}{more}")


def find_weights(path: Path) -> StoredWeights:
    """The tensors of a file, of all files of an index, or of a folder.

    Only headers are read. Raises InputError if there is none, a file is not of the format, or a
    name is there twice.
    """
    found: dict[str, Entry] = {}
    for file in _files(path):
        for name, entry in _header(file).items():
            if name in found:
                raise InputError(f"{name!r} is in {found[name].path} and in {file}")
            found[name] = entry
    return StoredWeights(path, found)


def _files(path: Path) -> Sequence[Path]:
    if path.is_dir():
        indices = sorted(path.glob(f"*{INDEX}"))
        files = sorted(path.glob(f"*{SUFFIX}"))
        if not files or len(indices) > 1:
            raise InputError(f"{path} has {len(indices)} indices and {len(files)} {SUFFIX} files")
        return _indexed(indices[0]) if indices else files
    if path.name.endswith(INDEX):
        return _indexed(path)
    if path.suffix != SUFFIX:
        raise InputError(f"{path} is no folder, {SUFFIX} file or {INDEX} file")
    return [path]


def _indexed(index: Path) -> Sequence[Path]:
    try:
        names = json.loads(index.read_text())["weight_map"].values()
        return [index.parent / name for name in sorted(set(names))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{index} is not an index of weights: {error!r}") from None


def _header(path: Path) -> dict[str, Entry]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = {name: _entry(path, name, one, 8 + length) for name, one in header.items()}
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{path} is not a safetensors file: {error}") from None
    return found


def _entry(path: Path, name: str, told: Mapping[str, Any], data: int) -> Entry:
    if told["dtype"] not in TYPES:
        raise ValueError(f"{name!r} is of type {told['dtype']}; known are {', '.join(TYPES)}")
    start, stop = told["data_offsets"]
    entry = Entry(path, name, TYPES[told["dtype"]], tuple(told["shape"]), data + start)
    if stop - start != entry.nbytes or data + stop > path.stat().st_size:
        raise ValueError(f"{name!r} has not the bytes of its shape {entry.shape}")
    return entry


def _names(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Every tensor of a state dict once, with all its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, one in model.state_dict(keep_vars=True).items():
        if isinstance(one, Tensor):
            names.setdefault(id(one), []).append(name)
            tensors[id(one)] = one
    return [(found, tensors[key]) for key, found in names.items()]
