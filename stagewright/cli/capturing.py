"""``capture``: a training step as a graph of operators."""

from typing import Annotated, Literal

from annotated_types import Ge

from stagewright.cli.common import Modelled, Repeated, Written
from stagewright.cli.inputs import hand_out
from stagewright.cli.profiling import reporting
from stagewright.graphs.documents.errors import InputError
from stagewright.service.options import Option


class CaptureOptions(Modelled, Repeated, Written):
    """What ``capture`` is asked."""

    mini_batch: Annotated[int | None, Ge(1)] = None
    """Samples of a mini-batch; default: those of the data's."""
    replicas: Annotated[int, Option(form="N"), Ge(1)] = 1
    """Copies of the model that train on equal parts of the mini-batch and average their gradients:
    data parallelism, from which placements start."""
    weights: Literal["shared", "mirrored"] | None = None
    """With --replicas: one copy of the weights, which all replicas read (shared, the default), or a
    copy and an update each (mirrored)."""
    microbatches: Annotated[int, Option(form="M"), Ge(1)] = 1
    """Equal parts of the mini-batch that go through one copy of the weights, with the gradients
    added up: what the planner dag makes a pipeline of."""
    device: Annotated[str | None, Option(form="KIND,...")] = None
    """Compute times on these devices, e.g. v100, or the JSON file of your own; no memory is
    needed."""
    measure: bool = False
    """Measure times on this machine's CPU."""
    threads: Annotated[int, Ge(1)] = 1
    """Threads that compute."""


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
            machine = Machine(torch.device("cpu"), given.threads, "cpu")
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
