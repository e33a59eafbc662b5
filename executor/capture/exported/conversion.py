"""From an exported program to a graph of the user's modules; blocks are called whole."""

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram

from stagewright.executor.capture.exported.whole_calls import OPERATOR, Called, WholeCall
from stagewright.executor.capture.layers import BETWEEN
from stagewright.executor.capture.signature import taken_apart
from stagewright.graphs.documents.errors import InputError

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def leaves_of(
    model: nn.Module, opened: Collection[type] = (), closed: Collection[int] = ()
) -> dict[str, nn.Module]:
    """The modules with parameters that are called whole, by their names, each once.

    The model itself, lists and modules that hold a list of like blocks are opened, and those of a
    class in ``opened``. Modules with an id in ``closed`` are not.
    """
    return dict(_NestedWalk(opened, closed, set()).leaves("", model))


@dataclass(frozen=True, slots=True)
class _NestedWalk:
    opened: Collection[type]
    closed: Collection[int]
    seen: set[int]

    def leaves(self, name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in self.seen:
            return
        self.seen.add(id(module))
        is_closed = id(module) in self.closed
        if name and (is_closed or not self._is_open(module)):
            if is_closed or next(module.parameters(), None) is not None:
                yield name, module
            return
        for field, child in module.named_children():
            yield from self.leaves(f"{name}.{field}" if name else field, child)

    def _is_open(self, module: nn.Module) -> bool:
        if isinstance(module, nn.ModuleList | nn.ModuleDict) or type(module) in self.opened:
            return True
        return holds_like_blocks(module)


def holds_like_blocks(module: nn.Module) -> bool:
    """Whether a list within ``module`` has two blocks or more of one class."""
    for container in module.modules():
        if not isinstance(container, CONTAINERS):
            continue
        kinds = Counter(type(child) for child in container.children() if _is_block(child))
        if any(count > 1 for count in kinds.values()):
            return True
    return False


def holds_closed_blocks(model: nn.Module) -> bool:
    """Whether blocks are within a module of torch's own, such as its transformers.

    Tracing does not look into those: their paths depend on how they are called.
    """
    return any(
        _is_torchs(module) and not isinstance(module, CONTAINERS) and holds_like_blocks(module)
        for module in model.modules()
    )


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _is_block(module: nn.Module) -> bool:
    """Whether a module is more than one of torch's own operations, such as a convolution."""
    if isinstance(module, CONTAINERS) and _is_torchs(module):
        return False
    return not _is_torchs(module) or any(True for _ in module.children())


def innermost(
    model: nn.Module, error: BaseException, closed: Mapping[int, nn.Module]
) -> str | None:
    """The innermost module, other than ``model`` and its blocks, in whose forward an error is."""
    inside = {id(one) for leaf in leaves_of(model, (), closed).values() for one in leaf.modules()}
    names = {id(one): name for name, one in model.named_modules() if name}
    found, trace = None, (error.__cause__ or error).__traceback__
    while trace is not None:
        key = id(trace.tb_frame.f_locals.get("self"))
        if key in names and key not in inside:
            found = names[key]
        trace = trace.tb_next
    return found


def like(model: nn.Module, module: nn.Module) -> dict[int, nn.Module]:
    """The modules of the class of ``module``, of torch's classes that one alone."""
    every = [module] if _is_torchs(module) else model.modules()
    return {id(one): one for one in every if type(one) is type(module) and one is not model}


CURE = "do that inside a block's own module, or pass a list of modules"


@dataclass(frozen=True, slots=True, eq=False)
class Exported:
    """A graph over the tensors of a model's inputs, and the conditions under which it holds.

    ``attributes`` are modules and tensors that the graph reads and the model does not have;
    ``output`` makes the model's result of the graph's; ``guards`` are conditions on the inputs;
    ``notes`` say in lines what is another than in the model.
    """

    graph: fx.Graph
    attributes: Mapping[str, Any]
    output: Callable[[Sequence[Tensor]], Any]
    guards: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def holds_tensors(self) -> bool:
        """Whether the graph reads tensors that the model has not registered."""
        for one in self.attributes.values():
            within = one.modules() if isinstance(one, nn.Module) else ()
            kept = (value for part in within for value in vars(part).values())
            if not isinstance(one, nn.Module) or any(isinstance(value, Tensor) for value in kept):
                return True
            if any(True for _ in (*one.parameters(), *one.buffers())):
                return True
        return False


def converted(
    model: nn.Module,
    program: ExportedProgram,
    calls: Sequence[WholeCall],
    output: Callable[[Sequence[Tensor]], Any],
) -> Exported:
    """The graph of a program with ``calls`` of operators in place of blocks."""
    return _Conversion(model, program, calls).result(output)


class Region(nn.Module):
    """Operators that run with gradients or autocast turned on or off."""

    def __init__(self, graph: nn.Module, enter: Callable[[], Any]) -> None:
        super().__init__()
        self._graph, self._enter = graph, enter

    def forward(self, *values: Any) -> Any:
        """The results of the operators."""
        with self._enter():
            return self._graph(*values)


_SKIPPED = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors of a module's result, in order."""
    return list(taken_apart(result)[0])


class _Conversion:
    """A program with calls of operators in place of blocks becomes a graph of their modules."""

    def __init__(
        self, model: nn.Module, program: ExportedProgram, calls: Sequence[WholeCall]
    ) -> None:
        self._model, self._program = model, program
        self._buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self._calls = {call.number: call for call in calls}
        self._graph = fx.Graph()
        self._made: dict[fx.Node, Any] = {}
        self._same: dict[fx.Node, list[fx.Node]] = {}  # nodes of one tensor, changed in place
        self._attributes: dict[str, Any] = {}

    def result(self, output: Callable[[Sequence[Tensor]], Any]) -> Exported:
        """The converted graph."""
        nodes = list(self._program.graph.nodes)
        starts = [node for node in nodes if node.op == "placeholder"]
        for node, spec in zip(starts, self._program.graph_signature.input_specs, strict=True):
            self._made[node] = self._start(node, spec)
        for node in nodes[len(starts) :]:
            if node.op == "output":
                returned = [self._made[one] for one in node.args[0]]
                self._graph.output(tuple(returned))
            elif node.op == "get_attr":
                self._made[node] = getattr(self._program.graph_module, str(node.target))
            elif not any(word in str(node.target) for word in _SKIPPED):
                self._made[node] = self._node(node)
        return Exported(self._graph, self._attributes, output, self._guards())

    def _guards(self) -> tuple[str, ...]:
        """Torch's conditions on sizes, and the sizes that it has fixed."""
        inputs = [node for node in self._graph.nodes if node.op == "placeholder"]
        known = [
            f"L['tensors'][{i}].size()[{axis}] == {size}"
            for i, node in enumerate(inputs)
            for axis, size in enumerate(node.meta["val"].shape)
            if isinstance(size, int)
        ]
        return tuple(dict.fromkeys([*known, *self._program._guards_code]))

    def _start(self, node: fx.Node, spec: Any) -> fx.Node:
        if spec.target is None:
            return self._with_meta(self._graph.placeholder(node.name), node)
        name = spec.target.removeprefix("model.")
        if spec.target in self._program.constants and name not in self._buffers:
            held = self._program.constants[spec.target]
            constant = getattr(held, "constant", None)
            name = f"{BETWEEN}{len(self._attributes)}"
            self._attributes[name] = held if constant is None else constant
        return self._with_meta(self._graph.get_attr(name), node)

    def _node(self, node: fx.Node) -> Any:
        if node.target is OPERATOR:
            return self._call(node)
        if node.target is operator.getitem:
            whole, index = cast(tuple[fx.Node, int], node.args)
            if isinstance(self._made[whole], list):  # of a block's tensors
                return self._made[whole][index]
        name = getattr(node.target, "__name__", "")
        if node.target is torch.ops.aten.dropout.default:
            return self._dropout(node)
        if name in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            return self._region(node, name)
        made = self._with_meta(self._graph.node_copy(node, self._made.__getitem__), node)
        if _changes_first(node):
            self._make_anew(node, made)
        return made

    def _make_anew(self, node: fx.Node, made: fx.Node) -> None:
        """Make a new tensor where ``node`` changes its first argument, if nobody else sees that.

        A layer changes none of its inputs: that may be a leaf, or be read by other layers.
        """
        changed = cast(fx.Node, node.args[0])
        kept = changed.op != "call_function" or _is_view(changed)  # of the model, or of another
        if kept or (_changes_first(changed) and changed not in self._same):
            return
        same = self._same.get(changed, [changed])
        if any(_is_view(user) and user < node for one in same for user in one.users):
            return
        name, _, overload = str(node.target).removeprefix("aten.").partition(".")
        plain = getattr(getattr(torch.ops.aten, name.removesuffix("_"), None), overload, None)
        if plain is None:
            return
        made.target = plain
        same.append(node)
        for one in same:
            self._same[one], self._made[one] = same, made

    def _call(self, node: fx.Node) -> list[fx.Node]:
        """A call of the user's module; its tensors."""
        number, tensors, sizes = cast(tuple[int, list[fx.Node], list[Any]], node.args[:3])
        call = self._calls[number]
        arguments, keywords = call.arguments(
            [self._made[one] for one in tensors], [self._made.get(one, one) for one in sizes]
        )
        if isinstance(call.module, Called):
            self._attributes[call.name] = Called(call.module.function)
        made = self._graph.call_module(call.name, arguments, keywords)
        metas = node.meta["val"]
        if call.returned is not None and call.returned.is_tensor:
            made.meta["val"] = metas[0]
            return [made]
        every = self._graph.call_function(tensors_in, (made,))
        entries = []
        for i, meta in enumerate(metas):
            entries.append(self._graph.call_function(operator.getitem, (every, i)))
            entries[-1].meta["val"] = meta
        return entries

    def _dropout(self, node: fx.Node) -> fx.Node:
        """A dropout operator as a module, so that ``eval()`` and ``train()`` reach it."""
        given, share, _ = cast(tuple[fx.Node, float, bool], node.args)
        name = f"{BETWEEN}{len(self._attributes)}"
        self._attributes[name] = nn.Dropout(share).train(cast(bool, node.args[2]))
        return self._with_meta(self._graph.call_module(name, (self._made[given],)), node)

    def _region(self, node: fx.Node, kind: str) -> fx.Node:
        held = 1 if kind == "wrap_with_set_grad_enabled" else 4
        given = cast(tuple[Any, ...], node.args)
        settings, (inner, *values) = given[:held], given[held:]
        module = self._made[inner]
        if any(one.target is OPERATOR for one in module.graph.nodes):
            raise InputError(
                f"{type(self._model).__name__} turns gradients or autocast on or off between its "
                f"layers, which is not captured; {CURE}"
            )
        name = f"{BETWEEN}{len(self._attributes)}"
        self._attributes[name] = Region(module, _entering(kind, settings))
        return self._with_meta(
            self._graph.call_module(name, tuple(self._made.get(one, one) for one in values)), node
        )

    @staticmethod
    def _with_meta(made: fx.Node, node: fx.Node) -> fx.Node:
        made.meta["val"] = node.meta.get("val")
        return made


def _changes_first(node: fx.Node) -> bool:
    """Whether an operator of torch's own changes its first argument, and returns it."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    written = [one.alias_info and one.alias_info.is_write for one in node.target._schema.arguments]
    return bool(written) and bool(written[0]) and not any(written[1:])


def _is_view(node: fx.Node) -> bool:
    """Whether an operator may return memory of another tensor."""
    if not isinstance(node.target, OpOverload):
        return False
    returned = [one.alias_info for one in node.target._schema.returns]
    return any(one is not None and not one.is_write for one in returned)


def _entering(kind: str, settings: Sequence[Any]) -> Callable[[], Any]:
    if kind == "wrap_with_set_grad_enabled":
        return lambda: torch.set_grad_enabled(settings[0])
    device, dtype, enabled, cache = settings
    return lambda: torch.autocast(device, dtype, enabled, cache)
