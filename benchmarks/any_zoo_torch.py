"""Small models as they are written for torch alone, of kinds that are hard to capture."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from benchmarks.any_models import (
    CLASSES,
    LENGTH,
    TOKENS,
    AnyModel,
    Batch,
    classified,
    images,
    text,
    tokens,
)
from benchmarks.any_zoo_blocks import DEPTH, WIDTH, Block, Conditional, DiT, noisy, noisy_text


class NanoGPT(nn.Module):
    """Karpathy's: scores and the loss, tied weights, positions made in the forward."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(TOKENS, WIDTH), "wpe": nn.Embedding(LENGTH, WIDTH)}
        self.transformer = nn.ModuleDict(
            {
                **parts,
                "h": nn.ModuleList(block() for _ in range(DEPTH)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Scores of the next tokens, and the loss."""
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(positions)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, TOKENS), targets.view(-1), ignore_index=-1)


def compiled() -> nn.Module:
    """NanoGPT whose blocks are compiled, as torchtitan does it."""
    model = NanoGPT()
    for block in model.transformer.h:
        block.compile(backend="eager")
    return model


class Checkpointed(Block):
    """A block that is computed again in its backward."""

    def forward(self, x: Tensor) -> Tensor:
        """By torch's own checkpoints."""
        found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


class Classifier(nn.Module):
    """Tokens, ``blocks``, and a head; what passes between blocks is up to them."""

    def __init__(self, blocks: list[nn.Module], *, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH, sparse=sparse)
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Stateful(nn.Module):
    """Passes on a dict of its values, whose memory is None at first."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.gate = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        """The next state."""
        x, memory = self.block(state["x"]), state["memory"]
        memory = self.gate(x) if memory is None else memory + self.gate(x)
        return {"x": x, "memory": memory, "depth": state["depth"] + 1}


class OfStates(Classifier):
    """Passes dicts from block to block."""

    def __init__(self) -> None:
        super().__init__([Stateful() for _ in range(DEPTH)])

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        state = {"x": self.embedding(x), "memory": None, "depth": 0}
        for block in self.blocks:
            state = block(state)
        return self.head((state["x"] + state["memory"] / state["depth"]).mean(1))


class LowRank(nn.Module):
    """A frozen layer, and what is learnt beside it (LoRA)."""

    def __init__(self, of: nn.Module, inner: int, outer: int, rank: int = 4) -> None:
        super().__init__()
        self.of = of.requires_grad_(False)
        self.a, self.b = nn.Linear(inner, rank, bias=False), nn.Linear(rank, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Both."""
        return self.of(x) + self.b(self.a(x))


def gpt2_lora() -> nn.Module:
    """GPT-2 of transformers, of which the projections' low-rank parts alone are trained."""
    from benchmarks.any_models import MODELS

    model: Any = MODELS["gpt2"].build().requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LowRank(block.attn.c_attn, WIDTH, 3 * WIDTH)
    return model


class Experts(nn.Module):
    """Every token goes to the better of its experts, by indices that depend on data."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Residual."""
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(flat[rows]) * weights[rows, None])
        return x + out.view_as(x)


class Tagger(nn.Module):
    """Two directions of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.first = nn.LSTM(WIDTH, 16, batch_first=True, bidirectional=True)
        self.second, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        h, _ = self.first(self.embedding(x))
        _, last = self.second(h)
        return self.head(last[0])


class Forecast(nn.Module):
    """The likelihood of values under a distribution that is made, and validated, in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = (
            nn.Embedding(TOKENS, WIDTH),
            nn.ModuleList(Block() for _ in range(DEPTH)),
        )
        self.place, self.scale = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, input_ids: Tensor, values: Tensor) -> dict[str, Tensor]:
        """The loss."""
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        scale = F.softplus(self.scale(x)) + 1e-3
        likely = torch.distributions.Normal(self.place(x), scale).log_prob(values[..., None])
        return {"loss": -likely.mean()}


class Recommender(nn.Module):
    """DLRM: bags of sparse indices, dense features, and the products of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(TOKENS, 16, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(LENGTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 16))
        self.top = nn.Sequential(nn.Linear(22, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        dense = self.bottom(x.to(self.bottom[0].weight.dtype) / TOKENS)
        every = torch.stack(
            [dense, *(bag(part) for bag, part in zip(self.bags, x.split(4, 1), strict=True))], 1
        )
        products = torch.bmm(every, every.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([dense, products[:, rows, columns]], dim=1))


class Mixer(nn.Module):
    """An MLP over patches, and one over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.patches = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Both residual."""
        x = x + self.patches(self.ln1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.ln2(x))


class Patches(nn.Module):
    """Blocks over the patches of an image, as timm's."""

    def __init__(self, *blocks: nn.Module, token: bool = False) -> None:
        super().__init__()
        self.proj, self.blocks = nn.Conv2d(3, WIDTH, 8, 8), nn.Sequential(*blocks)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH)) if token else None
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward_features(self, x: Tensor) -> Tensor:
        """The values of all patches."""
        x = self.proj(x).flatten(2).transpose(1, 2)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        return self.norm(self.blocks(x))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        x = self.forward_features(x)
        return self.head(x.mean(1) if self.cls_token is None else x[:, 0])


def normed(norm: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    """Convolutions whose weights are computed from others in every forward."""

    def build() -> nn.Module:
        pairs = [(3, 8), (8, 8), (8, 16), (16, 16)]
        parts = [one for a, b in pairs for one in (norm(nn.Conv2d(a, b, 3, 2, 1)), nn.ReLU())]
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(64, CLASSES))

    return build


class Reversible(nn.Module):
    """Two streams that add to each other (RevNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = Block(), Block()

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Both streams."""
        a, b = pair
        a = a + self.f(b)
        return a, b + self.g(a)


class TwoStreams(Classifier):
    """Passes pairs from block to block."""

    def __init__(self) -> None:
        super().__init__([Reversible() for _ in range(DEPTH)])

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        x = self.embedding(x)
        pair = x, x
        for block in self.blocks:
            pair = block(pair)
        return self.head((pair[0] + pair[1]).mean(1))


def blocks(count: int = DEPTH, **options: Any) -> list[nn.Module]:
    return [Block(**options) for _ in range(count)]


def named_text(n: int, generator: torch.Generator) -> Batch:
    found = tokens(n, generator)
    return {"idx": found, "targets": found.roll(-1, 1)}


def valued(n: int, generator: torch.Generator) -> Batch:
    return {
        "input_ids": tokens(n, generator),
        "values": torch.randn(n, LENGTH, generator=generator),
    }


ROWS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.Generator], Batch]]] = {
    "nanogpt": (NanoGPT, named_text),
    "nanogpt-compiled": (compiled, named_text),
    "nanogpt-checkpointed": (lambda: NanoGPT(Checkpointed), named_text),
    "gpt2-lora": (gpt2_lora, text),
    "dicts-between": (OfStates, classified),
    "pairs-between": (TwoStreams, classified),
    "sparse-embedding": (lambda: Classifier(blocks(), sparse=True), classified),
    "experts": (lambda: Classifier([Experts() for _ in range(DEPTH)]), classified),
    "lstm": (Tagger, classified),
    "weight-norm": (normed(weight_norm), images),
    "spectral-norm": (normed(spectral_norm), images),
    "dit": (DiT, noisy),
    "conditional-u-net": (Conditional, noisy_text),
    "forecast-distribution": (Forecast, valued),
    "dlrm": (Recommender, classified),
    "mlp-mixer": (lambda: Patches(*(Mixer() for _ in range(DEPTH))), images),
    "timm-vit": (lambda: Patches(*blocks(causal=False, scale=0.1), token=True), images),
    "shared-block": (
        lambda: Classifier([block for block in blocks(2) for _ in range(2)]),
        classified,
    ),
}
TORCH = tuple(AnyModel(name, "torch", build, draw) for name, (build, draw) in ROWS.items())
