"""``run``: train a model by a plan."""

import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from stagewright.cli.commands import command
from stagewright.cli.console import print_answer, say, tell_invalid
from stagewright.cli.factories import parse_groups, parse_optimizer, parse_schedule
from stagewright.cli.options import Modelled, Printed, Seeded, Updated
from stagewright.cli.outputs import Writes, is_document, require_folder
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.documents.units import format_bytes, format_seconds
from stagewright.service.answers import Evaluated, TrainedAnswer
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.executor.training.logs import OnStep, StepReport
    from stagewright.executor.training.training import Task, TrainingHistory
    from stagewright.formulations.operators.plan import OperatorPlan
    from stagewright.formulations.plans.plan import PipelinePlan

    AnyPlan = PipelinePlan | OperatorPlan

_PROGRESS_SECONDS = 0.5  # minimum time between two lines of progress on a terminal
QUIET_SECONDS = 5.0  # and where stderr is a file


class RunOptions(Modelled, Updated, Seeded, Printed):
    """What ``run`` is asked."""

    plan: Annotated[Path, Option("PLAN")]
    """Plan file."""
    data: Annotated[str, Option(form="PACKAGE:FACTORY")]
    """Function that returns an iterable of mini-batches, (inputs, targets) or dicts of the model's
    keywords with its labels, the same on every rank; called for every epoch. If it takes replica
    and replicas, it returns the samples of that replica."""
    steps: Annotated[int, Field(ge=1)]
    """Total number of steps; each takes a mini-batch, or those of --accumulate."""
    optimizer: str = "sgd:lr=0.01"
    """One of torch.optim, e.g. adamw:lr=1e-3,weight_decay=0.1."""
    log: Annotated[Path | None, Option(form="FILE"), Writes(".csv")] = None
    """Write a row for each step: loss, samples per second, seconds, learning rate and peak memory
    of the fullest rank."""
    save_parameters: Annotated[
        Path | None, Option(form="FILE"), Writes(".pt", ".pth", ".bin", ".ckpt", ".safetensors")
    ] = None
    """Write the trained state dict: .safetensors, or a pickle."""
    save_model: Annotated[Path | None, Option(form="DIR"), Writes(several=True)] = None
    """Write a new folder for other frameworks: a Hugging Face model for from_pretrained and
    torchtitan, another module as torch.distributed.checkpoint under its names."""
    trace: Annotated[Path | None, Option(form="FILE"), Writes(".json")] = None
    """Write a trace of the run."""
    lr_schedule: Annotated[str | None, Option(form="KIND[:KEY=VALUE,...]")] = None
    """Learning rates by step: constant, linear or cosine, e.g. cosine:warmup=100,min=0.1; min is a
    fraction of the learning rate, total is --steps."""
    accumulate: Annotated[int, Field(ge=1)] = 1
    """Mini-batches whose gradients make an update, which is a step."""
    evaluate: Annotated[str | None, Option(form="PACKAGE:FACTORY")] = None
    """Function that returns an iterable of mini-batches that are held out, as --data, the same on
    every rank; their mean loss is that of the model in evaluation."""
    evaluate_every: Annotated[int | None, Field(ge=1)] = None
    """Steps between evaluations; there is one at the end."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None
    """Type of a pipeline's computations; bfloat16 and float16 are autocast of float32 parameters,
    float16 with a scaled loss. Default: float32."""
    load_parameters: Annotated[Path | None, Option(form="PATH")] = None
    """Begin with the weights of a .safetensors file, an index of several, or a folder; a rank reads
    those of its stages."""
    checkpoint: Annotated[Path | None, Option(form="DIR"), Writes(several=True)] = None
    """Folder of checkpoints; the two newest are kept."""
    checkpoint_every: Annotated[int | None, Field(ge=1)] = None
    """Steps between checkpoints; one is written at the end."""
    resume: bool = False
    """Continue from the newest checkpoint."""
    tensorboard: Annotated[Path | None, Option(form="DIR"), Writes(several=True)] = None
    """Write the same as curves for tensorboard."""
    graph: bool = False
    """Replay the window between two losses as a CUDA graph: for a plan that begins with the
    backwards, on one GPU."""
    compile: bool = False
    """Compile layers by torch.compile, where their backward is whole."""
    timeout: float = 60.0
    """Seconds that a rank waits for another one."""
    no_self_check: bool = False
    """Leave out the comparison of the captured layers' loss and gradients of a microbatch with the
    module's own, before the first step."""


@command(
    headings={
        "The update": "parameter_group lr_schedule accumulate clip_norm",
        "Evaluation": "evaluate evaluate_every",
        "Parameters and checkpoints": "load_parameters save_parameters save_model checkpoint"
        " checkpoint_every resume",
        "How it runs": "dtype graph compile timeout seed tensorboard no_self_check",
    }
)
def run(given: RunOptions) -> int:
    """Train a model as planned: start local processes or, under torchrun, run as one of its ranks.

    Each rank computes with OMP_NUM_THREADS threads, by default one.
    """
    from stagewright.executor.training.ranks.launch import is_rank, load_for_ranks

    load_for_ranks()
    require_timeout(given.timeout)
    if given.checkpoint is None and (given.resume or given.checkpoint_every is not None):
        raise InputError("--resume and --checkpoint-every need --checkpoint DIR")
    if given.evaluate is None and given.evaluate_every is not None:
        raise InputError("--evaluate-every needs --evaluate PACKAGE:FACTORY")

    if not is_rank():
        return _start(_load(given.plan), given)
    _be_rank(lambda: _task(_load(given.plan), given), given)
    return 0


def _be_rank(made: "Callable[[], Task]", given: RunOptions) -> None:
    """Join the job that the environment describes, and carry out the task that is ``made``."""
    from stagewright.executor.training.ranks.joining import joined

    with joined(given.timeout) as member:
        from stagewright.executor.training.logs import logging_to
        from stagewright.executor.training.training import train

        task = made()
        with logging_to(given.log, given.tensorboard) as logged:
            history = train(task, member, _both(_progress(given.steps), logged), _note)
        if member.rank == 0:
            _print_summary(task, history, member.world_size, given.as_json)


def require_timeout(seconds: float) -> None:
    """Refuse to wait for no time, or for ever."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise InputError(f"--timeout must be a positive number of seconds, got {seconds:g}")


def _task(plan: "AnyPlan", given: RunOptions) -> "Task":
    """The training task of every rank."""
    import torch

    from stagewright.cli.factories import load_factory
    from stagewright.executor.training.logs import require_tensorboard
    from stagewright.executor.training.training import Task

    require_tensorboard(given.tensorboard)
    stepping, schedule, evaluate = (
        parse_optimizer(given.optimizer),
        given.lr_schedule,
        given.evaluate,
    )
    return Task(
        plan=plan,
        model=load_factory(given.module, "--module"),
        data=load_factory(given.data, "--data"),
        loss=None if given.loss is None else load_factory(given.loss, "--loss"),
        optimizer=stepping,
        groups=parse_groups(given.parameter_group, stepping),
        schedule=None if schedule is None else parse_schedule(schedule, given.steps),
        accumulate=given.accumulate,
        clip_norm=given.clip_norm,
        steps=given.steps,
        seed=given.seed,
        dtype=None if given.dtype is None else getattr(torch, given.dtype),
        weights=given.load_parameters,
        timeout_seconds=given.timeout,
        checkpoints=given.checkpoint,
        checkpoint_every=given.checkpoint_every or given.steps,
        evaluation=None if evaluate is None else load_factory(evaluate, "--evaluate"),
        evaluate_every=given.evaluate_every or given.steps,
        resume=given.resume,
        parameters=given.save_parameters,
        model_folder=given.save_model,
        trace=given.trace,
        graph=given.graph,
        compile=given.compile,
    )


def _load(plan: Path) -> "AnyPlan":
    from stagewright.formulations.operators.plan import load_operator_plan
    from stagewright.formulations.plans.plan import load_plan

    return load_operator_plan(plan) if is_document(plan, "operators") else load_plan(plan)


def _start(parsed: "AnyPlan", given: RunOptions) -> int:
    """Check the task once, then start the ranks."""
    from stagewright.cli import main
    from stagewright.executor.training.ahead import prepared
    from stagewright.executor.training.ranks.launch import LocalRanks
    from stagewright.executor.training.training import devices_of_any

    with LocalRanks(len(devices_of_any(parsed)), main) as ranks:
        with ranks.importing():
            task = _task(parsed, given)
        try:
            _require_runnable(task)
        except InvalidPlan as error:
            return tell_invalid(given.plan, error, given)
        captures, is_checked = ranks.may_renew, not given.no_self_check
        task = prepared(task, _note, captures=captures, is_checked=is_checked)
        if captures:
            ranks.renew(partial(_be_rank, lambda: task, given))
        return ranks.run()


def _require_runnable(task: "Task") -> None:
    from stagewright.executor.programs.periodic import lower_any
    from stagewright.executor.programs.verification.verify import verify
    from stagewright.executor.training import checkpoint
    from stagewright.formulations.plans.plan import PipelinePlan

    checkpoint.candidates(task.checkpoints, task.resume)
    if task.checkpoints is not None and task.checkpoints.exists():
        require_folder(task.checkpoints / "step")
    if isinstance(task.plan, PipelinePlan):  # the graph of operators is known to the ranks only
        verify(task.plan, lower_any(task.plan))


def _progress(steps: int) -> "OnStep":
    """Report the progress of the training on stderr: often on a terminal, else now and then."""
    is_terminal = sys.stderr.isatty()
    pause = _PROGRESS_SECONDS if is_terminal else QUIET_SECONDS
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
    say(
        f"{task.steps} steps on {world_size} rank{'s' if world_size > 1 else ''}, loss "
        f"{history.losses[-1]:.6g}, {format_seconds(median(history.seconds))} per step"
        + ("" if evaluated is None else f", evaluation loss {evaluated:.6g}"),
        *(
            [f"updates left out, as gradients of the scaled loss were infinite: {left_out}"]
            if (left_out := history.updates_left_out)
            else []
        ),
        *(
            f"{path} is written"
            for path in (task.parameters, task.model_folder, task.trace)
            if path is not None
        ),
    )
