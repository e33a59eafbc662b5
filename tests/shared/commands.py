"""Commands called in this process: what they print, and with which exit code."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from typer import testing
from typer.main import get_command
from typer.testing import CliRunner, Result

from stagewright.cli import app

# A runner makes all commands anew for each call, which takes longer than a refusal does.
testing._get_command = cache(get_command)

FT06 = """# Fisher and Thompson
6 6
2 1 0 3 1 6 3 7 5 3 4 6
1 8 2 5 4 10 5 10 0 10 3 4
2 5 3 4 5 8 0 9 1 1 4 7
1 5 0 5 2 5 3 3 4 8 5 9
2 9 1 3 4 5 5 4 0 3 3 1
1 3 3 3 5 9 0 10 4 4 2 1
"""


PROFILE = (
    "node1 -- Input0 -- forward_compute_time=5.000, backward_compute_time=0.000, "
    "activation_size=0.0, parameter_size=0.000\n"
    "node2 -- Linear -- forward_compute_time=2.000, backward_compute_time=4.000, "
    "activation_size=1000.0, parameter_size=8000.000\n"
    "node3 -- ReLU -- forward_compute_time=1.000, backward_compute_time=1.500, "
    "activation_size=1000.0, parameter_size=0.000\n"
    "\tnode1 -- node2\n"
    "\tnode2 -- node3\n"
)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def answered(*arguments: object, code: int = 0) -> str:
    """Stdout of a run that ends with ``code`` and complains of nothing."""
    result = run(*arguments)
    assert result.exit_code == code, (result.output, result.exception)
    assert result.stderr == ""
    return result.stdout


def answered_json(*arguments: object, code: int = 0) -> Any:
    document = json.loads(answered(*arguments, "--json", code=code))
    assert isinstance(document, dict)
    return document


def refused(*arguments: object) -> str:
    """The one line with which a run refuses its input."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.exception
    assert re.fullmatch(r"stagewright: [^\n]+\n", result.stderr)
    return result.stderr.removeprefix("stagewright: ").strip()


def given_to(files: Path) -> list[object]:
    return ["--model", files / "model.json", "--cluster", files / "cluster.json"]


def rewrite(path: Path, **fields: object) -> Path:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return path
