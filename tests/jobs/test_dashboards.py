"""The dashboard of Grafana and the rules of Prometheus ask only for what a service exports."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from planning_jobs import TWO_JOBS, EndedProcess

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("promql_parser", reason="promql-parser is not installed")

import promql_parser as promql
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from stagewright.cli.serving import ServeOptions
from stagewright.service.http.app import create_app
from stagewright.service.http.guard import Service
from stagewright.service.http.webhooks import Deliverer, Deliveries, Webhooks
from stagewright.service.jobs.records import State
from stagewright.service.jobs.store import ServiceStore
from stagewright.service.tracing import DELIVERED
from stagewright.service.workers.worker import Worker

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "stagewright.json").read_text())
RULES = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
ALERTS = [rule for group in RULES for rule in group["rules"]]
PANELS = DASHBOARD["panels"]
GIVEN = {"job", "instance"}  # by Prometheus, with `up`
ORIGIN = "http://127.0.0.1:9"  # where nobody listens


@pytest.fixture
def exported(store: ServiceStore) -> dict[str, dict[str, set[str]]]:
    """The values of each label of each metric of a service that has done a bit of everything."""
    webhooks = Webhooks((ORIGIN,), "a secret of twenty-four characters")
    app = create_app(Service(store, open_to_all=True, webhooks=webhooks))
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    with TestClient(app, "http://127.0.0.1:8754", raise_server_exceptions=False) as client:
        for i, state in enumerate((State.FAILED, State.OPTIMAL)):
            worker = Worker(store, start=lambda *_, state=state: EndedProcess(state))
            body = json.dumps(json.loads(TWO_JOBS) | {"time_limit": 1 + i})
            client.post(f"/v1/jobshop?webhook={ORIGIN}", content=body)
            job = worker.queue.claim(worker.name, 60.0)
            assert job is not None
            worker.answer(job)
            client.post("/v1/jobshop", content=body)
        due = Deliveries(store).claim()
        assert due is not None
        Deliverer(store, webhooks).deliver(due)
        DELIVERED.labels("given up").inc(0)
        client.get("/nowhere")
        client.get("/metrics")
        text = client.get("/metrics").text
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            for label, value in one.labels.items():
                found[one.name][label].add(value)
            found[one.name]  # also without labels
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """The name of each panel and alert, and the PromQL that it asks."""
    for panel in PANELS:
        for target in panel.get("targets", ()):
            expression = target["expr"].replace("$__rate_interval", "5m").replace("$job", ".*")
            yield panel["title"], expression
    for rule in ALERTS:
        yield rule["alert"], rule["expr"]


def selectors(node: Any, grouped: frozenset[str] = frozenset()) -> Iterator[tuple[Any, set[str]]]:
    """The selectors within an expression, with the labels by which they are grouped."""
    if node is None:
        return
    if isinstance(node, promql.VectorSelector):
        yield node, set(grouped)
        return
    if isinstance(node, promql.MatrixSelector):
        yield node.vector_selector, set(grouped)
        return
    modifier = getattr(node, "modifier", None)
    if isinstance(node, promql.AggregateExpr) and modifier is not None:
        grouped |= set(modifier.labels)
    for name in ("expr", "lhs", "rhs", "args"):
        parts = getattr(node, name, None)
        for part in parts if isinstance(parts, list) else [parts]:
            yield from selectors(part, grouped)


def faults(expression: str, exported: dict[str, dict[str, set[str]]]) -> list[str]:
    """What an expression asks for that is not exported."""
    asked = [*selectors(promql.parse(expression))]
    found = [] if asked else ["it asks for nothing"]
    for one, grouped in asked:
        if one.name != "up":
            found += faults_of(one, grouped, exported.get(one.name))
    return found


def faults_of(one: Any, grouped: set[str], labels: dict[str, set[str]] | None) -> list[str]:
    """What a selector, grouped by labels, asks for that its metric lacks."""
    if labels is None:
        return [f"no metric {one.name}"]
    matchers = [match for match in one.matchers.matchers if match.name not in GIVEN]
    needed = (grouped - GIVEN) | {match.name for match in matchers}
    found = [f"{one.name} has no label {label}" for label in needed - labels.keys()]
    for match in matchers:
        if match.op == promql.MatchOp.Equal and match.value not in labels.get(match.name, ()):
            found.append(f"{one.name} has no {match.name} {match.value}")
        re.compile(match.value)
    return found


def test_all_that_is_asked_for_is_exported(exported: dict[str, dict[str, set[str]]]) -> None:
    asked = list(expressions())
    assert len(asked) >= 30
    assert [(name, faults(one, exported)) for name, one in asked if faults(one, exported)] == []
    # What is exported by the service itself is shown or watched; of the process a part.
    text = re.sub("_(bucket|count|sum)\\b", "", " ".join(one for _, one in asked))
    own = {re.sub("_(bucket|count|sum)$", "", name) for name in exported if "process_" not in name}
    unwatched = {"stagewright_build_info", "stagewright_jobs", "stagewright_webhooks"}
    assert own - set(re.findall(r"\w+", text)) == unwatched
    # And the page explains each.
    _, _, page = (DEPLOY.parent / "docs" / "serving.md").read_text().partition("| metric |")
    told = re.findall(r"`(?:stagewright)?(_\w+)`", page.partition("\n\n")[0])
    assert {f"stagewright{name}" for name in told} == own


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ("stagewright_queue_size", "no metric stagewright_queue_size"),
        ("sum by (user) (stagewright_queue_jobs)", "stagewright_queue_jobs has no label user"),
        ('rate(stagewright_jobs_ended_total{result="x"}[5m]) > 1', "no label result"),
        ('1 - stagewright_jobs{state="broken"}', "no state broken"),
        ("vector(1)", "it asks for nothing"),
    ],
)
def test_what_is_not_exported_is_found(
    wrong: str, fault: str, exported: dict[str, dict[str, set[str]]]
) -> None:
    assert any(fault in one for one in faults(wrong, exported))


def test_the_dashboard_can_be_imported() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert re.fullmatch("[a-z-]{1,40}", DASHBOARD["uid"])
    variables = {f"${{{one['name']}}}" for one in DASHBOARD["templating"]["list"]}
    assert len({one["id"] for one in PANELS}) == len(PANELS)
    assert {one["type"] for one in PANELS} == {"row", "stat", "timeseries"}
    for one in PANELS:
        place = one["gridPos"]
        assert 0 <= place["x"] <= place["x"] + place["w"] <= 24, one["title"]
        if one["type"] != "row":
            assert one["datasource"]["uid"] in variables
            references = [target["refId"] for target in one["targets"]]
            assert len({*references}) == len(references) >= 1
    for one, other in combinations(PANELS, 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = [a[x] + a[w] <= b[x] or b[x] + b[w] <= a[x] for x, w in (("x", "w"), ("y", "h"))]
        assert any(apart), (one["title"], other["title"])


def test_alerts_say_what_to_do() -> None:
    assert len({one["alert"] for one in ALERTS}) == len(ALERTS)
    options = {f"--{name.replace('_', '-')}" for name in ServeOptions.model_fields}
    for one in ALERTS:
        assert set(one) <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch("Stagewright[A-Za-z]+", one["alert"])
        assert one["labels"]["severity"] in ("critical", "warning")
        assert re.fullmatch(r"\d+m", one.get("for", "0m"))
        told = one["annotations"]
        assert len(told["summary"]) < 120
        assert len(told["runbook"]) > 100
        for option in re.findall(r"--[a-z-]+", told["runbook"]):
            assert option in options, option
        for value in re.findall(r"\$labels\.(\w+)", told["summary"]):
            grouped = {label for _, by in selectors(promql.parse(one["expr"])) for label in by}
            assert value in grouped or one["alert"] == "StagewrightDown"
