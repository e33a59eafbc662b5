"""Models that were written elsewhere: captured, profiled, planned, and trained as in a plain loop.

``python -m benchmarks any_model [--quick]``. Every model is profiled by both ranks at once, planned
and checked, and trained by each plan in gloo processes of one thread, in float64. `plain_loop`
trains it beside. The timed plan is the pipeline of two stages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from rich.progress import track

import stagewright
from benchmarks.any_models import MODELS, TRACKING, AnyModel
from benchmarks.plain_loop import difference, loop
from benchmarks.ranks import CPU, on_ranks
from benchmarks.report import Table
from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.measuring.compare import compare
from stagewright.executor.measuring.links import MeasuringMachine, describe, measure_links
from stagewright.executor.measuring.profiling import measure_layers
from stagewright.executor.measuring.whole_models import captured_by_size
from stagewright.executor.training.data.passes import pair
from stagewright.executor.training.losses import cross_entropy, own_loss
from stagewright.executor.training.runtime import Executor
from stagewright.formulations.checking.check import require_valid
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.schedules.published.kinds import ScheduleChoice
from stagewright.graphs.machines.cluster import Cluster, Link, uniform_servers
from stagewright.graphs.models.chain import Chain
from stagewright.solvers.planners.steps.proposal import Choices

MICROBATCHES, SAMPLES, STEPS, TIMED = 4, 4, 3, 12
QUICK_MODELS = ("gpt2", "u-net")
DTYPE = torch.float64


@dataclass(frozen=True, slots=True)
class Layout:
    """A plan of ``planner`` for so many ``devices`` in ``servers``."""

    name: str
    devices: int
    planner: str = "order"
    schedule: str = "1f1b"
    servers: int = 1

    def plan(self, chain: Chain, cluster: Cluster) -> PipelinePlan:
        """The plan, checked."""
        choices = Choices(order=ScheduleChoice(self.schedule)) if self.planner == "order" else None
        found = stagewright.plan(chain, cluster, MICROBATCHES, self.planner, 5.0, choices=choices)
        assert found.plan is not None
        require_valid(PipelineProblem(chain, cluster, MICROBATCHES), found.plan)
        return found.plan


PIPELINE = Layout("2 stages", 2)
ON_TWO = (PIPELINE, Layout("2, ZB-H1", 2, schedule="zb-h1"))
ON_FOUR = (Layout("4 stages", 4), Layout("2 x 2", 4, planner="hetpipe", servers=2))


@dataclass(frozen=True, slots=True)
class Trained:
    """By one plan: the difference from the plain loop; measured / predicted, if it was timed."""

    difference: float
    ratio: float | None


def layers_of(one: AnyModel) -> LayeredModel:
    """The captured model."""
    (batch,) = one.batches(SAMPLES, 1, DTYPE)
    takes_loss = isinstance(batch, dict)
    inputs = batch if takes_loss else batch[0]
    found = captured_by_size(
        one.make, inputs, [SAMPLES], takes_loss, device=CPU, dtype=DTYPE, autocast=None
    )
    return found[SAMPLES]


def profiled(one: AnyModel) -> Chain:
    """The measured layers."""
    (batch,) = one.batches(SAMPLES, 1, DTYPE)
    takes_loss = isinstance(batch, dict)
    return measure_layers(
        {SAMPLES: layers_of(one)},
        pair(batch, has_loss=not takes_loss),
        (SAMPLES,),
        machine=MeasuringMachine(CPU),
        loss=own_loss if takes_loss else cross_entropy,
        optimizer=_optimizer(one),
    )


def _optimizer(one: AnyModel) -> Any:
    return partial(torch.optim.SGD, lr=one.lr, momentum=0.9)


def trained(rank: int, name: str, layouts: Sequence[Layout]) -> list[Trained | None]:
    """What each layout's plan comes to; known on rank 0."""
    one = MODELS[name]
    dist.barrier()
    chain = profiled(one)
    if dist.get_world_size() == 2:
        cluster = describe(measure_links(CPU), CPU)
    else:  # more ranks than cores: nothing is timed
        servers = max(layout.servers for layout in layouts)
        kind = chain.layers[0].costs[0].device_kind
        width = dist.get_world_size() // servers
        cluster = uniform_servers(servers, width, Link(1e9), Link(1e9), kind=kind)
    return [_by(rank, one, layout, chain, cluster) for layout in layouts]


def _by(rank: int, one: AnyModel, layout: Layout, chain: Chain, cluster: Cluster) -> Trained | None:
    plans: list[PipelinePlan | None] = [layout.plan(chain, cluster) if rank == 0 else None]
    dist.broadcast_object_list(plans)
    plan = plans[0]
    assert plan is not None
    batches = list(one.batches(SAMPLES * MICROBATCHES, STEPS, DTYPE))
    pairs = [pair(batch, has_loss=not isinstance(batch, dict)) for batch in batches]
    is_timed = layout == PIPELINE
    executor = Executor(
        plan, one.make(), None, _optimizer(one), example=pairs[0][0], dtype=DTYPE, trace=is_timed
    )
    for inputs, targets in pairs:
        executor.step(inputs, targets)
    state = executor.parameters_on_first_rank()
    ratio = _ratio(executor, plan, pairs) if is_timed else None
    if state is None:
        return None
    model = one.make()
    expected = loop(model, batches, MICROBATCHES, _optimizer(one))
    return Trained(difference(state, expected.state, one.make().state_dict()), ratio)


def _ratio(executor: Executor, plan: PipelinePlan, pairs: Sequence[Any]) -> float | None:
    """Measured / predicted seconds of an iteration, the median of those after the first."""
    for turn in range(TIMED):
        executor.step(*pairs[turn % len(pairs)])
    trace = executor.trace_on_first_rank()
    if trace is None:
        return None
    timed = replace(trace, steps=trace.steps[STEPS:])
    return compare(plan, timed).iteration_seconds.ratio


def row(name: str) -> tuple[object, ...]:
    """A model's line of the table."""
    layered = layers_of(MODELS[name])
    how = "exported" if layered.guards else "traced"
    # Statistics that replicas track are each of their own microbatches.
    on_four = ON_FOUR[:1] if name == TRACKING else ON_FOUR
    every = [*ON_TWO, *on_four]
    found = [
        one
        for layouts in (ON_TWO, on_four)
        for one in on_ranks(layouts[0].devices, trained, name, layouts)[0]
    ]
    worst = max(one.difference for one in found)
    verdict = f"{'yes' if worst <= MODELS[name].rounding else 'NO'}, {worst:.0e}"
    names = "; ".join(layout.name for layout in every)
    return name, f"{how}, {len(layered)} layers", names, verdict, found[0].ratio


def tables(quick: bool) -> Iterator[Table]:
    """The table."""
    names = QUICK_MODELS if quick else tuple(MODELS)
    rows = tuple(row(name) for name in track(names, "any model"))
    packages = ", ".join(f"{name} {version(name)}" for name in ("transformers", "torchvision"))
    title = (
        f"Models of {packages} and torch, small, without dropout: {STEPS} steps of "
        f"{MICROBATCHES} microbatches of {SAMPLES} in float64, SGD with momentum, beside a plain "
        "loop over the microbatches; the difference is the largest of a parameter or buffer of the "
        "state dict in any of the plans, relative to what the steps have changed; measured / "
        f"predicted: an iteration of 2 stages, median of {TIMED - 1}"
    )
    columns = (
        *("model", "captured", "pipelines", "equal (largest difference)"),
        "measured / predicted",
    )
    yield Table("any-model", title, columns, rows)
