"""Weights in files: a stage's alone are read, and other models' are refused by name."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import training_plans as make
from models import TiedTransformer, WithBatchNorm
from torch import Tensor, nn

from stagewright.executor.capture.tracing import capture
from stagewright.executor.training.runtime import Executor
from stagewright.executor.training.stages.initialise import initialise
from stagewright.executor.training.stages.stored_weights import TYPES, Entry, find_weights
from stagewright.graphs.documents.errors import InputError


def write(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    names = {dtype: name for name, dtype in TYPES.items()}
    header, data = {}, b""
    for name, one in tensors.items():
        raw = one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": names[one.dtype], "shape": one.shape, "data_offsets": offsets}
        data += raw
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.clone() for name, one in model.state_dict().items()}


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    torch.manual_seed(11)
    state = state_of(WithBatchNorm())
    return write(tmp_path / "model.safetensors", state), state


@pytest.mark.parametrize("layer", range(3))
def test_only_a_stages_tensors_are_read(
    stored: tuple[Path, dict[str, Tensor]], layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, state = stored
    seen, read = [], Entry.read

    def seen_read(entry: Entry) -> Tensor:
        seen.append(entry.name)
        return read(entry)

    monkeypatch.setattr(Entry, "read", seen_read)
    layered = initialise(WithBatchNorm, {layer}, weights=find_weights(path))
    own = layered.layers[layer].module.state_dict()
    assert sorted(seen) == sorted(own)
    for name, one in own.items():
        assert torch.equal(one, state[name])
        assert one.dtype == state[name].dtype


def test_a_given_module_gets_them_and_stays_as_it_is(
    stored: tuple[Path, dict[str, Tensor]],
) -> None:
    path, state = stored
    model = WithBatchNorm()
    before = state_of(model)
    layered = initialise(model, range(20), dtype=torch.float64, weights=find_weights(path))
    for names, one in layered.parameters_by_name().items():
        assert torch.equal(one, state[names[0]].double())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_a_run_begins_with_them(stored: tuple[Path, dict[str, Tensor]]) -> None:
    path, state = stored
    plan = make.one_f_one_b(make.straight([len(capture(WithBatchNorm()).layers)]), 2, "flush")
    executor = Executor(plan, WithBatchNorm, weights=path)
    found = executor.parameters_on_first_rank()
    assert found is not None
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], one) for name, one in state.items())


def test_shards_with_and_without_an_index(
    stored: tuple[Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    _, state = stored
    folder = tmp_path / "shards"
    folder.mkdir()
    places = {}
    for i, part in enumerate((list(state)[:3], list(state)[3:])):
        write(folder / f"{i}.safetensors", {name: state[name] for name in part})
        places |= dict.fromkeys(part, f"{i}.safetensors")
    assert find_weights(folder).entries.keys() == state.keys()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    for path in (folder, index):
        found = find_weights(path)
        assert all(torch.equal(found.read([name]), one) for name, one in state.items())
    index.unlink()
    write(folder / "2.safetensors", {next(iter(state)): state[next(iter(state))]})
    with pytest.raises(InputError, match=r"is in .*0.safetensors and in .*2.safetensors"):
        find_weights(folder)


def tied_names() -> list[str]:
    model = TiedTransformer()
    named = dict(model.named_parameters(remove_duplicate=False))
    once = {id(one) for one in named.values()}
    return next(
        names
        for key in once
        if len(names := [name for name, one in named.items() if id(one) == key]) > 1
    )


@pytest.mark.parametrize("kept", [0, 1])
def test_one_name_of_a_tied_tensor_is_enough(kept: int, tmp_path: Path) -> None:
    torch.manual_seed(12)
    state, names = state_of(TiedTransformer()), tied_names()
    expected = state[names[0]]
    del state[names[1 - kept]]
    weights = find_weights(write(tmp_path / "tied.safetensors", state))
    layered = initialise(TiedTransformer, range(20), weights=weights)
    (tied,) = [one for found, one in layered.parameters_by_name().items() if len(found) > 1]
    assert torch.equal(tied, expected)


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    state = state_of(TiedTransformer())
    state[tied_names()[1]] += 1
    weights = find_weights(write(tmp_path / "tied.safetensors", state))
    with pytest.raises(InputError, match=r"'.*' and '.*' are one tensor in the model"):
        initialise(TiedTransformer, range(20), weights=weights)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("norm.weight"), "has no tensor 'norm.weight'"),
        (lambda state: state.update(more=torch.ones(2)), "the model has not: 'more'"),
        (
            lambda state: state.update({"norm.bias": torch.ones(7)}),
            r"'norm.bias' has shape \(7,\), the model's \(6,\)",
        ),
        (
            lambda state: state.update({"norm.bias": torch.ones(6, dtype=torch.int64)}),
            "'norm.bias' is torch.int64, the model's torch.float32",
        ),
    ],
)
def test_another_models_weights_are_refused(change, words, stored, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    _, state = stored
    change(state)
    weights = find_weights(write(tmp_path / "other.safetensors", state))
    with pytest.raises(InputError, match=words):
        initialise(WithBatchNorm, {0}, weights=weights)  # whose layer has none of them


def test_what_is_no_file_of_weights_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(InputError, match="cannot be read"):
        find_weights(path)
    with pytest.raises(InputError, match="0 indices and 0"):
        find_weights(tmp_path)
    with pytest.raises(InputError, match="is no folder"):
        find_weights(tmp_path / "model.bin")
    path.write_bytes(b"no such format")
    with pytest.raises(InputError, match="longer than the file"):
        find_weights(path)
    whole = write(path, {"a": torch.ones(8)}).read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(InputError, match="'a' has not the bytes"):
        find_weights(path)
    path.write_bytes(whole.replace(b'"F32"', b'"F33"'))
    with pytest.raises(InputError, match="of type F33"):
        find_weights(path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(InputError, match="is not an index"):
        find_weights(index)
