from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from program_text import parse_program
from training_plans import (
    gpipe,
    interleaved,
    one_f_one_b,
    overlapping,
    pattern_of,
    periodic,
    periodic_plans,
    plan_in_order,
    plans,
    straight,
    with_steps,
    zero_bubble_h1,
)

from stagewright.executor.programs.lower import (
    computations,
    lower,
    with_reductions,
    with_updates,
    with_versions,
)
from stagewright.executor.programs.periodic import in_periods, lower_periodic
from stagewright.executor.programs.program import (
    RECEIVES,
    SENDS,
    Instruction,
    Row,
    Rows,
    plan_devices,
    received,
)
from stagewright.executor.programs.stashed import pattern_order
from stagewright.executor.programs.transfers import (
    RECEIVE_BUFFERS,
    with_early_receives,
    with_early_sends,
    with_transfers,
)
from stagewright.executor.programs.verification.verify import verify
from stagewright.formulations.patterns.one_f_one_b import one_f_one_b_star, period_bound
from stagewright.formulations.plans.actions import (
    COMPUTE,
    Action,
    ActionKind,
    Weights,
    parse_action,
    parse_operation,
)
from stagewright.formulations.plans.periodic import unrolled
from stagewright.formulations.plans.plan import (
    PeriodicSchedule,
    PipelinePlan,
    Schedule,
    ScheduledAction,
    Stage,
)
from stagewright.graphs.documents.errors import InvalidPlan

F, B, I = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT
W = ActionKind.WEIGHT_GRADIENT
UPDATE, STASH, DROP = ActionKind.UPDATE, ActionKind.STASH, ActionKind.DROP


Pass = Callable[[PipelinePlan, Rows], Rows]


def actions(text: str) -> list[Action]:
    return [parse_action(word) for word in text.split()]


def read(*rows: str) -> Rows:
    """Rows of instructions, written with spaces between."""
    text = "\n".join(",".join(row.split()) for row in rows)
    return [list(row) for row in parse_program(text, ("",) * len(rows)).rows]


def shown(rows: Sequence[Sequence[Instruction]]) -> list[str]:
    return [" ".join(map(str, row)) for row in rows]


def stage(layer: int, devices: str, replication: str = "split") -> Stage:
    """One layer on devices of one letter each."""
    how = "round-robin" if replication == "round-robin" else "split"
    return Stage((layer, layer + 1), tuple(devices), how)


def by_hand(
    stages: Sequence[Stage], microbatches: int, weights: Weights = "flush", **rows: str
) -> PipelinePlan:
    """The actions of each device one after another, whether or not this can run."""
    entries = tuple(
        ScheduledAction(device, word, float(i), float(i + 1))
        for device, row in rows.items()
        for i, word in enumerate(row.split())
    )
    return PipelinePlan(
        "", "", "", "", microbatches, tuple(stages), Schedule(entries), weights=weights
    )


# --- Before and after each pass ---------------------------------------------------------------

Step = tuple[Pass, list[str]]


def start(plan: PipelinePlan, nothing: Rows) -> Rows:
    return computations(plan)


# 1F1B on three stages with an update after each of four microbatches.
UPDATED_EACH: list[Step] = [
    (
        start,
        [
            "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
            "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
            "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
        ],
    ),
    (
        with_updates,
        [
            "0F0 0F1 0F2 0B0 0UPDATE 0F3 0B1 0UPDATE 0B2 0UPDATE 0B3 0UPDATE",
            "1F0 1F1 1B0 1UPDATE 1F2 1B1 1UPDATE 1F3 1B2 1UPDATE 1B3 1UPDATE",
            "2F0 2B0 2UPDATE 2F1 2B1 2UPDATE 2F2 2B2 2UPDATE 2F3 2B3 2UPDATE",
        ],
    ),
]

CASES: dict[str, tuple[PipelinePlan, list[Step]]] = {
    "1F1B on three stages": (
        one_f_one_b(straight([1, 1, 1]), 3),
        [
            (
                start,
                ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1B0 1F2 1B1 1B2", "2F0 2B0 2F1 2B1 2F2 2B2"],
            ),
            (
                with_transfers,
                [
                    "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0F2 0SEND_F2>1 0RECV_B0<1 0B0 0RECV_B1<1 "
                    "0B1 0RECV_B2<1 0B2",
                    "1RECV_F0<0 1RECV_F1<0 1F0 1RECV_F2<0 1SEND_F0>2 1F1 1SEND_F1>2 "
                    "1RECV_B0<2 1B0 1SEND_B0>0 1RECV_B1<2 1F2 1SEND_F2>2 1B1 1SEND_B1>0 "
                    "1RECV_B2<2 1B2 1SEND_B2>0",
                    "2RECV_F0<1 2RECV_F1<1 2F0 2B0 2SEND_B0>1 2F1 2B1 2SEND_B1>1 2RECV_F2<1 "
                    "2F2 2B2 2SEND_B2>1",
                ],
            ),
            (
                with_early_receives,
                [
                    "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0F2 0SEND_F2>1 0RECV_B0<1 0RECV_B1<1 0B0 "
                    "0RECV_B2<1 0B1 0B2",
                    "1RECV_F0<0 1RECV_F1<0 1F0 1RECV_F2<0 1SEND_F0>2 1F1 1SEND_F1>2 "
                    "1RECV_B0<2 1RECV_B1<2 1B0 1SEND_B0>0 1F2 1SEND_F2>2 1RECV_B2<2 1B1 "
                    "1SEND_B1>0 1B2 1SEND_B2>0",
                    "2RECV_F0<1 2RECV_F1<1 2F0 2B0 2SEND_B0>1 2F1 2B1 2SEND_B1>1 2RECV_F2<1 "
                    "2F2 2B2 2SEND_B2>1",
                ],
            ),
            (
                with_updates,
                [
                    "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0F2 0SEND_F2>1 0RECV_B0<1 0RECV_B1<1 0B0 "
                    "0RECV_B2<1 0B1 0B2 0UPDATE",
                    "1RECV_F0<0 1RECV_F1<0 1F0 1RECV_F2<0 1SEND_F0>2 1F1 1SEND_F1>2 "
                    "1RECV_B0<2 1RECV_B1<2 1B0 1SEND_B0>0 1F2 1SEND_F2>2 1RECV_B2<2 1B1 "
                    "1SEND_B1>0 1B2 1SEND_B2>0 1UPDATE",
                    "2RECV_F0<1 2RECV_F1<1 2F0 2B0 2SEND_B0>1 2F1 2B1 2SEND_B1>1 2RECV_F2<1 "
                    "2F2 2B2 2SEND_B2>1 2UPDATE",
                ],
            ),
        ],
    ),
    "two stages on one device": (
        plan_in_order(
            [stage(0, "a"), stage(1, "a"), stage(2, "b")],
            2,
            {"a": actions("0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1"), "b": actions("2F0 2B0 2F1 2B1")},
        ),
        [
            (start, ["0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", "2F0 2B0 2F1 2B1"]),
            (
                with_transfers,
                [
                    "0F0 1F0 1SEND_F0>1 0F1 1F1 1SEND_F1>1 1RECV_B0<1 1B0 1RECV_B1<1 0B0 1B1 0B1",
                    "2RECV_F0<0 2F0 2RECV_F1<0 2B0 2SEND_B0>0 2F1 2B1 2SEND_B1>0",
                ],
            ),
            (
                with_early_receives,
                [
                    "0F0 1F0 1SEND_F0>1 0F1 1F1 1SEND_F1>1 1RECV_B0<1 1RECV_B1<1 1B0 0B0 1B1 0B1",
                    "2RECV_F0<0 2RECV_F1<0 2F0 2B0 2SEND_B0>0 2F1 2B1 2SEND_B1>0",
                ],
            ),
            (
                with_updates,
                [
                    "0F0 1F0 1SEND_F0>1 0F1 1F1 1SEND_F1>1 1RECV_B0<1 1RECV_B1<1 1B0 0B0 "
                    "1B1 0B1 0UPDATE 1UPDATE",
                    "2RECV_F0<0 2RECV_F1<0 2F0 2B0 2SEND_B0>0 2F1 2B1 2SEND_B1>0 2UPDATE",
                ],
            ),
        ],
    ),
    "V shape": (
        plan_in_order(
            [stage(0, "a"), stage(1, "b"), stage(2, "b"), stage(3, "a")],
            2,
            {
                "a": actions("0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1"),
                "b": actions("1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"),
            },
        ),
        [
            (start, ["0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"]),
            (
                with_transfers,
                [
                    "0F0 0SEND_F0>1 0F1 0SEND_F1>1 3RECV_F0<1 3F0 3RECV_F1<1 3B0 3SEND_B0>1 "
                    "3F1 3B1 3SEND_B1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1",
                    "1RECV_F0<0 1RECV_F1<0 1F0 2F0 2SEND_F0>0 1F1 2F1 2SEND_F1>0 2RECV_B0<0 "
                    "2B0 2RECV_B1<0 1B0 1SEND_B0>0 2B1 1B1 1SEND_B1>0",
                ],
            ),
            (
                with_early_receives,
                [
                    "0F0 0SEND_F0>1 0F1 0SEND_F1>1 3RECV_F0<1 3RECV_F1<1 3F0 3B0 3SEND_B0>1 "
                    "3F1 3B1 3SEND_B1>1 0RECV_B0<1 0RECV_B1<1 0B0 0B1",
                    "1RECV_F0<0 1RECV_F1<0 1F0 2F0 2SEND_F0>0 1F1 2F1 2SEND_F1>0 2RECV_B0<0 "
                    "2RECV_B1<0 2B0 1B0 1SEND_B0>0 2B1 1B1 1SEND_B1>0",
                ],
            ),
        ],
    ),
    "1F1B-RR from two devices to one": (
        one_f_one_b([stage(0, "ab", "round-robin"), stage(1, "c")], 4),
        [
            (start, ["0F0 0B0 0F2 0B2", "0F1 0B1 0F3 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"]),
            (
                with_transfers,
                [
                    "0F0 0SEND_F0>2 0RECV_B0<2 0B0 0F2 0SEND_F2>2 0RECV_B2<2 0B2",
                    "0F1 0SEND_F1>2 0RECV_B1<2 0B1 0F3 0SEND_F3>2 0RECV_B3<2 0B3",
                    "1RECV_F0<0 1RECV_F1<1 1F0 1B0 1SEND_B0>0 1F1 1B1 1SEND_B1>1 1RECV_F2<0 "
                    "1F2 1RECV_F3<1 1B2 1SEND_B2>0 1F3 1B3 1SEND_B3>1",
                ],
            ),
            (
                with_early_receives,
                [
                    "0F0 0SEND_F0>2 0RECV_B0<2 0B0 0F2 0SEND_F2>2 0RECV_B2<2 0B2",
                    "0F1 0SEND_F1>2 0RECV_B1<2 0B1 0F3 0SEND_F3>2 0RECV_B3<2 0B3",
                    "1RECV_F1<1 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F2<0 1F1 1B1 1SEND_B1>1 "
                    "1RECV_F3<1 1F2 1B2 1SEND_B2>0 1F3 1B3 1SEND_B3>1",
                ],
            ),
            (
                with_reductions,
                [
                    "0F0 0SEND_F0>2 0RECV_B0<2 0B0 0F2 0SEND_F2>2 0RECV_B2<2 0B2 0REDUCE_GRAD",
                    "0F1 0SEND_F1>2 0RECV_B1<2 0B1 0F3 0SEND_F3>2 0RECV_B3<2 0B3 0REDUCE_GRAD",
                    "1RECV_F1<1 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F2<0 1F1 1B1 1SEND_B1>1 "
                    "1RECV_F3<1 1F2 1B2 1SEND_B2>0 1F3 1B3 1SEND_B3>1",
                ],
            ),
            (
                with_updates,
                [
                    "0F0 0SEND_F0>2 0RECV_B0<2 0B0 0F2 0SEND_F2>2 0RECV_B2<2 0B2 "
                    "0REDUCE_GRAD 0UPDATE",
                    "0F1 0SEND_F1>2 0RECV_B1<2 0B1 0F3 0SEND_F3>2 0RECV_B3<2 0B3 "
                    "0REDUCE_GRAD 0UPDATE",
                    "1RECV_F1<1 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F2<0 1F1 1B1 1SEND_B1>1 "
                    "1RECV_F3<1 1F2 1B2 1SEND_B2>0 1F3 1B3 1SEND_B3>1 1UPDATE",
                ],
            ),
        ],
    ),
    "split from two devices to three": (
        one_f_one_b([stage(0, "ab"), stage(1, "cde")], 1),
        [
            (start, ["0F0 0B0", "0F0 0B0", "1F0 1B0", "1F0 1B0", "1F0 1B0"]),
            (
                with_transfers,
                [
                    "0F0 0SEND_F0>2 0SEND_F0>3 0SEND_F0>4 0RECV_B0<2 0RECV_B0<3 0RECV_B0<4 0B0",
                    "0F0 0SEND_F0>2 0SEND_F0>3 0SEND_F0>4 0RECV_B0<2 0RECV_B0<3 0RECV_B0<4 0B0",
                    "1RECV_F0<0 1RECV_F0<1 1F0 1B0 1SEND_B0>0 1SEND_B0>1",
                    "1RECV_F0<0 1RECV_F0<1 1F0 1B0 1SEND_B0>0 1SEND_B0>1",
                    "1RECV_F0<0 1RECV_F0<1 1F0 1B0 1SEND_B0>0 1SEND_B0>1",
                ],
            ),
            (
                with_early_receives,
                [
                    "0F0 0SEND_F0>2 0RECV_B0<2 0SEND_F0>3 0RECV_B0<3 0SEND_F0>4 0RECV_B0<4 0B0",
                    "0F0 0SEND_F0>2 0RECV_B0<2 0SEND_F0>3 0RECV_B0<3 0SEND_F0>4 0RECV_B0<4 0B0",
                    "1RECV_F0<1 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1SEND_B0>1",
                    "1RECV_F0<1 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1SEND_B0>1",
                    "1RECV_F0<1 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1SEND_B0>1",
                ],
            ),
            (
                with_reductions,
                [
                    "0F0 0SEND_F0>2 0RECV_B0<2 0SEND_F0>3 0RECV_B0<3 0SEND_F0>4 0RECV_B0<4 "
                    "0B0 0REDUCE_GRAD",
                    "0F0 0SEND_F0>2 0RECV_B0<2 0SEND_F0>3 0RECV_B0<3 0SEND_F0>4 0RECV_B0<4 "
                    "0B0 0REDUCE_GRAD",
                    "1RECV_F0<1 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1SEND_B0>1 1REDUCE_GRAD",
                    "1RECV_F0<1 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1SEND_B0>1 1REDUCE_GRAD",
                    "1RECV_F0<1 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1SEND_B0>1 1REDUCE_GRAD",
                ],
            ),
            (
                with_updates,
                [
                    "0F0 0SEND_F0>2 0RECV_B0<2 0SEND_F0>3 0RECV_B0<3 0SEND_F0>4 0RECV_B0<4 "
                    "0B0 0REDUCE_GRAD 0UPDATE",
                    "0F0 0SEND_F0>2 0RECV_B0<2 0SEND_F0>3 0RECV_B0<3 0SEND_F0>4 0RECV_B0<4 "
                    "0B0 0REDUCE_GRAD 0UPDATE",
                    "1RECV_F0<1 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1SEND_B0>1 1REDUCE_GRAD 1UPDATE",
                    "1RECV_F0<1 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1SEND_B0>1 1REDUCE_GRAD 1UPDATE",
                    "1RECV_F0<1 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1SEND_B0>1 1REDUCE_GRAD 1UPDATE",
                ],
            ),
        ],
    ),
    "ZB-H1": (
        zero_bubble_h1(straight([1, 1]), 3),
        [
            (start, ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"]),
            (
                with_transfers,
                [
                    "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0I0 0RECV_B1<1 0W0 0F2 "
                    "0SEND_F2>1 0I1 0W1 0RECV_B2<1 0I2 0W2",
                    "1RECV_F0<0 1RECV_F1<0 1F0 1I0 1SEND_B0>0 1F1 1I1 1SEND_B1>0 1W0 "
                    "1RECV_F2<0 1F2 1I2 1SEND_B2>0 1W1 1W2",
                ],
            ),
            (
                with_early_receives,
                [
                    "0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0RECV_B1<1 0I0 0W0 0F2 "
                    "0SEND_F2>1 0RECV_B2<1 0I1 0W1 0I2 0W2",
                    "1RECV_F0<0 1RECV_F1<0 1F0 1I0 1SEND_B0>0 1F1 1I1 1SEND_B1>0 1RECV_F2<0 "
                    "1W0 1F2 1I2 1SEND_B2>0 1W1 1W2",
                ],
            ),
        ],
    ),
    "two stages on the same two devices": (
        plan_in_order(
            [stage(0, "ab"), stage(1, "ab")],
            2,
            {device: actions("0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1") for device in "ab"},
        ),
        [
            (start, ["0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1", "0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1"]),
            (
                with_transfers,
                ["0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1", "0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1"],
            ),
            (
                with_reductions,
                [
                    "0F0 1F0 0F1 1F1 1B0 1B1 1REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD",
                    "0F0 1F0 0F1 1F1 1B0 1B1 1REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD",
                ],
            ),
            (
                with_updates,
                [
                    "0F0 1F0 0F1 1F1 1B0 1B1 1REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD 0UPDATE 1UPDATE",
                    "0F0 1F0 0F1 1F1 1B0 1B1 1REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD 0UPDATE 1UPDATE",
                ],
            ),
        ],
    ),
    "stash": (
        one_f_one_b(straight([1, 1, 1]), 4, "stash"),
        [
            *UPDATED_EACH,
            (
                with_versions,
                [
                    "0F0 0F1 0F2 0B0 0STASH0 0UPDATE 0F3 0USE0 0B1 0STASH1 0UPDATE 0USE0 "
                    "0B2 0DROP0 0UPDATE 0USE1 0B3 0DROP1 0UPDATE",
                    "1F0 1F1 1B0 1STASH0 1UPDATE 1F2 1USE0 1B1 1DROP0 1STASH1 1UPDATE 1F3 "
                    "1USE1 1B2 1DROP1 1STASH2 1UPDATE 1USE2 1B3 1DROP2 1UPDATE",
                    "2F0 2B0 2UPDATE 2F1 2B1 2UPDATE 2F2 2B2 2UPDATE 2F3 2B3 2UPDATE",
                ],
            ),
        ],
    ),
    "stash, backwards in halves": (
        zero_bubble_h1(straight([1, 1]), 3, "stash"),
        [
            (start, ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"]),
            (
                with_updates,
                [
                    "0F0 0F1 0I0 0W0 0UPDATE 0F2 0I1 0W1 0UPDATE 0I2 0W2 0UPDATE",
                    "1F0 1I0 1F1 1I1 1W0 1UPDATE 1F2 1I2 1W1 1UPDATE 1W2 1UPDATE",
                ],
            ),
            (
                with_versions,
                [
                    "0F0 0F1 0I0 0W0 0STASH0 0UPDATE 0F2 0USE0 0I1 0W1 0DROP0 0STASH1 "
                    "0UPDATE 0USE1 0I2 0W2 0DROP1 0UPDATE",
                    "1F0 1I0 1F1 1I1 1W0 1STASH0 1UPDATE 1F2 1I2 1USE0 1W1 1DROP0 1STASH1 "
                    "1UPDATE 1USE1 1W2 1DROP1 1UPDATE",
                ],
            ),
        ],
    ),
    "stash, two devices in turn": (
        one_f_one_b([stage(0, "ab", "round-robin"), stage(1, "c")], 4, "stash"),
        [
            (start, ["0F0 0B0 0F2 0B2", "0F1 0B1 0F3 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"]),
            (
                with_reductions,
                [
                    "0F0 0B0 0REDUCE_GRAD 0F2 0B2 0REDUCE_GRAD",
                    "0F1 0B1 0REDUCE_GRAD 0F3 0B3 0REDUCE_GRAD",
                    "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
                ],
            ),
            (
                with_updates,
                [
                    "0F0 0B0 0REDUCE_GRAD 0UPDATE 0F2 0B2 0REDUCE_GRAD 0UPDATE",
                    "0F1 0B1 0REDUCE_GRAD 0UPDATE 0F3 0B3 0REDUCE_GRAD 0UPDATE",
                    "1F0 1B0 1UPDATE 1F1 1B1 1UPDATE 1F2 1B2 1UPDATE 1F3 1B3 1UPDATE",
                ],
            ),
            (
                with_versions,
                [
                    "0F0 0B0 0REDUCE_GRAD 0UPDATE 0F2 0B2 0REDUCE_GRAD 0UPDATE",
                    "0F1 0B1 0REDUCE_GRAD 0UPDATE 0F3 0B3 0REDUCE_GRAD 0UPDATE",
                    "1F0 1B0 1UPDATE 1F1 1B1 1UPDATE 1F2 1B2 1UPDATE 1F3 1B3 1UPDATE",
                ],
            ),
        ],
    ),
    "stash and vertical sync": (
        one_f_one_b(straight([1, 1, 1]), 4, "stash+vertical-sync"),
        [
            *UPDATED_EACH,
            (
                with_versions,
                [
                    "0F0 0F1 0F2 0B0 0STASH0 0UPDATE 0F3 0USE0 0B1 0STASH1 0UPDATE 0USE0 "
                    "0B2 0DROP0 0UPDATE 0USE1 0B3 0DROP1 0UPDATE",
                    "1F0 1F1 1B0 1STASH0 1UPDATE 1USE0 1F2 1B1 1STASH1 1UPDATE 1USE1 1F3 "
                    "1USE0 1B2 1DROP0 1UPDATE 1USE1 1B3 1DROP1 1UPDATE",
                    "2F0 2B0 2STASH0 2UPDATE 2USE0 2F1 2B1 2STASH1 2UPDATE 2USE0 2F2 2B2 "
                    "2DROP0 2UPDATE 2USE1 2F3 2B3 2DROP1 2UPDATE",
                ],
            ),
        ],
    ),
    "double-buffer": (
        one_f_one_b(straight([1, 1]), 2, "double-buffer"),
        [
            (start, ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]),
            (with_updates, ["0F0 0F1 0B0 0B1 0UPDATE", "1F0 1B0 1F1 1B1 1UPDATE"]),
            (
                with_versions,
                [
                    "0USE0 0F0 0F1 0B0 0B1 0DROP0 0STASH1 0UPDATE",
                    "1USE0 1F0 1B0 1F1 1B1 1DROP0 1STASH1 1UPDATE",
                ],
            ),
        ],
    ),
}


def test_a_send_that_had_to_wait_for_a_channel_is_posted_at_once() -> None:
    plan = plan_in_order(
        [stage(0, "a"), stage(1, "b")], 1, {"a": actions("0F0 0B0"), "b": actions("1F0 1B0")}
    )
    rows = read("0F0 0F1 0SEND_F0>1 0RECV_B9<1 0SEND_F1>1", "1RECV_F0<0 1F0 1I0 1W0 1SEND_B0>0")
    assert shown(with_early_sends(plan, rows)) == [
        "0F0 0SEND_F0>1 0F1 0RECV_B9<1 0SEND_F1>1",  # not past another transfer of the pair
        "1RECV_F0<0 1F0 1I0 1SEND_B0>0 1W0",
    ]


@pytest.mark.parametrize("name", CASES)
def test_each_pass(name: str) -> None:
    plan, steps = CASES[name]
    before: list[str] = []
    for add, after in steps:
        assert shown(add(plan, read(*before))) == after
        before = after


def test_flush_has_no_versions() -> None:
    plan = one_f_one_b(straight([1, 1]), 2)
    rows = with_updates(plan, computations(plan))
    assert with_versions(plan, rows) == rows


# --- What cannot be lowered -------------------------------------------------------------------

TWO = [stage(0, "a"), stage(1, "b")]


def test_what_lasts_no_time_goes_a_microbatchs_way() -> None:
    words = ["1W0", "0B0", "1I0", "1F0", "0F0"]
    entries = tuple(ScheduledAction("a", word, 0.0, 0.0) for word in words)
    both = (stage(0, "a"), stage(1, "a"))
    plan = PipelinePlan("", "", "", "", 1, both, Schedule(entries))
    assert shown(computations(plan)) == ["0F0 1F0 1I0 0B0 1W0"]


def test_a_send_does_not_wait_for_a_computation_that_starts_as_it_does() -> None:
    for row in lower(one_f_one_b(straight([1, 1, 1, 1]), 6)).rows:
        for i, one in enumerate(row):
            if one.action.kind in SENDS:
                before = [other.action for other in row[:i] if other.action.kind in COMPUTE]
                assert before[-1].microbatch == one.action.microbatch


def test_a_computation_on_a_foreign_device_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="0B0 runs on 'c', which is in no stage"):
        lower(by_hand(TWO, 1, a="0F0 0B0", b="1F0 1B0", c="0B0"))


def test_a_plan_that_cannot_run_is_refused_with_the_cycle() -> None:
    plan = by_hand(TWO, 2, a="0F0 0B0 0F1 0B1", b="1F0 1F1 1B0 1B1")
    with pytest.raises(InvalidPlan) as refused:
        lower(plan)
    head, _, cycle = str(refused.value).partition(": ")
    assert head == "the plan's order is a deadlock"
    waits = cycle.split(" waits for ")
    assert waits[0] == waits[-1]
    steps = set(pairwise(waits))
    assert steps == {
        ("1F1 on rank 1", "0SEND_F1>1 on rank 0"),
        ("0SEND_F1>1 on rank 0", "0F1 on rank 0"),
        ("0F1 on rank 0", "0B0 on rank 0"),
        ("0B0 on rank 0", "1SEND_B0>0 on rank 1"),
        ("1SEND_B0>0 on rank 1", "1B0 on rank 1"),
        ("1B0 on rank 1", "1F1 on rank 1"),
    }


def test_a_rank_that_waits_for_itself_is_a_deadlock() -> None:
    both = [stage(0, "a"), stage(1, "a")]
    with pytest.raises(InvalidPlan, match=r"deadlock: .*1F0 on rank 0 waits for 0F0 on rank 0"):
        lower(by_hand(both, 1, a="1F0 0F0 1B0 0B0"))


@pytest.mark.parametrize("weights", ["stash", "stash+vertical-sync"])
def test_turns_that_do_not_come_round_are_refused(weights: Weights) -> None:
    stages = [stage(0, "a"), stage(1, "bc", "round-robin")]
    plan = one_f_one_b(stages, 3, weights)
    with pytest.raises(InvalidPlan, match=r"stage 1: 2 devices .* multiple of 2, got 3"):
        lower(plan)


def test_vertical_sync_asks_for_equal_turns() -> None:
    stages = [stage(0, "a"), stage(1, "bc", "round-robin")]
    with pytest.raises(InvalidPlan, match="stage 1 takes turns among 2, stage 0 among 1"):
        lower(one_f_one_b(stages, 4, "stash+vertical-sync"))
    equal = [stage(0, "ab", "round-robin"), stage(1, "cd", "round-robin")]
    plan = one_f_one_b(equal, 4, "stash+vertical-sync")
    verify(plan, lower(plan))


def test_a_version_that_is_not_made_yet_is_refused() -> None:
    """Stage 1 has put off W0, and so the version that stage 0 computes microbatch 1 on."""
    a, b = "0F0 0B0 0F1 0B1", "1F0 1I0 1F1 1I1 1W0 1W1"
    with pytest.raises(InvalidPlan, match=r"1F1 needs version 1 .* there is by then is 0"):
        lower(by_hand(TWO, 2, "stash+vertical-sync", a=a, b=b))


# --- What holds for every plan ----------------------------------------------------------------


@examples(60)
@given(plans(6))
def test_lowered_programs_keep_what_the_passes_promise(plan: PipelinePlan) -> None:
    program = lower(plan)
    assert program.devices == plan_devices(plan)
    for device, row in zip(program.devices, program.rows, strict=True):
        entries = [one for one in plan.actions if one.device == device]
        order = [parse_action(e.action) for e in sorted(entries, key=lambda e: e.start_seconds)]
        computed = [one.action for one in row if one.action.kind in COMPUTE]
        assert computed == [action for action in order if action.kind in COMPUTE]
        assert most_receives_under_way(row) <= RECEIVE_BUFFERS + 1
    for a, b in combinations(range(len(program.rows)), 2):
        assert transfers_with(program.rows[a], b) == transfers_with(program.rows[b], a)
    verify(plan, program)


def transfers_with(row: Row, peer: int) -> list[Action]:
    """In the row's order, each as the receiver calls it."""
    mine = [one.action for one in row if one.peer == peer]
    return [received(action) if action.kind in SENDS else action for action in mine]


def most_receives_under_way(row: Row) -> int:
    """On any boundary and way: the microbatches that are awaited and not yet computed on."""
    awaited: defaultdict[tuple[int, bool], set[int | None]] = defaultdict(set)
    most = 0
    for one in row:
        s, m, kind = one.action.stage, one.action.microbatch, one.action.kind
        if kind in RECEIVES:
            awaited[s, kind is ActionKind.RECEIVE_FORWARD].add(m)
            most = max(most, *map(len, awaited.values()))
        elif kind in (F, B, I):
            awaited[s, kind is F].discard(m)
    return most


def test_two_receives_are_under_way_where_they_can_be() -> None:
    program = lower(gpipe(straight([1, 1, 1]), 5))
    assert [most_receives_under_way(row) for row in program.rows] == [2, 2, 2]


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_one_f_one_b_keeps_a_version_per_microbatch_in_flight(p: int) -> None:
    """PipeDream: stage s of p keeps p - s versions, and as many for 2BW as for one stage: two."""
    stages = straight([1] * p)
    program = lower(one_f_one_b(stages, 2 * p + 1, "stash"))
    assert [most_versions(row, 1) for row in program.rows] == [p - s for s in range(p)]
    program = lower(one_f_one_b(stages, 2 * p + 1, "double-buffer"))
    assert [most_versions(row, 2) for row in program.rows] == [2] * p


def most_versions(row: Row, held: int) -> int:
    """The versions of a row's only stage at once, from so many on."""
    most, stashed = held, 0
    for one in row:
        stashed += one.action.kind is STASH
        if one.action.kind is UPDATE:
            held, stashed = held + stashed, 0
        held -= one.action.kind is DROP
        most = max(most, held)
    return most


def test_staleness_of_weight_stashing() -> None:
    """PipeDream: in the steady state stage s of p computes on weights p - 1 - s updates old."""
    p, microbatches = 4, 12
    program = lower(one_f_one_b(straight([1] * p), microbatches, "stash"))
    for s, row in enumerate(program.rows):
        before = [one.action for one in row if one.action.kind in (F, UPDATE)]
        updates = before[: before.index(Action(s, F, microbatches - 1))].count(Action(s, UPDATE))
        assert microbatches - 1 - updates == p - 1 - s


def test_interleaved_schedules_are_lowered() -> None:
    stages = [Stage((s, s + 1), (f"d{s % 2}",)) for s in range(6)]
    plan = interleaved(stages, 4)
    verify(plan, lower(plan))


# --- Periodic plans ---------------------------------------------------------------------------


def test_a_periodic_plan_by_hand() -> None:
    """Two stages, F one second and B two, transfers one: a period of three seconds."""
    plan = overlapping(straight([1, 1]), 2)
    order = [f"{turn.operation}+{turn.shift}" for turn in pattern_order(plan)]
    assert order == ["1B+1", "0F+0", "0B+2", "0SEND_F+0", "1SEND_B+1", "1F+0"]
    program = lower_periodic(plan)
    assert [shown(rows) for rows in program.segments] == [
        [
            "0USE0 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1",
            "1RECV_F0<0 1RECV_F1<0 1USE0 1F0 1B0 1SEND_B0>0 1F1",
        ],
        [
            "0USE1 0F2 0SEND_F2>1 0RECV_B1<1 0USE0 0B0 0USE1 0F3 0SEND_F3>1 0RECV_B2<1 0USE0 0B1 "
            "0DROP0 0STASH1 0UPDATE",
            "1RECV_F2<0 1B1 1SEND_B1>0 1DROP0 1STASH1 1UPDATE 1RECV_F3<0 1USE1 1F2 1B2 1SEND_B2>0 "
            "1F3",
        ],
        [
            "0F4 0SEND_F4>1 0RECV_B3<1 0USE1 0B2 0USE2 0F5 0SEND_F5>1 0RECV_B4<1 0USE1 0B3 "
            "0DROP1 0STASH2 0UPDATE",
            "1RECV_F4<0 1B3 1SEND_B3>0 1DROP1 1STASH2 1UPDATE 1RECV_F5<0 1USE2 1F4 1B4 1SEND_B4>0 "
            "1F5",
        ],
    ]
    assert shown(program.drains[2]) == [
        "0RECV_B5<1 0USE2 0B4 0B5 0DROP2 0STASH3 0UPDATE",
        "1B5 1SEND_B5>0 1DROP2 1STASH3 1UPDATE",
    ]
    assert shown(program.segment(4))[0] == (
        "0F8 0SEND_F8>1 0RECV_B7<1 0USE3 0B6 0USE4 0F9 0SEND_F9>1 0RECV_B8<1 0USE3 0B7 "
        "0DROP3 0STASH4 0UPDATE"
    )


def test_an_update_waits_for_its_all_reduce_as_late_as_it_may() -> None:
    plan = overlapping([stage(0, "ab"), stage(1, "c")], 2)
    row = shown(lower_periodic(plan).unrolled(3).rows)[0]
    reduced = row.index("0REDUCE_GRAD")
    assert row.index("0B1") < reduced < row.index("0UPDATE") < row.index("0F4")
    assert row[reduced:].split()[1:5] == ["0DROP0", "0STASH1", "0UPDATE", "0F4"]
    assert row.count("0UPDATE") == row.count("0REDUCE_GRAD") == 3


@examples(50)
@given(periodic_plans(6), st.data())
def test_periodic_programs_keep_what_the_passes_promise(
    plan: PipelinePlan, data: st.DataObject
) -> None:
    """Also where some stages share parameters, if they update them together."""
    family = st.frozensets(st.integers(0, len(plan.stages) - 1), min_size=2)
    is_stashed = plan.weights != "double-buffer"
    may_share = len(plan.stages) > 1 and not is_stashed
    families = data.draw(st.lists(family, max_size=2)) if may_share else []
    program, m = lower_periodic(plan, families), plan.microbatches
    iterations = len(program.segments) + 2
    whole = program.unrolled(iterations)
    start = {(e.device, e.action): e.start_seconds for e in unrolled(plan, iterations * m).actions}
    for device, row in zip(whole.devices, whole.rows, strict=True):
        computed = [one.action for one in row if one.action.kind in COMPUTE]
        times = [start[device, str(action)] for action in computed]
        assert times == sorted(times)
        assert most_receives_under_way(row) <= RECEIVE_BUFFERS + 1
        for s in {one.action.stage for one in row}:
            own = [one for one in row if one.action.stage == s]
            if is_stashed:
                assert most_versions(own, 1) == 1 + most_old_versions(plan, s, iterations * m)
            else:
                assert most_versions(own, 2) <= 2
    verify(plan, program, families=families)


@examples(30)
@given(periodic_plans(5))
def test_what_repeats_is_what_the_order_says(plan: PipelinePlan) -> None:
    """Iterations far from the first are those of the pattern written out, not only the template."""
    program, order, m = lower_periodic(plan), pattern_order(plan), plan.microbatches
    for i in range(len(program.segments) + 3):
        periods = range(i * m, (i + 1) * m)
        written_out = in_periods(plan, order, periods, (i + 1) * m)
        behind = range((i + 1) * m, (i + 1) * m + max(turn.shift for turn in order))
        rest = in_periods(plan, order, behind, (i + 1) * m)
        for rows, found in ((written_out, program.segment(i)), (rest, program.drain(i + 1))):
            for row, own in zip(rows, found, strict=True):
                planned = [one for one in own if one.peer is not None or one.action.kind in COMPUTE]
                assert sorted(map(str, row)) == sorted(map(str, planned))
                computed = [[one for one in each if one.peer is None] for each in (row, planned)]
                assert computed[0] == computed[1]


def most_old_versions(plan: PipelinePlan, s: int, microbatches: int) -> int:
    """The most versions of a stage next to the newest, by the times of the plan."""
    schedule, every = plan.schedule, range(microbatches)
    assert isinstance(schedule, PeriodicSchedule)
    starts, ends = {}, {}
    for one in schedule.actions:
        operation = parse_operation(one.action)
        for m in every if operation.kind in COMPUTE else ():
            start = (one.shift + m) * schedule.period_seconds + one.start_seconds
            starts[operation.of(m)] = start
            if operation.kind in (B, W):
                ends[operation.stage, m] = start + one.seconds
    leader = 0 if plan.weights == "stash+vertical-sync" else s
    used = [sum(ends[leader, k] <= starts[Action(leader, F, m)] for k in every) for m in every]
    most = 0
    for update in every:
        later = [m for m in every if ends[s, m] > ends[s, update]]
        most = max(most, len({used[m] for m in later if used[m] <= update}))
    return most


@examples(60)
@given(st.integers(1, 5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_rounding_changes_no_order(stages: int, microbatches: int, random: Random) -> None:
    """Tenths of seconds, whose sums are no exact numbers."""
    chain = straight([1] * stages)
    problem = pattern_of(chain, microbatches, lambda _: random.choice([0.1, 0.2, 0.3, 0.7]))
    period = period_bound(problem)
    plan = periodic(chain, problem, one_f_one_b_star(problem, period))
    verify(plan, lower_periodic(plan))


def test_what_is_no_periodic_program_is_refused() -> None:
    plan = overlapping(straight([1, 1]), 2)
    with pytest.raises(InvalidPlan, match="'flush' weights, a periodic plan needs 'double-buffer'"):
        lower_periodic(replace(plan, weights="flush"))
    turns = (stage(0, "a", "round-robin"), stage(1, "bc", "round-robin"))
    with pytest.raises(InvalidPlan, match=r"stage 1 is 'round-robin': .* use 'split'"):
        lower_periodic(replace(plan, stages=turns))
    for action, change, message in (
        ("1B", {"shift": 0}, "1B begins before 1F, which it waits for"),
        ("0B", {"shift": 9}, "stage 0 begins iteration 2 by 0F4 before it has ended iteration 0"),
        ("0F", {"action": "7F"}, "7F: there are only 2 stages"),
        ("0F", {"device": "d1"}, "0F runs on 'd1', which is not in its stage"),
        ("1F", {"action": "1W"}, "stage 1 must work .* by 1F and 1B, or .*; found: 1B, 1W"),
    ):
        schedule = plan.schedule
        assert isinstance(schedule, PeriodicSchedule)
        actions = [replace(e, **change) if e.action == action else e for e in schedule.actions]
        broken = replace(plan, schedule=replace(schedule, actions=tuple(actions)))
        with pytest.raises(InvalidPlan, match=message):
            lower_periodic(broken)


# --- The optimizer's steps of a plan -------------------------------------------------------------


def test_an_update_is_where_the_plan_has_it() -> None:
    plan = with_steps(interleaved([Stage((s, s + 1), (f"d{s % 2}",)) for s in range(4)], 2))
    rows = shown(lower(plan).rows)
    assert [row.count("UPDATE") for row in rows] == [2, 2]
    for row, (early, late) in zip(rows, ((2, 0), (3, 1)), strict=True):
        words = row.split()
        assert words.index(f"{early}B1") < words.index(f"{early}UPDATE")
        assert words.index(f"{early}UPDATE") + 1 == words.index(f"{late}B0")
        assert words.index(f"{late}B1") < words.index(f"{late}UPDATE")
    verify(plan, lower(plan))


def test_updates_that_need_each_other_come_at_the_end() -> None:
    plan = with_steps(interleaved([Stage((s, s + 1), (f"d{s % 2}",)) for s in range(4)], 2))
    families = [frozenset((2, 3))]
    program = lower(plan, families)
    first, second = shown(program.rows)
    assert first.endswith(" 0UPDATE 2UPDATE")
    assert second.endswith(" 1UPDATE 3UPDATE")
    verify(plan, program, families=families)
    with pytest.raises(InvalidPlan, match="2UPDATE needs the gradients of other stages"):
        verify(plan, lower(plan), families=families)


@examples(100)
@given(plans(5))
def test_steps_of_random_plans_are_done_once(plan: PipelinePlan) -> None:
    stepping = plan if plan.weights.startswith("stash") else with_steps(plan)
    program = lower(stepping)
    verify(stepping, program)
    for row, without in zip(program.rows, lower(plan).rows, strict=True):
        assert sorted(map(str, row)) == sorted(map(str, without))
