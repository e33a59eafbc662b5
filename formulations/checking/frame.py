"""Rules on the stages: the plan answers this problem, and its stages cover the layers."""

from collections import Counter
from collections.abc import Iterator, Sequence

from stagewright.formulations.checking.order import Violation
from stagewright.formulations.checking.times import devices_by_lanes
from stagewright.formulations.plans.actions import FLUSH, WEIGHT_RULES, W, parse_action
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Schedule, Stage
from stagewright.formulations.plans.plan_class import RECOMPUTE, REPLICATION, SHARDS
from stagewright.formulations.plans.shards import groups_of, share_count
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.sharding import require_degree


def broken_frame(problem: PipelineProblem, plan: PipelinePlan) -> Iterator[Violation]:
    """The plan answers this problem, and its stages tile the layers on the cluster's devices."""
    if not plan.answers(problem.digest):
        yield Violation(
            "digest", "digest", "the plan answers another model, cluster or number of microbatches"
        )
    if plan.microbatches != problem.microbatches:
        yield Violation(
            "microbatches",
            "microbatches",
            f"the plan has {plan.microbatches}, the problem {problem.microbatches}",
        )
    for source, name in (
        ("cluster", "message_seconds"),
        ("cluster", "message_bytes_per_second"),
        ("chain", "reference_seconds"),
    ):
        told, known = getattr(plan, name), getattr(getattr(problem, source), name)
        if told != known:
            yield Violation(name, name, f"the plan has {told}, the problem {known}")
    yield from _broken_weights(plan)
    yield from _broken_streams(plan)
    if plan.is_backward_first:
        yield from _broken_between_losses(plan)
    yield from _broken_shards(plan)
    yield from _broken_layers(problem, plan)
    yield from _broken_cover(problem, plan.stages)
    yield from _broken_placement(problem, plan.stages)


def _broken_weights(plan: PipelinePlan) -> Iterator[Violation]:
    if plan.weights not in WEIGHT_RULES:
        known = ", ".join(map(repr, WEIGHT_RULES))
        yield Violation("weights", "weights", f"{plan.weights!r} is not known, use one of {known}")
        return
    for s, stage in enumerate(plan.stages):
        if plan.weight_rule.updates_every_round and stage.turns > 1:
            yield Violation(
                "weights",
                f"stage {s}",
                f"{plan.weights!r} on {stage.turns} devices in turn needs an all-reduce per "
                "round, which is not planned: use 'split', or 'flush'",
            )


def _broken_streams(plan: PipelinePlan) -> Iterator[Violation]:
    """Only weight gradients between two losses can be in a sub-stream."""
    if not isinstance(plan.schedule, Schedule):
        return
    for one in plan.schedule.actions:
        if one.stream == "sub" and (
            not plan.is_backward_first or parse_action(one.action).kind is not W
        ):
            yield Violation(
                "stream",
                f"{one.action} on {one.device}",
                "is in the sub-stream: only weight gradients can be, and only in a schedule "
                "that begins with the backwards",
            )
    if plan.uses_two_streams:
        yield from _broken_shared_streams(plan)


def _broken_shared_streams(plan: PipelinePlan) -> Iterator[Violation]:
    """Devices that split a weight gradient in their sub-streams run the same stages.

    Else the same weight gradient would run beside different computations, at different speeds.
    """
    alike = devices_by_lanes(plan.stages)
    of = {name: lanes for lanes, names in alike.items() for name in names}
    for one in plan.actions:
        if one.stream != "sub":
            continue
        action = parse_action(one.action)
        if not (action.stage < len(plan.stages) and one.device in of):
            continue  # not an action of this plan
        group = plan.stages[action.stage].runners(action.microbatch or 0)
        if any(of[name] != of[one.device] for name in group):
            yield Violation(
                "stream",
                f"{one.action} on {one.device}",
                f"is in the sub-stream, and not all devices that split it run the same stages: "
                f"{', '.join(group)}",
            )


def _broken_between_losses(plan: PipelinePlan) -> Iterator[Violation]:
    """Violations by features of a plan that a schedule between two losses excludes."""
    if plan.weight_rule != FLUSH:
        yield Violation(
            "weights",
            "weights",
            f"{plan.weights!r}: in a schedule that begins with the backwards each forward uses the "
            "weights of the update before it, which is 'flush'",
        )
    for s, stage in enumerate(plan.stages):
        if stage.offload:
            yield Violation(
                "offload",
                f"stage {s}",
                "activations would move to the host across the loss, where a schedule that begins "
                "with the backwards is cut: do not offload, or begin with the forwards",
            )


def _broken_shards(plan: PipelinePlan) -> Iterator[Violation]:
    """Replicas divide their state only where iterations follow one another, with one version."""
    for s, stage in enumerate(plan.stages):
        if stage.shards not in SHARDS:
            yield Violation("shards", f"stage {s}", f"shards {stage.shards!r}")
        elif stage.shards != "none" and (plan.spans_steps or plan.weight_rule != FLUSH):
            yield Violation(
                "shards",
                f"stage {s}",
                f"shards {stage.shards!r} needs a finite schedule that begins with the forwards, "
                f"and weights 'flush', got {plan.weights!r}",
            )


def _broken_layers(problem: PipelineProblem, plan: PipelinePlan) -> Iterator[Violation]:
    """The layers in the plan are the model's."""
    if plan.layers is None:
        return
    found = [(layer.name, layer.parameter_bytes) for layer in plan.layers]
    right = [(layer.name, layer.parameter_bytes) for layer in problem.chain.layers]
    if len(found) != len(right):
        yield Violation("layers", "layers", f"there are {len(found)}, the model has {len(right)}")
    for i, (one, other) in enumerate(zip(found, right, strict=False)):
        if one != other:
            yield Violation(
                "layers",
                f"layers[{i}]",
                f"{one[0]!r} of {one[1]} bytes, in the model {other[0]!r} of {other[1]} bytes",
            )


def _broken_cover(problem: PipelineProblem, stages: Sequence[Stage]) -> Iterator[Violation]:
    covered = 0
    for s, stage in enumerate(stages):
        start, stop = stage.layers
        if start != covered:
            yield Violation(
                "layers", f"stage {s}", f"starts at layer {start}, {covered} are covered before it"
            )
        covered = stop
    if covered != len(problem.chain):
        yield Violation(
            "layers",
            f"stage {len(stages) - 1}",
            f"ends at layer {covered}, the model has {len(problem.chain)}",
        )


def _broken_placement(problem: PipelineProblem, stages: Sequence[Stage]) -> Iterator[Violation]:
    for s, stage in enumerate(stages):
        if stage.replication not in REPLICATION:
            yield Violation("devices", f"stage {s}", f"replication {stage.replication!r}")
        if stage.recompute not in RECOMPUTE:
            yield Violation("recompute", f"stage {s}", f"recompute {stage.recompute!r}")
        yield from _broken_offload(problem, s, stage)
        yield from _broken_shares(problem, s, stage)
        yield from _broken_groups(problem, s, stage)
        for name, count in Counter(stage.devices).items():
            if name not in problem.cluster.index:
                yield Violation("devices", f"stage {s}", f"the cluster has no device {name!r}")
            if count > 1:
                yield Violation("devices", f"stage {s}", f"{name!r} appears {count} times")


def _broken_shares(problem: PipelineProblem, s: int, stage: Stage) -> Iterator[Violation]:
    """The smallest share of a microbatch has enough samples for every layer."""
    most, shares = problem.most_replicas(*stage.layers), share_count(stage)
    if shares > most:
        yield Violation(
            "samples",
            f"stage {s}",
            f"splits microbatches of {problem.chain.microbatch_size} samples among {shares} "
            f"devices, at most {most} are possible",
        )


def _broken_groups(problem: PipelineProblem, s: int, stage: Stage) -> Iterator[Violation]:
    """Every layer has costs at the stage's tensor degree; groups are of one kind and server."""
    if stage.tensor == 1:
        return
    try:
        require_degree(problem.chain, *stage.layers, stage.tensor)
        problem.at(stage.tensor)
    except InputError as error:
        yield Violation("tensor", f"stage {s}", str(error))
    index, devices = problem.cluster.index, problem.cluster.devices
    servers = [{devices[v].name for v in server} for server in problem.cluster.servers]
    for group in groups_of(stage.devices, stage.tensor):
        kinds = {devices[index[name]].kind for name in group if name in index}
        if index.keys() >= set(group) and not any(server.issuperset(group) for server in servers):
            yield Violation(
                "tensor",
                f"stage {s}",
                f"{', '.join(group)} are on several servers: the costs of a tensor degree are "
                "those of devices of one server",
            )
        if len(kinds) > 1:
            yield Violation(
                "tensor",
                f"stage {s}",
                f"{', '.join(group)} are of the kinds {', '.join(sorted(kinds))}: the costs of a "
                "tensor degree are those of devices of one kind",
            )


def _broken_offload(problem: PipelineProblem, s: int, stage: Stage) -> Iterator[Violation]:
    """A stage that offloads has known host links, and does not recompute as well."""
    if not stage.offload:
        return
    if stage.recompute != "none":
        yield Violation("offload", f"stage {s}", "a stage either offloads or recomputes")
    for name in stage.devices:
        v = problem.cluster.index.get(name)
        if v is not None and problem.cluster.devices[v].host_bytes_per_second is None:
            yield Violation(
                "offload", f"stage {s}", f"device {name!r} has no host_bytes_per_second"
            )
