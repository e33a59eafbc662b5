"""Memory of a rank: while its stage is made and in a step, beside torch's and the prediction.

``python -m benchmarks memory [--quick]``. Every figure is of a separate process with one thread, in
MB of resident memory above what the process had before the model; freed memory is given back before
what is held is read. Linux only.
"""

import ctypes
import gc
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import examples.models
import stagewright
from benchmarks.executor import OWN, RACES, Orders, Race, Torch, plan_in_order
from benchmarks.forecasts import (
    MICROBATCHES,
    Workload,
    cuts_of,
    loss_of_tokens,
    profiled,
    tokens,
    transformer,
)
from benchmarks.ranks import CPU, SGD, on_ranks
from benchmarks.report import Table
from stagewright.executor.capture.exported.exporting import Example
from stagewright.executor.measuring.links import describe, measure_links
from stagewright.executor.programs.program import plan_devices
from stagewright.executor.training.data.batches import typed_inputs
from stagewright.executor.training.runtime import Executor
from stagewright.executor.training.stages.initialise import initialise
from stagewright.formulations.plans.plan import PipelinePlan

MEGABYTE = 1e6
STEPS = 3

Memory = tuple[float, float]  # peak and held, MB


class Meter:
    """Resident memory of this process from now on."""

    def __init__(self) -> None:
        _trim()
        self._base = _status("VmRSS")

    def restart(self) -> None:
        """Forget the peak so far."""
        _trim()
        Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> Memory:
        """The peak since the restart, and what is held."""
        peak = _status("VmHWM")
        _trim()
        return peak - self._base, _status("VmRSS") - self._base


def _status(name: str) -> float:
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / MEGABYTE


def _trim() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


# While a stage is made


def transformers_gpt2() -> nn.Module:
    """GPT-2 of transformers with 10 blocks."""
    kinds: Any = importlib.import_module("transformers")
    model: nn.Module = kinds.GPT2LMHeadModel(kinds.GPT2Config(n_layer=10))
    return model


@dataclass(frozen=True, slots=True)
class Start:
    """A factory, and the layers of a stage in the middle of its model."""

    name: str
    factory: Callable[[], nn.Module]
    layers: range
    is_transformers: bool = False


STARTS = (
    Start("gpt2_medium of the examples", examples.models.gpt2_medium, range(7, 13)),
    Start("GPT-2 of transformers, 10 blocks", transformers_gpt2, range(4, 7), is_transformers=True),
)


def alone(_: int, start: Start) -> tuple[float, float, float]:
    """Peak and held while a rank makes its stage, and the stage's bytes, in MB."""
    example = _example() if start.is_transformers else None
    meter = Meter()
    layered = initialise(start.factory, start.layers, example=example)
    made = {id(one): one for layer in layered.layers for one in layer.module.parameters()}
    size = sum(one.nbytes for one in made.values() if not one.is_meta)
    return (*meter.read(), size / MEGABYTE)


def whole(_: int, start: Start) -> Memory:
    """As the tutorials of torch do: the whole model, of which the rest is dropped."""
    if start.is_transformers:
        importlib.import_module("transformers.models.gpt2.modeling_gpt2")
    meter = Meter()
    model = start.factory()
    kept = next(one for one in model.modules() if isinstance(one, nn.ModuleList))
    stage = kept[: len(kept) // 4]
    del model, kept
    peak, held = meter.read()
    del stage
    return peak, held


def _example() -> Example:
    """A mini-batch of keywords."""
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    given, signature = typed_inputs({"input_ids": tokens, "labels": tokens}, torch.float32)
    return Example(given, signature, takes_loss=True, device=torch.device("cpu"))


def start_table() -> Table:
    found = []
    for start in STARTS:
        if start.is_transformers and find_spec("transformers") is None:
            continue
        peak, held, size = on_ranks(1, alone, start)[0]
        found.append((start.name, size, peak, held, on_ranks(1, whole, start)[0][0]))
    columns = ("model", "stage", "peak", "held", "peak of the whole model")
    title = "Memory of a rank that makes its stage, MB; target: the stage and 50 MB"
    return Table("memory-start", title, columns, tuple(found))


# In a step


def ours(rank: int, case: Race) -> Memory:
    """Peak and held of our executor in steps after the first ones."""
    sizes, orders = _sizes(case), torch_orders(rank, case)
    meter = Meter()
    executor = Executor(
        plan_in_order(orders, sizes), partial(transformer, case.hidden), loss_of_tokens, SGD
    )
    return _measured(meter, partial(executor.step, *tokens(MICROBATCHES)))


def theirs(rank: int, case: Race) -> Memory:
    """Likewise of torch's runtime."""
    sizes, batch = _sizes(case), tokens(MICROBATCHES)
    meter = Meter()
    made = Torch(rank, case, transformer(case.hidden), sizes, batch)
    return _measured(meter, made.step)


def torch_orders(rank: int, case: Race) -> Orders:
    """The orders of torch's schedule, which do not depend on the width."""
    return Torch(rank, case, transformer(8), _sizes(case), tokens(MICROBATCHES)).orders


def _sizes(case: Race) -> list[int]:
    count, layers = case.world * case.chunks, len(transformer(8))
    return [layers // count + (s < layers % count) for s in range(count)]


def _measured(meter: Meter, step: Callable[[], object]) -> Memory:
    for _ in range(STEPS):
        step()
    meter.restart()
    for _ in range(STEPS):
        step()
    return meter.read()


def step_table(quick: bool) -> Table:
    found = []
    for case in CASES[:2] if quick else CASES:
        for rank, (mine, other) in enumerate(
            zip(on_ranks(case.world, ours, case), on_ranks(case.world, theirs, case), strict=True)
        ):
            found.append((case.schedule, rank, mine[0], other[0], mine[1], other[1]))
    columns = ("schedule", "rank", "our peak", "torch's peak", "we hold", "torch holds")
    title = (
        f"Memory of a rank in a step beside torch.distributed.pipelining, MB: the transformer of "
        f"width {CASES[0].hidden} with SGD; held is after a step; target: at most torch's"
    )
    return Table("memory-step", title, columns, tuple(found))


CASES = tuple(
    replace(case, hidden=512, runtime=OWN)
    for case in RACES
    if case.world == 2 and case.hidden == 128 and case.runtime == OWN
)


# Beside the prediction


@dataclass(frozen=True, slots=True)
class Foretold:
    """A transformer of that width, planned for two ranks."""

    planner: str
    hidden: int

    @property
    def work(self) -> Workload:
        """The transformer with its data."""
        return Workload(partial(transformer, self.hidden), tokens, loss_of_tokens)


def foretold(rank: int, case: Foretold) -> tuple[str, float, float, float]:
    """A plan's layers on devices; in MB its predicted peak on this rank, and the measured ones.

    These are the memory that torch has allocated, and the resident memory of the process.
    """
    cluster, chain = describe(measure_links(CPU), CPU), profiled(case.work)
    plans: list[PipelinePlan | None] = [None]
    if rank == 0:
        plans = [stagewright.plan(chain, cluster, MICROBATCHES, case.planner).plan]
    dist.broadcast_object_list(plans)
    plan = plans[0]
    assert plan is not None
    assert plan.predicted is not None
    predicted = plan.predicted.peak_memory_bytes[plan_devices(plan)[rank]]
    meter = Meter()
    resident, _ = _measured(meter, _step_of(plan, case))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = _step_of(plan, case)
        for _ in range(STEPS):
            step()
    return cuts_of(plan), predicted / MEGABYTE, _allocated(profiler), resident


def _step_of(plan: PipelinePlan, case: Foretold) -> Callable[[], object]:
    executor = Executor(plan, partial(transformer, case.hidden), loss_of_tokens, SGD)
    return partial(executor.step, *tokens(MICROBATCHES))


def _allocated(profiler: Any) -> float:
    """The peak of the sum of all allocations, in MB."""
    every = profiler.profiler.kineto_results.events()
    changes = sorted((one.start_ns(), one.nbytes()) for one in every if one.name() == "[memory]")
    return max(accumulate(size for _, size in changes)) / MEGABYTE


def prediction_table(quick: bool) -> Table:
    found = []
    for case in FORETOLD[:1] if quick else FORETOLD:
        for rank, (cuts, *sizes) in enumerate(on_ranks(2, foretold, case)):
            predicted, allocated, _ = sizes
            name = (case.planner, case.hidden, cuts, rank)
            found.append((*name, *sizes, allocated / predicted))
    columns = (
        *("planner", "width", "layers on devices", "rank", "predicted", "allocated", "resident"),
        "allocated / predicted",
    )
    title = "Peak memory of a rank beside its prediction, MB; target: 0.90 to 1.10"
    return Table("memory-prediction", title, columns, tuple(found))


FORETOLD = (Foretold("spp", 512), Foretold("gpipe", 512), Foretold("spp", 768))


def tables(quick: bool) -> Iterator[Table]:
    """While stages are made, in a step, and beside the prediction, each when it is done."""
    yield start_table()
    yield step_table(quick)
    yield prediction_table(quick)
