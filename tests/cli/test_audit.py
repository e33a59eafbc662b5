"""The audit of dependencies: what is not pinned, what is known to be vulnerable, what was asked."""

import importlib.util
import json
import subprocess
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / ".ci" / "audit.py"


@pytest.fixture
def audit() -> ModuleType:
    pytest.importorskip("packaging", reason="packaging is not installed")
    spec = importlib.util.spec_from_file_location("audit", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_not_installed_as_pinned_is_named(audit: ModuleType) -> None:
    pins = audit.pinned("Jinja2==1.0\npluggy==9.9\n")
    found = list(audit.unpinned("Jinja2[i18n]", pins))
    assert f"jinja2 {version('jinja2')} is installed, 1.0 is pinned: make clean check" in found
    assert any("markupsafe" in one and "not pinned" in one for one in found)
    assert any("babel" in one for one in found)  # of the extra
    assert list(audit.unpinned("jinja2", {
        "jinja2": version("jinja2"), "markupsafe": version("markupsafe"),
    })) == []  # fmt: skip
    assert list(audit.unpinned("pip", {})) == []  # it comes with Python
    assert list(audit.unpinned("no-such-package", {})) == ["no-such-package is not installed"]


def answered(monkeypatch: pytest.MonkeyPatch, stdout: str, stderr: str = "") -> None:
    def run(command: Any, **_: Any) -> Any:
        return subprocess.CompletedProcess(command, 1, stdout, stderr)

    monkeypatch.setattr(subprocess, "run", run)


def test_advisories_are_told_and_what_was_not_asked(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    flaw = {"id": "PYSEC-1", "fix_versions": ["2.0"]}
    told = [
        {"name": "a", "version": "1.0", "vulns": [flaw]},
        {"name": "b", "skip_reason": "not found"},
        {"name": "c", "version": "1.0", "vulns": []},
    ]
    answered(monkeypatch, json.dumps({"dependencies": told}))
    bad, unasked = audit.advisories()
    assert bad == ["a 1.0: PYSEC-1, fixed in ['2.0']"]
    assert unasked == "1 of 3 packages are not known there: b"
    answered(monkeypatch, json.dumps({"dependencies": told[2:]}))
    assert audit.advisories() == ([], "")


def test_a_service_that_does_not_answer_is_said(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered(monkeypatch, "", "Traceback\nConnectionError: no such host")
    assert audit.advisories() == ([], "ConnectionError: no such host")
    monkeypatch.setattr(audit, "PACKAGE", "packaging")
    monkeypatch.setattr(audit, "pinned", lambda _: {"packaging": version("packaging")})
    monkeypatch.setattr(audit, "advisories", lambda: ([], "it did not answer"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 0))
    assert audit.main() == 0
    assert capsys.readouterr().out == "NOT AUDITED for known vulnerabilities: it did not answer\n"
    monkeypatch.setattr(audit, "advisories", lambda: (["a 1.0: PYSEC-1"], ""))
    assert audit.main() == 1
    assert capsys.readouterr().out == "a 1.0: PYSEC-1\n"
