"""The stages and start times of a plan that follows an order.

The copies of a stage, one per path, become the devices of a round-robin stage: copy m mod r takes
microbatch m. So a schedule in both directions is a plan whose stages are on two devices each, and
devices on two stages: the plan's all-reduces add up the gradients of the copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stagewright.formulations.plans.actions import REDUCE, SEND_B, SEND_F, UPDATE, Action
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.structure import Structure, ending_starts, work_of
from stagewright.formulations.plans.tensor import stays
from stagewright.formulations.plans.timing import Blocks, durations, empty_blocks
from stagewright.formulations.plans.weight_rules import FLUSH, WeightRule
from stagewright.formulations.schedules.channels import channel_starts
from stagewright.formulations.schedules.order import B, F, I, Order, W
from stagewright.formulations.schedules.timing import StageTimes
from stagewright.graphs.documents.errors import InputError


def copies_of(order: Order) -> tuple[tuple[int, ...], ...]:
    """The devices of each stage: device m mod their number takes microbatch m.

    Raises
    ------
    InputError
        If the copies of a stage take microbatches in another way.
    """
    found = []
    for s in range(len(order.paths[0])):
        taken = [order.paths[path][s] for path in order.path_of]
        copies = tuple(dict.fromkeys(taken))
        for m, device in enumerate(taken):
            if device != copies[m % len(copies)]:
                raise InputError(
                    f"stage {s}: microbatch {m} is on device {device}; the copies of a stage in a "
                    f"plan take microbatches in turn, so that it is on {copies[m % len(copies)]}"
                )
        found.append(copies)
    return tuple(found)


def stages_of(order: Order, cuts: Sequence[int], names: Sequence[str]) -> tuple[Stage, ...]:
    """Stage s with layers [cuts[s], cuts[s + 1]); ``names`` are those of the order's devices."""
    return tuple(
        Stage(
            (cuts[s], cuts[s + 1]),
            tuple(names[d] for d in copies),
            "round-robin" if len(copies) > 1 else "split",
        )
        for s, copies in enumerate(copies_of(order))
    )


def starts_in_order(
    problem: PipelineProblem, stages: Sequence[Stage], order: Order, rule: WeightRule = FLUSH
) -> Blocks:
    """The earliest starts of computations and transfers, without all-reduces and updates.

    Raises
    ------
    InputError
        If the devices deadlock.
    """
    split = np.zeros((len(stages), order.microbatches), dtype=bool)
    for row in order.rows:
        for action in row:
            split[action.stage, action.microbatch] |= action.kind is I
    times = _Lasting(durations(problem, stages, split, rule))
    begun, sent = channel_starts(order, times)
    starts = empty_blocks(len(stages), order.microbatches)
    for row, seconds in zip(order.rows, begun, strict=True):
        for action, start in zip(row, seconds, strict=True):
            starts[action.kind][action.stage, action.microbatch] = start
    for (forward, stage, m), start in sent.items():
        s = stage - 1 if forward else stage + 1
        if not stays(stages[s], stages[stage], m):
            starts[SEND_F if forward else SEND_B][s, m] = start
    return starts


def starts_to_the_end(
    problem: PipelineProblem, stages: Sequence[Stage], order: Order, rule: WeightRule = FLUSH
) -> Blocks:
    """The starts of `starts_in_order` with those of all-reduces and updates after the backwards.

    Raises
    ------
    InputError
        If the devices deadlock.
    """
    starts = starts_in_order(problem, stages, order, rule)
    if not rule.updates_every_round:
        starts |= _endings(problem, stages, starts)
    return starts


def stage_times(problem: PipelineProblem, stages: Sequence[Stage]) -> StageTimes:
    """The times of the stages' parts for microbatch 0."""
    split = np.ones((len(stages), problem.microbatches), dtype=bool)
    lasting = durations(problem, stages, split)
    first = {kind: np.nan_to_num(seconds[:, 0]).tolist() for kind, seconds in lasting.items()}
    return StageTimes(
        forward=tuple(first[F]),
        input_gradient=tuple(first[I]),
        weight_gradient=tuple(first[W]),
        send_forward=tuple(first[SEND_F][:-1]),
        send_backward=tuple(first[SEND_B][1:]),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Lasting:
    """The cost model's seconds as the times of actions."""

    seconds: Blocks

    def of(self, action: Action) -> float:
        """The seconds of a computation or a transfer."""
        return float(self.seconds[action.kind][action.stage, action.microbatch or 0])


def _endings(problem: PipelineProblem, stages: Sequence[Stage], starts: Blocks) -> Blocks:
    """All-reduces and optimizer steps; a whole backward is its two parts in sequence here."""
    split = tuple(bool(row.any()) for row in ~np.isnan(starts[I]))
    work, endings, _ = work_of(problem, Structure(tuple(stages), split))
    rows = np.full_like(work.seconds, np.nan)
    rows[:2] = starts[F], np.fmin(starts[B], starts[I])
    rows[2] = np.where(np.isnan(starts[W]), rows[1] + work.seconds[1], starts[W])
    reduces, updates, _ = ending_starts(work, endings, rows)
    return {REDUCE: reduces[:, None], UPDATE: updates[:, None]}
