"""Image classifiers of out-of-order backprop's evaluation, convolution by convolution.

DenseNet-BC with growth rate k (Huang et al. 2017), MobileNet-V3 Large with a multiplier of its
channels (Howard et al. 2019, table 1), ResNet (He et al. 2016); images of 224 x 224. Squeezes,
poolings and the last product are left out.
"""

import math
from dataclasses import dataclass

from stagewright.formulations.backprop.regions import Streams
from stagewright.formulations.backprop.training import Layers
from stagewright.graphs.machines.devices import accelerator
from stagewright.graphs.machines.rates import rates_of
from stagewright.graphs.models.vision import DENSENET_BLOCKS, RESNET_STAGES

V100, REACHED = accelerator("v100"), rates_of("v100").reached
TILE = 1024  # elements that a thread block computes
CAPACITY = 1520  # thread blocks on a V100 at once, section 8.2
WEIGHT_BLOCKS = 448  # of half the weight gradients in DenseBlock-4, section 8.2
EXTRA_PASSES = 3  # of the output through memory: normalisation and activation

# Kernel, expanded channels, output channels, stride.
MOBILENET = (
    (3, 16, 16, 1), (3, 64, 24, 2), (3, 72, 24, 1), (5, 72, 40, 2), (5, 120, 40, 1),
    (5, 120, 40, 1), (3, 240, 80, 2), (3, 200, 80, 1), (3, 184, 80, 1), (3, 184, 80, 1),
    (3, 480, 112, 1), (3, 672, 112, 1), (5, 672, 160, 2), (5, 960, 160, 1), (5, 960, 160, 1),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Convolution:
    """Channels in and out, side of the kernel, and of the square maps before and after it."""

    inputs: int
    outputs: int
    kernel: int
    before: int
    after: int
    groups: int = 1

    @property
    def weights(self) -> int:
        """Parameters."""
        return self.inputs // self.groups * self.outputs * self.kernel**2

    def seconds(self, samples: int) -> float:
        """One pass on a V100 in fp32: the larger of arithmetic and memory."""
        flops = 2.0 * samples * self.weights * self.after**2
        before, after = self.inputs * self.before**2, self.outputs * self.after**2
        moved = 4.0 * (samples * (before + (1 + EXTRA_PASSES) * after) + self.weights)
        return max(
            flops / (V100.fp32_flops * REACHED.convolution),
            moved / (V100.memory_bytes_per_second * REACHED.memory),
        )


def densenet(growth: int) -> list[Convolution]:
    """DenseNet-121: 120 convolutions."""
    channels, side = 2 * growth, 56
    found = [Convolution(3, channels, 7, 224, 112)]
    for block, count in enumerate(DENSENET_BLOCKS[121]):
        if block:
            found.append(Convolution(channels, channels // 2, 1, side, side))
            channels, side = channels // 2, side // 2
        for _ in range(count):
            found.append(Convolution(channels, 4 * growth, 1, side, side))
            found.append(Convolution(4 * growth, growth, 3, side, side))
            channels += growth
    return found


def mobilenet(multiplier: float) -> list[Convolution]:
    """MobileNet-V3 Large: 47 convolutions, 15 of them by channel."""

    def wide(channels: int) -> int:
        return max(8, int(channels * multiplier + 4) // 8 * 8)

    channels, side = wide(16), 112
    found = [Convolution(3, channels, 3, 224, side)]
    for kernel, expanded, outputs, stride in MOBILENET:
        inner, after = wide(expanded), side // stride
        found += [
            Convolution(channels, inner, 1, side, side),
            Convolution(inner, inner, kernel, side, after, groups=inner),
            Convolution(inner, wide(outputs), 1, after, after),
        ]
        channels, side = wide(outputs), after
    return [*found, Convolution(channels, wide(960), 1, side, side)]


def resnet(depth: int) -> list[Convolution]:
    """ResNet of bottleneck blocks."""
    channels, side = 64, 56
    found = [Convolution(3, channels, 7, 224, 112)]
    for stage, count in enumerate(RESNET_STAGES[depth]):
        inner = 64 * 2**stage
        for i in range(count):
            after = side // 2 if stage and i == 0 else side
            if i == 0:
                found.append(Convolution(channels, 4 * inner, 1, side, after))
            found += [
                Convolution(channels, inner, 1, side, side),
                Convolution(inner, inner, 3, side, after),
                Convolution(inner, 4 * inner, 1, after, after),
            ]
            channels, side = 4 * inner, after
    return found


def layers_of(model: list[Convolution], samples: int, scale: float = 1.0) -> Layers:
    """Each of the three passes of a convolution takes the same time."""
    seconds = tuple(scale * one.seconds(samples) for one in model)
    return Layers(seconds, (0.0, *seconds[1:]), seconds)


def streams_of(model: list[Convolution], samples: int, gap: float, weight_blocks: float) -> Streams:
    """Shares of the device: the thread blocks of a kernel over the most at once."""

    def share(blocks: float) -> float:
        return min(1.0, math.ceil(blocks) / CAPACITY)

    outputs = [share(samples * one.outputs * one.after**2 / TILE) for one in model]
    inputs = [share(samples * one.inputs * one.before**2 / TILE) for one in model]
    weights = (share(weight_blocks),) * len(model)
    return Streams(layers_of(model, samples), (*inputs, *outputs), weights, gap)
