"""Whole answers as text: what ``--json`` prints, and the objects that users of Python have.

The text has those objects that the request does not determine; the others are made again from it.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from pydantic_core import from_json, to_json

from stagewright.formulations.forms.answers import Status, settled
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.documents import parse
from stagewright.service.answers import Answer
from stagewright.service.cloud.requests import CloudAnswer, CloudRequest
from stagewright.service.clusters.answers import (
    AllocateAnswer,
    ComputedRate,
    RoundsAnswer,
    SimulateClusterAnswer,
)
from stagewright.service.clusters.rates import with_rates
from stagewright.service.clusters.requests import AllocateRequest, RoundsRequest
from stagewright.service.layouts.profiled import ProfiledAnswer
from stagewright.service.layouts.rates import CalibrateAnswer
from stagewright.service.layouts.requests import LayoutAnswer, LayoutMemoryAnswer
from stagewright.service.layouts.tuning import TuneAnswer
from stagewright.service.operators.dividing import DivideAnswer
from stagewright.service.operators.plans import PlaceAnswer
from stagewright.service.pipelines.answers import PartitionAnswer, PlanAnswer, WhatIfAnswer
from stagewright.service.pipelines.requests import PlanRequest
from stagewright.service.pipelines.sweeping import SweepAnswer
from stagewright.service.requests import Request
from stagewright.service.schedules.requests import (
    JobShopAnswer,
    MemoryCurve,
    ScheduleAnswer,
    ScheduleComparison,
)

if TYPE_CHECKING:
    from stagewright.formulations.operators.plan import OperatorPlan

CARRIED, TYPE, OBJECTS = "carried", "type", "objects"
"""Names in a whole answer's JSON object of what ``--json`` does not print."""

# The types of objects that answers carry, which are imported when one is read.
ALLOCATION_PLAN = "formulations.clusters.allocation_plan:AllocationPlan"
LAYOUT_PLAN = "formulations.parallelism.document:LayoutPlan"
MAKESPAN_PROBLEM = "formulations.pipelines.makespan:MakespanProblem"
OPERATOR_PLAN = "formulations.operators.plan:OperatorPlan"
PROFILED_PLAN = "formulations.parallelism.profiles.document:ProfiledDocument"
RATE_SET = "graphs.machines.rates:RateSet"
RESULT = "solvers.planning:Result"
SWITCHING_PLAN = "formulations.cloud.switching:Plan"
TIMED_ORDER = "formulations.schedules.timing:TimedOrder"
TUNING = "formulations.parallelism.trials:Tuning"
TIMELINE = "executor.clusters.timeline:ClusterTimeline"

Made = dict[str, Any]


def written(answer: Answer) -> str:
    """The whole answer; a plan of a pipeline is left out, as a document of its own."""
    return to_json(_whole(answer), inf_nan_mode="constants").decode()


def printed(text: str) -> str:
    """The part of a whole answer that ``--json`` prints."""
    told = from_json(text)
    told.pop(CARRIED, None)
    return to_json(told, inf_nan_mode="null").decode()


def read(text: str, request: Request, document: str | None = None) -> Answer:
    """The answer to the request from its whole text, and the document of its plan."""
    found = _read(from_json(text), request)
    if isinstance(found, PlanAnswer) and document is not None:
        return found.model_copy(update={"result": replace(found.result, plan=_plan(document))})
    return found


def placement(told: Made) -> "OperatorPlan | None":
    """The plan that a whole answer to a `PlaceRequest` carries."""
    return _object(OPERATOR_PLAN, told[CARRIED][OBJECTS])  # type: ignore[no-any-return]


def carried_document(told: Made) -> Any:
    """The document that a whole answer carries: a plan, or a rate set; None if it has none."""
    kind = _DOCUMENTS.get(told[CARRIED][TYPE])
    return None if kind is None else _object(kind, told[CARRIED][OBJECTS])


def kept_plan(request: PlanRequest, document: str, status: Status, reason: str) -> PlanAnswer:
    """The answer of a search that was ended, from the best plan that it had found."""
    from stagewright.service.pipelines.planning import answer_of
    from stagewright.solvers.planning import OPTIMAL_GAP, Result

    plan = _plan(document)
    stated = plan.certificate
    assert stated is not None  # planners certify
    result = Result(
        status=settled(status, stated.cost_seconds, stated.bound_seconds, OPTIMAL_GAP),
        planner=plan.planner,
        plan=plan,
        cost=stated.cost_seconds,
        bound=stated.bound_seconds,
        gap=stated.gap,
        proved_by=stated.proved_by,
        seconds=0.0,
        reason=reason,
        plans=stated.plans,
    )
    return answer_of(request.problem, result)


def _plan(document: str) -> PipelinePlan:
    return parse(PipelinePlan, document, "plan")


def _whole(answer: Answer) -> Made:
    carried = {TYPE: type(answer).__name__, OBJECTS: _carried(answer)}
    return answer.json_object() | {CARRIED: carried}


def _read(told: Made, request: Request) -> Answer:
    carried = told.pop(CARRIED)
    kind = _KINDS[carried[TYPE]]
    told.pop("exports", None)  # of a plan; found out when it is read
    made = _MADE[kind](request, told, carried[OBJECTS]) if kind in _MADE else {}
    return kind.model_validate(told | made)


def _carried(answer: Answer) -> Any:
    match answer:
        case PlanAnswer():
            return replace(answer.result, plan=None)
        case WhatIfAnswer():
            return answer.base.result
        case PlaceAnswer() | AllocateAnswer() | LayoutAnswer() | ProfiledAnswer():
            return answer.plan
        case ScheduleAnswer():
            return {"timed": answer.timed, "problem": answer.problem}
        case ScheduleComparison():
            return [_whole(one) for one in answer.answers]
        case SimulateClusterAnswer():
            return answer.timeline
        case CloudAnswer():
            return answer.stays
        case _:
            return getattr(answer, "document", None)


def _of_plan(request: Request, told: Made, carried: Any) -> Made:
    assert isinstance(request, PlanRequest)
    return {"result": _object(RESULT, carried), "chain": request.chain}


def _of_what_if(request: Request, told: Made, carried: Any) -> Made:
    base = told["base"]
    base.pop("exports", None)
    return {"base": PlanAnswer.model_validate(base | _of_plan(request, base, carried))}


def _of_schedule(request: Request, told: Made, carried: Any) -> Made:
    """The carried fields of a schedule; the record of its search is not kept."""
    return {
        "timed": _object(TIMED_ORDER, carried["timed"]),
        "problem": _object(MAKESPAN_PROBLEM, carried["problem"]),
        "result": None,
    }


def _of_comparison(request: Request, told: Made, carried: Any) -> Made:
    return {"answers": tuple(_read(one, request) for one in carried)}


def _of_allocation(request: Request, told: Made, carried: Any) -> Made:
    from stagewright.formulations.clusters.allocation import problem_of
    from stagewright.formulations.clusters.allocation_plan import allocation_of
    from stagewright.solvers.clusters.policies import AllocationResult

    assert isinstance(request, AllocateRequest | RoundsRequest)
    asked = {"space_sharing": request.space_sharing, "placement": request.placement}
    workload = with_rates(request.workload, map(ComputedRate.model_validate, told["prices"]))
    problem = problem_of(workload, request.pool, **asked)
    plan = _object(ALLOCATION_PLAN, carried)
    result = AllocationResult(
        **{name: told[name] for name in ("status", "objective", "bound", "proved_by", "policy")},
        allocation=None if plan is None else allocation_of(plan, problem),
        notes=tuple(told["notes"]),
        seconds=told["wall_seconds"],
    )
    return {"plan": plan, "problem": problem, "result": result}


def _of_rounds(request: Request, told: Made, carried: Any) -> Made:
    assert isinstance(request, RoundsRequest)
    return {"accelerators": request.pool.names}


def _of_cloud(request: Request, told: Made, carried: Any) -> Made:
    from stagewright.service.cloud.renting import switching_problem

    assert isinstance(request, CloudRequest)
    return {"problem": switching_problem(request), "stays": _object(SWITCHING_PLAN, carried)}


def _field(name: str, kind: str) -> "Callable[[Request, Made, Any], Made]":
    """What makes the one field of an answer that it carries."""
    return lambda request, told, carried: {name: _object(kind, carried)}


_MADE: dict[type[Answer], Callable[[Request, Made, Any], Made]] = {
    PlanAnswer: _of_plan,
    WhatIfAnswer: _of_what_if,
    PlaceAnswer: _field("plan", OPERATOR_PLAN),
    ScheduleAnswer: _of_schedule,
    ScheduleComparison: _of_comparison,
    MemoryCurve: lambda request, told, carried: {"timetables": ()},
    AllocateAnswer: _of_allocation,
    RoundsAnswer: _of_rounds,
    SimulateClusterAnswer: _field("timeline", TIMELINE),
    LayoutAnswer: _field("plan", LAYOUT_PLAN),
    ProfiledAnswer: _field("plan", PROFILED_PLAN),
    CalibrateAnswer: _field("document", RATE_SET),
    TuneAnswer: _field("document", TUNING),
    CloudAnswer: _of_cloud,
}
_DOCUMENTS = {
    "PlaceAnswer": OPERATOR_PLAN, "LayoutAnswer": LAYOUT_PLAN, "ProfiledAnswer": PROFILED_PLAN,
    "CalibrateAnswer": RATE_SET, "TuneAnswer": TUNING,
}  # fmt: skip
_PLAIN: tuple[type[Answer], ...] = (
    DivideAnswer, JobShopAnswer, LayoutMemoryAnswer, PartitionAnswer, SweepAnswer,
)  # fmt: skip
_KINDS: dict[str, type[Answer]] = {kind.__name__: kind for kind in (*_MADE, *_PLAIN)}


@cache
def _adapter(kind: str) -> TypeAdapter[Any]:
    module, name = kind.split(":")
    return TypeAdapter(getattr(import_module(f"stagewright.{module}"), name))


def _object(kind: str, found: Any) -> Any:
    """The object of the type at ``MODULE:NAME`` from plain data; None from None."""
    return None if found is None else _adapter(kind).validate_python(found)
