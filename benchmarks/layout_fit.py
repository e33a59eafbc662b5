"""Predicted seconds of published iterations."""

from numba import njit

from benchmarks.layout_runs import Run
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.pipeline_time import walk

compiled = njit(walk)


def predicted(run: Run) -> float:
    """Seconds of a run's iteration."""
    return evaluate(run.problem, run.layout, compiled).seconds


def error(run: Run) -> float:
    """Predicted over measured seconds, less one."""
    return predicted(run) / run.seconds - 1
