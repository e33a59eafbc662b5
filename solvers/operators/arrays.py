"""A problem's arrays as compiled kernels take them."""

from typing import NamedTuple

import numpy as np

from stagewright.formulations.operators.problem import OperatorProblem
from stagewright.graphs.documents.arrays import Floats, Ints


class Arrays(NamedTuple):
    """The fields of the same name of :class:`OperatorProblem`, and its inputs and outputs."""

    seconds: Floats
    maker: Ints
    first_reader: Ints
    reader: Ints
    first_input: Ints
    input: Ints
    first_output: Ints
    sent_bytes: Floats
    held_bytes: Floats
    latency: Floats
    seconds_per_byte: Floats
    memory: Floats
    group: Ints
    group_bytes: Floats
    exclusive: bool


def arrays_of(problem: OperatorProblem) -> Arrays:
    """The arrays of ``problem``, without copies where they are contiguous."""
    contiguous = {
        name: np.ascontiguousarray(getattr(problem, name))
        for name in Arrays._fields
        if name not in ("first_input", "input", "exclusive")
    }
    first, tensors = problem.inputs
    return Arrays(
        first_input=first,
        input=tensors,
        exclusive=problem.contention == "exclusive",
        **contiguous,
    )
