"""What is written besides the model's tensors: safetensors, and a state of the caller's."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import training_plans as make  # noqa: E402
from models import EXAMPLES, ResidualMLP, tokens, vectors  # noqa: E402
from ranks import Ranks  # noqa: E402

from benchmarks.any_models import hugging_face  # noqa: E402
from stagewright.executor.capture.tracing import capture  # noqa: E402
from stagewright.executor.measuring.whole_models import captured_by_size  # noqa: E402
from stagewright.executor.training import checkpoint  # noqa: E402
from stagewright.executor.training.checkpoint import Header  # noqa: E402
from stagewright.executor.training.checkpoint_share import (  # noqa: E402
    require_format,
    write_model,
    write_parameters,
)
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


def handed_out(_: Any, rank: int, plan: PipelinePlan, name: str, batch: Any, path: Path) -> Any:
    """Train a step, and write the model for other frameworks."""
    build = FOREIGN.get(name, tied)
    executor = Executor(plan, build, example=batch[0] if name in FOREIGN else None)
    executor.step(*batch)
    write_model(path, build, executor)
    return executor.parameters_on_first_rank()


SIZES: dict[str, Any] = {"vocab_size": 32, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FOREIGN = {
    "gpt2": hugging_face("GPT2LMHeadModel", "GPT2Config", n_embd=16, n_layer=2, n_head=2, **SIZES),
    "llama": hugging_face(
        *("LlamaForCausalLM", "LlamaConfig"),
        **(SMALL | SIZES | {"num_key_value_heads": 1, "intermediate_size": 32}),
    ),
}


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("name", FOREIGN)
def test_transformers_and_torchtitan_load_a_trained_model(
    ranks: Ranks, tmp_path: Path, name: str
) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))
    batch, path = {"input_ids": ids, "labels": ids}, tmp_path / "model"
    build = FOREIGN[name]
    kinds: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    (captured,) = captured_by_size(build, batch, [2], True, autocast=None, **kinds).values()
    plan = make.gpipe(make.straight([2, len(captured) - 2]), 2)
    trained = ranks.run(handed_out, 2, plan, name, (batch,), path)[0]
    loaded, expected = AutoModelForCausalLM.from_pretrained(path).eval(), build().eval()
    expected.load_state_dict(trained)
    assert torch.equal(loaded(ids).logits, expected(ids).logits)
    # As torchtitan does, whose adapters then rename and permute the tensors.
    found = {key: torch.empty_like(one) for key, one in expected.state_dict().items()}
    if name == "gpt2":  # tied
        found.pop("lm_head.weight")
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    for key, one in found.items():
        assert torch.equal(one, trained[key]), key


def test_a_torch_module_is_handed_out_under_its_names(ranks: Ranks, tmp_path: Path) -> None:
    layers, path = len(capture(tied()).layers), tmp_path / "model"
    plan = make.gpipe(make.straight([3, layers - 3]), 2)
    trained = ranks.run(handed_out, 2, plan, "tied", tokens(4), path)[0]
    found = {key: torch.zeros_like(one) for key, one in tied().state_dict().items()}
    dcp.load(found, checkpoint_id=path, no_dist=True)
    assert found.keys() == trained.keys()
    for name, one in found.items():
        assert torch.equal(one, trained[name]), name
    assert [one.name for one in tmp_path.iterdir()] == ["model"]
    with pytest.raises(InputError, match="model is there already; name a new folder"):
        require_format(None, path)


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
