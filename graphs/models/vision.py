"""Image classifiers, as in torchvision.

VGG, ResNet, DenseNet, Inception-v3 (without auxiliary head). A residual block and an Inception
module are one layer each, so that only a layer's output crosses the cut after it (SPP section
V-A); the output of a dense layer is everything concatenated so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.operations import (
    LayerOperation,
    LayerWork,
    dense,
    dropout,
    elementwise,
    norm,
)

_VGG_STAGES = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Convolutions of 64, 128, 256, 512 and 512 channels between the poolings."""

RESNET_STAGES = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Bottleneck blocks of 64, 128, 256 and 512 inner channels."""

DENSENET_BLOCKS = {121: (6, 12, 24, 16)}
"""Dense layers between the transitions."""

_DENSENET_GROWTH = 32
"""Channels that a dense layer adds; its 1x1 convolution has four times as many."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Channels, height and width of an image or feature map."""

    channels: int
    height: int
    width: int

    @property
    def elements(self) -> int:
        """Elements of one sample."""
        return self.channels * self.height * self.width


@dataclass(slots=True)
class Tape:
    """Records the operations on ``samples`` images while a network is built."""

    samples: int
    operations: list[LayerOperation] = field(default_factory=list)
    layers: list[LayerWork] = field(default_factory=list)

    def end_layer(self, name: str, output: Shape) -> Shape:
        """End a layer: it has all operations since the last one."""
        first = not self.layers
        self.layers.append(
            LayerWork(
                name,
                tuple(self.operations),
                self.samples * output.elements,
                differentiable=not first,
            )
        )
        self.operations.clear()
        return output

    def convolution(
        self,
        shape: Shape,
        channels: int,
        kernel: int | tuple[int, int] = 1,
        *,
        stride: int = 1,
        padded: bool = True,
        biased: bool = False,
        normed: bool = True,
        activated: bool = True,
        saves_input: bool = True,
    ) -> Shape:
        """A convolution, then batch norm and a ReLU in place.

        ``padded`` keeps the size (but for the stride). ``saves_input`` is false where another
        operation keeps the same input. The ReLU's output is what the next operation keeps.
        """
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        result = Shape(
            channels,
            _length(shape.height, high, stride, padded),
            _length(shape.width, wide, stride, padded),
        )
        taps = shape.channels * high * wide
        inputs, outputs = self.samples * shape.elements, self.samples * result.elements
        self.operations.append(
            LayerOperation(
                "convolution",
                2.0 * taps * outputs,
                inputs + taps * channels + outputs,
                parameters=taps * channels + (channels if biased else 0),
                saved=inputs if saves_input else 0,
                input_gradients=1 if self.layers or self.operations else 0,
                weight_gradients=1,
            )
        )
        if normed:
            self.normalize(result, activated=activated)
        elif activated:
            self.operations.append(elementwise(outputs))
        return result

    def normalize(self, shape: Shape, *, activated: bool = True) -> None:
        """A batch norm, which keeps its input, and a ReLU in place."""
        elements = self.samples * shape.elements
        self.operations.append(norm(elements, shape.channels, passes=3))
        if activated:
            self.operations.append(elementwise(elements))

    def pool(self, shape: Shape, kernel: int, stride: int, *, padded: bool = False) -> Shape:
        """A maximum pooling: keeps its input and the 8-byte index of every maximum."""
        result = Shape(
            shape.channels,
            _length(shape.height, kernel, stride, padded),
            _length(shape.width, kernel, stride, padded),
        )
        inputs, outputs = self.samples * shape.elements, self.samples * result.elements
        self.operations.append(
            LayerOperation("memory", 0.0, inputs + outputs, saved=inputs, saved_bytes=8 * outputs)
        )
        return result

    def average(self, shape: Shape) -> Shape:
        """An average over the whole map."""
        result = Shape(shape.channels, 1, 1)
        moved = self.samples * (shape.elements + result.elements)
        self.operations.append(LayerOperation("memory", 0.0, moved))
        return result

    def linear(self, shape: Shape, outputs: int, *, activated: bool) -> Shape:
        """A linear layer, followed by a ReLU and a dropout if it is ``activated``."""
        self.operations.append(dense(self.samples, shape.elements, outputs))
        if activated:
            elements = self.samples * outputs
            self.operations += [elementwise(elements, saved=elements), dropout(elements)]
        return Shape(outputs, 1, 1)


def vgg(
    samples: int, *, depth: int, image: int = 224, classes: int = 1000
) -> tuple[LayerWork, ...]:
    """VGG without batch norm: every convolution, pooling and linear layer is a layer."""
    tape, shape = Tape(samples), Shape(3, image, image)
    for stage, count in enumerate(_VGG_STAGES[depth], start=1):
        for i in range(1, count + 1):
            channels = min(64 * 2 ** (stage - 1), 512)
            shape = tape.convolution(shape, channels, 3, biased=True, normed=False)
            tape.end_layer(f"conv{stage}_{i}", shape)
        shape = tape.end_layer(f"pool{stage}", tape.pool(shape, 2, 2))
    for i, width in enumerate((4096, 4096, classes), start=6):
        shape = tape.end_layer(f"fc{i}", tape.linear(shape, width, activated=i < 8))
    return tuple(tape.layers)


def resnet(
    samples: int, *, depth: int, image: int = 224, classes: int = 1000
) -> tuple[LayerWork, ...]:
    """ResNet of bottleneck blocks, with the stride at the 3x3 convolution."""
    tape = Tape(samples)
    shape = tape.end_layer("conv1", tape.convolution(Shape(3, image, image), 64, 7, stride=2))
    shape = tape.end_layer("pool1", tape.pool(shape, 3, 2, padded=True))
    for stage, count in enumerate(RESNET_STAGES[depth]):
        for i in range(count):
            stride = 2 if stage > 0 and i == 0 else 1
            shape = _bottleneck(tape, shape, 64 * 2**stage, stride)
            tape.end_layer(f"conv{stage + 2}_{i + 1}", shape)
    shape = tape.end_layer("pool5", tape.average(shape))
    tape.end_layer("fc", tape.linear(shape, classes, activated=False))
    return tuple(tape.layers)


def densenet(
    samples: int, *, depth: int, image: int = 224, classes: int = 1000
) -> tuple[LayerWork, ...]:
    """DenseNet-BC: every dense layer and every transition is a layer.

    All later layers of a block read the features that a dense layer adds, so its output is the
    concatenation of the block's input and all features added so far. Every dense layer makes a new
    concatenation, as in torchvision, which the next one keeps for its batch norm. The last batch
    norm is counted with the pooling.
    """
    tape = Tape(samples)
    shape = tape.end_layer("conv0", tape.convolution(Shape(3, image, image), 64, 7, stride=2))
    shape = tape.end_layer("pool0", tape.pool(shape, 3, 2, padded=True))
    for block, count in enumerate(DENSENET_BLOCKS[depth], start=1):
        if block > 1:
            shape = tape.end_layer(f"transition{block - 1}", _transition(tape, shape))
        for i in range(1, count + 1):
            shape = tape.end_layer(f"dense{block}_{i}", _dense_layer(tape, shape))
    tape.normalize(shape)
    shape = tape.end_layer("pool5", tape.average(shape))
    tape.end_layer("fc", tape.linear(shape, classes, activated=False))
    return tuple(tape.layers)


def inception_v3(samples: int, *, image: int = 299, classes: int = 1000) -> tuple[LayerWork, ...]:
    """Inception-v3 without its auxiliary head; every module is a layer."""
    tape = Tape(samples)
    shape = _inception_stem(tape, Shape(3, image, image))
    for i, (module, width) in enumerate(_INCEPTION_MODULES, start=1):
        before = shape
        branches = [_branch(tape, before, steps, j == 0) for j, steps in enumerate(module)]
        channels = sum(branch.channels for branch in branches)
        if width is None:  # a reduction: the pooling is a separate branch
            pooled = tape.pool(before, 3, 2)
            channels += pooled.channels
        else:
            tape.operations.append(elementwise(samples * before.elements))  # 3x3 average
            tape.convolution(before, width)
            channels += width
        shape = Shape(channels, branches[0].height, branches[0].width)
        tape.operations.append(elementwise(samples * shape.elements))  # concatenation
        tape.end_layer(f"module{i}", shape)
    shape = tape.average(shape)
    tape.operations.append(dropout(samples * shape.elements))
    tape.end_layer("pool", shape)
    tape.end_layer("fc", tape.linear(shape, classes, activated=False))
    return tuple(tape.layers)


@dataclass(frozen=True, slots=True)
class _Step:
    """A convolution in a branch; ``parallel`` is the kernel of a second one on the same input."""

    channels: int
    kernel: int | tuple[int, int] = 1
    stride: int = 1
    parallel: tuple[int, int] | None = None


_Branch = tuple[_Step, ...]


def _module_a(pooled: int) -> tuple[tuple[_Branch, ...], int]:
    return (
        (_Step(64),),
        (_Step(48), _Step(64, 5)),
        (_Step(64), _Step(96, 3), _Step(96, 3)),
    ), pooled


def _module_c(inner: int) -> tuple[tuple[_Branch, ...], int]:
    row, column = (1, 7), (7, 1)
    return (
        (_Step(192),),
        (_Step(inner), _Step(inner, row), _Step(192, column)),
        (
            _Step(inner),
            _Step(inner, column),
            _Step(inner, row),
            _Step(inner, column),
            _Step(192, row),
        ),
    ), 192


_MODULE_B: tuple[tuple[_Branch, ...], None] = (
    ((_Step(384, 3, 2),), (_Step(64), _Step(96, 3), _Step(96, 3, 2))),
    None,
)
_MODULE_D: tuple[tuple[_Branch, ...], None] = (
    (
        (_Step(192), _Step(320, 3, 2)),
        (_Step(192), _Step(192, (1, 7)), _Step(192, (7, 1)), _Step(192, 3, 2)),
    ),
    None,
)
_MODULE_E: tuple[tuple[_Branch, ...], int] = (
    (
        (_Step(320),),
        (_Step(384), _Step(384, (1, 3), parallel=(3, 1))),
        (_Step(448), _Step(384, 3), _Step(384, (1, 3), parallel=(3, 1))),
    ),
    192,
)

# Branches of every module, and the channels of its pooling branch (None: pooled with stride 2).
_INCEPTION_MODULES: Sequence[tuple[tuple[_Branch, ...], int | None]] = (
    _module_a(32),
    _module_a(64),
    _module_a(64),
    _MODULE_B,
    _module_c(128),
    _module_c(160),
    _module_c(160),
    _module_c(192),
    _MODULE_D,
    _MODULE_E,
    _MODULE_E,
)


def _inception_stem(tape: Tape, image: Shape) -> Shape:
    shape = tape.end_layer("conv1", tape.convolution(image, 32, 3, stride=2, padded=False))
    shape = tape.end_layer("conv2", tape.convolution(shape, 32, 3, padded=False))
    shape = tape.end_layer("conv3", tape.convolution(shape, 64, 3))
    shape = tape.end_layer("pool1", tape.pool(shape, 3, 2))
    shape = tape.end_layer("conv4", tape.convolution(shape, 80))
    shape = tape.end_layer("conv5", tape.convolution(shape, 192, 3, padded=False))
    return tape.end_layer("pool2", tape.pool(shape, 3, 2))


def _branch(tape: Tape, shape: Shape, steps: _Branch, first: bool) -> Shape:
    for i, step in enumerate(steps):
        result = tape.convolution(
            shape,
            step.channels,
            step.kernel,
            stride=step.stride,
            padded=step.stride == 1,
            saves_input=first or i > 0,
        )
        if step.parallel is not None:
            tape.convolution(shape, step.channels, step.parallel, saves_input=False)
            result = Shape(2 * step.channels, result.height, result.width)
        shape = result
    return shape


def _bottleneck(tape: Tape, shape: Shape, inner: int, stride: int) -> Shape:
    inside = tape.convolution(shape, inner)
    inside = tape.convolution(inside, inner, 3, stride=stride)
    result = tape.convolution(inside, 4 * inner, activated=False)
    if shape != result:
        tape.convolution(shape, 4 * inner, stride=stride, activated=False, saves_input=False)
    elements = tape.samples * result.elements
    tape.operations += [elementwise(elements, operands=2), elementwise(elements)]
    return result


def _dense_layer(tape: Tape, shape: Shape) -> Shape:
    tape.normalize(shape)
    inside = tape.convolution(shape, 4 * _DENSENET_GROWTH)
    added = tape.convolution(inside, _DENSENET_GROWTH, 3, normed=False, activated=False)
    result = Shape(shape.channels + added.channels, shape.height, shape.width)
    tape.operations.append(elementwise(tape.samples * result.elements))  # concatenation
    return result


def _transition(tape: Tape, shape: Shape) -> Shape:
    tape.normalize(shape)
    halved = tape.convolution(shape, shape.channels // 2, normed=False, activated=False)
    result = Shape(
        halved.channels,
        _length(halved.height, 2, 2, padded=False),
        _length(halved.width, 2, 2, padded=False),
    )
    moved = tape.samples * (halved.elements + result.elements)
    tape.operations.append(LayerOperation("memory", 0.0, moved))  # 2x2 average
    return result


def _length(length: int, kernel: int, stride: int, padded: bool) -> int:
    padding = (kernel - 1) // 2 if padded else 0
    result = (length + 2 * padding - kernel) // stride + 1
    if result < 1:
        raise InputError(f"image is too small: {length} pixels are left for a kernel of {kernel}")
    return result
