"""Plain sentences that say why a plan is as slow as it is."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from stagewright.executor.simulation.explanation import PlanExplanation, Resource
from stagewright.executor.simulation.idle import Cause
from stagewright.formulations.checking.certificates import headlines
from stagewright.formulations.plans.actions import ON_DEVICE, REDUCE
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.units import format_bytes, format_seconds

_UNEVEN = 1.02  # times the mean work of the devices; less is not worth a sentence
MOST_STAGES = 3  # of the critical path's, named with their shares


def explanation_sentences(plan: PipelinePlan, found: PlanExplanation | None) -> tuple[str, ...]:
    """Sentences on the bottleneck, the busiest device's idle time, and the critical path."""
    return () if found is None else (*_binding(plan, found), *_path(found))


def resource_name(one: Resource) -> str:
    """The resource in a sentence: ``stage 3 (s0g0 and 3 more)``."""
    numbers = ", ".join(map(str, one.stages))
    if one.kind == "channel":
        return f"the channel between stages {one.stages[0]} and {one.stages[1]}"
    if one.kind == "all-reduce":
        return f"the all-reduce of stage {numbers}"
    more = f" and {len(one.devices) - 1} more" if len(one.devices) > 1 else ""
    return f"stage{'s' if len(one.stages) > 1 else ''} {numbers} ({one.devices[0]}{more})"


def _binding(plan: PipelinePlan, found: PlanExplanation) -> Iterator[str]:
    whole, device, most = found.iteration_seconds, found.device, found.bottleneck
    works = f"works for {device.seconds / whole:.1%} of the {format_seconds(whole)} of an iteration"
    if most is device:
        first = f"The bottleneck is {resource_name(device)}: it {works}"
    else:
        first = (
            f"The bottleneck is {resource_name(most)}, in use for {most.seconds / whole:.1%} of an "
            f"iteration; the busiest device, of {resource_name(device)}, {works}"
        )
    idle = found.idle_seconds[device.devices[0]]
    parts = [
        f"{seconds / whole:.1%} {cause}"
        for cause, seconds in sorted(idle.items(), key=lambda one: -one[1])
        if seconds >= 0.0005 * whole
    ]
    yield f"{first}, and is idle {_listed(parts)}." if parts else f"{first}."
    if Cause.MEMORY in idle:
        yield from _memory(plan, device.devices[0])
    yield from _balance(found)


def _balance(found: PlanExplanation) -> Iterator[str]:
    """A sentence on how much longer the busiest device works than the mean device."""
    mean = sum(found.busy_seconds.values()) / len(found.busy_seconds)
    most = max(found.busy_seconds.values())
    if most > _UNEVEN * mean:
        yield (
            f"On average the devices in use work for {mean / found.iteration_seconds:.1%} of an "
            f"iteration, the busiest {most / mean:.2f} times as long."
        )


def _memory(plan: PipelinePlan, device: str) -> Iterator[str]:
    """How full the memory is that keeps forwards back."""
    stated = plan.predicted
    if stated is None or device not in stated.peak_memory_bytes:
        return
    peak, capacity = stated.peak_memory_bytes[device], stated.capacity_bytes.get(device)
    of = "" if capacity is None else f" of {format_bytes(capacity)}"
    yield f"Its peak memory is {format_bytes(peak)}{of}."


def _path(found: PlanExplanation) -> Iterator[str]:
    """A sentence on the parts of the critical path, the largest first."""
    if not found.path:
        return
    stages, others = defaultdict[int, float](float), defaultdict[str, float](float)
    for step in found.path:
        others["waits of the plan"] += step.wait_seconds
        if step.action.kind in ON_DEVICE:
            stages[step.action.stage] += step.seconds
        else:
            reduces = step.action.kind is REDUCE
            others["all-reduces" if reduces else "transfers"] += step.seconds
    ordered = sorted(stages.items(), key=lambda one: -one[1])
    named = ordered if len(ordered) <= MOST_STAGES + 1 else ordered[:MOST_STAGES]
    parts = [(seconds, f"computing on stage {s}") for s, seconds in named]
    rest = sum(seconds for _, seconds in ordered[len(named) :])
    parts.append((rest, f"computing on {len(ordered) - len(named)} other stages"))
    parts += [(seconds, what) for what, seconds in others.items()]
    whole = found.iteration_seconds
    texts = [
        f"{seconds / whole:.1%} {what}"
        for seconds, what in sorted(parts, key=lambda one: -one[0])
        if seconds >= 0.0005 * whole
    ]
    yield (
        "On the critical path, the longest chain of actions that wait for each other, the "
        f"iteration is {_listed(texts)}."
    )


def proof_sentences(plan: PipelinePlan) -> Iterator[str]:
    """Sentences on the proof: no plan of a class is faster than its bound."""
    if plan.certificate is None:
        yield "No lower bound is known: nothing is proved about how much faster a plan can be."
        return
    for one in headlines(plan.certificate):
        saved = f"at most {one.gap:.2%}" if one.gap > RELATIVE_TOLERANCE else "nothing"
        yield (
            f"{format_seconds(one.seconds)} is a lower bound for {one.plans}{plan.of_sizes}, "
            f"by {one.proved_by}: {saved} can be saved there."
        )


def _listed(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last
