"""Programs that the cluster trains in tests."""

import fcntl
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stagewright.executor.clusters.leases import Lease, LeaseIterator

if TYPE_CHECKING:
    import torch

BATCHES = 7
STATE, MODEL = "state.json", "model.pt"
MODULUS = 2**61 - 1


@dataclass(frozen=True)
class Walk:
    """Takes its batches in; a checkpoint holds every step that led to it, and who made it.

    ``seconds`` per step, by accelerator type. ``mishap`` befalls it after its loop's body of step
    ``at``: the first ``times`` times.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    mishap: str = ""
    at: int = -1
    times: int = 1

    def __call__(self, lease: Lease) -> None:
        state = {"value": 1, "history": []}

        def load(folder: Path) -> None:
            state.update(json.loads((folder / STATE).read_text()))

        def save(folder: Path) -> None:
            if lease.rank == 0:
                (folder / STATE).write_text(json.dumps(state))
                if self.mishap == "torn save" and self._befalls(lease):
                    (folder / STATE).write_text(json.dumps(state)[:10])
                    raise OSError("no space left on device")
                if self.mishap == "killed save" and self._befalls(lease):
                    os.kill(os.getpid(), signal.SIGKILL)

        lock = (lease.folder / f"running-{lease.rank}").open("a")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused if it runs twice at once
        batches = LeaseIterator(range(BATCHES), load, save, lease)
        for batch in batches:
            time.sleep(self.seconds.get(lease.accelerator, 0.0))
            state["value"] = (state["value"] * 31 + batch + 1) % MODULUS
            step = batches.step + 1
            state["history"].append([step, lease.epoch])
            if step == self.at and "save" not in self.mishap and self._befalls(lease):
                self._meet(lease)
        lock.close()

    def _befalls(self, lease: Lease) -> bool:
        if not self.mishap or lease.rank != lease.ranks - 1:
            return False
        marks = lease.folder / "mishaps"
        seen = len(marks.read_text()) if marks.exists() else 0
        marks.write_text("x" * (seen + 1))
        return seen < self.times

    def _meet(self, lease: Lease) -> None:
        if self.mishap == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.mishap == "hang":
            time.sleep(1000)
        elif self.mishap == "exit":
            sys.exit(0)
        raise ValueError(f"no such sample on {lease.accelerator}\nin this line neither")


def value_after(steps: int) -> int:
    """What a Walk that nobody interrupts arrives at."""
    value = 1
    for step in range(steps):
        value = (value * 31 + step % BATCHES + 1) % MODULUS
    return value


quick = Walk()
"""A program that takes no time."""

steady = Walk({"v100": 0.05, "k80": 0.05})
"""A program that takes some."""


def nothing(lease: Lease, step: int) -> None:
    """What befalls most jobs."""


def die_once(lease: Lease, step: int) -> None:
    """Kill the process of the job's last rank after step 20, unless one was killed before."""
    mark = lease.folder / "death"
    if step >= 20 and lease.rank == lease.ranks - 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def train(
    lease: Lease, divided: bool = False, befalls: Callable[[Lease, int], None] = nothing
) -> None:
    """SGD with momentum on a linear model; ranks average their gradients, rank 0 saves.

    Each has batches of its own, or a part of the same.
    """
    import torch
    import torch.distributed as dist

    model, optimizer = linear()
    if lease.ranks > 1:
        dist.init_process_group(
            "gloo", init_method=lease.rendezvous, rank=lease.rank, world_size=lease.ranks
        )

    def load(folder: Path) -> None:
        for part, state in zip((model, optimizer), torch.load(folder / MODEL), strict=True):
            part.load_state_dict(state)

    def save(folder: Path) -> None:
        if lease.rank == 0:
            torch.save([model.state_dict(), optimizer.state_dict()], folder / MODEL)

    print(f"{lease.ranks} ranks")
    first = 0 if divided else lease.rank
    batches = LeaseIterator(lambda step: vectors(first, step), load, save, lease)
    for batch in batches:
        time.sleep(0.01)
        befalls(lease, batches.step)
        backward(model, batch[lease.rank :: lease.ranks] if divided else batch)
        for parameter in model.parameters() if lease.ranks > 1 else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= lease.ranks
        optimizer.step()


def train_divided(lease: Lease) -> None:
    """:func:`train` on one rank's batches, of which each rank takes a part."""
    train(lease, divided=True)


def train_killed(lease: Lease) -> None:
    """:func:`train_divided`, of which a process is killed between two checkpoints."""
    train(lease, divided=True, befalls=die_once)


def linear() -> "tuple[torch.nn.Module, torch.optim.Optimizer]":
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def backward(model: "torch.nn.Module", batch: "torch.Tensor") -> None:
    model.zero_grad()
    (model(batch) - batch[:, :4].sin()).square().mean().backward()


def vectors(rank: int, step: int) -> Iterator["torch.Tensor"]:
    """The rank's batches from a step on."""
    import torch

    for number in itertools.count(step):
        generator = torch.Generator().manual_seed(1000 * rank + number)
        yield torch.randn(16, 8, generator=generator, dtype=torch.float64)


def trained(ranks: int, steps: int) -> "dict[str, torch.Tensor]":
    """Parameters after the same training without leases, in one process."""
    model, optimizer = linear()
    batches = [vectors(rank, 0) for rank in range(ranks)]
    for _ in range(steps):
        gradients = []
        for of_rank in batches:
            backward(model, next(of_rank))
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        for parameter, *parts in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = sum(parts[1:], parts[0]) / ranks
        optimizer.step()
    return model.state_dict()
