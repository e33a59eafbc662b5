"""PipeDream-2BW beside other ways to train, as in section 3.4.2 of Narayanan's thesis.

GPT with 2.2 and 3.8 billion parameters on 8 and 64 V100 of 16 GB, mixed precision, everything
recomputed, 8 and 16 stages. Either each system has the microbatch that suits it best, or all have
the largest that 2BW has room for, as in the thesis, whose devices need it to be efficient; analytic
ones do not. Times are analytic: of 2BW and Flush those of their plans. Of the others, with the time
t of the slowest stage for a microbatch:

- GPipe drains after as many of a pipeline's m microbatches as fit, k, since it keeps all of their
  inputs: Flush's time and (m / k - 1) (p - 1) t.
- Layers in sequence without pipelining: the same with k = 1.
- Tensor parallelism: a p-th of the computation, and in every block four all-reduces of its output,
  and two more to recompute, on the slowest link of p devices; then that of the gradients.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.report import Table
from stagewright.formulations.patterns.parallel_pipelines import Configuration
from stagewright.formulations.plans.actions import DOUBLE_BUFFER, FLUSH
from stagewright.formulations.plans.memory import kept_bytes, stage_static_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.prices.analytic import analytic_model
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.solvers.planners.parallel_pipelines import PlannedPipelines

SIZES = (1, 2, 4, 8, 16, 32)
NVLINK, NETWORK = Link(150e9), Link(3.125e9)  # of p3.16xlarge: 25 Gbps
MEMORY = 16e9
COLUMNS = (
    "model", "GPUs", "batch", "2BW samples/s", "b", "over Flush", "over GPipe",
    "over layers in sequence", "over tensor parallelism",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A model of equal blocks of ``hidden`` units on ``servers`` of 8 devices, ``depth`` stages."""

    name: str
    hidden: int
    blocks: int
    servers: int
    depth: int
    batches: tuple[int, ...]

    @property
    def width(self) -> int:
        """Replicas of each stage."""
        return 8 * self.servers // self.depth


CASES = (
    Case("GPT 2.2B", 1920, 48, 1, 8, (32, 64, 512)),
    Case("GPT 3.8B", 2560, 48, 8, 16, (128, 512, 2048)),
)
PRINTED = "1.6, 1.15 with 2048", "up to 3.2", "up to 6.1", "1.3, 20 on 64"


def tables(quick: bool) -> Iterator[Table]:
    """Speed-ups of 2BW; in the last row those that the thesis prints."""
    cases = CASES[:1] if quick else CASES
    rows = [row for case in cases for batch in case.batches for row in _rows(case, batch)]
    printed = ("thesis", "8, 64", "", "", "", *PRINTED)
    yield Table("two_buffered", "PipeDream-2BW over other systems", COLUMNS, (*rows, printed))


def _rows(case: Case, batch: int) -> Iterator[tuple[object, ...]]:
    systems = _Systems.of(case, batch)
    sizes = [b for b in SIZES if batch % (b * case.width) == 0]
    sizes = [b for b in sizes if batch // (b * case.width) >= case.depth]
    sizes = [b for b in sizes if systems.two_buffered(b) < math.inf]
    others = (systems.flush, systems.gpipe, systems.in_sequence, systems.tensors)
    for name, able in (("best", sizes), ("largest", sizes[-1:])):
        seconds, best = min((systems.two_buffered(b), b) for b in able)
        ratios = (min(map(one, able)) / seconds for one in others)
        shown = (f"{one:.2f}" for one in ratios)
        yield (
            case.name,
            8 * case.servers,
            batch,
            f"{batch / seconds:.1f}",
            f"{name} {best}",
            *shown,
        )


def _turn(problem: PipelineProblem, stage: Stage) -> float:
    """Forward, recomputation and backward of a microbatch."""
    devices = [problem.cluster.index[name] for name in stage.devices]
    forward, backward = problem.compute_seconds(*stage.layers, devices)
    return 2 * forward + backward


@dataclass(frozen=True)
class _Systems:
    """Seconds of an iteration by the samples of a device's microbatch; inf if it does not fit."""

    case: Case
    batch: int
    problems: dict[int, PipelineProblem]

    @classmethod
    def of(cls, case: Case, batch: int) -> "_Systems":
        chain = analytic_model(
            "gpt", [b * case.width for b in SIZES] + list(SIZES), precision="fp16",
            layers=case.blocks, hidden=case.hidden, heads=case.hidden // 80, sequence=512,
        )  # fmt: skip
        links = (NVLINK, NETWORK) if case.servers > 1 else (NVLINK,)
        cluster = uniform_servers(case.servers, 8, *links, memory_bytes=MEMORY, kind="v100")
        whole = PipelineProblem(chain, cluster, 1)
        samples = (b * case.width for b in SIZES if batch % (b * case.width) == 0)
        problems = {
            one: replace(whole, microbatches=batch // one, microbatch_size=one) for one in samples
        }
        return cls(case, batch, problems)

    def _asked(self, size: int) -> Configuration:
        count = self.batch // (size * self.case.width)
        return Configuration(self.case.width, self.case.depth, size, count, "full")

    def two_buffered(self, size: int) -> float:
        """Of the plan, without a flush."""
        return PlannedPipelines(self.problems, DOUBLE_BUFFER).seconds(self._asked(size))

    def flush(self, size: int) -> float:
        """Of the plan, with a flush."""
        return PlannedPipelines(self.problems, FLUSH).seconds(self._asked(size))

    def gpipe(self, size: int) -> float:
        """A flush whenever memory is full."""
        return self._drained_every(size, self._most_in_flight(size))

    def in_sequence(self, size: int) -> float:
        """A flush after every microbatch."""
        return self._drained_every(size, min(1, self._most_in_flight(size)))

    def _drained_every(self, size: int, most: int) -> float:
        one = self._asked(size)
        if most < 1:
            return math.inf
        count = next(k for k in range(most, 0, -1) if one.microbatches % k == 0)
        problem, stages = self._stages(size)
        turn = max(_turn(problem, stage) for stage in stages)
        more = (one.microbatches // count - 1) * (one.depth - 1) * turn
        return self.flush(size) + more

    def _stages(self, size: int) -> tuple[PipelineProblem, tuple[Stage, ...]]:
        costs = PlannedPipelines(self.problems, FLUSH)
        return self.problems[size * self.case.width], costs.stages(self._asked(size))

    def _most_in_flight(self, size: int) -> int:
        """The most microbatches of which every stage has room for the inputs."""
        problem, stages = self._stages(size)
        most = self._asked(size).microbatches
        for stage in stages:
            kept = kept_bytes(problem, stage)
            room = MEMORY - stage_static_bytes(problem, stage) - kept.working_bytes
            if kept.saved_bytes:
                most = min(most, int(room // kept.saved_bytes))
        return max(0, most)

    def tensors(self, size: int) -> float:
        """Every layer divided; memory is not counted."""
        case, problem = self.case, self.problems[size * self.case.width]
        costs = problem.costs("v100", case.width)
        compute = float((2 * costs.forward_seconds + costs.backward_seconds).sum()) / case.depth
        link = NVLINK if case.depth <= 8 else NETWORK
        sent = 2 * (case.depth - 1) / case.depth / link.bandwidth_bytes_per_second
        block = size * 512 * case.hidden * 2.0
        count = self._asked(size).microbatches
        weights = float(problem.chain.parameter_bytes.sum()) / case.depth
        update = 2 * (case.width - 1) / case.width * weights / NETWORK.bandwidth_bytes_per_second
        return count * (compute + 6 * case.blocks * block * sent) + update
