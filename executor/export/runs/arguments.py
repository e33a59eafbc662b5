"""A training run: the words of its launch script, and the arguments of Megatron-LM's scripts."""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from stagewright.formulations.parallelism.layout import Layout
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.architecture import Architecture

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


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A run of ``framework``: what it trains and how; None is what its file does not say.

    ``gradients`` is the type in which gradients are summed up, ``overlap`` whether they are
    exchanged beside computations; ``notes`` are what is priced otherwise than it runs.
    """

    framework: str
    layout: Layout
    architecture: Architecture | None = None
    batch: int | None = None
    sequence: int | None = None
    precision: str = "bf16"
    gradients: str = "fp32"
    attention: str = "fused"
    overlap: bool = True
    notes: tuple[str, ...] = ()


def data_degree(gpus: int | None, others: Mapping[str, int]) -> int:
    """The copies of the model on ``gpus`` devices of which the ``others`` degrees share one."""
    inner = prod(others.values())
    if gpus is None:
        raise InputError("the number of GPUs is not said; give --gpus")
    if gpus % inner:
        degrees = " x ".join(f"{name} {degree}" for name, degree in others.items())
        raise InputError(f"{gpus} GPUs are no multiple of {degrees} = {inner}")
    return gpus // inner


def division(blocks: Sequence[int], pipeline: int) -> dict[str, Any]:
    """A layout's chunks, and the blocks of the ends or of every stage where they differ."""
    if len(blocks) % pipeline:
        raise InputError(f"{len(blocks)} stages on {pipeline} pipeline ranks")
    found: dict[str, Any] = {"chunks": len(blocks) // pipeline}
    first, middle, last = blocks[0], {*blocks[1:-1]}, blocks[-1]
    if len({*blocks}) == 1:
        return found
    if len(middle) > 1:
        return found | {"blocks_by_stage": tuple(blocks)}
    ends = {"first_blocks": first, "last_blocks": last}
    return found | {name: one for name, one in ends.items() if one not in middle}


_WORDS = """
--accumulate-allreduce-grads-in-fp32 --adam --app-tag --apply-layernorm --apply-query --async-save
--attention-dropout --attention-softmax --auto-detect --batch-p2p --bias-swiglu --calculate-per
--check-for --ckpt --clip-grad --config-logger --create-attention --cross-entropy --cuda-graph
--data- --dataloader --ddp- --decoupled --defer-embedding --delay- --deterministic
--disable-straggler --dist-ckpt --distributed --empty-unused --enable-exp --eod --eval --exit
--external-cuda --finetune --fp8-amax --fp8-interval --fp8-margin --fp8-wgrad --grad-reduce-in-fp32
--gradient-reduce --high-priority --hysteresis --inference --init-method --initial-loss --keep-fp8
--load --local-rank --log --loss-scale --lr --make-vocab --manual-gc --max-tokens --merge-file
--mid-level --min-lr --mock-data --moe-aux --moe-grouped --moe-pad --moe-per-layer --moe-permute
--moe-router- --moe-token --moe-z --nccl --no-async-tensor --no-bias- --no-check --no-create
--no-fp8 --no-gradient-accumulation --no-load --no-masked --no-mmap --no-overlap-p2p --no-persist
--no-position-embedding --no-rope-fusion --no-save --num-dataset --num-workers
--overlap-cpu-optimizer --overlap-p2p --override-opt --per-split --profile --rampup --reset- --save
--seed --split --start- --te-rng --tensorboard --test-data --tiktoken --timing --tokenizer --tp-comm
--train-data --train-iters --train-samples --transformer-impl --use-checkpoint-opt --use-cuda-graph
--use-dist-ckpt --use-flash-attn --use-fused-weighted --use-legacy --use-mcore
--use-pytorch-profiler --valid-data
--vocab-file --wandb --weight-decay
"""
_OTHERS = tuple(_WORDS.split())
"""How arguments begin on which neither the model, its layout nor its price depends."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The values of arguments by name; those that were read are remembered, and notes on them."""

    values: dict[str, list[str]]
    read: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def flag(self, *names: str) -> bool:
        """Whether one of the flags is given."""
        self.read.update(names)
        return any(name in self.values for name in names)

    def text(self, *names: str) -> str | None:
        """The value of the first argument that is given; None if none is."""
        self.read.update(names)
        for name in names:
            if name in self.values:
                words = self.values[name]
                if len(words) != 1 or "$" in words[0]:
                    raise InputError(
                        f"{name} has {' '.join(words) or 'no value'!r}; it must be one value, "
                        "whose variables the script sets"
                    )
                return words[0]
        return None

    def number(self, *names: str) -> int | None:
        """The whole number of an argument."""
        text = self.text(*names)
        if text is not None and not text.isdecimal():
            raise InputError(f"{names[0]} must be a whole number, got {text!r}")
        return None if text is None else int(text)

    def required(self, name: str) -> int:
        """The whole number of an argument that must be given."""
        found = self.number(name)
        if found is None:
            raise InputError(f"{name} is missing; it must be a whole number")
        return found

    def real(self, name: str) -> float | None:
        """The number of an argument."""
        text = self.text(name)
        try:
            return None if text is None else float(text)
        except ValueError:
            raise InputError(f"{name} must be a number, got {text!r}") from None

    def choice(self, name: str, known: Sequence[str]) -> str:
        """One of the ``known`` texts, by default the first."""
        text = self.text(name) or known[0]
        if text not in known:
            raise InputError(f"{name} {text}: read are {', '.join(known)}")
        return text

    def require(self, name: str, values: Sequence[float]) -> None:
        """Refuse other numbers than these; without any, the argument."""
        found = self.real(name)
        if found is not None and found not in values:
            known = f"; read are {', '.join(map(str, values))}" if values else " here"
            raise InputError(f"{name} {found:g} is not understood{known}")

    def require_all_read(self) -> None:
        """Refuse arguments that were not read and may change the model or its layout."""
        for name in self.values:
            if name not in self.read and not name.startswith(_OTHERS):
                raise InputError(f"{name} is not understood; if it changes nothing, leave it out")


def by_name(words: Sequence[str]) -> dict[str, list[str]]:
    """The values of each argument, up to the end of the command."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            values = found[name] = [value] if value else []
        elif re.match(r"[|;&<>]|\d?>", word):
            break
        else:
            values.append(word)
    if not found:
        raise InputError("no arguments such as --num-layers; give the script that starts training")
    return found
