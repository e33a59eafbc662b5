"""A given plan as the first candidate: mapped to the present devices and re-timed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic

import numpy as np

from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.formulations.plans.assembly import assemble
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.formulations.plans.shards import require_no_shards, require_whole_stages
from stagewright.formulations.plans.structure import (
    Endings,
    Structure,
    Work,
    ending_starts,
    misfit,
    work_of,
)
from stagewright.formulations.plans.timing import Blocks, split_backwards
from stagewright.graphs.documents.arrays import Floats
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.chain import Chain
from stagewright.solvers.pipelines.structures.scheduling import (
    FIRST_RULES,
    best_schedule,
    blocks_of_starts,
    rules_for,
)
from stagewright.solvers.pipelines.structures.state import (
    BACKWARD,
    FORWARD,
    SEND_B,
    SEND_F,
    WEIGHTS,
)
from stagewright.solvers.planners.steps.proposal import Choices, NoPlan, Proposal
from stagewright.solvers.planners.structures.moves import StructureMoves

Stages = tuple[Stage, ...]
Cell = tuple[int, int, int]  # kind, stage and microbatch of an action

ROWS = (
    (FORWARD, ActionKind.FORWARD),
    (BACKWARD, ActionKind.BACKWARD),
    (BACKWARD, ActionKind.INPUT_GRADIENT),
    (WEIGHTS, ActionKind.WEIGHT_GRADIENT),
    (SEND_F, ActionKind.SEND_FORWARD),
    (SEND_B, ActionKind.SEND_BACKWARD),
)


def require_same_layers(chain: Chain, given: PipelinePlan) -> None:
    """Refuse a plan whose layers differ from ``chain``'s, or are divided among devices."""
    require_whole_stages(
        given.stages,
        "planners make stages of degree 1 only and cannot begin with others",
        "give a plan of degree 1",
    )
    require_no_shards(
        given.stages,
        "planners make stages without shards and cannot begin with others",
        "give a plan without them",
    )
    count = given.stages[-1].layers[1]
    if count != len(chain):
        raise InputError(
            f"the given plan is for {count} layers, model {chain.name!r} has {len(chain)}"
        )
    for l, (planned, layer) in enumerate(zip(given.layers or (), chain.layers, strict=False)):
        if planned.name != layer.name:
            raise InputError(
                f"layer {l} of the given plan is {planned.name!r}, "
                f"of model {chain.name!r} it is {layer.name!r}"
            )


def warm_start(
    problem: PipelineProblem, given: PipelinePlan, choices: Choices, limits: Limits
) -> Proposal | NoPlan:
    """The given plan on the present devices: in its order if that is valid, and by list schedules.

    The shorter schedule is kept. Memory modes that are not allowed, or no longer fit, are changed
    in all stages.
    """
    began = monotonic()
    stages = mapped_stages(problem, given.stages)
    reason = "no memory mode is allowed"
    for structure in _structures(problem, given, stages, choices):
        work, endings, _ = work_of(problem, structure)
        short = misfit(problem, structure)
        if short is None:
            known = Retiming(problem, given, structure, work, endings)
            return known.best(lambda: limits.left(monotonic() - began) <= 0)
        reason = short
    return NoPlan(f"the given plan does not fit: {reason}", proved=False)


def in_its_order(problem: PipelineProblem, given: PipelinePlan) -> PipelinePlan | None:
    """The given plan with the present times, in its order, without a certificate.

    None if it has devices that are missing here, is no plan of this problem, or spans steps.
    """
    index = problem.cluster.index
    if any(name not in index for stage in given.stages for name in stage.devices):
        return None
    structure = _structure_of(problem, given, given.stages)
    work, endings, _ = work_of(problem, structure)
    if misfit(problem, structure) is not None:
        return None
    found = Retiming(problem, given, structure, work, endings).in_order()
    if found is None:
        return None
    return assemble(problem, given.planner, given.stages, found[0].starts)


def mapped_stages(problem: PipelineProblem, stages: Sequence[Stage]) -> Stages:
    """The stages on present devices.

    A missing device is replaced by the free one with the widest links to the devices of its stage
    and the neighbouring ones; without free devices it is left out. A stage that loses all its
    devices joins the stage before it (the first one, the stage after it).
    """
    image = _replacements(problem, stages)
    found: list[Stage] = []
    start = 0
    for stage in stages:
        devices = tuple(image[name] for name in stage.devices if name in image)
        if stage.replication == "split":
            devices = devices[: problem.most_replicas(start, stage.layers[1])]
        if devices:
            kind = stage.replication if len(devices) > 1 else "split"
            layers = (start, stage.layers[1])
            found.append(replace(stage, layers=layers, devices=devices, replication=kind))
        elif found:
            found[-1] = replace(found[-1], layers=(found[-1].layers[0], stage.layers[1]))
        start = found[-1].layers[1] if found else start
    if not found:
        return (Stage((0, len(problem.chain)), (problem.cluster.devices[0].name,)),)
    return tuple(found)


def _replacements(problem: PipelineProblem, stages: Sequence[Stage]) -> dict[str, str]:
    """The present device for every name in ``stages`` that has one."""
    index, devices = problem.cluster.index, problem.cluster.devices
    used = list(dict.fromkeys(name for stage in stages for name in stage.devices))
    image = {name: name for name in used if name in index}
    free = [v for v in range(len(devices)) if devices[v].name not in image]
    for name in used:
        if name in image or not free:
            continue
        near = [index[image[other]] for other in _near(stages, name) if other in image]
        width = problem.cluster.pairs.block(free, near)[0].sum(axis=1) if near else [0.0]
        image[name] = devices[free.pop(int(np.argmax(width)))].name
    return image


def _near(stages: Sequence[Stage], name: str) -> Iterator[str]:
    """The devices of the stages on ``name``, and of the stages next to them."""
    for s, stage in enumerate(stages):
        if name in stage.devices:
            for other in stages[max(0, s - 1) : s + 2]:
                yield from other.devices


def _structures(
    problem: PipelineProblem, given: PipelinePlan, stages: Stages, choices: Choices
) -> Iterator[Structure]:
    """The structure of the given plan if it is allowed, then its variants."""
    moves = StructureMoves(problem, choices.any_mode)
    known = _structure_of(problem, given, stages)
    if all(moves.has_mode(stage) for stage in stages) and moves.allows(known):
        yield known
    yield from moves.variants(known)


def _structure_of(problem: PipelineProblem, given: PipelinePlan, stages: Stages) -> Structure:
    """The stages, those with split backwards in the given plan as far as layers have the times."""
    parts = (False,) * len(stages)
    if not given.is_periodic and len(stages) == len(given.stages):
        parts = tuple(bool(row.all()) for row in split_backwards(given))
    return Structure(
        stages,
        tuple(
            part and problem.layer_with_whole_backward(*stage.layers) is None
            for part, stage in zip(parts, stages, strict=True)
        ),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Retiming:
    """The structure of a given plan with the present times."""

    problem: PipelineProblem
    given: PipelinePlan
    structure: Structure
    work: Work
    endings: Endings

    def best(self, over: Callable[[], bool]) -> Proposal:
        """The shorter of the given order and the list schedules."""
        kept = self.in_order()
        rules = rules_for(self.work)[:FIRST_RULES]
        if kept is None:
            listed = best_schedule(self.work, self.endings, rules)
            assert listed is not None  # every structure that fits has a schedule
        else:
            proposal, seconds = kept
            listed = best_schedule(self.work, self.endings, rules, seconds, over=lambda _: over())
            if listed is None:
                return replace(proposal, notes=("the given plan in its order",))
        stages = self.structure.stages
        return Proposal(stages, listed.starts, notes=("the given plan, scheduled again",))

    def in_order(self) -> tuple[Proposal, float] | None:
        """The given order with the present times, if it has all actions and is valid."""
        before = self._starts()
        found = None if before is None else retimed(self.work, self.endings, before)
        if found is None:
            return None
        stages, (starts, seconds) = self.structure.stages, found
        if check(self.problem, assemble(self.problem, "given", stages, starts)):
            return None
        return Proposal(stages, starts), seconds

    def _starts(self) -> Floats | None:
        """The starts of the given plan, shape (5, S, M); None if the actions are not the same."""
        stages, count = self.work.lane.shape
        if self.given.spans_steps or (len(self.given.stages), self.given.microbatches) != (
            stages, count,
        ):  # fmt: skip
            return None
        starts = {one.action: one.start_seconds for one in self.given.actions}
        before = np.full_like(self.work.seconds, np.nan)
        for row, kind in ROWS:
            for s, m in np.ndindex(stages, count):
                found = starts.get(str(Action(s, kind, m)))
                before[row, s, m] = before[row, s, m] if found is None else found
        return before


def retimed(work: Work, endings: Endings, before: Floats) -> tuple[Blocks, float] | None:
    """The earliest starts of all actions in the order of ``before``, and the end of the last one.

    Both are for the same stages and microbatches; ``before`` has shape (5, S, M). None if it lacks
    an action. Memory is not checked.
    """
    actions = list(_actions(work))
    if any(np.isnan(before[one]) for one in actions):
        return None
    starts = np.full_like(work.seconds, np.nan)
    free: dict[tuple[str, int], float] = {}
    for one in sorted(actions, key=lambda one: (before[one], _position(work, one))):
        places = _places(work, one)
        ready = [starts[other] + work.seconds[other] for other in _needed(work, one)]
        starts[one] = max([*ready, *(free.get(place, 0.0) for place in places)], default=0.0)
        free |= dict.fromkeys(places, starts[one] + work.seconds[one])
    reduces, updates, seconds = ending_starts(work, endings, starts)
    return blocks_of_starts(work, starts, reduces, updates), seconds


def _actions(work: Work) -> Iterator[Cell]:
    stages, count = work.lane.shape
    for s, m in np.ndindex(stages, count):
        yield FORWARD, s, m
        yield BACKWARD, s, m
        if work.split[s]:
            yield WEIGHTS, s, m
        if s < stages - 1 and work.channel[s, m] >= 0:
            yield SEND_F, s, m
            yield SEND_B, s + 1, m


def _position(work: Work, cell: Cell) -> int:
    """The position in a microbatch's chain of actions, for equal starts of actions of no time."""
    kind, s, _ = cell
    there, back = 2 * s, 4 * len(work.split) - 2 * s
    return {FORWARD: there, SEND_F: there + 1, BACKWARD: back}.get(kind, back + 1)


def _needed(work: Work, cell: Cell) -> list[Cell]:
    """The actions that directly precede an action in its microbatch."""
    kind, s, m = cell
    if kind in (SEND_F, SEND_B, WEIGHTS):
        return [(FORWARD if kind == SEND_F else BACKWARD, s, m)]
    if kind == FORWARD:
        sent = s > 0 and work.channel[s - 1, m] >= 0
        return [(SEND_F if sent else FORWARD, s - 1, m)] if s > 0 else []
    if s == len(work.split) - 1:
        return [(FORWARD, s, m)]
    return [(SEND_B if work.channel[s, m] >= 0 else BACKWARD, s + 1, m)]


def _places(work: Work, cell: Cell) -> list[tuple[str, int]]:
    """The devices or the channel of an action."""
    kind, s, m = cell
    if kind in (SEND_F, SEND_B):
        return [("channel", int(work.channel[s if kind == SEND_F else s - 1, m]))]
    return [("device", v) for v in work.members[work.lane[s, m]]]
