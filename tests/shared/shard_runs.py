"""What ranks do that divide the state of their weights."""

from functools import partial
from typing import Any

import torch
from tensor_runs import ENTROPY

from stagewright.executor.training.runtime import Executor
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InputError


class Scale(torch.nn.Module):
    """Multiplies by a number that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Clipping(torch.optim.SGD):
    """Clips by its name."""


ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-3, weight_decay=0.1)


def held_bytes(
    _: Any, rank: int, plan: PipelinePlan, model: Any, data: Any, _state: Any = None
) -> int:
    """Bytes of tensors that this rank holds between two steps, without buffers."""
    executor = Executor(plan, model, ENTROPY, ADAMW, dtype=torch.float64)
    for batch in data:
        executor.step(*batch)
    seen: dict[int, int] = {}
    for weights in executor._weights.values():
        tensors = [*weights.held[weights.newest], *weights._gradients.parts]
        tensors += [one for one in weights._gradients.views if one is not None]
        tensors += weights.stepped().values()
        kept = weights.optimizer.state.values() if weights.optimizer else ()
        tensors += [one for state in kept for one in state.values() if one.dim()]
        for one in tensors:
            storage = one.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


def refused(_: Any, rank: int, plan: PipelinePlan, model: Any, options: dict[str, Any]) -> str:
    """Why no executor is made."""
    try:
        Executor(plan, model, ENTROPY, dtype=torch.float64, **options)
    except InputError as error:
        return str(error)
    return "not refused"


def traced(_: Any, rank: int, plan: PipelinePlan, model: Any, data: Any) -> Any:
    """The trace of some steps, on rank 0."""
    executor = Executor(plan, model, ENTROPY, ADAMW, dtype=torch.bfloat16, trace=True)
    for batch in data:
        executor.step(*batch)
    return executor.trace_on_first_rank()
