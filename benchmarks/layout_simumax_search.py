"""The search of layouts beside SimuMax's own, on B200 of its configuration.

Both search p, t (dense models) or e (experts), d, and the fewest blocks of every stage that are
recomputed; microbatches have one sample, the optimizer's state is divided over the replicas, and
all stages but the last have as many blocks. Both have the B200's memory less what ours reserves.
"""

import re
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass, replace
from math import ceil
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from benchmarks.layout_simumax import CHECKOUT, Case, configured, folder, predicted, silent
from benchmarks.report import Table
from stagewright.formulations.parallelism.layout import Layout
from stagewright.solvers.parallelism.refining import FoundLayouts, search
from stagewright.solvers.parallelism.space import Space

DEGREES = (1, 2, 4, 8)  # of tensors or experts: its search tries no others


@dataclass(frozen=True, slots=True)
class Task:
    """A model with all its layers on so many GPUs."""

    model: str
    layers: int
    gpus: int
    batch: int

    def case(self, layout: Layout) -> Case:
        """The task in a layout."""
        microbatches = layout.microbatches(self.batch)
        return Case(self.model, self.layers, layout, microbatches)

    @property
    def plain(self) -> Case:
        """The task without any division but of the batch."""
        return self.case(Layout(data=self.gpus, zero=1))


TASKS = (
    Task("llama3_70b", 80, 64, 256),
    Task("llama3_405b", 126, 512, 1024),
    Task("deepseekv2", 60, 128, 1024),
    Task("deepseekv3", 61, 256, 2048),
)


def tables(quick: bool) -> Iterator[Table]:
    """Both searches; nothing without a checkout."""
    if folder() is None:
        print(f"no {CHECKOUT}: a folder of a checkout of github.com/MooreThreads/SimuMax")
        return
    rows = tuple(_row(task) for task in TASKS[: 1 if quick else None])
    columns = (
        "model",
        "GPUs",
        "batch",
        "best of its search",
        "its s, found in",
        "by ours",
        "our best, proved",
        "by SimuMax",
        "by ours, found in",
        "our best by SimuMax over its best",
    )
    yield Table("layout_simumax_search", "Layouts that either search finds", columns, rows)


def _row(task: Task) -> tuple[str, ...]:
    theirs, its_seconds, its_time = theirs_best(task)
    ours = ours_best(task)
    (best,) = ours.best
    assert ours.proved
    by_it, held = predicted(task.case(best.layout))
    return (
        task.model,
        str(task.gpus),
        str(task.batch),
        str(theirs),
        f"{its_seconds:.2f}, {its_time:.1f} s",
        f"{task.case(theirs).estimate().seconds:.2f}",
        str(best.layout),
        f"{by_it:.2f}, {held / 1e9:.0f} GB",
        f"{best.seconds:.2f}, {ours.seconds:.1f} s",
        f"{by_it / its_seconds - 1:+.1%}",
    )


def theirs_best(task: Task) -> tuple[Layout, float, float]:
    """The best of its search, its seconds by its evaluator, and those the search takes."""
    problem, started = task.plain.problem(), perf_counter()
    dense = problem.architecture.experts is None
    # It removes a folder ./tmp before every evaluation.
    with silent(), TemporaryDirectory() as scratch, chdir(scratch):
        made = configured(task.plain)
        made.system.accelerator.mem_gbs = problem.fabric.memory_bytes / 2**30
        found = made.search_best_parallel_strategy(
            world_size=task.gpus,
            gmi_error=problem.reserve_bytes / 2**30,
            micro_batch_size=1,
            global_batch_size=task.batch,
            all_search_result={},
            tp_search_list=list(DEGREES) if dense else [1],
            ep_search_list=[1] if dense else list(DEGREES),
            recompute_search_type=["no_recompute", "full_block"],
            use_reserved_memory=False,
            verbose=False,
        )
    took = perf_counter() - started
    layout = _layout(task, found)
    return layout, predicted(task.case(layout))[0], took


def _layout(task: Task, found: dict[str, Any]) -> Layout:
    words = f"{found['parallelism']} {found['recompute_status']}"
    p, t, e = (int(re.findall(rf"[ .]{one}(\d+)", words)[0]) for one in ("pp", "tp", "ep"))
    again = sum(map(int, re.findall(r"recompute_layer_num=(\d+)", words)))
    layout = Layout(
        pipeline=p,
        tensor=t,
        data=task.gpus // (p * t),
        expert=e,
        zero=1,
        sequence_parallel=t > 1,
        recompute="full" if again else "none",
        recompute_blocks=again or None,
    )
    return with_short_end(layout, task.layers)


def with_short_end(layout: Layout, blocks: int) -> Layout:
    """As many blocks in every stage but the last, which has the rest."""
    each = ceil(blocks / layout.pipeline)
    if each * layout.pipeline == blocks:
        return layout
    return replace(layout, last_blocks=blocks - each * (layout.pipeline - 1))


def ours_best(task: Task) -> FoundLayouts:
    """Our best layout of the space that both search."""
    problem = task.plain.problem()
    dense = problem.architecture.experts is None
    space = Space(
        context=(1,),
        tensor=DEGREES if dense else (1,),
        expert=(1,) if dense else DEGREES,
        microbatch=(1,),
        chunks=1,
        schedules=("1f1b",),
        zero=(1,),
        placements=("data-inside",),
    )

    def accept(layout: Layout) -> bool:
        return has_short_end(layout, task.layers)

    return search(problem, space, keep=1, accept=accept)


def has_short_end(layout: Layout, blocks: int) -> bool:
    """Whether the stages are those of :func:`with_short_end`."""
    every = layout.blocks_of_stages(blocks)
    each = ceil(blocks / layout.pipeline)
    return set(every[:-1]) <= {each} and every[-1] >= 1
