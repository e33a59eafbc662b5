"""``profile``, ``profile-links`` and ``capture``: models and clusters as they are measured."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

from pydantic import Field

from stagewright.cli.commands import CommandOptions, command
from stagewright.cli.console import terminal
from stagewright.cli.documents.inputs import hand_out
from stagewright.cli.options import Modelled, Repeated, Updated, Written, read_sizes
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import parse_bytes
from stagewright.service.options import Option

TIMEOUT_SECONDS = 60.0  # a rank's limit for waiting for another one


class MeasuredOptions(CommandOptions):
    """The device that was measured."""

    device: Annotated[str | None, Option(form="KIND")] = None
    """Kind of device, as in cluster files; default: the device's name."""


class ProfileOptions(MeasuredOptions, Modelled, Updated, Repeated, Written):
    """What ``profile`` is asked."""

    data: Annotated[str, Option(form="PACKAGE:FACTORY")]
    """Function that returns an iterable of mini-batches, (inputs, targets) or dicts of the model's
    keywords with its labels, of which the first is used."""
    microbatch_sizes: Annotated[str, Option(form="B,B,...")] = "1,2,4"
    """Samples; several sizes separated by commas."""
    on: Literal["cpu", "cuda"] = "cpu"
    """Where to measure."""
    threads: Annotated[int, Field(ge=1)] = 1
    """Threads that compute on a CPU."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Compute type; bfloat16 and float16 are autocast of float32 parameters."""
    ranks: Annotated[int | None, Field(ge=2)] = None
    """Local processes that measure at once, as many as will train on this machine: they share its
    memory and caches. Their mean is written."""
    tensor: Annotated[int | None, Field(ge=2)] = None
    """Tensor degree to measure beside 1: every so many of the local processes (--ranks; so many by
    default) divide the layers by the model's tp_plan."""
    no_self_check: bool = False
    """Measure without comparing a step of the captured layers, its loss and gradients, with one of
    the module itself."""


@command(
    headings={
        "How it is measured": "threads dtype ranks tensor repetitions parameter_group clip_norm"
        " no_self_check"
    }
)
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

    from stagewright.cli.factories import load_factory, parse_groups, parse_optimizer
    from stagewright.executor.measuring.machine import MeasuringMachine
    from stagewright.executor.measuring.profiling import first_batch
    from stagewright.executor.measuring.whole_models import Profiled, mean_of_ranks
    from stagewright.executor.training.data.batches import pair
    from stagewright.executor.training.losses import MIXED, loss_of_run
    from stagewright.executor.training.ranks.endings import said_notices

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
    own = torch.float32 if computed in MIXED else computed  # as the executor does
    batch = first_batch(load_factory(given.data, "--data")(), keywords=True)
    of_outputs, takes_loss = loss_of_run(
        None if given.loss is None else load_factory(given.loss, "--loss"), batch
    )
    stepping = parse_optimizer(given.optimizer)
    profiled = Profiled(
        make=load_factory(given.module, "--module"),
        name=given.module.rpartition(":")[2],
        batch=pair(batch, has_loss=not takes_loss),
        sizes=sizes,
        loss=of_outputs,
        takes_loss=takes_loss,
        optimizer=stepping,
        groups=parse_groups(given.parameter_group, stepping),
        clips=given.clip_norm is not None,
        rounds=given.repetitions,
        machine=MeasuringMachine(torch.device(given.on), given.threads, _kind(given.device)),
        dtype=own,
        autocast=None if computed == own else computed,
        is_checked=not given.no_self_check,
    )
    if ranks is None:
        with reporting("profiling") as report, said_notices():
            return hand_out(profiled.measure(report), given)
    with joined(TIMEOUT_SECONDS) as member:
        if tensor is None:
            chain = mean_of_ranks(profiled.measure())
        else:
            chain = profiled.measure_degree(tensor)
        if member.rank == 0:
            hand_out(chain, given)
    return 0


class ProfileLinksOptions(MeasuredOptions, Repeated, Written):
    """What ``profile-links`` is asked."""

    ranks: Annotated[int | None, Field(ge=2)] = None
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
    from rich.markup import escape

    console = terminal()
    if console is None:
        yield lambda _: None
        return
    with console.status(task) as status:
        yield lambda news: status.update(escape(f"{task}: {news}"))


class CaptureOptions(Modelled, Repeated, Written):
    """What ``capture`` is asked."""

    mini_batch: Annotated[int | None, Field(ge=1)] = None
    """Samples of a mini-batch; default: those of the data's."""
    replicas: Annotated[int, Option(form="N"), Field(ge=1)] = 1
    """Copies of the model that train on equal parts of the mini-batch and average their gradients:
    data parallelism, from which placements start."""
    weights: Literal["shared", "mirrored"] | None = None
    """With --replicas: one copy of the weights, which all replicas read (shared, the default), or a
    copy and an update each (mirrored)."""
    microbatches: Annotated[int, Option(form="M"), Field(ge=1)] = 1
    """Equal parts of the mini-batch that go through one copy of the weights, with the gradients
    added up: what the planner dag makes a pipeline of."""
    device: Annotated[str | None, Option(form="KIND,...")] = None
    """Compute times on these devices, e.g. v100, or the JSON file of your own; no memory is
    needed."""
    measure: bool = False
    """Measure times on this machine's CPU."""
    threads: Annotated[int, Field(ge=1)] = 1
    """Threads that compute."""


@command(
    headings={
        "Parts of the mini-batch": "mini_batch replicas weights microbatches",
        "How it is measured": "measure threads repetitions",
    }
)
def capture(given: CaptureOptions) -> int:
    """Capture a training step of a torch module as a graph of operators."""
    from stagewright.executor.training.ranks.launch import require_torch

    replicas, microbatches = given.replicas, given.microbatches
    if given.measure == (given.device is not None):
        raise InputError("give --device, for computed times, or --measure")
    if given.weights is not None and replicas == 1:
        raise InputError("--weights goes with --replicas")
    if microbatches > 1 and replicas > 1:
        raise InputError("give --replicas or --microbatches")
    require_torch()
    import torch

    from stagewright.cli.factories import load_factory, parse_optimizer
    from stagewright.executor.capture.steps.analytic import with_analytic_seconds
    from stagewright.executor.capture.steps.step import (
        capture_step,
        resized,
        share_of,
        without_values,
    )
    from stagewright.executor.measuring.machine import MeasuringMachine
    from stagewright.executor.measuring.profiling import first_batch, measure_operators
    from stagewright.executor.training.losses import cross_entropy
    from stagewright.graphs.machines.devices import accelerator, read_kind
    from stagewright.graphs.models.operators.step_graph import data_parallel

    kinds = [accelerator(read_kind(kind)) for kind in (given.device or "").split(",") if kind]
    make = load_factory(given.module, "--module")
    of_outputs = cross_entropy if given.loss is None else load_factory(given.loss, "--loss")
    batch = first_batch(load_factory(given.data, "--data")())
    batch = batch if given.mini_batch is None else resized(batch, given.mini_batch)
    batch = share_of(batch, replicas * microbatches, 0)
    stepping = parse_optimizer(given.optimizer)
    with reporting("capture") as report:
        report("making the model")
        torch.manual_seed(0)
        made, tensors = (make(), batch) if given.measure else without_values(make, batch)
        report("tracing a step")
        name = given.module.rpartition(":")[2]
        step = capture_step(made, tensors, loss=of_outputs, optimizer=stepping, name=name)
        if given.measure:
            machine = MeasuringMachine(torch.device("cpu"), given.threads, "cpu")
            graph = measure_operators(
                step, batch, machine, rounds=given.repetitions, on_progress=report
            )
        else:
            graph = with_analytic_seconds(step, kinds)
    if microbatches > 1:
        whole = data_parallel(graph, microbatches, "accumulated")
    else:
        whole = data_parallel(graph, replicas, given.weights or "shared")
    return hand_out(whole, given)
