"""Which layouts a model, a batch and a fabric allow."""

from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_MICROBATCHES, require_count
from stagewright.graphs.models.shards import require_split


def require_layout(problem: TrainingProblem, layout: Layout) -> None:
    """Raise in one line if a rule does not hold.

    Raises
    ------
    InputError
        With the rule and, where there are some, the nearest values that work.
    """
    if layout.ranks != problem.fabric.devices:
        raise InputError(
            f"p x t x c x d = {layout.pipeline} x {layout.tensor} x {layout.context} x "
            f"{layout.data} is {layout.ranks} ranks; there are {problem.fabric.devices} devices"
        )
    require_split(problem.architecture, problem.sequence, layout.split)
    layout.recomputed_of_stages(problem.architecture.layers)
    microbatches = layout.microbatches(problem.batch)
    require_count(microbatches, "the number of microbatches", MAX_MICROBATCHES)
    if layout.chunks > 1 and microbatches % layout.pipeline:
        raise InputError(
            f"{layout.chunks} chunks per rank need a multiple of {layout.pipeline} microbatches "
            f"(the pipeline), there are {microbatches}"
        )
    if layout.recompute == "selective" and problem.attention == "fused":
        raise InputError(
            "selective recomputation repeats the attention, which the fused kernel does anyway; "
            "choose none or full"
        )
