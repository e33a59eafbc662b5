"""Programs read from their text."""

import re

from stagewright.executor.programs.program import Instruction, Program
from stagewright.formulations.plans.actions import parse_action
from stagewright.graphs.documents.errors import InputError


def parse_program(text: str, devices: tuple[str, ...]) -> Program:
    """Read the text of a program.

    Raises
    ------
    InputError
        If a word is not an instruction (with its rank and position), or the number of rows is not
        that of ``devices``.
    """
    lines = text.splitlines()
    if len(lines) != len(devices):
        raise InputError(
            f"a program for {len(devices)} ranks needs as many lines, got {len(lines)}"
        )
    rows = tuple(
        tuple(_parse(word, rank, i) for i, word in enumerate(line.split(",")) if line)
        for rank, line in enumerate(lines)
    )
    return Program(devices, rows)


def _parse(word: str, rank: int, position: int) -> Instruction:
    text, mark, rest = re.split(r"([<>@]|$)", word, maxsplit=1)
    peer = int(rest) if mark in ("<", ">") and rest.isdecimal() else None
    try:
        instruction = Instruction(parse_action(text), peer, "sub" if mark == "@" else None)
    except InputError as error:
        raise InputError(f"rank {rank}, position {position}: {error}") from None
    if str(instruction) != word:
        raise InputError(
            f"rank {rank}, position {position}: {word!r} is not an instruction; "
            "write for example 2F0, 2SEND_F0>3, 3RECV_F0<2, 2W0@sub"
        )
    return instruction
