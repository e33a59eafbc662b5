"""What a launcher does once for all ranks: the capture that they take over, and its comparison."""

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from training_plans import gpipe, straight

from stagewright.cli.factories import parse_optimizer
from stagewright.executor.capture import tracing
from stagewright.executor.capture.exported.exporting import Example
from stagewright.executor.training import ahead
from stagewright.executor.training.data.batches import typed_inputs
from stagewright.executor.training.ranks.launch import LocalRanks
from stagewright.executor.training.stages.initialise import OutlinedModel, initialise, outlined
from stagewright.executor.training.training import Task
from stagewright.graphs.documents.errors import InputError

pytestmark = pytest.mark.real

CPU = torch.device("cpu")
passes = itertools.count()


class Net(nn.Module):
    """Four layers; ``share`` is a number of the model, which its first call is given."""

    def __init__(self, share: float = 0.5, kept: bool = False) -> None:
        super().__init__()
        self.share, self.factor = share, torch.full((1,), 0.5) if kept else None
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 8)
        self.norm, self.c = nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.norm(self.b(F.dropout(self.share * self.a(x), 0.1, self.training)))
        if self.factor is not None:
            h = h * self.factor
        return {"loss": F.cross_entropy(self.c(h), labels)}


class Odd(Net):
    """Its loss is another while it is captured."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = super().forward(x, labels)
        return found if torch.compiler.is_compiling() else {"loss": 2 * found["loss"]}


def batches() -> Iterator[dict[str, Tensor]]:
    next(passes)
    yield {"x": torch.randn(8, 6), "labels": torch.zeros(8, dtype=torch.long)}


def task_of(model: Callable[[], Any], **given: Any) -> Task:
    names = (
        "loss",
        "schedule",
        "clip_norm",
        "dtype",
        "weights",
        "checkpoints",
        "parameters",
        "model_folder",
    )
    nothing = dict.fromkeys((*names, "trace", "evaluation"), None)
    counts = {"accumulate": 1, "steps": 1, "seed": 0, "checkpoint_every": 1, "evaluate_every": 1}
    plan, sgd = gpipe(straight([2, 2]), 2), parse_optimizer("sgd:lr=0.1")
    fixed = {"plan": plan, "data": batches, "optimizer": sgd, "groups": {}, "timeout_seconds": 60.0}
    off = dict.fromkeys(("resume", "graph", "compile"), False)
    return Task(model=model, **{**nothing, **counts, **fixed, **off, **given})


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a launcher: this process may be forked."""
    monkeypatch.setattr(ahead, "may_fork", lambda: True)


def test_a_launcher_captures_once_and_is_left_as_it_was(forking: None) -> None:
    def state() -> tuple[Any, ...]:
        return repr(passes), torch.get_rng_state().tolist(), random.getstate()

    before, told = state(), list[str]()
    known = ahead.prepared(task_of(Net), told.append, captures=True, is_checked=True).model
    assert isinstance(known, OutlinedModel)
    assert (state(), told) == (before, [])
    plain = ahead.prepared(task_of(Net), told.append, captures=False, is_checked=False).model
    assert plain is Net


def test_a_model_that_capture_changes_is_refused_before_the_first_step(forking: None) -> None:
    with pytest.raises(InputError, match="the captured model is not Odd: its loss is"):
        ahead.prepared(task_of(Odd), pytest.fail, captures=True, is_checked=True)
    ahead.prepared(task_of(Odd), pytest.fail, captures=False, is_checked=False)


@pytest.mark.parametrize(
    ("work", "seconds", "error"),
    [
        (lambda: time.sleep(100), 0.2, ahead.Failed("it took longer than 0.2 s")),
        (lambda: os._exit(1), 60, ahead.Failed("its process was killed")),
        (lambda: 1 // 0, 60, ahead.Failed("ZeroDivisionError: ")),
        (lambda: task_of(Net, seed=-1), 60, InputError("the seed must be")),
    ],
)
def test_what_fails_apart_is_told(
    forking: None, work: Callable[[], object], seconds: float, error: Exception
) -> None:
    with pytest.raises(type(error), match=str(error)):
        ahead.apart(work, seconds)


EXAMPLE = Example(*typed_inputs(next(batches()), torch.float32), takes_loss=True, device=CPU)


def test_layers_by_the_capture_of_a_model_alike_are_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = initialise(Net, {0, 1}, example=EXAMPLE)
    known = outlined(Net, 0, EXAMPLE)
    monkeypatch.setattr(tracing, "export", lambda *_: pytest.fail("it is exported again"))
    found = initialise(known, {0, 1}, example=EXAMPLE)
    values = EXAMPLE.tensors
    for one, other in zip(found.layers[:2], expected.layers[:2], strict=True):
        torch.manual_seed(1)
        mine = one.module(*values)
        torch.manual_seed(1)
        torch.testing.assert_close(mine, other.module(*values), rtol=0, atol=0)
        values = mine


@pytest.mark.parametrize("make", [lambda: Net(0.25), lambda: Net(kept=True), lambda: Net().eval()])
def test_a_model_that_may_be_another_is_captured_itself(make: Callable[[], Net]) -> None:
    """Numbers and modes are in the graph, as are tensors that are not registered."""
    of = tracing.capture(Net(kept=make().factor is not None), EXAMPLE).of
    assert of is None or of(make()) is None


@pytest.mark.parametrize("what", ["nothing", "variable", "file"])
def test_ranks_are_forked_anew_where_they_would_share_nothing(what: str, tmp_path: Path) -> None:
    with LocalRanks(1, os.getpid) as ranks, (tmp_path / "open").open("w") as file:
        with ranks.importing():
            left = {"variable": os.environ.get, "file": os.dup}.get(what, repr)
            kept = left("LOCAL_RANK" if what == "variable" else file.fileno())  # type: ignore[operator]
        assert ranks.may_renew == (what == "nothing" and bool(ranks._processes))
        if what == "file":
            os.close(kept)
