"""What models of libraries do between their blocks that tracers refuse; none draws numbers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F  # noqa: N812

from benchmarks.any_models import AnyModel, Batch

WORDS, WIDTH, LENGTH, CLASSES = 13, 8, 6, 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *_: Any) -> Any:
        return x + torch.tanh(self.inner(self.norm(x)))


class Language(nn.Module):
    """A table, blocks and a head."""

    def __init__(self, block: type[nn.Module] = Block, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class LossLast(Language):
    """As of nanoGPT: ``(logits, loss)`` if it is given targets."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.head(self.hidden(self.table(ids)))
        return logits, None if targets is None else F.cross_entropy(logits.mT, targets)


class Checking(Language):
    """Checks labels, a count and a distribution's parameters, as those of transformers do."""

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        if targets.max() >= WORDS or not (ids >= 0).all():
            raise ValueError(f"labels are 0 to {WORDS - 1}")
        x, is_first = self.table(ids), ids == ids[:, :1]
        if x[is_first].numel() < WIDTH * len(ids):
            raise ValueError("too few")
        x = self.hidden(x.masked_fill(is_first[..., None], 0.5)) * torch.tensor(
            [1.5], dtype=x.dtype
        )
        scale = F.softplus(x.sum(-1))
        normal = torch.distributions.Normal(x.mean(-1), scale, validate_args=True)
        loss = F.cross_entropy(self.head(x).mT, targets)
        return {"loss": loss - normal.log_prob(targets.to(x.dtype)).mean()}


class Body(nn.Module):
    """Decides by its values, between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if x.sum() > 0 else -block(x)
        return x


class Deciding(LossLast):
    """Has such bodies, and a loss without a rule for shapes."""

    def __init__(self) -> None:
        super().__init__(Body)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.head(self.hidden(self.table(ids)))
        assert targets is not None
        kept = targets > 0
        sizes = torch.full((len(ids),), LENGTH), kept.sum(-1)
        found = F.log_softmax(logits, -1).transpose(0, 1)
        return {"loss": F.ctc_loss(found, targets.masked_select(kept), *sizes, zero_infinity=True)}


class Patches(nn.Module):
    """Hands on a dict with sizes and None."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, WIDTH, 2, 2)

    def forward(self, pixels: Tensor) -> dict[str, Any]:
        x = self.cut(pixels)
        return {"x": x.flatten(2).mT, "size": (*x.shape[2:],), "mask": None}


class Mixer(nn.Module):
    """Is given sizes and a condition on them, and returns others."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor, size: tuple[int, int], mask: Any, is_odd: bool) -> Any:
        assert mask is None
        mixed = self.mix(x.mT.unflatten(2, size)).flatten(2).mT
        return (x + mixed if is_odd else x - mixed), size[0] % 2 > 0, size


class Vision(nn.Module):
    """As XCiT and Swin v2."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = Patches()
        self.blocks = nn.ModuleList(Mixer() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        found = self.patches(pixels)
        x, size, is_odd = found["x"], found["size"], found["x"].shape[1] > 4
        for block in self.blocks:
            x, is_odd, size = block(x, size, found["mask"], is_odd)
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class Labelled(Vision):
    """The same with keywords and its loss."""

    def forward(self, pixels: Tensor, targets: Tensor | None = None) -> Any:
        assert targets is not None
        return {"loss": F.cross_entropy(super().forward(pixels), targets)}


class Classes(Language):
    """Classes of whole texts; what its parts are is left to ``build``."""

    def forward(self, ids: Tensor) -> Tensor:
        assert ids.shape[1] == LENGTH
        return self.head(self.hidden(self.table(ids)).mean(1))  # type: ignore[no-any-return]


class Crash(BaseException):
    """Stands for the end of a process."""


def _kernels(graph: Any, _: Any) -> Any:
    """A backend of torch.compile whose kernels cannot run without data."""

    def run(*given: Any) -> Any:
        if any(isinstance(one, FakeTensor) for one in given):
            raise Crash
        return graph(*given)

    return run


@torch.compile(backend=_kernels)
def _doubled(x: Tensor) -> Tensor:
    return 2 * x


class WithFunction(Block):
    """Calls a compiled function."""

    def forward(self, x: Tensor, *_: Any) -> Any:
        return super().forward(_doubled(x))


def _compiled() -> nn.Module:
    model = Classes(WithFunction)
    model.blocks[0].compile(backend=_kernels)
    model.blocks[1] = torch.compile(model.blocks[1], backend=_kernels)  # type: ignore[assignment]
    return torch.compile(model, backend=_kernels)  # type: ignore[return-value]


def _normalised() -> nn.Module:
    model = Classes()
    for block in model.blocks:
        torch.nn.utils.weight_norm(block.inner)
    return model


def _texts(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    ids, targets = torch.randint(WORDS, (2, n, LENGTH), generator=generator)
    return ids, targets


def _keywords(n: int, generator: torch.Generator) -> Batch:
    ids, targets = _texts(n, generator)
    return {"ids": ids, "targets": targets}


def _classes(n: int, generator: torch.Generator) -> Batch:
    ids, targets = _texts(n, generator)
    return ids, targets[:, 0]


def _images(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    pixels = torch.randn(n, 3, 6, 4, generator=generator)
    return pixels, torch.randint(CLASSES, (n,), generator=generator)


def _labelled(n: int, generator: torch.Generator) -> Batch:
    pixels, targets = _images(n, generator)
    return {"pixels": pixels, "targets": targets}


KINDS = {
    name: AnyModel(name, "torch", build, draw)
    for name, build, draw in (
        ("loss last", LossLast, _keywords),
        ("checks", Checking, _keywords),
        ("decides", Deciding, _keywords),
        ("structures", Vision, _images),
        ("sizes", Labelled, _labelled),
        ("sparse", lambda: Classes(sparse=True), _classes),
        ("compiled", _compiled, _classes),
        ("weight norm", _normalised, _classes),
    )
}
