"""The options of a plan with out-of-order backprop."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from pydantic import ConfigDict

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import MAX_LAYERS, require_count

Training = Literal["data", "pipeline", "single"]


@dataclass(frozen=True, slots=True)
class OutOfOrder:
    """The method of training, and its parameter.

    Attributes
    ----------
    training
        ``data``: all devices share every layer. ``pipeline``: groups of layers go around the
        devices (modulo allocation). ``single``: the only device runs weight gradients in a
        sub-stream.
    reversed_layers
        ``data``: k of reverse first-k scheduling; None: the best order found.
    group
        ``pipeline``: layers of a group; None: the best number found.
    """

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    training: Training = "data"
    reversed_layers: int | None = None
    group: int | None = None

    def __post_init__(self) -> None:
        if self.training not in get_args(Training):
            known = ", ".join(get_args(Training))
            raise InputError(f"training must be one of {known}, got {self.training!r}")
        if self.reversed_layers is not None and self.training != "data":
            raise InputError("k is for data parallelism: give training 'data', or no k")
        if self.group is not None:
            if self.training != "pipeline":
                raise InputError(
                    "groups of layers are for pipelines: give training 'pipeline', or no group"
                )
            require_count(self.group, "group", MAX_LAYERS)
        k = self.reversed_layers
        if k is not None and not (isinstance(k, int) and 0 <= k <= MAX_LAYERS):
            raise InputError(f"k must be from 0 to the number of layers, got {k!r}")
