"""Metis' planner on its own profiles, beside the optimum by its own evaluator.

``METIS`` is the folder of a checkout of github.com/SamsungLabs/Metis (4b24046); nothing of it is
copied here. Its public profiles are of one kind of GPU (A100, three tensor degrees, microbatches of
1, 2 and 4, ten layers), and so are the clusters: servers of four, links as in its results.

The optimum is over a larger class than Metis searches: stages of whole consecutive layers, each on
any number of GPUs (Metis: powers of two, within a variance), divided into any data and measured
tensor degree, any number of microbatches that are whole and measured. Memory is judged by Metis'
rule.
"""

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from benchmarks.report import Table, percent
from benchmarks.spec import BenchSpec
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.parallelism.profiled import MemoryRule, ProfiledProblem
from stagewright.formulations.parallelism.profiled_cluster import Pool, Route, ServerPools
from stagewright.graphs.importers.metis import read_metis
from stagewright.graphs.models.layer_profiles import LayerProfiles
from stagewright.graphs.models.layer_sizes import LayerSizes
from stagewright.solvers.parallelism.profiled import profiled_plan

CHECKOUT, PROFILES = "METIS", "profile_data_samples"
PER_SERVER, DEGREES, SIZES = 4, (1, 2, 4), (1, 2, 4)
LAYERS, HIDDEN, SEQUENCE, VOCABULARY = 10, 4096, 1024, 51200
BANDWIDTH, MEBIBYTE = 46, 1024 * 1024
"""MiB/ms inside a server; Metis' evaluator takes it between servers too."""
MEMORY_FACTOR, MEMORY_OFFSET = 5.0, 0.001  # of its rule of memory

Stage = tuple[int, int, int, int]
"""First layer and the one after the last, data and tensor degree."""


@dataclass(frozen=True, slots=True)
class MetisPlan:
    """Stages and the number of microbatches of each pipeline."""

    stages: tuple[Stage, ...]
    batches: int

    @property
    def is_whole(self) -> bool:
        """Whether it has all layers, and no stage without one; Metis lists others too."""
        cuts = [0, *(stop for _, stop, *_ in self.stages)]
        return cuts[-1] == LAYERS and all(a < b for a, b in pairwise(cuts))


def folder() -> Path | None:
    """The checkout, if there is one."""
    found = Path(os.environ.get(CHECKOUT, ""))
    return found if (found / PROFILES).is_dir() else None


def _checkout() -> Path:
    found = folder()
    assert found is not None, f"{CHECKOUT} names no checkout"
    return found


@dataclass(frozen=True)
class Case:
    """Servers of four A100 with this memory (GB), and samples of an iteration."""

    servers: int
    memory: int
    batch: int

    @property
    def gpus(self) -> int:
        """All devices."""
        return self.servers * PER_SERVER

    def write(self, place: Path) -> None:
        """Metis' two files of the cluster."""
        (place / "hostfile").write_text("0.0.0.4 slots=4\n" * self.servers)
        node = {
            "instance_type": "A100",
            "inter_bandwidth": 10,
            "intra_bandwidth": BANDWIDTH,
            "memory": self.memory,
        }
        (place / "clusterfile.json").write_text(json.dumps({"0.0.0.4": node}))

    @cached_property
    def planned(self) -> tuple[list[tuple[float, MetisPlan]], float]:
        """All plans that Metis lists with its costs (ms), none if it fails, and its seconds."""
        with TemporaryDirectory() as made:
            self.write(Path(made))
            options = {
                "model_name": "GPT",
                "model_size": "1.5B",
                "num_layers": LAYERS,
                "gbs": self.batch,
                "hidden_size": HIDDEN,
                "sequence_length": SEQUENCE,
                "vocab_size": VOCABULARY,
                "attention_head_size": 32,
                "hostfile_path": f"{made}/hostfile",
                "clusterfile_path": f"{made}/clusterfile.json",
                "profile_data_path": _checkout() / PROFILES,
                "max_profiled_tp_degree": max(DEGREES),
                "max_profiled_batch_size": max(SIZES),
                "min_group_scale_variance": 1,
                "max_permute_len": 4,
                "log_path": made,
                "home_dir": made,
            }
            words = [f"--{name}={value}" for name, value in options.items()]
            began = perf_counter()
            done = subprocess.run(
                [sys.executable, str(_checkout() / "cost_het_cluster.py"), *words],
                cwd=made, capture_output=True, text=True, check=False,
            )  # fmt: skip
            spent = perf_counter() - began
        return list(_listed(done.stdout)) if done.returncode == 0 else [], spent

    @cached_property
    def evaluator(self) -> Any:
        """Metis' own, of these machines."""
        if str(_checkout()) not in sys.path:
            sys.path.insert(0, str(_checkout()))
        modules = {
            name: importlib.import_module(name)
            for name in ("data_loader", "gpu_cluster", "model.cost_estimator",
                         "model.activation_parameter", "utils")
        }  # fmt: skip
        profile, _ = (
            modules["data_loader"]
            .ProfileDataLoader(str(_checkout() / PROFILES))
            .load_profile_data_all()
        )
        config = modules["utils"].ModelConfig(
            model_name="GPT",
            num_layers=LAYERS,
            sequence_length=SEQUENCE,
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            attention_head_size=32,
        )
        with TemporaryDirectory() as made:
            self.write(Path(made))
            machines = modules["gpu_cluster"].GPUCluster(
                f"{made}/hostfile", f"{made}/clusterfile.json"
            )
        volume = modules["model.activation_parameter"].GPTActivationAndParam(
            config, profile["model"]["parameters"]
        )
        estimator = modules["model.cost_estimator"].HeteroCostEstimator
        return estimator(profile, config, volume, machines)

    def milliseconds(self, plan: MetisPlan) -> float:
        """A plan's cost by Metis' evaluator."""
        groups = [data * tensor for _, _, data, tensor in plan.stages]
        stated = SimpleNamespace(
            node_sequence=[SimpleNamespace(name="A100")],
            device_groups=groups,
            num_stage=len(groups),
            batches=plan.batches,
            gbs=self.batch,
        )
        cuts = [0, *(stop for _, stop, _, _ in plan.stages)]
        strategies = [(data, tensor) for _, _, data, tensor in plan.stages]
        ranks = dict.fromkeys(range(self.gpus), "A100")
        with contextlib.redirect_stdout(io.StringIO()):
            return float(self.evaluator.get_cost(stated, strategies, cuts, ranks))

    def fits(self, stage: Stage, batches: int) -> bool:
        """Metis' rule: five times the layers' profiled memory in that of all GPUs of the stage."""
        first, stop, data, tensor = stage
        key = f"tp{tensor}_bs{self.batch // data // batches}"
        used = sum(self.profile["DeviceType.A100"][key]["memory"][first:stop])
        has = data * tensor * self.memory * 1024
        return bool(used * MEMORY_FACTOR + MEMORY_OFFSET <= has)

    @property
    def profile(self) -> Any:
        """Metis' profiles as it has read them."""
        return self.evaluator.profile_data

    def parts(self, stage: Stage, batches: int) -> tuple[float, float, float, float]:
        """A stage's time of a microbatch, its transfer, update and sum of gradients, by Metis."""
        first, stop, data, tensor = stage
        of, volume = self.evaluator, self.evaluator.model_volume
        kinds = ["A100"] * (data * tensor)
        compute = of._get_execution_cost(kinds, first, stop, (data, tensor), self.batch, batches)
        size = self.batch // data // batches
        sent = 0.0
        if stop < LAYERS:
            moved = volume.get_activation_size(stop, size, tensor)
            sent = of._get_pp_cost(moved, BANDWIDTH)
        held = volume.get_parameter_size_by_stage(tensor, first, stop)
        summed = of._get_dp_cost([held], BANDWIDTH, data)
        return compute, sent, of._get_parameter_update_cost(tensor, stop - first), summed

    def finish(self, stage: Stage, batches: int) -> float:
        """What the last stage adds, and the batches' making."""
        _, _, data, tensor = stage
        size = self.batch // data // batches
        of = self.evaluator
        synced = of._get_fb_sync_cost(["A100"], tensor, size) * batches
        return float(synced + of._get_batch_generate_cost(batches))


def _listed(text: str) -> Iterator[tuple[float, MetisPlan]]:
    """The plans of Metis' output."""
    for line in text.rpartition("layer_partition)")[2].splitlines():
        match = re.fullmatch(
            r"\d+, (?P<cost>[\d.]+), \(.*\), \[[\d, ]*\], \[(?P<ways>.*)\], (?P<batches>\d+), "
            r"\[(?P<cuts>[\d, ]*)\]",
            line.strip(),
        )
        if match is None:
            continue
        numbers = list(map(int, re.findall(r"\d+", match["ways"])))
        ways = list(zip(numbers[::2], numbers[1::2], strict=True))
        cuts = list(map(int, match["cuts"].split(", ")))
        stages = tuple(
            (first, stop, *way) for first, stop, way in zip(cuts, cuts[1:], ways, strict=False)
        )
        yield float(match["cost"]), MetisPlan(stages, int(match["batches"]))


# The optimum by Metis' evaluator.


@dataclass(frozen=True, slots=True)
class _Label:
    """Stages from the first layer on: sum of times and transfers, longest time, update, sum."""

    total: float
    longest: float
    update: float
    summed: float
    stages: tuple[Stage, ...]

    def no_worse(self, other: "_Label") -> bool:
        return (
            self.total <= other.total
            and self.longest <= other.longest
            and self.update <= other.update
            and self.summed <= other.summed
        )


def optimum(case: Case) -> tuple[float, MetisPlan | None]:
    """The least cost (ms) of the class, and its plan; all devices are used.

    Of two labels with the same layers and devices, one that is no worse in all four suffices.
    """
    best: tuple[float, MetisPlan | None] = (float("inf"), None)
    for batches in (m for m in range(1, case.batch + 1) if case.batch % m == 0):
        for one in _whole(case, batches):
            cost = _cost(one, batches, case.finish(one.stages[-1], batches))
            if cost < best[0]:
                best = cost, MetisPlan(one.stages, batches)
    return best


def _whole(case: Case, batches: int) -> list[_Label]:
    """The labels of all layers and devices; one for each last stage's degrees and costs."""
    at: dict[tuple[int, int], list[_Label]] = {(0, 0): [_Label(0.0, 0.0, 0.0, 0.0, ())]}
    whole: dict[tuple[int, int], list[_Label]] = {}
    for layer, used in product(range(LAYERS), range(case.gpus)):
        for label in at.get((layer, used), []):
            for stage, longer in _longer(case, label, batches, case.gpus - used):
                end = (stage[1], used + stage[2] * stage[3])
                if stage[1] < LAYERS:
                    _keep(at.setdefault(end, []), longer)
                elif end[1] == case.gpus:
                    _keep(whole.setdefault(stage[2:], []), longer)
    return [one for labels in whole.values() for one in labels]


def _cost(one: _Label, batches: int, finish: float) -> float:
    return one.total + (batches - 1) * one.longest + one.update + one.summed + finish


def _keep(labels: list[_Label], one: _Label) -> None:
    if not any(other.no_worse(one) for other in labels):
        labels[:] = [other for other in labels if not one.no_worse(other)]
        labels.append(one)


def _longer(case: Case, label: _Label, batches: int, left: int) -> Iterator[tuple[Stage, _Label]]:
    """The labels with one more stage."""
    first = label.stages[-1][1] if label.stages else 0
    for tensor in DEGREES:
        for data in range(1, left // tensor + 1):
            if case.batch % (data * batches) or case.batch // data // batches not in SIZES:
                continue
            for stop in range(first + 1, LAYERS + 1):
                stage = (first, stop, data, tensor)
                if not case.fits(stage, batches):
                    break
                compute, sent, update, summed = case.parts(stage, batches)
                yield (
                    stage,
                    _Label(
                        label.total + compute + sent,
                        max(label.longest, compute),
                        max(label.update, update),
                        max(label.summed, summed),
                        (*label.stages, stage),
                    ),
                )


# Our planner on the same inputs, in its own model.


def our_problem(case: Case) -> ProfiledProblem:
    """Metis' inputs as ours: gradients as it counts them, links by its bandwidth, no memory rule.

    Metis' rule of memory is of a stage's GPUs together, which ours has not.
    """
    profiles = read_metis(_checkout() / PROFILES)
    held = case.profile["model"]["parameters"]
    sizes = tuple(
        LayerSizes(
            tensor,
            tuple(each / tensor for each in held),
            (0.0,) * LAYERS,
            (float(SEQUENCE * HIDDEN),) * LAYERS,
        )
        for tensor in DEGREES
    )
    rate = BANDWIDTH * MEBIBYTE * 1e3
    pool = Pool("A100", "whole", case.servers, PER_SERVER, 1e15, Route(rate, rate))
    whole = LayerProfiles(profiles.name, profiles.source, profiles.measured, sizes)
    rule = MemoryRule(0.0, 0.0, 0.0)
    return ProfiledProblem(whole, ServerPools((pool,)), case.batch, rule, gradient_bytes=1.0)


def our_plan(case: Case, limits: Limits) -> tuple[MetisPlan | None, float]:
    """Our planner's plan as Metis states plans, and the seconds of the search."""
    found = profiled_plan(our_problem(case), limits)
    if found.plan is None:
        return None, found.seconds
    stages, first = [], 0
    for one in found.plan.stages:
        stages.append((first, first + one.layers, len(one.replicas), one.replicas[0].tensor))
        first += one.layers
    counts = set(found.plan.microbatches)
    return MetisPlan(tuple(stages), max(counts)), found.seconds


STUDY = BenchSpec(
    "profiled_metis",
    lambda case: Case(*case),
    (
        (1, 80, 128),
        (2, 80, 128),
        (4, 80, 128),
        (8, 80, 128),
        (2, 40, 128),
        (4, 24, 64),
        (4, 12, 64),
        (3, 80, 96),
        (6, 80, 96),
        (8, 40, 64),
    ),
    few=1,
)
LIMITS = Limits(30)


def tables(quick: bool) -> list[Table]:
    """Metis' plan, ours and the optimum; none without a checkout."""
    if folder() is None:
        print(f"profiled_metis: set {CHECKOUT} to a checkout of github.com/SamsungLabs/Metis")
        return []
    rows: list[tuple[object, ...]] = []
    for each in STUDY.cases(quick):
        case = STUDY.build(each)
        rows.append(_row(case))
    columns = (
        "A100", "GB", "batch", "Metis' plan ms", "our plan ms", "optimum ms", "gap of Metis",
        "Metis' search s", "our search s", "optimum's s", "Metis' stages; microbatches", "optimum",
    )  # fmt: skip
    title = "Plans of Metis' GPT on its own profiles, by its own evaluator"
    return [Table("profiled_metis", title, columns, tuple(rows))]


def _row(case: Case) -> tuple[object, ...]:
    listed, searched = case.planned
    ours, spent = our_plan(case, LIMITS)
    began = perf_counter()
    best, plan = optimum(case)
    closing = perf_counter() - began
    assert plan is not None
    assert abs(case.milliseconds(plan) - best) < 1e-6 * best
    whole = [one for one in listed if one[1].is_whole]
    cost, theirs = min(whole, key=lambda one: one[0], default=(None, None))
    is_kept = ours is not None and all(case.fits(one, ours.batches) for one in ours.stages)
    return (
        case.gpus, case.memory, case.batch, "fails" if cost is None else cost,
        case.milliseconds(ours) if ours is not None and is_kept else "no memory", best,
        None if cost is None else percent(max(0.0, 1 - best / cost)), searched, spent, closing,
        None if theirs is None else words(theirs), words(plan),
    )  # fmt: skip


def words(plan: MetisPlan) -> str:
    """Such as ``10 d8 t1`` for each stage, and the microbatches."""
    stages = " | ".join(f"{stop - first} d{d} t{t}" for first, stop, d, t in plan.stages)
    return f"{stages}; {plan.batches}"
