"""Iterations on eight B200 that SimuMax publishes, predicted by it and by our model.

The environment's ``SIMUMAX`` is the folder of a checkout of github.com/MooreThreads/SimuMax
(4dcaae5, v1.2); nothing of it is copied here. The measured iterations and bytes are those of its
docs/b200/b200_release_v1.2_summary.json: Megatron-LM in bf16 with few layers, one sample in a
microbatch, ZeRO-1, nothing recomputed, no exchange overlapped (b200_real_repro_guide.md in the same
folder, section 3.3, and simu_tools/megatron_scripts). Its evaluator runs unchanged; it has the
efficiency of every product and collective of these runs, measured on the same machine. Ours has
none of that.
"""

import contextlib
import importlib
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

from benchmarks.layout_runs import compiled
from benchmarks.models import ARCHITECTURES, V3
from benchmarks.report import Table
from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.rates import rates_of
from stagewright.graphs.models.architecture import Experts, FeedForward

CHECKOUT = "SIMUMAX"
RESULTS = "docs/b200/b200_release_v1.2_summary.json"
SYSTEM = "configs/system/b200_bf16_ceperm.json"
_STRATEGIES = {
    False: "configs/strategy/tp1_pp2_dp4_mbs1.json",
    True: "configs/strategy/ep4_pp2_dp4_mbs1.json",
}
_TRANSFORMER_ENGINE = "2.11.0"  # of the runs; it keeps a gradient of every shape of weight

assert V3.experts is not None
_FIRST = frozenset({0})  # the runs have one dense layer, the whole DeepSeek-V3 three
MODELS = {
    "llama3_70b": ARCHITECTURES["llama3-70b"],
    "llama3_405b": ARCHITECTURES["llama3-405b"],
    "deepseekv2": replace(
        V3, name="deepseekv2", layers=60, hidden=5120, vocabulary=102400,
        feed_forward=FeedForward(12288), experts=Experts(160, 6, 1536, 3072, dense_layers=_FIRST),
    ),
    "deepseekv3": replace(V3, name="deepseekv3", experts=replace(V3.experts, dense_layers=_FIRST)),
}  # fmt: skip
_CONFIGS = {"llama3_70b": "llama3-70b", "llama3_405b": "llama3-405b_padding_128"}


@dataclass(frozen=True, slots=True)
class Case:
    """A model of ``layers`` layers in a layout, with ``microbatches`` of one sample."""

    model: str
    layers: int
    layout: Layout
    microbatches: int
    sequence: int = 4096

    def problem(self) -> TrainingProblem:
        """Our problem."""
        return TrainingProblem(
            replace(MODELS[self.model], layers=self.layers),
            self.sequence,
            self.microbatches * self.layout.data,
            fabric_of_kind("b200", self.layout.ranks),
            rates_of("b200"),
            overlap=False,
            overlap_tensor=False,
        )

    def estimate(self) -> Estimate:
        """What our model predicts."""
        return evaluate(self.problem(), self.layout, compiled)


@dataclass(frozen=True, slots=True)
class Measured:
    """A case's seconds and allocated bytes, as SimuMax prints them."""

    case: Case
    seconds: float
    allocated_bytes: float


def folder() -> Path | None:
    """The checkout, if there is one."""
    found = Path(os.environ.get(CHECKOUT, ""))
    return found if (found / RESULTS).is_file() else None


def checkout() -> Path:
    """The checkout."""
    found = folder()
    assert found is not None, f"{CHECKOUT} names no checkout"
    return found


def measured() -> list[Measured]:
    """Its formal results."""
    rows = json.loads((checkout() / RESULTS).read_text())["rows"]
    return [
        Measured(case_named(one["case"]), one["real_ms"] / 1e3, one["real_alloc_gib"] * 2**30)
        for one in rows
    ]


def case_named(name: str) -> Case:
    """The case of a name such as ``llama3_70b_l12_tp1_pp2_dp4_mbc4_cef``."""
    number = {word: int(value) for word, value in re.findall(r"_([a-z]+)(\d+)", f"_{name}")}
    tensor = number["tp"]
    layout = Layout(
        pipeline=number["pp"],
        tensor=tensor,
        context=number.get("cp", 1),
        data=number["dp"],
        expert=number.get("ep", 1),
        zero=1,
        sequence_parallel=tensor > 1,
    )
    model = next(one for one in MODELS if name.startswith(one))
    return Case(model, number["l"], layout, number["mbc"], number.get("seq", 4096))


# --- Its evaluator -------------------------------------------------------------------------------


@cache
def package() -> ModuleType:
    """``simumax.core.perf_llm``; it prints tables with tabulate, which is not needed here."""
    try:
        importlib.import_module("tabulate")
    except ModuleNotFoundError:
        empty = ModuleType("tabulate")
        empty.tabulate = lambda *_, **__: ""  # type: ignore[attr-defined]
        sys.modules["tabulate"] = empty
    sys.path.insert(0, str(checkout()))
    return importlib.import_module("simumax.core.perf_llm")


def configured(case: Case) -> Any:
    """Its evaluator with a case, as its own scripts for the B200 set it (tools/b200)."""
    of, made = case.layout, package().PerfLLM()
    sparse = MODELS[case.model].experts is not None
    name = _CONFIGS.get(case.model, case.model)
    made.configure(
        strategy_config=str(checkout() / _STRATEGIES[sparse]),
        model_config=str(checkout() / f"configs/models/{name}.json"),
        system_config=str(checkout() / SYSTEM),
        debug_points=[],
    )
    strategy = {
        "world_size": of.ranks,
        "tp_size": of.tensor,
        "pp_size": of.pipeline,
        "ep_size": of.expert,
        "cp_size": of.context,
        "seq_len": case.sequence,
        "micro_batch_size": of.microbatch,
        "micro_batch_num": case.microbatches,
        "te_version": _TRANSFORMER_ENGINE,
        "pp_comm_async": False,
        "cross_entropy_loss_fusion": True,
        "dispatch_probs": sparse,
        "num_layers_in_last_pipeline_stage": of.last_blocks,
    }
    if of.recompute == "full":
        blocks = of.recompute_blocks or -(-case.layers // of.pipeline)
        strategy |= {"recompute_granularity": "full_block", "recompute_layer_num": blocks}
    model = {
        "layer_num": case.layers,
        "padded_vocab_size": True,
        "make_vocab_size_divisible_by": 128,
    }
    if sparse:
        model |= {"moe_pad_expert_input_to_capacity": True, "capacity": 1, "dense_layers": 1}
    for target, values in ((made.strategy, strategy), (made.model_config, model)):
        for key, value in values.items():
            setattr(target, key, value)
    return made


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Drop what it prints, and its warning that recomputation is new."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def predicted(case: Case) -> tuple[float, float]:
    """Seconds of an iteration and allocated bytes by SimuMax."""
    with silent():
        made = configured(case)
        made.run_estimate()
        data, memory = made.analysis_cost().data, made.analysis_mem()
        peaks = made.get_pp_stage_peak_mem(memory, "peak_mem", toG=True)
    return seconds(data["duration_time_per_iter"]), max(peaks.values()) * 2**30


def seconds(text: str) -> float:
    """The seconds of ``1.4412 s`` or ``828.7645 ms``."""
    value, unit = text.split()
    return float(value) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]


# --- Tables --------------------------------------------------------------------------------------


def tables(quick: bool) -> Iterator[Table]:
    """The measured iterations, and the choices among them; nothing without a checkout."""
    if folder() is None:
        print(f"no {CHECKOUT}: a folder of a checkout of github.com/MooreThreads/SimuMax")
        return
    found = measured()
    yield iterations(found[:8] if quick else found)
    if not quick:
        yield choices(found)


def iterations(found: list[Measured]) -> Table:
    """A row for each model and layout, with the errors of 4, 8 and 32 microbatches."""

    def kind(one: Measured) -> tuple[str, int, str]:
        return (one.case.model, one.case.sequence, str(one.case.layout))

    rows, off = [], []
    for (model, sequence, layout), group in groupby(sorted(found, key=kind), kind):
        runs = sorted(group, key=lambda one: one.case.microbatches)
        theirs = [predicted(one.case) for one in runs]
        ours = [one.case.estimate() for one in runs]
        errors = [
            [value / one.seconds - 1 for value, one in zip(values, runs, strict=True)]
            for values in (
                [one[0] for one in theirs],
                [one.seconds for one in ours],
            )
        ]
        off.append(errors)
        kept = runs[0].allocated_bytes
        held = ours[0].peak_bytes - runs[0].case.problem().reserve_bytes
        rows.append(
            (
                model,
                layout,
                str(sequence),
                ", ".join(f"{one.seconds:.2f}" for one in runs),
                *(", ".join(f"{error:+.0%}" for error in line) for line in errors),
                f"{kept / 2**30:.1f}",
                f"{theirs[0][1] / kept - 1:+.1%}",
                f"{held / kept - 1:+.1%}",
            )
        )
    means = [mean(abs(error) for line in off for error in line[i]) for i in range(2)]
    columns = (
        "model",
        "layout",
        "tokens",
        "measured s, 4, 8, 32 microbatches",
        "SimuMax",
        "ours",
        "measured GiB",
        "SimuMax",
        "ours",
    )
    title = (
        "Megatron-LM on 8 B200, not fitted: seconds off on average by SimuMax "
        f"{means[0]:.1%}, by ours {means[1]:.1%}"
    )
    return Table("layout_simumax", title, columns, tuple(rows))


def choices(found: list[Measured]) -> Table:
    """Of all layouts that were measured for a model and a batch, which each takes for the best."""

    def kind(one: Measured) -> tuple[str, int, int]:
        case = one.case
        return (case.model, case.sequence, case.microbatches * case.layout.data)

    rows = []
    for (model, sequence, batch), group in groupby(sorted(found, key=kind), kind):
        runs = list(group)
        if len(runs) == 1:
            continue
        best = min(one.seconds for one in runs)
        chosen = [
            min(runs, key=lambda one: predicted(one.case)[0]),
            min(runs, key=lambda one: one.case.estimate().seconds),
        ]
        rows.append(
            (
                model,
                str(sequence),
                str(batch),
                str(len(runs)),
                *(
                    cell
                    for one in chosen
                    for cell in (str(one.case.layout), f"{one.seconds / best - 1:+.1%}")
                ),
            )
        )
    columns = (
        "model",
        "tokens",
        "batch",
        "layouts",
        "SimuMax's best",
        "measured over the best",
        "our best",
        "measured over the best",
    )
    return Table("layout_simumax_choices", "Measured layouts: the choices", columns, tuple(rows))
