"""Tables of layouts and of their memory on a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stagewright.cli.console import out, print_table, say
from stagewright.graphs.documents.units import format_bytes
from stagewright.service.layouts.told import layouts as told

WIDE = 110
"""Characters from which a table has all its columns."""

if TYPE_CHECKING:
    from stagewright.formulations.parallelism.training import TrainingProblem
    from stagewright.service.answers import AnswerTable
    from stagewright.service.layouts.requests import LayoutAnswer, LayoutRow, RankMemoryAnswer


def print_layouts(
    name: str, problem: "TrainingProblem", answer: "LayoutAnswer", front: bool
) -> None:
    """The best layouts, and what else was asked for."""
    if answer.rows:
        _print_rows(answer.rows)
        say(*told.best_lines(name, problem, answer))
    else:
        say(f"{name}: {answer.status}", *([answer.reason] if answer.reason else []))
    if answer.refined is not None:
        _print(told.refined_table(answer.refined))
        say(told.refined_line(answer.refined))
    if answer.explained is not None:
        for table in told.explained_tables(answer.explained):
            _print(table)
        say(*told.explained_lines(answer.explained, problem.fabric.memory_bytes))
    if front:
        _print(told.front_table(answer))
    _print(told.what_if_table(answer))


def _print(table: "AnswerTable") -> None:
    if table.rows:
        print_table(table.head, table.rows, table.title)


def _print_rows(rows: "Sequence[LayoutRow]") -> None:
    """The best layouts: in one table, or on a narrow terminal in two by the same numbers."""
    table = told.best_table(rows)
    if out().width >= WIDE:
        print_table(table.head, table.rows)
        return
    halves: tuple[tuple[int, ...], ...] = ((0, 1, 2, 4), (3, 5, 6, 7, 8))
    if rows[0].goodput is not None:
        halves = ((0, 1, 2, 3), (4, 5, 6))
    for columns in halves:
        print_table(
            ("#", *(table.head[one] for one in columns)),
            [
                (str(number), *(row[one] for one in columns))
                for number, row in enumerate(table.rows, 1)
            ],
            tight=True,
        )


def print_memory(ranks: "Sequence[RankMemoryAnswer]", limit: float) -> None:
    """A row for every position in the pipeline."""
    narrow = out().width < WIDE
    # All ranks have the same reserve.
    kinds = [one for one in told.KINDS if not (narrow and one == "reserve")]
    table = told.memory_table(ranks, limit, kinds)
    print_table(("rank" if narrow else table.head[0], *table.head[1:]), table.rows, tight=narrow)
    if narrow:
        say(f"of every total {format_bytes(ranks[0].reserve_bytes)} are the reserve")
