"""The training side of a round: leases, and the iterator that obeys them.

Narayanan, PhD thesis (2021), section 5.6. A program wraps its loader in a :class:`LeaseIterator`.
Near the end of a round the iterator asks the scheduler whether the job stays on its accelerators;
if so the lease is renewed and training continues without a checkpoint, if not the iterator saves
one and stops. Steps are granted ahead, and every rank of a distributed job reads the same grants in
the same order; so all stop after the same step, however far one is ahead of another.

A lease has its job's epoch. Each start of a job begins a new epoch; requests and checkpoints of
older epochs are refused.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class JobLeaseLostError(RuntimeError):
    """The lease is no longer the job's newest: its uncommitted steps are discarded."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to run until ``step`` steps are done; the last one of a lease says so."""

    step: int
    is_last: bool


class Scheduler(Protocol):
    """The scheduler as a lease's holder calls it; both methods raise JobLeaseLostError."""

    def grant(self, job: str, epoch: int, rank: int, number: int) -> Grant:
        """The lease's grant ``number``, from 0, which says that those before are used up."""

    def saved(self, job: str, epoch: int, rank: int, step: int) -> None:
        """The rank has written its part of the checkpoint after ``step`` steps.

        With the last rank's part the checkpoint is committed, and the lease ends.
        """


@dataclass(frozen=True, slots=True)
class Lease:
    """A rank's right to train a job on an accelerator, from ``first_step`` steps on.

    ``accelerator`` is the name of its type, ``folder`` the job's, shared by all ranks.
    """

    job: str
    epoch: int
    rank: int
    ranks: int
    accelerator: str
    steps: int
    first_step: int
    checkpoint: Path | None
    folder: Path
    scheduler: Scheduler

    @property
    def partial(self) -> Path:
        """The folder in which the lease's checkpoint is written until it is complete."""
        return partial_checkpoint(self.folder, self.epoch)

    @property
    def rendezvous(self) -> str:
        """An ``init_method`` for the ranks of this lease only."""
        return f"file://{self.folder}/.epoch-{self.epoch:08d}.rendezvous"


def partial_checkpoint(folder: Path, epoch: int) -> Path:
    """The folder of the checkpoint that a lease of ``epoch`` is writing."""
    return folder / f".epoch-{epoch:08d}.partial"


class LeaseIterator(Generic[T]):
    """The batches that a lease has steps for.

    ``loader``: batches; restarted whenever it ends. After a checkpoint, batches already used are
    skipped. Or a function that takes the steps done and returns the batches from there on.
    ``load_checkpoint``, ``save_checkpoint``: take a folder. Every rank calls both; if all ranks
    hold the same state, rank 0 alone may write.

    ``step``: steps done since the job's first start. ``done``: whether all the job's steps are done
    and saved.
    """

    def __init__(
        self,
        loader: Iterable[T] | Callable[[int], Iterable[T]],
        load_checkpoint: Callable[[Path], object],
        save_checkpoint: Callable[[Path], object],
        lease: Lease,
    ) -> None:
        self.loader = loader
        self.load_checkpoint = load_checkpoint
        self.save_checkpoint = save_checkpoint
        self.lease = lease
        self.step = lease.first_step
        self.done = False

    def __iter__(self) -> Iterator[T]:
        lease = self.lease
        if lease.checkpoint is not None:
            self.load_checkpoint(lease.checkpoint)
        batches = self._batches()
        for number in itertools.count():
            grant = lease.scheduler.grant(lease.job, lease.epoch, lease.rank, number)
            while self.step < grant.step:
                yield next(batches)
                self.step += 1  # the loop's body has ended
            if grant.is_last:
                break
        self._save()

    def _batches(self) -> Iterator[T]:
        skipped = 0
        if not callable(self.loader):
            skipped = self.step % len(self.loader) if isinstance(self.loader, Sized) else self.step
        while True:
            is_empty = True
            for batch in self.loader(self.step) if callable(self.loader) else self.loader:
                is_empty = False
                if skipped:
                    skipped -= 1
                else:
                    yield batch
            if is_empty:
                raise ValueError(
                    f"job {self.lease.job!r}: the loader has no batches for step {self.step + 1}; "
                    "it must be possible to iterate over it again"
                )

    def _save(self) -> None:
        lease = self.lease
        lease.partial.mkdir(parents=True, exist_ok=True)
        self.save_checkpoint(lease.partial)
        _sync(lease.partial)
        lease.scheduler.saved(lease.job, lease.epoch, lease.rank, self.step)
        self.done = self.step == lease.steps


def _sync(folder: Path) -> None:
    """Flush everything in ``folder`` to disk before it is reported as saved."""
    for path in (folder, *folder.rglob("*")):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # another rank's temporary file
            continue
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
