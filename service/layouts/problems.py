"""Problems of training by layer profiles, from what users name: profiles, machines, a batch."""

from collections.abc import Iterator
from dataclasses import replace

from stagewright.formulations.parallelism.profiles.cluster import Pool, ServerPools, server_pools
from stagewright.formulations.parallelism.profiles.pipelines import MemoryRule, ProfiledProblem
from stagewright.formulations.parallelism.training import (
    TrainingProblem,
    with_stack,
)
from stagewright.formulations.prices.computing import precision_named
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import counted, require_count
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.machines.devices import require_arithmetic
from stagewright.graphs.machines.fabric import Fabric, fabric_of
from stagewright.graphs.machines.rates import RateSet, rates_for, rates_of
from stagewright.graphs.machines.stack_memory import stack_memory
from stagewright.graphs.models.architecture import Architecture
from stagewright.graphs.models.language import Attention
from stagewright.graphs.models.layer_profiles import LayerProfiles


def training_problem(
    architecture: Architecture,
    fabric: Fabric | Cluster,
    *,
    sequence: int,
    batch: int,
    precision: str = "bf16",
    attention: Attention = "fused",
    overlap: bool = True,
    reserve_bytes: float | None = None,
    framework: str | None = None,
    gradient_bytes: int | None = None,
    rates: RateSet | str | None = None,
) -> TrainingProblem:
    """The training of a transformer on a fabric, whose kernels reach what was measured.

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
        Memory of a device that is not for the plan; None for the framework's, 2 GB without one.
    framework
        What trains, such as ``torchtitan``: it decides what is kept in memory, and the rates are
        those measured with it; None: nothing in particular is kept, and rates are Megatron's.
    gradient_bytes
        Of the sum of a weight's gradients; None for the framework's, 4 without one.
    rates
        Rates in place of those, or the name or the file of a rate set.

    Raises
    ------
    InputError
        If a value is out of range, the device has no such arithmetic, the servers differ, or the
        framework is not known.
    """
    if isinstance(fabric, Cluster):
        fabric = fabric_of(fabric)
    require_arithmetic(fabric.card, precision)
    rates = rates_for(fabric.card, rates, framework)
    if rates.anchor is not None:
        fabric, rates = _anchored(fabric, rates)
    numbers = precision_named(precision)
    problem = TrainingProblem(
        architecture=architecture,
        sequence=sequence,
        batch=batch,
        fabric=fabric,
        rates=rates,
        precision=numbers,
        attention=attention,
        overlap=overlap,
    )
    if framework is not None:
        problem = with_stack(problem, stack_memory(framework))
    if gradient_bytes is not None:
        problem = replace(problem, precision=replace(numbers, gradient_bytes=gradient_bytes))
    return problem if reserve_bytes is None else replace(problem, reserve_bytes=reserve_bytes)


def _anchored(fabric: Fabric, rates: RateSet) -> tuple[Fabric, RateSet]:
    """The fabric with the timed links inside a server, and the rates with their range on it.

    Between servers nothing was timed, and the range has that of the rates that price it.
    """
    anchor = rates.anchor
    assert anchor is not None
    if fabric.devices > fabric.per_server:
        of_others = rates_of(fabric.card)
        rates = replace(
            rates,
            dense=rates.dense.joined(of_others.dense),
            experts=rates.experts.joined(of_others.experts),
        )
    if anchor.server_bytes_per_second is None:
        return fabric, rates
    inside, *between = fabric.levels
    timed = replace(
        inside,
        bytes_per_second=anchor.server_bytes_per_second,
        latency_seconds=anchor.server_latency_seconds,
    )
    return replace(fabric, levels=(timed, *between)), rates


def better_machines(problem: TrainingProblem) -> Iterator[tuple[str, TrainingProblem]]:
    """The problem on better machines: with more memory, or with one faster level of links."""
    fabric = problem.fabric
    for text, memory in (
        ("1 GB more memory", fabric.memory_bytes + 1e9),
        ("10 % more memory", fabric.memory_bytes * 1.1),
        ("twice the memory", fabric.memory_bytes * 2),
    ):
        yield text, replace(problem, fabric=replace(fabric, memory_bytes=memory))
    for position, level in enumerate(fabric.levels):
        faster = replace(level, bytes_per_second=2 * level.bytes_per_second)
        levels = (*fabric.levels[:position], faster, *fabric.levels[position + 1 :])
        text = f"twice the bandwidth of level {level.name}"
        yield text, replace(problem, fabric=replace(fabric, levels=levels))


def profiled_problem(
    profiles: LayerProfiles,
    cluster: Cluster | ServerPools,
    *,
    batch: int,
    reserve_bytes: float | None = None,
) -> ProfiledProblem:
    """The training of a profiled model on servers of one or several kinds of devices.

    Parameters
    ----------
    profiles
        With the sizes of the layers (``stagewright import --config``, or ``with_sizes``).
    cluster
        Servers of equal devices each. Its kinds are those of the profiles, in any case.
    batch
        Samples between two updates.
    reserve_bytes
        Memory of a device that is not for the plan; None for what was fitted to GH200.

    Raises
    ------
    InputError
        If sizes are missing, a kind was not measured, no microbatch that was measured divides the
        batch, or no measured tensor degree fits in any server.
    """
    if not profiles.sizes:
        raise InputError(
            f"profiles of {profiles.name!r} do not say how large the layers are: import them with "
            "--config and --sequence"
        )
    pools = cluster if isinstance(cluster, ServerPools) else server_pools(cluster)
    of = precision_named(profiles.precision)
    rule = MemoryRule(
        parameter_bytes=float(of.weight_bytes + of.gradient_bytes + of.optimizer_bytes)
    )
    problem = ProfiledProblem(
        profiles,
        _with_measured_kinds(pools, profiles),
        batch,
        rule if reserve_bytes is None else replace(rule, reserve_bytes=reserve_bytes),
        float(of.gradient_bytes),
    )
    _require_degrees(problem)
    _require_microbatch(problem)
    return problem


def _with_measured_kinds(pools: ServerPools, profiles: LayerProfiles) -> ServerPools:
    """The pools, with the profiles' spelling of their kinds."""
    spelled = {kind.lower(): kind for kind in profiles.device_kinds}
    return replace(
        pools,
        pools=tuple(
            replace(pool, device_kind=spelled.get(pool.device_kind.lower(), pool.device_kind))
            for pool in pools.pools
        ),
    )


def usable_degrees(problem: ProfiledProblem, pool: Pool) -> tuple[int, ...]:
    """The tensor degrees that were measured, whose sizes are known and that a server has room for.

    Every one of them was measured at some microbatch size.
    """
    known = {one.tensor for one in problem.profiles.sizes}
    return tuple(
        one
        for one in problem.profiles.degrees(pool.device_kind)
        if one <= pool.devices and one in known
    )


def _require_degrees(problem: ProfiledProblem) -> None:
    if any(usable_degrees(problem, pool) for pool in problem.cluster.pools):
        return
    raise InputError("; ".join(unusable(problem, pool) for pool in problem.cluster.pools))


def unusable(problem: ProfiledProblem, pool: Pool) -> str:
    """Why no tensor group can be in a pool."""
    known = {one.tensor for one in problem.profiles.sizes}
    measured = problem.profiles.degrees(pool.device_kind)
    sized = [one for one in measured if one in known]
    which = ", ".join(map(str, sized or measured))
    servers = f"servers of {counted(pool.devices, 'device', 'devices')} of {pool.device_kind}"
    if not sized:
        return f"{servers}: measured are tensor degrees {which}, for which layers have no sizes"
    return f"{servers} have no room for a measured tensor degree ({which})"


def _require_microbatch(problem: ProfiledProblem) -> None:
    """Refuse a batch that no measured microbatch size divides."""
    sizes = sorted(
        {
            size
            for pool in problem.cluster.pools
            for tensor in usable_degrees(problem, pool)
            for size in problem.profiles.microbatch_sizes(pool.device_kind, tensor)
        }
    )
    require_count(problem.batch, "batch", 1 << 30)
    if not any(problem.batch % size == 0 for size in sizes):
        below = max(problem.batch // size * size for size in sizes)
        above = min(-(-problem.batch // size) * size for size in sizes)
        near = " and ".join(str(one) for one in (below, above) if one)
        raise InputError(
            f"batch {problem.batch} is no multiple of a measured microbatch size "
            f"({', '.join(map(str, sizes))}); the nearest batches are {near}"
        )
