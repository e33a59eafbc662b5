"""Blocks of transformers, as they are written for torch alone."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

WIDTH, HEADS, DEPTH = 32, 4, 4


class Attention(nn.Module):
    """Causal attention of all heads at once."""

    def __init__(self, width: int = WIDTH, *, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out, self.causal = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            causal,
        )

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Attend to ``x``, or to ``context``."""
        b, t, c = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if context is not None:
            _, k, v = self.qkv(context).chunk(3, dim=-1)
        q, k, v = (one.view(b, -1, HEADS, c // HEADS).transpose(1, 2) for one in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal and context is None)
        return self.out(found.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    """Attention and a feed-forward, with scaled residuals where ``scale`` is given."""

    def __init__(self, *, causal: bool = True, scale: float | None = None) -> None:
        super().__init__()
        self.ln1, self.attention, self.ln2 = (
            nn.LayerNorm(WIDTH),
            Attention(causal=causal),
            nn.LayerNorm(WIDTH),
        )
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.scale = None if scale is None else nn.Parameter(scale * torch.ones(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """As in nanoGPT and timm."""
        a, b = (1.0, 1.0) if self.scale is None else self.scale
        x = x + a * self.attention(self.ln1(x))
        return x + b * self.mlp(self.ln2(x))
