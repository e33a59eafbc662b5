"""What `make gpu` runs, in tiny form: a part that fails or hangs ends alone."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the executor needs torch")

from benchmarks import on_gpu


def rows(path: Path) -> list[list[str]]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return list(csv.reader(lines))


def test_a_visit_keeps_what_its_parts_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = subprocess.Popen

    def broken(command: list[str], **options: Any) -> Any:
        """The second part fails, the third one hangs."""
        code = {"ranks": "raise SystemExit(3)", "windows": "import time; time.sleep(600)"}
        own = code.get(command[4])
        return started(command if own is None else [sys.executable, "-c", own], **options)

    monkeypatch.setattr(on_gpu.subprocess, "Popen", broken)
    monkeypatch.setitem(on_gpu.PARTS, "windows", (2, on_gpu.PARTS["windows"][1]))
    on_gpu.main(tmp_path, ["attention", "ranks"], seconds=300)
    monkeypatch.setattr(on_gpu, "ON_GPU", True)
    on_gpu.main(tmp_path / "late", ["windows"], seconds=300)
    on_gpu.main(tmp_path / "never", ["attention"], seconds=0.5)
    ended = {
        part: one["ended"]
        for path in tmp_path.rglob("summary.json")
        for part, one in json.loads(path.read_text()).items()
        if path.parent.name != "never"
    }
    assert ended == {
        "attention": "done",
        "ranks": "failed with 3",
        "windows": "stopped at its limit of 2 s",
    }
    assert "no time was left" in (tmp_path / "never" / "summary.json").read_text()
    table = rows(tmp_path / "gpu-attention.csv")
    assert [row[0] for row in table[1:3]] == ["math", "efficient_attention"]
    assert float(table[1][1]) > 0
    assert "Attention on one" in (tmp_path / "tables.md").read_text()
