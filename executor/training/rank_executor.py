"""What the executors of pipelines and of placed operators have in common."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from stagewright.executor.programs.trace import Trace
from stagewright.executor.training.ranks.rank import RankPlace, gathered
from stagewright.executor.training.trace_recorder import TraceRecorder

MODEL = "model."  # what the keys of parameters and buffers in a checkpoint start with


class OwnTensors(Protocol):
    """A rank's tensors by the keys of a checkpoint."""

    def state(self) -> dict[str, Tensor]:
        """The tensors that this rank writes; each key is written by one rank."""

    def wanted(self, keys: Iterable[str]) -> list[str]:
        """Which entries of a checkpoint belong to this rank."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a checkpoint's tensors; raises InputError if one of this rank is missing."""

    def whole_model(self, shares: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The model's state dict under all its names, from the shares of all ranks."""


class RankExecutor:
    """One rank of a plan: its place, its share of a checkpoint, its traces."""

    steps_done: int
    _place: RankPlace
    _own: OwnTensors
    _recorder: TraceRecorder

    @property
    def rank(self) -> int:
        """The number of this process."""
        return self._place.number

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return len(self._place.devices)

    def state(self) -> dict[str, Tensor]:
        """The share of a checkpoint that this rank writes, once each key; all ranks call it.

        ``model.NAME`` are parameters and buffers under the model's own names. Of a pipeline,
        ``optimizer.NAME.KEY`` is what the optimizer keeps for a parameter, ``previous.NAME`` the
        weights before the last update, where the plan computes on them, ``schedule.state`` that of
        the learning rates, ``extra.state`` the caller's. Of placed operators ``state.NAME`` is the
        rest. The next step changes these tensors. Raises InputError if mini-batches are in flight:
        `finish` comes first.
        """
        self._require_finished()
        return self._own.state()

    def wanted(self, keys: Iterable[str]) -> list[str]:
        """Which entries of a checkpoint belong to this rank."""
        return self._own.wanted(keys)

    def load_state(self, tensors: Mapping[str, Tensor], steps_done: int) -> None:
        """Continue a run that wrote ``tensors`` (`wanted` says which) after its steps.

        Raises InputError if a tensor of this rank is missing, or mini-batches are in flight.
        """
        self._require_finished()
        self._own.load(tensors)
        self.steps_done = steps_done

    def parameters_on_first_rank(self) -> dict[str, Tensor] | None:
        """The whole model's state dict under its own names on rank 0, None on the others.

        All ranks call it.
        """
        own = {
            key.removeprefix(MODEL): value.to("cpu", copy=True)
            for key, value in self.state().items()
            if key.startswith(MODEL)
        }
        shares = gathered(self._place, own)
        return None if shares is None else self._own.whole_model(shares)

    def parameters_of_rank(self) -> dict[str, Tensor]:
        """The rank's share of the model's state dict under all its names; all ranks call it."""
        state = self.state().items()
        own = {key.removeprefix(MODEL): one for key, one in state if key.startswith(MODEL)}
        return self._own.whole_model([own])

    def trace_on_first_rank(self) -> Trace | None:
        """When everything ran in the steps so far, on rank 0; None on the others.

        All ranks call it. With a periodic plan, the steps between two drains are one step; with one
        that begins with the backwards, a step is from loss to loss, and the rest is left out.
        Raises InputError if mini-batches are in flight (`finish` comes first), or no step was
        recorded.
        """
        self._require_finished()
        return self._recorder.trace_on_first_rank()

    def _require_finished(self) -> None:
        """Require that no mini-batch is in flight; none ever is where steps do not overlap."""

    def _own_draws(self) -> AbstractContextManager[None]:
        """Draw random numbers apart: they differ from rank to rank, the caller's must not."""
        device = self._place.device
        return torch.random.fork_rng([] if device.type == "cpu" else [device])
