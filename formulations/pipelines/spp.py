"""Synchronous pipeline planning (SPP): the makespan problem of stages, and SPP's theorems."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from stagewright.formulations.pipelines.bppm import StageChoice
from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.memory import in_flight_limit
from stagewright.formulations.plans.pipeline import PipelineProblem

LEMMA_1_PREMISE = "for PE's schedule of its stages, whose microbatches all fit in memory"
LEMMA_1 = "SPP Lemma 1, (1 + (4S-4)/M) M C + max A"
THEOREM_1 = "SPP Theorem 1, (2 + (4V-4)/M) W"


def makespan_problem(
    problem: PipelineProblem, stages: Sequence[StageChoice]
) -> MakespanProblem | None:
    """The scheduling problem (section III-B2) of given stages; None if one cannot be scheduled.

    Its ``reduce`` is the all-reduce of a stage followed by the optimizer step; a device without
    other stages is idle then. None if some stage cannot hold one microbatch in memory.
    """
    computed = [problem.compute_seconds(s.start, s.stop, s.devices) for s in stages]
    sent = [
        problem.transfer_seconds(one.stop, one.devices, following.devices)
        for one, following in pairwise(stages)
    ]
    limits = tuple(in_flight_limit(problem, s.start, s.stop, s.devices) for s in stages)
    if min(limits) < 1:
        return None
    return MakespanProblem(
        problem.microbatches,
        tuple(forward for forward, _ in computed),
        tuple(backward for _, backward in computed),
        tuple(there for there, _ in sent),
        tuple(back for _, back in sent),
        tuple(problem.finish_seconds(s.start, s.stop, s.devices) for s in stages),
        limits,
    )


def lemma1_seconds(problem: MakespanProblem) -> float:
    """Lemma 1: PE ends within (1 + (4|S| - 4) / M) M C + max A, without in-flight limits.

    C is the largest time of a microbatch on a stage or channel, in both directions.
    """
    stages = np.add(problem.forward, problem.backward)
    channels = np.add(problem.send_forward, problem.send_backward)
    largest = max([*stages, *channels])
    return float((problem.microbatches + 4 * len(stages) - 4) * largest + max(problem.reduce))


def theorem1_seconds(problem: PipelineProblem, balanced: MakespanProblem) -> float:
    """The time of Theorem 1 for the balanced stages: (2 + (4V - 4) / M) W.

    W is the largest time of a stage, including its ``reduce``, or of a channel, over all
    microbatches.
    """
    stages = np.add(balanced.forward, balanced.backward) * balanced.microbatches
    channels = np.add(balanced.send_forward, balanced.send_backward) * balanced.microbatches
    largest = max([*(stages + np.array(balanced.reduce)), *channels])
    return float((2 + (4 * len(problem.cluster) - 4) / problem.microbatches) * largest)


def theorem1_premise(problem: PipelineProblem) -> str:
    """The statement and the premises of Theorem 1."""
    return (
        f"at most {theorem1_factor(problem):.4g} T*, T* the least time of plans with disjoint "
        "devices and split replicas that use every device, where devices are of one kind, take "
        "time in proportion to their share of a microbatch, and links have no latency"
    )


def theorem1_factor(problem: PipelineProblem) -> float:
    """Theorem 1: SPP's makespan is below this factor times the optimum over all devices.

    (2 + (4V - 4) / M) (1 + Phi), with Phi of Lemma 2. The proof assumes no latencies, no memory
    limits, and one kind of devices whose time is proportional to the share of a microbatch.
    """
    cluster, size = problem.cluster, len(problem.cluster)
    links = cluster.pairs.bandwidths()
    if not len(links):
        return 2.0
    costs = problem.costs(problem.kinds[0], 1)
    work = costs.forward_seconds + costs.backward_seconds
    if not work.any():
        return float("inf")  # Lemma 2 compares with the work
    moved = [2 * problem.boundary_bytes(stop) for stop in range(1, len(problem.chain))]
    slowest = 1 / links[0] - 1 / links[-1]
    phi = max(float(work.max()) * links[-1], *moved, 0.0) * slowest * size / work.sum()
    return float((2 + (4 * size - 4) / problem.microbatches) * (1 + phi))


def shortest_path_seconds(problem: PipelineProblem, stages: int) -> float:
    """A lower bound on the time of a microbatch in any plan of ``stages`` stages.

    Stage s does work w_s on r_s devices in time w_s / r_s, with sum r_s <= V. By Cauchy-Schwarz,
    sum w_s / r_s >= (sum sqrt w_s)^2 / V, which is least when all stages but one consist of a
    single layer, the smallest ones. Work is that of the cheapest kind and share of a microbatch.
    """
    work = cheapest_work(problem)
    smallest = np.sort(work)[: stages - 1]
    roots = np.sqrt(smallest).sum() + np.sqrt(max(work.sum() - smallest.sum(), 0.0))
    return float(roots**2 / len(problem.cluster))


def cheapest_work(problem: PipelineProblem) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Device-seconds per layer and microbatch for the cheapest kind and share, shape (L,)."""
    allowed = problem.replicas_per_layer
    rows = [
        np.where(
            r <= allowed,
            r * (problem.costs(kind, r).forward_seconds + problem.costs(kind, r).backward_seconds),
            np.inf,
        )
        for kind in problem.kinds
        for r in range(1, min(len(problem.cluster), int(allowed.max())) + 1)
    ]
    return np.asarray(np.min(rows, axis=0))
