"""The measured times of operators and transfers, in the form of all traces.

An operator is called by its number in the plan: ``12RUN`` is the plan's operator 12, ``12SEND_O0``
the transfer of its output 0.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from stagewright.executor.programs.operators.placed import PlacedGraph
from stagewright.executor.programs.trace import RankAction, TracedStep
from stagewright.formulations.operators.plan import OperatorPlan, PlacedOperator, Transfer
from stagewright.formulations.plans.actions import Action, ActionKind, parse_action
from stagewright.formulations.plans.plan import ScheduledAction
from stagewright.graphs.documents.errors import InputError

RUN, SEND = ActionKind.RUN, ActionKind.SEND_OUTPUT


def traced_operators(
    placed: PlacedGraph, step: int, records: Iterable[RankAction], loss: float | None = None
) -> TracedStep:
    """One step from the records of all ranks, in any order.

    A transfer lasts from its sending to its receipt.
    """
    devices = placed.devices
    actions, sent, received = [], {}, {}
    updates = [0.0] * len(devices)
    for one in records:
        action = parse_action(one.action)
        if action.kind is RUN:
            times = one.start_seconds, one.finish_seconds
            actions.append(ScheduledAction(devices[one.rank], one.action, *times))
            if placed.nodes[action.stage].role == "update":
                updates[one.rank] += one.finish_seconds - one.start_seconds
        elif action.kind is SEND:
            assert one.peer is not None
            sent[action.stage, action.microbatch, one.rank, one.peer] = one
        else:
            assert one.peer is not None
            received[action.stage, action.microbatch, one.peer, one.rank] = one
    for place, one in sent.items():
        source, target = devices[place[2]], devices[place[3]]
        # The ranks' clocks agree to microseconds only; nothing is received before it is sent.
        finish = max(one.start_seconds, received[place].finish_seconds)
        actions.append(
            ScheduledAction(
                source, one.action, one.start_seconds, finish, (source,), (target,), one.bytes
            )
        )
    actions.sort(key=lambda one: (one.start_seconds, one.finish_seconds, one.device, one.action))
    known = loss if loss is not None and math.isfinite(loss) else None
    end = max(one.finish_seconds for one in actions)
    return TracedStep(step, end, max(updates), tuple(actions), known)


def scheduled_operators(plan: OperatorPlan) -> tuple[ScheduledAction, ...]:
    """The plan's operators and transfers as actions, by ascending start."""
    number = {one.operator: n for n, one in enumerate(plan.operators)}
    device = {one.operator: one.device for one in plan.operators}
    actions = [
        ScheduledAction(one.device, str(Action(n, RUN)), one.start_seconds, one.finish_seconds)
        for n, one in enumerate(plan.operators)
    ]
    actions += [
        ScheduledAction(
            device[one.operator],
            str(Action(number[one.operator], SEND, one.output)),
            one.start_seconds,
            one.finish_seconds,
            (device[one.operator],),
            (one.device,),
        )
        for one in plan.transfers
    ]
    return tuple(sorted(actions, key=lambda one: (one.start_seconds, one.finish_seconds)))


def with_times(plan: OperatorPlan, step: TracedStep) -> OperatorPlan:
    """``plan`` with the times of a traced step, to be drawn next to it; without its certificate.

    Operators keep their places in the plan, as their numbers are; inputs and states take no time.
    """
    operators: dict[int, PlacedOperator] = {}
    transfers: list[Transfer] = []
    for one in step.actions:
        action, times = parse_action(one.action), (one.start_seconds, one.finish_seconds)
        if action.kind not in (RUN, SEND) or action.stage >= len(plan.operators):
            raise InputError(f"step {step.step}: {one.action} is no action of the plan's operators")
        name = plan.operators[action.stage].operator
        if action.kind is RUN and plan.operators[action.stage].role in ("input", "state"):
            continue
        if action.kind is RUN:
            operators[action.stage] = replace(
                plan.operators[action.stage], start_seconds=times[0], finish_seconds=times[1]
            )
        else:
            assert action.microbatch is not None
            assert one.targets is not None
            transfers.append(Transfer(name, action.microbatch, one.targets[0], *times))
    placed = tuple(operators.get(n, one) for n, one in enumerate(plan.operators))
    return replace(plan, operators=placed, transfers=tuple(transfers), certificate=None)
