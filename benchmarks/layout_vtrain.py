"""Every layout of small models on one A100 server: vTrain's 1,440 iterations, predicted twice.

The file (VIA-Research/vTrain f8dda84, ``data/ground_truth_single.csv``) is not 1,440 measurements:
wherever it has three or more numbers of microbatches of a layout, its time is an affine function of
them to the last digit, so that it is composed of fewer. Layers are bound by the host's launches.

Runs are compared within one model, number of GPUs and batch: a larger batch takes longer under
every layout.
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean

import numpy as np
from scipy.stats import spearmanr

from benchmarks.layout_runs import compiled, gpt, gpt_problem, of_2021
from benchmarks.report import Table
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.schedules import order_codes, stages_of_ranks
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.machines.networks import NETWORK_SHARE, fabric_of_kind

FOLDER = Path(__file__).parents[2] / "shared/data/training"
SINGLE, SEVERAL = FOLDER / "vtrain_single_server.csv", FOLDER / "vtrain_multi_server.csv"
VOCABULARY = 50257  # vTrain's src/config.py
DEEPEST = 24  # layers
RANKED = 8  # runs; smaller groups have no meaningful rank correlation


@dataclass(frozen=True, slots=True)
class Iteration:
    """A row: a model, a batch, a layout and seconds."""

    gpus: int
    batch: int
    microbatch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipeline: int
    seconds: float

    @property
    def microbatches(self) -> int:
        """Per replica."""
        return self.batch // (self.data * self.microbatch)

    @property
    def group(self) -> tuple[int, ...]:
        """Rows of one group have the same work to do."""
        return self.hidden, self.layers, self.gpus, self.batch

    def layout(self, recompute: str) -> Layout:
        """As the cost model has it."""
        return Layout(
            pipeline=self.pipeline,
            tensor=self.tensor,
            data=self.data,
            microbatch=self.microbatch,
            recompute=recompute,  # type: ignore[arg-type]
        )

    def problem(self) -> TrainingProblem:
        """In fp16, on a server of the number of GPUs."""
        model = gpt(
            self.layers, self.hidden, self.heads, sequence=self.sequence, vocabulary=VOCABULARY
        )
        return gpt_problem(model, self.batch, self.gpus)


def rows(path: Path) -> list[Iteration]:
    """The runs of a file; one of several servers has the parameters in front."""
    with path.open(encoding="utf-8-sig") as file:
        _, *lines = csv.reader(file)
    found = [line[-11:] for line in lines]
    return [Iteration(*map(int, line[:-1]), float(line[-1]) / 1e3) for line in found]  # type: ignore[arg-type]


# --- By the analytic model -----------------------------------------------------------------------


def analytic(of: Iteration) -> float:
    """Seconds by the A100's rates; nothing is recomputed, as the times of pipelines tell."""
    return evaluate(of.problem(), of.layout("none"), compiled).seconds


def over_servers(of: Iteration) -> float:
    """Seconds on several servers with a 100 Gb/s card per GPU (vTrain: 800 Gb/s per server)."""
    fabric = fabric_of_kind("a100-80gb", of.gpus, network_bandwidth=12.5e9 * NETWORK_SHARE)
    problem = of_2021(replace(of.problem(), fabric=fabric))
    return evaluate(problem, of.layout("full"), compiled).seconds


# --- By profiles of layers -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds of a microbatch in a layer, and in embedding and head; of an iteration, per layer."""

    layer: float
    ends: float
    update_layer: float
    update_ends: float


class Profiles:
    """Profiles by (hidden size, t, d) and microbatch, from the runs without a pipeline.

    Such a run takes m (l a + b) + l c + e with m microbatches and l layers; a and b depend on the
    microbatch, c and e do not.
    """

    def __init__(self, runs: Iterable[Iteration]) -> None:
        groups = defaultdict(list)
        for one in runs:
            if one.pipeline == 1:
                groups[one.hidden, one.tensor, one.data].append(one)
        self.of = {
            (*key, microbatch): profile
            for key, group in groups.items()
            for microbatch, profile in _profiles(group).items()
        }

    def seconds(self, of: Iteration) -> float:
        """With the same profile in a pipeline; the ends are in the last stage.

        For a number of replicas that has no profile, the profile of the least number is taken, and
        the all-reduce of gradients on NVLink is taken off or added.
        """
        key = of.hidden, of.tensor, of.microbatch
        data = [d for h, t, d, b in self.of if (h, t, b) == key]
        near = of.data if of.data in data else min(data)
        one = self.of[of.hidden, of.tensor, near, of.microbatch]
        each = of.layers // of.pipeline
        stages = np.full(of.pipeline, each * one.layer)
        stages[-1] += one.ends
        none = np.zeros(of.pipeline)
        finish, _ = compiled(
            order_codes("1f1b", of.pipeline, 1, of.microbatches),
            stages_of_ranks(of.pipeline, 1, in_v=False),
            of.microbatches,
            stages / 3,
            2 * stages / 3,
            none,
            none[:, None],
            np.full(of.pipeline, _hop(of)),
            none,
        )
        update = each * one.update_layer + one.update_ends
        return float(finish.max()) + update + _gradients(of, of.data) - _gradients(of, near)


def _profiles(group: list[Iteration]) -> dict[int, Profile]:
    """Least squares of relative errors; the unknowns are all a, all b, c and e."""
    sizes = sorted({one.microbatch for one in group})
    rows = []
    for one in group:
        own = np.array(sizes) == one.microbatch
        each = one.microbatches * own
        rows.append([*(each * one.layers), *each, one.layers, 1])
    seconds = np.array([one.seconds for one in group])
    scaled = np.array(rows) / seconds[:, None]
    found, *_ = np.linalg.lstsq(scaled, np.ones(len(group)), rcond=None)
    layers, ends = found[: len(sizes)], found[len(sizes) : -2]
    return {
        size: Profile(float(a), float(b), float(found[-2]), float(found[-1]))
        for size, a, b in zip(sizes, layers, ends, strict=True)
    }


def _hop(of: Iteration) -> float:
    """Seconds of a stage's output on NVLink."""
    moved = 2 * of.microbatch * of.sequence * of.hidden / of.tensor
    return moved / _nvlink()


def _gradients(of: Iteration, data: int) -> float:
    """Seconds of an all-reduce of a rank's fp16 gradients."""
    parameters = 12 * of.hidden**2 * of.layers / (of.pipeline * of.tensor)
    return 2 * (data - 1) / data * 2 * parameters / _nvlink()


def _nvlink() -> float:
    return fabric_of_kind("a100-80gb", 8).levels[0].bytes_per_second


# --- The comparison ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Agreement:
    """Errors over all runs; rank correlations and regrets over groups.

    A regret is how much longer the layout that is predicted to be the best takes than the best.
    """

    runs: int
    mean_error: float
    largest_error: float
    groups: int
    mean_rank: float
    least_rank: float
    mean_regret: float
    largest_regret: float


def agreement(runs: list[Iteration], predict: Callable[[Iteration], float]) -> Agreement:
    """How well ``predict`` says the times of the runs and their order in each group."""
    groups = defaultdict(list)
    for one in runs:
        groups[one.group].append((one.seconds, predict(one)))
    pairs = [np.array(group) for group in groups.values()]
    errors = np.abs(np.concatenate([of[:, 1] / of[:, 0] - 1 for of in pairs]))
    ranked = [of for of in pairs if len(of) >= RANKED]
    ranks = [float(spearmanr(of[:, 0], of[:, 1]).statistic) for of in ranked]
    regrets = [_regret(of) for of in pairs]
    return Agreement(
        len(runs),
        float(errors.mean()),
        float(errors.max()),
        len(ranked),
        mean(ranks),
        min(ranks),
        mean(regrets),
        max(regrets),
    )


def _regret(pairs: Floats) -> float:
    return float(pairs[pairs[:, 1].argmin(), 0] / pairs[:, 0].min() - 1)


@cache
def single() -> tuple[Iteration, ...]:
    """The runs on one server."""
    return tuple(rows(SINGLE))


def agreements() -> Iterator[tuple[str, Agreement]]:
    """Both predictions; and the analytic one on several servers where that file is there."""
    runs = list(single())
    yield "one server, analytic", agreement(runs, analytic)
    flat = [one for one in runs if one.pipeline == 1]
    pipelines = [one for one in runs if one.pipeline > 1]
    yield "one server, pipelines by profiles", agreement(pipelines, Profiles(flat).seconds)
    yield "one server, all by profiles", agreement(runs, Profiles(flat).seconds)
    shallow = Profiles(one for one in flat if one.layers < DEEPEST)
    deep = [one for one in runs if one.layers == DEEPEST]
    yield f"one server, {DEEPEST} layers by profiles of fewer", agreement(deep, shallow.seconds)
    if SEVERAL.exists():
        yield "64 to 512 GPUs, analytic", agreement(rows(SEVERAL), over_servers)


def tables() -> list[Table]:
    """Agreement of every prediction."""
    if not SINGLE.exists():
        return []
    found = tuple(
        (
            name,
            of.runs,
            f"{of.mean_error:.1%}",
            f"{of.largest_error:.1%}",
            of.groups,
            f"{of.mean_rank:.3f}",
            f"{of.least_rank:.3f}",
            f"{of.mean_regret:.1%}",
            f"{of.largest_regret:.1%}",
        )
        for name, of in agreements()
    )
    columns = (
        "runs",
        "number",
        "mean error",
        "largest",
        f"groups of {RANKED} and more",
        "mean rank correlation",
        "least",
        "mean regret",
        "largest",
    )
    title = "All layouts of vTrain's models: errors, and order within a model, GPUs and batch"
    return [Table("layout_orders", title, columns, found)]
