"""Named models with the counts of their operations."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_LAYERS, require_count
from stagewright.graphs.models.language import Attention, bert, gpt, transformer, xlnet
from stagewright.graphs.models.operations import LayerWork
from stagewright.graphs.models.vision import densenet, inception_v3, resnet, vgg

_ATTENTION = "attention"  # the builders' parameter that is not a size


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A builder of layers with some of its sizes fixed, and the usual microbatch size."""

    build: Callable[..., tuple[LayerWork, ...]]
    microbatch_size: int
    fixed: Mapping[str, int] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[str, ...]:
        """The names of the sizes that a caller may choose."""
        names = list(inspect.signature(self.build).parameters)[1:]
        return tuple(name for name in names if name not in (*self.fixed, _ATTENTION))

    @property
    def attends(self) -> bool:
        """Whether the model has attention, fused or not."""
        return _ATTENTION in inspect.signature(self.build).parameters

    def layers(
        self, samples: int, sizes: Mapping[str, int], attention: Attention = "fused"
    ) -> tuple[LayerWork, ...]:
        """The layers for a microbatch of ``samples``.

        ``attention`` does not apply to vision models. Raises InputError if the model has no such
        size, or a size is not a positive integer.
        """
        for name, value in sizes.items():
            if name not in self.sizes:
                raise InputError(f"no size {name!r}; there are {', '.join(self.sizes)}")
            if not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be a positive integer, got {value!r}")
            if name == "layers":
                require_count(value, name, MAX_LAYERS)
        chosen = {_ATTENTION: attention} if self.attends else {}
        return self.build(samples, **self.fixed, **sizes, **chosen)


MODELS: dict[str, NamedModel] = {
    "vgg16": NamedModel(vgg, 32, {"depth": 16}),
    "vgg19": NamedModel(vgg, 32, {"depth": 19}),
    "resnet50": NamedModel(resnet, 32, {"depth": 50}),
    "resnet101": NamedModel(resnet, 8, {"depth": 101}),
    "resnet152": NamedModel(resnet, 4, {"depth": 152}),
    "densenet121": NamedModel(densenet, 8, {"depth": 121}),
    "inception-v3": NamedModel(inception_v3, 32),
    "transformer": NamedModel(transformer, 32),
    "bert-large": NamedModel(bert, 4, {"layers": 24}),
    "bert-48": NamedModel(bert, 2, {"layers": 48}),
    "xlnet-large": NamedModel(xlnet, 4, {"layers": 24}),
    "gpt": NamedModel(gpt, 1),
}
"""Microbatch sizes after SPP's table II (BERT-48: on V100; it is 4 on 1080Ti).

ResNet-101 and DenseNet-121: after MadPipe section 5.1.
"""


def named_model(name: str) -> NamedModel:
    """The model called ``name``; ``bert-72`` is BERT-large with 72 transformer layers.

    Raises InputError if the name is unknown.
    """
    if name in MODELS:
        return MODELS[name]
    match = re.fullmatch(r"bert-([1-9]\d*)", name)
    if match:
        return NamedModel(bert, 4, {"layers": int(match[1])})
    raise InputError(
        f"model {name!r} is not known; known are {', '.join(MODELS)}, and bert-N with N layers"
    )
