"""The files that start the service on other machines: their commands, paths and ports exist."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import validate
from typer.main import get_command

from stagewright.cli import app
from stagewright.service.http import health

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted(
    path for path in (DEPLOY / "kubernetes").glob("*.yaml") if path.stem != "kustomization"
)
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
UNIT = (DEPLOY / "stagewright.service").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PORT = 8754
PROBES = ("liveness", "readiness")


def instructions(name: str) -> list[str]:
    """What follows an instruction of the Dockerfile, on one line."""
    lines = DOCKERFILE.replace("\\\n", " ").splitlines()
    return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]


def manifests() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        yield from yaml.safe_load_all(path.read_text())


def containers() -> list[dict[str, Any]]:
    found = (one for one in manifests() if one["kind"] == "Deployment")
    return [box for one in found for box in one["spec"]["template"]["spec"]["containers"]]


def commands() -> Iterator[list[str]]:
    """The commands that are started, and those of the image's build."""
    yield json.loads(instructions("CMD")[-1])
    for part in instructions("RUN")[-1].split("&&"):
        if part.split()[0] == "stagewright":
            yield shlex.split(part)
    yield COMPOSE["services"]["server"]["command"]
    yield from (box["args"] for box in containers())
    started = UNIT.partition("ExecStart=")[2].splitlines()[0].split()
    yield [Path(started[0]).name, *started[1:]]


@pytest.mark.parametrize("command", list(commands()), ids=" ".join)
def test_commands_are_understood(command: list[str]) -> None:
    assert command[0] == "stagewright"
    group = get_command(app)
    with group.make_context("stagewright", command[1:2], resilient_parsing=True) as context:
        one = group.get_command(context, command[1])  # type: ignore[attr-defined]
        assert one is not None
        one.make_context(command[1], command[2:], parent=context)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_are_valid(path: Path) -> None:
    for one in yaml.safe_load_all(path.read_text()):
        validate(one, "1.31", strict=True)


def test_every_manifest_is_applied() -> None:
    kept = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())
    assert sorted(kept["resources"]) == [path.name for path in MANIFESTS]


def test_probes_and_ports_are_those_of_the_service() -> None:
    paths = {route.path for route in health.router.routes}  # type: ignore[attr-defined]
    for one in manifests():
        if one["kind"] != "Deployment":
            continue
        (box,) = one["spec"]["template"]["spec"]["containers"]
        if one["metadata"]["name"] == "server":
            assert [port["containerPort"] for port in box["ports"]] == [PORT]
            assert {box[f"{name}Probe"]["httpGet"]["path"] for name in PROBES} <= paths
        else:
            assert f"127.0.0.1:{PORT}/health/live" in box["livenessProbe"]["exec"]["command"][-1]
    assert instructions("EXPOSE") == [str(PORT)]
    (probe,) = instructions("HEALTHCHECK")
    assert f"127.0.0.1:{PORT}/health/ready" in probe
    (published,) = COMPOSE["services"]["server"]["ports"]
    assert published == f"127.0.0.1:{PORT}:{PORT}"


def test_a_service_finds_its_servers() -> None:
    all_of = {one["metadata"]["name"]: one for one in manifests()}
    labels = all_of["server"]["spec"]["template"]["metadata"]["labels"]
    selected = all_of["stagewright"]["spec"]["selector"]
    assert selected.items() <= labels.items()
    workers = all_of["workers"]["spec"]["template"]["metadata"]["labels"]
    assert not selected.items() <= workers.items()
