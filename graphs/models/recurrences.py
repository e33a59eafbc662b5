"""Mixers that pass a state along the sequence: state spaces, linear attention, convolutions.

FLOPs of a scan are those of the products of its published chunked algorithm. Its time is priced as
that of matrix products, at least that of its moved bytes: no rate set was fitted to scans. What it
keeps is what its published fused kernel keeps; each is named at its operators.
"""

from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.operations import (
    LayerOperation,
    Operators,
    dense,
    elementwise,
    require_sizes,
)

Rule = Literal["ssd", "delta", "kda", "lightning"]


class _Shape(NamedTuple):
    """What a rule has for every head: inputs and parameters of one number, and of norms."""

    inputs: int
    vectors: int
    shared_norm: bool = False


_SHAPES: dict[Rule, _Shape] = {
    "ssd": _Shape(inputs=1, vectors=3),  # the step; A, D and the step's bias
    "delta": _Shape(inputs=2, vectors=2, shared_norm=True),  # beta and decay; A and a bias
    "kda": _Shape(inputs=1, vectors=1, shared_norm=True),  # beta; A
    "lightning": _Shape(inputs=0, vectors=0),
}


@documents.record
class Recurrence:
    """A mixer whose heads each have a state of ``state_size`` x ``head_size``, computed in chunks.

    ``rule``: ``ssd`` is Mamba-2's (Dao and Gu 2024), ``delta`` the gated delta rule (Yang et al.
    2025), ``kda`` that with a decay of every channel, which as the output's gate is a product of
    rank ``head_size`` (Kimi Team 2025), ``lightning`` linear attention with a fixed decay (Qin et
    al. 2024). ``groups`` of heads
    share their keys and queries (B and C). ``kernel_size`` is that of a causal convolution of
    values, keys and queries. ``bias`` is of the projection in, ``output_bias`` of the one back;
    without ``norm`` the output is gated alone.
    """

    rule: Rule
    heads: int
    head_size: int
    state_size: int
    groups: int
    chunk: int
    kernel_size: int | None = None
    bias: bool = False
    output_bias: bool = False
    convolution_bias: bool = False
    norm: bool = True

    def __post_init__(self) -> None:
        require_sizes(self)
        if self.heads % self.groups:
            raise InputError(f"heads ({self.heads}) must be a multiple of groups ({self.groups})")

    @property
    def width(self) -> int:
        """Elements of a token's values, and of its output."""
        return self.heads * self.head_size

    @property
    def gates(self) -> int:
        """Elements of a token's gate, or of the inner vectors of those of low rank."""
        return 2 * self.head_size if self.rule == "kda" else self.width

    @property
    def keys(self) -> int:
        """Elements of a token's keys and queries."""
        return 2 * self.groups * self.state_size


@documents.record
class SelectiveScan:
    """Mamba's mixer: a diagonal state of ``state_size`` for every element (Gu and Dao 2023).

    Steps come from a projection to ``step_rank``; with ``norms`` it, B and C are normed (Jamba).
    """

    width: int
    state_size: int
    step_rank: int
    kernel_size: int
    bias: bool = False
    convolution_bias: bool = True
    norms: bool = False

    def __post_init__(self) -> None:
        require_sizes(self)


@documents.record
class ShortConvolution:
    """A causal convolution of ``kernel`` tokens between two gates (LFM2)."""

    width: int
    kernel: int
    bias: bool = False

    def __post_init__(self) -> None:
        require_sizes(self)


RECURRENT = (Recurrence, SelectiveScan, ShortConvolution)

AnyRecurrent: TypeAlias = Recurrence | SelectiveScan | ShortConvolution


def recurred(of: AnyRecurrent, hidden: int, samples: int, sequence: int) -> Operators:
    """The operators of a mixer on ``samples`` sequences."""
    rows = samples * sequence
    if isinstance(of, SelectiveScan):
        return _selective_scan(of, hidden, rows)
    if isinstance(of, ShortConvolution):
        return {
            "recurrent in": dense(rows, hidden, 3 * of.width, bias=of.bias),
            "scan gate in": elementwise(rows * of.width, operands=2, saved=2 * rows * of.width),
            "convolution": _convolution(rows, of.width, of.kernel, bias=of.bias),
            "scan gate out": elementwise(rows * of.width, operands=2, saved=2 * rows * of.width),
            "recurrent out": dense(rows, of.width, hidden, bias=of.bias),
        }
    return _chunked(of, hidden, samples, sequence)


def inputs_of(of: AnyRecurrent) -> int:
    """Outputs of a token's projection into the mixer."""
    if isinstance(of, Recurrence):
        return of.width + of.gates + of.keys + of.heads * _SHAPES[of.rule].inputs
    return (2 if isinstance(of, SelectiveScan) else 3) * of.width


def _chunked(of: Recurrence, hidden: int, samples: int, sequence: int) -> Operators:
    rows, shape = samples * sequence, _SHAPES[of.rule]
    mixed = of.width + of.keys  # values, keys and queries
    found = {"recurrent in": dense(rows, hidden, inputs_of(of), bias=of.bias)}
    if of.rule == "kda":  # decay, with biases, and gate
        gates = dense(rows, of.head_size, 2 * of.width, bias=False)
        weights = gates.parameters + of.width
        found["recurrent gates"] = replace(gates, parameters=weights, saved=rows * of.gates)
    if of.kernel_size is not None:
        found["convolution"] = _convolution(rows, mixed, of.kernel_size, bias=of.convolution_bias)
    else:
        found["scan activation"] = elementwise(rows * mixed, saved=rows * mixed)
    found["scan"] = _scan(of, samples, sequence)
    weights = of.head_size if shape.shared_norm else of.width
    gated = elementwise(rows * of.width, operands=2, saved=2 * rows * of.width)
    parameters = of.heads * shape.vectors + (weights if of.norm else 0)
    found["scan norm"] = replace(gated, parameters=parameters)
    found["recurrent out"] = dense(rows, of.width, hidden, bias=of.output_bias)
    return found


def _convolution(rows: int, channels: int, kernel: int, *, bias: bool) -> LayerOperation:
    """A causal convolution of every channel, and its activation, in one kernel.

    Its kernel (causal_conv1d) keeps the input alone, and makes the activation again.
    """
    return LayerOperation(
        "convolution",
        2.0 * rows * channels * kernel,
        2 * rows * channels + channels * kernel,
        parameters=channels * (kernel + bias),
        saved=rows * channels,
        weight_gradients=1,
    )


def _scan(of: Recurrence, samples: int, sequence: int) -> LayerOperation:
    """The scan by chunks; the backward runs the forward again, and two products for each.

    ``ssd``: Dao and Gu 2024, section 6, as mamba_ssm's ``mamba_chunk_scan_combined`` has it.
    ``delta``: Yang et al. 2025, section 3.3, as fla's ``chunk_gated_delta_rule``, which keeps the
    matrix of a chunk too; ``kda`` has the same products, and the decays are inputs. ``lightning``:
    Qin et al. 2024, algorithm 1. All read their inputs for the states of chunks and for the
    outputs, and write, pass on and read these states.
    """
    rows, chunks = samples * sequence, samples * -(-sequence // of.chunk)
    padded, state = chunks * of.chunk, of.heads * of.head_size * of.state_size
    inputs = of.width + of.keys + of.heads * _SHAPES[of.rule].inputs
    inputs += of.width if of.rule == "kda" else 0
    saved, mixed = rows * inputs, rows * (of.width + of.keys)
    if of.rule == "ssd":
        # Scores and values in a chunk; states of chunks and from them; from chunk to chunk.
        square = padded * of.chunk * of.heads * (of.state_size + of.head_size)
        flops = 2.0 * square + 4.0 * padded * state + 4.0 * (chunks + samples) * state
        saved -= mixed  # the convolution's input is kept, of which it is made again
    elif of.rule in ("delta", "kda"):
        # Two matrices of scores and one of values; two triangular systems; three of states.
        square = padded * of.chunk * of.heads
        flops = 2.0 * square * (2 * of.state_size + of.head_size) + 6.0 * padded * state
        flops += square * (of.state_size + of.head_size)
        saved += rows * of.chunk * of.heads
    else:
        whole, rest = divmod(sequence, of.chunk)
        square = samples * (whole * of.chunk**2 + rest**2) * of.heads
        flops = 2.0 * square * (of.state_size + of.head_size) + 4.0 * rows * state
    moved = 2 * rows * inputs + rows * of.width + 4 * chunks * state
    return LayerOperation("matmul", flops, moved, saved=saved, input_gradients=3)


def _selective_scan(of: SelectiveScan, hidden: int, rows: int) -> Operators:
    """As mamba_ssm's ``mamba_inner_fn``, which makes the convolution and the steps again.

    The scan has no products but that of states and C: it is priced by the bytes that it moves.
    """
    selected, state = of.step_rank + 2 * of.state_size, of.width * of.state_size
    selection = dense(rows, of.width, selected, bias=False)
    norms = selected if of.norms else 0
    scan = elementwise(rows * of.width, operands=3, saved=2 * rows * (of.width + of.state_size))
    return {
        "recurrent in": dense(rows, hidden, 2 * of.width, bias=of.bias),
        "convolution": _convolution(rows, of.width, of.kernel_size, bias=of.convolution_bias),
        "selection": replace(selection, saved=0.0),
        "step": replace(
            dense(rows, of.step_rank, of.width),
            parameters=of.width * (of.step_rank + 1) + norms,
        ),
        "scan": replace(
            scan, flops=2.0 * rows * state, parameters=state + of.width, input_gradients=3
        ),
        "recurrent out": replace(dense(rows, of.width, hidden, bias=of.bias), saved=0.0),
    }
