"""The README and the pages: their blocks of code, and the documents that these write."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from commands import answered
from jsonschema import Draft202012Validator

from stagewright.service.schemas import json_schema

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
README = ROOT / "README.md"
PAGES = (*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/reference").glob("*.md")))
SEARCHES = ("plan", "sweep", "what-if")


def blocks(file: Path, language: str) -> list[str]:
    """The blocks of code in a language: ``sh`` is executed, ``bash`` where torch trains."""
    text = file.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def in_this_process(script: str) -> None:
    """Run a script of nothing but commands of stagewright, with short searches."""
    for line in script.replace("\\\n", " ").splitlines():
        program, *arguments = shlex.split(line)
        assert program == "stagewright"
        answered(*arguments, *(["--time-limit", 1] if arguments[0] in SEARCHES else []))


def as_a_script(script: str) -> None:
    """Run a script in the current folder, as it is written."""
    run(["bash", "-euc", script], Path.cwd())


def run(command: list[str], folder: Path) -> str:
    """What a command prints that succeeds, with stagewright on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def require_schemas(folder: Path) -> set[str]:
    """The kinds of the documents in a folder, which keep their schemas."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    return {require_schema(document) for document in found if "format" in document}


def require_schema(document: dict[str, Any]) -> str:
    """The kind of a document, which keeps its schema."""
    name: str = document["format"].removeprefix("stagewright-")
    Draft202012Validator(json_schema(name)).validate(document)
    return name
