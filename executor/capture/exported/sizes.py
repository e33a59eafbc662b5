"""Sizes that may vary while a model is exported, and the conditions that its code makes on them."""

import sys
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

_OPERATOR_RULE = FakeTensorMode.dispatch.__code__


class Sizes(ShapeEnv):
    """Conditions of operators' own rules for shapes are not kept: the operators run again.

    A rule asks whether a size is 1 to know the strides of an expanded tensor, say. What the model
    asks decides which operators there are, and is kept.
    """

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """The value of a condition, for the sizes of the example."""
        if not _in_rule():
            return super().evaluate_expr(*args, **kwargs)
        with self.suppress_guards():
            return super().evaluate_expr(*args, **kwargs)


def _in_rule() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _OPERATOR_RULE:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
