"""The graph of a model's forward by torch.export, in which each block is one whole call.

torch.export runs the model's own code, with keywords, optional arguments and dataclasses, on
tensors without data and sizes that may vary. Blocks are operators to it, so that what is recorded
is what happens between them; when the layers run, they call the user's own modules.
"""

import io
import logging
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._export import non_strict_utils
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.nn.utils.stateless import _reparametrize_module

from stagewright.executor.capture.exported.conversion import (
    CURE,
    Exported,
    converted,
    innermost,
    leaves_of,
    like,
)
from stagewright.executor.capture.exported.whole_calls import WholeCall, called_whole
from stagewright.executor.capture.places import deciding, passing, place_of, shown, unchecked
from stagewright.executor.capture.python_state import attributes_kept, described, snapshot
from stagewright.executor.capture.signature import Signature, ValueStructure, taken_apart
from stagewright.graphs.documents.errors import InputError

_OPERATOR_RULE = FakeTensorMode.dispatch.__code__


class OperatorSizes(ShapeEnv):
    """Conditions of operators' own rules for shapes are not kept: the operators run again.

    A rule asks whether a size is 1 to know the strides of an expanded tensor, say. What the model
    asks decides which operators there are, and is kept.
    """

    passed: list[str]  # the lines of checks of values, which count as passed

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """The value of a condition, for the sizes of the example."""
        try:
            if not _in_rule():
                return super().evaluate_expr(*args, **kwargs)
            with self.suppress_guards():
                return super().evaluate_expr(*args, **kwargs)
        except GuardOnDataDependentSymNode:
            frame = deciding(sys._getframe(1))
            answer = passing(frame) if frame else None
            if frame is None or answer is None:
                raise
            self.passed.append(shown(frame))
            return answer


def _in_rule() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code is _OPERATOR_RULE:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@dataclass(frozen=True, slots=True)
class Example:
    """Example inputs for which a model is captured, and the signature of the call.

    ``takes_loss``: of the model's result its loss alone is wanted. ``autocast`` is the type of
    its computations, None for the parameters' type; ``dtype`` is that of parameters, None for
    their own.
    """

    tensors: tuple[Tensor, ...]
    signature: Signature
    takes_loss: bool
    device: torch.device
    dtype: torch.dtype | None = None
    autocast: torch.dtype | None = None

    def first(self, samples: int) -> "Example":
        """An example of the first ``samples`` samples."""
        return replace(self, tensors=tuple(one[:samples] for one in self.tensors))


def export(model: nn.Module, example: Example) -> Exported:
    """The graph of ``model`` between its blocks.

    A module within that cannot be looked into, because its path depends on data, say, is a block,
    and so are all of its class. Raises InputError naming the model's own line that cannot be
    captured, and why.
    """
    closed: dict[int, nn.Module] = {}
    notes: list[str] = []
    with _as_in_training(model):
        while True:
            try:
                found = _with_blocks(model, example, closed)
            except InputError as error:
                name = innermost(model, error, closed)
                if name is None:
                    raise
                notes.append(f"{name!r} is a single layer: {str(error).removesuffix(f'; {CURE}')}")
                closed |= like(model, model.get_submodule(name))
            else:
                return replace(found, notes=(*notes, *found.notes))


def _with_blocks(model: nn.Module, example: Example, closed: Collection[int]) -> Exported:
    """The graph between blocks; blocks that pass tensors other than their results are opened."""
    outer = _Outer(model, example)
    opened: set[type] = set()
    while True:
        leaves = leaves_of(model, opened, closed)
        program, calls, passed = _exported(outer, example, leaves)
        leaking = _leaking(outer, program, calls)
        if not leaking:
            found = converted(model, program, calls, outer.output)
            return replace(found, notes=tuple(map(unchecked, passed)))
        opened |= leaking


class _Outer(nn.Module):
    """``model`` as a function of tensors alone."""

    def __init__(self, model: nn.Module, example: Example) -> None:
        super().__init__()
        self.model, self._signature = model, example.signature
        self._takes_loss = example.takes_loss
        # In a list, as torch.export undoes what a forward sets on its module.
        self._returned: list[ValueStructure] = []

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors of the model's result."""
        arguments, keywords = self._signature.arguments(tensors)
        result = self.model(*arguments, **keywords)
        if self._takes_loss:
            result = loss_of(result, type(self.model).__name__)
        found, structure = taken_apart(result)
        if any(isinstance(one, torch.SymInt) for one in structure.leaves):
            raise InputError(
                f"{type(self.model).__name__} returns a size of its inputs; the loss can read it "
                "from a tensor"
            )
        self._returned[:] = [structure]
        return list(found)

    def output(self, tensors: Sequence[Tensor]) -> Any:
        """The model's result, of its tensors."""
        (structure,) = self._returned
        return structure.holding(tensors)


def loss_of(result: Any, name: str) -> Tensor:
    """The loss in the result of a model called ``name``.

    The result itself, its entry ``loss``, or the first of a tuple that is one number. Raises
    InputError if it has none.
    """
    if isinstance(result, Mapping):
        found: list[Any] = [result.get("loss")]
    else:
        found = [
            getattr(result, "loss", None),
            *(result if isinstance(result, tuple) else [result]),
        ]
    for one in found:
        if isinstance(one, Tensor) and one.numel() == 1 and one.is_floating_point():
            return one
    raise InputError(
        f"{name} returns no loss: give its labels among the keywords of a mini-batch, or give "
        "mini-batches (inputs, targets) and a loss"
    )


def _exported(
    outer: _Outer, example: Example, leaves: Mapping[str, nn.Module]
) -> tuple[ExportedProgram, list[WholeCall], list[str]]:
    """The program of ``outer``, the calls of blocks in it, and the checks that it leaves out."""
    passed: list[str] = []
    sizes = type("Sizes", (OperatorSizes,), {"passed": passed})
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = _fakes(outer, example)
        inputs = tuple(_fake(one, example) for one in example.tensors)
    shapes = (tuple(dict.fromkeys(range(one.dim()), Dim.AUTO) for one in inputs),)
    named = {
        name: fakes[id(one)]
        for registered in (outer.named_parameters, outer.named_buffers)
        for name, one in registered(remove_duplicate=False)
    }
    with ExitStack() as stack:
        stack.enter_context(_errors_named(outer.model))
        stack.enter_context(attributes_kept(outer.model))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # no kernels without data
        calls = stack.enter_context(called_whole(leaves, fakes))
        stack.enter_context(_reparametrize_module(outer, named, tie_weights=False))
        if example.autocast is not None:
            stack.enter_context(torch.autocast(example.device.type, example.autocast))
        # A size of 1 is like others, unless the model asks: a share may have one sample.
        stack.enter_context(_config.patch(backed_size_oblivious=True))  # type: ignore[attr-defined]
        stack.enter_context(patch.object(non_strict_utils, "ShapeEnv", sizes))
        stack.enter_context(_without_graphs())
        program = torch.export.export(outer, inputs, strict=False, dynamic_shapes=shapes)
        made = list(calls)
        mode.shape_env = sizes()  # for values that are asked for
        with mode:
            _require_stateless(outer, inputs)
    return program, made, list(dict.fromkeys(passed))


def _require_stateless(outer: _Outer, inputs: tuple[Tensor, ...]) -> None:
    """Refuse a forward that every call leaves another state of the model, or of generators."""
    before = snapshot(outer.model)
    outer(*inputs)
    once = snapshot(outer.model)
    changed = before.changed(once)
    if not changed:
        return
    outer(*inputs)
    moving = changed & once.changed(snapshot(outer.model))
    if moving:
        raise InputError(
            f"the forward changes {described(outer.model, min(moving))}: it would keep the value "
            "that it has when it is captured"
        )


def _fakes(outer: _Outer, example: Example) -> dict[int, Tensor]:
    """A tensor without data for every parameter and buffer."""
    made: dict[int, Tensor] = {}
    for one in [*outer.parameters(), *outer.buffers()]:
        made[id(one)] = _fake(one, example)
        if isinstance(one, nn.Parameter):
            made[id(one)] = nn.Parameter(made[id(one)], one.requires_grad)
    return made


def _fake(one: Tensor, example: Example) -> Tensor:
    dtype = example.dtype if one.is_floating_point() and example.dtype else one.dtype
    return torch.empty(one.shape, dtype=dtype, device=example.device)


@contextmanager
def _as_in_training(model: nn.Module) -> Iterator[None]:
    """Let models of transformers keep no cache of keys and values, which only generation uses."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching = [one for one in configs if getattr(one, "use_cache", None) is True]
    for one in caching:
        one.use_cache = False
    try:
        yield
    finally:
        for one in caching:
            one.use_cache = True


@contextmanager
def _errors_named(model: nn.Module) -> Iterator[None]:
    """Refuse in one line, with the model's own line that could not be captured."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # torch.export and the model's code raise anything
        reason = next((one for one in str(error).splitlines() if one.strip()), "")
        raise InputError(
            f"{type(model).__name__} cannot be captured{place_of(error)}: "
            f"{type(error).__name__}: {reason.strip()}; {CURE}"
        ) from error


@contextmanager
def _without_graphs() -> Iterator[None]:
    """Keep torch from printing the graph of an export that is refused in one line."""
    printed, logger = io.StringIO(), logging.getLogger("torch.fx.experimental.symbolic_shapes")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(printed):
            yield
    finally:
        logger.setLevel(before)
    sys.stderr.write(printed.getvalue())  # of the user's code, as nothing failed


def _leaking(outer: nn.Module, program: ExportedProgram, calls: Sequence[WholeCall]) -> set[type]:
    """Classes of blocks that hand on tensors beside their results, to be looked into.

    Raises InputError if none of them has hooks, by which it could.
    """
    registered = dict(outer.named_buffers(remove_duplicate=False))
    leaked = [
        name
        for name, one in program.constants.items()
        if name not in registered and isinstance(one, FakeTensor) and one.constant is None
    ]
    if not leaked:
        return set()
    suspects = {type(call.module) for call in calls if call.has_hooks_within}
    if suspects:
        return suspects
    raise InputError(
        "a block hands on a tensor beside its results, or a module holds one that is not "
        f"registered ({leaked[0]}); return it, or register it as a buffer"
    )
