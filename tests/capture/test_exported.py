"""Models that are called with more than tensors by position: their layers in order are the model.

The reference is a call of the model itself, in double precision.
"""

import random
from collections import namedtuple
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from exported import CPU, LENGTH, SAMPLES, WIDTH, WORDS, Batch, Block, captured, run, words
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils import checkpoint

from stagewright.executor.capture.exported.exporting import Example
from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.capture.shapes import propagate, values_of
from stagewright.executor.capture.signature import signed
from stagewright.executor.capture.tracing import capture
from stagewright.graphs.documents.errors import InputError


def assert_same(
    model: nn.Module, *batches: Batch, loss: Callable[[Any], Tensor] | None = None
) -> LayeredModel:
    """Loss and all gradients, of every mini-batch, by layers that know the first one's sizes."""
    model = model.double()
    untouched = deepcopy(model)
    layered = captured(model, batches[0], takes_loss=loss is None)
    for batch in batches:
        found = run(layered, batch)
        expected = untouched(**batch)
        if loss is None:
            expected = expected["loss"] if isinstance(expected, Mapping) else expected.loss
        else:
            found, expected = loss(found), loss(expected)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        wanted = {n: p for n, p in untouched.named_parameters() if p.requires_grad}
        own = dict(model.named_parameters())
        for one, other in zip(
            torch.autograd.grad(found, [own[n] for n in wanted], allow_unused=True),
            torch.autograd.grad(expected, list(wanted.values()), allow_unused=True),
            strict=True,
        ):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    names = {name for layer in layered.layers for name in layer.module.state_dict()}
    assert names == set(untouched.state_dict())
    return layered


@dataclass
class Answer:
    loss: Tensor | None
    logits: Tensor
    note: str = "no tensor"


torch.utils._pytree.register_dataclass(Answer)


class Words(nn.Module):
    """A language model in the manner of transformers: keywords, a mask, a tied head, its loss."""

    def __init__(self, blocks: int = 3, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(
        self, ids: Tensor, labels: Tensor | None = None, mask: Tensor | None = None, **_: Any
    ) -> Any:
        length = ids.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        if mask is not None:
            seen = seen & mask[:, None, :].bool()
        x = self.table(ids)
        for block in self.blocks:
            x = block(x, mask=seen, scale=0.5)
        logits = self.head(x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Answer(loss, logits)


def test_keywords_masks_tied_tables_and_the_model_s_own_loss() -> None:
    layered = assert_same(Words(), words(0), words(1, samples=2, length=7))
    names = [layer.name for layer in layered.layers]
    assert names == ["table", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert layered.parameters_by_name().keys() >= {("table.weight", "head.weight")}


def test_masks_are_made_again_and_not_passed_on() -> None:
    batch = words(0) | {"mask": torch.ones(SAMPLES, LENGTH, dtype=torch.int64)}
    batch["mask"][1, 2:] = 0
    layered = assert_same(Words(), batch)
    trace = propagate(layered.layers, values_of(signed(batch)[0], SAMPLES), CPU, None)
    shapes = [value.shape for value in trace[1].outputs]
    assert shapes.count((SAMPLES, LENGTH, WIDTH)) == 1
    assert all(len(shape) == 2 for shape in shapes if shape != (SAMPLES, LENGTH, WIDTH))


def test_results_keep_their_structure_for_a_loss() -> None:
    batch = words(0)
    model = Words().double()
    layered = captured(model, {"ids": batch["ids"]}, takes_loss=False)
    found = run(layered, {"ids": batch["ids"]})
    assert isinstance(found, Answer)
    assert (found.loss, found.note) == (None, "no tensor")
    assert_same(Words(), {"ids": batch["ids"]}, loss=lambda answer: answer.logits.square().mean())


def test_other_keywords_and_plain_values_are_refused() -> None:
    layered = captured(Words().double(), words(0) | {"power": 2})
    with pytest.raises(InputError, match=r"captured for inputs .*power: 2.*power: 3"):
        run(layered, words(0) | {"power": 3})
    with pytest.raises(InputError, match="captured for inputs"):
        run(layered, words(0))


class FixedLength(Words):
    def forward(self, ids: Tensor, labels: Tensor | None = None, **rest: Any) -> Any:
        return super().forward(ids.view(-1, LENGTH), labels, **rest)


def test_sizes_that_the_model_fixes_are_checked() -> None:
    layered = assert_same(FixedLength(), words(0), words(1, samples=2))
    with pytest.raises(InputError, match=r"ids.shape\[1\]"):
        run(layered, words(0, length=LENGTH + 1))


def test_one_sample_is_like_several() -> None:
    assert_same(Words(), words(0), words(1, samples=1))
    assert_same(Words(), words(0, samples=1), words(1, samples=3, length=1))


class AskingForOne(Words):
    """Another model for one sample."""

    def forward(self, ids: Tensor, labels: Tensor | None = None, **rest: Any) -> Any:
        found = super().forward(ids, labels, **rest)
        return {"loss": found.loss * (3 if ids.shape[0] == 1 else 1)}


def test_a_model_that_asks_for_one_sample_is_captured_for_it_alone() -> None:
    model = AskingForOne()
    layered = assert_same(model, words(0), words(1, samples=2))
    with pytest.raises(InputError, match=r"ids.shape\[0\] != 1"):
        run(layered, words(0, samples=1))
    for seed, samples in enumerate((1, 3, 1)):
        batch = words(seed, samples=samples)
        again = layered.sized([tuple(one.shape) for one in signed(batch)[0]])
        torch.testing.assert_close(run(again, batch), model(**batch)["loss"], rtol=0, atol=1e-12)
        shared = zip(layered.layers, again.layers, strict=True)
        for one, other in shared:
            assert list(map(id, one.module.parameters())) == list(
                map(id, other.module.parameters())
            )
    layered = assert_same(AskingForOne(), words(0, samples=1))
    with pytest.raises(InputError, match=r"ids.shape\[0\] == 1"):
        run(layered, words(0))


# Blocks


class Counting(Block):
    """Loops as often as the values say."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        for row in (x[:, 0, 0] > 0).nonzero().flatten().tolist():
            x = x + torch.tanh(self.inner(x)) * (0.1 + row / 10)
        return x


class Reshaping(Words):
    """Asks a block's result for its sizes."""

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
            x = x.reshape(-1, x.shape[2]).reshape(ids.shape[0], -1, x.shape[2])
        return {"loss": F.cross_entropy(self.head(x).mT, labels)}


def test_sizes_of_a_block_that_needs_values_are_told_apart() -> None:
    """As many samples as features, and as many tokens."""
    for samples, length in ((WIDTH, LENGTH), (2, WIDTH), (2, WIDTH // 2)):
        batch = words(0, samples=samples, length=length)
        assert_same(Reshaping(block=Counting), batch, words(1, samples=3, length=4))


class Recomputed(Block):
    def forward(self, x: Tensor, **_: Any) -> Any:
        return checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class Several(Block):
    """Returns a dict with a tensor that is used much later, and a plain value."""

    def forward(self, x: Tensor, **_: Any) -> Any:
        y = self.inner(x)
        return {"x": x + y, "kept": [y.mean(-1)], "count": 3}


class Gathering(Words):
    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x, kept = self.table(ids), []
        for block in self.blocks:
            found = block(x)
            x = found["x"] / found["count"]
            kept += found["kept"]
        logits = self.head(x)
        auxiliary = torch.stack(kept).square().mean()
        return {"loss": F.cross_entropy(logits.mT, labels) + auxiliary, "logits": logits}


@pytest.mark.parametrize("block", [Counting, Recomputed])
def test_what_a_block_does_inside_is_its_own(block: type[nn.Module]) -> None:
    layered = assert_same(Words(block=block), words(0), words(1))
    batch = signed(words(0))[0]
    trace = propagate(layered.layers, values_of(batch, SAMPLES), CPU, None)
    own = {name for one in trace for name in one.trained}
    assert "blocks.1.inner.weight" in own


def test_blocks_return_structures_and_values_that_are_used_late() -> None:
    assert_same(Gathering(block=Several), words(0), words(1, samples=3))


class Hooked(Words):
    """Hands on what is inside its blocks by hooks, as routers of experts do."""

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        kept: list[Tensor] = []
        hooks = [
            block.inner.register_forward_hook(lambda _m, _i, out: kept.append(out))
            for block in self.blocks
        ]
        found = super().forward(ids, labels)
        for hook in hooks:
            hook.remove()
        return {"loss": found.loss + torch.stack(kept).mean()}


def test_tensors_handed_on_beside_the_results_are_not_lost() -> None:
    layered = assert_same(Hooked(), words(0), words(1))
    assert [layer.name for layer in layered.layers][1] == "blocks.0.inner"  # a block was opened


class Holder(Block):
    """Keeps its result where the model finds it."""

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        self.kept = self.inner(x)
        return x + self.kept


class Finding(Words):
    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        found = super().forward(ids, labels)
        return {"loss": found.loss + sum(block.kept.mean() for block in self.blocks)}


def test_tensors_kept_in_attributes_are_refused() -> None:
    with pytest.raises(InputError, match=r"beside its results|cannot be captured"):
        captured(Finding(block=Holder).double(), words(0))


class Cache:
    """An object of the model's own."""


class Caching(Words):
    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x, mask=Cache())
        return {"loss": x.mean()}


def test_objects_between_blocks_are_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"'blocks.0' is given a Cache"):
        captured(Caching().double(), words(0))


# Between the blocks


class Between(Words):
    """In-place operators, buffers, constants, regions without gradients or autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.linspace(0, 1, LENGTH), persistent=False)
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.table(ids)
        x += self.places[:, None] * torch.tensor(0.5, dtype=x.dtype)
        turned = torch.zeros(ids.shape[1], dtype=x.dtype)
        turned[1:] = 1.0
        for number, block in enumerate(self.blocks):
            x = block(x) * self.factor
            if number == 1:
                turned.mul_(2)
            with torch.no_grad():
                size = x.norm()
            with torch.autocast("cpu", enabled=False):
                angle = self.places.cos()
            x = x / size + angle[:, None] * turned[:, None]
        return {"loss": F.cross_entropy(self.head(x).mT, labels)}


def test_operators_between_blocks() -> None:
    assert_same(Between(), words(0), words(1))


class Remembering(Words):
    """What a call does depends on those before it."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.calls, self.draws = 0, draws

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        self.calls += not self.draws
        kept = random.random() < 0.5 if self.draws else self.calls % 2
        x = self.table(ids) * (2 if kept else 1)
        for block in self.blocks:
            x = block(x)
        return {"loss": x.mean()}


@pytest.mark.parametrize(
    ("draws", "named"), [(False, "'calls' of Remembering"), (True, "Python's")]
)
def test_state_of_python_between_blocks_is_refused(draws: bool, named: str) -> None:
    with pytest.raises(InputError, match=named):
        captured(Remembering(draws).double(), words(0))


class Dropping(Words):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.dropout(self.table(ids))
        for block in self.blocks:
            x = F.dropout(block(x), 0.25, self.training)
        return {"loss": F.cross_entropy(self.head(x).mT, labels)}


def test_draws_between_blocks_are_known_and_end_in_evaluation() -> None:
    model = Dropping().double()
    layered = captured(model, words(0))
    trace = propagate(layered.layers, values_of(signed(words(0))[0], SAMPLES), CPU, None)
    assert [one.random for one in trace] == [True] * 4 + [False]
    for layer in layered.layers:
        layer.module.eval()
    torch.testing.assert_close(run(layered, words(0)), model.eval()(**words(0))["loss"])


class Tallying(Words):
    """Counts in a buffer between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        self.steps += 1
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return {"loss": F.cross_entropy(self.head(x).mT, labels) + x.mean() / self.steps}


def test_buffers_that_change_between_blocks() -> None:
    model = Tallying().double()
    untouched = deepcopy(model)
    layered = captured(model, words(0))
    for seed in range(3):
        found = run(layered, words(seed))
        torch.testing.assert_close(found, untouched(**words(seed))["loss"])
        assert model.steps == seed + 1


class OnValues(Words):
    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.table(ids)
        if x.sum() > 0:
            x = x * 2
        return {"loss": x.mean()}


def test_a_path_that_depends_on_data_is_refused_with_its_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(InputError, match=r"test_exported.py:\d+ \(if x.sum\(\) > 0:\)"):
        captured(OnValues().double(), words(0))
    assert capfd.readouterr() == ("", "")


def test_a_model_without_a_loss_is_refused() -> None:
    with pytest.raises(InputError, match="returns no loss"):
        captured(Words().double(), {"ids": words(0)["ids"]})


Pair = namedtuple("Pair", ["x", "y"])


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, pair: Pair, options: Mapping[str, Any], *, flag: bool) -> Tensor:
        x = pair.x + (pair.y if flag else 0) + options["shift"]
        for block in self.blocks:
            x = block(x)
        return x


def test_nested_arguments() -> None:
    shape = (SAMPLES, WIDTH)
    batch = {
        "pair": Pair(torch.randn(shape).double(), torch.randn(shape).double()),
        "options": {"shift": torch.randn(shape).double(), "unused": None},
        "flag": True,
    }
    assert_same(Nested(), batch, loss=lambda x: x.square().mean())


def test_torch_s_own_encoder_is_cut_between_its_layers() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    x = torch.randn(SAMPLES, LENGTH, WIDTH).double()
    layered = assert_same(model, {"src": x}, loss=lambda y: y.square().mean())
    assert [layer.name for layer in layered.layers] == ["layers.0", "layers.1", "layers.2"]


def test_computations_in_bfloat16_are_cast_as_the_model_s() -> None:
    model = Words()
    batch = words(0)
    tensors, signature = signed(batch)
    layered = capture(model, Example(tensors, signature, True, CPU, torch.float32, torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = run(layered, batch), model(**batch).loss
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class InPlace(Words):
    """Sums that change the result of a block, once, twice, or seen by a view of before."""

    def __init__(self, kind: str) -> None:
        super().__init__(2)
        self.kind = kind

    def forward(self, ids: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
        start = self.table(ids)
        hidden = self.blocks[0](start)
        seen = hidden.flatten(1) if self.kind == "a view" else None
        hidden += start
        if self.kind == "twice":
            again = hidden.mul_(0.5)
            hidden.add_(1.0)
            hidden = hidden + again
        if seen is not None:
            hidden = hidden + seen.view_as(hidden)
        hidden = self.blocks[1](hidden)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())
        return {"loss": loss}


@pytest.mark.parametrize("kind", ["once", "twice", "a view"])
def test_sums_in_place_between_blocks(kind: str) -> None:
    layered = assert_same(InPlace(kind), words(1))
    parts = [part for layer in layered.layers for part in layer.module.modules()]
    graphs = [part.graph for part in parts if isinstance(part, torch.fx.GraphModule)]
    targets = [str(n.target) for graph in graphs for n in graph.nodes if n.op == "call_function"]
    assert ("aten.add_.Tensor" in targets) == (kind == "a view")
