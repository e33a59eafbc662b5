"""Checkpoints: what is written is read back, by other ranks too; half a checkpoint is none."""

import gc
import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import Ranks

pytest.importorskip("torch", reason="pip install 'stagewright[executor]'")

import torch
import torch.distributed as dist
from torch import Tensor

from stagewright.executor.training import checkpoint
from stagewright.executor.training.checkpoint import Header
from stagewright.graphs.documents.errors import InputError

# What a run of two parameters and a buffer holds, in all; the ranks share it in some way.
STATE = {
    "model.0.weight": torch.arange(6, dtype=torch.float64).reshape(2, 3) / 7,
    "model.0.bias": torch.tensor([0.25, -1.5], dtype=torch.bfloat16),
    "model.1.count": torch.tensor(3),
    "optimizer.0.weight.exp_avg": torch.full((2, 3), 1e-30, dtype=torch.float64),
    "optimizer.0.weight.step": torch.tensor(4.0),
}


def latest(folder):
    """The newest complete checkpoint in ``folder``."""
    return next(reversed(checkpoint._complete(folder)), None)


def share(rank: int, world: int) -> dict[str, Tensor]:
    return {key: STATE[key] for i, key in enumerate(STATE) if i % world == rank}


def save(
    group: dist.ProcessGroup, rank: int, folder: Path, steps: tuple[int, ...] = (10,)
) -> list[str]:
    for step in steps:
        header = Header(step, "flush", "AdamW")
        checkpoint.save(folder, share(rank, dist.get_world_size(group)), header, group)
    dist.barrier(group)
    return sorted(path.name for path in folder.iterdir())


def read(
    group: dist.ProcessGroup, rank: int, path: Path, keys: list[list[str]]
) -> dict[str, Tensor] | str:
    try:
        return checkpoint.read(path, keys[rank], group)
    except InputError as error:
        return str(error)


def compare_model(
    group: dist.ProcessGroup, rank: int, path: Path, changes: dict[str, Any]
) -> str | None:
    state = {**share(rank, dist.get_world_size(group)), **(changes if rank == 0 else {})}
    state = {key: tensor for key, tensor in state.items() if tensor is not None}
    try:
        checkpoint.require_same_model(path, state, group)
    except InputError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def written(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that three ranks have written."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    ranks.run(save, 3, folder)
    path = latest(folder)
    assert path == folder / "step-00000010"
    return path


def test_what_is_written_is_read_by_any_number_of_ranks(ranks: Ranks, written: Path) -> None:
    assert checkpoint.read_header(written) == Header(10, "flush", "AdamW")
    assert checkpoint.read_kinds(written) == {
        key: (tensor.shape, tensor.dtype) for key, tensor in STATE.items()
    }
    # Two ranks want the same tensor, one of them nothing else; the others what nobody wrote.
    wanted = [[*STATE], ["model.0.bias"], [], ["model.1.count", "model.0.bias"]]
    for keys, tensors in zip(wanted, ranks.run(read, 4, written, wanted), strict=True):
        assert set(tensors) == set(keys)
        for key in keys:
            torch.testing.assert_close(tensors[key], STATE[key], rtol=0, atol=0)


def test_the_two_newest_are_kept_and_leftovers_removed(ranks: Ranks, tmp_path: Path) -> None:
    leftover = tmp_path / ".step-00000003.partial"
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"half")
    assert latest(tmp_path) is None
    names = ranks.run(save, 2, tmp_path, (3, 9, 100_000_000))[0]
    assert names == ["step-00000009", "step-100000000"]
    assert latest(tmp_path) == tmp_path / "step-100000000"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"optimizer.0.weight.step": None}, None),  # an optimizer that has not begun
        (
            {"model.0.weight": torch.zeros(3, 2, dtype=torch.float64)},
            "0.weight is 2x3 of float64 there, 3x2 of float64 here",
        ),
        (
            {"model.0.weight": torch.zeros(2, 3)},
            "0.weight is 2x3 of float64 there, 2x3 of float32 here",
        ),
        ({"model.0.weight": None}, "0.weight is 2x3 of float64 there, missing here"),
        (
            {"model.2.scale": torch.tensor(1.0)},
            "2.scale is missing there, a number of float32 here",
        ),
    ],
)
def test_another_model_is_refused(
    ranks: Ranks, written: Path, changes: dict[str, Any], complaint: str | None
) -> None:
    line = complaint and f"{written} is of another model: {complaint}"
    assert ranks.run(compare_model, 2, written, changes) == [line, line]


def test_only_what_leads_to_the_goal_is_resumed(written: Path, tmp_path: Path) -> None:
    folder, goal = written.parent, Header(11, "flush", "AdamW")
    assert checkpoint.find(folder, True, goal) == written
    assert checkpoint.find(None, True, goal) is None
    assert checkpoint.find(tmp_path, False, goal) is None
    for resume, place, change, complaint in [
        (True, folder, {"weights": "stash"}, "weights 'flush', this one has 'stash'"),
        (True, folder, {"optimizer": "SGD"}, "optimizer 'AdamW', this one has 'SGD'"),
        (True, folder, {"steps": 10}, "has done 10 of 10 steps"),
        (False, folder, {}, "step-00000010 of an earlier run; add --resume"),
        (True, tmp_path, {}, "no complete checkpoint"),
        (True, tmp_path / "nowhere", {}, "no complete checkpoint"),
        (False, written / checkpoint.HEADER, {}, "is not a folder"),
    ]:
        with pytest.raises(InputError, match=re.escape(complaint)):
            checkpoint.find(place, resume, replace(goal, **change))


@pytest.mark.covering
@pytest.mark.parametrize("name", [".metadata", "stagewright.json", "__1_0.distcp"])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_checkpoint_is_refused_in_one_line(
    ranks: Ranks, tmp_path: Path, name: str, damage: str
) -> None:
    ranks.run(save, 2, tmp_path)
    path = tmp_path / "step-00000010"
    if damage == "missing":
        (path / name).unlink()
    else:
        (path / name).write_bytes((path / name).read_bytes()[:-100])
    if name == "stagewright.json":
        with pytest.raises(InputError, match=r"step-00000010/stagewright.json: ") as refusal:
            checkpoint.read_header(path)
        assert "\n" not in str(refusal.value)
    else:  # one rank reads nothing, and hears of it all the same
        for line in ranks.run(read, 2, path, [[], [*STATE]]):
            assert re.match(rf"{re.escape(str(path))} is damaged [^\n]+$", line)


def find(
    group: dist.ProcessGroup, rank: int, folder: Path, goal: int
) -> tuple[Path | None, list[str]] | str:
    told: list[str] = []
    try:
        return checkpoint.find(folder, True, Header(goal, "flush", "AdamW"), told.append), told
    except InputError as error:
        return str(error)


FILES = [".metadata", "SHA256SUMS", "__0_0.distcp", "__1_0.distcp", "stagewright.json"]


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_a_flipped_byte_is_found_and_the_newest_whole_checkpoint_taken(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(save, 2, tmp_path, (8, 10))
    newest, older = tmp_path / "step-00000010", tmp_path / "step-00000008"
    assert sorted(path.name for path in newest.iterdir()) == FILES
    assert ranks.run(find, 2, tmp_path, 12) == [(newest, [])] * 2
    for name in FILES:
        for place in (0, -1):
            flip(newest / name, place)
            for path, told in ranks.run(find, 2, tmp_path, 12):
                assert path == older
                (line,) = told
                assert re.fullmatch(
                    rf"{re.escape(str(newest))} is damaged \([^\n]+\); resuming from {older.name}",
                    line,
                )
                assert name in line or name == "SHA256SUMS"
            flip(newest / name, place)
    flip(newest / FILES[0], 5)
    (older / FILES[3]).unlink()
    for line in ranks.run(find, 2, tmp_path, 12):
        assert re.fullmatch(
            r"[^\n]+step-00000010 is damaged \(.metadata [^\n]+step-00000008 is damaged "
            r"\(__1_0.distcp [^\n]+; no whole checkpoint is left",
            line,
        )


def test_a_damaged_checkpoint_is_replaced_when_the_run_comes_there_again(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(save, 2, tmp_path, (8, 10))
    flip(tmp_path / "step-00000010" / "__0_0.distcp", 7)
    assert ranks.run(save, 2, tmp_path, (9,))[0] == ["step-00000008", "step-00000009"]
    flip(tmp_path / "step-00000009" / "__0_0.distcp", 7)
    assert ranks.run(save, 2, tmp_path, (9,))[0] == ["step-00000008", "step-00000009"]
    assert checkpoint.find(tmp_path, True, Header(10, "flush", "AdamW")) is not None


def save_on_a_full_disk(group: dist.ProcessGroup, rank: int, folder: Path) -> str | None:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    gc.collect()  # what earlier runs left may write to a file as it goes
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, unlimited[1]))
    try:
        checkpoint.save(folder, share(rank, 2), Header(11, "flush", "AdamW"), group)
    except InputError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    return None


def test_what_cannot_be_written_leaves_the_older_ones(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save, 2, tmp_path)
    line = f"{tmp_path / 'step-00000011'}: the checkpoint cannot be written: "
    for complaint in ranks.run(save_on_a_full_disk, 2, tmp_path):
        assert complaint == line + "File too large"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert latest(tmp_path) == tmp_path / "step-00000010"
    assert ranks.run(save, 2, tmp_path, (12,))[0] == ["step-00000010", "step-00000012"]
