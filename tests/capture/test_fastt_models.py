"""The nine models of FastT's table 1: equal to the plain loop when small, captured when large."""

from functools import partial

import pytest
import torch
from fastt import MODELS, RECURRENT
from profiles import slow_after
from step_loop import assert_equal_to_loop

from stagewright.executor.training.losses import cross_entropy


@pytest.mark.parametrize("name", slow_after(7, MODELS))
def test_a_step_is_that_of_the_loop(name: str) -> None:
    """To the bit, dropout and batch norm included."""
    build, (inputs, targets) = MODELS[name]
    torch.manual_seed(5)
    model = build().double()
    if isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
        inputs = inputs.double()
    assert_equal_to_loop(model, (inputs, targets), cross_entropy)


@pytest.mark.parametrize("name", slow_after(1, RECURRENT))
def test_a_step_in_single_precision_is_close(name: str) -> None:
    """torch runs a recurrent module in one kernel, the graph time step by time step."""
    build, batch = MODELS[name]
    torch.manual_seed(5)
    descent = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    same = partial(torch.allclose, rtol=1e-5, atol=1e-7)
    assert_equal_to_loop(build(), batch, cross_entropy, descent, same)
