"""Layouts of a transformer's training, for users of Python."""

from typing import TYPE_CHECKING

from stagewright.formulations.forms.answers import StopToken

if TYPE_CHECKING:
    from stagewright.formulations.parallelism.layout import Layout
    from stagewright.formulations.parallelism.training import TrainingProblem
    from stagewright.service.layouts import LayoutAnswer
    from stagewright.solvers.parallelism.space import Space


def train_plan(
    problem: "TrainingProblem",
    space: "Space | None" = None,
    *,
    top: int = 10,
    explain: "Layout | None" = None,
    framework: str | None = None,
    by_stage: bool = True,
    front: bool = False,
    what_if: bool = False,
    stop: StopToken | None = None,
) -> "LayoutAnswer":
    """Find how to divide the training of a transformer among devices.

    Parameters
    ----------
    problem
        See :func:`training_problem`.
    space
        The layouts to consider; None for all that the model, the batch and the devices allow.
    top
        How many of the best layouts.
    explain
        A layout to compare with the best: which rule it breaks, what does not fit, what is longer.
    framework
        Only layouts that can be exported to it, such as ``megatron``.
    by_stage
        After the search, find blocks and recomputed blocks of every stage of plain pipelines.
    front, what_if
        Find the fastest layouts with less memory, and with better machines, too.
    stop
        Ends the search once it is set; the answer is then the best so far.

    Returns
    -------
    LayoutAnswer
        ``plan`` (see :func:`save_layout`; None if no layout fits), ``rows`` of the best layouts
        with stages that are alike, ``refined`` ones whose stages differ, status, bound and gap, and
        what the bound speaks of.

    Raises
    ------
    InputError
        If no layout obeys the rules of the model, the batch and the devices.
    """
    from stagewright.service.layouts import LayoutRequest, find_layouts
    from stagewright.solvers.parallelism.space import Space

    request = LayoutRequest.of(
        problem=problem,
        space=space or Space(),
        top=top,
        explain=explain,
        framework=framework,
        by_stage=by_stage,
        front=front,
        what_if=what_if,
    )
    return find_layouts(request, stop)
