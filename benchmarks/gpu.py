"""One GPU: plans of a model beside torch's plain loop, and windows between two losses.

``python -m benchmarks gpu [--quick]``; without a GPU nothing is measured. What is compared runs in
one process, one after another.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn

import stagewright
from benchmarks.any_models import hugging_face
from benchmarks.backward_first import backward_first_plan
from benchmarks.executor import plan_in_order
from benchmarks.plain_loop import cut, loss_of
from benchmarks.report import Table
from stagewright.executor.measuring.machine import MeasuringMachine
from stagewright.executor.measuring.profiling import measure_layers
from stagewright.executor.measuring.whole_models import captured_by_size
from stagewright.executor.training.data.batches import pair
from stagewright.executor.training.losses import cross_entropy, own_loss
from stagewright.executor.training.runtime import Executor
from stagewright.formulations.backprop.orders import OutOfOrder
from stagewright.formulations.plans.actions import Action, B, F, I, W
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain
from stagewright.solvers.planners.steps.proposal import Choices

MICROBATCHES, STEPS, WARM_UP = 4, 12, 4
BLOCKS, WIDTH, HEADS, SEQUENCE, TOKENS = 12, 768, 12, 512, 50257
PIXELS, CLASSES = 224, 1000
SHARE = 0.4  # of the GPU that a kernel is assumed to occupy
ADAM = partial(torch.optim.AdamW, lr=1e-4)
SGD = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


@dataclass(frozen=True, slots=True)
class Workload:
    """A model of seed 0, and mini-batches of microbatches of so many ``samples``."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    samples: int
    microbatches: int
    optimizer: Any
    autocast: torch.dtype | None

    def make(self) -> nn.Module:
        """The module."""
        torch.manual_seed(0)
        return self.build()

    @property
    def takes_loss(self) -> bool:
        """Whether the model returns its loss."""
        return isinstance(self.batch(1), dict)

    def profiled(self, device: torch.device) -> Chain:
        """The measured layers."""
        batch = self.batch(self.samples)
        inputs = batch if self.takes_loss else batch[0]
        layers = captured_by_size(
            self.make,
            inputs,
            [self.samples],
            self.takes_loss,
            device=device,
            dtype=torch.float32,
            autocast=self.autocast,
        )
        return measure_layers(
            layers,
            pair(batch, has_loss=not self.takes_loss),
            (self.samples,),
            machine=MeasuringMachine(device),
            loss=own_loss if self.takes_loss else cross_entropy,
            optimizer=self.optimizer,
            autocast=self.autocast,
        )

    def problem(self, chain: Chain) -> PipelineProblem:
        """The problem of one device that is large enough."""
        kind = chain.layers[0].costs[0].device_kind
        cluster = uniform_servers(1, 1, Link(1e12), memory_bytes=1e12, kind=kind)
        return PipelineProblem(chain, cluster, self.microbatches)

    def carried_out(self, plan: PipelinePlan, device: torch.device, **options: Any) -> "Measured":
        """An iteration of a plan."""
        batch = self.batch(self.samples * self.microbatches)
        inputs, targets = pair(batch, has_loss=not self.takes_loss)
        dtype = self.autocast or torch.float32
        executor = Executor(
            plan, self.make, None, self.optimizer,
            example=inputs, dtype=dtype, device=device, **options,
        )  # fmt: skip
        return measured(lambda: executor.step(inputs, targets), device)

    def plain(self, device: torch.device, *, compiled: bool = False) -> "Measured":
        """An iteration of the plain loop over microbatches."""
        model = self.make().to(device)
        if compiled:  # for a CPU it would build C++ for longer than all else takes
            model.compile(backend="inductor" if device.type == "cuda" else "eager")
        optimizer = self.optimizer(model.parameters())
        pieces = cut(_on(device, self.batch(self.samples * self.microbatches)), self.microbatches)

        def step() -> None:
            optimizer.zero_grad()
            losses = []
            for piece in pieces:
                with torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
                    loss = loss_of(model, piece) / len(pieces)
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            torch.stack(losses).sum().item()

        return measured(step, device)

    def captured(self, device: torch.device) -> float:
        """Seconds of a whole step as one CUDA graph, with the mini-batch in fixed memory."""
        model = self.make().to(device)
        optimizer, given = self.optimizer(model.parameters()), self.batch(self.samples)
        fixed = _on(device, given)

        def step() -> Any:
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model, fixed)
            loss.backward()
            optimizer.step()
            return loss

        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                step()
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()

        def replay() -> None:
            for place, one in zip(fixed, given, strict=True):
                place.copy_(one)
            graph.replay()
            loss.item()

        return measured(replay, device).seconds


def _on(device: torch.device, batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: one.to(device) for name, one in batch.items()}
    return tuple(one.to(device) for one in batch)


class Measured(NamedTuple):
    """The seconds of a step, and the most gigabytes that torch allocated on a GPU."""

    seconds: float
    gigabytes: float | None


def measured(step: Callable[[], Any], device: torch.device) -> Measured:
    """The median of several steps, each until the device is done."""
    taken = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    warm_up, steps = (WARM_UP, STEPS) if device.type == "cuda" else (1, 2)
    for _ in range(warm_up + steps):
        began = perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(perf_counter() - began)
    peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
    return Measured(median(taken[warm_up:]), peak)


def tables(quick: bool) -> Iterator[Table]:
    """All tables; none without a GPU."""
    if not torch.cuda.is_available():
        print("gpu: there is no GPU; nothing is measured")
        return
    yield pipelines("GPT-2", language, quick)
    yield pipelines("Llama", llama, quick)
    yield windows(quick)


def device_here() -> tuple[torch.device, str]:
    """The GPU, or the CPU where there is none, and its name."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), "CPU"
    device = torch.device("cuda", torch.cuda.current_device())
    return device, torch.cuda.get_device_name(device)


# Pipelines on the GPU


def language(quick: bool) -> Workload:
    """GPT-2 in mixed precision."""
    blocks, width, sequence, tokens = (
        (2, 48, 32, 64) if quick else (BLOCKS, WIDTH, SEQUENCE, TOKENS)
    )
    build = hugging_face(
        *("GPT2LMHeadModel", "GPT2Config"),
        **{"n_embd": width, "n_layer": blocks, "n_head": HEADS, "n_positions": sequence},
        **{"vocab_size": tokens, "bos_token_id": 1, "eos_token_id": 2},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    )

    def batch(samples: int) -> Any:
        shown = torch.randint(tokens, (samples, sequence), generator=torch.Generator())
        return {"input_ids": shown, "labels": shown.clone()}

    return Workload(build, batch, 8, MICROBATCHES, ADAM, torch.bfloat16)


def llama(quick: bool) -> Workload:
    """Of the sizes of Llama 3.2 1B, in mixed precision."""
    hidden, layers, tokens, sequence = (64, 2, 64, 32) if quick else (2048, 16, 128_256, 2048)
    build = hugging_face(
        *("LlamaForCausalLM", "LlamaConfig"),
        **{"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": tokens},
    )

    def batch(samples: int) -> Any:
        shown = torch.randint(tokens, (samples, sequence), generator=torch.Generator())
        return {"input_ids": shown, "labels": shown.clone()}

    return Workload(build, batch, 2, MICROBATCHES, ADAM, torch.bfloat16)


def pipelines(model: str, of: Callable[[bool], Workload], quick: bool) -> Table:
    """An iteration of plans that have all stages on the GPU, microbatch by microbatch."""
    work, (device, name) = of(quick), device_here()
    chain = work.profiled(device)
    problem = work.problem(chain)
    planned = stagewright.plan(chain, problem.cluster, work.microbatches, "dp").plan
    assert planned is not None
    assert planned.predicted is not None
    predicted = planned.predicted.iteration_seconds
    (memory,) = planned.predicted.peak_memory_bytes.values()
    base, memory = work.plain(device), memory / 1e9
    compiled = work.plain(device, compiled=True)
    rows: list[tuple[object, ...]] = [
        (what, 1e3 * one.seconds, one.seconds / base.seconds, None, None, one.gigabytes, None)
        for what, one in (("plain loop", base), ("the same, torch.compile", compiled))
    ]
    for count in (1, 4):
        taken, peak = work.carried_out(_in_stages(problem, count), device)
        times = (1e3 * taken, taken / base.seconds, 1e3 * predicted, taken / predicted)
        rows.append((f"{count} on the device", *times, peak, memory))
    title = (
        f"{model} of {len(chain)} layers on one {name}: {work.microbatches} microbatches of "
        f"{work.samples} samples, bfloat16, AdamW"
    )
    times = ("ms", "/ plain", "predicted, ms", "measured / predicted")
    columns = ("stages", *times, "allocated, GB", "predicted, GB")
    name = "gpu-llama" if model == "Llama" else "gpu-pipelines"
    return Table(name, title, columns, tuple(rows))


def _in_stages(problem: PipelineProblem, count: int) -> PipelinePlan:
    """Microbatch by microbatch: forwards through all stages, then backwards."""
    layers, stages = len(problem.chain), range(min(count, len(problem.chain)))
    count = len(stages)
    sizes = [layers * (s + 1) // count - layers * s // count for s in stages]
    row = [
        Action(s, kind, m)
        for m in range(problem.microbatches)
        for kind, order in ((F, stages), (B, reversed(stages)))
        for s in order
    ]
    return plan_in_order([row], sizes)


# Windows between two losses


def vision(quick: bool) -> Workload:
    """ResNet-50, or 18, in float32."""

    def build() -> nn.Module:
        from torchvision import models

        return (models.resnet18 if quick else models.resnet50)(num_classes=CLASSES)

    def batch(samples: int) -> Any:
        pixels = 32 if quick else PIXELS
        random = torch.Generator().manual_seed(1)
        shown = torch.randn(samples, 3, pixels, pixels, generator=random)
        return shown, torch.randint(CLASSES, (samples,), generator=random)

    return Workload(build, batch, 4 if quick else 64, 1, SGD, None)


def windows(quick: bool) -> Table:
    """A window with weight gradients in place or at the end, in one stream or two, as a graph."""
    work, (device, name) = vision(quick), device_here()
    chain = work.profiled(device)
    problem = work.problem(_with_shares(chain))
    usual, late = _between_losses(problem, late=False), _between_losses(problem, late=True)
    best = stagewright.plan(
        problem.chain, problem.cluster, 1, "ooo",
        choices=Choices(out_of_order=OutOfOrder("single")),
    ).plan  # fmt: skip
    assert best is not None
    plans = {
        "conventional": usual,
        "conventional, W in the sub-stream": in_two_streams(usual),
        "W last, in the sub-stream": in_two_streams(late),
        f"planner ooo, shares of {SHARE:.0%}": best,
    }
    ways = (False, True) if device.type == "cuda" else (False,)
    base, whole = work.plain(device).seconds, work.captured(device) if True in ways else nan
    rows: list[tuple[object, ...]] = [("plain loop", 1e3 * base, 1e3 * whole)]
    for what, plan in plans.items():
        both = [1e3 * work.carried_out(plan, device, graph=graph).seconds for graph in ways]
        rows.append((what, *both, *[nan] * (2 - len(both))))
    title = (
        f"{'ResNet-18' if quick else 'ResNet-50'} of {len(chain)} layers on one {name}: "
        f"{work.samples} images, float32, SGD; an "
        "iteration, with a stage per layer"
    )
    return Table("gpu-windows", title, ("window", "ms", "as a CUDA graph, ms"), tuple(rows))


def _with_shares(chain: Chain) -> Chain:
    """The chain with the same assumed share of the GPU for every kernel."""
    names = ("forward_share", "input_gradient_share", "weight_gradient_share")
    shares = dict.fromkeys(names, SHARE)
    return replace(
        chain,
        layers=tuple(
            replace(one, costs=tuple(replace(cost, **shares) for cost in one.costs))
            for one in chain.layers
        ),
    )


def _between_losses(problem: PipelineProblem, *, late: bool) -> PipelinePlan:
    """A stage per layer; weight gradients right after their input gradients, or after all."""
    device, layers = problem.cluster.devices[0].name, range(len(problem.chain))
    stages = [Stage((i, i + 1), (device,)) for i in layers]
    row = [Action(s, I, 0) for s in reversed(layers)]
    weights = [Action(s, W, 0) for s in reversed(layers)]
    row = (
        [*row, *weights]
        if late
        else [one for both in zip(row, weights, strict=True) for one in both]
    )
    row += [Action(s, F, 0) for s in layers]
    return backward_first_plan(problem, "benchmark", stages, {device: row})


def in_two_streams(plan: PipelinePlan) -> PipelinePlan:
    """The plan with its weight gradients in the sub-stream."""
    marked = tuple(replace(one, stream="sub") if "W" in one.action else one for one in plan.actions)
    return replace(plan, schedule=replace(plan.schedule, actions=marked))
