"""Modules that do unusual things in a forward, all from vectors of 6 to 4 logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)


class InPlace(Layer):
    """Changes views in place; has a constant, an unused and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(6, 4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.shift = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) + self.shift
        y[:, ::2] *= 2
        y.view(-1, 2, 2)[:, 1].add_(self.frozen[:2])
        return F.relu_(y) * torch.tensor([1.0, 2, 3, 4])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x > 0) * 2


class WithFunction(Layer):
    def forward(self, x: Tensor) -> Any:
        return Doubling.apply(self.layer(x))


class WithAutocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = F.relu(self.first(x))
        return self.last(y.float())


class WithPenalty(Layer):
    """A backward within the forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = self.layer(x).tanh()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y * slope.norm()


class WithModuleHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)
        self.last.register_full_backward_hook(lambda _, given, __: (given[0] * 2,))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


class KeepingOutput(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        return self.last


class SettingBuffer(Layer):
    """Sets a buffer anew instead of changing it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.layer(x) * self.calls


class Drawing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + torch.randn_like(x)) * torch.rand(4) + torch.randint(3, (4,))


def normed() -> nn.Module:
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), spectral)


def evaluated() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()


UNUSUAL: dict[str, Callable[[], nn.Module]] = {
    "in-place": InPlace,
    "checkpoint": Checkpointed,
    "function": WithFunction,
    "autocast": WithAutocast,
    "penalty": WithPenalty,
    "module-hook": WithModuleHook,
    "keeping-output": KeepingOutput,
    "setting-buffer": SettingBuffer,
    "drawing": Drawing,
    "norms": normed,
    "evaluated": evaluated,
}


# Refused


class Refused(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.kept = torch.zeros(4)


class Branching(Refused):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * 2 if y.sum() > 0 else y  # this line


class Selecting(Refused):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y[y > 0].sum() + y  # this line


class Counting(Refused):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


class ChangingInput(Refused):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.add_(1))


class ChangingParameter(Refused):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        return self.layer(x)


class ChangingConstant(Refused):
    def forward(self, x: Tensor) -> Tensor:
        self.kept.add_(1)
        return self.layer(x) + self.kept


class Replacing(Refused):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) + self.kept
        self.kept = y.detach().mean(0)
        return y


class LeavingTorch(Refused):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.from_numpy(x.numpy().mean(1, keepdims=True))  # this line


class Printing(Refused):
    def forward(self, x: Tensor) -> Tensor:
        print(self.layer(x).max().item())  # this line
        return self.layer(x)


class Packed(Refused):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_sequence(list(x.unsqueeze(1)))  # this line
        return self.recurrent(packed)[1][0].sum(0)


class Hooked(Refused):
    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.register_hook(lambda gradient: gradient * 2)

    forward = WithFunction.forward


class Overlapping(Refused):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Parameter(self.layer.weight.data[1:])

    forward = WithFunction.forward


class Sparse(Refused):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.table(x[:, 0].abs().long()))
