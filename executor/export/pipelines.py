"""A plan as a framework's pipeline: ranks that run whole stages, and replicas of the pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from stagewright.executor.programs.lower import lower
from stagewright.executor.programs.verification.verify import verify
from stagewright.formulations.plans.actions import COMPUTE, FLUSH
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.plans.plan_class import Shards
from stagewright.formulations.plans.shards import require_no_shards, require_whole_stages
from stagewright.formulations.schedules.order import Row
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import counted


@dataclass(frozen=True, slots=True)
class Pipeline:
    """``devices[p]`` are the replicas of rank p, ``rank_of_stage[s]`` is the rank of stage s.

    ``shards`` is what the replicas of every stage divide.
    """

    devices: tuple[tuple[str, ...], ...]
    rank_of_stage: tuple[int, ...]
    shards: Shards = "none"

    @property
    def replicas(self) -> int:
        """Number of replicas of the whole pipeline."""
        return len(self.devices[0])

    @property
    def is_loop(self) -> bool:
        """Whether stage s is on rank s mod the number of ranks, and ranks have equal numbers."""
        ranks, stages = len(self.devices), len(self.rank_of_stage)
        return stages % ranks == 0 and all(p == s % ranks for s, p in enumerate(self.rank_of_stage))


def pipeline(plan: PipelinePlan, framework: str, shards: Shards = "none") -> Pipeline:
    """The pipeline of a plan; ``shards`` is what a framework's replicas may divide, if anything.

    Raises InputError if the plan spans steps, its stages have different replication, a tensor
    degree or shards, or stages share only some of their devices.
    """
    _require_whole_iterations(plan, framework)
    require_whole_stages(
        plan.stages,
        f"the files for {framework} do not say how layers are divided",
        "export a plan of degree 1, and give the framework its own tensor parallelism",
    )
    first = plan.stages[0]
    if {stage.shards for stage in plan.stages} != {shards}:
        require_no_shards(plan.stages, *_cure(framework, shards))
    for s, stage in enumerate(plan.stages):
        count = len(stage.devices)
        if count != len(first.devices):
            raise InputError(
                f"stage {s} is on {counted(count, 'device', 'devices')}, stage 0 on "
                f"{len(first.devices)}: {framework} replicates the whole pipeline; "
                "plan with --for, which makes such stages"
            )
        if count > 1 and stage.replication == "round-robin":
            raise InputError(
                f"stage {s}: its {count} devices take microbatches in turn (round-robin); "
                f"{framework} splits every microbatch"
            )
    groups = tuple(dict.fromkeys(stage.devices for stage in plan.stages))
    seen: dict[str, int] = {}
    for s, stage in enumerate(plan.stages):
        for name in stage.devices:
            t = seen.setdefault(name, s)
            if plan.stages[t].devices != stage.devices:
                raise InputError(
                    f"stages {t} and {s} share device {name!r} but not all devices in one order: "
                    f"{framework} has one rank of the pipeline on each group of devices"
                )
    places = tuple(groups.index(stage.devices) for stage in plan.stages)
    return Pipeline(groups, places, first.shards)


def _cure(framework: str, shards: Shards) -> tuple[str, str]:
    """Why ``framework`` cannot shard what the plan shards, and a remedy."""
    if shards == "none":
        return (
            f"the files for {framework} do not say how replicas divide it",
            "export a plan without shards, and give the framework its own ZeRO or FSDP",
        )
    return (
        f"the files for {framework} divide nothing, or {shards} in all stages",
        f"plan shards 'none' or {shards!r} for all stages",
    )


def _require_whole_iterations(plan: PipelinePlan, framework: str) -> None:
    """Refuse plans of which a mini-batch ends in a later step than it begins."""
    if plan.is_periodic:
        raise InputError(
            f"the plan is periodic: its pipeline never drains and its weights have several "
            f"versions, but {framework} drains before every update; export a plan with a finite "
            "schedule and weights 'flush'"
        )
    if plan.is_backward_first:
        raise InputError(
            "the plan begins with the backwards: a stage's next forwards wait for its own update "
            f"only, but {framework} updates all stages at the end of an iteration; export a plan "
            "that begins with the forwards"
        )


def require_plain(plan: PipelinePlan, framework: str, *, recompute: bool = False) -> None:
    """Refuse weight rules other than flush and, unless ``recompute``, recomputation."""
    if plan.weight_rule != FLUSH:
        raise InputError(
            f"weights {plan.weights!r}: {framework} updates once per iteration; plan with 'flush'"
        )
    for s, stage in enumerate(plan.stages):
        if stage.recompute != "none" and not recompute:
            raise InputError(
                f"stage {s} recomputes ({stage.recompute!r}), which {framework} cannot "
                "do for single stages; plan without recomputation"
            )
        if stage.offload:
            raise InputError(f"stage {s} offloads, which {framework} cannot do; plan without")


def orders(plan: PipelinePlan, ranks: Pipeline) -> tuple[Row, ...]:
    """Each rank's computations in order, which must be the same on all its replicas.

    Raises InvalidPlan if computations are missing or the order is a deadlock.
    """
    of_device = _verified(replace(plan, predicted=None, certificate=None))  # without dicts
    for group in ranks.devices:
        for name in group[1:]:
            require_order(
                [of_device[name]],
                [of_device[group[0]]],
                f"its replica {group[0]!r}",
                "replicas need the same order",
            )
    return tuple(of_device[group[0]] for group in ranks.devices)


@lru_cache(maxsize=1)  # a plan is exported to one framework after the other
def _verified(plan: PipelinePlan) -> dict[str, Row]:
    """Each device's computations in order, by a program that carries out the plan."""
    program = lower(plan)
    verify(plan, program)
    return {
        name: tuple(one.action for one in row if one.action.kind in COMPUTE)
        for name, row in zip(program.devices, program.rows, strict=True)
    }


def require_order(
    found: Sequence[Row],
    known: Sequence[Row],
    whose: str,
    cure: str = "--partition-only exports only the stages",
) -> None:
    """Refuse an order other than ``known``, with the first rank and position that differ."""
    for rank, (row, wanted) in enumerate(zip(found, known, strict=True)):
        # Rows of different length already differ earlier, by I and W in place of B.
        for position, (action, other) in enumerate(zip(row, wanted, strict=False)):
            if action != other:
                raise InputError(
                    f"rank {rank}, position {position}: the plan does {action}, {whose} {other}; "
                    f"{cure}"
                )
