"""The help pages: examples that parse, 80 columns, and one meaning of every option."""

import re
import shlex
from inspect import cleandoc
from typing import Any

import pytest
import typer
from documentation import PAGES, README
from typer.testing import CliRunner

from stagewright.cli import app
from stagewright.cli.pages import EXAMPLES

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]

# The same meaning in several forms: a file or a text, one for all or for each, a layout or a job.
FORMS = {
    "--cluster", "--explain", "--from", "--memory-limit", "--microbatch-size", "--microbatches",
    "--output", "--planner", "--rates", "--recompute", "--replicas", "--stages", "--tensor",
}  # fmt: skip


def examples(name: str) -> list[list[str]]:
    """The words of every example of a command."""
    words = shlex.split(cleandoc(EXAMPLES[name]).replace("\\\n", ""))
    starts = [i for i, word in enumerate(words) if word == "stagewright"]
    return [words[i:j] for i, j in zip(starts, [*starts[1:], len(words)], strict=True)]


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_command_lines_of_the_command(name: str) -> None:
    assert examples(name)
    for program, command, *arguments in examples(name):
        assert (program, command) == ("stagewright", name)
        context = COMMANDS[name].make_context(name, arguments)
        assert not context.args


@pytest.mark.parametrize("name", COMMANDS)
def test_a_page_ends_with_its_examples_in_80_columns(name: str) -> None:
    page = CliRunner(env={"COLUMNS": "80"}).invoke(app, [name, "--help"]).stdout
    assert max(map(len, page.splitlines())) <= 80
    lines = [line.rstrip() for line in page.rpartition("╯")[2].splitlines() if line.strip()]
    assert lines[0].split() in (["Example:"], ["Examples:"])
    shown = "\n".join(line[1:] for line in lines[1:])
    assert shlex.split(shown.replace("\\\n", "")) == [
        word for example in examples(name) for word in example
    ]
    assert "<bool>" not in page


def test_examples_run_on_real_files(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    # The first partition of a machine compiles, however busy it is.
    limits = {"plan": "1", "schedule": "1", "partition": "60"}
    for name in ("check", "simulate", "show", "partition", "schedule", "planners", "policies"):
        limit = ["--time-limit", limits[name]] if name in limits else []
        for _, *words in examples(name):
            found = CliRunner().invoke(app, [*words, *limit])
            assert found.exit_code == 0, (words, found.output)


def test_an_option_has_one_meaning() -> None:
    """The value has one name in all commands: FILE, SIZE, PACKAGE:FACTORY, or none of a flag."""
    meanings: dict[str, dict[tuple[str, bool], list[str]]] = {}
    for name, command in COMMANDS.items():
        for one in command.params:
            for option in one.opts:
                if option.startswith("--"):
                    # A help page that was shown has emptied the names of flags.
                    kind = (
                        str(one.metavar or None).removesuffix(",..."),
                        bool(getattr(one, "is_flag", False)),
                    )
                    meanings.setdefault(option, {}).setdefault(kind, []).append(name)
    assert {option for option, kinds in meanings.items() if len(kinds) > 1} == FORMS


def documented() -> list[str]:
    """The command lines in blocks of code of the documentation."""
    found = []
    for file in (README, *PAGES):
        for block in re.findall(r"^```\w+\n(.*?)^```$", file.read_text(), re.MULTILINE | re.DOTALL):
            whole = block.replace("\\\n", " ").replace("$network", "--module a:b --data a:b")
            found += [one for one in whole.splitlines() if one.startswith("stagewright ")]
    return found


def test_command_lines_of_the_documentation_have_options_of_their_commands() -> None:
    lines = documented()
    assert len(lines) > 40
    for line in lines:
        _, name, *arguments = shlex.split(line, comments=True)
        COMMANDS[name].make_context(name, arguments)
