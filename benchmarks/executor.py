"""The executor: what it costs by itself, beside torch's own pipelines, and beside its prediction.

``python -m benchmarks executor [--quick]``. The ranks are gloo processes of one thread. Other work
on the machine slows whoever runs at the time: what is compared takes turns, and ratios are medians
of the turns' ratios.
"""

import copy
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.progress import track
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.forecast_orders import orders_table
from benchmarks.forecasts import (
    BLOCKS,
    MICROBATCHES,
    SAMPLES,
    SEQUENCE,
    WARM_UP,
    forecast_table,
    loss_of_tokens,
    tokens,
    transformer,
)
from benchmarks.ranks import CPU, SGD, on_ranks
from benchmarks.report import Table
from stagewright.executor.capture.shapes import Value
from stagewright.executor.export import export
from stagewright.executor.programs.lower import lower
from stagewright.executor.programs.program import Instruction, rows, stages_on
from stagewright.executor.training.interpreter.exchange import Boundary, schedule_gloo
from stagewright.executor.training.interpreter.interpreter import Interpreter
from stagewright.executor.training.interpreter.streams import Joint, OneStream
from stagewright.executor.training.ranks.rank import Rank, RankProgram
from stagewright.executor.training.runtime import Executor
from stagewright.executor.training.stages.stage import Gradients, Seed, StageComputation, Tensors
from stagewright.executor.training.stages.weights import Weights
from stagewright.formulations.plans.actions import COMPUTE, Action, ActionKind, parse_action
from stagewright.formulations.plans.plan import PipelinePlan, Schedule, ScheduledAction, Stage
from stagewright.formulations.schedules.published.one_f_one_b import gpipe, interleaved, one_f_one_b

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT

Orders = Sequence[Sequence[Action]]  # a rank's computations


# Plans without a cost model


def plan_in_order(orders: Orders, layers: Sequence[int]) -> PipelinePlan:
    """The plan in which rank r does ``orders[r]``, and stage s has ``layers[s]`` layers."""
    rank = {action.stage: r for r, order in enumerate(orders) for action in order}
    stages = tuple(
        Stage((sum(layers[:s]), sum(layers[: s + 1])), (f"rank{rank[s]}",))
        for s in range(len(layers))
    )
    microbatches = sum(
        action.stage == 0 and action.kind is F for order in orders for action in order
    )
    starts = _starts(orders)
    entries = [
        ScheduledAction(f"rank{rank[action.stage]}", str(action), start, start + 1)
        for action, start in sorted(starts.items(), key=lambda pair: pair[1])
    ]
    return PipelinePlan(
        "", "given", "model", "ranks", microbatches, stages, Schedule(tuple(entries))
    )


def _starts(orders: Orders) -> dict[Action, int]:
    """Every action as early as can be, if all last a second and transfers nothing."""
    every = {action for order in orders for action in order}
    starts: dict[Action, int] = {}
    ahead, free = [list(order) for order in orders], [0] * len(orders)
    while any(ahead):
        for r, order in enumerate(ahead):
            while order and (needed := _needs(order[0]) & every) <= starts.keys():
                action = order.pop(0)
                starts[action] = max([free[r], *(starts[one] + 1 for one in needed)])
                free[r] = starts[action] + 1
    return starts


def _needs(action: Action) -> set[Action]:
    """What may have to come before; a backward is B, or I and W."""
    s, m = action.stage, action.microbatch
    if action.kind is F:
        return {Action(s - 1, F, m)} if s else set()
    if action.kind is W:
        return {Action(s, I, m)}
    return {Action(s, F, m), Action(s + 1, B, m), Action(s + 1, I, m)}


# The interpreter without a model


EMPTY_STAGES, EMPTY_MICROBATCHES = 8, 16
MEAN, MEAN_OF_PROCESS = "mean of all", "mean of all, with gloo's threads"
BARE = "torch's own send or receive, waited for"
BARE_OF_PROCESS = "the same, with gloo's threads"

InterpreterKind = TypeVar("InterpreterKind", bound=Interpreter)


class Nothing(StageComputation):
    """Hands over what it is given."""

    def __init__(self) -> None:
        super().__init__((), "none", CPU, None)

    @property
    def trained(self) -> tuple[bool, ...]:
        """The only output is."""
        return (True,)

    def forward(
        self, microbatch: int, inputs: Tensors, seed: Seed, in_two: bool, attached: bool = False
    ) -> Tensors:
        """Outputs that are the inputs."""
        return inputs

    def backward(self, microbatch: int, output_gradients: Gradients) -> Gradients:
        """Input gradients that are the outputs'."""
        return output_gradients


class TimedInterpreter(Interpreter):
    """Notes the CPU seconds of this thread in every instruction."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.taken: defaultdict[str, list[float]] = defaultdict(list)
        super().__init__(*args, **options)

    def _call(self, one: Instruction) -> Callable[[], None]:
        call, kind = super()._call(one), one.action.kind
        at_loss = one.action.stage == self._last and kind in (F, B)
        taken = self.taken[f"{kind} with the loss" if at_loss else str(kind)]

        def timed() -> None:
            began = time.thread_time()
            call()
            taken.append(time.thread_time() - began)

        return timed


def empty_interpreter(rank: int, kind: type[InterpreterKind]) -> InterpreterKind:
    """Interleaved 1F1B of stages that compute nothing, with tensors of one number."""
    group, stages = dist.group.WORLD, EMPTY_STAGES
    assert group is not None
    world = group.size()
    orders = interleaved(world, stages // world, EMPTY_MICROBATCHES).rows
    plan = plan_in_order(orders, [1] * stages)
    program = lower(plan)
    own = stages_on(plan, program.devices[rank])
    value = Value((1,), torch.float32, gradient=True)
    return kind(
        Rank(program.devices, rank, CPU, CPU, group, plan),
        RankProgram(program.rows[rank]),
        {s: Nothing() for s in own},
        {s: Weights([nn.Identity()], {}, (), SGD, 1) for s in own},
        {},
        [Boundary((value,), (True,), [[(0, 1)]])] * (stages - 1),
        rows(plan, 1),
        1,
        loss=lambda output, _: output.sum(),
        result=lambda values: values[0],
        scale=1.0,
        seed=0,
        joint=Joint(None, frozenset(), sum_tied=lambda: None, squares=lambda: 0.0),
        streams=OneStream(),
        captured=False,
        is_own=False,
    )


def overhead(rank: int, turns: int) -> dict[str, list[float]]:
    """CPU seconds of instructions by kind, and of a whole iteration per instruction."""
    batch = torch.zeros(EMPTY_MICROBATCHES)
    timed = empty_interpreter(rank, TimedInterpreter)
    plain = empty_interpreter(rank, Interpreter)
    whole, every_thread = [], []
    for turn in range(turns):
        timed.run((batch,), batch, turn)
        began, process_began = time.thread_time(), time.process_time()
        plain.run((batch,), batch, turn)
        whole.append(time.thread_time() - began)
        every_thread.append(time.process_time() - process_began)
    count = sum(map(len, timed.taken.values())) / turns
    timed.taken[MEAN] = [seconds / count for seconds in whole]
    timed.taken[MEAN_OF_PROCESS] = [seconds / count for seconds in every_thread]
    if dist.get_world_size() == 2:
        timed.taken[BARE], timed.taken[BARE_OF_PROCESS] = bare_transfers(
            rank, turns * EMPTY_MICROBATCHES
        )
    return dict(timed.taken)


def bare_transfers(rank: int, count: int) -> tuple[list[float], list[float]]:
    """CPU seconds of torch's own calls for a message of one number: this thread's, and all."""
    group, taken = dist.group.WORLD, []
    assert group is not None
    process_began = time.process_time()
    for i in range(count):
        began = time.thread_time()
        call = group.send if i % 2 == rank else group.recv
        call([torch.empty(1)], 1 - rank, i).wait()
        taken.append(time.thread_time() - began)
    # Gloo's thread is still at work when a call returns.
    return taken, [(time.process_time() - process_began) / count]


def overhead_table(quick: bool) -> Table:
    turns = 20 if quick else 200
    found = []
    for world in (1, 2):
        taken: defaultdict[str, list[float]] = defaultdict(list)
        for of_rank in on_ranks(world, overhead, turns):
            for name, seconds in of_rank.items():
                taken[name] += seconds
        found.append({name: 1e6 * median(seconds) for name, seconds in taken.items()})
    last = (MEAN, MEAN_OF_PROCESS, BARE, BARE_OF_PROCESS)
    names = [*(name for name in found[1] if name not in last), *last]
    return Table(
        "executor-overhead",
        f"The interpreter without a model: CPU microseconds of an instruction; {EMPTY_STAGES} "
        f"stages, {EMPTY_MICROBATCHES} microbatches; target: below 50 on average",
        ("instruction", "one rank, no transfers", "two ranks, every boundary between them"),
        tuple((name, *(of_world.get(name) for of_world in found)) for name in names),
    )


# Beside torch


OWN, GENERAL = "its own class", "the general runtime"


@dataclass(frozen=True, slots=True)
class Race:
    """A schedule of torch's on so many ranks, each with ``chunks`` stages of a transformer.

    ``runtime`` is what carries it out there: the schedule's own class, or torch's general runtime
    with the schedule as a file.
    """

    schedule: str
    runtime: str = OWN
    world: int = 2
    chunks: int = 1
    hidden: int = 128


RACES = (
    Race("1F1B", GENERAL),
    Race("Interleaved1F1B", chunks=2),
    Race("1F1B"),
    Race("GPipe"),
    Race("ZBVZeroBubble", chunks=2),
    Race("InterleavedZeroBubble", chunks=2),
    Race("DualPipeV", chunks=2),
    Race("1F1B", hidden=256),
    Race("1F1B", GENERAL, world=4),
)
QUICK_RACES = 2


@dataclass(frozen=True, slots=True)
class Clocks:
    """When a rank began and ended an iteration, and its CPU seconds."""

    began: float
    ended: float
    cpu: float

    @property
    def seconds(self) -> float:
        """Elapsed ones."""
        return self.ended - self.began


def race(rank: int, case: Race, turns: int) -> list[tuple[Clocks, Clocks]]:
    """Our iterations and torch's on this rank, in turns."""
    layers, batch = transformer(case.hidden), tokens(MICROBATCHES)
    count = case.world * case.chunks
    sizes = [len(layers) // count + (s < len(layers) % count) for s in range(count)]
    theirs = Torch(rank, case, copy.deepcopy(layers), sizes, batch)
    executor = Executor(plan_in_order(theirs.orders, sizes), layers, loss_of_tokens, SGD)

    def ours() -> float | None:
        return executor.step(*batch)

    sides = (ours, os.SCHED_BATCH), (theirs.step, os.SCHED_OTHER)  # gloo's threads as each has them
    taken = []
    for turn in range(WARM_UP + turns):
        (one, loss), (other, other_loss) = starmap(clocked, sides if turn % 2 else sides[::-1])
        if loss is not None:
            torch.testing.assert_close(loss, other_loss, rtol=1e-4, atol=1e-4)
        taken.append((one, other) if turn % 2 else (other, one))
    return taken[WARM_UP:]


def clocked(step: Callable[[], float | None], policy: int) -> tuple[Clocks, float | None]:
    schedule_gloo(policy)
    dist.barrier()
    began, cpu = time.perf_counter(), time.process_time()
    loss = step()
    return Clocks(began, time.perf_counter(), time.process_time() - cpu), loss


class Torch:
    """The same stages under torch.distributed.pipelining."""

    def __init__(
        self,
        rank: int,
        case: Race,
        layers: Sequence[nn.Module],
        sizes: Sequence[int],
        batch: tuple[Tensor, Tensor],
    ) -> None:
        count = len(sizes)
        places = [s % case.world for s in range(count)]
        if case.schedule in ("ZBVZeroBubble", "DualPipeV"):
            places = [*range(case.world), *reversed(range(case.world))]
        self._own = [s for s in range(count) if places[s] == rank]
        stages = [
            PipelineStage(
                nn.Sequential(*layers[sum(sizes[:s]) : sum(sizes[: s + 1])]), s, count, CPU
            )
            for s in self._own
        ]
        self._last = count - 1 in self._own
        self._batch = batch
        self._optimizer = SGD([one for stage in stages for one in stage.submod.parameters()])
        make = schedules.get_schedule_class(case.schedule)
        single = issubclass(make, schedules.PipelineScheduleSingle)
        given = stages[0] if single else stages
        schedule = make(given, MICROBATCHES, loss_fn=loss_of_tokens)
        self.orders = _single(case) if single else _multi(schedule.pipeline_order)
        if case.runtime == GENERAL:
            schedule = schedules._PipelineScheduleRuntime(
                stages, MICROBATCHES, loss_fn=loss_of_tokens
            )
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "schedule.csv"
                path.write_text(export(plan_in_order(self.orders, sizes), "torch-csv")[path.name])
                schedule._load_csv(str(path))
        self._schedule = schedule

    def step(self) -> float | None:
        """One iteration; its mean loss where the last stage is."""
        inputs, targets = self._batch
        losses: list[Tensor] = []
        self._schedule.step(
            *([inputs] if 0 in self._own else []),
            **({"target": targets, "losses": losses} if self._last else {}),
            return_outputs=False,
        )
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if losses else None


def _single(case: Race) -> Orders:
    """What torch does with one stage on a rank; its own listing of 1F1B miscounts (2.13)."""
    if case.schedule == "1F1B":
        return one_f_one_b(case.world, MICROBATCHES).rows
    return gpipe(tuple(range(case.world)), MICROBATCHES).rows


def _multi(order: Mapping[int, Sequence[Any]]) -> Orders:
    """The order of every rank; of a pair that torch overlaps, the parts one after the other."""
    found = [
        [parse_action(str(part)) for one in order[r] if one for part in one.sub_actions or (one,)]
        for r in sorted(order)
    ]
    return [[action for action in row if action.kind in COMPUTE] for row in found]


def _joined(ranks: Sequence[Clocks]) -> Clocks:
    """From the first rank's beginning to the last one's end."""
    return Clocks(
        min(one.began for one in ranks),
        max(one.ended for one in ranks),
        sum(one.cpu for one in ranks),
    )


def race_table(quick: bool) -> Table:
    turns = 6 if quick else 40
    found = []
    for case in track(RACES[:QUICK_RACES] if quick else RACES, "beside torch"):
        ranks = on_ranks(case.world, race, case, turns)
        turns_of_ranks = list(zip(*ranks, strict=True))
        ours, theirs = (
            [_joined([rank[i] for rank in turn]) for turn in turns_of_ranks] for i in (0, 1)
        )
        ratios = [a.seconds / b.seconds for a, b in zip(ours, theirs, strict=True)]
        low, _, high = quantiles(ratios, n=4)
        cpu = median(a.cpu / b.cpu for a, b in zip(ours, theirs, strict=True))
        milliseconds = (1e3 * median(one.seconds for one in side) for side in (ours, theirs))
        layout = f"{case.world * case.chunks} on {case.world}"
        name = (case.schedule, case.runtime, layout, case.hidden)
        found.append((*name, *milliseconds, median(ratios), f"{low:.3f}-{high:.3f}", cpu))
    columns = (
        *("schedule", "in torch", "stages on ranks", "width", "ours, ms", "torch's, ms"),
        *("ours / torch's", "middle half", "ours / torch's, CPU"),
    )
    title = (
        f"An iteration beside torch.distributed.pipelining: transformer of {BLOCKS} blocks, "
        f"{MICROBATCHES} microbatches of {SAMPLES} x {SEQUENCE} tokens, loss, backward and SGD; "
        f"{turns} turns; target: 1.00"
    )
    return Table("executor-torch", title, columns, tuple(found))


def tables(quick: bool) -> Iterator[Table]:
    """The overhead, torch beside us, and predictions beside runs, each when it is done."""
    yield overhead_table(quick)
    yield race_table(quick)
    yield forecast_table(quick)
    yield orders_table(quick)
