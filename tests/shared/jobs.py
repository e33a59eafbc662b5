"""What ``stagewright run`` trains in tests; a mishap is asked for by the environment.

``MISHAP`` is ``kill 1 3``, ``stop 1 3``, ``sleep 1 3``, ``hold 1 3`` or ``raise 1 3``: what befalls
rank 1 when it fetches the mini-batch of step 3. Every rank leaves its process id in the folder
``PIDS``.
"""

import itertools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from holding import hold
from models import WIDTH, ResidualMLP, vectors
from torch import Tensor, nn

fetched = itertools.count(1)


def model() -> nn.Module:
    return ResidualMLP(2)


def double_model() -> nn.Module:
    return ResidualMLP(2).double()


def wider_model() -> nn.Module:
    wider = ResidualMLP(2)
    wider.stem = nn.Linear(WIDTH + 1, WIDTH)
    return wider


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Four mini-batches in an order that is drawn anew for every pass."""
    if "PIDS" in os.environ:
        Path(os.environ["PIDS"], os.environ["RANK"]).write_text(str(os.getpid()))
    what, rank, step = os.environ.get("MISHAP", "none -1 -1").split()
    for i in torch.randperm(4).tolist():
        if next(fetched) == int(step) and os.environ["RANK"] == rank:
            _meet(what)
        yield vectors(8, i)


def held_out() -> Iterator[tuple[Tensor, Tensor]]:
    """The last mini-batch is smaller."""
    yield vectors(8, 100)
    yield vectors(3, 101)


def nothing_held_out() -> Iterator[tuple[Tensor, Tensor]]:
    return iter(())


def no_batches() -> int:
    return 5


def wider_batches() -> Iterator[tuple[Tensor, Tensor]]:
    yield torch.zeros(8, WIDTH + 1), vectors(8)[1]


def ever_less_held_out() -> Iterator[tuple[Tensor, Tensor]]:
    """Of the first mini-batch nothing is wrong."""
    yield from held_out()
    yield from wider_batches()


def double_batches() -> Iterator[tuple[Tensor, Tensor]]:
    for inputs, targets in batches():
        yield inputs.double(), targets


def _meet(mishap: str) -> None:
    if mishap == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif mishap == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif mishap == "sleep":
        Path("asleep").touch()
        time.sleep(1000)
    elif mishap == "hold":
        Path("held").touch()
        hold()
    else:
        raise ValueError("no such\nsample")


def infinite_batches() -> Iterator[tuple[Tensor, Tensor]]:
    """The third mini-batch has an infinite number in its last sample."""
    for i, (inputs, targets) in enumerate(batches()):
        inputs[-1] *= float("inf") if i == 2 else 1.0
        yield inputs, targets


def ragged_batches() -> Iterator[tuple[Tensor, Tensor]]:
    yield vectors(8)
    yield vectors(7)
