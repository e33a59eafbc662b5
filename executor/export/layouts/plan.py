"""A layout as the documents of a pipeline plan, which is checked, simulated, drawn and run here."""

from collections.abc import Callable, Sequence

from stagewright.executor.export.layouts.rules import Framework, FrameworkRule
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.documents import to_json

Certify = Callable[[PipelineProblem, PipelinePlan], PipelinePlan]
"""Adds a certificate to a plan of a problem."""


def documents(
    problem: TrainingProblem,
    layout: Layout,
    names: Sequence[str] | None = None,
    certify: Certify | None = None,
) -> dict[str, str]:
    """Model, cluster and plan, certified if so asked; see ``formulations.parallelism.lowering``.

    Raises InputError if a pipeline plan cannot express the layout, or the plan does not fit in
    memory.
    """
    from stagewright.formulations.parallelism.lowering import lowered

    asked, plan = lowered(problem, layout, names)
    if certify is not None:
        plan = certify(asked, plan)
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
