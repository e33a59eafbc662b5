"""The styles of a tp_plan: the kinds of modules, the classes and cuts that divide them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stagewright.executor.training.sharding.parallel_layers import (
    ColumnConv1D,
    ColumnLinear,
    JoinedColumnLinear,
    RowConv1D,
    RowEmbedding,
    RowLinear,
    SplitRowLinear,
)
from stagewright.graphs.documents.errors import InputError

DIVIDE, WHOLE, SUMMED = "divide", "replicate", "replicated_with_grad_allreduce"
COLUMNS = re.compile(r"colwise(?:/([1-9]\d*))?")
KNOWN = (
    *("colwise", "colwise/N", "colwise_rep", "rowwise", "rowwise_rep", "embedding_rowwise"),
    *(WHOLE, SUMMED, DIVIDE),
)
_ALIASES = {  # of transformers
    "packed_colwise": "colwise/2",
    "colwise_gather_output": "colwise_rep",
    "rowwise_split_input": "rowwise_rep",
}
# Beginnings of styles of transformers that are not run.
_NOT_RUN = {
    "moe_": "experts",
    "ep_": "experts",
    "grouped_gemm": "experts",
    "sequence_parallel": "the sequence",
    "mla_": "latent attention",
    "packed_rowwise": "packed inputs",
    "embedding_colwise": "an embedding by features",
    "all_reduce": "a module's result",
    "local_params": "a module's own parameters",
}

LINEAR, EMBEDDING = "torch.nn.modules.linear.Linear", "torch.nn.modules.sparse.Embedding"
_CONV1D = "transformers.pytorch_utils.Conv1D"


@dataclass(frozen=True, slots=True)
class TensorCut:
    """How a tensor is divided: each of ``parts`` in dimension ``dim``, into equal pieces."""

    dim: int
    parts: int = 1

    def pieces(self, whole: Tensor, degree: int) -> list[Tensor]:
        """The piece of every device. Raises InputError if the parts do not divide."""
        size = whole.size(self.dim)
        if size % (self.parts * degree):
            of = "" if self.parts == 1 else f" in {self.parts} parts"
            raise InputError(f"{size} features{of} do not divide among {degree} devices")
        cut = [part.chunk(degree, self.dim) for part in whole.chunk(self.parts, self.dim)]
        return [torch.cat(own, self.dim) for own in zip(*cut, strict=True)]

    def joined(self, pieces: Sequence[Tensor]) -> Tensor:
        """The inverse of :meth:`pieces`."""
        cut = [piece.chunk(self.parts, self.dim) for piece in pieces]
        return torch.cat([one for part in zip(*cut, strict=True) for one in part], self.dim)


@dataclass(frozen=True, slots=True)
class DivisionWay:
    """How modules of a ``kind`` are divided: the class of their parts, the cuts of parameters.

    ``size`` is the attribute that says how long the divided dimension is.
    """

    kind: str
    divided: type[nn.Module]
    cuts: Mapping[str, TensorCut]
    size: str

    @property
    def parts(self) -> int:
        """How many layers are side by side in one."""
        return self.cuts["weight"].parts


def ways_of(style: str) -> list[DivisionWay]:
    """The ways that a style names; none if it is not a style that divides modules."""
    style = _ALIASES.get(style, style)
    if columns := COLUMNS.fullmatch(style):
        parts = int(columns[1] or 1)
        rows, last = (
            TensorCut(0, parts),
            TensorCut(1, parts),
        )  # a Conv1D's weight is a Linear's transposed
        return [
            DivisionWay(LINEAR, ColumnLinear, {"weight": rows, "bias": rows}, "out_features"),
            DivisionWay(_CONV1D, ColumnConv1D, {"weight": last, "bias": rows}, "nf"),
        ]
    table = DivisionWay(EMBEDDING, RowEmbedding, {"weight": TensorCut(0)}, "num_embeddings")
    every = {
        "colwise_rep": [
            DivisionWay(
                LINEAR,
                JoinedColumnLinear,
                {"weight": TensorCut(0), "bias": TensorCut(0)},
                "out_features",
            )
        ],
        "rowwise": [
            DivisionWay(LINEAR, RowLinear, {"weight": TensorCut(1)}, "in_features"),
            DivisionWay(_CONV1D, RowConv1D, {"weight": TensorCut(0)}, "nx"),
            table,
        ],
        "rowwise_rep": [
            DivisionWay(LINEAR, SplitRowLinear, {"weight": TensorCut(1)}, "in_features")
        ],
        "embedding_rowwise": [table],
    }
    return every.get(style, [])


def require_style(pattern: str, style: str) -> None:
    """Refuse a style that is not run.

    Raises InputError naming the pattern of modules that it is for.
    """
    if style in (DIVIDE, WHOLE, SUMMED) or ways_of(style):
        return
    for beginning, what in _NOT_RUN.items():
        if style.startswith(beginning):
            raise InputError(
                f"{pattern!r}: {style!r}, which divides {what}, is not run; give the model a "
                "tp_plan without it, or plan tensor degree 1"
            )
    raise InputError(f"{pattern!r}: {style!r} is not a style; there are {', '.join(KNOWN)}")
