"""Training problems from what users name: a precision, a kind of attention, a device."""

from stagewright.formulations.parallelism.training import TrainingProblem, precision_named
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.machines.devices import reached_on, require_arithmetic
from stagewright.graphs.machines.fabric import Fabric, fabric_of
from stagewright.graphs.models.architecture import Architecture
from stagewright.graphs.models.language import Attention


def training_problem(
    architecture: Architecture,
    fabric: Fabric | Cluster,
    *,
    sequence: int,
    batch: int,
    precision: str = "bf16",
    attention: Attention = "fused",
    overlap: bool = True,
    reserve_bytes: float = 2e9,
) -> TrainingProblem:
    """The training of a transformer on a fabric, whose kernels reach what is known of its devices.

    Parameters
    ----------
    architecture, fabric
        For example of ``importers.hf_config.read_hf_config`` and ``machines.networks``; or a
        cluster of equal devices in equal servers.
    sequence, batch
        Tokens in a sample, samples between two updates.
    precision
        ``bf16``, ``fp16``, ``fp8`` (products in 8 bits) or ``fp32``.
    attention
        ``fused``, or ``materialized``: the matrix of scores is stored.
    overlap
        Whether exchanges of gradients and of ZeRO run beside computations.
    reserve_bytes
        Memory of a device that is not for the plan.

    Raises
    ------
    InputError
        If a value is out of range, the device has no such arithmetic, or the servers differ.
    """
    if isinstance(fabric, Cluster):
        fabric = fabric_of(fabric)
    require_arithmetic(fabric.card, precision)
    return TrainingProblem(
        architecture=architecture,
        sequence=sequence,
        batch=batch,
        fabric=fabric,
        reached=reached_on(fabric.card),
        precision=precision_named(precision),
        attention=attention,
        overlap=overlap,
        reserve_bytes=reserve_bytes,
    )
