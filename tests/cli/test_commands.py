"""Commands from typed models: names, types, defaults and help are those of the fields."""

import inspect
from typing import Annotated, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

import stagewright
from stagewright.cli.commands import Asked, CommandOptions, command, command_of, fields_of
from stagewright.cli.pages import Commands
from stagewright.service.clusters.requests import AllocateRequest
from stagewright.service.options import Option, listed, whole
from stagewright.service.pipelines.requests import PartitionRequest, PlanRequest
from stagewright.service.requests import SearchRequest
from stagewright.service.schedules.requests import ScheduleRequest

COMMANDS = Commands()
MOST_FIRST = 12  # options and arguments of a page before its headings


class Sized(SearchRequest):
    """A request of every sort of field."""

    size: int = Field(ge=1)
    """How large
    it is."""
    rate_bytes: Annotated[float | None, Option("--rate", form="RATE")] = None
    """A number."""
    counts: Annotated[tuple[int, ...], Option(form="N,...", of_text=listed(whole))] = (1,)
    """Numbers."""
    way: Literal["left", "right"] = "left"
    """A choice."""
    fast: bool = False
    """A flag."""
    whether: bool | None = None
    """A flag of either sign."""
    inner: SearchRequest | None = None
    """No option."""


class Own(CommandOptions):
    """Options of the command."""

    file: Annotated[str, Option("FILE")]
    """An argument."""
    seed: int = 7
    """In place of the request's."""


SEEN: list[tuple[Sized, Own]] = []


@command(without="threads", headings={"Later": "way seed"})
def sized(asked: Asked[Sized], given: Own) -> int:
    """Keep what is asked."""
    SEEN.append((asked.request(seed=given.seed), given))
    return 0


def ran(*arguments: str) -> tuple[int, str]:
    """Exit code and output, or the error, of the command."""
    app = typer.Typer()
    made = command_of(sized, "sized", help="Keep.")
    app.callback()(lambda: None)
    group = typer.main.get_command(app)
    group.commands["sized"] = made  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", lambda _: group)
        found = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["sized", *arguments])
    return found.exit_code, found.output or str(found.exception)


def test_fields_become_options() -> None:
    code, page = ran("--help")
    assert code == 0
    first, _, later = page.partition("Later")
    for words in ("--size", "How large it is.", "RATE", "--counts", "--fast", "--no-whether"):
        assert words in first
    assert "FILE" in first
    assert "<left|right>" in later
    assert "--seed" in later
    assert "default: 7" in later
    assert "--threads" not in page
    assert "--inner" not in page


def test_a_request_is_made_of_options() -> None:
    words = "--size 3 --counts 4,5 --way RIGHT --no-whether --rate 2.5 --time-limit 1.5 a.txt"
    assert ran(*words.split())[0] == 0
    request, own = SEEN.pop()
    assert request == Sized(
        size=3, counts=(4, 5), way="right", whether=False, rate_bytes=2.5, time_limit=1.5, seed=7
    )
    assert own.file == "a.txt"
    assert ran("--size", "1", "b")[0] == 0
    assert SEEN.pop()[0].counts == (1,)  # the field's default where the option is not given


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--size 0 a", "greater than or equal to 1"),
        ("--size 1 --counts 1,x a", "--counts: 'x' is no whole number"),
        ("--size 1 --rate inf a", "--rate must be finite, got inf"),
        ("--size 1 --time-limit 0 a", "--time-limit must be a positive number of seconds"),
        ("a", "Missing option '--size'"),
    ],
)
def test_errors_name_options(words: str, said: str) -> None:
    code, output = ran(*words.split())
    assert code != 0
    assert said in " ".join(output.replace("│", " ").split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_text_and_few_come_first(name: str) -> None:
    fields = fields_of(COMMANDS.function(name))
    assert all(one.info.description for one in fields)
    assert sum(one.heading is None for one in fields) <= MOST_FIRST


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_has_the_first_paragraphs(name: str) -> None:
    assert COMMANDS.listed()[name].help == (COMMANDS[name].help or "").split("\n\n")[0]


@pytest.mark.parametrize(
    ("function", "request_"),
    [
        (stagewright.plan, PlanRequest),
        (stagewright.partition, PartitionRequest),
        (stagewright.schedule, ScheduleRequest),
        (stagewright.allocate, AllocateRequest),
    ],
)
def test_functions_of_python_have_the_defaults_of_their_requests(function, request_) -> None:
    for name, parameter in inspect.signature(function).parameters.items():
        field = request_.model_fields.get(name)
        if field is not None and parameter.default is not inspect.Parameter.empty:
            assert parameter.default == field.default or field.is_required(), name
