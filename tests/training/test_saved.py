"""What is written besides the model's tensors: safetensors, and a state of the caller's."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

import torch.distributed as dist  # noqa: E402
import training_plans as make  # noqa: E402
from models import EXAMPLES, ResidualMLP, tokens, vectors  # noqa: E402
from ranks import Ranks  # noqa: E402

from stagewright.executor.capture.tracing import capture  # noqa: E402
from stagewright.executor.training import checkpoint  # noqa: E402
from stagewright.executor.training.checkpoint import Header  # noqa: E402
from stagewright.executor.training.checkpoint_share import require_format, write_parameters  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan  # noqa: E402
from stagewright.graphs.documents.errors import InputError  # noqa: E402


def tied() -> torch.nn.Module:
    return EXAMPLES["tied-transformer"].build()


def written(_: Any, rank: int, plan: PipelinePlan, path: Path) -> Any:
    executor = Executor(plan, tied)
    executor.step(*tokens(4))
    parameters = executor.parameters_on_first_rank()
    if parameters is not None:
        write_parameters(path, parameters)
    return parameters


def opened(path: Path) -> tuple[dict[str, str], set[str]]:
    """Metadata and names of a file."""
    import safetensors

    with safetensors.safe_open(path, framework="pt") as content:
        return content.metadata(), set(content.keys())


def test_safetensors_are_read_by_their_own_library(ranks: Ranks, tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    layers = len(capture(tied()).layers)
    path = tmp_path / "trained.safetensors"
    trained = ranks.run(written, 2, make.gpipe(make.straight([3, layers - 3]), 2), path)[0]
    model = tied()
    assert files.load_model(model, path) == (set(), [])
    assert model.head.weight is model.token.weight
    assert trained.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, trained[name]), name
    files.save_model(model, tmp_path / "theirs.safetensors", {"format": "pt"})
    found, expected = (opened(one) for one in (path, tmp_path / "theirs.safetensors"))
    assert (
        found
        == expected
        == ({"format": "pt", "token.weight": "head.weight"}, set(trained) - {"token.weight"})
    )


def test_safetensors_are_refused_without_their_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "stagewright.executor.training.checkpoint_share.find_spec", lambda name: None
    )
    with pytest.raises(InputError, match=r"a.safetensors needs the package safetensors: pip"):
        require_format(tmp_path / "a.safetensors")
    require_format(tmp_path / "a.pt")


class Counter:
    """A caller's state."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"batches": 0, "order": (1, 2)}

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state


def counted(_: Any, rank: int, folder: Path) -> Any:
    first, second = (make.gpipe(make.straight(cut), 2) for cut in ([2, 2], [1, 3]))
    counter, again = Counter(), Counter()
    executor = Executor(first, lambda: ResidualMLP(2), extra=counter)
    executor.step(*vectors(4))
    counter.seen = {"batches": 1, "order": (2, 1)}
    path = checkpoint.save(folder, executor.state(), Header(1, "flush", "sgd"))
    dist.barrier()
    resumed = Executor(second, lambda: ResidualMLP(2), extra=again)
    resumed.load_state(checkpoint.read(path, resumed.wanted(checkpoint.read_kinds(path))), 1)
    without = Executor(second, lambda: ResidualMLP(2))
    without.load_state(checkpoint.read(path, without.wanted(checkpoint.read_kinds(path))), 1)
    try:
        resumed.load_state(without.state(), 1)
    except InputError as error:
        return again.seen, str(error)
    return again.seen, None


def test_a_callers_state_is_in_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(counted, 2, tmp_path)
    assert found == [({"batches": 1, "order": (2, 1)}, "the checkpoint has no state for extra")] * 2
