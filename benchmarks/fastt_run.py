"""Placed operators on two CPU ranks, one thread each, beside torch's own loop and DDP.

``python -m benchmarks fastt_run [--quick]``: `stagewright train` plans each model from its own
measurements, with one replica and with two; its plans then take turns with torch, and ratios are
medians of the turns' ratios. A turn is a process (or two) of its own; times are medians of steps.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.report import Table
from examples.fastt.language import Translating
from examples.fastt.vision import LeNet, block_a
from stagewright.executor.training.losses import cross_entropy
from stagewright.graphs.machines.cluster import Link, save_cluster, uniform_servers

STEPS, WARM_UP = 20, 3
TURNS, QUICK_TURNS = 5, 2
RATE = 0.01
VOCABULARY, TOKENS = 2000, 24
LOOP, DDP = "torch, 1 process", "torch DDP, 2 processes"


def lenet() -> nn.Module:
    return LeNet(256)


def digits() -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    while True:
        images = torch.randn(64, 1, 28, 28, generator=random)
        yield images, torch.randint(10, (64,), generator=random)


def transformer() -> nn.Module:
    return Translating(VOCABULARY, 128, 4, 2, TOKENS)


def sentences() -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
    random = torch.Generator().manual_seed(0)
    while True:
        source, target = (
            torch.randint(VOCABULARY, (16, TOKENS), generator=random) for _ in range(2)
        )
        yield (source, target[:, :-1]), target[:, 1:]


def inception() -> nn.Module:
    """Two blocks of Inception-v3 with four branches each."""
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(block_a(96, 32), block_a(256, 64), pool, nn.Flatten(), nn.Linear(288, 10))


def pictures() -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    while True:
        images = torch.randn(16, 96, 17, 17, generator=random)
        yield images, torch.randint(10, (16,), generator=random)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Iterator[Any]]]] = {
    "LeNet": (lenet, digits),
    "Transformer": (transformer, sentences),
    "Inception": (inception, pictures),
}


def tables(quick: bool) -> Iterator[Table]:
    """A row per model and way to train it."""
    rows = []
    for name in [*MODELS][:1] if quick else MODELS:
        with tempfile.TemporaryDirectory() as folder:
            rows += list(_rows(name, Path(folder), QUICK_TURNS if quick else TURNS))
    yield Table(
        "fastt-run",
        "Placed operators on two CPU ranks: the same mini-batch by each",
        ("model", "trained by", "ranks", "predicted, ms", "ms per step", "times the loop's rate"),
        tuple(rows),
    )


def _rows(name: str, folder: Path, turns: int) -> Iterator[tuple[object, ...]]:
    ways: dict[str, tuple[int, float | None, Callable[[], float]]] = {
        LOOP: (1, None, lambda: _torch(name, 1)),
        DDP: (2, None, lambda: _torch(name, 2)),
    }
    for replicas in (1, 2):
        trained = _train(name, folder / str(replicas), replicas)
        for label, number in (("first plan", 0), ("best plan", trained["best"])):
            one = trained["rounds"][number]
            file = folder / str(replicas) / f"plan-{number}.json"
            ranks = len({each["device"] for each in json.loads(file.read_text())["operators"]})
            told = None if number == 0 else 1e3 * one["predicted_seconds"]
            copies = "1 replica" if replicas == 1 else "2 replicas"
            ways[f"{copies}, {label}: {one['planner']}"] = (
                ranks, told, lambda file=file: _planned(name, file),
            )  # fmt: skip
    taken: dict[str, list[float]] = {label: [] for label in ways}
    for _ in range(turns):
        for label, (_, _, run) in ways.items():
            taken[label].append(run())
    for label, (ranks, told, _) in ways.items():
        rates = [loop / own for loop, own in zip(taken[LOOP], taken[label], strict=True)]
        yield name, label, ranks, told, 1e3 * median(taken[label]), median(rates)


def _options(name: str) -> list[str]:
    model, data = (f"benchmarks.fastt_run:{one.__name__}" for one in MODELS[name])
    return ["--module", model, "--data", data, "--optimizer", f"sgd:lr={RATE},momentum=0.9"]


def _train(name: str, folder: Path, replicas: int) -> dict[str, Any]:
    cluster = folder.with_suffix(".json")
    save_cluster(uniform_servers(1, 2, Link(1e9, 1e-4), kind="core"), cluster)
    options = ["--cluster", str(cluster), "--folder", str(folder), "--replicas", str(replicas)]
    options += ["--steps", "41", "--weights", "mirrored", "--json"]
    found: dict[str, Any] = _answer("train", *_options(name), *options)
    return found


def _planned(name: str, plan: Path) -> float:
    steps = str(STEPS + WARM_UP)
    answer = _answer("run", str(plan), *_options(name), "--steps", steps, "--json")
    seconds: float = answer["iteration_seconds"]
    return seconds


def _answer(*arguments: str) -> Any:
    command = [sys.executable, "-m", "stagewright", *arguments]
    return json.loads(_output(command))


def _torch(name: str, ranks: int) -> float:
    command = [sys.executable, "-m", "benchmarks.fastt_run", name, str(ranks)]
    if ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command[1:1] = launcher
    return float(_output(command))


def _output(command: list[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return found.stdout


def _loop(name: str, ranks: int) -> None:
    """Torch's own training as this process; rank 0 prints the median seconds of a step."""
    make, data = MODELS[name]
    torch.manual_seed(0)
    model, rank = make(), 0
    if ranks > 1:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    seconds = []
    for _, batch in zip(range(STEPS + WARM_UP), data(), strict=False):
        begun = perf_counter()
        inputs, targets = batch
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        rows = slice(rank * len(targets) // ranks, (rank + 1) * len(targets) // ranks)
        optimizer.zero_grad()
        total, count = cross_entropy(model(*(one[rows] for one in given)), targets[rows])
        (total / count).backward()
        optimizer.step()
        seconds.append(perf_counter() - begun)
    if rank == 0:
        print(median(seconds[WARM_UP:]))
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    _loop(sys.argv[1], int(sys.argv[2]))
