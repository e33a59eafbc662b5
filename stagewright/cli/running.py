"""``run``: train a model by a plan."""

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stagewright.cli.console import (
    ClipNorm,
    JsonFlag,
    LossFunction,
    Module,
    Optimizer,
    PlanFile,
    Seed,
    print_answer,
    print_lines,
)
from stagewright.cli.optimizing import parse_groups, parse_optimizer, parse_schedule
from stagewright.cli.outputs import Writes, require_folder
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.executor.training.logs import OnStep, StepReport
    from stagewright.executor.training.training import Task, TrainingHistory
    from stagewright.formulations.operators.plan import OperatorPlan
    from stagewright.formulations.plans.plan import PipelinePlan

    AnyPlan = PipelinePlan | OperatorPlan

PROGRESS_SECONDS = 0.5  # minimum time between two lines of progress on a terminal
QUIET_SECONDS = 5.0  # and where stderr is a file


def run(
    plan: PlanFile,
    module: Module,
    data: Annotated[
        str,
        typer.Option(
            help="Function that returns an iterable of mini-batches, (inputs, targets) or dicts of "
            "the model's keywords with its labels, the same on every rank; called for every epoch. "
            "If it takes replica and replicas, it returns the samples of that replica.",
            metavar="PACKAGE:FACTORY",
            show_default=False,
        ),
    ],
    steps: Annotated[
        int,
        typer.Option(
            help="Total number of steps; each takes a mini-batch, or those of --accumulate.",
            min=1,
            show_default=False,
        ),
    ],
    loss: LossFunction = None,
    optimizer: Optimizer = "sgd:lr=0.01",
    parameter_group: Annotated[
        list[str] | None,
        typer.Option(
            help="Other arguments of the optimizer for parameters with a matching name, e.g. "
            "'norm|bias:weight_decay=0'; repeatable, the first match counts.",
            metavar="REGEX:KEY=VALUE,...",
        ),
    ] = None,
    lr_schedule: Annotated[
        str | None,
        typer.Option(
            help="Learning rates by step: constant, linear or cosine, e.g. "
            "cosine:warmup=100,min=0.1; min is a fraction of the learning rate, total is --steps.",
            metavar="KIND[:KEY=VALUE,...]",
        ),
    ] = None,
    accumulate: Annotated[
        int,
        typer.Option(help="Mini-batches whose gradients make an update, which is a step.", min=1),
    ] = 1,
    evaluate: Annotated[
        str | None,
        typer.Option(
            help="Function that returns an iterable of mini-batches that are held out, as --data, "
            "the same on every rank; their mean loss is that of the model in evaluation.",
            metavar="PACKAGE:FACTORY",
        ),
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(help="Steps between evaluations; there is one at the end.", min=1),
    ] = None,
    clip_norm: ClipNorm = None,
    seed: Seed = 0,
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16"] | None,
        typer.Option(
            help="Type of a pipeline's computations; bfloat16 is autocast of float32 parameters. "
            "Default: float32."
        ),
    ] = None,
    load_parameters: Annotated[
        Path | None,
        typer.Option(
            help="Begin with the weights of a .safetensors file, an index of several, or a folder; "
            "a rank reads those of its stages.",
            metavar="PATH",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Folder of checkpoints; the two newest are kept.", metavar="DIR"),
        Writes(several=True),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(help="Steps between checkpoints; one is written at the end.", min=1),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint.")
    ] = False,
    save_parameters: Annotated[
        Path | None,
        typer.Option(
            help="Write the trained state dict: .safetensors, or a pickle.", metavar="FILE"
        ),
        Writes(".pt", ".pth", ".bin", ".ckpt", ".safetensors"),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            help="Write a row for each step: loss, samples per second, seconds, learning rate and "
            "peak memory of the fullest rank.",
            metavar="FILE",
        ),
        Writes(".csv"),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option(help="Write the same as curves for tensorboard.", metavar="DIR"),
        Writes(several=True),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a trace of the run.", metavar="FILE"), Writes(".json")
    ] = None,
    graph: Annotated[
        bool,
        typer.Option(
            "--graph",
            help="Replay the window between two losses as a CUDA graph: for a plan that begins "
            "with the backwards, on one GPU.",
        ),
    ] = False,
    compile: Annotated[
        bool,
        typer.Option(
            "--compile", help="Compile layers by torch.compile, where their backward is whole."
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds that a rank waits for another one.")
    ] = 60.0,
    as_json: JsonFlag = False,
) -> int:
    """Train a model as planned: start local processes or, under torchrun, run as one of its ranks.

    Each rank computes with OMP_NUM_THREADS threads, by default one.
    """
    from stagewright.executor.training.ranks.joining import joined
    from stagewright.executor.training.ranks.launch import is_rank, load_for_ranks

    load_for_ranks()
    if not (math.isfinite(timeout) and timeout > 0):
        raise InputError(f"--timeout must be a positive number of seconds, got {timeout:g}")
    if checkpoint is None and (resume or checkpoint_every is not None):
        raise InputError("--resume and --checkpoint-every need --checkpoint DIR")
    if evaluate is None and evaluate_every is not None:
        raise InputError("--evaluate-every needs --evaluate PACKAGE:FACTORY")

    def read_task(parsed: "AnyPlan") -> "Task":
        import torch

        from stagewright.cli.factories import load_factory
        from stagewright.executor.training.logs import require_tensorboard
        from stagewright.executor.training.training import Task

        require_tensorboard(tensorboard)
        stepping = parse_optimizer(optimizer)
        return Task(
            plan=parsed,
            model=load_factory(module, "--module"),
            data=load_factory(data, "--data"),
            loss=None if loss is None else load_factory(loss, "--loss"),
            optimizer=stepping,
            groups=parse_groups(parameter_group, stepping),
            schedule=None if lr_schedule is None else parse_schedule(lr_schedule, steps),
            accumulate=accumulate,
            clip_norm=clip_norm,
            steps=steps,
            seed=seed,
            dtype=None if dtype is None else getattr(torch, dtype),
            weights=load_parameters,
            timeout_seconds=timeout,
            checkpoints=checkpoint,
            checkpoint_every=checkpoint_every or steps,
            evaluation=None if evaluate is None else load_factory(evaluate, "--evaluate"),
            evaluate_every=evaluate_every or steps,
            resume=resume,
            parameters=save_parameters,
            trace=trace,
            graph=graph,
            compile=compile,
        )

    if not is_rank():
        return _start(_load(plan), read_task, plan, as_json)
    with joined(timeout) as member:
        from stagewright.executor.training.logs import logging_to
        from stagewright.executor.training.training import train

        task = read_task(_load(plan))
        with logging_to(log, tensorboard) as logged:
            history = train(task, member, _both(_progress(steps), logged), _note)
        if member.rank == 0:
            _print_summary(task, history, member.world_size, as_json)
    return 0


def _load(plan: Path) -> "AnyPlan":
    from stagewright.cli.placing import is_placement
    from stagewright.formulations.operators.plan import load_operator_plan
    from stagewright.formulations.plans.plan import load_plan

    return load_operator_plan(plan) if is_placement(plan) else load_plan(plan)


def _start(
    parsed: "AnyPlan", read_task: "Callable[[AnyPlan], Task]", plan: Path, as_json: bool
) -> int:
    """Check the task once, then start the ranks."""
    from stagewright.cli import main
    from stagewright.executor.training.ranks.launch import LocalRanks
    from stagewright.executor.training.training import devices_of_any
    from stagewright.graphs.documents.errors import InvalidPlan
    from stagewright.service.answers import InvalidAnswer

    with LocalRanks(len(devices_of_any(parsed)), main) as ranks:
        task = read_task(parsed)
        try:
            _require_runnable(task)
        except InvalidPlan as error:
            if as_json:
                print_answer(InvalidAnswer(reason=str(error)))
            else:
                print_lines(f"{plan} cannot run: {error}")
            return 1
        return ranks.run()


def _require_runnable(task: "Task") -> None:
    from stagewright.executor.programs.periodic import lower_any
    from stagewright.executor.programs.verify import verify
    from stagewright.executor.training import checkpoint
    from stagewright.formulations.plans.plan import PipelinePlan

    checkpoint.candidates(task.checkpoints, task.resume)
    if task.checkpoints is not None and task.checkpoints.exists():
        require_folder(task.checkpoints / "step")
    if isinstance(task.plan, PipelinePlan):  # the graph of operators is known to the ranks only
        verify(task.plan, lower_any(task.plan))


def _progress(steps: int) -> "OnStep":
    """Report the progress of the training on stderr: often on a terminal, else now and then."""
    from stagewright.graphs.documents.units import format_bytes, format_seconds

    is_terminal = sys.stderr.isatty()
    pause = PROGRESS_SECONDS if is_terminal else QUIET_SECONDS
    told = -math.inf if is_terminal else time.monotonic()

    def report(one: "StepReport") -> None:
        nonlocal told
        evaluated = one.evaluation_loss is not None
        if time.monotonic() >= told + pause or (is_terminal and one.step == steps) or evaluated:
            told = time.monotonic()
            line = (
                f"step {one.step}/{steps}  loss {one.loss:.6g}  {format_seconds(one.seconds)}  "
                f"{one.samples_per_second:.4g} samples/s  peak {format_bytes(one.peak_bytes)}"
            )
            if evaluated:
                line += f"  evaluation loss {one.evaluation_loss:.6g}"
            print(line, file=sys.stderr, flush=True)

    return report


def _both(first: "OnStep", second: "OnStep") -> "OnStep":
    def call(report: "StepReport") -> None:
        first(report)
        second(report)

    return call


def _note(line: str) -> None:
    print(f"stagewright: {line}", file=sys.stderr, flush=True)


def _print_summary(
    task: "Task", history: "TrainingHistory", world_size: int, as_json: bool
) -> None:
    from stagewright.graphs.documents.units import format_seconds
    from stagewright.service.answers import Evaluated, TrainedAnswer

    if as_json:
        print_answer(
            TrainedAnswer(
                steps=task.steps,
                loss=history.losses[-1],
                losses=tuple(history.losses),
                evaluations=tuple(Evaluated(*one) for one in history.evaluations.items()),
                iteration_seconds=median(history.seconds),
                seconds=sum(history.seconds),
                world_size=world_size,
            )
        )
        return
    evaluated = history.evaluations.get(task.steps)
    print_lines(
        f"{task.steps} steps on {world_size} rank{'s' if world_size > 1 else ''}, loss "
        f"{history.losses[-1]:.6g}, {format_seconds(median(history.seconds))} per step"
        + ("" if evaluated is None else f", evaluation loss {evaluated:.6g}"),
        *(f"{path} is written" for path in (task.parameters, task.trace) if path is not None),
    )
