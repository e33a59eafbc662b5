"""``compare``: compare a plan's predictions with a measured run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stagewright.cli.commands import Asked
from stagewright.cli.console import percent, print_json, print_table, progress, say
from stagewright.cli.options import Printed
from stagewright.cli.outputs import Writes, is_document
from stagewright.executor.programs.trace import Trace
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import format_bytes, format_seconds
from stagewright.graphs.models.chain import load_model, save_model
from stagewright.service.options import Option
from stagewright.service.pipelines.requests import CompareRequest

if TYPE_CHECKING:
    from stagewright.executor.measuring.causes import Explanation, TimeCause
    from stagewright.executor.measuring.compare import Comparison, MemoryComparison
    from stagewright.executor.measuring.pairs import Pair


class CompareOptions(Printed):
    """What ``compare`` is asked beside its request."""

    png: Annotated[Path | None, Option(form="FILE"), Writes(".png")] = None
    """Draw both timelines, one above the other."""
    model: Annotated[Path | None, Option(form="FILE")] = None
    """Model file that was planned."""
    corrected: Annotated[Path | None, Option(form="FILE"), Writes(".json")] = None
    """Write the model with its times corrected by the run."""


def compare(asked: Asked[CompareRequest], given: CompareOptions) -> int:
    """Compare a plan's predictions with the measurements of a run of it."""
    from stagewright.cli.placing import compare_placement
    from stagewright.service.pipelines.plans import compare as answer_of

    if (given.model is None) != (given.corrected is None):
        raise InputError("give --model and --corrected together: what to correct, where to write")
    if is_document(asked.given["plan"], "operators"):
        if given.corrected is not None:
            raise InputError("--corrected is for pipelines, this is a plan of operators")
        return compare_placement(
            asked.given["plan"], asked.given["trace"], given.png, given.as_json
        )
    request = asked.request()
    planned, run = request.plan, request.trace
    answer = answer_of(request)
    comparison = answer.comparison
    if given.model is not None and given.corrected is not None:
        _write_corrected(planned, run, given.model, given.corrected)
    if given.png is not None:
        with progress("drawing"):
            _draw(planned, run, comparison, given.png)
    files = [str(path) for path in (given.png, given.corrected) if path is not None]
    if given.as_json:
        print_json(answer.json_object() | {"files": files})
    else:
        say(*(f"{path} is written" for path in files))
        _print_comparison(comparison, run)
    return 0


def _write_corrected(planned: "PipelinePlan", run: "Trace", model: Path, corrected: Path) -> None:
    from stagewright.executor.measuring.compare import correct

    save_model(correct(load_model(model), planned, run), corrected)


def _draw(planned: "PipelinePlan", run: "Trace", comparison: "Comparison", png: Path) -> None:
    from stagewright.executor.drawing.charts.chart import stacked_png
    from stagewright.executor.drawing.periods import finish_seconds
    from stagewright.executor.drawing.timeline import headline
    from stagewright.executor.measuring.compare import measured_plan

    measured = measured_plan(planned, run)
    pace = f"{format_seconds(finish_seconds(measured))} per iteration"
    if comparison.period is not None:
        period = format_seconds(comparison.period.seconds.measured)
        pace = f"period {period}, the last {measured.microbatches} microbatches of a run"
    titles = f"predicted: {headline(planned)}", f"measured: {run_line(run)} · {pace}"
    documents.write_file(png, stacked_png((planned, measured), titles))


def run_line(run: "Trace") -> str:
    """Ranks, machine, backend and type of a run."""
    ranks = f"{run.world_size} rank{'s' if run.world_size > 1 else ''}"
    return f"{ranks} on {run.machine}, {run.backend}, {run.dtype}"


def _print_comparison(comparison: "Comparison", run: "Trace") -> None:
    from stagewright.executor.drawing.timeline import shorten_devices

    kinds = [
        (one.kind.value, str(one.count), *cells(one.seconds), ratio(one.seconds))
        for one in comparison.kinds
    ]
    stages = [
        (
            str(one.stage), shorten_devices(one.devices),
            *cells(one.forward_seconds), ratio(one.forward_seconds),
            *cells(one.backward_seconds), ratio(one.backward_seconds),
        )
        for one in comparison.stages
    ]  # fmt: skip
    busy = [
        (str(one.stage), percent(one.busy.predicted), percent(one.busy.measured), ratio(one.busy))
        for one in comparison.stages
    ]
    say(run_line(run))
    print_table(["<action", "count", "predicted", "measured", "ratio"], kinds)
    print_table(
        ["stage", "<devices", "forward", "measured", "ratio", "backward", "measured", "ratio"],
        stages,
    )
    print_table(["busy stage", "predicted", "measured", "ratio"], busy)
    update = comparison.update_seconds
    note = "" if update.predicted else ", which is not predicted"
    say(_headline(comparison), f"the optimizer took {format_seconds(update.measured)} a step{note}")
    if comparison.memory is not None:
        _print_memory(comparison.memory)
    if comparison.reference_seconds is not None:
        say(_speed(comparison, comparison.reference_seconds))
    if comparison.explanation is not None:
        _print_causes(comparison.explanation, comparison)


def _print_memory(memory: "MemoryComparison") -> None:
    rows = [
        (name, format_bytes(peak.predicted), format_bytes(peak.measured), ratio(peak))
        for name, peak in memory.peak_bytes.items()
    ]
    print_table(["<peak memory of", "predicted", "measured", "ratio"], rows)
    what = {
        "allocated": "measured is what torch has allocated on the device",
        "resident": "measured is resident memory above that before the model was made: tensors, "
        "and what libraries and processes need besides",
    }
    say(what[memory.kind])


def _print_causes(found: "Explanation", comparison: "Comparison") -> None:
    from stagewright.executor.measuring.pairs import Pair

    iteration = comparison.iteration_seconds
    rows = [
        (one.name, *(("-",) * 3 if one.work is None else (*cells(one.work), ratio(one.work))),
         signed(one.seconds))
        for one in found.causes
    ]  # fmt: skip
    rest = ("rest: they hide or add up", *("-",) * 3, signed(found.rest_seconds))
    print_table(["<cause", "predicted", "measured", "ratio", "iteration, alone"], [*rows, rest])
    calm = found.without_waits_seconds
    if calm is not None:
        pair = Pair(iteration.predicted, calm)
        say(
            f"without the waits for a core {format_seconds(calm)} by a replay: measured / "
            f"predicted = {ratio(pair)}"
        )
    say(_largest_cause(found, comparison))


def _largest_cause(found: "Explanation", comparison: "Comparison") -> str:
    """The cause of most of the difference, in a line."""
    cause, iteration = found.largest, comparison.iteration_seconds
    if cause is None:
        return "the iteration takes as long as predicted"
    difference = iteration.measured - iteration.predicted
    sign = 1 if difference > 0 else -1
    of_all = f"{signed(cause.seconds)} of {signed(difference)} per iteration"
    line = f"largest cause: {cause.name}{_longer(cause.work)}: {of_all}"
    most = max(cause.stages, key=lambda share: sign * share.seconds, default=None)
    if most is not None and len(cause.stages) > 1:
        whose = f"of stage {most.stage}"
        if cause.name == "transfers":
            whose = f"between stages {most.stage} and {most.stage + 1}"
        line += f"; those {whose}{_longer(most.work)}: {signed(most.seconds)} alone"
    if most is None or len(comparison.stages[most.stage].devices) > 1:
        line += _device_of_most(cause, sign)
    return line


def _device_of_most(cause: "TimeCause", sign: int) -> str:
    """The device that accounts for most, where every other one accounts for less than half."""
    shares = sorted(((sign * one.seconds, one.device) for one in cause.devices), reverse=True)
    if len(shares) < 2 or shares[0][0] <= 2 * max(0.0, shares[1][0]):
        return ""
    seconds, device = shares[0]
    return f"; on {device} alone: {signed(sign * seconds)}"


def _longer(work: "Pair | None") -> str:
    """How much longer actions take than predicted."""
    if work is None or work.ratio is None:
        return ""
    change = work.ratio - 1
    if change >= 1:
        return f" take {work.ratio:.1f} times as long as predicted"
    return f" take {percent(abs(change))} {'longer' if change > 0 else 'less'} than predicted"


def signed(seconds: float) -> str:
    """Seconds with their sign."""
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def _headline(comparison: "Comparison") -> str:
    period, whole, steps = comparison.period, comparison.iteration_seconds, comparison.steps
    span = " to ".join(map(format_seconds, (comparison.least_seconds, comparison.most_seconds)))
    if period is None:
        predicted, measured = cells(whole)
        basis = f"median of {steps} step{'s' if steps > 1 else ''}, {span}"
    else:
        predicted, measured = cells(period.seconds)
        predicted = f"period {predicted}"
        basis = f"mean of {period.microbatches} microbatches, {span} per iteration"
    found = f"predicted {predicted}, measured {measured} ({basis})"
    return f"{found}: measured / predicted = {ratio(whole)}"


def _speed(comparison: "Comparison", reference: "Pair") -> str:
    """How fast the machine was, and what the ratio is without that."""
    change, explanation = reference.measured / reference.predicted - 1, comparison.explanation
    how = f"{percent(abs(change))} {'slower' if change > 0 else 'faster'} than"
    calm = explanation is not None and explanation.without_waits_seconds is not None
    found = comparison.equal_speed_ratio
    return (
        f"the machine was {how if abs(change) >= 0.01 else 'as fast as'} when it was profiled (the "
        f"same small computation took {format_seconds(reference.measured)}, then "
        f"{format_seconds(reference.predicted)}): at equal speed{', without waits,' * calm} "
        f"measured / predicted = {'-' if found is None else format(found, '.3f')}"
    )


def cells(pair: "Pair") -> tuple[str, str]:
    """Predicted and measured seconds."""
    return format_seconds(pair.predicted), format_seconds(pair.measured)


def ratio(pair: "Pair") -> str:
    """Measured / predicted."""
    return "-" if pair.ratio is None else f"{pair.ratio:.3f}"
