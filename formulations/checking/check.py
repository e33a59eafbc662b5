"""Check every rule of a pipeline plan from its definition, independent of all planners.

Rules that need no times come first: the plan answers this problem, its stages cover the layers
(`frame`), and every action appears once (`expected`). Then the times: durations and dependencies
(`order`), no overlap on a stream or a channel (`overlaps`), the speed beside the main stream
(`streams`), memory at every instant (`peaks`), the
rules across iterations (`periodic_rules`), and the plan's own predictions and certificate
(`predictions`, `certificates`, `proofs`).
"""

from collections.abc import Iterator, Sequence

from stagewright.formulations.checking.certificates import faults
from stagewright.formulations.checking.expected import broken_actions, overlaps
from stagewright.formulations.checking.frame import broken_frame
from stagewright.formulations.checking.order import (
    broken_dependencies,
    broken_durations,
    broken_sub_streams,
)
from stagewright.formulations.checking.peaks import memory_exceeded
from stagewright.formulations.checking.periodic_rules import broken_iterations, broken_pattern
from stagewright.formulations.checking.predictions import broken_prediction, predicted
from stagewright.formulations.checking.proofs import Verdict, verdicts
from stagewright.formulations.checking.times import PlanTimes, read_times, unrolled_steady
from stagewright.formulations.checking.violations import Violation
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan, Predicted
from stagewright.formulations.plans.plan_class import class_of
from stagewright.formulations.plans.timing import updated_stages
from stagewright.graphs.documents.errors import InvalidPlan

PROOF = "proof"  # the rule that a refuted bound or guarantee breaks


def check(problem: PipelineProblem, plan: PipelinePlan) -> tuple[Violation, ...]:
    """Every broken rule, none if ``plan`` is a valid answer to ``problem``.

    Times are compared with a tolerance of ``RELATIVE_TOLERANCE`` of the iteration. Rules on times
    are checked only if the structure is valid, and the proofs in the certificate only if everything
    else is. A periodic plan is unrolled, without its pauses, for as many microbatches as it takes
    to reach one full steady-state period.
    """
    found = structure(problem, plan) or tuple(_broken_times(read_times(problem, plan), plan))
    return found or refutations(verdicts(problem, plan))


def refutations(found: Sequence[Verdict]) -> tuple[Violation, ...]:
    """The bounds and guarantees that do not follow from their arguments, as broken rules."""
    return tuple(
        Violation(
            PROOF,
            f"certificate.{one.place}",
            f"{one.seconds:.9g} s by {one.name!r} is refuted: {one.reason}",
        )
        for one in found
        if one.verdict == "refuted"
    )


def require_valid(problem: PipelineProblem, plan: PipelinePlan) -> float:
    """The iteration time in seconds, recomputed from the starts and the cost model.

    Raises
    ------
    InvalidPlan
        With the first broken rule.
    """
    require_structure(problem, plan)
    times = read_times(problem, plan)
    for violation in _broken_times(times, plan):
        raise InvalidPlan(str(violation))
    return times.cost_seconds


def predict(problem: PipelineProblem, plan: PipelinePlan) -> Predicted:
    """Predictions of the cost model for the plan, computed from its actions.

    Raises
    ------
    InvalidPlan
        If actions are missing or misplaced. Start and finish times are not checked.
    """
    require_structure(problem, plan)
    return predicted(read_times(problem, plan))


def structure(problem: PipelineProblem, plan: PipelinePlan) -> tuple[Violation, ...]:
    """The broken rules that need no times."""
    if isinstance(plan.schedule, PeriodicSchedule):
        broken = tuple(broken_frame(problem, plan)) or tuple(broken_pattern(plan, plan.schedule))
        return broken or tuple(
            broken_actions(*unrolled_steady(problem, plan, plan.schedule), frozenset())
        )
    broken = tuple(broken_frame(problem, plan))
    updated = updated_stages(problem, plan.stages, plan.weight_rule) if not broken else frozenset()
    return broken or tuple(broken_actions(problem, plan, updated))


def require_structure(problem: PipelineProblem, plan: PipelinePlan) -> None:
    """Raise InvalidPlan with the first broken rule that needs no times."""
    for violation in structure(problem, plan):
        raise InvalidPlan(str(violation))


def _broken_times(times: PlanTimes, plan: PipelinePlan) -> Iterator[Violation]:
    yield from broken_durations(times)
    yield from broken_sub_streams(times)
    yield from broken_dependencies(times)
    yield from overlaps(times)
    yield from memory_exceeded(times)
    if times.schedule is not None:
        yield from broken_iterations(times.problem, plan, times.schedule, times.tolerance)
    if plan.predicted is not None:
        yield from broken_prediction(predicted(times), plan.predicted)
    yield from _broken_certificate(times, plan)


def _broken_certificate(times: PlanTimes, plan: PipelinePlan) -> Iterator[Violation]:
    """The certificate is about this plan's cost, and its arithmetic is right."""
    if plan.certificate is None:
        return
    for place, message in faults(
        plan.certificate, class_of(plan), times.cost_seconds, times.tolerance
    ):
        yield Violation("certificate", f"certificate.{place}", message)
