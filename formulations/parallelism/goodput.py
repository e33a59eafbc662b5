"""Goodput: the share of a run's time that trains, where devices fail and work is lost.

Failures are a Poisson process: a run on N devices fails every mu = mtbf / N seconds. Work is saved
after every tau seconds of it; a checkpoint stops the run for C seconds and, if asynchronous, is
complete W seconds later, beside the next work. After a failure the run restarts in R seconds, at
the last complete checkpoint. The expected time from a checkpoint to the next is

    E(tau) = mu exp((R + W) / mu) (exp((tau + C) / mu) - 1)

(Daly, Future Generation Computer Systems 2006, equation 20, for W = 0). With W > 0 a first attempt
needs tau + C without a failure, a later one W more, for the last complete checkpoint is older; the
sum over attempts has the same form with R + W for R. Failures may come at any time, also in a
checkpoint or in a restart.

Servers that failed are away until they are repaired, each on its own. Their number is a birth and
death process: without smaller layouts the waiting share is Erlang's loss formula, which holds for
repair times of any distribution.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.parts import Parts, shares
from stagewright.formulations.parallelism.schedules import positions
from stagewright.formulations.parallelism.states import Parameters, groups, held
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.prices.collectives import link_seconds
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount, require_bandwidth, require_number
from stagewright.graphs.machines.fabric import Fabric
from stagewright.graphs.models.shards import LayerSplit


@documents.record
class Failures:
    """How often devices fail, and what saves and restores the run.

    ``mtbf_seconds`` is between two failures of one device, with its part of the failures of server,
    network and software. ``checkpoint_bytes_per_second`` is from a server to the store, or back,
    for all its devices together, while all servers do the same. ``restart_seconds`` are from a
    failure until the checkpoint is loaded: detection, processes, communication. A server that
    failed is away for ``repair_seconds`` on average, 0 if it restarts with the run; ``spares``
    servers take the place of servers that are away.
    """

    mtbf_seconds: float
    checkpoint_bytes_per_second: float
    asynchronous: bool = False
    restart_seconds: float = 600.0
    repair_seconds: float = 0.0
    spares: int = 0

    def __post_init__(self) -> None:
        require_number(self.mtbf_seconds, "mtbf_seconds")
        if not 0 < self.mtbf_seconds < math.inf:
            raise InputError(f"mtbf_seconds must be positive and finite, got {self.mtbf_seconds}")
        require_bandwidth(self.checkpoint_bytes_per_second, "checkpoint_bytes_per_second")
        require_amount(self.restart_seconds, "restart_seconds")
        require_amount(self.repair_seconds, "repair_seconds")
        if self.spares < 0:
            raise InputError(f"spares must be at least 0, got {self.spares}")
        if self.spares and not self.repair_seconds:
            raise InputError("spares need repair_seconds: without it no server is away")

    def require_host(self, fabric: Fabric) -> float | None:
        """The devices' bandwidth to the host; refused if it is not known but needed."""
        if self.asynchronous and fabric.host_bytes_per_second is None:
            raise InputError("asynchronous checkpoints need the devices' host_bytes_per_second")
        return fabric.host_bytes_per_second


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Bytes of a checkpoint, in all, of the fullest server and of the fullest device."""

    total: float
    of_server: float
    of_device: float


def checkpoint(problem: TrainingProblem, layout: Layout) -> Checkpoint:
    """What a layout's checkpoint has: trained weights and their optimizer states, each once.

    Ranks with equal states write an equal part each, as with fully parallel saving in Megatron Core
    and torch's distributed checkpoints.
    """
    of = Parts(problem, layout).cut.ranks
    kinds = [_written(problem, layout, held(one, tied=False).trained) for one in of.layers]
    by_position = np.array(kinds)[of.index][positions(layout.schedule, layout.pipeline)]
    ranks = np.arange(layout.ranks)
    by_rank = by_position[ranks // layout.pipeline_stride % layout.pipeline]
    by_server = np.add.reduceat(by_rank, ranks[:: problem.fabric.per_server])
    return Checkpoint(float(by_rank.sum()), float(by_server.max()), float(by_rank.max()))


def _written(problem: TrainingProblem, layout: Layout, of: Parameters) -> float:
    shared, expert = groups(layout)
    return (of.shared / shared + of.expert / expert) * _bytes_each(problem)


def _bytes_each(problem: TrainingProblem) -> int:
    return problem.precision.weight_bytes + problem.precision.optimizer_bytes


def least_checkpoint(problem: TrainingProblem) -> Checkpoint:
    """No layout of the problem has less to write, in all, on a server or on a device."""
    of, fabric = shares(problem, LayerSplit()), problem.fabric
    layers = [of.embedding, of.head, *(of.kinds[kind] for kind in of.blocks)]
    trained = held(tuple((one, False, 1) for one in layers), tied=False).trained
    total = (trained.shared + trained.expert) * _bytes_each(problem)
    return Checkpoint(total, total * fabric.per_server / fabric.devices, total / fabric.devices)


@dataclass(frozen=True, slots=True)
class RunSize:
    """A run on so many devices: an iteration, a checkpoint's stop and write, a restart (s)."""

    devices: int
    iteration_seconds: float
    stop_seconds: float
    write_seconds: float
    restart_seconds: float

    def expected_seconds(self, work: float, mean: float) -> float:
        """From a checkpoint to the next after so much work; ``mean`` between failures."""
        with np.errstate(over="ignore"):
            again = np.exp((self.restart_seconds + self.write_seconds) / mean)
            return float(mean * again * np.expm1((work + self.stop_seconds) / mean))

    def share(self, work: float, mean: float) -> float:
        """The share of time that trains, with a checkpoint after so much work."""
        return work / self.expected_seconds(work, mean)

    def iterations(self, mean: float) -> int:
        """Whole iterations between checkpoints with the largest share of time that trains.

        A checkpoint is complete before the next one begins. The share has one maximum.
        """
        least = max(1, math.ceil(self.write_seconds / self.iteration_seconds))
        best = exact_interval(self.stop_seconds, mean) / self.iteration_seconds
        around = {max(least, math.floor(best)), max(least, math.ceil(best))}
        return max(around, key=lambda n: self.share(n * self.iteration_seconds, mean))


def run_size(
    problem: TrainingProblem, failures: Failures, seconds: float, of: Checkpoint
) -> RunSize:
    """The run of a problem with so many seconds of an iteration and such a checkpoint."""
    stop = write = link_seconds(of.of_server, failures.checkpoint_bytes_per_second)
    host = failures.require_host(problem.fabric)
    if failures.asynchronous and host is not None:
        stop = link_seconds(of.of_device, host)
    return RunSize(
        devices=problem.fabric.devices,
        iteration_seconds=seconds,
        stop_seconds=stop,
        write_seconds=write if failures.asynchronous else 0.0,
        restart_seconds=failures.restart_seconds + write,
    )


def young_interval(stop: float, mean: float) -> float:
    """Work between checkpoints, to first order (Young, Communications of the ACM 1974)."""
    return math.sqrt(2 * stop * mean)


def daly_interval(stop: float, mean: float) -> float:
    """Work between checkpoints, to higher order (Daly 2006, equation 37)."""
    if stop >= 2 * mean:
        return mean
    root = math.sqrt(stop / (2 * mean))
    return young_interval(stop, mean) * (1 + root / 3 + root**2 / 9) - stop


def exact_interval(stop: float, mean: float) -> float:
    """Work between checkpoints that minimises E(tau) / tau, by Lambert's W.

    The derivative is zero where (1 - x) exp(x + C / mu) = 1, x = tau / mu: x - 1 is the principal
    branch of W at -exp(-1 - C / mu).
    """
    from scipy.special import lambertw  # not needed to read a request

    return mean * (1 + float(lambertw(-math.exp(-1 - stop / mean)).real))


@dataclass(frozen=True, slots=True)
class Goodput:
    """The share of time that trains at the speed of the whole run, and where the rest goes.

    The shares of time, ``goodput`` included, add up to 1: ``stopped`` for checkpoints, ``lost`` in
    work that was done again, ``restarting``, and ``away``: waiting for servers, or training slower
    without them.
    """

    goodput: float
    stopped: float
    lost: float
    restarting: float
    away: float
    iterations: int
    mean_seconds: float

    def effective_seconds(self, seconds: float) -> float:
        """Seconds from the end of an iteration to the next, on average over the whole run."""
        return seconds / self.goodput if self.goodput > 0 else math.inf


def goodput(
    failures: Failures, full: RunSize, smaller: Sequence[RunSize] = (), least: bool = False
) -> Goodput:
    """The goodput of a run; ``smaller`` are its sizes with 1, 2, ... servers too few.

    With more servers away than there are sizes the run waits. A size that changes because a server
    is back costs a checkpoint and a restart, counted to first order. With ``least`` intervals need
    not be whole iterations, nor checkpoints be complete before the next one: no run of such a size
    has more goodput.
    """
    mean = failures.mtbf_seconds / full.devices
    count = full.iterations(mean)
    work = exact_interval(full.stop_seconds, mean) if least else count * full.iteration_seconds
    expected = full.expected_seconds(work, mean)
    trains, stopped = work / expected, full.stop_seconds / expected
    restarting = -math.expm1(-full.restart_seconds / mean)
    sizes = [full] * (failures.spares + 1) + [*smaller]
    states = shares_of_away(failures, [one.devices for one in sizes])
    whole = float(states[: failures.spares + 1].sum())
    speed = trains * whole
    for away, one in enumerate(smaller, failures.spares + 1):
        mine = failures.mtbf_seconds / one.devices
        share = one.share(one.iterations(mine) * one.iteration_seconds, mine)
        change = one.stop_seconds + one.write_seconds + one.restart_seconds
        grows = sizes[away - 1].devices != one.devices
        kept = max(0.0, 1 - grows * away * change / failures.repair_seconds)
        speed += float(states[away]) * share * kept * full.iteration_seconds / one.iteration_seconds
    return Goodput(
        goodput=speed,
        stopped=stopped,
        lost=1 - trains - stopped - restarting,
        restarting=restarting,
        away=trains - speed,
        iterations=count,
        mean_seconds=mean,
    )


def shares_of_away(failures: Failures, devices: Sequence[int]) -> Floats:
    """Shares of time with 0, 1, ... servers away; with the last number the run waits.

    ``devices`` run while so many are away. Birth and death: failures at the rate of the devices
    that run, repairs at the rate of the servers that are away.
    """
    load = np.array(devices) * failures.repair_seconds / failures.mtbf_seconds
    terms = load / np.arange(1, len(devices) + 1)
    # Sums of logarithms: products of many servers' rates are beyond floats.
    with np.errstate(divide="ignore"):
        logs = np.concatenate(([0.0], np.cumsum(np.log(terms))))
    found = np.exp(logs - logs.max())
    normed: Floats = found / found.sum()
    return normed
