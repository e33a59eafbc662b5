"""The peak memory of a layout, rank by rank."""

from stagewright.formulations.parallelism.document import shortages
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.service.answers import Answer
from stagewright.service.layouts.searching import MemoryAnswer, memory_answer
from stagewright.service.requests import Request
from stagewright.solvers.parallelism.tree import compiled_walk


class MemoryRequest(Request):
    """The memory of one layout of a problem."""

    problem: TrainingProblem
    layout: Layout


class LayoutMemoryAnswer(Answer):
    """Peak bytes at every position in the pipeline, and who has how much too little."""

    layout: str
    memory_bytes: float
    ranks: tuple[MemoryAnswer, ...]
    shortages: tuple[str, ...]


def layout_memory(request: MemoryRequest) -> LayoutMemoryAnswer:
    """The memory of a layout, whether or not it fits.

    Raises
    ------
    InputError
        If the layout breaks a rule of the model, the batch or the devices.
    """
    found = evaluate(request.problem, request.layout, compiled_walk())
    return LayoutMemoryAnswer(
        layout=str(request.layout),
        memory_bytes=request.problem.fabric.memory_bytes,
        ranks=tuple(memory_answer(found, rank) for rank in range(len(found.memory))),
        shortages=shortages(found),
    )
