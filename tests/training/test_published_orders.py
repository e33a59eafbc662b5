"""Published schedules on processes: parameters equal to those of plain training."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from plans import small_problem
from profiles import slow_after

torch = pytest.importorskip("torch", reason="the executor needs torch")

import training  # noqa: E402
from models import ResidualMLP, TiedTransformer, tokens, vectors  # noqa: E402
from ranks import Ranks  # noqa: E402

from stagewright.executor.capture.tracing import capture  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.forms.answers import Limits  # noqa: E402
from stagewright.formulations.schedules.published.kinds import KINDS, OPTIMAL, ScheduleChoice  # noqa: E402
from stagewright.solvers.planners.steps.proposal import Choices  # noqa: E402
from stagewright.solvers.planning import plan  # noqa: E402

CROSS_ENTROPY = torch.nn.functional.cross_entropy
MICROBATCHES, SAMPLES, STEPS = 8, 2, 3
SKIPPING = partial(ResidualMLP, 14)
SHORT = partial(ResidualMLP, 6)  # enough layers for two devices with four stages each
# The embedding and the head, at the two ends of the pipeline, share a parameter.
TIED = partial(TiedTransformer, 2, 0.2)

CLASSES = {
    "line": (2, ScheduleChoice("1f1b")),
    "loop": (2, ScheduleChoice("interleaved")),
    "loop, split": (2, ScheduleChoice("interleaved-zb")),
    "V, split": (2, ScheduleChoice("zbv")),
    "V, whole and split": (2, ScheduleChoice("dualpipev")),
    "wave": (2, ScheduleChoice("hanayo", 4)),
    "both directions": (2, ScheduleChoice("chimera")),
    "both directions, split": (2, ScheduleChoice("dualpipe")),
    "versions": (2, ScheduleChoice("pipedream")),
    "patterns": (2, ScheduleChoice("2bw")),
    "optimal V": (2, ScheduleChoice(OPTIMAL, placement="V")),
    "both directions on four": (4, ScheduleChoice("chimera")),
    "both directions on four, split": (4, ScheduleChoice("dualpipe")),
    "taking turns": (4, ScheduleChoice("1f1b-rr", replicas=(2, 1, 1))),
}
EVERY = [(kind, devices) for devices in (4, 2) for kind in KINDS]


def run(_: Any, rank: int, asked: Any, model: Any, batches: Any) -> Any:
    """Parameters on rank 0, and this rank's losses."""
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    executor = Executor(asked, model, CROSS_ENTROPY, optimizer, dtype=torch.float64)
    losses = [executor.step(*batch) for batch in batches]
    losses += executor.finish()
    return executor.parameters_on_first_rank(), [one for one in losses if one is not None]


def require_plain_training(
    ranks: Ranks, devices: int, choice: ScheduleChoice, build: Any, batch: Any
) -> None:
    torch.manual_seed(0)
    model = build().double()
    layers = len(capture(model).layers)
    problem = small_problem(layers, devices, MICROBATCHES, parts=True)
    found = plan(problem, "order", Limits(1.0), choices=Choices(order=choice)).plan
    assert found is not None
    asked = replace(found, layers=None)  # of the made-up model
    assert len({name for stage in asked.stages for name in stage.devices}) == devices
    batches = [batch(SAMPLES * MICROBATCHES, seed) for seed in range(STEPS)]
    batches = [(x.double() if x.is_floating_point() else x, y) for x, y in batches]
    results = ranks.run(run, devices, asked, model, batches)
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    expected = training.train(asked, model, batches, CROSS_ENTROPY, optimizer)
    parameters, _ = results[0]
    assert parameters.keys() == expected.state.keys()
    for name, value in expected.state.items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-9, atol=1e-12, msg=name)
    told = [losses for _, losses in results if losses]
    assert told
    for losses in told:
        assert losses == pytest.approx(expected.losses, rel=1e-9)


@pytest.mark.parametrize("name", CLASSES)
def test_one_of_every_class(ranks: Ranks, name: str) -> None:
    require_plain_training(ranks, *CLASSES[name], SHORT, vectors)


@pytest.mark.parametrize(("kind", "devices"), slow_after(0, EVERY))
def test_every_kind(ranks: Ranks, kind: str, devices: int) -> None:
    require_plain_training(ranks, devices, ScheduleChoice(kind), SKIPPING, vectors)


@pytest.mark.parametrize("kind", ["chimera", "dualpipe"])
def test_copies_share_parameters_and_draw_what_one_copy_draws(ranks: Ranks, kind: str) -> None:
    require_plain_training(ranks, 2, ScheduleChoice(kind), TIED, tokens)
