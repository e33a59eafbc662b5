"""The benchmarks of the executor run, and compare like with like."""

from itertools import product
from typing import Any

import pytest
from profiles import slow_after
from ranks import Ranks

from stagewright.executor.programs.lower import lower
from stagewright.formulations.plans.actions import COMPUTE
from stagewright.formulations.schedules.published.one_f_one_b import interleaved

pytest.importorskip("torch", reason="the executor needs torch")

from benchmarks import executor, forecasts

pytestmark = pytest.mark.real


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_every_instruction_of_the_empty_interpreter_is_timed(world: int):
    turns, microbatches = 2, executor.EMPTY_MICROBATCHES
    taken: dict[str, int] = {}
    for of_rank in executor.on_ranks(world, executor.overhead, turns):
        for name, seconds in of_rank.items():
            assert min(seconds) >= 0
            taken[name] = taken.get(name, 0) + len(seconds)
    boundaries = executor.EMPTY_STAGES - 1
    of_stage = turns * microbatches
    assert taken["F"] == taken["B"] == boundaries * of_stage
    assert taken["F with the loss"] == taken["B with the loss"] == of_stage
    sent = boundaries * of_stage if world == 2 else 0
    for name in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"):
        assert taken.get(name, 0) == sent


def test_plan_in_order_runs_in_that_order():
    for ranks, chunks, microbatches in product((1, 2, 4), (1, 2), (4, 8)):
        orders = interleaved(ranks, chunks, microbatches).rows
        program = lower(executor.plan_in_order(orders, [1] * ranks * chunks))
        for row, order in zip(program.rows, orders, strict=True):
            found = tuple(one.action for one in row if one.action.kind in COMPUTE)
            assert found == order


@pytest.mark.parametrize(
    "schedule", slow_after(1, ["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"])
)
def test_torch_has_the_same_losses(ranks: Ranks, schedule: str):
    chunks = 1 if schedule in ("1F1B", "GPipe") else 2
    case = executor.Race(schedule, chunks=chunks, hidden=16)
    for turns in ranks.run(race, 2, case):  # which compares them
        assert [clock.ended > clock.began for pair in turns for clock in pair] == [True, True]


def race(_: Any, rank: int, case: Any) -> Any:
    return executor.race(rank, case, turns=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planner", "cuts", "kind"),
    [("gpipe", "0-4 on 1; 5-9 on 1", "transfers"), ("dp", "0-9 on 2", "all-reduces")],
)
def test_forecast_is_of_the_calmest_steps(ranks: Ranks, planner: str, cuts: str, kind: str):
    case = forecasts.Forecast("transformer, width 16", planner)
    (outcome,), nothing = ranks.run(forecast, 2, case, timeout_seconds=300)
    assert nothing == []
    assert outcome.cuts == cuts
    assert outcome.comparison.steps == 3
    assert outcome.calm_ratio > 0
    for name in ("forwards", "backwards", kind):
        assert outcome.ratio_of(name) > 0


def forecast(_: Any, rank: int, case: Any) -> Any:
    return forecasts.forecast(rank, case, turns=1, steps=3)
