"""What training by a plan must give: the update equations, in one process, layer by layer.

Of the executor only the layers, the seeds, and who has which samples of the loss are used. Taken
for granted:

- A mini-batch is cut along dimension 0 into equal microbatches, in order. The loss is a mean over
  samples; where a microbatch is split, each device's mean is weighted by its share of them. Or it
  is a sum and its count, and an update is by the sums' gradient over all that it is made of.
- Under ``flush`` and ``double-buffer`` a step is one update by the mean of the microbatches'
  gradients. Under ``stash`` every microbatch is an update of its own, in the order in which the
  stage ends its backwards, and a step begins when all updates of the last one are done.
- Version v of a stage is what its first v updates made, whichever microbatches they were of.
- The optimizer treats every number on its own, as SGD and Adam do, and leaves a parameter without
  a gradient alone.
- What a layer draws for a sample is what it draws for it in the whole microbatch.
- Buffers are constant: running statistics depend on the order of the forwards and are refused.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.capture.tracing import capture
from stagewright.executor.programs.program import rows
from stagewright.executor.training.stages.weights import layer_seed
from stagewright.formulations.plans.actions import (
    COMPUTE,
    Action,
    ActionKind,
    parse_action,
    parse_operation,
)
from stagewright.formulations.plans.plan import PeriodicSchedule, PipelinePlan

Values = tuple[Tensor, ...]
Gradients = Mapping[str, Tensor | None]
Optimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Trained:
    """The state after the last step under the module's own names, and each step's mean loss."""

    state: dict[str, Tensor]
    losses: tuple[float, ...]


def train(
    plan: PipelinePlan,
    model: nn.Module | Sequence[nn.Module],
    batches: Iterable[tuple[Tensor | Values, Tensor]],
    loss: Callable[..., Tensor],
    optimizer: Optimizer,
    seed: int = 0,
    clip_norm: float | None = None,
    drains: Collection[int] = (),
) -> Trained:
    """Do one step of ``plan`` per mini-batch (inputs, targets); ``model`` is left as it is.

    Where weights change after every microbatch, a periodic plan drains after the steps ``drains``:
    what it does in between is one step of a longer plan.
    """
    batches, count = list(batches), plan.microbatches
    captured = capture(deepcopy(model))
    pieces = _Pieces(captured)
    if len(pieces.layers) != plan.stages[-1].layers[1]:
        raise ValueError(f"{len(pieces.layers)} layers, but the plan ends with {plan.stages[-1]}")
    runs_on = plan.is_periodic and plan.weights.startswith("stash")
    ends = (*drains, len(batches) - 1) if runs_on else range(len(batches))
    of_rules = pieces.units(plan, len(update_rules(plan, count)))
    units = [_Versions(weights, optimizer, clip_norm) for weights in of_rules]
    losses = []
    with torch.random.fork_rng(devices=[]):
        for first, stop in pairwise([0, *sorted({i + 1 for i in ends})]):
            rules = update_rules(plan, (stop - first) * count)
            microbatches = [one for batch in batches[first:stop] for one in _cut(batch, count)]
            seed_of = partial(_seed_of, seed, first, count)
            loss_at = partial(pieces.loss, plan, loss, microbatches, seed_of)
            found = _step(units, rules, loss_at)
            losses += [_mean(found[m : m + count]) for m in range(0, len(found), count)]
    newest = {key: value for unit in units for key, value in unit.made[-1].items()}
    return Trained(pieces.state(newest), tuple(losses))


def _cut(batch: tuple[Tensor | Values, Tensor], microbatches: int) -> list[tuple[Values, Tensor]]:
    inputs, targets = batch
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    if len(targets) % microbatches:
        raise ValueError(f"{len(targets)} samples, {microbatches} microbatches")
    cut = [x.tensor_split(microbatches) for x in (*inputs, targets)]
    return [(x[:-1], x[-1]) for x in zip(*cut, strict=True)]


def _seed_of(seed: int, first: int, count: int, m: int, layer: int) -> int:
    """Of a microbatch that is counted from step ``first`` on."""
    return layer_seed(seed, first + m // count, m % count, layer)


def _mean(losses: Sequence[tuple[float, float]]) -> float:
    return sum(one for one, _ in losses) / sum(count for _, count in losses)


# --- Which version of the weights each microbatch uses, and what makes the next one -------------


@dataclass(frozen=True, slots=True)
class Rule:
    """How some parameters change in a step.

    Microbatch m uses version ``used[m]``, where 0 is the newest at the start of the step and -1
    the one before it. The i-th new version is made by the mean gradient of ``rounds[i]``.
    """

    used: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...]


def update_rules(plan: PipelinePlan, microbatches: int | None = None) -> tuple[Rule, ...]:
    """One rule for all parameters, or one per stage if the weights are stashed.

    A periodic plan that stashes weights has as many ``microbatches`` as are asked for.
    """
    count = plan.microbatches if microbatches is None else microbatches
    every = tuple(range(plan.microbatches))
    if plan.weights == "flush":
        return (Rule((0,) * len(every), (every,)),)
    if plan.weights == "double-buffer":
        return (Rule((-1,) * len(every), (every,)),)
    rules = tuple(_stashing(plan, s, count) for s in range(len(plan.stages)))
    return _synchronised(rules) if plan.weights == "stash+vertical-sync" else rules


def _stashing(plan: PipelinePlan, s: int, microbatches: int) -> Rule:
    """A forward uses what the backwards (or weight gradients) before it on its device have made."""
    stage = plan.stages[s]
    if stage.runners(0) != stage.devices:
        raise ValueError(f"stage {s}: which forwards see the update of a round of turns is open")
    rules = {_in_order(plan, s, device, microbatches) for device in stage.devices}
    if len(rules) > 1:
        raise ValueError(f"stage {s}: its devices stand in different orders")
    return rules.pop()


def _in_order(plan: PipelinePlan, s: int, device: str, microbatches: int) -> Rule:
    used: dict[int, int] = {}
    updates: list[int] = []
    for _, _, action in sorted(_on(plan, device, microbatches), key=lambda one: one[:2]):
        if action.stage != s or action.kind not in COMPUTE:
            continue
        assert action.microbatch is not None
        if action.kind is ActionKind.FORWARD:
            used[action.microbatch] = len(updates)
        elif action.kind is not ActionKind.INPUT_GRADIENT:
            updates.append(action.microbatch)
    return Rule(tuple(used[m] for m in sorted(used)), tuple((m,) for m in updates))


def _on(
    plan: PipelinePlan, device: str, microbatches: int
) -> Iterator[tuple[float, float, Action]]:
    """Start and finish of all actions on a device."""
    if not isinstance(plan.schedule, PeriodicSchedule):
        for entry in plan.actions:
            if entry.device == device:
                yield entry.start_seconds, entry.finish_seconds, parse_action(entry.action)
        return
    for one in plan.schedule.actions:
        for m in range(microbatches if one.device == device else 0):
            start = one.start_seconds + (one.shift + m) * plan.schedule.period_seconds
            yield start, start + one.seconds, parse_operation(one.action).of(m)


def _synchronised(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Every stage uses the version that the first stage uses for the same microbatch."""
    first = rules[0].used
    for s, rule in enumerate(rules):
        if late := [m for m, version in enumerate(first) if version > rule.used[m]]:
            raise ValueError(f"stage {s} has not yet the version of the first for {late}")
    return tuple(Rule(first, rule.rounds) for rule in rules)


# --- A step: gradients at given versions, and the updates that they make ------------------------


class _Versions:
    """W(0), W(1), ... of some parameters, by the optimizer's steps on a plain copy."""

    def __init__(
        self, weights: Mapping[str, Tensor], optimizer: Optimizer, clip_norm: float | None
    ) -> None:
        self._clip_norm = clip_norm
        self._newest = {key: value.detach().clone() for key, value in weights.items()}
        self._optimizer = optimizer(list(self._newest.values())) if weights else None
        self.made = [self._copy()]

    def update(self, gradients: Gradients) -> None:
        for key, value in self._newest.items():
            value.grad = gradients[key]
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._newest.values(), self._clip_norm)
        if self._optimizer:
            self._optimizer.step()
        self.made.append(self._copy())

    def _copy(self) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in self._newest.items()}


def _step(
    units: Sequence[_Versions],
    rules: Sequence[Rule],
    loss_at: Callable[[Mapping[str, Tensor], int], tuple[Tensor, float]],
) -> list[tuple[float, float]]:
    """Make all new versions of a step; per microbatch the loss, and what it counts.

    A gradient needs the versions that its microbatch uses, and those need the gradients that made
    them: two recursions that call each other.
    """
    newest = [len(unit.made) - 1 for unit in units]

    @cache
    def gradient(m: int) -> tuple[float, float, Gradients]:
        weights: dict[str, Tensor] = {}
        for u, rule in enumerate(rules):
            weights |= version(u, max(0, newest[u] + rule.used[m]))
        weights = {key: value.clone().requires_grad_() for key, value in weights.items()}
        loss, count = loss_at(weights, m)
        found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        return loss.item(), count, dict(zip(weights, found, strict=True))

    def version(u: int, number: int) -> dict[str, Tensor]:
        unit = units[u]
        while len(unit.made) <= number:
            turn = rules[u].rounds[len(unit.made) - 1 - newest[u]]
            count = sum(gradient(m)[1] for m in turn)
            unit.update(_quotient([gradient(m)[2] for m in turn], count or 1.0))
        return unit.made[number]

    for u, rule in enumerate(rules):
        version(u, newest[u] + len(rule.rounds))
    return [gradient(m)[:2] for m in range(len(rules[0].used))]


def _quotient(gradients: Sequence[Gradients], count: float) -> Gradients:
    found: dict[str, Tensor | None] = {}
    for key in gradients[0]:
        given = [g for gradient in gradients if (g := gradient[key]) is not None]
        found[key] = torch.stack(given).sum(0) / count if given else None
    return found


# --- A forward pass, layer by layer ------------------------------------------------------------


class _Pieces:
    """The layers of a model; a parameter goes by the first of its names."""

    def __init__(self, captured: LayeredModel) -> None:
        self.layers = layers = [layer.module for layer in captured.layers]
        self._captured = captured
        self._key: dict[int, str] = {}
        self._trained: list[dict[str, nn.Parameter]] = []
        for layer in layers:
            named = dict(layer.named_parameters(remove_duplicate=False))
            self._trained.append({name: p for name, p in named.items() if p.requires_grad})
            for name, parameter in self._trained[-1].items():
                self._key.setdefault(id(parameter), name)
        self._buffers = [buffer.clone() for layer in layers for buffer in layer.buffers()]

    def units(self, plan: PipelinePlan, count: int) -> list[dict[str, Tensor]]:
        """The trained parameters of each of ``count`` rules: of the whole model, or of a stage."""
        if count == 1:
            return [self._of(range(len(self.layers)))]
        found = [self._of(range(*stage.layers)) for stage in plan.stages]
        keys = [key for unit in found for key in unit]
        if tied := {key for key in keys if keys.count(key) > 1}:
            raise ValueError(f"{sorted(tied)} belong to several stages that update by themselves")
        return found

    def _of(self, layers: Iterable[int]) -> dict[str, Tensor]:
        return {self._key[id(p)]: p for i in layers for p in self._trained[i].values()}

    def state(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole state with ``weights`` in place of the trained parameters."""
        buffers = [buffer for layer in self.layers for buffer in layer.buffers()]
        if not all(map(torch.equal, buffers, self._buffers)):
            raise ValueError("a buffer has changed; running statistics are not modelled")
        return {
            name: weights[self._key[id(value)]] if id(value) in self._key else value.detach()
            for layer in self.layers
            for name, value in layer.state_dict(keep_vars=True).items()
        }

    def loss(
        self,
        plan: PipelinePlan,
        loss: Callable[..., Tensor],
        microbatches: Sequence[tuple[Values, Tensor]],
        seed_of: Callable[[int, int], int],
        weights: Mapping[str, Tensor],
        m: int,
    ) -> tuple[Tensor, float]:
        """The loss of microbatch m and what it counts, 1 where it is a mean.

        ``seed_of(m, layer)`` stands before every layer. Who works on which samples changes nothing
        but of what the loss is a mean.
        """
        values, targets = microbatches[m]
        samples = len(targets)
        for i in range(len(self.layers)):
            torch.manual_seed(seed_of(m, i))
            values = self._call(i, weights, values)
        shares, count = [], 0.0
        for own in rows(plan, samples)[-1]:
            out = tuple(_take(value, own, samples) for value in values)
            whole = self._captured.result(out)
            found = loss(whole, _take(targets, own, samples))
            if isinstance(found, tuple):
                shares.append(found[0])
                count += float(found[1])
            else:
                shares.append(found * len(own) / samples)
                count += len(own) / samples
        return torch.stack(shares).sum(), count

    def _call(self, i: int, weights: Mapping[str, Tensor], values: Values) -> Values:
        own = {name: weights[self._key[id(p)]] for name, p in self._trained[i].items()}
        made: Values = functional_call(self.layers[i], own, values)
        return made


def _take(value: Tensor, own: tuple[int, ...], samples: int) -> Tensor:
    if own == tuple(range(samples)):
        return value
    if value.dim() == 0 or len(value) != samples:
        raise ValueError(f"a value of shape {tuple(value.shape)} has no rows for {samples} samples")
    return value[list(own)]
