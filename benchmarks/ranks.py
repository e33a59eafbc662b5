"""Gloo processes of one thread, on which benchmarks of the executor run."""

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
SGD = partial(torch.optim.SGD, lr=0.01)
TIMEOUT_SECONDS = 600.0


def on_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(rank, *args)`` of every rank of a gloo group."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(world, spawn) as pool:
        # No task ends before all have begun, so that each has a process of its own.
        tasks = [
            pool.submit(_join, f"file://{folder}/ranks", rank, world, function, args)
            for rank in range(world)
        ]
        return [task.result(TIMEOUT_SECONDS) for task in tasks]


def _join(
    meeting: str, rank: int, world: int, function: Callable[..., Any], args: Sequence[Any]
) -> Any:
    torch.set_num_threads(1)
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ["GLOO_SOCKET_IFNAME"] = loopback
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    try:
        return function(rank, *args)
    finally:
        dist.destroy_process_group()
