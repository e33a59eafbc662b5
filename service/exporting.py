"""Files of a plan or a layout for a framework; a layout becomes a plan with a certificate."""

from typing import TYPE_CHECKING

from stagewright.executor.export import Files
from stagewright.executor.export import export as written
from stagewright.executor.export.options import FormatOptions

if TYPE_CHECKING:
    from stagewright.formulations.parallelism.document import LayoutPlan
    from stagewright.formulations.plans.pipeline import PipelineProblem
    from stagewright.formulations.plans.plan import PipelinePlan

SECONDS = 5.0  # for the bounds on a layout's plan


def export(
    plan: "PipelinePlan | LayoutPlan", to: str, options: FormatOptions | None = None
) -> Files:
    """As :func:`stagewright.executor.export.export`.

    The plan of a layout has bounds on plans of its tensor degree, which are computed here.
    """
    return written(plan, to, options, _certified)


def _certified(problem: "PipelineProblem", plan: "PipelinePlan") -> "PipelinePlan":
    from stagewright.solvers.planners.steps.reporting import with_certificate

    return with_certificate(problem, plan, SECONDS)
