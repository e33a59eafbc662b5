"""The words of a launch script: assignments and variables of bash, not its commands."""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stagewright.graphs.documents.errors import InputError

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ARRAY = re.compile(
    r"\s*(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)?)?(\w+)(\+?)=\((.*)\)\s*", re.DOTALL
)
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^{}]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_PROGRAM = re.compile(r".*\.py")
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class LaunchScript:
    """The variables of a script, and the words before and behind the program that it starts."""

    variables: dict[str, str]
    launcher: tuple[str, ...]
    arguments: tuple[str, ...]


def read_script(text: str, place: str, array: str) -> LaunchScript:
    """Read a script of bash, or a list of arguments.

    Assignments count in their order, whatever condition they are under. A script that starts no
    program has its arguments in the ``array``; a text without assignments is the arguments.
    """
    variables: dict[str, str] = {}
    started: list[str] | None = None
    loose: list[str] = []
    for command in _commands(text, place):
        words = _words(_expanded(command, variables))
        found = _ARRAY.fullmatch(command)
        if found is not None:
            _assign(variables, found[1], found[2], " ".join(_words(_expanded(found[3], variables))))
            continue
        while words and (one := _ASSIGNED.fullmatch(words[0].rstrip(";"))) is not None:
            _assign(variables, one[1], one[2], one[3])
            words = words[1:]
        if words[:1] in (["export"], ["local"], ["readonly"], ["declare"]):
            for one in filter(None, map(_ASSIGNED.fullmatch, words[1:])):
                _assign(variables, one[1], one[2], one[3])
            continue
        flat = [one for word in words for one in word.split()]
        if any(map(_PROGRAM.fullmatch, flat)) and any(one.startswith("--") for one in flat):
            started = flat
        loose += flat
    if started is not None:
        at = next(i for i, one in enumerate(started) if _PROGRAM.fullmatch(one))
        return LaunchScript(variables, tuple(started[:at]), tuple(started[at + 1 :]))
    listed = variables[array].split() if array in variables else loose
    return LaunchScript(variables, (), tuple(listed))


def _assign(variables: dict[str, str], name: str, adds: str, value: str) -> None:
    before = f"{variables.get(name, '')} " if adds else ""
    variables[name] = before + value


def _commands(text: str, place: str) -> Iterator[str]:
    """The commands, each joined from lines until its quotes and parentheses are closed."""
    pending = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        pending += line
        if pending.endswith("\\"):
            pending = f"{pending[:-1]} "
        elif _is_open(pending):
            pending += "\n"
        else:
            yield from filter(str.strip, [pending])
            pending = ""
    if pending.strip():
        if _is_open(pending):
            raise InputError(f"{place}: a quote or parenthesis is not closed: {pending[:60]!r}")
        yield pending


def _is_open(command: str) -> bool:
    try:
        words = _words(command)
    except ValueError:
        return True
    return sum(one.count("(") - one.count(")") for one in words) > 0


def _words(command: str) -> list[str]:
    return shlex.split(command, comments=True)


def _expanded(text: str, variables: dict[str, str]) -> str:
    """The text with the values of variables and sums; what is not known stays as it is."""

    def value(match: re.Match[str]) -> str:
        name, otherwise = match[1] or match[3], match[2]
        return variables.get(name) or (match[0] if otherwise is None else otherwise)

    def result(match: re.Match[str]) -> str:
        names = re.sub(r"\b[A-Za-z_]\w*", lambda one: variables.get(one[0], one[0]), match[1])
        try:
            return str(_calculated(ast.parse(names.strip(), mode="eval").body))
        except (SyntaxError, KeyError, ValueError, ZeroDivisionError):
            return match[0]

    for _ in range(4):  # a default may have a variable too
        text = _VARIABLE.sub(value, text)
    return _ARITHMETIC.sub(result, text)


def _calculated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_calculated(node.left), _calculated(node.right))
    raise ValueError
