"""Layers of which every device of a tensor group has a part (Megatron-LM, 2019, section 3).

In a pair of linear layers the first is divided by columns, so that each device computes some of the
features between them, and the second by rows, whose partial outputs are summed up over the group:
one all-reduce in the forward, of the pair's output, and one in the backward, of its input's
gradient. Collectives are torch's functional operators, so that traces of a layer have them: where
its backward is in two parts, the input's gradient (I) has that all-reduce.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F  # noqa: N812

from stagewright.graphs.documents.errors import InputError

# Of gradients that should be equal, by kernels that may add up in another order: a part that is
# missing changes more.
SAME = 1e-2

_operators = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True, eq=False)
class TensorGroup:
    """The processes that compute a stage's layers together.

    ``position`` is this one's place in the group of the plan, which says which shard it has, and
    ``order`` gives the rank in ``processes`` of each place: torch sorts the ranks of its groups.
    """

    processes: dist.ProcessGroup
    position: int
    order: Sequence[int]

    @property
    def degree(self) -> int:
        """The number of devices."""
        return len(self.order)

    def __deepcopy__(self, _: dict[int, Any]) -> "TensorGroup":
        """The same processes, for a copy of a layer."""
        return self

    def total(self, value: Tensor) -> Tensor:
        """The sum of every device's value."""
        total = _operators.all_reduce(value, "sum", self.processes.group_name)
        summed: Tensor = _operators.wait_tensor(total)
        return summed

    def every(self, value: Tensor) -> list[Tensor]:
        """Every device's value, by their places."""
        own, name = value.contiguous().unsqueeze(0), self.processes.group_name
        found = _operators.all_gather_into_tensor(own, self.degree, name)
        every = _operators.wait_tensor(found).unbind()
        return [every[rank] for rank in self.order]


class _Copied(torch.autograd.Function):
    """The same value; its gradient is the sum of the group's (f in Megatron's figure 3)."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.group.total(gradient), None


class _Summed(torch.autograd.Function):
    """The sum of the group's values; each value's gradient is the sum's (g in figure 3)."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        return group.total(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Joined(torch.autograd.Function):
    """The group's values side by side in the last dimension; each gets its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return torch.cat(group.every(value), dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.chunk(ctx.group.degree, dim=-1)[ctx.group.position], None


@dataclass(slots=True)
class SummedGradient:
    """A hook of a parameter that every device has whole: its gradient is the sum of the group's.

    ``name`` is the parameter's. The first gradient that is not zero is compared with the sum.
    """

    group: TensorGroup
    name: str
    is_compared: bool = False

    def __call__(self, gradient: Tensor) -> Tensor:
        """The sum of a gradient over the devices of the group.

        Raises InputError if every device has the whole gradient already, which would count several
        times.
        """
        total = self.group.total(gradient)
        if not self.is_compared and not isinstance(gradient, FakeTensor):
            size = float(torch.linalg.vector_norm(total))
            self.is_compared = size > 0
            apart = float(torch.linalg.vector_norm(total - self.group.degree * gradient))
            if size > 0 and apart <= SAME * size:
                raise InputError(
                    f"the gradients of parameter {self.name!r} are equal on the "
                    f"{self.group.degree} devices that should each have a part of them: leave its "
                    "module's replicated_with_grad_allreduce out of the tp_plan"
                )
        return total


class ColumnLinear(nn.Linear):
    """Some of the output features of a linear layer."""

    tensor_group: TensorGroup

    def forward(self, value: Tensor) -> Tensor:
        """Map (..., all inputs) to (..., own outputs)."""
        copied = _Copied.apply(value, self.tensor_group)  # type: ignore[no-untyped-call]
        return F.linear(copied, self.weight, self.bias)


class JoinedColumnLinear(ColumnLinear):
    """Some of the output features, joined with those of the other devices."""

    def forward(self, value: Tensor) -> Tensor:
        """Map (..., all inputs) to (..., all outputs)."""
        joined: Tensor = _Joined.apply(super().forward(value), self.tensor_group)  # type: ignore[no-untyped-call]
        return joined


class RowLinear(nn.Linear):
    """Some of the input features of a linear layer; outputs are summed up, and get the bias."""

    tensor_group: TensorGroup

    def forward(self, value: Tensor) -> Tensor:
        """Map (..., own inputs) to (..., all outputs)."""
        total: Tensor = _Summed.apply(F.linear(value, self.weight), self.tensor_group)  # type: ignore[no-untyped-call]
        return total if self.bias is None else total + self.bias.to(total.dtype)


class SplitRowLinear(RowLinear):
    """Some of the input features, of an input that every device has whole."""

    def forward(self, value: Tensor) -> Tensor:
        """Map (..., all inputs) to (..., all outputs)."""
        copied = _Copied.apply(value, self.tensor_group)  # type: ignore[no-untyped-call]
        group = self.tensor_group
        return super().forward(copied.chunk(group.degree, dim=-1)[group.position])


class ColumnConv1D(nn.Module):
    """Some of the output features of a Conv1D of transformers: a linear layer, transposed."""

    tensor_group: TensorGroup
    weight: Tensor
    bias: Tensor

    def forward(self, value: Tensor) -> Tensor:
        """Map (..., all inputs) to (..., own outputs)."""
        copied = _Copied.apply(value, self.tensor_group)  # type: ignore[no-untyped-call]
        return F.linear(copied, self.weight.t(), self.bias)


class RowConv1D(nn.Module):
    """Some of the input features of a Conv1D; outputs are summed up, and get the bias."""

    tensor_group: TensorGroup
    weight: Tensor
    bias: Tensor

    def forward(self, value: Tensor) -> Tensor:
        """Map (..., own inputs) to (..., all outputs)."""
        partial = F.linear(value, self.weight.t())
        total: Tensor = _Summed.apply(partial, self.tensor_group)  # type: ignore[no-untyped-call]
        return total + self.bias.to(total.dtype)


class RowEmbedding(nn.Embedding):
    """Some rows of a table; other devices' rows are zero in this device's part of the sum.

    Numbers that no device has fail as in any embedding.
    """

    tensor_group: TensorGroup

    def forward(self, numbers: Tensor) -> Tensor:
        """Map any shape of numbers of rows to (..., all features)."""
        size, group = self.weight.size(0), self.tensor_group
        own = numbers - group.position * size
        is_here = (own >= 0) & (own < size)
        is_there = ~is_here & (numbers >= 0) & (numbers < size * group.degree)
        found = F.embedding(own.where(~is_there, 0), self.weight, self._own_padding)
        total: Tensor = _Summed.apply(found * is_here.unsqueeze(-1), self.tensor_group)  # type: ignore[no-untyped-call]
        return total

    @property
    def _own_padding(self) -> int | None:
        """The local number of the padding row (without gradient), if this device has that row."""
        size, position = self.weight.size(0), self.tensor_group.position
        if self.padding_idx is None or self.padding_idx // size != position:
            return None
        return self.padding_idx - position * size


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
