"""Iterations beside their predictions: profiled, planned and run on two ranks of this machine."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional

import stagewright
from benchmarks.ranks import CPU, SGD, on_ranks
from benchmarks.report import Table, percent
from examples.models import ResNet50, Transformer
from stagewright.executor.capture.tracing import capture
from stagewright.executor.measuring.causes import ON_DEVICE, WAITING, MeasuredRun, measured_steps
from stagewright.executor.measuring.compare import Comparison, compare
from stagewright.executor.measuring.links import describe, measure_links
from stagewright.executor.measuring.machine import MeasuringMachine
from stagewright.executor.measuring.profiling import measure_layers
from stagewright.executor.measuring.whole_models import mean_of_ranks
from stagewright.executor.training.runtime import Executor
from stagewright.executor.training.trace_recorder import waited_seconds
from stagewright.formulations.plans.actions import ActionKind
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.schedules.published.kinds import ScheduleChoice
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.models.chain import Chain
from stagewright.solvers.planners.steps.proposal import Choices

MICROBATCHES, SAMPLES = 8, 2
WARM_UP = 3
BLOCKS, HEADS, SEQUENCE, VOCABULARY = 8, 4, 64, 256
PIXELS, CLASSES = 64, 10

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model by its layers, data for so many microbatches, and a loss."""

    layers: Callable[[], list[nn.Module]]
    batch: Callable[[int], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]


def transformer(hidden: int) -> list[nn.Module]:
    """The layers of a transformer; the scores are (n, sequence, vocabulary)."""
    torch.manual_seed(0)
    model = Transformer(BLOCKS, hidden, HEADS, SEQUENCE, VOCABULARY)
    return [model.embedding, *model.blocks, model.head]


def tokens(microbatches: int) -> Batch:
    """Random ones, and the next ones."""
    random = torch.Generator().manual_seed(0)
    shape = (microbatches * SAMPLES, SEQUENCE + 1)
    found = torch.randint(VOCABULARY, shape, generator=random)
    return found[:, :-1], found[:, 1:]


def loss_of_tokens(scores: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the next tokens."""
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def resnet() -> list[nn.Module]:
    """ResNet-50: stem, sixteen blocks, head."""
    torch.manual_seed(0)
    model = ResNet50(CLASSES)
    return [model.stem, *model.blocks, model.head]


def images(microbatches: int) -> Batch:
    """Noise, and its classes."""
    random = torch.Generator().manual_seed(0)
    count = microbatches * SAMPLES
    shown = torch.randn(count, 3, PIXELS, PIXELS, generator=random)
    return shown, torch.randint(CLASSES, (count,), generator=random)


WORKLOADS = {
    "transformer, width 16": Workload(lambda: transformer(16), tokens, loss_of_tokens),
    "transformer, width 256": Workload(lambda: transformer(256), tokens, loss_of_tokens),
    "ResNet-50": Workload(resnet, images, functional.cross_entropy),
}


@dataclass(frozen=True, slots=True)
class Forecast:
    """A model, and the planner of its plan for two ranks."""

    model: str
    planner: str


FORECASTS = (
    Forecast("transformer, width 256", "spp"),
    Forecast("transformer, width 256", "dp"),
    Forecast("ResNet-50", "spp"),
    Forecast("ResNet-50", "dp"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Prediction beside run; ``waited`` is the most that a rank waited for a core, of a step.

    ``undisturbed_seconds`` are those of a replay with the processor times of computations and the
    fastest of each message in several steps.
    """

    cuts: str
    comparison: Comparison
    waited: float
    undisturbed_seconds: float

    @property
    def ratio(self) -> float:
        """Measured / predicted seconds of an iteration."""
        found = self.comparison.iteration_seconds.ratio
        assert found is not None
        return found

    @property
    def calm_ratio(self) -> float:
        """The same of the undisturbed iteration."""
        return self.undisturbed_seconds / self.comparison.iteration_seconds.predicted

    @property
    def cause(self) -> str:
        """The cause of most of the difference that is not a wait, and its share of an iteration."""
        explanation = self.comparison.explanation
        assert explanation is not None
        own = [one for one in explanation.causes if one.name != WAITING]
        most = max(own, key=lambda one: abs(one.seconds))
        return f"{most.name} {most.seconds / self.comparison.iteration_seconds.predicted:+.1%}"

    def ratio_of(self, name: str) -> float | None:
        """Measured / predicted seconds of a kind of action, without waits; None without any."""
        explanation = self.comparison.explanation
        assert explanation is not None
        found = (one.work for one in explanation.causes if one.name == name)
        work = next(found, None)
        return None if work is None else work.ratio


def forecast(rank: int, case: Forecast, turns: int, steps: int) -> list[Outcome]:
    """Profile, plan, run and compare in turns; the outcomes on rank 0.

    All ranks profile at once, as they will compute at once: they share caches and memory. Of twice
    as many steps, those count in which the ranks waited least for a core.
    """
    del rank
    return list(_turns(WORKLOADS[case.model], case.planner, turns, steps))


def _turns(work: Workload, planner: str, turns: int, steps: int) -> Iterator[Outcome]:
    for _ in range(turns):
        cluster = describe(measure_links(CPU), CPU)
        dist.barrier()
        plan = planned(mean_of_ranks(profiled(work)), cluster, planner)
        executor = Executor(plan, work.layers(), work.loss, SGD, trace=True)
        batch = work.batch(MICROBATCHES)
        waits = [_waits_of(executor, batch) for _ in range(WARM_UP + 2 * steps)][WARM_UP:]
        trace = executor.trace_on_first_rank()
        if trace is None:
            continue
        calm = sorted(range(len(waits)), key=waits.__getitem__)[:steps]
        kept = [trace.steps[0], *(trace.steps[WARM_UP + i] for i in sorted(calm))]
        counted = replace(trace, steps=tuple(kept))
        compared, run = compare(plan, counted), measured_steps(plan, counted)
        waited = median(waits[i] for i in calm) / compared.iteration_seconds.measured
        yield Outcome(cuts_of(plan), compared, waited, undisturbed_seconds(run))


def planned(chain: Chain, cluster: Cluster, planner: str, order: str | None = None) -> PipelinePlan:
    """The plan of what all ranks have measured at once."""
    plans: list[PipelinePlan | None] = [None]
    if dist.get_rank() == 0:
        choices = None if order is None else Choices(order=ScheduleChoice(order))
        plans = [stagewright.plan(chain, cluster, MICROBATCHES, planner, choices=choices).plan]
    dist.broadcast_object_list(plans)
    (plan,) = plans
    assert plan is not None
    return plan


def profiled(work: Workload) -> Chain:
    """The layers as this rank measures them, with the samples of a microbatch and of its half."""
    return measure_layers(
        capture(work.layers()),
        work.batch(1),
        (1, SAMPLES),
        machine=MeasuringMachine(CPU),
        loss=work.loss,
        optimizer=SGD,
    )


def _waits_of(executor: Executor, batch: Batch) -> float:
    """Carry out a step; the seconds that the rank which waited longest for a core did so."""
    before = waited_seconds() or 0.0
    executor.step(*batch)
    longest = torch.tensor((waited_seconds() or 0.0) - before)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def cuts_of(plan: PipelinePlan) -> str:
    """The layers of each stage and the number of its devices."""
    return "; ".join(
        f"{stage.layers[0]}-{stage.layers[1] - 1} on {len(stage.devices)}" for stage in plan.stages
    )


def forecast_table(quick: bool) -> Table:
    """The calmest of several turns for each case, whatever its ratio."""
    turns, steps = (1, 3) if quick else (4, 10)
    found = []
    for case in track(FORECASTS[:1] if quick else FORECASTS, "beside the prediction"):
        outcomes: list[Outcome] = on_ranks(2, forecast, case, turns, steps)[0]
        calm = min(outcomes, key=lambda one: one.waited)
        iteration = calm.comparison.iteration_seconds
        found.append(
            (
                *(case.model, case.planner, calm.cuts),
                *(1e3 * iteration.predicted, 1e3 * iteration.measured, calm.ratio),
                *(calm.comparison.equal_speed_ratio, percent(calm.waited), calm.calm_ratio),
                *(calm.ratio_of("forwards"), calm.ratio_of("backwards"), calm.cause),
            )
        )
    columns = (
        *("model", "planner", "layers on devices", "predicted, ms", "measured, ms"),
        *("measured / predicted", "at equal speed", "waited for a core"),
        "undisturbed / predicted",
        *("F, likewise", "B, likewise", "largest cause but waits"),
    )
    title = (
        "An iteration beside its prediction: profiled by two ranks at once and planned for two "
        f"ranks of this machine; {MICROBATCHES} microbatches of {SAMPLES}; median of {steps} steps "
        f"in the calmest of {turns} turns; target: 0.90 to 1.10"
    )
    return Table("executor-prediction", title, columns, tuple(found))


def undisturbed_seconds(of: MeasuredRun) -> float:
    """The iteration with nothing between actions, no waits, and messages as the fastest one.

    That is the fastest of a kind and stage: what else a machine does lengthens messages, as it
    takes the cores that send and receive them.
    """
    actions = of.run.actions
    durations = np.median(of.measured, axis=1)
    least = defaultdict[tuple[int, ActionKind], float](lambda: np.inf)
    for action, seconds in zip(actions, of.measured.min(axis=1).tolist(), strict=True):
        place = action.stage, action.kind
        least[place] = min(least[place], seconds)
    for i, action in enumerate(actions):
        if action.kind not in ON_DEVICE:
            durations[i] = least[action.stage, action.kind]
    return of.seconds(durations[:, None])
