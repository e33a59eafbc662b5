"""``profile`` and ``profile-links``: model and cluster files from measurements of this machine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

from annotated_types import Ge

from stagewright.cli.commands import Options
from stagewright.cli.common import Clipped, Modelled, Repeated, Written
from stagewright.cli.console import read_sizes
from stagewright.cli.inputs import hand_out
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import parse_bytes
from stagewright.service.options import Option

TIMEOUT_SECONDS = 60.0  # a rank's limit for waiting for another one


class Measured(Options):
    """The device that was measured."""

    device: Annotated[str | None, Option(form="KIND")] = None
    """Kind of device, as in cluster files; default: the device's name."""


class ProfileOptions(Measured, Modelled, Clipped, Repeated, Written):
    """What ``profile`` is asked."""

    data: Annotated[str, Option(form="PACKAGE:FACTORY")]
    """Function that returns an iterable of mini-batches, (inputs, targets) or dicts of the model's
    keywords with its labels, of which the first is used."""
    microbatch_sizes: Annotated[str, Option(form="B,B,...")] = "1,2,4"
    """Samples; several sizes separated by commas."""
    on: Literal["cpu", "cuda"] = "cpu"
    """Where to measure."""
    threads: Annotated[int, Ge(1)] = 1
    """Threads that compute on a CPU."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float32"
    """Compute type; bfloat16 is autocast of float32 parameters."""
    ranks: Annotated[int | None, Ge(2)] = None
    """Local processes that measure at once, as many as will train on this machine: they share its
    memory and caches. Their mean is written."""
    tensor: Annotated[int | None, Ge(2)] = None
    """Tensor degree to measure beside 1: every so many of the local processes (--ranks; so many by
    default) divide the layers by the model's tp_plan."""


def profile(given: ProfileOptions) -> int:
    """Measure a torch module layer by layer and write its model file."""
    from stagewright.executor.training.ranks.joining import joined
    from stagewright.executor.training.ranks.launch import (
        LocalRanks,
        is_rank,
        load_for_ranks,
        require_torch,
    )

    sizes = read_sizes(given.microbatch_sizes)
    require_torch()
    import torch

    from stagewright.cli.factories import load_factory
    from stagewright.cli.optimizing import parse_optimizer
    from stagewright.executor.measuring.machine import Machine
    from stagewright.executor.measuring.profiling import first_batch
    from stagewright.executor.measuring.together import mean_of_ranks
    from stagewright.executor.measuring.whole_models import Profiled
    from stagewright.executor.training.data.passes import pair
    from stagewright.executor.training.losses import loss_of_run

    if given.on == "cuda" and not torch.cuda.is_available():
        raise InputError("--on cuda: torch finds no GPU here")
    tensor, ranks = given.tensor, given.tensor if given.ranks is None else given.ranks
    if ranks is not None:
        if ranks % (tensor or 1):
            raise InputError(f"--ranks {ranks} are no groups of --tensor {tensor}")
        load_for_ranks()
        if not is_rank():
            from stagewright.cli import main

            with LocalRanks(ranks, main) as started:
                return started.run()
    computed = getattr(torch, given.dtype)
    own = torch.float32 if computed == torch.bfloat16 else computed  # as the executor does
    batch = first_batch(load_factory(given.data, "--data")(), keywords=True)
    of_outputs, takes_loss = loss_of_run(
        None if given.loss is None else load_factory(given.loss, "--loss"), batch
    )
    profiled = Profiled(
        make=load_factory(given.module, "--module"),
        name=given.module.rpartition(":")[2],
        batch=pair(batch, has_loss=not takes_loss),
        sizes=sizes,
        loss=of_outputs,
        takes_loss=takes_loss,
        optimizer=parse_optimizer(given.optimizer),
        clips=given.clip_norm is not None,
        rounds=given.repetitions,
        machine=Machine(torch.device(given.on), given.threads, _kind(given.device)),
        dtype=own,
        autocast=None if computed == own else computed,
    )
    if ranks is None:
        with reporting("profiling") as report:
            return hand_out(profiled.measure(report), given)
    with joined(TIMEOUT_SECONDS) as member:
        if tensor is None:
            chain = mean_of_ranks(profiled.measure())
        else:
            chain = profiled.measure_degree(tensor)
        if member.rank == 0:
            hand_out(chain, given)
    return 0


class ProfileLinksOptions(Measured, Repeated, Written):
    """What ``profile-links`` is asked."""

    ranks: Annotated[int | None, Ge(2)] = None
    """Number of local processes; not under torchrun."""
    sizes: Annotated[str, Option(form="SIZE,SIZE,...")] = "4kB,64kB,1MB,16MB"
    """Message sizes; at least two."""
    memory: Annotated[float | None, Option(form="SIZE", of_text=parse_bytes)] = None
    """Memory of a device, for example 16GB; default: the machine's."""


def profile_links(given: ProfileLinksOptions) -> int:
    """Measure bandwidth and latency between all ranks and write the cluster file.

    Without torchrun the ranks are processes of this machine.
    """
    from stagewright.executor.training.ranks.joining import joined
    from stagewright.executor.training.ranks.launch import LocalRanks, is_rank, load_for_ranks

    lengths = [round(parse_bytes(size, "--sizes")) for size in given.sizes.split(",")]
    load_for_ranks()
    if not is_rank():
        if given.ranks is None:
            raise InputError("give --ranks N, or start this command under torchrun")
        from stagewright.cli import main

        with LocalRanks(given.ranks, main) as started:
            return started.run()
    with joined(TIMEOUT_SECONDS) as member:
        from stagewright.executor.measuring.links import describe, measure_links

        links = measure_links(member.device, lengths, rounds=given.repetitions)
        kind = _kind(given.device)
        cluster = describe(links, member.device, kind=kind, memory_bytes=given.memory)
        if member.rank == 0:
            hand_out(cluster, given)
    return 0


def _kind(device: str | None) -> str:
    """The kind of ``--device``; empty where it is the device's name."""
    if device == "cuda":
        raise InputError(
            "--device cuda is no kind of device such as h100; --on cuda measures a GPU"
        )
    return device or ""


@contextmanager
def reporting(task: str) -> Iterator[Callable[[str], None]]:
    """Show the progress of a measurement on stderr while the body runs, if that is a terminal."""
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(task) as status:
        yield lambda news: status.update(escape(f"{task}: {news}"))
