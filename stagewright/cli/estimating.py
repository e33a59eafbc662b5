"""``estimate``: rates of new jobs that share accelerators, from a few measurements."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagewright.cli.console import (
    JsonFlag,
    OutputFile,
    Seed,
    ask,
    print_answer,
    print_lines,
    print_table,
)
from stagewright.graphs.documents.errors import InputError

if TYPE_CHECKING:
    from stagewright.graphs.workloads.jobs import Throughputs
    from stagewright.service.cluster_answers import EstimateAnswer


def estimate(
    reference: Annotated[
        Path,
        typer.Option(
            help="Jobs file whose jobs are measured alone and in pairs, or Gavel's table of "
            "throughputs.",
            metavar="FILE",
        ),
    ],
    jobs: Annotated[
        Path | None,
        typer.Option(
            help="Jobs file whose new jobs are measured alone and in some pairs.", metavar="FILE"
        ),
    ] = None,
    choose: Annotated[
        str | None,
        typer.Option(
            "--choose", help="Choose the pairs in which to measure a new model.", metavar="MODEL"
        ),
    ] = None,
    scale: Annotated[
        int, typer.Option(help="With --choose: accelerators of the job.", metavar="N")
    ] = 1,
    fraction: Annotated[
        float, typer.Option(help="With --choose: fraction of all pairs to measure.")
    ] = 0.2,
    seed: Seed = 0,
    output: OutputFile = None,
    as_json: JsonFlag = False,
) -> int:
    """Estimate rates of new jobs that share accelerators, or choose the pairs to measure."""
    from stagewright.graphs.workloads.jobs import load_workload, save_workload
    from stagewright.service.cluster_requests import EstimateRequest

    if (jobs is None) == (choose is None):
        raise InputError("give one of --jobs FILE, --choose MODEL")
    known = _read_reference(reference)
    if jobs is None:
        if output is not None:
            raise InputError("--output is for the jobs file of --jobs")
        return _choose(known, str(choose), scale, fraction, seed, as_json)
    request = ask(EstimateRequest, reference=known, workload=load_workload(jobs))
    from stagewright.service.estimating import estimate as answer_of

    answer = answer_of(request)
    if output is not None:
        save_workload(answer.workload, output)
    if as_json:
        print_answer(answer)
    else:
        _print(answer)
        print_lines(*([f"{output} is written"] if output is not None else []))
    return 0


def _read_reference(path: Path) -> "Throughputs":
    """The throughputs of a jobs file, or a table of Gavel's."""
    from stagewright.graphs.documents.documents import read_text
    from stagewright.graphs.importers.gavel import read_throughputs
    from stagewright.graphs.workloads.jobs import FORMAT, load_workload

    if f'"{FORMAT}"' in read_text(path):
        return load_workload(path).throughputs
    return read_throughputs(path)


def _choose(
    known: "Throughputs", model: str, scale: int, fraction: float, seed: int, as_json: bool
) -> int:
    from stagewright.service.cluster_requests import MeasureRequest
    from stagewright.service.estimating import measure

    request = ask(
        MeasureRequest,
        {"model": "--choose"},
        reference=known,
        model=model,
        scale=scale,
        fraction=fraction,
        seed=seed,
    )
    answer = measure(request)
    if as_json:
        print_answer(answer)
    else:
        print_table(("<accelerator", "<reference job"), answer.pairs)
    return 0


def _print(answer: "EstimateAnswer") -> None:
    print_table(
        ("<new job", "scale", "<most like"),
        [(one.model, str(one.scale), one.nearest) for one in answer.new],
    )
    rows = [
        (*one.models, str(one.scale), one.accelerator, *map("{:.4g}".format, one.steps_per_second))
        for one in answer.estimated
    ]
    print_table(("<job", "<beside", "scale", "<accelerator", "steps/s", "steps/s"), rows)
    print_lines(f"{answer.measured} pairs are measured, {len(answer.estimated)} estimated")
