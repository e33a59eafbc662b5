"""The models of ``examples/fastt`` in small sizes, and mini-batches for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from examples.fastt.language import BERT, GNMT, RNNLM, Translating
from examples.fastt.vision import VGG, AlexNet, Inception, LeNet, ResNet

VOCABULARY, HIDDEN = 50, 8


def pictures(pixels: int, channels: int = 3) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    shown = torch.randn(4, channels, pixels, pixels, generator=random)
    return shown, torch.randint(10, (4,), generator=random)


def texts(seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (4, 6), generator=random)
    return tokens[:, :-1], tokens[:, 1:]


def translations() -> tuple[Any, Tensor]:
    (sources, _), (given, expected) = texts(0), texts(1)
    return (sources, given), expected


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, Tensor]]] = {
    "lenet": (lambda: LeNet(32), pictures(28, 1)),
    "alexnet": (lambda: AlexNet(32, 10), pictures(70)),
    "vgg": (lambda: VGG(((8, 2), (8, 4)), 32, 10), pictures(32)),
    "resnet": (lambda: ResNet(((4, 2), (4, 2)), 10), pictures(32)),
    "rnnlm": (lambda: RNNLM(VOCABULARY, HIDDEN), texts()),
    "transformer": (lambda: Translating(VOCABULARY, HIDDEN, 2, 2, 6), translations()),
    "bert": (lambda: BERT(VOCABULARY, HIDDEN, 2, 2, 6), texts()),
    "gnmt": (lambda: GNMT(VOCABULARY, HIDDEN, 4), translations()),
    "inception": (lambda: Inception(10), pictures(75)),
}
RECURRENT = ("rnnlm", "gnmt")
