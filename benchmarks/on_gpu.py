"""One visit to a GPU: every part that needs one, into a folder, within a limit of time.

``make gpu``, or ``python -m benchmarks.on_gpu FOLDER [PART ...]``. Each part is a process with a
limit of its own; one that fails or hangs ends alone, and what came before it stays. A part's table
is there as CSV and as text, its messages as ``PART.log``, and ``summary.json`` says how each ended.
Without a GPU everything is tiny and runs on the CPU.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import anchored, gpu, report
from benchmarks.gpu import device_here, measured
from benchmarks.report import Table
from stagewright.graphs.documents import documents
from stagewright.graphs.importers.timed_layers import read_timed_layers
from stagewright.service.layouts import anchoring

ROOT = Path(__file__).parents[1]
SECONDS = 480.0  # of a visit
ON_GPU = torch.cuda.is_available()  # elsewhere the limit of all parts is that of each


def attention(quick: bool) -> Table:
    """Forward and backward of causal attention by each kernel of torch."""
    device, name = device_here()
    shape = (1, 4, 128, 64) if quick else (4, 32, 4096, 128)
    given = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3)]
    rows = []
    for backend in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION,
                    SDPBackend.CUDNN_ATTENTION):  # fmt: skip

        def step(backend: SDPBackend = backend) -> None:
            leaves = [one.detach().requires_grad_() for one in given]
            with sdpa_kernel(backend):
                scaled_dot_product_attention(*leaves, is_causal=True).sum().backward()

        try:
            one = measured(step, device)
            rows.append((backend.name.lower(), 1e3 * one.seconds, one.gigabytes))
        except RuntimeError as error:
            rows.append((backend.name.lower(), str(error).partition("\n")[0], None))
    title = f"Attention on one {name}: {' x '.join(map(str, shape))} in bfloat16"
    return Table("gpu-attention", title, ("kernel", "ms", "allocated, GB"), tuple(rows))


def ranks(quick: bool) -> Table:
    """An all-reduce of two ranks on one device, by gloo and by NCCL, which refuses it."""
    device, name = device_here()
    rows = []
    for backend in ("gloo", "nccl"):
        with TemporaryDirectory() as folder, ProcessPoolExecutor(2, get_context("spawn")) as pool:
            given = [(backend, rank, str(device), 10 if quick else 24, folder) for rank in (0, 1)]
            try:
                rows.append((backend, 1e3 * max(pool.map(_all_reduced, given))))
            except Exception as error:  # what the library says is the result
                rows.append((backend, " ".join(str(error).split())[:200]))
    return Table("gpu-ranks", f"Two ranks on one {name}", ("backend", "ms"), tuple(rows))


def _all_reduced(given: tuple[str, int, str, int, str]) -> float:
    backend, rank, device, exponent, folder = given
    limit = timedelta(seconds=20)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=limit
    )
    try:
        numbers = torch.ones(2**exponent, device=device)
        return measured(lambda: dist.all_reduce(numbers), torch.device(device)).seconds
    finally:
        dist.destroy_process_group()


def layers(folder: Path, quick: bool) -> Iterator[Table]:
    """Whole iterations beside those predicted from timed layers; the rate set that these make."""
    anchored.write_folder(
        folder, anchored.TINY if quick else anchored.MODELS, 64 if quick else 4096
    )
    anchored.run_folder(folder, quick=quick)
    for path in sorted(folder.glob("measured-*.json")):
        request = anchoring.AnchoredRequest(timed=read_timed_layers(path))
        rates = anchoring.rates_of_timings(request).document
        documents.write_file(
            folder / path.name.replace("measured", "rates"), documents.to_json(rates)
        )
    yield from anchored.tables_of(folder)


def tested() -> Iterator[Table]:
    """The tests that need a GPU, which are skipped without one."""
    subprocess.run(
        [sys.executable, "-m", "pytest", "tests/training/test_gpu.py", "-q", "-n", "0"],
        cwd=ROOT,
        check=True,
    )
    yield from ()


def _one(part: Callable[[bool], Table], folder: Path, quick: bool) -> Iterator[Table]:
    yield part(quick)


# In the order of a visit, with the seconds that each may take.
PARTS: dict[str, tuple[float, Callable[[Path, bool], Iterator[Table]]]] = {
    "tests": (120, lambda folder, quick: tested()),
    "gpt-2": (90, partial(_one, partial(gpu.pipelines, "GPT-2", gpu.language))),
    "llama": (90, partial(_one, partial(gpu.pipelines, "Llama", gpu.llama))),
    "attention": (30, partial(_one, attention)),
    "windows": (60, partial(_one, gpu.windows)),
    "ranks": (45, partial(_one, ranks)),
    "layers": (240, layers),
}


def main(
    folder: Annotated[Path, typer.Argument(help="What is written, made if it is not there.")],
    parts: Annotated[list[str] | None, typer.Argument(help=" | ".join(PARTS))] = None,
    seconds: Annotated[float, typer.Option(help="Limit of all parts together.")] = SECONDS,
    here: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Run all parts, or those named, each in a process."""
    unknown = sorted(set(parts or ()) - PARTS.keys())
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(PARTS)}")
    folder.mkdir(parents=True, exist_ok=True)
    if here:
        for part in parts or ():
            _write(folder, part)
        return
    end, summary = monotonic() + seconds, {}
    for part in parts or PARTS:
        began, left = monotonic(), end - monotonic()
        summary[part] = {
            "ended": _ended(folder, part, min(left, PARTS[part][0]) if ON_GPU else left)
        }
        summary[part]["seconds"] = f"{monotonic() - began:.1f}"
        (folder / "summary.json").write_text(json.dumps(summary, indent=1))
        print(f"{part}: {summary[part]['ended']} after {summary[part]['seconds']} s", flush=True)


def _write(folder: Path, part: str) -> None:
    for table in PARTS[part][1](folder, not ON_GPU):
        report.write(table, folder)
        with (folder / "tables.md").open("a") as file:
            file.write(f"{table}\n\n")


def _ended(folder: Path, part: str, limit: float) -> str:
    """Run a part; how it ended."""
    if limit < 1:
        return "no time was left"
    command = [sys.executable, "-m", "benchmarks.on_gpu", str(folder.resolve()), part, "--here"]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with (folder / f"{part}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths},
            start_new_session=True,
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"stopped at its limit of {limit:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its own processes too
            process.wait()
    return "done" if code == 0 else f"failed with {code}"


if __name__ == "__main__":
    typer.run(main)
