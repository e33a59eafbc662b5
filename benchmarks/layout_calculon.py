"""Calculon's evaluator and search (github.com/calculon-ai/calculon, caa4b11), unchanged.

The environment's ``CALCULON`` is the folder of a checkout; nothing of it is copied here. What its
log would say of single executions is dropped, which is faster; the search keeps it as it is.
"""

import copy
import importlib
import itertools
import json
import multiprocessing
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from stagewright.formulations.parallelism.layout import Layout
from stagewright.graphs.models.shards import Recompute

CHECKOUT = "CALCULON"
SYSTEM = "systems/a100_80g.json"

Execution = dict[str, Any]
Task = tuple[Any, ...]

_RECOMPUTED: dict[Recompute, str] = {"none": "none", "selective": "attn_only", "full": "full"}
PLAIN: Execution = {
    "datatype": "float16",
    "fused_activation": True,
    "attention_type": "multihead",
    "tensor_par_overlap": "none",
    "data_par_overlap": False,
    "weight_offload": False,
    "activations_offload": False,
    "optimizer_offload": False,
    "training": True,
}
"""What is fixed in the space that both know."""


def folder() -> Path | None:
    """The checkout, if there is one."""
    found = Path(os.environ.get(CHECKOUT, ""))
    return found if (found / SYSTEM).is_file() else None


def read(path: str) -> Any:
    """A JSON file of the checkout."""
    return json.loads((_checkout() / path).read_text())


def _checkout() -> Path:
    found = folder()
    assert found is not None, f"{CHECKOUT} names no checkout"
    return found


@cache
def package() -> ModuleType:
    """Calculon.

    It imports pandas for one command and psutil for a default, neither of which is used here.
    """
    for name in ("pandas", "psutil"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            empty = ModuleType(name)
            empty.cpu_count = lambda logical: os.cpu_count()  # type: ignore[attr-defined]
            sys.modules[name] = empty
    sys.path.insert(0, str(_checkout()))
    return importlib.import_module("calculon")


class _Silent:
    """A log that drops all."""

    def debug(self, *_: object) -> None:
        """Drop it."""

    def info(self, *_: object) -> None:
        """Drop it."""


@dataclass(frozen=True)
class Peer:
    """Calculon's view of a model on a number of GPUs with the largest batch."""

    model: str
    gpus: int
    batch: int

    @property
    def application(self) -> Any:
        """The model."""
        return _application(self.model)

    def evaluate(self, execution: Execution, *, free: bool = False) -> Any | None:
        """The evaluated execution, None if it is not possible; ``free``: to send takes no time."""
        llm = package().Llm
        made = llm(self.application, _Silent())
        system = _system(free)
        try:
            made.compile(system, llm.Execution.from_json(execution))
            made.run(system)
        except llm.Error:
            return None
        return made

    def best(self, layout: Layout) -> Any | None:
        """A layout on the networks that are best for it, None if it does not fit in memory."""
        found = map(self.evaluate, executions(layout, self.batch))
        possible = [one for one in found if one is not None]
        return min(possible, key=seconds, default=None)

    def fits(self, layout: Layout) -> bool:
        """Whether a layout fits in memory, which the networks do not matter for."""
        return self.evaluate(next(executions(layout, self.batch)), free=True) is not None

    def layouts(self) -> Iterator[Layout]:
        """The space that both know.

        That is Calculon's, with the batch itself where it takes the largest multiple of d below it,
        and where chunks have a multiple of p microbatches.
        """
        llm, app = package().Llm, self.application
        for t in llm.get_all_tensor_parallelisms(self.gpus, app.hidden, app.attn_heads):
            for p in llm.get_all_pipeline_parallelisms(self.gpus, t, app.num_blocks):
                d = self.gpus // (t * p)
                if self.batch % d == 0:
                    yield from self._of_degrees(p, t, d)

    def _of_degrees(self, p: int, t: int, d: int) -> Iterator[Layout]:
        llm, app = package().Llm, self.application
        sizes = llm.get_valid_microbatch_sizes(app.seq_size, t, d, self.batch, p)
        chunks = llm.get_valid_pipeline_interleavings(app.num_blocks, p)
        for b, v in itertools.product(sizes, chunks):
            if v > 1 and self.batch // (d * b) % p:
                continue
            zeros, parallel = (0, 1)[: 1 + (d > 1)], (False, True)[: 1 + (t > 1)]
            for zero, again, split in itertools.product(zeros, _RECOMPUTED, parallel):
                yield Layout(
                    pipeline=p,
                    tensor=t,
                    data=d,
                    microbatch=b,
                    chunks=v,
                    recompute=again,
                    zero=zero,
                    sequence_parallel=split,
                )

    def optimum(self) -> "Optimum":
        """The best layout of the space that both know, by Calculon's evaluator.

        A layout's bound is its time where nothing takes time to send: each of Calculon's times
        grows with those of the networks. Layouts are evaluated by their bound.
        """
        started = time.perf_counter()
        bounds = []
        layouts = [*self.layouts()]
        for layout in layouts:
            first = next(executions(layout, self.batch))
            found = self.evaluate(first, free=True)
            if found is not None:
                bounds.append((seconds(found), layout))
        bounds.sort(key=lambda one: one[0])
        least, best, evaluated = float("inf"), None, 0
        for bound, layout in bounds:
            if bound >= least:
                break
            evaluated += 1
            found = self.best(layout)
            if found is not None and seconds(found) < least:
                least, best = seconds(found), layout
        assert best is not None
        return Optimum(
            best, least, len(layouts), len(bounds), evaluated, time.perf_counter() - started
        )


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best layout by an evaluator; of ``layouts`` so many fit, and ``evaluated`` had to be."""

    layout: Layout
    iteration_seconds: float
    layouts: int
    fitting: int
    evaluated: int
    seconds: float


def seconds(found: Any) -> float:
    """Of an iteration."""
    return float(found.get_total_time())


def executions(layout: Layout, batch: int) -> Iterator[Execution]:
    """A layout on every assignment of its dimensions to networks.

    Without sequence parallelism a tensor rank sends its part of a stage's output, with it the
    inputs are gathered again in the backward, as in Megatron-LM.
    """
    p, t, d = layout.pipeline, layout.tensor, layout.data
    plain = "p2p_rs_ag" if p > 1 and t > 1 else "ar"
    fixed = PLAIN | {
        "num_procs": layout.ranks,
        "tensor_par": t,
        "pipeline_par": p,
        "data_par": d,
        "batch_size": batch,
        "microbatch_size": layout.microbatch,
        "pipeline_interleaving": layout.chunks,
        "optimizer_sharding": layout.zero == 1,
        "activation_recompute": _RECOMPUTED[layout.recompute],
        "tensor_par_comm_type": "rs_ag" if layout.sequence_parallel else plain,
        "seq_par_ag_redo": layout.sequence_parallel and layout.recompute != "full",
    }
    nets = [range(2 if degree > 1 else 1) for degree in (t, p, d)]
    for tensor, pipeline, data in itertools.product(*nets):
        yield fixed | {"tensor_par_net": tensor, "pipeline_par_net": pipeline, "data_par_net": data}


def words(of: Execution) -> str:
    """An execution in the words of a layout, and what no layout has."""
    kinds = {"none": "", "attn_only": " selective", "full": " full"}
    names = {"weight_offload": "weights", "activations_offload": "activations"}
    names["optimizer_offload"] = "optimizer"
    offloaded = [name for key, name in names.items() if of[key]]
    parallel = " sp" if of["tensor_par_comm_type"] == "rs_ag" else ""
    found = (
        f"p{of['pipeline_par']} t{of['tensor_par']} d{of['data_par']} b{of['microbatch_size']} "
        f"v{of['pipeline_interleaving']}{' zero1' if of['optimizer_sharding'] else ''}"
        f"{kinds[of['activation_recompute']]}{parallel}"
    )
    if of["tensor_par_overlap"] != "none":
        found += f", tensor overlap {of['tensor_par_overlap']}"
    if of["data_par_overlap"]:
        found += ", data overlap"
    return f"{found}, offloaded: {', '.join(offloaded)}" if offloaded else found


@cache
def _application(model: str) -> Any:
    return package().Llm.Application(read(f"models/{model}.json"))


@cache
def _system(free: bool) -> Any:
    found = copy.deepcopy(read(SYSTEM))
    if free:
        for one in found["networks"]:
            # Every assignment of dimensions is allowed.
            one.update(bandwidth=1e30, latency=0.0, processor_usage=0.0, size=1 << 40)
            one.update(must_be_filled=False)
    return package().System(found)


# --- Its search ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Searched:
    """What Calculon's search has found: samples/s and the execution, None where nothing fits yet.

    ``done`` of all its ``executions`` were evaluated in ``seconds``.
    """

    best: tuple[float, Execution] | None
    done: int
    executions: int
    seconds: float


def searched(of: Peer, limit: float, cores: int) -> Searched:
    """Calculon's ``llm-optimal-execution`` with its defaults, ended after ``limit`` seconds.

    Its pool of processes is replaced by one that gives what is done at the limit.
    """
    package()
    module = sys.modules["calculon.llm.optimal_execution"]
    pool = _Pool(limit, cores)
    module.mp = Namespace(Pool=lambda _: pool)  # type: ignore[attr-defined]
    command = module.OptimalExecution.run_command
    with TemporaryDirectory() as scratch:
        output = Path(scratch) / "best.json"
        try:
            command(_Silent(), _arguments(of, cores, output))
        finally:
            module.mp = multiprocessing  # type: ignore[attr-defined]
        best = json.loads(output.read_text()) if output.exists() else {}
    first = next(iter(best.values()), None)
    found = None if first is None else (first["stats"]["sample_rate"], first["execution"])
    return Searched(found, pool.done, executions_of(pool.tasks), pool.seconds)


def _arguments(of: Peer, cores: int, output: Path) -> Namespace:
    checkout = _checkout()
    return Namespace(
        debug=False,
        application=str(checkout / f"models/{of.model}.json"),
        num_procs=of.gpus,
        max_batch_size=of.batch,
        datatype="float16",
        system=str(checkout / SYSTEM),
        output=str(output),
        cpus=cores,
        noneok=True,
        mbs_break=False,
        top_n=1,
        layers=False,
        fused_activation=[True],
        no_tp_overlap=False,
        no_dp_overlap=False,
    )


def executions_of(tasks: list[Task]) -> int:
    """How many executions a search evaluates, by its ``--debug``."""
    search = sys.modules["calculon.llm.optimal_execution"].OptimalExecution.search
    return sum(search(True, *task[1:])[1] for task in tasks)


class _Pool:
    """A pool of processes whose ``starmap`` gives the results that come in time."""

    def __init__(self, limit: float, cores: int) -> None:
        self.limit, self.cores = limit, cores
        self.tasks: list[Task] = []
        self.done, self.seconds = 0, 0.0

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def starmap(self, search: Callable[..., Any], tasks: list[Task]) -> list[Any]:
        """Results until the limit, in the order of the tasks."""
        self.tasks, found, started = tasks, [], time.perf_counter()
        with multiprocessing.get_context("fork").Pool(self.cores) as pool:
            results = [pool.apply_async(search, task) for task in tasks]
            for one in results:
                left = started + self.limit - time.perf_counter()
                try:
                    found.append(one.get(max(left, 0.0)))
                except multiprocessing.TimeoutError:
                    break
        self.seconds = time.perf_counter() - started
        self.done = sum(one[1] for one in found)
        return found
