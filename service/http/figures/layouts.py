"""What the page shows of answers about layouts of a transformer's training."""

import json
import re
from collections.abc import Iterator, Sequence

from stagewright.executor.drawing.colours import MEMORY_COLOURS
from stagewright.executor.drawing.web.render import Chart, Series
from stagewright.graphs.documents.units import format_bytes
from stagewright.service.answers import AnswerTable
from stagewright.service.http.figures.tables import (
    Figures,
    MemoryBar,
    Told,
    facts,
    written,
)
from stagewright.service.layouts.configured import TrainPlanRequest
from stagewright.service.layouts.profiled import ProfiledAnswer
from stagewright.service.layouts.rates import CalibrateAnswer
from stagewright.service.layouts.requests import (
    LayoutAnswer,
    LayoutMemoryAnswer,
    LayoutRequest,
    RankMemoryAnswer,
)
from stagewright.service.layouts.told import layouts as told
from stagewright.service.layouts.told import measured
from stagewright.service.layouts.tuning import TuneAnswer
from stagewright.service.requests import Request
from stagewright.service.whole_answers import read

_OPTION = re.compile(r"--([a-z]+(?:-[a-z]+)*)")
_FIELDS = {name.replace("_", "-"): name for name in TrainPlanRequest.model_fields}
_GB = 1e9


def train_plan(request: Request, answer: Told) -> Figures:
    """The best layouts, the memory of the best, the front, and the layout that is explained."""
    assert isinstance(request, LayoutRequest)
    found = _read_layouts(request, answer)
    limit = request.problem.fabric.memory_bytes
    explained, best = found.explained, _ranged(found)
    tables = [] if explained is None else [*told.explained_tables(explained)]
    tables += [best, *_more_tables(found)]
    lead = [] if explained is None else [
        f"Why not {explained.layout}?", *told.explained_lines(explained, limit),
    ]  # fmt: skip
    return Figures(
        [*_numbers(found, limit)],
        [one for one in tables if one.rows],
        charts=[("Time and memory", _front(found, limit))] if found.front else (),
        lead=[*map(_in_fields, lead)],
        lines=[*map(_in_fields, _lines(request, found))],
        memory=_bars([*_ranks(found)], limit),
        explains=best.title,
    )


def _numbers(answer: LayoutAnswer, limit: float) -> Iterator[tuple[str, str]]:
    """The main numbers; ranges and rates are of the best layout whose stages are alike."""
    plan = answer.plan
    if plan is None:
        yield str(answer.status), "no layout was found"
        return
    yield written(plan.iteration_seconds, "seconds"), "per iteration, the best layout"
    yield written(plan.bound and plan.bound.seconds, "seconds"), "proved lower bound"
    for best in answer.rows[:1]:
        of = "" if best.layout == str(plan.layout) else ", with stages alike"
        low, high = (written(one, "seconds") for one in (best.seconds_low, best.seconds_high))
        yield f"{low} to {high}", f"expected when measured{of}"
        yield f"{best.mfu:.1%}", f"MFU{of}"
        yield f"{best.tokens_per_second:,.0f}", f"tokens per second{of}"
        yield written(best.peak_bytes, "bytes"), f"peak memory, of {format_bytes(limit)}{of}"


def _ranks(answer: LayoutAnswer) -> Iterator[RankMemoryAnswer]:
    """The memory of the best layout."""
    for rank, one in enumerate(() if answer.plan is None else answer.plan.memory):
        kinds = {f"{kind}_bytes": getattr(one, kind) for kind in (*told.KINDS, "total")}
        yield RankMemoryAnswer(rank=rank, **kinds)


def _read_layouts(request: LayoutRequest, answer: Told) -> LayoutAnswer:
    """The answer from its whole text."""
    found = read(_text(answer), request)
    assert isinstance(found, LayoutAnswer)
    return found


def _ranged(answer: LayoutAnswer) -> AnswerTable:
    """The table of layouts with the ranges of time, and what each loses by before the rest."""
    plain = told.best_table(answer.rows)
    head = (*plain.head[:2], "<when measured", plain.head[-1], *plain.head[2:-1])
    return AnswerTable(
        plain.title,
        head,
        [
            (*cells[:2], _whole(told.expected(row)), cells[-1], *cells[2:-1])
            for cells, row in zip(plain.rows, answer.rows, strict=True)
        ],
    )


def _whole(expected: str) -> str:
    """The range of seconds, which is not broken into two lines."""
    return expected.removesuffix(" when measured").replace(" ", "\N{NO-BREAK SPACE}")


def _more_tables(answer: LayoutAnswer) -> Iterator[AnswerTable]:
    if answer.refined is not None:
        yield told.refined_table(answer.refined)
    yield told.front_table(answer)
    yield told.what_if_table(answer)


def _lines(request: LayoutRequest, answer: LayoutAnswer) -> Iterator[str]:
    if answer.rows:
        name = request.problem.architecture.name
        yield from told.best_lines(name, request.problem, answer)
    elif answer.reason:
        yield answer.reason
    if answer.refined is not None:
        yield told.refined_line(answer.refined)


def _in_fields(line: str) -> str:
    """The line, with fields of the request in place of options of the command."""
    names = _FIELDS | {"for": "framework"}
    return _OPTION.sub(lambda found: names.get(found[1], found[0]), line)


def _front(answer: LayoutAnswer, limit: float) -> Chart:
    """The fastest layout for every amount of memory, and the best that fits."""
    ascending = sorted(answer.front, key=lambda one: one.peak_bytes)
    x = [one.peak_bytes / _GB for one in ascending]
    y = [one.seconds for one in ascending]
    names = [one.layout for one in ascending]
    until = max(*x, limit / _GB)
    return Chart(
        "peak memory of a GPU, in GB",
        "seconds of an iteration",
        (
            Series("no layout is faster with this memory", (*x, until), (*y, y[-1]), "steps",
                   "--best"),
            Series("fastest layouts", x, y, "points", "--best", names),
            *(
                Series("the best that fits", [one.peak_bytes / _GB], [one.seconds], "points",
                       "--critical", () if one.layout in names else (one.layout,))
                for one in answer.rows[:1]
            ),
        ),
        320,
    )  # fmt: skip


def _bars(ranks: Sequence[RankMemoryAnswer], limit: float) -> list[MemoryBar]:
    """A bar for each rank, on one scale that has the device's memory too."""
    whole = max([limit, *(one.total_bytes for one in ranks)])
    return [
        MemoryBar(
            f"rank {one.rank}",
            [
                (kind, round(100 * getattr(one, f"{kind}_bytes") / whole, 3), fill)
                for kind, fill in MEMORY_COLOURS.items()
            ],
            round(100 * limit / whole, 3),
            f"{format_bytes(one.total_bytes)} of {format_bytes(limit)}",
        )
        for one in ranks
    ]


def memory(request: Request, answer: Told) -> Figures:
    """The peak memory of every rank by kind."""
    found = read(_text(answer), request)
    assert isinstance(found, LayoutMemoryAnswer)
    limit = found.memory_bytes
    numbers = facts(answer, {
        "peak memory": "peak_bytes bytes", "of a device": "memory_bytes bytes",
        "fits": "fits", "layout": "layout",
    })  # fmt: skip
    lines = (*told.shortage_lines(found.shortages), told.bytes_in_range(found, limit),
             *found.remarks, f"rates: {found.rates}")  # fmt: skip
    table = told.memory_table(found.ranks, limit)
    bars = _bars(found.ranks, limit)
    return Figures(numbers, (table,), lines=tuple(map(_in_fields, lines)), memory=bars)


def calibrate(request: Request, answer: Told) -> Figures:
    """The runs, and the rates that were fitted to them."""
    found = read(_text(answer), request)
    assert isinstance(found, CalibrateAnswer)
    error = found.rates.mean_error
    numbers = [
        (f"{len(found.rows)}", "measured runs"),
        ("" if error is None else f"{error:.1%}", "mean error of a run that was left out"),
        (found.rates.name, "the name of the rates"),
    ]
    lines = tuple(map(_in_fields, measured.calibrated_lines(found)))
    return Figures(numbers, (measured.calibrated_table(found),), lines=lines)


def tune(request: Request, answer: Told) -> Figures:
    """What was tried, what may still win, what is next, and whether to stop."""
    found = read(_text(answer), request)
    assert isinstance(found, TuneAnswer)
    best = found.best
    numbers = [
        ("stop" if found.stop else "go on", "what the trials tell"),
        ("" if best is None else written(best.seconds, "seconds"), "per iteration, the best run"),
        (f"{len(found.tried)}", "tried"),
        (f"{len(found.open)}", "may still win"),
        (f"{found.candidates}", "candidates"),
    ]
    lead = ("How it stands", *measured.standing_lines(found))
    lines, tables = [*measured.about_lines(found)], [*measured.tuned_tables(found)]
    return Figures(numbers, tables, lead=lead, lines=lines, folder="tuning")


def tune_read(request: Request, answer: Told) -> Figures:
    """The same after more trials."""
    return tune(request, answer)


def _text(answer: Told) -> str:
    return json.dumps(answer)


def train_plan_profiles(request: Request, answer: Told) -> Figures:
    """The stages of a plan by measured layers, and the GPUs of every kind."""
    numbers = facts(answer, {
        "per iteration": "iteration_seconds seconds",
        f"bound, by {answer['proved_by']}": "bound_seconds seconds", "gap": "gap percent",
        "samples per second": "samples_per_second number",
    })  # fmt: skip
    found = read(_text(answer), request)
    assert isinstance(found, ProfiledAnswer)
    lines = [f"of all plans of the class: {answer['plan_class']}", *answer["remarks"]]
    lines += [answer["reason"]] if answer["reason"] else []
    return Figures(numbers, measured.profiled_tables(found), lines=lines)
