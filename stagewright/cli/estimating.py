"""``estimate``: rates of new jobs that share accelerators, from a few measurements."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from stagewright.cli.commands import Asked
from stagewright.cli.common import Written, tell
from stagewright.cli.console import ask, print_lines, print_table
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.gavel import read_reference
from stagewright.graphs.workloads.jobs import load_workload, save_workload
from stagewright.service.cluster_requests import EstimateRequest, MeasureRequest
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.service.cluster_answers import EstimateAnswer


class EstimateOptions(Written):
    """What ``estimate`` is asked beside the request for pairs to measure."""

    jobs: Annotated[Path | None, Option(form="FILE")] = None
    """Jobs file whose new jobs are measured alone and in some pairs."""
    model: Annotated[str | None, Option("--choose", form="MODEL")] = None
    """Choose the pairs in which to measure a new model."""


def estimate(asked: Asked[MeasureRequest], given: EstimateOptions) -> int:
    """Estimate rates of new jobs that share accelerators, or choose the pairs to measure."""
    from stagewright.service.estimating import estimate as answer_of
    from stagewright.service.estimating import measure

    if (given.jobs is None) == (given.model is None):
        raise InputError("give one of --jobs FILE, --choose MODEL")
    if given.jobs is None:
        if given.output is not None:
            raise InputError("--output is for the jobs file of --jobs")
        chosen = measure(asked.request({"model": "--choose"}, model=given.model))
        head = ("<accelerator", "<reference job")
        tell(chosen, given, lambda answer: print_table(head, answer.pairs))
        return 0
    known = read_reference(asked.given["reference"])
    answer = answer_of(ask(EstimateRequest, reference=known, workload=load_workload(given.jobs)))
    if given.output is not None:
        save_workload(answer.workload, given.output)
    tell(answer, given, _print, [given.output])
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
