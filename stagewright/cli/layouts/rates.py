"""``rates`` and ``calibrate``: what kernels reach, by stack and device, and on one's own."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stagewright.cli.commands import Asked, ask, command
from stagewright.cli.console import kept, print_table, say, tell
from stagewright.cli.layouts.inputs import MachineOptions, Precision
from stagewright.cli.options import Printed, Written
from stagewright.cli.outputs import Writes
from stagewright.graphs.documents.documents import write, write_bytes
from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.documents.units import format_seconds
from stagewright.graphs.machines.rates import RateSet, Spread
from stagewright.service.layouts.rates import RateSetAnswer, RatesRequest, find_rates
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.graphs.importers.measured_runs import MeasuredIteration
    from stagewright.graphs.models.architecture import Architecture
    from stagewright.service.layouts.calibrating import CalibrateAnswer
    from stagewright.solvers.parallelism.calibrating import CalibrationRun


class RatesOptions(Printed):
    """What ``rates`` is asked beside its request."""

    png: Annotated[Path | None, Option(form="FILE"), Writes(".png")] = None
    """Where to draw the errors by model."""


def rates(asked: Asked[RatesRequest], given: RatesOptions) -> int:
    """List what kernels reach by stack and device: sources, errors of what was left out, ranges.

    With a name, the constants of one set and its errors by model.
    """
    request = asked.request()
    answer = find_rates(request)
    if given.png is not None:
        from stagewright.executor.drawing.charts.rate_errors import rates_png

        write_bytes(given.png, rates_png(answer.sets))
    show = _print_sets if request.name is None else _print_set
    tell(answer, given, lambda answer: show(answer.sets), [given.png])
    return 0


def _print_sets(sets: tuple[RateSetAnswer, ...]) -> None:
    print_table(
        ("<rates", "<stack", "<devices", "<releases", "runs", "error", "<range", "<with experts"),
        [
            (
                one.name, one.stack, ", ".join(one.devices), one.releases, str(one.left_out_runs),
                _share(one.mean_error), _range(one.dense), _range(one.experts),
            )
            for one in sets
        ],
    )  # fmt: skip
    say(
        "error: mean of the absolute, of runs of models that were left out of the fit; range: of "
        "measured over predicted seconds"
    )


def _print_set(sets: tuple[RateSetAnswer, ...]) -> None:
    (one,) = sets
    say(
        f"{one.name}: {one.stack} on {', '.join(one.devices)}, releases {one.releases}; "
        f"{one.fitted_to}",
        f"source: {one.source}",
    )
    print_table(
        ("<constant", "value"),
        [
            (name, str(value) if isinstance(value, bool) else f"{value:.4g}")
            for name, value in asdict(one.reached).items()
            if value is not None
        ],
    )
    if one.errors:
        print_table(
            ("<left out", "runs", "error", "bias"),
            [
                (each.model, str(each.runs), _share(each.error), f"{each.bias:+.1%}")
                for each in one.errors
            ],
        )
    _print_ranges(one)


def _print_ranges(one: RateSetAnswer) -> None:
    error = "no run was left out: the range is that of the set it started from"
    if one.mean_error is not None:
        error = f"error left out {one.mean_error:.1%}, bias {one.mean_bias:+.1%}"
    say(
        f"{error}; measured over predicted: seconds {_range(one.dense)}, with experts "
        f"{_range(one.experts)}, bytes {_range(one.memory)}"
    )


def _range(spread: Spread) -> str:
    return f"{spread.low:.2f}-{spread.high:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


class CalibrateOptions(MachineOptions, Written):
    """What ``calibrate`` is asked."""

    runs: Annotated[list[Path], Option("RUNS")]
    """A CSV with columns layout, seconds, and optionally gpus, sequence, batch, precision,
    memory_gb; or logs of Megatron, torchtitan or DeepSpeed, with --layout."""
    config: Annotated[Path, Option("--config", form="FILE")]
    """A Hugging Face config.json, or its folder, or OWNER/NAME."""
    layout: list[str] | None = None
    """Of the logs, such as "p2 t4 d8 b1": one of all, or one of each, in order."""
    framework: Annotated[str | None, Option("--for", form="FRAMEWORK")] = None
    """What trained, such as torchtitan: the fit starts from its rates; default: megatron."""
    global_batch: Annotated[int | None, Option(form="N")] = None
    """Samples between two updates, where the runs do not say it."""
    sequence: Annotated[int | None, Option(form="S")] = None
    """Tokens in a sample, where the runs do not say it."""
    precision: Precision = "bf16"
    """Type of weights and activations, where the runs do not say it; fp8: of products."""


@command(
    headings={
        "Machines": "per_server server_bandwidth network_bandwidth per_rack rack_bandwidth"
        " host_bandwidth memory"
    }
)
def calibrate(given: CalibrateOptions) -> int:
    """Make a rate set of your own from two or three measured iterations.

    At most one constant fewer than there are runs is fitted, from the rates of the stack and the
    device; each run is predicted by the fit to the others. Use it with train-plan --rates FILE.
    """
    from stagewright.graphs.importers.hf_config import read_hf_config
    from stagewright.service.layouts.calibrating import CalibrateRequest
    from stagewright.service.layouts.calibrating import calibrate as fit

    architecture = read_hf_config(given.config)
    runs = tuple(_run(one, given, architecture) for one in _measured(given))
    request = ask(
        CalibrateRequest,
        runs=runs,
        name="calibrated" if given.output is None else given.output.stem,
        source=", ".join(one.name for one in given.runs),
    )
    answer = fit(request)
    written = kept(answer.document, given, lambda one, path: write(RateSet, one, path))
    tell(answer, given, _print_calibrated, written)
    return 0


def _measured(given: CalibrateOptions) -> "list[MeasuredIteration]":
    """What the files say, of logs with their layouts."""
    from stagewright.graphs.importers.measured_runs import read_measured

    logs = [one for one in given.runs if one.suffix.lower() != ".csv"]
    layouts = given.layout or []
    if len(layouts) not in {len(logs), min(1, len(logs))}:
        raise InputError(
            f"--layout is given {len(layouts)} times for {len(logs)} logs: give one of all, or "
            'one of each, for example "p2 t4 d8 b1"'
        )
    of_log = dict(zip(logs, layouts * len(logs) if len(layouts) == 1 else layouts, strict=False))
    return [
        replace(one, layout=one.layout or of_log.get(file))
        for file in given.runs
        for one in read_measured(file)
    ]


def _run(
    one: "MeasuredIteration", given: CalibrateOptions, architecture: "Architecture"
) -> "CalibrationRun":
    """A run of the problem that its file and the options tell."""
    from stagewright.formulations.parallelism.layout import parse_layout
    from stagewright.service.layouts.problems import training_problem
    from stagewright.solvers.parallelism.calibrating import CalibrationRun

    with naming(one.place):
        layout = parse_layout(one.layout or "")
        sequence, batch = one.sequence or given.sequence, one.batch or given.global_batch
        if sequence is None or batch is None:
            raise InputError(
                f"no {'sequence' if sequence is None else 'batch'}: give --sequence and "
                "--global-batch, or columns of the CSV"
            )
        gpus = one.gpus or given.gpus or layout.ranks
        machines = given if given.cluster else given.model_copy(update={"gpus": gpus})
        fabric = machines.fabric()
        problem = training_problem(
            architecture,
            fabric,
            sequence=sequence,
            batch=batch,
            precision=one.precision or given.precision,
            framework=given.framework,
        )
    seconds = one.seconds_of(fabric.devices, sequence, batch)
    return CalibrationRun(one.place, problem, layout, seconds, one.memory_bytes)


def _print_calibrated(answer: "CalibrateAnswer") -> None:
    print_table(
        ("<run", "<layout", "measured", "before", "fitted", "left out", "error"),
        [
            (
                one.place, one.layout, format_seconds(one.seconds),
                format_seconds(one.before_seconds), format_seconds(one.after_seconds),
                *(
                    ("-", "-")
                    if one.left_out_seconds is None
                    else (
                        format_seconds(one.left_out_seconds),
                        f"{one.left_out_seconds / one.seconds - 1:+.1%}",
                    )
                ),
            )
            for one in answer.rows
        ],
    )  # fmt: skip
    factors = ", ".join(f"{name} x {factor:.3g}" for name, factor in answer.factors.items())
    said = factors or "no constant is changed, the runs are not all on one side of the range"
    say(f"from {answer.started_from}: {said}")
    _print_ranges(answer.rates)
