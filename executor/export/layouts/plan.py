"""A layout as the documents of a pipeline plan, which is checked, simulated, drawn and run here."""

from collections.abc import Sequence

from stagewright.executor.export.layouts.rules import Framework, FrameworkRule
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.documents import to_json


def documents(
    problem: TrainingProblem, layout: Layout, names: Sequence[str] | None = None
) -> dict[str, str]:
    """Model, cluster and plan; see ``formulations.parallelism.lowering``.

    Raises InputError if a pipeline plan cannot express the layout, or the plan does not fit in
    memory.
    """
    from stagewright.formulations.parallelism.lowering import lowered

    asked, plan = lowered(problem, layout, names)
    parts = {"model": asked.chain, "cluster": asked.cluster, "plan": plan}
    return {f"{name}.json": to_json(part) for name, part in parts.items()}


def _require(problem: TrainingProblem, layout: Layout, _: str) -> None:
    from stagewright.formulations.parallelism.lowering import require_expressible

    require_expressible(problem, layout)


FRAMEWORK = Framework(
    "a pipeline plan",
    (FrameworkRule("docs/layouts.md, From a layout to a run", _require),),
    documents,
)
