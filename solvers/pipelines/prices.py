"""Functions of the price list, compiled for kernels."""

from stagewright.formulations.prices.collectives import all_reduce_pace, paced_seconds
from stagewright.solvers.pipelines.compiled import lean

ring_pace = lean(all_reduce_pace)
paced = lean(paced_seconds)
