"""Requests of the planning service, and a clock that is set."""

import json
from dataclasses import dataclass, replace
from typing import Any

from plans import small_problem

from stagewright.executor.drawing.periods import finish_seconds
from stagewright.executor.programs.trace import Trace, TracedStep
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.documents import to_json
from stagewright.graphs.models.operators.step_graph import Node, Output, StepGraph
from stagewright.service.jobs.records import JobEnd, State
from stagewright.service.workers.processes import Look

TWO_JOBS = json.dumps({"jobs": [[[0, 3], [1, 2]], [[1, 4], [0, 1]]]})
"""A job shop whose least makespan is 6."""
TWO_OPERATORS = StepGraph(
    "two", "test", 8,
    (
        Node("a", "mm", "forward", (), (Output(4e6),), {"v100": 1e-3}),
        Node("b", "mm", "backward", (("a", 0),), (), {"v100": 4e-3}),
    ),
)  # fmt: skip


@dataclass
class Clock:
    """Seconds that pass only when they are told to."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def long_request(**changes: Any) -> str:
    """A plan that is searched for until it is stopped."""
    problem = small_problem(layers=12, devices=8, microbatches=16)
    given = {
        "chain": json.loads(to_json(problem.chain)),
        "cluster": json.loads(to_json(problem.cluster)),
        "microbatches": 16,
        "planner": "general",
        "time_limit": 600.0,
    }
    return json.dumps(given | changes)


def plan_request(**changes: Any) -> str:
    """A small plan, of layers that every framework knows, by data parallelism."""
    problem = small_problem(layers=3, devices=2)
    chain = json.loads(to_json(problem.chain))
    for layer, name in zip(chain["layers"], ("embedding", "layers.0", "head"), strict=True):
        layer["name"] = name
    given = {
        "chain": chain,
        "cluster": json.loads(to_json(problem.cluster)),
        "microbatches": 2,
        "planner": "dp",
    }
    return json.dumps(given | changes)


def traced(plan: PipelinePlan, factor: float) -> Trace:
    """A run of a plan in which everything takes ``factor`` times as long."""
    actions = tuple(
        replace(
            one,
            start_seconds=one.start_seconds * factor,
            finish_seconds=one.finish_seconds * factor,
        )
        for one in plan.actions
    )
    step = TracedStep(0, finish_seconds(plan) * factor, 0.0, actions)
    return Trace(plan.digest, plan.model, "a desk", "gloo", 2, "float32", (step,))


class EndedProcess:
    """The process of a job that has ended, in a state, before it is looked at."""

    def __init__(self, state: State) -> None:
        self._state = state

    def look(self, _: float) -> Look:
        return Look(JobEnd(self._state, answer="{}"), None, 5e6)

    def stop(self) -> None: ...

    def kill(self) -> None: ...
