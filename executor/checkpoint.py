"""Checkpoints of a run, with torch.distributed.checkpoint.

A folder of checkpoints holds ``step-00000010`` and the like, complete by construction: a
checkpoint is written as ``.step-00000010.partial`` and renamed when all ranks have written. The
tensors go by the names of the unsplit model, so that any plan of the same model can go on from
them. All ranks must see the folder. Checkpoints are pickles: load only your own.
"""

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.distributed as dist
from pydantic import ConfigDict
from torch import Tensor

from stagewright.formulations.plan_class import Weights
from stagewright.graphs import documents
from stagewright.graphs.errors import InputError

# torch.distributed.checkpoint takes a second to import; only those who write or read need it.
if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

FORMAT: Literal["stagewright-checkpoint"] = "stagewright-checkpoint"
VERSION: Literal[1] = 1
HEADER = "stagewright.json"
KEPT = 2  # complete checkpoints in a folder
MODEL = "model."  # what the keys of parameters and buffers start with

TensorKinds = Mapping[str, tuple[torch.Size, torch.dtype]]


@dataclass(frozen=True, slots=True)
class Header:
    """What a checkpoint says of its run: the steps done, and how the weights are updated."""

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    steps: int
    weights: Weights
    optimizer: str
    format: Literal["stagewright-checkpoint"] = FORMAT
    version: Literal[1] = VERSION


def save(
    folder: Path,
    state: Mapping[str, Tensor],
    header: Header,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint to ``folder``; every rank of ``group`` calls it with its own share.

    Parameters
    ----------
    folder
        Made if it does not exist. The two newest checkpoints in it are kept.
    state
        Tensors by key; no key stands on two ranks.
    header
        The same on every rank.

    Raises
    ------
    OSError
        If it cannot be written; the checkpoints that were there stay.
    """
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    path = folder / f"step-{header.steps:08d}"
    partial = _partial(path)
    is_first = dist.get_rank(group) == 0
    if is_first:
        for leftover in folder.glob(".step-*.partial"):  # of a run that was killed while it wrote
            shutil.rmtree(leftover)
    dist.barrier(group)
    try:
        writer = FileSystemWriter(partial)
        state_dict_saver.save(dict(state), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        raise OSError(f"{path}: the checkpoint cannot be written: {_cause(error)}") from None
    if is_first:  # all have written
        documents.write_text(partial / HEADER, documents.to_json(header))
        _sync(partial)
        partial.rename(path)
        _sync(folder)
        for old in _complete(folder)[:-KEPT]:
            shutil.rmtree(old.rename(_partial(old)))
    return path


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in ``folder``."""
    return next(reversed(_complete(folder)), None)


def find(folder: Path | None, resume: bool, goal: Header) -> Path | None:
    """The checkpoint in ``folder`` from which to reach ``goal``; a run that begins finds none.

    Raises
    ------
    InputError
        If there is none to resume, or one that must not be overwritten; if nothing is left to do;
        if the weights are updated in another way.
    """
    if folder is None:
        return None
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is no folder for checkpoints")
    newest = latest(folder)
    if not resume:
        if newest is not None:
            raise InputError(
                f"{folder} holds {newest.name} of an earlier run; "
                "add --resume to go on from it, or name another folder"
            )
        return None
    if newest is None:
        raise InputError(f"there is no complete checkpoint in {folder}; leave out --resume")
    _require_reachable(newest, goal)
    return newest


def _require_reachable(path: Path, goal: Header) -> None:
    found = read_header(path)
    if found.steps >= goal.steps:
        raise InputError(f"{path} has done {found.steps} of {goal.steps} steps; nothing is left")
    for name in ("weights", "optimizer"):
        theirs, ours = getattr(found, name), getattr(goal, name)
        if theirs != ours:
            raise InputError(f"{path} is of a run with {name} {theirs!r}, this one has {ours!r}")


def read_header(path: Path) -> Header:
    """What the checkpoint says of its run; InputError if it is damaged."""
    return documents.read(Header, path / HEADER, FORMAT, VERSION)


def read_kinds(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and type of every tensor in the checkpoint; InputError if it is damaged."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # a damaged pickle may raise whatever it likes
        raise InputError(f"{_damaged(path)} ({type(error).__name__}: {error})") from None
    return {
        key: (entry.size, entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read(
    path: Path, keys: Iterable[str], group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """The tensors ``keys``, on the CPU; every rank of ``group`` calls it with what it wants.

    Raises
    ------
    InputError
        On every rank, if one of them cannot read what it wants.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    kinds = read_kinds(path)
    tensors = {key: torch.empty(kinds[key][0], dtype=kinds[key][1]) for key in keys}
    try:
        reader = FileSystemReader(path)
        state_dict_loader.load(tensors, storage_reader=reader, process_group=group)
    except CheckpointException as error:
        raise InputError(f"{_damaged(path)} ({_cause(error)})") from None
    return tensors


def require_same_model(
    path: Path, state: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Refuse the checkpoint of another model, naming the first parameter that differs.

    Parameters
    ----------
    path
        The checkpoint.
    state
        This rank's share of what a checkpoint of the run would hold.
    """
    mine = {key: (tensor.shape, tensor.dtype) for key, tensor in state.items()}
    shares: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(shares, mine, group)
    ours = {key: kind for share in shares for key, kind in share.items()}
    theirs = read_kinds(path)
    for key in sorted(ours.keys() | theirs.keys()):
        if key.startswith(MODEL) and ours.get(key) != theirs.get(key):
            raise InputError(
                f"{path} is of another model: {key.removeprefix(MODEL)} is "
                f"{_kind(theirs.get(key))} there, {_kind(ours.get(key))} here"
            )


def _kind(kind: tuple[torch.Size, torch.dtype] | None) -> str:
    if kind is None:
        return "missing"
    shape, dtype = kind
    return f"{'x'.join(map(str, shape)) or 'a number'} of {str(dtype).removeprefix('torch.')}"


def _complete(folder: Path) -> list[Path]:
    """The complete checkpoints by their steps."""
    paths = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{8,}", path.name)]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")))


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _damaged(path: Path) -> str:
    return f"{path} is damaged; remove it to go on from an older checkpoint"


def _cause(error: "CheckpointException") -> str:
    cause = next(iter(error.failures.values()))[0]
    return " ".join(f"{type(cause).__name__}: {cause}".split())


def _sync(folder: Path) -> None:
    """Bring a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
