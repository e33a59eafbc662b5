"""The A100's rates, and the bandwidths of its servers, by least squares on published iterations.

``python -m benchmarks.layout_fit`` prints the values that ``graphs/machines/rates.py`` and
``networks.py`` have. The residuals are logarithms of predicted over measured seconds, one per run;
weak priors hold what the runs hardly tell (the times of launches and messages).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numba import njit
from scipy.optimize import least_squares

from benchmarks.layout_runs import Run, fitted_runs, with_rates
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.pipeline_time import walk
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.machines.devices import REACHED, Reached
from stagewright.graphs.machines.fabric import Fabric
from stagewright.graphs.machines.networks import fabric_of_kind

compiled = njit(walk)

# Of each parameter: a prior value, least, most, and the prior's weight: a factor e costs as much as
# a run that is off by this share.
PARAMETERS = {
    "matmul": (0.78, 0.5, 0.98, 0.05),
    "half_flops": (1e10, 1e8, 2e11, 0.005),
    "memory": (0.8, 0.5, 0.95, 0.1),
    "launch_seconds": (5e-6, 1e-7, 3e-5, 0.02),
    "nvlink_bytes_per_second": (230e9, 150e9, 290e9, 0.1),
    "nvlink_latency_seconds": (3e-6, 1e-6, 2e-5, 0.02),
    "infiniband_bytes_per_second": (20e9, 10e9, 25e9, 0.1),
}
FURTHER_LATENCY = 2e-6  # of a message that leaves the server
_PRIOR, _LEAST, _MOST, _WEIGHT = np.array([*PARAMETERS.values()]).T


def machine(values: Floats) -> tuple[Reached, Fabric]:
    """Rates and links of the parameters' values."""
    matmul, half, memory, launch, nvlink, latency, infiniband = map(float, values)
    inside, outside = fabric_of_kind("a100-80gb", 16).levels
    levels = (
        replace(inside, bytes_per_second=nvlink, latency_seconds=latency),
        replace(outside, bytes_per_second=infiniband, latency_seconds=latency + FURTHER_LATENCY),
    )
    fabric = Fabric("a100-80gb", 80e9, levels)
    return Reached(matmul, half, memory, launch, "a fit", REACHED["a100"].dispatch_seconds), fabric


def predicted(run: Run, values: Floats | None = None) -> float:
    """Seconds of a run's iteration, with other values than the presets' if given."""
    problem = run.problem if values is None else with_rates(run.problem, *machine(values))
    return evaluate(problem, run.layout, compiled).seconds


def error(run: Run, values: Floats | None = None) -> float:
    """Predicted over measured seconds, less one."""
    return predicted(run, values) / run.seconds - 1


def fit(runs: Sequence[Run]) -> Floats:
    """The parameters' values that fit the runs best."""

    def residuals(logarithms: Floats) -> Floats:
        values = np.exp(logarithms)
        measured = [np.log1p(error(run, values)) for run in runs]
        return np.array([*measured, *(_WEIGHT * (logarithms - np.log(_PRIOR)))])

    bounds = (np.log(_LEAST), np.log(_MOST))
    found = least_squares(residuals, np.log(_PRIOR), bounds=bounds, diff_step=1e-3)
    return np.exp(found.x)


def left_out(runs: Sequence[Run]) -> dict[str, float]:
    """The error of every run with values fitted to the runs of all other models."""
    errors = {}
    for model in dict.fromkeys(run.model for run in runs):
        values = fit([run for run in runs if run.model != model])
        errors |= {run.name: error(run, values) for run in runs if run.model == model}
    return errors


if __name__ == "__main__":
    for name, value in zip(PARAMETERS, fit(fitted_runs()), strict=True):
        print(f"{name}: {value:.4g}")
