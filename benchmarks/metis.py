"""Metis' planner and evaluator (github.com/SamsungLabs/Metis, 4b24046), unchanged.

The environment's ``METIS`` is the folder of a checkout; nothing of it is copied here. Its public
profiles are of one kind of GPU: A100, tensor degrees and microbatches of 1, 2 and 4, ten layers.
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
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from types import SimpleNamespace
from typing import Any

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


def checkout() -> Path:
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
                "profile_data_path": checkout() / PROFILES,
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
                [sys.executable, str(checkout() / "cost_het_cluster.py"), *words],
                cwd=made, capture_output=True, text=True, check=False,
            )  # fmt: skip
            spent = perf_counter() - began
        return list(listed_plans(done.stdout)) if done.returncode == 0 else [], spent

    @cached_property
    def evaluator(self) -> Any:
        """Metis' own, of these machines."""
        if str(checkout()) not in sys.path:
            sys.path.insert(0, str(checkout()))
        modules = {
            name: importlib.import_module(name)
            for name in ("data_loader", "gpu_cluster", "model.cost_estimator",
                         "model.activation_parameter", "utils")
        }  # fmt: skip
        profile, _ = (
            modules["data_loader"]
            .ProfileDataLoader(str(checkout() / PROFILES))
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


def listed_plans(text: str) -> Iterator[tuple[float, MetisPlan]]:
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
