"""``capture``: a training step as a graph of operators."""

from enum import StrEnum
from typing import Annotated

import typer

from stagewright.cli.console import (
    JsonFlag,
    LossFunction,
    Module,
    Optimizer,
    OutputFile,
    Repetitions,
)
from stagewright.cli.inputs import hand_out
from stagewright.cli.profiling import reporting
from stagewright.graphs.documents.errors import InputError


class Weights(StrEnum):
    """Who has the weights that replicas train."""

    SHARED = "shared"
    MIRRORED = "mirrored"


def capture(
    module: Module,
    data: Annotated[
        str,
        typer.Option(
            help="Function that returns an iterable of mini-batches (inputs, targets), of which "
            "the first is used.",
            metavar="PACKAGE:FACTORY",
            show_default=False,
        ),
    ],
    mini_batch: Annotated[
        int | None,
        typer.Option(help="Samples of a mini-batch; default: those of the data's.", min=1),
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(
            help="Copies of the model that train on equal parts of the mini-batch and average "
            "their gradients: data parallelism, from which placements start.",
            min=1,
            metavar="N",
        ),
    ] = 1,
    weights: Annotated[
        Weights | None,
        typer.Option(
            help="With --replicas: one copy of the weights, which all replicas read (shared, the "
            "default), or a copy and an update each (mirrored).",
            case_sensitive=False,
        ),
    ] = None,
    microbatches: Annotated[
        int,
        typer.Option(
            help="Equal parts of the mini-batch that go through one copy of the weights, with the "
            "gradients added up: what the planner dag makes a pipeline of.",
            min=1,
            metavar="M",
        ),
    ] = 1,
    device: Annotated[
        str | None,
        typer.Option(
            help="Compute times on these devices, e.g. v100, or the JSON file of your own; "
            "no memory is needed.",
            metavar="KIND,...",
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure times on this machine's CPU.")
    ] = False,
    repetitions: Repetitions = 9,
    threads: Annotated[int, typer.Option(help="Threads that compute.", min=1)] = 1,
    loss: LossFunction = None,
    optimizer: Optimizer = "adamw",
    output: OutputFile = None,
    as_json: JsonFlag = False,
) -> int:
    """Capture a training step of a torch module as a graph of operators."""
    from stagewright.executor.training.ranks.launch import require_torch

    if measure == (device is not None):
        raise InputError("give --device, for computed times, or --measure")
    if weights is not None and replicas == 1:
        raise InputError("--weights goes with --replicas")
    if microbatches > 1 and replicas > 1:
        raise InputError("give --replicas or --microbatches")
    require_torch()
    import torch

    from stagewright.cli.factories import load_factory
    from stagewright.cli.optimizing import parse_optimizer
    from stagewright.executor.capture.steps.analytic import with_analytic_seconds
    from stagewright.executor.capture.steps.factories import resized, share_of, without_values
    from stagewright.executor.capture.steps.step import capture_step
    from stagewright.executor.measuring.machine import Machine
    from stagewright.executor.measuring.operators import measure_operators
    from stagewright.executor.measuring.profiling import first_batch
    from stagewright.executor.training.losses import cross_entropy
    from stagewright.graphs.machines.devices import accelerator, read_kind
    from stagewright.graphs.models.data_parallel import data_parallel

    kinds = [accelerator(read_kind(kind)) for kind in device.split(",")] if device else []
    make = load_factory(module, "--module")
    of_outputs = cross_entropy if loss is None else load_factory(loss, "--loss")
    given = first_batch(load_factory(data, "--data")())
    given = given if mini_batch is None else resized(given, mini_batch)
    given = share_of(given, replicas * microbatches, 0)
    stepping = parse_optimizer(optimizer)
    with reporting("capture") as report:
        report("making the model")
        torch.manual_seed(0)
        made, tensors = (make(), given) if measure else without_values(make, given)
        report("tracing a step")
        name = module.rpartition(":")[2]
        step = capture_step(made, tensors, loss=of_outputs, optimizer=stepping, name=name)
        if measure:
            machine = Machine(torch.device("cpu"), threads, "cpu")
            graph = measure_operators(step, given, machine, rounds=repetitions, on_progress=report)
        else:
            graph = with_analytic_seconds(step, kinds)
    if microbatches > 1:
        whole = data_parallel(graph, microbatches, "accumulated")
    else:
        whole = data_parallel(graph, replicas, "shared" if weights is None else weights.value)
    return hand_out(whole, output, as_json)
