"""Python values in a checkpoint, which is of tensors."""

import io
from typing import Any

import torch
from torch import Tensor


def packed(value: Any) -> Tensor:
    """A value that can be pickled, as a tensor of bytes."""
    content = io.BytesIO()
    torch.save(value, content)
    return torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8)


def unpacked(tensor: Tensor) -> Any:
    """The value of `packed`; like the checkpoint itself, it is a pickle."""
    return torch.load(
        io.BytesIO(tensor.cpu().numpy().tobytes()), map_location="cpu", weights_only=False
    )
