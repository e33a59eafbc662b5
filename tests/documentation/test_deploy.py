"""The files that start the service on other machines: their commands, paths and ports exist."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import validate
from sqlalchemy import create_engine, insert, text
from typer.main import get_command

from stagewright.cli import app
from stagewright.service.http import health
from stagewright.service.jobs.records import State
from stagewright.service.jobs.rows import JOBS, TABLES

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
EXAMPLE = KUBERNETES / "overlays" / "example"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
UNIT = (DEPLOY / "stagewright.service").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PORT = 8754
Manifest = dict[str, Any]


def instructions(name: str) -> list[str]:
    """What follows an instruction of the Dockerfile, on one line."""
    lines = DOCKERFILE.replace("\\\n", " ").splitlines()
    return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]


def applied(folder: Path) -> Iterator[Path]:
    """The manifests that a kustomization applies, unpatched."""
    given = yaml.safe_load((folder / "kustomization.yaml").read_text())
    for one in (folder / name for name in (*given["resources"], *given.get("components", ()))):
        if one.is_dir():
            yield from applied(one.resolve())
        else:
            yield one


def documents(paths: Iterator[Path]) -> list[Manifest]:
    return [one for path in paths for one in yaml.safe_load_all(path.read_text())]


ALL = documents(applied(EXAMPLE))
PODS = {
    one["metadata"]["name"]: one["spec"]["template"] for one in ALL if one["kind"] == "Deployment"
}


def of_kind(kind: str) -> list[Manifest]:
    return [one for one in ALL if one["kind"] == kind]


def selected(selector: Mapping[str, Any]) -> set[str]:
    """The deployments whose pods a selector finds."""
    wanted = selector.get("matchLabels", {})
    return {
        name for name, pod in PODS.items() if wanted.items() <= pod["metadata"]["labels"].items()
    }


def box(name: str) -> Manifest:
    (found,) = PODS[name]["spec"]["containers"]
    return found  # type: ignore[no-any-return]


def commands() -> Iterator[list[str]]:
    """The commands that are started, and that of the image's build."""
    yield json.loads(instructions("CMD")[-1])
    (built,) = [one for one in instructions("RUN") if "doctor" in one]
    yield shlex.split(built)[1:]
    yield from (COMPOSE["services"][name]["command"] for name in ("server", "workers"))
    yield from (box(name)["args"] for name in PODS)
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


# --- Kubernetes ----------------------------------------------------------------------------------


def require_valid(manifest: Manifest) -> None:
    """Valid by the schema of its kind, if it is one of Kubernetes and not of KEDA."""
    if not manifest["apiVersion"].startswith("keda.sh/"):
        validate(manifest, "1.31", strict=True)


def test_every_manifest_is_applied_and_valid() -> None:
    there = {path for path in KUBERNETES.rglob("*.yaml") if path.stem != "kustomization"}
    assert set(applied(EXAMPLE)) == there
    assert all(path.parent.name == "base" for path in applied(KUBERNETES / "base"))
    for one in ALL:
        require_valid(one)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_example_is_rendered_with_its_patches() -> None:
    command = ["kubectl", "kustomize", str(EXAMPLE)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rendered = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(told)}
    assert rendered.keys() == {(one["kind"], one["metadata"]["name"]) for one in ALL}
    for one in rendered.values():
        require_valid(one)
    assert "replicas" not in rendered["Deployment", "workers"]["spec"]  # KEDA decides
    assert rendered["Deployment", "server"]["spec"]["replicas"] == 2
    (rule,) = rendered["Ingress", "stagewright"]["spec"]["rules"]
    assert rendered["Ingress", "stagewright"]["spec"]["tls"][0]["hosts"] == [rule["host"]]
    store = rendered["NetworkPolicy", "store"]["spec"]["egress"][0]
    assert store == {
        "to": [{"ipBlock": {"cidr": "10.0.0.5/32"}}], "ports": [{"protocol": "TCP", "port": 5432}],
    }  # fmt: skip


def test_probes_and_ports_are_those_of_the_service() -> None:
    paths = {route.path for route in health.router.routes}  # type: ignore[attr-defined]
    probes = ("livenessProbe", "readinessProbe")
    assert box("server")["ports"] == [{"name": "http", "containerPort": PORT}]
    assert {box("server")[name]["httpGet"]["port"] for name in probes} == {"http"}
    assert {box("server")[name]["httpGet"]["path"] for name in probes} <= paths
    told = box("workers")["livenessProbe"]["exec"]["command"][-1]
    assert f"127.0.0.1:{PORT}/health/live" in told
    assert instructions("EXPOSE") == [str(PORT)]
    (probe,) = instructions("HEALTHCHECK")
    assert f"127.0.0.1:{PORT}/health/ready" in probe
    (published,) = COMPOSE["services"]["server"]["ports"]
    assert published == f"127.0.0.1:{PORT}:{PORT}"


def test_selectors_find_what_they_should() -> None:
    for one in of_kind("Deployment"):
        assert selected(one["spec"]["selector"]) == {one["metadata"]["name"]}
    for one in of_kind("PodDisruptionBudget"):
        assert selected(one["spec"]["selector"]) == {one["metadata"]["name"]}
    (service,) = of_kind("Service")
    assert selected({"matchLabels": service["spec"]["selector"]}) == {"server"}
    (ingress,) = of_kind("Ingress")
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    (port,) = service["spec"]["ports"]
    backend = {"name": service["metadata"]["name"], "port": {"name": port["name"]}}
    assert path["backend"]["service"] == backend
    (scaled,) = of_kind("ScaledObject")
    assert scaled["spec"]["scaleTargetRef"]["name"] in PODS
    (trigger,) = scaled["spec"]["triggers"]
    (authentication,) = of_kind("TriggerAuthentication")
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]


@pytest.mark.parametrize(
    ("name", "arrives", "leaves"),
    [("workers", [], {5432, 53}), ("server", ["http"], {5432, 53, 443})],
)
def test_traffic_is_only_what_is_needed(name: str, arrives: list[str], leaves: set[int]) -> None:
    policies = [
        one["spec"]
        for one in of_kind("NetworkPolicy")
        if name in selected(one["spec"]["podSelector"])
    ]
    assert {kind for one in policies for kind in one["policyTypes"]} == {"Ingress", "Egress"}

    def ports(rules: str) -> list[Any]:
        return [
            port["port"]
            for one in policies
            for rule in one.get(rules, ())
            for port in rule["ports"]
        ]

    assert ports("ingress") == arrives
    assert set(ports("egress")) == leaves


def test_as_many_workers_are_wanted_as_there_are_jobs_for_them() -> None:
    (scaled,) = of_kind("ScaledObject")
    told = scaled["spec"]["triggers"][0]["metadata"]
    arguments = box("workers")["args"]
    assert told["targetQueryValue"] == arguments[arguments.index("--workers") + 1]
    engine = create_engine("sqlite://")
    with engine.begin() as database:
        TABLES.create_all(database)
        for number, state in enumerate(State):
            database.execute(insert(JOBS).values(
                id=str(number), kind="plan", user="ann", state=state, request="{}", digest="",
                priority=0, created=0.0, attempts=0, reason="",
            ))  # fmt: skip
        assert database.execute(text(told["query"])).scalar_one() == 2


# --- Compose, and the image ----------------------------------------------------------------------


def test_workers_can_be_scaled_and_share_the_servers_image() -> None:
    server, workers = (COMPOSE["services"][name] for name in ("server", "workers"))
    own = {"command", "scale"}
    assert not workers.keys() & {"ports", "container_name", "volumes"}
    assert {name: one for name, one in workers.items() if name not in own} == {
        name: one for name, one in server.items() if name not in {"command", "ports"}
    }


def test_kernels_of_the_build_are_those_of_the_run() -> None:
    """Numba looks for the kernels of its CPU, in a folder where it may write."""
    names = re.findall(r"NUMBA_CPU_NAME=(\S+)", DOCKERFILE)
    assert len(names) == 2
    assert len(set(names)) == 1
    made, used = re.findall(r"NUMBA_CACHE_DIR=(\S+)", DOCKERFILE)
    copied = json.loads(instructions("ENTRYPOINT")[-1])[2]
    assert f"cp -r {made} {Path(used).parent}/ " in copied
    assert COMPOSE["services"]["workers"]["tmpfs"] == [str(Path(used).parent)]
    for name in PODS:
        assert box(name)["volumeMounts"] == [{"name": "tmp", "mountPath": str(Path(used).parent)}]
