"""``profile`` and ``profile-links``: model and cluster files from measurements of this machine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import typer

from stagewright.cli.console import (
    ClipNorm,
    JsonFlag,
    LossFunction,
    Module,
    Optimizer,
    OutputFile,
    Repetitions,
    read_sizes,
)
from stagewright.cli.inputs import hand_out
from stagewright.graphs.documents.errors import InputError

DeviceKind = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Kind of device, as in cluster files; default: the device's name.",
        metavar="KIND",
    ),
]

TIMEOUT_SECONDS = 60.0  # a rank's limit for waiting for another one


def profile(
    module: Module,
    data: Annotated[
        str,
        typer.Option(
            help="Function that returns an iterable of mini-batches, (inputs, targets) or dicts of "
            "the model's keywords with its labels, of which the first is used.",
            metavar="PACKAGE:FACTORY",
            show_default=False,
        ),
    ],
    microbatch_sizes: Annotated[
        str, typer.Option(help="Samples; several sizes separated by commas.", metavar="B,B,...")
    ] = "1,2,4",
    loss: LossFunction = None,
    on: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to measure.")] = "cpu",
    device: DeviceKind = None,
    repetitions: Repetitions = 9,
    threads: Annotated[int, typer.Option(help="Threads that compute on a CPU.", min=1)] = 1,
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16"],
        typer.Option(help="Compute type; bfloat16 is autocast of float32 parameters."),
    ] = "float32",
    optimizer: Optimizer = "adamw",
    clip_norm: ClipNorm = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Local processes that measure at once, as many as will train on this machine: "
            "they share its memory and caches. Their mean is written.",
            min=2,
        ),
    ] = None,
    tensor: Annotated[
        int | None,
        typer.Option(
            help="Tensor degree to measure beside 1: every so many of the local processes (--ranks;"
            " so many by default) divide the layers by the model's tp_plan.",
            min=2,
        ),
    ] = None,
    output: OutputFile = None,
    as_json: JsonFlag = False,
) -> int:
    """Measure a torch module layer by layer and write its model file."""
    from stagewright.executor.training.ranks.joining import joined
    from stagewright.executor.training.ranks.launch import (
        LocalRanks,
        is_rank,
        load_for_ranks,
        require_torch,
    )

    sizes = read_sizes(microbatch_sizes)
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

    if on == "cuda" and not torch.cuda.is_available():
        raise InputError("--on cuda: torch finds no GPU here")
    ranks = tensor if ranks is None else ranks
    if ranks is not None:
        if ranks % (tensor or 1):
            raise InputError(f"--ranks {ranks} are no groups of --tensor {tensor}")
        load_for_ranks()
        if not is_rank():
            from stagewright.cli import main

            with LocalRanks(ranks, main) as started:
                return started.run()
    computed = getattr(torch, dtype)
    own = torch.float32 if computed == torch.bfloat16 else computed  # as the executor does
    given = first_batch(load_factory(data, "--data")(), keywords=True)
    of_outputs, takes_loss = loss_of_run(
        None if loss is None else load_factory(loss, "--loss"), given
    )
    profiled = Profiled(
        make=load_factory(module, "--module"),
        name=module.rpartition(":")[2],
        batch=pair(given, has_loss=not takes_loss),
        sizes=sizes,
        loss=of_outputs,
        takes_loss=takes_loss,
        optimizer=parse_optimizer(optimizer),
        clips=clip_norm is not None,
        rounds=repetitions,
        machine=Machine(torch.device(on), threads, _kind(device)),
        dtype=own,
        autocast=None if computed == own else computed,
    )
    if ranks is None:
        with reporting("profiling") as report:
            return hand_out(profiled.measure(report), output, as_json)
    with joined(TIMEOUT_SECONDS) as member:
        if tensor is None:
            chain = mean_of_ranks(profiled.measure())
        else:
            chain = profiled.measure_degree(tensor)
        if member.rank == 0:
            hand_out(chain, output, as_json)
    return 0


def profile_links(
    ranks: Annotated[
        int | None, typer.Option(help="Number of local processes; not under torchrun.", min=2)
    ] = None,
    sizes: Annotated[
        str, typer.Option(help="Message sizes; at least two.", metavar="SIZE,SIZE,...")
    ] = "4kB,64kB,1MB,16MB",
    repetitions: Repetitions = 9,
    device: DeviceKind = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of a device, for example 16GB; default: the machine's.", metavar="SIZE"
        ),
    ] = None,
    output: OutputFile = None,
    as_json: JsonFlag = False,
) -> int:
    """Measure bandwidth and latency between all ranks and write the cluster file.

    Without torchrun the ranks are processes of this machine.
    """
    from stagewright.executor.training.ranks.joining import joined
    from stagewright.executor.training.ranks.launch import LocalRanks, is_rank, load_for_ranks
    from stagewright.graphs.documents.units import parse_bytes

    lengths = [round(parse_bytes(size, "--sizes")) for size in sizes.split(",")]
    memory_bytes = None if memory is None else parse_bytes(memory, "--memory")
    load_for_ranks()
    if not is_rank():
        if ranks is None:
            raise InputError("give --ranks N, or start this command under torchrun")
        from stagewright.cli import main

        with LocalRanks(ranks, main) as started:
            return started.run()
    with joined(TIMEOUT_SECONDS) as member:
        from stagewright.executor.measuring.links import describe, measure_links

        links = measure_links(member.device, lengths, rounds=repetitions)
        cluster = describe(links, member.device, kind=_kind(device), memory_bytes=memory_bytes)
        if member.rank == 0:
            hand_out(cluster, output, as_json)
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
