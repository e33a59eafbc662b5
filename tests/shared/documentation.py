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

from stagewright.formulations.parallelism.layout import Layout
from stagewright.graphs.documents.units import counted
from stagewright.service.schemas import json_schema

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
README = ROOT / "README.md"
PAGES = (*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/reference").glob("*.md")))
SEARCHES = ("plan", "sweep", "what-if")


PASSAGES = (README, ROOT / "docs/what-fits.md")


def require_passage(name: str, text: str) -> None:
    """Pages say ``text`` between their marks of this name; with REWRITE_DOCS=1 they are made to."""
    for file in PASSAGES:
        before = file.read_text(encoding="utf-8")
        marks = rf"(<!-- {name} -->).*?(<!-- /{name} -->)"
        after, count = re.subn(marks, rf"\1{text}\2", before, flags=re.DOTALL)
        assert count == 1, f"{file.name} has no marks of {name}"
        if os.environ.get("REWRITE_DOCS"):
            file.write_text(after, encoding="utf-8")
        else:
            assert before == after, f"{file.name} is not what the commands give: set REWRITE_DOCS=1"


def spelled(layout: Layout) -> str:
    """A layout's text, and what its parts mean."""
    ranks = ("pipeline", "tensor", "context", "data", "expert")
    degrees = [f"{getattr(layout, one)} {one}" for one in ranks if f" {one[0]}" in f" {layout}"]
    of_layers = "all" if layout.recompute_blocks is None else str(layout.recompute_blocks)
    parts = [
        f"{', '.join(degrees[:-1])} and {degrees[-1]} ranks",
        f"microbatches of {counted(layout.microbatch, 'sample', 'samples')}",
        layout.chunks > 1 and f"{layout.chunks} stages on each pipeline rank",
        layout.zero and f"ZeRO {layout.zero}",
        layout.first_blocks is not None and f"{layout.first_blocks} blocks in the first stage",
        layout.last_blocks is not None and f"{layout.last_blocks} in the last",
        layout.recompute != "none"
        and f"{layout.recompute} recomputation of {of_layers} blocks of a stage",
        layout.sequence_parallel and "sequence parallelism",
        layout.schedule != "1f1b" and f"the schedule {layout.schedule}",
        layout.blocks_by_stage and "the blocks of each stage",
        layout.offload_optimizer and "the optimizer's state in host memory",
    ]
    return f"`{layout}`, reads: {', '.join(filter(None, parts))}."


def blocks(file: Path, language: str) -> list[str]:
    """The blocks of code in a language: ``sh`` is executed, ``bash`` where torch trains."""
    text = file.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def in_this_process(script: str) -> str:
    """What commands of stagewright print, which a script has alone; searches are short."""
    printed = []
    for line in script.replace("\\\n", " ").splitlines():
        program, *arguments = shlex.split(line)
        assert program == "stagewright"
        short = ["--time-limit", 1] if arguments[0] in SEARCHES else []
        printed.append(answered(*arguments, *short))
    return "".join(printed)


def as_a_script(script: str) -> str:
    """What a script prints in the current folder, as it is written."""
    return run(["bash", "-euc", script], Path.cwd())


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
    files = [*folder.glob("*.json"), *folder.glob("*/*.json")]
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return {require_schema(document) for document in found if "format" in document}


def require_schema(document: dict[str, Any]) -> str:
    """The kind of a document, which keeps its schema."""
    name: str = document["format"].removeprefix("stagewright-")
    Draft202012Validator(json_schema(name)).validate(document)
    return name
