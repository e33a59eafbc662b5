"""Reasons why a partition problem has no answer, with an amount that would be enough."""

import math

from stagewright.formulations.dags.latency import LatencyProblem
from stagewright.formulations.dags.piper import PiperProblem
from stagewright.formulations.dags.problem import DagProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.units import format_bytes


def part_shortage(problem: DagProblem) -> str | None:
    """The part that fits nowhere, or the devices that all parts need; None without either."""
    pools = [pool for pool in problem.pools if pool.count]
    largest = max(pool.memory for pool in pools)
    heaviest = int(problem.bytes.argmax())
    needed = float(problem.bytes[heaviest])
    if _is_more(needed, largest):
        return (
            f"{problem.names[heaviest]} and what must be with it have {format_bytes(needed)}, the "
            f"largest device has {format_bytes(largest)}"
        )
    total, room = float(problem.bytes.sum()), sum(pool.count * pool.memory for pool in pools)
    if _is_more(total, room):
        count = sum(pool.count for pool in pools)
        return (
            f"all parts have {format_bytes(total)}, the devices {format_bytes(room)}: "
            f"{math.ceil(total / largest)} devices of {format_bytes(largest)} are needed at least, "
            f"not {count}"
        )
    return None


def node_shortage(problem: LatencyProblem) -> str | None:
    """Without hosts: the node, or the memory, that accelerators cannot hold; None without."""
    if problem.hosts:
        return None
    lost = [v for v in range(len(problem.names)) if not problem.supported[v]]
    if lost:
        return f"{problem.names[lost[0]]} does not run on an accelerator, and there are no hosts"
    heaviest = int(problem.bytes.argmax())
    needed, total = float(problem.bytes[heaviest]), float(problem.bytes.sum())
    if _is_more(needed, problem.memory):
        return (
            f"{problem.names[heaviest]} has {format_bytes(needed)}, an accelerator "
            f"{format_bytes(problem.memory)}, and there are no hosts"
        )
    if _is_more(total, problem.accelerators * problem.memory):
        return (
            f"all nodes have {format_bytes(total)}, all accelerators "
            f"{format_bytes(problem.accelerators * problem.memory)}, and there are no hosts"
        )
    return None


def layer_shortage(problem: PiperProblem) -> str | None:
    """The layer that fits nowhere with one sample in flight, or needs more devices, if any."""
    for layer in problem.layers:
        shards = min(t for t, its in layer.options.items() if its)
        if shards > problem.devices:
            return (
                f"layer {layer.name} takes {shards} devices at least, there are {problem.devices}"
            )
        least = min(
            one.flight_bytes + one.fixed_bytes
            for t, its in layer.options.items()
            if t <= problem.devices
            for one in its
        )
        if _is_more(least, problem.memory):
            return (
                f"layer {layer.name} needs {format_bytes(least)} on up to {problem.devices} "
                f"devices, each has {format_bytes(problem.memory)}"
            )
    return None


def _is_more(needed: float, there: float) -> bool:
    return needed > there * (1 + RELATIVE_TOLERANCE)
