"""What is done once before the ranks of a run begin: the model is captured, and a step compared.

Data are read and steps are computed in processes of their own, so that the launcher, of which the
ranks are forks, has begun no pass of the data and drawn no number.
"""

import multiprocessing
import os
import pickle
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch

from stagewright.executor.capture.exported.exporting import Example
from stagewright.executor.measuring.whole_models import captured_by_size, check_capture
from stagewright.executor.training.data.batches import (
    mapped_batch,
    microbatch_samples,
    tensors_of_batch,
    typed_inputs,
)
from stagewright.executor.training.losses import loss_of_run
from stagewright.executor.training.ranks.launch import end_with_parent, may_fork
from stagewright.executor.training.stages.initialise import (
    Model,
    OutlinedModel,
    free_bytes,
    outlined,
)
from stagewright.executor.training.stages.partial_build import CannotBuild
from stagewright.executor.training.training import Task
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InputError

T = TypeVar("T")
CPU = torch.device("cpu")
MOST = 0.8  # of the memory that is free, which a process apart may take


@dataclass(frozen=True, slots=True)
class FirstMicrobatch:
    """The first microbatch of rank 0, by value, and the device on which ranks compute."""

    inputs: Any
    targets: Any
    device: torch.device


def prepared(task: Task, tell: Callable[[str], None], *, captures: bool, is_checked: bool) -> Task:
    """``task``, with a model that is captured already if it ``captures`` and that can be.

    If it ``is_checked``, the loss and the gradients of a microbatch by captured layers are compared
    with the module's own; ``tell`` is called where that cannot be done. Raises InputError naming
    the first layer that differs. What else is wrong with a task is left for the ranks to tell.
    """
    if not isinstance(task.plan, PipelinePlan):
        return task
    ready = task
    try:
        first = apart(partial(_first_microbatch, task, task.plan), task.timeout_seconds)
        if first is None:
            return task
        if captures and first.device == CPU:  # a launcher that has begun CUDA could not be forked
            ready = replace(task, model=_captured(task, first))
        if is_checked and first.device != CPU and not may_fork():  # nor may it hold its memory
            raise Failed("the imports began threads or CUDA")
        if is_checked:
            apart(partial(_check, ready, first), task.timeout_seconds)
    except Failed as failure:
        if is_checked:
            tell(f"a step of the captured layers was not compared with the model's own: {failure}")
    return ready


class Failed(Exception):  # noqa: N818 - it says what was not done
    """Raised with the reason why a process apart gave no result."""


def apart(work: Callable[[], T], seconds: float) -> T:
    """The result of ``work`` in a fork of this process; here, where a fork is not sound.

    Raises InputError as ``work`` does, Failed for its other errors and after ``seconds``.
    """
    if not may_fork():
        with failures():
            return work()
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, work))
    process.start()
    there.close()
    try:
        if not here.poll(seconds):
            raise Failed(f"it took longer than {seconds:g} s")
        kind, found = pickle.loads(here.recv_bytes())
    except EOFError:
        raise Failed("its process was killed") from None
    finally:
        process.kill()
        process.join()
    if kind == "refused":
        raise InputError(found)
    if kind == "failed":
        raise Failed(found)
    result: T = found
    return result


def _send(there: Connection, work: Callable[[], object]) -> None:
    """Send what ``work`` returns, or why it fails; what it prints is left to the ranks."""
    end_with_parent()
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    os.environ.update(RANK="0", LOCAL_RANK="0")
    try:
        with failures():
            message = pickle.dumps(("done", work()))
    except InputError as error:
        message = pickle.dumps(("refused", str(error)))
    except Failed as error:
        message = pickle.dumps(("failed", str(error)))
    there.send_bytes(message)


@contextmanager
def failures() -> Iterator[None]:
    """Turn the errors of the user's code into Failed, except what is refused."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # of any kind
        reason = str(error).strip().partition("\n")[0]
        raise Failed(f"{type(error).__name__}: {reason}") from error


def _first_microbatch(task: Task, plan: PipelinePlan) -> FirstMicrobatch | None:
    """None where the data are refused: they may be right for ranks that have joined."""
    replicas = plan.stages[0].replicas if task.has_own_samples else 1
    try:
        inputs, targets = next(task.batches(0, 0))
        samples = microbatch_samples(plan, tensors_of_batch("inputs", inputs), replicas) // replicas
    except InputError:
        return None
    inputs, targets = (
        mapped_batch(one, lambda each: each[:samples].clone()) for one in (inputs, targets)
    )
    device = torch.device("cuda") if torch.cuda.is_available() else CPU
    return FirstMicrobatch(inputs, targets, device)


def _types(task: Task) -> tuple[torch.dtype, torch.dtype | None]:
    """The types of parameters and of autocast."""
    autocast = task.dtype if task.dtype == torch.bfloat16 else None
    return (torch.float32 if autocast else task.dtype or torch.float32), autocast


def _captured(task: Task, first: FirstMicrobatch) -> Callable[[], Model]:
    """The model made and captured without data, or as it was if that cannot be."""
    dtype, autocast = _types(task)
    given, signature = typed_inputs(first.inputs, dtype)
    _, takes_loss = loss_of_run(task.loss, first.inputs)
    example = Example(given, signature, takes_loss, CPU, dtype, autocast)
    try:
        return outlined(task.model, task.seed, example, evaluates=task.evaluation is not None)
    except (CannotBuild, InputError):
        return task.model


def _check(task: Task, first: FirstMicrobatch) -> None:
    is_apart = multiprocessing.parent_process() is not None
    if is_apart and first.device == CPU:
        # A model that is too large for this machine's memory is not checked.
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = int(pages * resource.getpagesize() + MOST * free_bytes())
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    dtype, autocast = _types(task)
    loss, takes_loss = loss_of_run(task.loss, first.inputs)
    samples = len(tensors_of_batch("inputs", first.inputs)[0])
    captured = captured_by_size(
        task.model,
        first.inputs,
        [samples],
        takes_loss,
        device=first.device,
        dtype=dtype,
        autocast=autocast,
        like=task.model.captured if isinstance(task.model, OutlinedModel) else None,
    )
    check_capture(
        task.model,
        captured[samples],
        (first.inputs, first.targets),
        samples,
        loss,
        takes_loss,
        device=first.device,
        dtype=dtype,
        autocast=autocast,
    )
