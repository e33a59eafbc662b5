"""Chrome traces of plans."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stagewright.executor.drawing.colours import KIND_NAMES
from stagewright.executor.drawing.periods import phases
from stagewright.executor.drawing.timeline import Block, timeline
from stagewright.formulations.operators.plan import OperatorPlan
from stagewright.formulations.plans.plan import PipelinePlan


def chrome_trace(plan: PipelinePlan) -> str:
    """The schedule in Chrome's trace event format, which Perfetto reads; times in microseconds.

    One process each for devices, channels and all-reduces, one thread per row; for a periodic plan
    also one for its periods.
    """
    processes = {"device": (1, "devices"), "channel": (2, "channels"), "reduce": (3, "all-reduces")}
    shown = phases(plan)
    if shown is not None:
        processes["period"] = (4, "periods")
    events = process_names(processes)
    for tid, row in enumerate(timeline(plan, max_device_rows=None)):
        pid = processes[row.group][0]
        place = {"pid": pid, "tid": tid}
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": row.name}})
        events.append(
            {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": tid}}
        )
        events += [_trace_event(block, place) for block in row.blocks]
    if shown is not None:
        place = {"pid": processes["period"][0], "tid": 0}
        events += [_slice(name, "period", place, begin, end) for name, begin, end in shown.spans]
    return trace_text(plan, events)


def process_names(processes: Mapping[str, tuple[int, str]]) -> list[dict[str, Any]]:
    """The events that give processes their names."""
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, name in processes.values()
    ]


def trace_text(plan: PipelinePlan | OperatorPlan, events: Sequence[dict[str, Any]]) -> str:
    """A trace of events of a plan."""
    other = {"model": plan.model, "cluster": plan.cluster, "planner": plan.planner}
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, separators=(",", ":")
    )


def _trace_event(block: Block, place: dict[str, int]) -> dict[str, Any]:
    action = block.action
    arguments: dict[str, Any] = {"stage": action.stage, "microbatch": action.microbatch}
    arguments |= {"bytes": block.bytes, "endpoints": block.ends or None}
    return {
        **_slice(
            str(action), KIND_NAMES[action.kind], place, block.start_seconds, block.finish_seconds
        ),
        "args": {key: value for key, value in arguments.items() if value is not None},
    }


def _slice(
    name: str, category: str, place: dict[str, int], start: float, finish: float
) -> dict[str, Any]:
    duration = (finish - start) * 1e6
    return {"ph": "X", "name": name, "cat": category, **place, "ts": start * 1e6, "dur": duration}
