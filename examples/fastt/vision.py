"""The image models of FastT's table 1 (Middleware 2020), in plain torch; sizes as published.

stagewright capture --module examples.fastt.vision:vgg19 --data examples.fastt.vision:images \
        --mini-batch 64 -o vgg19.json
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from examples.models import Batch, Bottleneck

CLASSES = 1000
PIXELS, DIGIT_PIXELS, INCEPTION_PIXELS = 224, 28, 299
VGG19 = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))  # channels, convolutions
RESNET200 = ((64, 3), (128, 24), (256, 36), (512, 3))  # width, blocks


class LeNet(nn.Module):
    """LeNet as in TensorFlow's slim: two convolutions, two linear layers, 28 x 28 pixels."""

    def __init__(self, hidden: int = 1024) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(
            nn.Linear(64 * 7 * 7, hidden), nn.ReLU(), nn.Dropout(0.5), nn.Linear(hidden, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Logits (n, 10) of images (n, 1, 28, 28)."""
        return self.head(self.features(images).flatten(1))


class AlexNet(nn.Module):
    """AlexNet without groups (Krizhevsky 2014, "One weird trick")."""

    def __init__(self, hidden: int = 4096, classes: int = CLASSES) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.AdaptiveAvgPool2d(6),
        )
        self.head = _head(256 * 6 * 6, hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (n, classes) of images (n, 3, h, w)."""
        return self.head(self.features(images).flatten(1))


class VGG(nn.Module):
    """Groups of 3x3 convolutions, each group ended by a pooling; three linear layers."""

    def __init__(
        self,
        groups: tuple[tuple[int, int], ...] = VGG19,
        hidden: int = 4096,
        classes: int = CLASSES,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        entering = 3
        for channels, convolutions in groups:
            for _ in range(convolutions):
                layers += [nn.Conv2d(entering, channels, 3, padding=1), nn.ReLU(inplace=True)]
                entering = channels
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7))
        self.head = _head(entering * 7 * 7, hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (n, classes) of images (n, 3, h, w)."""
        return self.head(self.features(images).flatten(1))


class ResNet(nn.Module):
    """Bottleneck blocks in groups of (width, number)."""

    def __init__(
        self, groups: tuple[tuple[int, int], ...] = RESNET200, classes: int = CLASSES
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.blocks = nn.Sequential()
        entering = 64
        for group, (width, number) in enumerate(groups):
            for block in range(number):
                stride = 2 if group and not block else 1
                self.blocks.append(Bottleneck(entering, width, stride))
                entering = 4 * width
        self.head = nn.Linear(entering, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (n, classes) of images (n, 3, h, w)."""
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


class Convolution(nn.Sequential):
    """A convolution, batch norm and ReLU; a size of (h, w) keeps the pixels if ``same``."""

    def __init__(
        self,
        entering: int,
        leaving: int,
        size: int | tuple[int, int],
        *,
        stride: int = 1,
        same: bool = True,
    ) -> None:
        sizes = (size, size) if isinstance(size, int) else size
        padding = tuple(one // 2 if same else 0 for one in sizes)
        super().__init__(
            nn.Conv2d(entering, leaving, sizes, stride=stride, padding=padding, bias=False),
            nn.BatchNorm2d(leaving, eps=0.001),
            nn.ReLU(inplace=True),
        )


class Branches(nn.Module):
    """Modules on the same input, whose channels are concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Images (n, c, h, w) to (n, all channels of the branches, h', w')."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def chain(entering: int, *steps: tuple[int, int | tuple[int, int]]) -> nn.Sequential:
    """Convolutions (channels, size) in order, which keep the pixels."""
    channels = [entering, *(leaving for leaving, _ in steps)]
    return nn.Sequential(
        *(Convolution(channels[i], leaving, size) for i, (leaving, size) in enumerate(steps))
    )


def pooled(entering: int, leaving: int) -> nn.Sequential:
    """Average pooling, and a 1x1 convolution."""
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), Convolution(entering, leaving, 1))


def block_a(entering: int, leaving: int) -> Branches:
    """Figure 5 of the paper: a 5x5 and two 3x3 convolutions."""
    return Branches(
        chain(entering, (64, 1)),
        chain(entering, (48, 1), (64, 5)),
        chain(entering, (64, 1), (96, 3), (96, 3)),
        pooled(entering, leaving),
    )


def block_c(entering: int, inner: int) -> Branches:
    """Figure 6: 7x7 convolutions as 1x7 and 7x1."""
    across, down = (1, 7), (7, 1)
    return Branches(
        chain(entering, (192, 1)),
        chain(entering, (inner, 1), (inner, across), (192, down)),
        chain(entering, (inner, 1), (inner, down), (inner, across), (inner, down), (192, across)),
        pooled(entering, 192),
    )


def block_e(entering: int) -> Branches:
    """Figure 7: branches that branch again."""
    ends = [Branches(Convolution(384, 384, (1, 3)), Convolution(384, 384, (3, 1))) for _ in "12"]
    return Branches(
        chain(entering, (320, 1)),
        chain(entering, (384, 1)).append(ends[0]),
        chain(entering, (448, 1), (384, 3)).append(ends[1]),
        pooled(entering, 192),
    )


class Inception(nn.Module):
    """Inception-v3 (Szegedy et al. 2016) without its auxiliary head."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.features = nn.Sequential(
            Convolution(3, 32, 3, stride=2, same=False),
            Convolution(32, 32, 3, same=False),
            Convolution(32, 64, 3),
            nn.MaxPool2d(3, stride=2),
            Convolution(64, 80, 1),
            Convolution(80, 192, 3, same=False),
            nn.MaxPool2d(3, stride=2),
            block_a(192, 32),
            block_a(256, 64),
            block_a(288, 64),
            Branches(
                Convolution(288, 384, 3, stride=2, same=False),
                chain(288, (64, 1), (96, 3)).append(Convolution(96, 96, 3, stride=2, same=False)),
                nn.MaxPool2d(3, stride=2),
            ),
            *(block_c(768, inner) for inner in (128, 160, 160, 192)),
            Branches(
                chain(768, (192, 1)).append(Convolution(192, 320, 3, stride=2, same=False)),
                chain(768, (192, 1), (192, (1, 7)), (192, (7, 1))).append(
                    Convolution(192, 192, 3, stride=2, same=False)
                ),
                nn.MaxPool2d(3, stride=2),
            ),
            block_e(1280),
            block_e(2048),
        )
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Linear(2048, classes))

    def forward(self, images: Tensor) -> Tensor:
        """Logits (n, classes) of images (n, 3, h, w) with 75 pixels or more per side."""
        return self.head(F.adaptive_avg_pool2d(self.features(images), 1).flatten(1))


def lenet() -> nn.Module:
    """LeNet, 3.3 million parameters."""
    return LeNet()


def alexnet() -> nn.Module:
    """AlexNet, 61 million parameters."""
    return AlexNet()


def vgg19() -> nn.Module:
    """VGG-19, 144 million parameters."""
    return VGG()


def resnet200() -> nn.Module:
    """ResNet-200, 65 million parameters."""
    return ResNet()


def inception_v3() -> nn.Module:
    """Inception-v3, 24 million parameters."""
    return Inception()


def digits() -> Iterator[Batch]:
    """Mini-batches for :func:`lenet`."""
    return _noise(1, DIGIT_PIXELS, 10)


def images() -> Iterator[Batch]:
    """Mini-batches for :func:`alexnet`, :func:`vgg19` and :func:`resnet200`."""
    return _noise(3, PIXELS, CLASSES)


def large_images() -> Iterator[Batch]:
    """Mini-batches for :func:`inception_v3`."""
    return _noise(3, INCEPTION_PIXELS, CLASSES)


def _noise(channels: int, pixels: int, classes: int) -> Iterator[Batch]:
    random = torch.Generator().manual_seed(0)
    while True:
        shown = torch.randn(2, channels, pixels, pixels, generator=random)
        yield shown, torch.randint(classes, (2,), generator=random)


def _head(entering: int, hidden: int, classes: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(entering, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(hidden, classes),
    )
