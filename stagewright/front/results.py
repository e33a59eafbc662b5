"""What users of Python see of an answer, and how they end a search by hand."""

import base64
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from html import escape
from typing import TYPE_CHECKING, Any

from stagewright.formulations.forms.answers import StopToken
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.units import counted, format_seconds
from stagewright.service.answers import frame_of
from stagewright.solvers import planning

if TYPE_CHECKING:
    from stagewright.formulations.forms.answers import Progress


class PlanResult(planning.Result):
    """The answer to a planning problem; fields as in `stagewright.solvers.planning.Result`.

    It prints as a few lines, in a notebook with its timeline.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(_lines(self))

    def _repr_html_(self) -> str:
        picture = "" if self.plan is None else _image(self.plan)
        return f"<pre>{escape(repr(self))}</pre>{picture}"

    def rows(self) -> list[dict[str, Any]]:
        """A row for each stage: times in seconds per microbatch, memory in bytes."""
        from stagewright.executor.drawing.page import summarise

        return [] if self.plan is None else [asdict(one) for one in summarise(self.plan)]

    def to_frame(self) -> Any:
        """The `rows` as a ``DataFrame`` of pandas; see `frame_of`."""
        return frame_of(self.rows())


def shown(result: planning.Result) -> PlanResult:
    """The same answer, as users of Python see it."""
    return PlanResult(**{one.name: getattr(result, one.name) for one in fields(result)})


@dataclass(frozen=True, slots=True)
class Picture:
    """A plan's timeline, which a notebook draws."""

    plan: PipelinePlan

    def _repr_html_(self) -> str:
        return _image(self.plan)


def print_progress(progress: "Progress") -> None:
    """Print the best iteration and bound so far; for ``on_progress``."""
    if progress.doing:
        print(f"{progress.seconds:6.1f} s   {progress.doing}", flush=True)
        return
    said = [f"{progress.seconds:6.1f} s", f"bound {format_seconds(progress.bound)}"]
    if progress.objective is not None:
        said.insert(1, f"iteration {format_seconds(progress.objective)}")
    print("   ".join(said), flush=True)


@contextmanager
def stopped_by_hand(given: StopToken | None) -> Iterator[StopToken | None]:
    """The ``given`` token; without one, in an interactive session, one that Ctrl-C sets.

    A second Ctrl-C raises KeyboardInterrupt.
    """
    is_ours = (
        given is None
        and hasattr(sys, "ps1")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not is_ours:
        yield given
        return
    stop = threading.Event()

    def handle(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop.set()

    signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _lines(result: planning.Result) -> Iterator[str]:
    from stagewright.executor.drawing.timeline import shorten_devices
    from stagewright.formulations.checking.certificates import headlines

    plan = result.plan
    if plan is None:
        yield f"{result.status.value}, by {result.planner} in {result.seconds:.1f} s"
        yield result.reason or "no plan"
        return
    devices = {name for stage in plan.stages for name in stage.devices}
    yield (
        f"{result.status.value}, by {plan.planner} in {result.seconds:.1f} s: {plan.model} on "
        f"{plan.cluster}, {counted(len(plan.stages), 'stage', 'stages')} on "
        f"{counted(len(devices), 'device', 'devices')}, "
        f"{counted(plan.microbatches, 'microbatch', 'microbatches')}"
    )
    if result.cost is not None:
        yield f"iteration {format_seconds(result.cost)}"
    if plan.certificate is not None:
        for one in headlines(plan.certificate)[:2]:
            yield (
                f"bound {format_seconds(one.seconds)} for {one.plans}, gap {one.gap:.2%}, "
                f"proved by {one.proved_by}"
            )
    stages = (
        f"{stage.layers[0]}-{stage.layers[1] - 1} on {shorten_devices(stage.devices)}"
        for stage in plan.stages
    )
    yield f"layers {'; '.join(stages)}"


def _image(plan: PipelinePlan) -> str:
    from stagewright.executor.drawing.charts.chart import png

    picture = base64.b64encode(png(plan)).decode()
    return f'<img alt="timeline" style="max-width: 100%" src="data:image/png;base64,{picture}">'
