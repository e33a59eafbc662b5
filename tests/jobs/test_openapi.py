"""The interface keeps its description, of valid requests and of ones changed anywhere."""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi.testclient import TestClient
from hypothesis import Phase, given, seed
from hypothesis import strategies as st
from planning_jobs import TWO_JOBS, plan_request, traced
from profiles import UNSHRUNK, examples
from schemathesis.generation.stateful.state_machine import APIStateMachine

from stagewright.formulations.forms.answers import silent
from stagewright.graphs.documents.documents import to_json
from stagewright.service.http.app import create_app
from stagewright.service.http.guard import ID, Service
from stagewright.service.http.tokens import Scope, Tokens
from stagewright.service.http.webhooks import Webhooks
from stagewright.service.jobs.kinds import KINDS, parse_request
from stagewright.service.jobs.queue import Queue
from stagewright.service.jobs.records import JobEnd, State
from stagewright.service.jobs.store import ServiceStore
from stagewright.service.jobs.uploads import Uploads
from stagewright.service.workers.processes import outcome_of

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("schemathesis", reason="schemathesis is not installed")


SECRET = "a secret of at least 24 characters"
ANSWERED = (
    "plan",
    "jobshop",
    "tune-read",
    "rounds",
)  # whose jobs have everything that any has, together
BEFORE = ("read_job", "read_request", "stop_job", "abort_job")  # a job's end


@dataclass(frozen=True)
class Served:
    """A service and a token of `ann`.

    ``ends`` are how jobs of a kind end, others fail; ``given`` are valid values of parameters.
    """

    app: Any
    schema: Any
    store: ServiceStore
    headers: dict[str, str]
    bodies: dict[str, str]
    ends: dict[str, JobEnd]
    given: dict[str, str]

    def submitted(self, kind: str) -> str:
        """A new job of a kind, the example's, to which no answer is known."""
        self.store.discard_ended(math.inf)
        job, _ = self.store.submit("ann", kind, self.bodies[kind])
        return job.id

    def end(self, job: str, *, fail: bool = False, unless: bool = False) -> None:
        """End a job, as its kind does or without an answer."""
        queue, found = Queue(self.store), self.store.get(job)
        if found is None or found.has_ended or unless:
            return
        while self.store.get(job).state is State.QUEUED:  # type: ignore[union-attr]
            queue.claim("w", 60.0)
        failed = JobEnd(State.FAILED, reason="as planned")
        queue.finish(job, "w", failed if fail else self.ends.get(found.kind, failed))


def launched(rounds: dict[str, Any]) -> str:
    """The request, with launch files."""
    for job in rounds["workload"]["jobs"]:
        job["command"] = "./train"
    for one in rounds["pool"]["accelerators"]:
        one["per_server"] = one["count"]
    return json.dumps(rounds | {"to": "slurm"})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = ServiceStore(f"sqlite:///{tmp_path_factory.mktemp('jobs') / 'jobs.sqlite'}")
    token = Tokens(store.engine).create("ann", Scope.SUBMIT)
    app = create_app(Service(store, webhooks=Webhooks(("https://hooks.example",), SECRET)))
    bodies = {kind: json.dumps(body) for kind, body in shown(app.openapi()).items()}
    bodies["plan"] = plan_request()
    bodies["rounds"] = launched(json.loads(bodies["rounds"]))
    requests = {kind: parse_request(kind, bodies[kind]) for kind in ANSWERED}
    answers = {kind: KINDS[kind].answer(requests[kind], silent, None) for kind in ANSWERED}
    trace = to_json(traced(answers["plan"].plan, 1.1))
    upload, _ = Uploads(store).add("ann", "trace", "run", trace, 100)
    yield Served(
        app, schemathesis.openapi.from_asgi("/v1/openapi.json", app), store,
        {"Authorization": f"Bearer {token}"}, bodies,
        {kind: outcome_of(answer) for kind, answer in answers.items()},
        {"trace": upload.id, "to": "deepspeed", "device": "v100"},
    )  # fmt: skip
    store.close()


def shown(document: dict[str, Any]) -> dict[str, Any]:
    """The examples of a description."""
    return {name: one["value"] for name, one in document["components"]["examples"].items()}


# Rules between fields are not in schemas, so that some of what these allow is refused; and unknown
# parameters of a query are ignored, as a token is that is sent in any case. A job that is stopped
# (DELETE) is still there.
schemathesis.checks.load_all_checks()
NAMES = ("positive_data_acceptance", "negative_data_rejection", "use_after_free")
# They read the body as the calls that submit do.
ALIKE = {f"/v1/{kind}/validate" for kind in KINDS} - {"/v1/jobshop/validate"}
UNCHECKED = [schemathesis.checks.CHECKS.get_one(name) for name in NAMES]
OPERATIONS = [
    pytest.param(method, path, marks=pytest.mark.slow if path in ALIKE else ())
    for path, methods in create_app(None).openapi()["paths"].items()
    for method in methods
]


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@examples(60, quick=2, phases=UNSHRUNK)
@given(data=st.data())
def test_every_call_is_answered_as_it_is_described(
    served: Served, method: str, path: str, data: Any
) -> None:
    operation = served.schema[path][method]
    mode = data.draw(st.sampled_from(schemathesis.GenerationMode))
    case = data.draw(operation.as_strategy(generation_mode=mode))
    case.call_and_validate(headers=served.headers, excluded_checks=UNCHECKED)


def test_every_example_is_taken(served: Served) -> None:
    client = TestClient(served.app, headers=served.headers)
    document = served.app.openapi()
    values, sent = shown(document), Counter[str]()
    for path, methods in document["paths"].items():
        body = methods.get("post", {}).get("requestBody", {"content": {}})["content"]
        for name in next(iter(body.values()), {}).get("examples", {}):
            content = values[name] if isinstance(values[name], str) else json.dumps(values[name])
            options = {"sequence": 1024} if path.endswith("uploads/config") else {"device": "v100"}
            response = client.post(path.format(kind=name), content=content, params=options)
            assert response.is_success, (path, name, response.text)
            sent[name] += 1
    assert sent.keys() == values.keys()


def test_every_link_of_an_answer_leads_to_a_call_that_succeeds(served: Served) -> None:
    document, reached = served.app.openapi(), set[str]()
    links = document["components"]["links"]
    for kind in ANSWERED:
        answers = document["paths"][f"/v1/{kind}"]["post"]["responses"]
        assert answers["202"]["links"] == answers["200"]["links"]
        for name in answers["202"]["links"]:
            reached.add(name)
            job = served.submitted(kind)
            served.end(job, fail=name == "retry_job", unless=name in BEFORE)
            operation = served.schema.find_operation_by_id(name)
            values = served.given | dict.fromkeys(links[name]["parameters"], job)
            case = operation.Case(
                path_parameters={one.name: values[one.name] for one in operation.path_parameters},
                query={one.name: values[one.name] for one in operation.query if one.is_required},
            )
            response = case.call_and_validate(headers=served.headers, excluded_checks=UNCHECKED)
            assert 200 <= response.status_code < 300, (kind, name, response.text)
    assert reached == {name for name, link in links.items() if "upload" not in link["parameters"]}


@pytest.mark.slow
def test_walks_along_links_are_answered_as_they_are_described(served: Served) -> None:
    """Each call on a job or an upload is answered 2xx at least once, and none 5xx."""
    codes: dict[str, Counter[int]] = defaultdict(Counter)
    taking = served.app.openapi()["components"]["links"].keys()

    class Walk(walks(served)):  # type: ignore[misc]
        def before_call(self, case: Any) -> None:
            named = map(str, (case.path_parameters or case.query or {}).values())
            for job in filter(re.compile(ID).fullmatch, named):
                served.end(job, unless=name_of(case) in BEFORE)

        def after_call(self, response: Any, case: Any) -> None:
            codes[name_of(case)][response.status_code] += 1

        def get_call_kwargs(self, case: Any) -> dict[str, Any]:
            return {"headers": served.headers}

        def validate_response(self, response: Any, case: Any, **how: Any) -> None:
            case.validate_response(response, excluded_checks=UNCHECKED)

    # One at a time: which links are followed is no choice of Hypothesis, which could not repeat it.
    step = examples(1, quick=1, phases=(Phase.generate,), stateful_step_count=15)
    for walk in range(200):
        seed(walk)(Walk).run(settings=step)
    assert max(code for counts in codes.values() for code in counts) < 500
    missing = {one for one in taking if not any(200 <= code < 300 for code in codes[one])}
    assert not missing, {one: codes[one] for one in missing}


def name_of(case: Any) -> str:
    """The operation that a case calls."""
    return str(case.operation.definition.raw["operationId"])


def walks(served: Served) -> type[APIStateMachine]:
    """Walks along links that send only examples, so that nearly all that is sent is valid."""
    document = json.loads(json.dumps(served.app.openapi()))
    values = {kind: json.loads(body) for kind, body in served.bodies.items()}
    for one in [one for methods in document["paths"].values() for one in methods.values()]:
        for content in one.get("requestBody", {"content": {}})["content"].values():
            content["schema"] = {"enum": [values[name] for name in content.pop("examples")]}
        given = [each for each in one.get("parameters", ()) if each["required"]]
        for each in given:
            if each["name"] in served.given:
                each["schema"] = {"const": served.given[each["name"]]}
        one["parameters"] = given
    others = "|".join(KINDS.keys() - {*ANSWERED, "schedule"})
    schema = schemathesis.openapi.from_dict(document)
    schema.app = served.app
    schema.config.phases.stateful.inference.algorithms = []  # the document's links alone
    walked = schema.exclude(path_regex=f"^/v1/({others})(/validate)?$")
    return walked.as_state_machine()  # type: ignore[no-any-return]


pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")


BODIES = {"plan": json.loads(plan_request()), "jobshop": json.loads(TWO_JOBS)}
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5),
    st.sampled_from(["../../etc/passwd", "os:system", "a" * 5000, "\ud800", -1, 0, 1e308]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a JSON value but the value itself."""
    inner = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in inner:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@st.composite
def mutated(draw: st.DrawFn, kind: str) -> str:
    """A request with up to three places replaced, deleted or added to."""
    body = json.loads(json.dumps(BODIES[kind]))
    for _ in range(draw(st.integers(1, 3))):
        known = list(places(body))
        if not known:
            break
        path = draw(st.sampled_from(known))
        node = body
        for key in path[:-1]:
            node = node[key]
        if draw(st.booleans()):
            node[path[-1]] = draw(VALUES)
        elif isinstance(node, dict):
            del node[path[-1]]
        else:
            node.append(draw(VALUES))
    return json.dumps(body)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder: Path = tmp_path_factory.mktemp("jobs")
    store = ServiceStore(f"sqlite:///{folder / 'jobs.sqlite'}")
    app = create_app(Service(store, open_to_all=True))
    with TestClient(app, "http://127.0.0.1", raise_server_exceptions=False) as found:
        yield found
    store.close()


def require_one_line(response: Any) -> None:
    assert response.status_code in (200, 202, 404, 409, 413, 422), response.text
    if response.status_code >= 400:
        assert response.headers["content-type"] == "application/problem+json"
        assert "\n" not in response.json()["detail"]
        assert "Traceback" not in response.text


@pytest.mark.parametrize("kind", BODIES)
@examples(5000, quick=60)
@given(data=st.data())
def test_changed_requests_are_taken_or_refused(client: TestClient, kind: str, data: Any) -> None:
    body = data.draw(mutated(kind))
    validated = client.post(f"/v1/{kind}/validate", content=body)
    require_one_line(validated)
    submitted = client.post(f"/v1/{kind}", content=body)
    require_one_line(submitted)
    assert (validated.status_code == 200) == (submitted.status_code in (200, 202))


@examples(500, quick=40)
@given(
    kind=st.sampled_from([*KINDS, "jobs", "../jobs", "nothing", ""]),
    body=st.binary(max_size=300) | VALUES.map(lambda one: json.dumps(one).encode()),
)
def test_any_bytes_are_refused(client: TestClient, kind: str, body: bytes) -> None:
    response = client.post(f"/v1/{kind}", content=body)
    if response.status_code != 405:  # of a path that is only read
        require_one_line(response)


@examples(500, quick=40)
@given(
    job=st.text(max_size=40).filter(lambda text: text.strip(" ./") != ""),
    rest=st.sampled_from(["", "/answer", "/plan", "/events", "/export/megatron", "/history"]),
    header=st.text("0123456789abcdefxyz-", max_size=30),
)
def test_no_job_is_found_by_any_other_text(
    client: TestClient, job: str, rest: str, header: str
) -> None:
    from urllib.parse import quote

    where = f"/v1/jobs/{quote(job, safe='')}{rest}"
    response = client.get(where, headers={"Last-Event-ID": header})
    assert response.status_code in (404, 422), response.text
