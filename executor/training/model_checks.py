"""Requirements of a plan on the model that it trains."""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from math import isfinite

import torch
from torch import Tensor

from stagewright.executor.capture.layers import CapturedLayer, LayeredModel
from stagewright.executor.capture.shapes import LayerTrace
from stagewright.executor.programs.program import plan_devices
from stagewright.executor.training.sharding.sharding import is_divided
from stagewright.executor.training.stages.learning_rates import parts_of
from stagewright.formulations.plans.actions import FLUSH, B, parse_action
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.plans.shards import share_count
from stagewright.graphs.documents.errors import InputError, Notice

_CLIPPING_ARGUMENT = re.compile(r"max_(grad_)?norm|.*(grad|norm).*clip.*|.*clip.*(grad|norm).*")


def require_trainable(
    plan: PipelinePlan,
    clip_norm: float | None,
    accumulate: int,
    *,
    compiled: bool,
    traced: bool,
    scaled: bool,
) -> None:
    """Refuse what the plan of a pipeline cannot be trained with, before a model is made."""
    require_clip_norm(plan, clip_norm)
    require_run_divided(plan, compiled=compiled)
    require_accumulated(plan, accumulate, traced=traced)
    if scaled:
        require_flushed(plan, "a scaled loss (dtype float16)")


def require_clip_norm(plan: PipelinePlan, clip_norm: float | None) -> None:
    """Refuse an invalid norm, and any for weights that are updated stage by stage."""
    if clip_norm is None:
        return
    if not (isfinite(clip_norm) and clip_norm > 0):
        raise InputError(f"clip_norm must be a positive number, got {clip_norm:g}")
    if plan.weight_rule.updates_every_round:
        raise InputError(
            f"clip_norm needs a step of the whole model: with {plan.weights!r} weights every stage "
            "updates at different times; plan with 'flush' weights"
        )
    if plan.is_backward_first:
        raise InputError(
            "clip_norm needs all gradients before the first update: in a plan that begins with the "
            "backwards the forwards of a stage wait for its own; plan one that begins with the "
            "forwards"
        )


def require_accumulated(plan: PipelinePlan, accumulate: int, *, traced: bool) -> None:
    """Refuse accumulation over mini-batches for plans in which each mini-batch has updates."""
    if accumulate < 1:
        raise InputError(f"accumulate must be a number of mini-batches from 1 on, got {accumulate}")
    if accumulate == 1:
        return
    require_flushed(plan, "accumulate")
    if traced:
        raise InputError(
            "accumulate: most mini-batches have no update to trace; leave one of the two out"
        )


def require_flushed(plan: PipelinePlan, what: str) -> None:
    """Refuse ``what`` for plans in which a mini-batch has several updates, or overlaps others."""
    if plan.spans_steps or plan.weight_rule != FLUSH:
        begins = " and begins with the backwards" if plan.is_backward_first else ""
        raise InputError(
            f"{what} needs a finite plan with 'flush' weights that begins with the forwards; "
            f"this one has {plan.weights!r}{begins}"
        )


def warn_of_divided_loss(plan: PipelinePlan) -> None:
    """Say that a model's own loss of a microbatch is computed part by part by ``plan``."""
    if share_count(plan.stages[-1]) > 1:
        warnings.warn(
            "the last stage divides every microbatch among its replicas, so that the model's own "
            "loss is the mean of those of the parts: as of the whole if it is a mean over samples, "
            "another if samples have unequal numbers of labels or are compared; plan replicas that "
            "take whole microbatches (round-robin), or give a loss that returns (sum, count)",
            Notice,
            stacklevel=3,
        )


def require_run_divided(plan: PipelinePlan, *, compiled: bool) -> None:
    """Refuse what does not work with stages of a tensor degree above 1, or that divide states."""
    for s, stage in enumerate(plan.stages):
        found = [f"tensor degree {stage.tensor}"] if stage.tensor > 1 else []
        found += [f"shards {stage.shards!r}"] if stage.shards != "none" else []
        if not found:
            continue
        where = f"stage {s} has {found[-1]}"
        if plan.spans_steps or plan.weight_rule != FLUSH:
            raise InputError(
                f"{where}, which is run only by finite plans that begin with the forwards and have "
                f"'flush' weights; this one has {plan.weights!r}"
                + (" and begins with the backwards" if plan.is_backward_first else "")
            )
        # Of layers that have a record of autograd each.
        alone = stage.shards in ("gradients", "weights")
        if stage.offload and (stage.tensor > 1 or alone):
            raise InputError(f"{where} and offloads, which is not run together; recompute instead")
        if compiled and alone:
            raise InputError(f"{where}, whose layers are not compiled; leave out compile")


def require_not_divided(
    plan: PipelinePlan, tied: Sequence[str], stages_of: Mapping[str, Sequence[int]]
) -> None:
    """Refuse parameters that a stage, of which every device has a part, shares with another."""
    for name in tied:
        for s in stages_of[name]:
            stage = plan.stages[s]
            has, plain = f"tensor degree {stage.tensor}", "tensor degree 1 for them"
            if stage.shards != "none":
                has, plain = f"shards {stage.shards!r}", "them without shards"
            elif stage.tensor == 1:
                continue
            raise InputError(
                f"parameter {name!r} is shared by stages {listed_stages(stages_of[name])}, of "
                f"which {s} has {has}; put its layers into one stage, or plan {plain}"
            )


def require_no_divided_draws(
    where: str, layers: Iterable[CapturedLayer], trace: Sequence[LayerTrace]
) -> None:
    """Refuse divided layers that draw random numbers: each device draws for its own.

    ``where`` names the layers together, such as "stage 0".
    """
    for layer, found in zip(layers, trace, strict=True):
        if is_divided(layer) and found.random:
            raise InputError(
                f"layer {layer.name!r} draws random numbers and is divided among the devices of "
                f"{where}, which would draw others than one device; set its dropout to 0, or "
                "plan tensor degree 1"
            )


def require_same_model(plan: PipelinePlan, model: LayeredModel) -> None:
    """The model's layers are those that were planned: their number, names and sizes."""
    count = plan.stages[-1].layers[1]
    if len(model.layers) != count:
        names = ", ".join(layer.name for layer in model.layers)
        raise InputError(f"the plan has {count} layers, the model {len(model.layers)}: {names}")
    sizes = set()
    for i, (planned, layer) in enumerate(zip(plan.layers or (), model.layers, strict=False)):
        if planned.name != layer.name:
            raise InputError(
                f"layer {i} is {planned.name!r} in the plan, {layer.name!r} in the model"
            )
        numbers = sum(one.numel() for one in layer.module.parameters())
        if (planned.parameter_bytes > 0) != (numbers > 0):
            raise _other_size(i, planned.name, planned.parameter_bytes, numbers)
        if numbers:
            sizes.add(planned.parameter_bytes / numbers)
            # The plan assumes one type for all layers, whichever it is.
            if len(sizes) > 1:
                raise _other_size(i, planned.name, planned.parameter_bytes, numbers)


def _other_size(i: int, name: str, planned_bytes: float, numbers: int) -> InputError:
    return InputError(
        f"layer {i}, {name!r}, has {planned_bytes:.0f} bytes of parameters in the plan and "
        f"{numbers} parameters in the model"
    )


def require_sharing(
    plan: PipelinePlan, tied: Sequence[str], stages_of: Mapping[str, Sequence[int]], *, clips: bool
) -> None:
    """Refuse parameters that stages cannot share under ``plan``; ``clips``: by a common norm."""
    require_updated_together(plan, tied, stages_of)
    require_not_divided(plan, tied, stages_of)
    if clips and plan.is_periodic:
        require_not_shared(tied, stages_of)


def require_updated_together(
    plan: PipelinePlan, tied: Sequence[str], stages_of: Mapping[str, Sequence[int]]
) -> None:
    """Refuse stages that share a parameter and update it at different times."""
    how = repr(plan.weights)
    if plan.is_backward_first:
        how = "a schedule that begins with the backwards"
    elif not plan.weight_rule.updates_every_round:
        return
    for name in tied:
        raise InputError(
            f"parameter {name!r} is shared by stages {listed_stages(stages_of[name])}, which with "
            f"{how} update it at different times; put its layers into one stage"
        )


def require_not_shared(tied: Sequence[str], stages_of: Mapping[str, Sequence[int]]) -> None:
    """Refuse shared parameters where a periodic plan clips gradients."""
    for name in tied:
        raise InputError(
            f"clip_norm: parameter {name!r} is shared by stages {listed_stages(stages_of[name])} "
            "of a periodic plan, where its gradient is not known in time; put its layers into one "
            "stage"
        )


def require_capturable(plan: PipelinePlan, device: torch.device, *, traced: bool) -> None:
    """Refuse to capture the windows of a plan that has none, or that a graph cannot replay."""
    require_windows(plan)
    if device.type != "cuda":
        raise InputError(f"graph captures work of a GPU, this rank computes on {device}")
    if traced:
        raise InputError("graph: a replayed window has no times to trace; leave one of the two out")


def require_windows(plan: PipelinePlan) -> None:
    """Refuse plans other than those of one device between two losses, every backward in two."""
    if not plan.is_backward_first or len(plan_devices(plan)) > 1:
        raise InputError(
            "graph captures the window of a plan that begins with the backwards and has one device"
        )
    for one in plan.actions:
        if parse_action(one.action).kind is B:
            raise InputError(
                f"graph needs every backward as I and W, the plan has the whole {one.action}"
            )


def require_capturable_steps(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that count their steps on the host."""
    for one in optimizers:
        if any(group.get("capturable") is False for group in one.param_groups):
            raise InputError(
                f"graph: {type(one).__name__} counts its steps on the host; give capturable=True"
            )


def require_no_draws(layers: Sequence[CapturedLayer], trace: Sequence[LayerTrace]) -> None:
    """Refuse layers whose draws every replay of a graph would repeat."""
    for i, (layer, found) in enumerate(zip(layers, trace, strict=True)):
        if found.random:
            raise InputError(
                f"graph: layer {i} (module {layer.name}) draws random numbers, which every replay "
                "would repeat"
            )


def require_whole_gradients(
    plan: PipelinePlan, model: LayeredModel, stages_of: Mapping[str, Sequence[int]]
) -> None:
    """Refuse hooks on parameters of split stages."""
    for names, one in model.parameters_by_name().items():
        for s in stages_of[names[0]] if one._backward_hooks else ():
            if len(plan.stages[s].runners(0)) > 1:
                raise InputError(
                    f"parameter {names[0]!r} has a hook, which each of the devices that split the "
                    f"microbatches of stage {s} would call with a part of the gradient; remove it"
                )


def listed_stages(stages: Sequence[int]) -> str:
    """Stages in words."""
    return " and ".join(map(str, stages))


def require_joint_steps(
    plan: PipelinePlan, optimizers: Iterable[torch.optim.Optimizer | None]
) -> None:
    """Refuse optimizers that need whole tensors or all gradients at once for their step.

    They clip by the gradients of one device, or treat a parameter that is divided as a whole.
    """
    cuts = {
        cut
        for stage in plan.stages
        for cut, is_made in ((_rows, stage.tensor > 1), (_numbers, stage.shards != "none"))
        if is_made
    }
    if len(plan.stages) == 1 and not cuts:
        return
    for one in chain.from_iterable(parts_of(one) for one in optimizers if one is not None):
        name = clips_by_itself(one)
        if name:
            raise InputError(
                f"the optimizer {name} clips by the norm of one device's gradients alone; give "
                "one that does not, and clip_norm for that of all"
            )
        if any(_needs_whole_tensors(one, cut) for cut in cuts):
            raise InputError(
                f"the optimizer {type(one).__name__} steps otherwise on a part of a parameter than "
                "on the whole: give one that treats every number alone, or plan tensor degree 1 "
                "and no shards"
            )


Cut = Callable[[Tensor], tuple[Tensor, ...]]


def _rows(matrix: Tensor) -> tuple[Tensor, ...]:
    """The halves of a tensor degree."""
    return matrix.chunk(2)


def _numbers(matrix: Tensor) -> tuple[Tensor, ...]:
    """Unequal parts of a matrix's numbers in memory order, as replicas may have."""
    return tuple(torch.split(matrix.flatten(), [2300, matrix.numel() - 2300]))


def _needs_whole_tensors(optimizer: torch.optim.Optimizer, cut: Cut) -> bool:
    """Whether steps on the parts of a matrix differ from those on the matrix.

    False if the latter cannot be tried: the class makes no optimizer of its defaults.
    """
    try:
        whole = _stepped(optimizer, lambda one: (one,))
    except (TypeError, ValueError):
        return False
    try:
        parts = _stepped(optimizer, cut)
    except (TypeError, ValueError):
        return True
    return not torch.allclose(whole, parts, rtol=1e-9, atol=1e-12)


def _stepped(optimizer: torch.optim.Optimizer, cut: Cut) -> Tensor:
    """The numbers of a matrix after two steps of an optimizer of the same class on its parts."""
    every = (one.device for group in optimizer.param_groups for one in group["params"])
    device = next(every, "cpu")
    # So many that optimizers with states in 8 bits keep them in blocks, of parts other ones.
    numbers = torch.arange(1.0, 6145.0, dtype=torch.float64, device=device).view(64, 96)
    own = [torch.nn.Parameter(one.clone()) for one in cut(numbers.sin())]
    same = type(optimizer)(own, **optimizer.defaults)
    for factor in (3, 5):
        for one, gradient in zip(own, cut((factor * numbers).cos()), strict=True):
            one.grad = gradient.clone()
        same.step()
    return torch.cat([one.detach().flatten() for one in own])


def clips_by_itself(optimizer: torch.optim.Optimizer) -> str | None:
    """The argument or class by which an optimizer clips gradients by a norm, if it does."""
    name = type(optimizer).__name__
    groups = chain.from_iterable(group.items() for group in optimizer.param_groups)
    for key, value in chain(optimizer.defaults.items(), groups):
        if _CLIPPING_ARGUMENT.fullmatch(key) and value:
            return f"{name} with {key}={value}"
    clipping = (one.__name__ for one in type(optimizer).__mro__ if "clip" in one.__name__.lower())
    return next(clipping, None)
