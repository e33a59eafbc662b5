"""Blocks of transformers as written for torch alone, and small diffusion networks of them.

These are as diffusers has them: of noisy images, times, and classes or text.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.any_models import CLASSES, IMAGE, TOKENS, Batch, images, tokens

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


class Modulated(nn.Module):
    """A block of a diffusion transformer: shifts and scales from the time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = (
            nn.LayerNorm(WIDTH, elementwise_affine=False),
            Attention(causal=False),
        )
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH))
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """AdaLN."""
        s1, k1, g1, s2, k2, g2 = self.modulation(condition)[:, None].chunk(6, dim=-1)
        x = x + g1 * self.attention(self.norm(x) * (1 + k1) + s1)
        return x + g2 * self.mlp(self.norm(x) * (1 + k2) + s2)


def waves_of(time: Tensor) -> Tensor:
    """Sines and cosines of a time, (n, WIDTH)."""
    rates = torch.exp(-math.log(1e4) * torch.arange(WIDTH // 2, device=time.device) / (WIDTH // 2))
    angles = time[:, None].to(time.dtype) * rates.to(time.dtype)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class DiT(nn.Module):
    """A diffusion transformer of noisy images, times and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.time = nn.Conv2d(3, WIDTH, 8, 8), nn.Linear(WIDTH, WIDTH)
        self.classes, self.out = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, 3 * 64)
        self.positions = nn.Parameter(torch.randn(1, 16, WIDTH) / 10)
        self.blocks = nn.ModuleList(Modulated() for _ in range(DEPTH))

    def forward(
        self, sample: Tensor, timestep: Tensor, classes: Tensor, noise: Tensor
    ) -> dict[str, Tensor]:
        """The loss."""
        condition = F.silu(self.time(waves_of(timestep)) + self.classes(classes))
        x = self.patches(sample).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        found = F.fold(self.out(x).transpose(1, 2), (IMAGE, IMAGE), 8, stride=8)
        return {"loss": F.mse_loss(found, noise), "sample": found}


class Residual(nn.Module):
    """Convolutions to which the time is added."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, before), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, after), nn.Conv2d(after, after, 3, padding=1)
        self.time, self.short = nn.Linear(WIDTH, after), nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """As in diffusers."""
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.short(x) + self.conv2(F.silu(self.norm2(h)))


class Conditional(nn.Module):
    """A U-Net that is told time and text: skips, and cross attention in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.time, self.text = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Linear(WIDTH, WIDTH),
            nn.Embedding(TOKENS, WIDTH),
        )
        self.down = nn.ModuleList([Residual(8, 16), Residual(16, 32)])
        self.attention, self.middle = Attention(), Residual(32, 32)
        self.up = nn.ModuleList([Residual(64, 16), Residual(32, 8)])
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def forward(
        self, sample: Tensor, timestep: Tensor, input_ids: Tensor, noise: Tensor
    ) -> dict[str, Tensor]:
        """The loss."""
        time, text = self.time(waves_of(timestep)), self.text(input_ids)
        x, skipped = self.first(sample), []
        for down in self.down:
            x = down(x, time)
            skipped.append(x)
            x = F.avg_pool2d(x, 2)
        n, c, h, w = x.shape
        x = x + self.attention(x.flatten(2).transpose(1, 2), text).transpose(1, 2).view(n, c, h, w)
        x = self.middle(x, time)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2.0), skipped.pop()], dim=1), time)
        found = self.last(x)
        return {"loss": F.mse_loss(found, noise), "sample": found}


def noisy(n: int, generator: torch.Generator) -> dict[str, Any]:
    pixels, classes = images(n, generator)
    noise = torch.randn(pixels.shape, generator=generator)
    time = torch.randint(1000, (n,), generator=generator).double()
    return {"sample": pixels + noise, "timestep": time, "classes": classes, "noise": noise}


def noisy_text(n: int, generator: torch.Generator) -> Batch:
    found = noisy(n, generator)
    del found["classes"]
    return {**found, "input_ids": tokens(n, generator)}
