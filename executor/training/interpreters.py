"""The interpreters of a rank, by the shapes of mini-batches."""

from collections import OrderedDict

from torch import Tensor

from stagewright.executor.training.interpreter.interpreter import Interpreter
from stagewright.executor.training.preparation import Preparation
from stagewright.graphs.documents.errors import InputError

SHAPES = 16  # of mini-batches, whose preparation is kept


class Interpreters:
    """One interpreter for each of the shapes that came last.

    Attributes
    ----------
    running
        The one that has mini-batches in flight, in a plan whose mini-batches span steps.
    """

    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation
        self._spans_steps = preparation.rank.plan.spans_steps
        self._found: OrderedDict[object, Interpreter] = OrderedDict()
        self.running: Interpreter | None = None

    def of(self, given: tuple[Tensor, ...]) -> Interpreter:
        """The interpreter for the shapes of ``given``.

        Raises
        ------
        InputError
            If mini-batches of other shapes are in flight.
        """
        key = tuple((one.shape, one.dtype) for one in given)
        found = self._found.get(key)
        if self.running is not None and found is not self.running:
            raise InputError(
                f"a mini-batch of shape {', '.join(str(tuple(one.shape)) for one in given)} "
                "follows others while they are in flight; call finish() on all ranks before the "
                "shape changes"
            )
        if found is None:
            found = self._found[key] = self._preparation.interpreter(given)
            if len(self._found) > SHAPES:
                self._found.popitem(last=False)
        self._found.move_to_end(key)
        if self._spans_steps:
            self.running = found
        return found

    def pop_running(self) -> Interpreter | None:
        """Return the interpreter with mini-batches in flight, and forget that it has any."""
        found, self.running = self.running, None
        return found
