"""Thesis figures 4.6 and 4.11 to 4.18 from the cost model: one picture of nine panels.

``python -m benchmarks.layout_figures`` writes ``docs/layouts.png``. Models and layouts are those of
the paper's scripts (Megatron-LM, examples/academic_paper_scripts/sc21/run_figure_*.sh). The printed
curves are pictures, so that only what the text says of them can be compared.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.layout_runs import compiled, gpt, gpt_problem, of_2021, thesis_flops
from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.parts import Parts
from stagewright.formulations.parallelism.schedules import order_codes
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.machines.fabric import Fabric

PICTURE = Path(__file__).parents[1] / "docs/layouts.png"


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines over the labels of the x axis."""

    title: str
    x_label: str
    y_label: str
    ticks: tuple[str, ...]
    lines: dict[str, list[float]]


def estimate(problem: TrainingProblem, layout: Layout) -> Estimate:
    """The cost model's, with the compiled walk."""
    return evaluate(problem, layout, compiled)


def rate(problem: TrainingProblem, layout: Layout) -> float:
    """TFLOP/s per GPU as the thesis counts them (equation 4.2)."""
    seconds = estimate(problem, layout).seconds
    return thesis_flops(problem) / seconds / problem.fabric.devices / 1e12


def problem(shape: tuple[int, int, int], batch: int, gpus: int) -> TrainingProblem:
    """A GPT of (layers, hidden size, heads) on Selene in 2021."""
    return of_2021(gpt_problem(gpt(*shape), batch, gpus))


RATE = "TFLOP/s per GPU"
GPT_5B, GPT_91B, GPT_145B = (32, 3840, 32), (32, 15360, 128), (80, 12288, 96)
GPT_162B, GPT_175B = (32, 20480, 128), (96, 12288, 96)


def bubbles() -> Panel:
    """Figure 4.6: the flush's share by the data-parallel size; (n - d) / b' of the ideal time."""
    sizes = (1, 2, 4, 8, 16, 32, 64)
    lines = {}
    for gpus, ratio in ((32, 32), (32, 128), (128, 128), (128, 512)):
        found = [_bubble(gpus, ratio, d) if d < gpus else nan for d in sizes]
        lines[f"n = {gpus}, b' = {ratio}"] = found
    return Panel(
        "4.6: time in the flush over ideal", "data-parallel size", "share", _words(sizes), lines
    )


def _bubble(gpus: int, ratio: int, data: int) -> float:
    """Of stages of one layer each, on links that take no time, as equation (n - d) / b' assumes."""
    asked = problem((gpus, 16384, 128), ratio, gpus)
    tiny = replace(asked.architecture, vocabulary=1)
    asked = replace(asked, architecture=tiny, fabric=_free(asked))
    found = estimate(asked, Layout(pipeline=gpus // data, data=data, recompute="full"))
    return found.bubble_seconds / (found.pipeline_seconds - found.bubble_seconds)


def _free(asked: TrainingProblem) -> Fabric:
    levels = tuple(
        replace(level, bytes_per_second=1e15, latency_seconds=0.0) for level in asked.fabric.levels
    )
    return replace(asked.fabric, levels=levels)


def weak_scaling() -> Panel:
    """Figure 4.11: three layers a stage, hidden size 20480, t 8, one chunk."""
    stages = (1, 2, 4, 8)
    lines = {
        f"batch {batch}": [
            rate(
                problem((3 * p, 20480, 128), batch, 8 * p),
                Layout(pipeline=p, tensor=8, recompute="full"),
            )
            for p in stages
        ]
        for batch in (8, 128)
    }
    return Panel("4.11: pipelines, weak scaling", "pipeline size", RATE, _words(stages), lines)


BATCHES = (12, 24, 36, 48, 60)


def interleaved() -> Panel:
    """Figure 4.12: GPT-3 on 96 GPUs, t 8, p 12; four chunks of two layers, or one."""
    lines = {
        name: [
            rate(
                problem(GPT_175B, batch, 96),
                Layout(pipeline=12, tensor=8, chunks=chunks, recompute="full"),
            )
            for batch in BATCHES
        ]
        for name, chunks in (("interleaved", 4), ("not interleaved", 1))
    }
    return Panel("4.12: interleaving, 175B", "batch", RATE, _words(BATCHES), lines)


def _grid(
    title: str,
    shape: tuple[int, int, int],
    batches: Iterable[int],
    layouts: dict[str, Layout],
    x_label: str,
) -> Panel:
    lines = {
        f"batch {batch}": [
            rate(problem(shape, batch, layout.ranks), layout) for layout in layouts.values()
        ]
        for batch in batches
    }
    return Panel(title, x_label, RATE, tuple(layouts), lines)


def pipeline_or_tensor() -> Panel:
    """Figure 4.13: a model of 162B on 64 GPUs."""
    layouts = {
        f"({p}, {64 // p})": Layout(pipeline=p, tensor=64 // p, recompute="full")
        for p in (2, 4, 8, 16, 32)
    }
    return _grid("4.13: pipeline or tensor, 162B", GPT_162B, (32, 128), layouts, "(p, t)")


def pipeline_or_data() -> Panel:
    """Figure 4.14: a model of 5.9B on 64 GPUs."""
    layouts = {
        f"({p}, {64 // p})": Layout(pipeline=p, data=64 // p, recompute="full")
        for p in (2, 4, 8, 16, 32)
    }
    return _grid("4.14: pipeline or data, 5.9B", GPT_5B, (32, 128, 512), layouts, "(p, d)")


def tensor_or_data() -> Panel:
    """Figure 4.15: the same model."""
    layouts = {
        f"({t}, {64 // t})": Layout(tensor=t, data=64 // t, recompute="full")
        for t in (2, 4, 8, 16, 32)
    }
    return _grid("4.15: tensor or data, 5.9B", GPT_5B, (32, 128, 512), layouts, "(t, d)")


def microbatches() -> Panel:
    """Figure 4.16: a model of 91B on 64 GPUs, (t, p) = (8, 8)."""
    layouts = {
        str(b): Layout(pipeline=8, tensor=8, microbatch=b, recompute="full") for b in (1, 2, 4, 8)
    }
    return _grid("4.16: microbatch size, 91B", GPT_91B, (128, 512), layouts, "microbatch")


def recomputation() -> Panel:
    """Figure 4.17: a model of 145B on 128 GPUs, (t, p) = (8, 16); where it fits in memory."""
    batches = tuple(2**i for i in range(9))
    lines = {}
    for name, recompute in (("recomputed", "full"), ("kept", "none")):
        layout = Layout(pipeline=16, tensor=8, recompute=recompute)  # type: ignore[arg-type]
        found = [estimate(problem(GPT_145B, batch, 128), layout) for batch in batches]
        lines[name] = [
            batch / one.seconds if one.fits else nan
            for batch, one in zip(batches, found, strict=True)
        ]
    return Panel("4.17: recomputation, 145B", "batch", "sequences/s", _words(batches), lines)


def scatter_gather() -> Panel:
    """Figure 4.18: GPT-3 interleaved on 96 GPUs.

    Without the optimisation every tensor rank sends the whole output. With d = 1 a stage's output
    is all that leaves a server, so that it is a network of an eighth of the bandwidth.
    """
    layout = Layout(pipeline=12, tensor=8, chunks=4, recompute="full")
    lines = {}
    for name, share in (("scatter/gather", 1), ("whole tensors", 8)):
        asked = [problem(GPT_175B, batch, 96) for batch in BATCHES]
        lines[name] = [_waiting(replace(one, fabric=_slower(one, share)), layout) for one in asked]
    return Panel("4.18: scatter/gather, 175B", "batch", RATE, _words(BATCHES), lines)


def _waiting(asked: TrainingProblem, layout: Layout) -> float:
    """The rate if a stage computes nothing while its output is on its way.

    So it is in Megatron-LM's interleaved schedule of 2021; the model assumes that it computes.
    """
    parts = Parts(asked, layout)
    forward, backward = (each + parts.hop for each in parts.seconds)
    weight, saved = parts.weight_seconds, parts.saved
    codes = order_codes("1f1b", layout.pipeline, layout.chunks, parts.microbatches)
    finish, _ = compiled(
        codes, parts.stage_of, parts.microbatches, forward, backward, weight, parts.paired,
        np.zeros_like(forward), saved,
    )  # fmt: skip
    seconds = float(finish.max()) + parts.longest_update
    return thesis_flops(asked) / seconds / asked.fabric.devices / 1e12


def _slower(asked: TrainingProblem, share: int) -> Fabric:
    inside, outside = asked.fabric.levels
    slow = replace(outside, bytes_per_second=outside.bytes_per_second / share)
    return replace(asked.fabric, levels=(inside, slow))


def _words(values: Iterable[int]) -> tuple[str, ...]:
    return tuple(map(str, values))


PANELS: tuple[Callable[[], Panel], ...] = (
    bubbles,
    weak_scaling,
    interleaved,
    pipeline_or_tensor,
    pipeline_or_data,
    tensor_or_data,
    microbatches,
    recomputation,
    scatter_gather,
)


def draw(axes: Axes, panel: Panel) -> None:
    """One panel."""
    for marker, (name, values) in zip("osd^", panel.lines.items(), strict=False):
        axes.plot(panel.ticks, values, marker=marker, label=name)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.grid(alpha=0.3)
    axes.legend()


def main() -> None:
    """Write the picture."""
    figure = Figure(figsize=(15, 12), layout="constrained")
    for axes, panel in zip(figure.subplots(3, 3).flat, PANELS, strict=True):
        draw(axes, panel())
    figure.savefig(PICTURE, dpi=90)


if __name__ == "__main__":
    main()
