"""Parameters and activations of a model's layers on one rank of a tensor group."""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount, require_count


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Parameters and activations of each layer on one of ``tensor`` ranks, in forward order.

    ``parameters`` are numbers of elements; ``saved_bytes`` are kept from the forward to the
    backward for every sample, ``output_bytes`` are the whole output of a sample (not a rank's part
    of it).
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    tensor: int
    parameters: tuple[float, ...]
    saved_bytes: tuple[float, ...]
    output_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        require_count(self.tensor, "tensor", 1 << 20)
        for name in ("parameters", "saved_bytes", "output_bytes"):
            values = getattr(self, name)
            if len(values) != len(self.parameters):
                raise InputError(
                    f"tensor degree {self.tensor}: {name} has {len(values)} layers, parameters "
                    f"{len(self.parameters)}"
                )
            for layer, value in enumerate(values):
                require_amount(value, f"tensor degree {self.tensor}: {name}[{layer}]")
