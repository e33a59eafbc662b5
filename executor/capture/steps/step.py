"""Capture of a whole training step: forward, loss, backward and the optimizer's step.

Optimizer steps as aten operators, which compute what ``torch.optim`` computes.

The bias corrections of Adam depend on the number of the step. It is a tensor here, so that one
graph serves all steps. In double precision these scalars differ from the Python floats of
torch.optim by the last bit at most, in one of a hundred steps (``pow``); rounded to single
precision they are the same. Everything else is the same to the bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map_only

from stagewright.executor.capture.loss_graph import require_no_parameters
from stagewright.executor.capture.steps.document import step_graph
from stagewright.executor.capture.steps.joint import (
    JointGraph,
    aten,
    fake_mode,
    identifier,
    trace_joint,
)
from stagewright.executor.training.losses import Loss, cross_entropy
from stagewright.executor.training.stages.learning_rates import MakeOptimizer
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.operators.step_graph import StepGraph


def without_values(
    make: Callable[[], nn.Module], batch: tuple[Any, Any]
) -> tuple[nn.Module, tuple[Any, Any]]:
    """The model of a factory with fake parameters, and the mini-batch with fake tensors.

    A factory that reads values while it makes the model is called for a real one.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = tree_map_only(Tensor, mode.from_tensor, batch)
    try:
        with mode:
            return make(), fakes
    except Exception:  # whatever the factory's code raises on a tensor without values
        return make(), batch


def resized(batch: tuple[Any, Any], samples: int) -> tuple[Any, Any]:
    """A mini-batch of ``samples`` samples: the given samples, repeated.

    Raises InputError if the tensors of the batch have no samples, or different numbers of them.
    """
    tensors = tree_leaves(batch)
    if not all(isinstance(one, Tensor) and one.dim() for one in tensors):
        raise InputError("a mini-batch has something other than tensors with samples in axis 0")
    counts = {len(one) for one in tensors}
    if len(counts) != 1 or 0 in counts:
        raise InputError(f"the tensors of a mini-batch have {sorted(counts)} samples")
    rows = torch.arange(samples) % counts.pop()
    found: tuple[Any, Any] = tree_map_only(Tensor, lambda one: one[rows], batch)
    return found


def share_of(batch: tuple[Any, Any], replicas: int, number: int) -> tuple[Any, Any]:
    """The samples of replica ``number`` in a mini-batch.

    Raises InputError if a tensor's samples cannot be divided among the replicas.
    """
    if replicas == 1:
        return batch
    for one in tree_leaves(batch):
        if not isinstance(one, Tensor) or not one.dim() or len(one) % replicas:
            found = len(one) if isinstance(one, Tensor) and one.dim() else 0
            below = found - found % replicas
            near = f"{below} or {below + replicas}" if below else str(replicas)
            raise InputError(
                f"a tensor of the mini-batch has {found or 'no'} samples, which {replicas} "
                f"replicas or microbatches cannot share equally; {near} can be"
            )

    def rows(one: Tensor) -> Tensor:
        size = len(one) // replicas
        return one[number * size : (number + 1) * size]

    found_share: tuple[Any, Any] = tree_map_only(Tensor, rows, batch)
    return found_share


Group = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepRule:
    """The step of one optimizer.

    ``slots`` are the names of the tensors that it keeps per parameter, zero at first. ``scalars``
    of (step, group) advances the step and returns what all parameters use; ``update`` of (group,
    parameter, gradient, slots, scalars) changes the parameter and its slots in place. ``refused``
    are options that must be off.
    """

    slots: Callable[[Group], tuple[str, ...]]
    scalars: Callable[[Group, Tensor], list[Tensor]] | None
    update: Callable[[Group, Tensor, Tensor, list[Tensor], list[Tensor]], None]
    refused: tuple[str, ...]


def _sgd(
    group: Group, parameter: Tensor, gradient: Tensor, slots: list[Tensor], _: list[Tensor]
) -> None:
    if group["weight_decay"] != 0:
        gradient = gradient.add(parameter, alpha=group["weight_decay"])
    if slots:  # zero at first: the first step's buffer is the gradient
        buffer = slots[0].mul_(group["momentum"]).add_(gradient)
        nesterov = group["nesterov"]
        gradient = gradient.add(buffer, alpha=group["momentum"]) if nesterov else buffer
    parameter.add_(gradient, alpha=-group["lr"])


def _adam_scalars(group: Group, step: Tensor) -> list[Tensor]:
    first, second = group["betas"]
    step = step.add_(1)
    negative_size = torch.full_like(step, -group["lr"]) / (1 - first**step)
    return [negative_size, (1 - second**step).sqrt()]


def _adam(
    group: Group, parameter: Tensor, gradient: Tensor, slots: list[Tensor], scalars: list[Tensor]
) -> None:
    (average, square), (negative_size, root) = slots, scalars
    first, second = group["betas"]
    decay = group["weight_decay"]
    if decay != 0 and group["decoupled_weight_decay"]:
        parameter = parameter.mul_(1 - group["lr"] * decay)
    elif decay != 0:
        gradient = gradient.add(parameter, alpha=decay)
    average = average.lerp_(gradient, 1 - first)
    square = square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
    denominator = square.sqrt() / root + group["eps"]
    parameter.add_(average * negative_size / denominator)


SGD = StepRule(
    lambda group: ("momentum_buffer",) if group["momentum"] else (),
    None,
    _sgd,
    ("dampening", "maximize", "differentiable", "fused"),
)
ADAM = StepRule(
    lambda _: ("exp_avg", "exp_avg_sq"),
    _adam_scalars,
    _adam,
    ("amsgrad", "maximize", "differentiable", "fused", "capturable"),
)
RULES = {torch.optim.SGD: SGD, torch.optim.Adam: ADAM, torch.optim.AdamW: ADAM}


def rule_of(optimizer: torch.optim.Optimizer) -> StepRule:
    """The rule of an optimizer.

    Raises InputError if it is not one of ``RULES``, or has an option that changes the step.
    """
    kind = type(optimizer)
    if kind not in RULES:
        known = ", ".join(one.__name__ for one in RULES)
        raise InputError(f"the optimizer {kind.__name__} is not captured; there are {known}")
    rule = RULES[kind]
    for group in optimizer.param_groups:
        for option in rule.refused:
            if group.get(option):
                raise InputError(
                    f"{kind.__name__} with {option}={group[option]!r} is not captured; leave it out"
                )
        if isinstance(group["lr"], Tensor):
            raise InputError(f"{kind.__name__} with a tensor as lr is not captured; give a number")
    return rule


@dataclass(frozen=True, slots=True, eq=False)
class CapturedStep:
    """A training step as a graph to execute and as a document to plan for.

    ``module``: takes the states and the tensors of a mini-batch in the order of its placeholders,
    changes the states in place, and returns the loss and the ``gradients``. Nodes have the names
    that they have in ``graph``. ``states``: the values of the states before the first step, by name
    of their node; fake if the model is. ``names``: the names of the states' nodes by path: that of
    a parameter or buffer in the model, or of the optimizer's state. ``gradients``: the parameters'
    names in the model, in the order in which their gradients are returned. ``graph``: the document.
    """

    module: fx.GraphModule
    states: Mapping[str, Tensor]
    names: Mapping[str, str]
    gradients: tuple[str, ...]
    graph: StepGraph

    def run(
        self, states: Mapping[str, Tensor], batch: tuple[Any, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One step, which changes ``states``: the loss, and the gradients by parameter."""
        given = [states[name] for name in self.states]
        loss, *gradients = self.module(*given, *tree_leaves(batch))
        return loss, dict(zip(self.gradients, gradients, strict=True))


def capture_step(
    model: nn.Module,
    batch: tuple[Any, Any],
    *,
    loss: Loss = cross_entropy,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    name: str = "model",
) -> CapturedStep:
    """Capture a step of ``model`` on a mini-batch ``batch``, (inputs, targets).

    The step computes what this loop computes, with the model in the mode that it is in:

        optimizer.zero_grad(); loss(model(inputs), targets).backward(); optimizer.step()

    No values are read: with fake tensors a model of any size is captured without its memory. Raises
    InputError if the step cannot be expressed as such a graph: it depends on values, changes Python
    state or its inputs, or the optimizer is not known.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is a {type(model).__name__}, not a torch module")
    require_no_parameters(loss)
    trained = [one for one in model.parameters() if one.requires_grad]
    if not trained:
        raise InputError(f"{type(model).__name__} has no parameters to train")
    stepping = optimizer(trained)
    rule = rule_of(stepping)
    joint = trace_joint(model, loss, batch)
    states = {node.name: joint.values[path].detach() for path, node in joint.states.items()}
    updates = _Updates(joint, rule, states)
    for path, node in joint.written.items():
        updates.write(joint.states[path], node)
    names = {id(one): path for path, one in model.named_parameters()}
    for number, group in enumerate(stepping.param_groups):
        paths = [names.get(id(one), "") for one in group["params"]]
        paths = [path for path in paths if path in joint.gradients]
        updates.step(number, group, paths)
    assert joint.loss is not None
    joint.graph.output((joint.loss, *joint.gradients.values()))
    joint.graph.eliminate_dead_code()
    module = fx.GraphModule(nn.Module(), joint.graph)
    return CapturedStep(
        module,
        states,
        {path: node.name for path, node in joint.states.items()},
        tuple(joint.gradients),
        step_graph(name, module.graph, len(tree_leaves(batch)[0])),
    )


class _Updates:
    """Appends the updates of states to a joint graph."""

    def __init__(self, joint: JointGraph, rule: StepRule, states: dict[str, Tensor]) -> None:
        self.joint, self.rule, self.states = joint, rule, states
        self.traced: dict[Any, fx.Graph] = {}
        self.mode = fake_mode([node.meta["val"] for node in joint.states.values()])

    def write(self, state: fx.Node, value: fx.Node) -> None:
        """Copy a buffer's new value into it."""
        made = self.joint.graph.call_function(aten.copy_.default, (state, value))
        made.meta |= {"val": state.meta["val"], "role": "update", "line": value.meta.get("line")}

    def step(self, number: int, group: Group, paths: list[str]) -> None:
        """Append the optimizer's step for the parameters ``paths`` of one of its groups."""
        scalars = self._scalars(number, group)
        for path in paths:
            parameter, gradient = self.joint.states[path], self.joint.gradients[path]
            slots = [
                self._state(f"{path}.{slot}", torch.zeros_like(self.states[parameter.name]))
                for slot in self.rule.slots(group)
            ]
            self._append(
                partial(_update, self.rule, group, len(slots)),
                [parameter, gradient, *slots, *scalars],
                (number, *(_layout(one) for one in (parameter, gradient))),
                beside=parameter,
            )
            for slot in slots:
                slot.meta["beside"] = parameter.name

    def _scalars(self, number: int, group: Group) -> list[fx.Node]:
        """The scalars of a group, and the step that they depend on."""
        if self.rule.scalars is None:
            return []
        step = self._state(f"optimizer.{number}.step", torch.zeros((), dtype=torch.float64))
        return self._append(partial(self.rule.scalars, group), [step], number)

    def _state(self, path: str, value: Tensor) -> fx.Node:
        with self.joint.graph.inserting_before(self.joint.inputs[0]):
            made = self.joint.graph.placeholder(identifier(path))
        fake = value if isinstance(value, FakeTensor) else self.mode.from_tensor(value)
        made.meta |= {"val": fake, "role": "state"}
        self.joint.states[path] = made
        self.states[made.name] = value
        return made

    def _append(
        self, function: Any, given: list[fx.Node], layout: Any, beside: fx.Node | None = None
    ) -> list[fx.Node]:
        """Append the operators of ``function``, which is traced once per layout of its tensors."""
        if layout not in self.traced:
            values = [node.meta["val"].detach() for node in given]
            with torch.no_grad():
                self.traced[layout] = make_fx(function)(*values).graph
        placed: dict[fx.Node, Any] = {}
        left = iter(given)
        for node in self.traced[layout].nodes:
            if node.op == "placeholder":
                placed[node] = next(left)
            elif node.op == "output":
                return [placed[one] for one in node.args[0] or ()]
            else:
                placed[node] = self.joint.graph.node_copy(node, placed.__getitem__)
                placed[node].meta = {"val": node.meta["val"], "role": "update"}
                if beside is not None:
                    placed[node].meta["beside"] = beside.name
        raise AssertionError("a graph ends with its output")


def _update(
    rule: StepRule, group: Group, slots: int, parameter: Tensor, gradient: Tensor, *others: Tensor
) -> None:
    rule.update(group, parameter, gradient, list(others[:slots]), list(others[slots:]))


def _layout(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta["val"]
    return tuple(value.shape), value.stride(), value.dtype
