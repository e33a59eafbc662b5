"""What the interface's description allows, and what it does not, is answered as it says."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_jobs import plan_request
from profiles import UNSHRUNK, examples

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("schemathesis", reason="schemathesis is not installed")

import schemathesis

from stagewright.service.http.app import create_app
from stagewright.service.http.guard import Service
from stagewright.service.http.tokens import Scope, Tokens
from stagewright.service.jobs.kinds import KINDS, parse_request
from stagewright.service.jobs.queue import Queue
from stagewright.service.jobs.records import JobEnd
from stagewright.service.jobs.store import ServiceStore
from stagewright.service.pipelines.planning import plan
from stagewright.service.workers.processes import outcome_of


@dataclass(frozen=True)
class Served:
    """The description of a service, on whose store jobs of `ann` are made, and her token."""

    schema: Any
    store: ServiceStore
    headers: dict[str, str]
    outcome: JobEnd

    def planned(self) -> str:
        """A new job that has a plan."""
        job, _ = self.store.submit("ann", "plan", plan_request(), priority=100)
        if not job.has_ended:
            queue = Queue(self.store)
            while queue.claim("w", 60.0).id != job.id:  # type: ignore[union-attr]
                pass  # a job that a call before has queued again
            queue.finish(job.id, "w", self.outcome)
        return job.id


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = ServiceStore(f"sqlite:///{tmp_path_factory.mktemp('jobs') / 'jobs.sqlite'}")
    token = Tokens(store.engine).create("ann", Scope.SUBMIT)
    schema = schemathesis.openapi.from_asgi("/v1/openapi.json", create_app(Service(store)))
    request: Any = parse_request("plan", plan_request())
    headers = {"Authorization": f"Bearer {token}"}
    yield Served(schema, store, headers, outcome_of(plan(request)))
    store.close()


# Rules between fields are not in schemas, so that some of what these allow is refused; and unknown
# parameters of a query are ignored, as a token is that is sent in any case.
schemathesis.checks.load_all_checks()
NAMES = ("positive_data_acceptance", "negative_data_rejection")
# They read the body as the calls that submit do.
ALIKE = {f"/v1/{kind}/validate" for kind in KINDS} - {"/v1/jobshop/validate"}
UNCHECKED = [schemathesis.checks.CHECKS.get_one(name) for name in NAMES]
OPERATIONS = [
    pytest.param(method, path, marks=pytest.mark.slow if path in ALIKE else ())
    for path, methods in create_app(None).openapi()["paths"].items()
    for method in methods
]


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@examples(60, quick=3, phases=UNSHRUNK)
@given(data=st.data())
def test_every_call_is_answered_as_it_is_described(
    served: Served, method: str, path: str, data: Any
) -> None:
    operation = served.schema[path][method]
    mode = data.draw(st.sampled_from(schemathesis.GenerationMode))
    case = data.draw(operation.as_strategy(generation_mode=mode))
    case.call_and_validate(headers=served.headers, excluded_checks=UNCHECKED)
    if "job" in (case.path_parameters or {}):
        case.path_parameters["job"] = served.planned()
        case.call_and_validate(headers=served.headers, excluded_checks=UNCHECKED)
