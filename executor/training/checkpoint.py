"""Checkpoints of a run, with torch.distributed.checkpoint.

A folder of checkpoints holds ``step-00000010`` and the like, complete by construction: a
checkpoint is written as ``.step-00000010.partial`` and renamed when all ranks have written. Its
``SHA256SUMS``, in the format of ``sha256sum``, shows whether a file has changed since. The tensors
have the names of the unsplit model, so that any plan of the same model can resume from them.
All ranks must see the folder. Checkpoints are pickles: load only your own.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.formulations.plans.actions import Weights
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError

# torch.distributed.checkpoint takes a second to import; only those who write or read need it.
if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

HEADER = "stagewright.json"
SUMS = "SHA256SUMS"
KEPT = 2  # complete checkpoints in a folder
MODEL = "model."  # what the keys of parameters and buffers start with


@documents.record
class Header:
    """The header of a checkpoint: the steps done, and how the weights are updated."""

    steps: int
    weights: Weights
    optimizer: str
    schedule: str = "none"
    accumulate: int = 1
    format: Literal["stagewright-checkpoint"] = "stagewright-checkpoint"
    version: Literal[1] = 1

    @property
    def seen(self) -> int:
        """The mini-batches of the run."""
        return self.steps * self.accumulate


def save(
    folder: Path,
    state: Mapping[str, Tensor],
    header: Header,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint to ``folder``; every rank of ``group`` calls it with its own share.

    Raises InputError if it cannot be written, as on a full disk; the checkpoints that were there
    stay. ``folder``: made if it does not exist. The two newest checkpoints in it are kept.
    ``state``: tensors by key; no two ranks have the same key. ``header``: the same on every rank.
    """
    path = folder / f"step-{header.steps:08d}"
    whole(path, lambda partial: _write(partial, state, header, group), _publish, group)
    return path


def save_model(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a model's state dict as a new folder of torch.distributed.checkpoint, under its names.

    Every rank calls it with its share. Raises InputError if the folder cannot be written.
    """
    whole(path, lambda partial: _write_tensors(partial, state, None), os.rename)


def whole(
    path: Path,
    write: Callable[[Path], None],
    publish: Callable[[Path, Path], None],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Let all ranks ``write`` a folder under another name, and the first one ``publish`` it.

    Raises InputError if it cannot be written; then nothing of it is left.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    partial = path.with_name(f".{path.name}.partial")
    is_first = dist.get_rank(group) == 0
    if is_first:
        leftover = ".step-*.partial" if path.name.startswith("step-") else partial.name
        for one in path.parent.glob(leftover):  # of a run that was killed while it wrote
            shutil.rmtree(one)
    dist.barrier(group)
    try:
        write(partial)
        if is_first:
            publish(partial, path)
    except (CheckpointException, OSError) as error:
        if is_first:  # no rank writes any more; the user needs the space
            shutil.rmtree(partial, ignore_errors=True)
        cause = _cause(error) if isinstance(error, CheckpointException) else error
        if not isinstance(cause, OSError):
            raise
        told = f"{path}: the checkpoint cannot be written: {cause.strerror or cause}"
        raise InputError(told) from None


def _write(
    partial: Path, state: Mapping[str, Tensor], header: Header, group: dist.ProcessGroup | None
) -> None:
    """Write all files of a checkpoint."""
    _write_tensors(partial, state, group)
    is_first = dist.get_rank(group) == 0
    if is_first:  # all have written
        _put(partial / HEADER, documents.to_json(header))
    sums = _shared_sums(partial, group)
    if is_first:
        _put(partial / SUMS, _as_text(sums))
        documents.flush(partial)


def _write_tensors(
    folder: Path, state: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> None:
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    writer = FileSystemWriter(folder)
    state_dict_saver.save(dict(state), storage_writer=writer, process_group=group)


def _put(path: Path, text: str) -> None:
    """Write a file, and flush it to the disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _publish(partial: Path, path: Path) -> None:
    """Give a checkpoint that is written its name, and remove those that it replaces."""
    folder = path.parent
    for damaged in (one for one in _complete(folder) if _steps(one) >= _steps(path)):
        _remove(damaged)  # the run has resumed from an older one
    partial.rename(path)
    documents.flush(folder)
    for old in _complete(folder)[:-KEPT]:
        _remove(old)


def candidates(folder: Path | None, resume: bool) -> list[Path]:
    """The complete checkpoints in ``folder`` to resume, the newest first; none for a new run.

    Raises InputError if there is none to resume, or one that must not be overwritten.
    """
    if folder is None:
        return []
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is not a folder of checkpoints")
    found = _complete(folder)[::-1]
    if resume and not found:
        raise InputError(f"there is no complete checkpoint in {folder}; leave out --resume")
    if found and not resume:
        raise InputError(
            f"{folder} holds {found[0].name} of an earlier run; "
            "add --resume to continue it, or name another folder"
        )
    return found


def find(
    folder: Path | None,
    resume: bool,
    goal: Header,
    tell: Callable[[str], None] = lambda _: None,
    group: dist.ProcessGroup | None = None,
) -> Path | None:
    """The newest whole checkpoint in ``folder`` from which to reach ``goal``; None for a new run.

    Every rank of ``group`` calls it. A damaged checkpoint is skipped, and ``tell`` called with a
    line about it. Raises InputError as `candidates`; if all are damaged; if nothing is left to do;
    if the weights are updated in another way.
    """
    faults: list[str] = []
    for path in candidates(folder, resume):
        fault = _fault(path, group)
        if fault is None:
            for line in faults:
                tell(f"{line}; resuming from {path.name}")
            _require_reachable(path, goal)
            return path
        faults.append(f"{path} is damaged ({fault})")
    if faults:
        raise InputError(f"{'; '.join(faults)}; no whole checkpoint is left")
    return None


def _fault(path: Path, group: dist.ProcessGroup | None) -> str | None:
    """The damage of a checkpoint, in words; the same on every rank."""
    try:
        written = (path / SUMS).read_text(errors="replace")
    except OSError as error:
        return f"{SUMS}: {error.strerror}"
    found = _as_text(_shared_sums(path, group))
    odd = set(written.splitlines()) ^ set(found.splitlines())
    if odd:
        return f"{min(line.rpartition('  ')[2] for line in odd)} does not match {SUMS}"
    return None if written == found else f"{SUMS} is not as it was written"


def _shared_sums(path: Path, group: dist.ProcessGroup | None) -> dict[str, str]:
    """The SHA-256 of every file of a checkpoint but `SUMS`; every rank reads a share of them."""
    names = [sorted(one.name for one in path.iterdir() if one.name != SUMS)]
    if not dist.is_initialized():
        return {name: _digest(path / name) for name in names[0]}
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    dist.broadcast_object_list(names, group=group, group_src=0)
    shares: list[dict[str, str]] = [{}] * world
    own = {name: _digest(path / name) for name in names[0][rank::world]}
    dist.all_gather_object(shares, own, group)
    return {name: digest for share in shares for name, digest in share.items()}


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:  # the other ranks wait for an answer
        return f"unreadable: {error.strerror}"


def _as_text(sums: Mapping[str, str]) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def _require_reachable(path: Path, goal: Header) -> None:
    found = read_header(path)
    if found.steps >= goal.steps:
        raise InputError(f"{path} has done {found.steps} of {goal.steps} steps; nothing is left")
    for name in ("weights", "optimizer", "schedule", "accumulate"):
        theirs, ours = getattr(found, name), getattr(goal, name)
        if theirs != ours:
            raise InputError(f"{path} is of a run with {name} {theirs!r}, this one has {ours!r}")


def read_header(path: Path) -> Header:
    """The header of a checkpoint; InputError if it is damaged."""
    return documents.read(Header, path / HEADER)


def read_kinds(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and type of every tensor in the checkpoint; InputError if it is damaged."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # a damaged pickle may raise anything
        raise InputError(f"{path} is damaged ({type(error).__name__}: {error})") from None
    return {
        key: (entry.size, entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read(
    path: Path, keys: Iterable[str], group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """The tensors ``keys``, on the CPU; every rank of ``group`` calls it with its keys.

    Raises InputError: on every rank, if one of them cannot read its tensors.
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
        cause = _cause(error)
        told = " ".join(f"{type(cause).__name__}: {cause}".split())
        raise InputError(f"{path} is damaged ({told})") from None
    return tensors


def require_same_model(
    path: Path, state: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Refuse the checkpoint of another model, naming the first parameter that differs.

    ``path``: the checkpoint. ``state``: this rank's share of a checkpoint of the run.
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
    return sorted(paths, key=_steps)


def _steps(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _remove(path: Path) -> None:
    """Remove a checkpoint; renamed first, so that a part of it does not count as complete."""
    shutil.rmtree(path.rename(path.with_name(f".{path.name}.old.partial")))


def _cause(error: "CheckpointException") -> BaseException:
    """The failure of the first rank that had one."""
    return next(iter(error.failures.values()))[0]
