"""Placement and order of operators (FastT, Yi et al., Middleware 2020, section 3).

The rules, of which the paper leaves some open:

- A device runs one operator at a time, without interruption. An operator that takes no time
  occupies no device.
- An operator starts when all tensors that it reads are on its device.
- A tensor is sent once to every other device that reads it, after its maker has ended and in
  latency + bytes / bandwidth of the directed pair. Transfers overlap computation.
- Contention ``none`` (the paper's): transfers never wait for each other. ``exclusive``: a directed
  pair of devices carries one transfer at a time.
- An operator's state is in its device's memory for the whole step. A tensor is there from the start
  of its maker to the end of its last reader on that device and of the last transfer of it; its copy
  on another device from the start of the transfer to the end of the last reader there.
- Operators of a group are on one device.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from stagewright.formulations.operators import rules
from stagewright.formulations.prices.collectives import paced_seconds
from stagewright.graphs.documents.arrays import Floats, Ints
from stagewright.graphs.documents.errors import InputError

Contention = Literal["none", "exclusive"]


@dataclass(frozen=True, eq=False)
class OperatorProblem:
    """Place n operators on m devices and order them; minimise the end of the last one.

    Attributes
    ----------
    names, devices
        Operators in a topological order, and devices.
    seconds
        Time of each operator on each device, shape (n, m).
    maker, output
        Of each tensor the operator that makes it, ascending, and its number among the outputs.
    first_reader, reader
        ``reader[first_reader[t]:first_reader[t + 1]]`` are the operators that read tensor t,
        ascending.
    sent_bytes, held_bytes
        Bytes of each tensor when it is sent or copied, and in the memory of its maker's device;
        these are 0 for a tensor that is a part of its maker's state.
    latency, seconds_per_byte
        Of each directed pair of devices, shape (m, m); the diagonals are 0.
    state_bytes, memory
        Bytes of each operator for the whole step, and of each device.
    group
        Operators of the same number are on one device, shape (n,).
    unmeasured
        Operators with a kind of device on which they have not been measured. They take 0 seconds
        there, so that plans explore it (section 4, "Strategy calculator").
    """

    names: tuple[str, ...]
    devices: tuple[str, ...]
    seconds: Floats
    maker: Ints
    output: Ints
    first_reader: Ints
    reader: Ints
    sent_bytes: Floats
    held_bytes: Floats
    latency: Floats
    seconds_per_byte: Floats
    state_bytes: Floats
    memory: Floats
    group: Ints
    contention: Contention = "none"
    unmeasured: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.contention not in get_args(Contention):
            raise InputError(f"contention must be none or exclusive, got {self.contention!r}")
        n, m, tensors = len(self.names), len(self.devices), len(self.maker)
        for name, shape in (
            ("seconds", (n, m)),
            ("output", (tensors,)),
            ("first_reader", (tensors + 1,)),
            ("sent_bytes", (tensors,)),
            ("held_bytes", (tensors,)),
            ("latency", (m, m)),
            ("seconds_per_byte", (m, m)),
            ("state_bytes", (n,)),
            ("memory", (m,)),
            ("group", (n,)),
        ):
            values = getattr(self, name)
            if values.shape != shape:
                raise InputError(f"{name} must have the shape {shape}, got {values.shape}")
            if not (np.isfinite(values).all() and (values >= 0).all()):
                raise InputError(f"{name} must be finite and not negative")
        if not n or not m:
            raise InputError("there must be an operator and a device")
        self._require_order()

    def _require_order(self) -> None:
        n = len(self.names)
        counts = np.diff(self.first_reader)
        if (counts < 0).any() or self.first_reader[0] or self.first_reader[-1] != len(self.reader):
            raise InputError("first_reader must ascend from 0 to the number of readers")
        if (np.diff(self.maker) < 0).any() or not np.isin(self.maker, np.arange(n)).all():
            raise InputError("maker must be operators in ascending order")
        makers = np.repeat(self.maker, counts)
        if not ((makers < self.reader) & (self.reader < n)).all():
            raise InputError("a tensor's readers must come after its maker")
        for name in ("latency", "seconds_per_byte"):
            if getattr(self, name).diagonal().any():
                raise InputError(f"the diagonal of {name} must be 0")

    def evaluate(self, timetable: "GraphTimes") -> float:
        """Check every rule and return the end of the last operator, in seconds.

        Raises InvalidPlan if a rule is broken; the message names the first one.
        """
        return rules.evaluate(self, timetable)

    def transfer_seconds(self, tensor: Ints, source: Ints, target: Ints) -> Floats:
        """Time of tensors from ``source`` to ``target`` devices; 0 where they are the same."""
        pair = source, target
        sent: Floats = self.sent_bytes[tensor]
        return paced_seconds(sent, self.seconds_per_byte[pair], self.latency[pair])

    @cached_property
    def inputs(self) -> tuple[Ints, Ints]:
        """(first, tensor): ``tensor[first[i]:first[i + 1]]`` are the tensors that i reads."""
        tensors = np.repeat(np.arange(len(self.maker)), np.diff(self.first_reader))
        order = np.argsort(self.reader, kind="stable")
        counts = np.bincount(self.reader, minlength=len(self.names))
        return np.concatenate(([0], np.cumsum(counts))), tensors[order]

    @cached_property
    def first_output(self) -> Ints:
        """The tensors of operator i are ``first_output[i]`` to ``first_output[i + 1]``."""
        return np.searchsorted(self.maker, np.arange(len(self.names) + 1)).astype(np.int64)

    @cached_property
    def edges(self) -> tuple[Ints, Ints, Ints]:
        """(maker, reader, tensor) of every read."""
        counts = np.diff(self.first_reader)
        tensors = np.repeat(np.arange(len(self.maker)), counts)
        return self.maker[tensors], self.reader, tensors

    @cached_property
    def group_bytes(self) -> Floats:
        """State of each group, shape (groups,)."""
        found: Floats = np.bincount(self.group, self.state_bytes).astype(float)
        return found

    @cached_property
    def digest(self) -> str:
        """A SHA-256 of everything that a plan depends on."""
        found = hashlib.sha256(repr((self.names, self.devices, self.contention)).encode())
        for name in (
            "seconds", "maker", "output", "first_reader", "reader", "sent_bytes", "held_bytes",
            "latency", "seconds_per_byte", "state_bytes", "memory", "group",
        ):  # fmt: skip
            found.update(np.ascontiguousarray(getattr(self, name)).tobytes())
        return found.hexdigest()


@dataclass(frozen=True, eq=False)
class GraphTimes:
    """Device, start and finish of every operator, and of every transfer.

    ``sent[k]`` is a tensor that goes to device ``target[k]`` from ``sent_start[k]`` to
    ``sent_finish[k]`` (seconds).
    """

    device: Ints
    start: Floats
    finish: Floats
    sent: Ints
    target: Ints
    sent_start: Floats
    sent_finish: Floats

    @property
    def end(self) -> float:
        """The end of the last operator."""
        return float(self.finish.max(initial=0.0))

    @property
    def order(self) -> Ints:
        """The operators by their starts; at equal starts, operators without duration come first."""
        return np.lexsort((np.arange(len(self.start)), self.finish, self.start))
