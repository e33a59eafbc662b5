"""Data parallelism over a slow link: torch's own beside plans between two losses.

``python -m benchmarks backprop_run [--quick]``, as root: each of the two gloo ranks (one thread) is
in a network namespace, and the link between the two is a pair of virtual devices shaped by tc, so
that all all-reduces take a given share of the time of the computations. All take turns, and ratios
are medians of the turns' ratios: other work on the machine slows whoever runs at the time.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.backward_first import backward_first_plan
from benchmarks.report import Table
from stagewright.executor.training.runtime import Executor
from stagewright.formulations.plans.actions import Action, B, F, I, W
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planning import plan

LAYERS, WIDTH, CLASSES = 12, 1024, 16
SAMPLES = 128  # of a rank
SHARES = (1.0, 0.5)  # of all all-reduces' time in the computations' time
TURNS, QUICK_TURNS, STEPS = 9, 3, 3
TIMEOUT_SECONDS = 1800
SGD = partial(torch.optim.SGD, lr=0.01)
DDP, DDP_LAYERS = "DDP, buckets of 25 MB", "DDP, a bucket per layer"
HOOKS = "all-reduce per parameter, one barrier (as Horovod, unfused)"
CONVENTIONAL, REVERSED = "loss to loss, conventional order", "loss to loss, reverse first-k"
BEST = "loss to loss, planner ooo"


def tables(quick: bool) -> Iterator[Table]:
    """The table of all shares; none without the right to make network namespaces."""
    if os.geteuid() != 0:
        print("backprop_run: network namespaces need root; nothing is measured")
        return
    rows = []
    for share in SHARES[:1] if quick else SHARES:
        found = _on_two_ranks(share, QUICK_TURNS if quick else TURNS)
        rows += list(_rows(share, found))
    yield Table(
        "backprop-run",
        f"Data parallelism of {LAYERS} layers of {WIDTH} x {WIDTH} on 2 ranks",
        (
            "all-reduces / computations", "MB/s", "run", "s", "planned s",
            "DDP by 25 MB / it", "DDP by layer / it",
        ),
        tuple(rows),
    )  # fmt: skip


def _rows(share: float, found: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    """A row per run, with medians over the turns, and the middle half of the ratios."""
    turns = found["turns"]
    for name in turns:
        shown = f"{name}, k = {found['k']}" if name == REVERSED else name
        ratios = [
            "-" if name == base else _range(turns[base], turns[name]) for base in (DDP, DDP_LAYERS)
        ]
        seconds = median(turns[name]), found["planned"].get(name)
        yield share, round(found["rate"] / 1e6), shown, *seconds, *ratios


def _range(base: Sequence[float], other: Sequence[float]) -> str:
    low, middle, high = quantiles([a / b for a, b in zip(base, other, strict=True)])
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


# Ranks in network namespaces


@contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two namespaces, joined by a pair of virtual devices named like them."""
    names = (f"sw{os.getpid()}a", f"sw{os.getpid()}b")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", names[0], "netns", names[0], "type", "veth",
            "peer", "name", names[1], "netns", names[1])  # fmt: skip
        for i, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"10.9.0.{i + 1}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _on_two_ranks(share: float, turns: int) -> dict[str, Any]:
    """What rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder, namespaces() as names:
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-m", "benchmarks.backprop_run",
                 folder, str(rank), name, str(share), str(turns)],
                env={**os.environ, "GLOO_SOCKET_IFNAME": name, "OMP_NUM_THREADS": "1"},
            )
            for rank, name in enumerate(names)
        ]  # fmt: skip
        codes = [one.wait(TIMEOUT_SECONDS) for one in ranks]
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}")
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    return found


def shape(device: str, rate: float) -> None:
    """Let ``device`` of this namespace send ``rate`` bytes per second."""
    burst = max(256_000, int(0.01 * rate))
    words = f"tc qdisc replace dev {device} root tbf rate {8 * rate:.0f}bit burst {burst}b"
    subprocess.run([*words.split(), "latency", "400ms"], check=True)


# The measured model and its plans


def layers() -> list[nn.Module]:
    """The model, layer by layer, with the same parameters on every rank."""
    torch.manual_seed(0)
    inner = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS - 1)]
    return [*inner, nn.Linear(WIDTH, CLASSES)]


def batch() -> tuple[Tensor, Tensor]:
    """The mini-batch of both ranks."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * SAMPLES, WIDTH, generator=generator)
    return inputs, torch.randint(CLASSES, (2 * SAMPLES,), generator=generator)


def problem(seconds: Sequence[float], rate: float) -> PipelineProblem:
    """The planning problem from the seconds of all forwards, backwards and updates."""
    sizes = [sum(one.nbytes for one in layer.parameters()) for layer in layers()]
    chain = Chain(
        "mlp",
        "measured: as a whole",
        2 * SAMPLES,
        tuple(_layer(i, size, size / sum(sizes), seconds) for i, size in enumerate(sizes)),
        optimizer_bytes_per_parameter_byte=0.0,
    )
    return PipelineProblem(chain, uniform_servers(1, 2, Link(rate), memory_bytes=1e12), 1)


def _layer(i: int, size: float, part: float, seconds: Sequence[float]) -> Layer:
    forward, backward, update = (part * one for one in seconds)
    costs = tuple(
        LayerCost(
            count,
            count / SAMPLES * forward,
            4.0 * count * WIDTH,
            4.0 * count * WIDTH,
            input_gradient_seconds=count / SAMPLES * backward / 2,
            weight_gradient_seconds=count / SAMPLES * backward / 2,
            update_seconds=update,
        )
        for count in (SAMPLES, 2 * SAMPLES)
    )
    return Layer(str(i), size, costs)


def planned(asked: PipelineProblem, k: int, *, whole: bool = False) -> PipelinePlan:
    """A stage per layer on both devices, the weight gradients of the first k in reverse order."""
    names = tuple(device.name for device in asked.cluster.devices)
    stages = [Stage((i, i + 1), names) for i in range(LAYERS)]
    row: list[Action] = []
    for s in reversed(range(LAYERS)):
        later = [W] if s >= k else []
        row += [Action(s, kind, 0) for kind in ([B] if whole else [I, *later])]
    row += [Action(s, W, 0) for s in range(k)]
    row += [Action(s, F, 0) for s in range(LAYERS)]
    order = [*reversed(range(k, LAYERS)), *range(k)]
    return backward_first_plan(asked, "benchmark", stages, dict.fromkeys(names, row), order)


# One rank


def measure(folder: str, rank: int, device: str, share: float, turns: int) -> None:
    """Measure everything as one of two ranks; rank 0 writes ``found.json``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    inputs, targets = batch()
    mine = slice(rank * SAMPLES, (rank + 1) * SAMPLES)
    seconds = _agreed(_computing(inputs[mine], targets[mine]))
    size = sum(one.nbytes for layer in layers() for one in layer.parameters())
    rate = size / (share * (seconds[0] + seconds[1]))
    shape(device, rate)
    asked = problem(seconds, _agreed([_reached(size)])[0])
    plans = {CONVENTIONAL: planned(asked, 0, whole=True)}
    k = min(range(1, LAYERS + 1), key=lambda k: _cost(planned(asked, k)))
    plans[REVERSED] = planned(asked, k)
    plans[BEST] = _best(asked, rank)
    contenders: dict[str, Callable[[], None]] = {
        DDP: _parallel(inputs[mine], targets[mine]),
        DDP_LAYERS: _parallel(inputs[mine], targets[mine], bucket_cap_mb=1),
        HOOKS: _hooked(inputs[mine], targets[mine]),
    }
    executors = {
        name: Executor(one, layers(), functional.cross_entropy, SGD) for name, one in plans.items()
    }
    for name, executor in executors.items():
        contenders[name] = partial(_step, executor, inputs, targets)
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns + 1):  # the first one warms up
        for name, step in contenders.items():
            taken = _agreed([_timed(step)])[0]
            if name in executors:
                executors[name].finish()
            if turn:
                found[name].append(taken)
    if rank == 0:
        costs = {name: _cost(one) for name, one in plans.items()}
        result = {"turns": found, "planned": costs, "k": k, "rate": rate}
        (Path(folder) / "found.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def _computing(inputs: Tensor, targets: Tensor) -> list[float]:
    """Seconds of all forwards, all backwards and the update, without any all-reduce.

    The least of several: what else runs on the machine only adds.
    """
    model = nn.Sequential(*layers())
    optimizer, taken = SGD(model.parameters()), []
    for _ in range(6):
        dist.barrier()
        times = [perf_counter()]
        loss = functional.cross_entropy(model(inputs), targets)
        times.append(perf_counter())
        loss.backward()
        times.append(perf_counter())
        optimizer.step()
        times.append(perf_counter())
        optimizer.zero_grad()
        taken.append([b - a for a, b in pairwise(times)])
    return [min(one) for one in zip(*taken[1:], strict=True)]


def _reached(size: int) -> float:
    """Bytes per second of an all-reduce of as many bytes as the model's."""
    flat, taken = torch.zeros(size // 4), []
    for _ in range(3):
        dist.barrier()
        began = perf_counter()
        dist.all_reduce(flat)
        taken.append(perf_counter() - began)
    return size / median(taken)


def _agreed(values: Sequence[float]) -> list[float]:
    """The larger value of both ranks."""
    together = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(together, dist.ReduceOp.MAX)
    found: list[float] = together.tolist()
    return found


def _cost(one: PipelinePlan) -> float:
    assert one.predicted is not None
    return one.predicted.iteration_seconds


def _parallel(inputs: Tensor, targets: Tensor, **options: Any) -> Callable[[], None]:
    """A step of torch's DDP."""
    model = DistributedDataParallel(nn.Sequential(*layers()), **options)
    optimizer = SGD(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def _hooked(inputs: Tensor, targets: Tensor) -> Callable[[], None]:
    """A step that begins every all-reduce as soon as its gradient is there, and waits for all."""
    model, works = nn.Sequential(*layers()), list[dist.Work]()
    optimizer = SGD(model.parameters())

    def reduce(parameter: Tensor) -> None:
        assert parameter.grad is not None
        work = dist.all_reduce(parameter.grad.div_(dist.get_world_size()), async_op=True)
        assert work is not None
        works.append(work)

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(reduce)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        while works:
            works.pop().wait()
        optimizer.step()

    return step


def _best(asked: PipelineProblem, rank: int) -> PipelinePlan:
    """The plan of rank 0 for both."""
    found = [plan(asked, "ooo").plan if rank == 0 else None]
    dist.broadcast_object_list(found)
    assert found[0] is not None
    return found[0]


def _step(executor: Executor, inputs: Tensor, targets: Tensor) -> None:
    executor.step(inputs, targets)


def _timed(step: Callable[[], None]) -> float:
    """Seconds of a step, in the middle of a run; of a plan between two losses, of a window."""
    step()
    dist.barrier()
    began = perf_counter()
    for _ in range(STEPS):
        step()
    return (perf_counter() - began) / STEPS


if __name__ == "__main__":
    where, number, link, ratio, count = sys.argv[1:]
    measure(where, int(number), link, float(ratio), int(count))
