"""Correct a profile by the measured times of a run."""

from dataclasses import dataclass, replace

from stagewright.executor.measuring.pairs import (
    BACKWARD,
    StageTimes,
    pair_actions,
    pair_entries,
)
from stagewright.executor.programs.trace import Trace
from stagewright.formulations.plans.actions import (
    ActionKind,
)
from stagewright.formulations.plans.plan import (
    PipelinePlan,
)
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.chain import Chain, LayerCost


def correct(chain: Chain, plan: PipelinePlan, trace: Trace) -> Chain:
    """``chain`` with compute times scaled to a run of ``plan``.

    A run measures stages, not layers: all forward times of a stage's layers (of all sizes and
    device kinds, at the stage's tensor degree) are multiplied by the stage's measured / predicted
    forward time, and likewise the backward times, by parts if the plan splits them, and the time
    of the optimizer step.
    """
    times = StageTimes(pair_actions(pair_entries(plan, trace)))
    _require_model(chain, plan)
    layers = []
    for s, stage in enumerate(plan.stages):
        factors = _Factors.of(s, times)
        layers += [
            replace(
                layer,
                costs=tuple(
                    factors.on(cost) if cost.degree == stage.tensor else cost
                    for cost in layer.costs
                ),
            )
            for layer in chain.layers[slice(*stage.layers)]
        ]
    source = f"{chain.source}, corrected by a measured run on {trace.machine}"
    return replace(chain, source=source, layers=tuple(layers))


def _require_model(chain: Chain, plan: PipelinePlan) -> None:
    starts = [stage.layers[0] for stage in plan.stages]
    stops = [stage.layers[1] for stage in plan.stages]
    if chain.name != plan.model or starts != [0, *stops[:-1]] or stops[-1] != len(chain):
        raise InputError(
            f"the plan cuts {plan.model!r} into layers up to {stops[-1]}, the model is "
            f"{chain.name!r} with {len(chain)} layers: give the model that was planned"
        )


@dataclass(frozen=True, slots=True)
class _Factors:
    """Measured / predicted for the parts of one stage's computations, and its update."""

    forward: float
    backward: float
    input_gradient: float
    weight_gradient: float
    update: float

    @classmethod
    def of(cls, s: int, times: StageTimes) -> "_Factors":
        def factor(*kinds: ActionKind, otherwise: float = 1.0) -> float:
            ratio = times.of(s, *kinds).ratio
            return otherwise if ratio is None else ratio

        backward = factor(*BACKWARD)
        return cls(
            factor(ActionKind.FORWARD),
            backward,
            factor(ActionKind.INPUT_GRADIENT, otherwise=backward),
            factor(ActionKind.WEIGHT_GRADIENT, otherwise=backward),
            factor(ActionKind.UPDATE),
        )

    def on(self, cost: LayerCost) -> LayerCost:
        return replace(
            cost,
            forward_seconds=cost.forward_seconds * self.forward,
            backward_seconds=_times(cost.backward_seconds, self.backward),
            input_gradient_seconds=_times(cost.input_gradient_seconds, self.input_gradient),
            weight_gradient_seconds=_times(cost.weight_gradient_seconds, self.weight_gradient),
            update_seconds=_times(cost.update_seconds, self.update),
        )


def _times(seconds: float | None, factor: float) -> float | None:
    return None if seconds is None else seconds * factor
