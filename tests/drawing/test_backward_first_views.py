"""How plans between two losses are drawn, printed and exported, and what starts from them."""

from functools import cache
from pathlib import Path

import pytest
from plans import small_problem
from typer.testing import CliRunner

from benchmarks.backward_first import backward_first_plan
from stagewright.cli import app
from stagewright.executor.drawing.page import in_flight, page, summarise
from stagewright.executor.drawing.timeline import headline
from stagewright.executor.export import FORMATS, export
from stagewright.executor.export.options import FormatOptions
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.plans.actions import parse_action
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage, save_plan
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import save_cluster
from stagewright.graphs.models.chain import save_model
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planners.steps.warm_start import warm_start

pytestmark = pytest.mark.real


@cache
def problem() -> PipelineProblem:
    return small_problem(4, 2, 2, parts=True, updates=True)


@cache
def plan() -> PipelinePlan:
    """Four layers, in turn on two devices; weight gradients after the input gradients."""
    orders = {
        "g0": "2I0 2I1 2W0 2W1 0I0 0I1 0W0 0W1 0F0 0F1 2F0 2F1",
        "g1": "3I0 3I1 3W0 3W1 1I0 1I1 1W0 1W1 1F0 1F1 3F0 3F1",
    }
    stages = [Stage((i, i + 1), (f"g{i % 2}",)) for i in range(4)]
    rows = {name: [parse_action(word) for word in text.split()] for name, text in orders.items()}
    return backward_first_plan(problem(), "by hand", stages, rows)


def test_all_microbatches_are_in_flight_at_both_losses() -> None:
    for times, counts in in_flight(plan()):
        assert (times[0], times[-1] > 0) == (0, True)
        assert (counts[0], max(counts), counts[-1]) == (2, 2, 2)
        assert min(counts) < 2
    assert [line.in_flight for line in summarise(plan())] == [2] * 4


def test_drawings_say_that_they_lie_between_two_losses() -> None:
    assert "from loss to loss" in headline(plan())
    assert "From one loss to the next: backwards, updates, and the next" in page(plan())


@pytest.mark.parametrize("name", FORMATS)
def test_other_frameworks_are_refused_by_name_and_launchers_are_not(name: str) -> None:
    if name in ("torchrun", "slurm", "kubernetes"):
        image = "image" if name == "kubernetes" else None
        assert export(plan(), name, FormatOptions(command="train", per_server=2, image=image))
        return
    with pytest.raises(InputError, match=r"the plan begins with the backwards: .* updates all"):
        export(plan(), name)


def test_a_search_takes_the_stages_and_not_the_order() -> None:
    found = warm_start(problem(), plan(), Choices(), Limits(seconds=1))
    assert found.stages == plan().stages


def test_the_commands_take_the_file(tmp_path: Path) -> None:
    files = [str(tmp_path / name) for name in ("plan.json", "model.json", "cluster.json")]
    save_plan(plan(), files[0])
    save_model(problem().chain, files[1])
    save_cluster(problem().cluster, files[2])
    given = [files[0], "--model", files[1], "--cluster", files[2]]
    shown = str(tmp_path / "plan.png")
    for words in (["check", *given], ["simulate", *given], ["show", files[0], "--png", shown]):
        answer = CliRunner().invoke(app, words)
        assert answer.exit_code == 0, answer.output
    answer = CliRunner().invoke(app, ["show", files[0]])
    assert "from loss to loss" in answer.stdout
