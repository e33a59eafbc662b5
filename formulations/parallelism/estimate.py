"""Time and memory of a layout, from first principles."""

from dataclasses import dataclass

import numpy as np

from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.parts import Parts
from stagewright.formulations.parallelism.pipeline_time import RankMemory, Walk, walk
from stagewright.formulations.parallelism.schedules import order_codes, positions
from stagewright.formulations.parallelism.training import TrainingProblem, require_layout


@dataclass(frozen=True)
class Estimate:
    """Time and memory of a layout; ``memory`` is by the position in the pipeline.

    ``seconds`` is the sum of ``pipeline_seconds`` (the makespan of all microbatches),
    ``gradient_seconds`` and ``update_seconds``. On the busiest rank the first is the sum of
    ``compute_seconds``, ``exchange_seconds`` (tensor, context and expert exchanges, without what
    pairs hide of them),
    ``repeated_seconds`` (recomputation, with its exchanges), ``zero_seconds`` (waiting for ZeRO's
    exchanges and for copies to the host with every microbatch) and ``bubble_seconds``.
    """

    layout: Layout
    microbatches: int
    seconds: float
    pipeline_seconds: float
    compute_seconds: float
    exchange_seconds: float
    repeated_seconds: float
    zero_seconds: float
    bubble_seconds: float
    gradient_seconds: float
    update_seconds: float
    memory: tuple[RankMemory, ...]
    memory_bytes: float
    model_flops_per_second: float
    mfu: float

    @property
    def peak_bytes(self) -> float:
        """The most that any rank holds."""
        return max(one.total for one in self.memory)

    @property
    def fits(self) -> bool:
        """Whether every rank's peak is within its memory."""
        return self.peak_bytes <= self.memory_bytes


def evaluate(problem: TrainingProblem, layout: Layout, run: Walk = walk) -> Estimate:
    """Time and memory of a layout, whether or not it fits.

    ``run`` is :func:`walk` or a compiled form of it.

    Raises
    ------
    InputError
        If a rule of the layout does not hold for this model, batch or fabric.
    """
    require_layout(problem, layout)
    parts = Parts(problem, layout)
    forward, backward = parts.seconds
    finish, kept = run(
        order_codes(layout.schedule, parts.ranks, parts.chunks, parts.microbatches),
        parts.stage_of,
        parts.microbatches,
        forward,
        backward,
        parts.weight_seconds,
        parts.paired,
        parts.hops,
        parts.saved,
    )
    # A rank's sends take their time too: if they are more than its work, all wait for them.
    finish = np.maximum(finish, parts.sending_seconds)
    end = float((finish + parts.reductions).max())
    makespan, busiest = float(finish.max()), int(np.argmax(parts.busy))
    worked = parts.of_time(busiest, lambda one: one.forward + one.backward)
    overlapped = float(parts.overlapped[busiest])
    exchanged = parts.of_time(busiest, lambda one: one.exchange)
    repeated = parts.of_time(busiest, lambda one: one.repeated)
    seconds = end + parts.longest_update
    rate = problem.model_flops / seconds
    return Estimate(
        layout=layout,
        microbatches=parts.microbatches * layout.form.copies,
        seconds=seconds,
        pipeline_seconds=makespan,
        compute_seconds=worked - exchanged - repeated,
        exchange_seconds=exchanged - overlapped,
        repeated_seconds=repeated,
        zero_seconds=float(parts.busy[busiest]) + overlapped - worked,
        bubble_seconds=makespan - float(parts.busy[busiest]),
        gradient_seconds=end - makespan,
        update_seconds=parts.longest_update,
        memory=tuple(
            parts.memory(r, float(kept[r])) for r in positions(layout.schedule, layout.pipeline)
        ),
        memory_bytes=problem.fabric.memory_bytes,
        model_flops_per_second=rate,
        mfu=rate / (problem.peak_flops * problem.fabric.devices),
    )
