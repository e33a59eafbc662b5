"""Plans between two losses that follow given orders."""

from collections.abc import Sequence

from stagewright.formulations.checking.check import require_valid
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.formulations.schedules.backward_first import Orders, earliest_starts


def backward_first_plan(
    problem: PipelineProblem,
    planner: str,
    stages: Sequence[Stage],
    orders: Orders,
    reductions: Sequence[int] | None = None,
) -> PipelinePlan:
    """The checked plan between two losses that follows ``orders``, everything as early as possible.

    Parameters
    ----------
    orders
        What each device of ``stages`` computes. A backward is split where I and W are in place of
        B. An optimizer step that takes time may be in the order; otherwise it comes directly before
        what its devices compute from the first forward of its stage on.
    reductions
        The stages in the order of their all-reduces. Without it, a device begins those of its
        stages as their gradients are ready; of several at once, the earliest stage first.

    Raises
    ------
    InputError
        If an order does not have the computations of its device, or the devices deadlock.
    InvalidPlan
        If the plan breaks another rule, such as the memory of a device.

    Examples
    --------
    Data parallelism on d0 and d1, a stage for each of three layers, the weight gradients of the
    first two reversed (reverse first-k scheduling with k = 2)::

        row = [parse_action(text) for text in "2I0 2W0 1I0 0I0 0W0 1W0 0F0 1F0 2F0".split()]
        stages = [Stage((i, i + 1), ("d0", "d1")) for i in range(3)]
        backward_first_plan(problem, "ooo", stages, {"d0": row, "d1": row}, reductions=(2, 0, 1))

    """
    starts = earliest_starts(problem, stages, orders, reductions)
    plan = assemble(problem, planner, stages, starts, begins="backward")
    require_valid(problem, plan)
    return plan
