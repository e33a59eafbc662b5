"""All kernels that jobs use, compiled before there are jobs: when an image is built."""

import json
import threading
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from numba.core import event

from stagewright.formulations.forms.answers import silent
from stagewright.service.jobs.kinds import KINDS, parse_request
from stagewright.solvers.dags import warm_up
from stagewright.solvers.planners.steps.warm_up import FINITE, HIERARCHY, PATTERNS, Step

_PAGE = "stagewright.service.http.page"
_SECONDS = 2.0  # of the search for an example's answer


def compile_all() -> int:
    """Compile the kernels of every planner and kind of job; how many were not compiled before.

    Numba keeps them in ``NUMBA_CACHE_DIR``, or next to their modules.
    """
    steps: list[Step] = [*FINITE, *HIERARCHY, *PATTERNS]
    steps += [warm_up.compile_partition, warm_up.compile_latency, warm_up.compile_piper]
    with event.install_recorder("numba:compile") as compiled:
        for step in steps:
            step()
        for kind, request in _examples():
            _answer(kind, request)
    return len(compiled.buffer) // 2  # the start and the end of each


def _answer(kind: str, request: dict[str, Any]) -> None:
    """Answer until nothing is compiled within the time limit, after which no kernel is reached."""
    while True:
        with event.install_recorder("numba:compile") as compiled:
            asked = parse_request(kind, json.dumps(request))
            KINDS[kind].answer(asked, silent, threading.Event())
        if not compiled.buffer:
            return


def _examples() -> Iterator[tuple[str, dict[str, Any]]]:
    """The example of each kind, as the page has it; a plan by the planner with its own kernels."""
    for kind, how in KINDS.items():
        request = json.loads((files(_PAGE) / f"example-{kind}.json").read_text("utf-8"))
        if "time_limit" in how.request.model_fields:
            request["time_limit"] = _SECONDS
        yield kind, request
        if kind == "plan":
            yield kind, request | {"planner": "ooo"}
