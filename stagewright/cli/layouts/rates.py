"""``rates``, ``calibrate`` and ``anchor``: what kernels reach, published and on one's own."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stagewright.cli.commands import Asked, ask, command, spelling
from stagewright.cli.console import kept, print_table, say, tell
from stagewright.cli.options import Printed, Served, Written
from stagewright.cli.outputs import Writes, is_document
from stagewright.cli.solving import find
from stagewright.formulations.prices.computing import PrecisionName
from stagewright.graphs.documents.documents import write, write_file
from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.documents.units import format_bytes, format_seconds
from stagewright.graphs.machines.rates import RateSet, Spread
from stagewright.service.layouts.configured import CalibrateInputs
from stagewright.service.layouts.inputs import MachineInputs
from stagewright.service.layouts.rates import RateSetAnswer, RatesRequest, find_rates
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.graphs.importers.measured_runs import MeasuredIteration
    from stagewright.service.layouts.anchoring import AnchorAnswer, AnchoredAnswer
    from stagewright.service.layouts.rates import CalibrateAnswer


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
        from stagewright.executor.drawing.charts.layouts import rates_png

        write_file(given.png, rates_png(answer.sets))
    show = _print_sets if request.name is None else _print_set
    tell(answer, given, lambda answer: show(answer.sets), [given.png])
    return 0


def _print_sets(sets: tuple[RateSetAnswer, ...]) -> None:
    print_table(
        ("<rates", "<stack", "<devices", "runs", "error", "<range", "<with experts"),
        [
            (
                one.name, one.stack, ", ".join(one.devices), str(one.left_out_runs),
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
    error = "no whole iteration was left out of a fit"
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


class CalibrateOptions(CalibrateInputs, Written, Served):
    """What ``calibrate`` is asked."""

    runs: Annotated[list[Path], Option("RUNS")]
    """A CSV with columns layout, seconds, and optionally gpus, sequence, batch, precision,
    memory_gb; or logs of Megatron, torchtitan or DeepSpeed, with --layout."""
    config: Annotated[Path, Option("--config", form="FILE")]
    """A Hugging Face config.json, or its folder, or OWNER/NAME."""
    layout: list[str] | None = None
    """Of the logs, such as "p2 t4 d8 b1": one of all, or one of each, in order."""


@command(
    headings={
        "Machines": "per_server server_bandwidth network_bandwidth per_rack rack_bandwidth"
        " host_bandwidth memory",
        "Search": "server",
    }
)
def calibrate(given: CalibrateOptions) -> int:
    """Make a rate set of your own from two or three measured iterations.

    At most one constant fewer than there are runs is fitted, from the rates of the stack and the
    device; each run is predicted by the fit to the others. Use it with train-plan --rates FILE.
    """
    from stagewright.service.architectures import read_architecture
    from stagewright.service.layouts.rates import CalibrateAnswer, CalibrateRequest

    architecture = read_architecture(given.config)
    with spelling(CalibrateOptions):
        runs = tuple(given.run(one, architecture) for one in _measured(given))
    request = ask(
        CalibrateRequest,
        runs=runs,
        name="calibrated" if given.output is None else given.output.stem,
        source=", ".join(one.name for one in given.runs),
    )
    answer = find(CalibrateAnswer, request, "fitting", given.server)
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


class AnchorOptions(MachineInputs, Written):
    """What ``anchor`` is asked."""

    file: Annotated[Path, Option("CONFIG_OR_MEASURED")]
    """A Hugging Face config.json, or its folder, or OWNER/NAME: to write the script; or what the
    script has measured: to make a rate set."""
    framework: Annotated[str | None, Option("--for", form="FRAMEWORK")] = None
    """What trains, such as torchtitan, which decides the degrees; default: plan, our executor."""
    global_batch: Annotated[int | None, Option(form="N")] = None
    """Samples between two updates."""
    sequence: Annotated[int | None, Option(form="S")] = None
    """Tokens in a sample."""
    precision: PrecisionName | None = None
    """Type of weights and activations; default: bf16."""
    most_samples: Annotated[int | None, Option(form="B")] = None
    """The largest microbatch to time; default: 4."""
    output: Annotated[
        Path | None, Option("--output", "-o", form="FILE"), Writes(".py", ".json")
    ] = None
    """Where to write the script (.py) or the rate set (.json); - is standard output."""


@command(
    headings={
        "Machines": "per_server server_bandwidth network_bandwidth per_rack rack_bandwidth"
        " host_bandwidth memory"
    }
)
def anchor(given: AnchorOptions) -> int:
    """Make rates of one model from its own layers, timed on one GPU or one server.

    From a configuration it writes a script, which times the layers of torchtitan or megatron-core
    where these are installed, else of plain torch; from what it measured a rate set for that model.
    Layers, their exchanges within the server and the optimizer's step are then measured ones; what
    crosses servers is computed.
    """
    from stagewright.graphs.importers.hf_hub import is_model

    if is_model(given.file) or not is_document(given.file, "timed-layers"):
        return _write_script(given)
    others = AnchorOptions.model_fields.keys() - {"file", "output", "as_json"}
    if any(getattr(given, name) is not None for name in others):
        raise InputError(
            f"{given.file} says its model and machine: of the options only --output and --json "
            "apply"
        )
    from stagewright.graphs.importers.timed_layers import read_timed_layers
    from stagewright.service.layouts.anchoring import AnchoredRequest, rates_of_timings

    request = ask(
        AnchoredRequest,
        timed=read_timed_layers(given.file),
        name="anchored" if given.output is None else given.output.stem,
        source=given.file.name,
    )
    with naming(str(given.file)):
        answer = rates_of_timings(request)
    written = kept(answer.document, given, lambda one, path: write(RateSet, one, path))
    tell(answer, given, _print_anchored, written)
    return 0


def _write_script(given: AnchorOptions) -> int:
    from stagewright.service.architectures import read_architecture
    from stagewright.service.layouts.anchoring import AnchorRequest, anchor_script_of
    from stagewright.service.layouts.problems import training_problem

    if given.global_batch is None or given.sequence is None:
        raise InputError("a configuration needs --global-batch and --sequence")
    with spelling(AnchorOptions):
        problem = training_problem(
            read_architecture(given.file),
            given.fabric(),
            sequence=given.sequence,
            batch=given.global_batch,
            precision=given.precision or "bf16",
            framework=given.framework,
        )
    request = ask(
        AnchorRequest,
        problem=problem,
        framework=given.framework,
        most_samples=given.most_samples or 4,
    )
    answer = anchor_script_of(request)
    written = kept(answer.script, given, lambda text, path: write_file(path, text.encode()))
    tell(answer, given, lambda one: _print_script(one, given.output), written)
    return 0


def _print_script(answer: "AnchorAnswer", output: Path | None) -> None:
    file = "anchor.py (name it with -o)" if output is None else str(output)
    say(f"{answer.model}; microbatches of {', '.join(map(str, answer.samples))}")
    print_table(
        ("<layer", "<tensor, expert degrees; sp: tensor ranks divide the tokens"),
        [
            (kind, "; ".join(f"{t}, {e}{' sp' if divided else ''}" for t, e, divided in of))
            for kind, of in answer.degrees.items()
        ],
    )
    say(
        f"on one server: torchrun --standalone --nproc-per-node={answer.ranks} {file} "
        "measured.json; on one GPU: --nproc-per-node=1",
        "then: stagewright anchor measured.json -o rates.json",
    )


def _print_anchored(answer: "AnchoredAnswer") -> None:
    say(
        f"{answer.timings} timings of {answer.model}, on {answer.machine}, through "
        f"{answer.through}",
        *(f"skipped: {one}" for one in answer.skipped),
    )
    if answer.server_bytes_per_second is None:
        say("one rank was timed: links inside a server keep their rates")
    else:
        latency = format_seconds(answer.server_latency_seconds)
        say(f"inside the server {format_bytes(answer.server_bytes_per_second)}/s, {latency}")
    _print_ranges(answer.rates)


def _print_calibrated(answer: "CalibrateAnswer") -> None:
    from stagewright.service.layouts.told.measured import calibrated_lines, calibrated_table

    table = calibrated_table(answer)
    print_table(table.head, table.rows)
    say(*calibrated_lines(answer))
    _print_ranges(answer.rates)
