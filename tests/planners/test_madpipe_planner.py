"""The periodic planners, from the problem to the certified plan."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import small_problem
from profiles import examples
from typer.testing import CliRunner

from stagewright.cli import app
from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.patterns.joint_patterns import ALLOCATIONS
from stagewright.formulations.patterns.one_f_one_b import PATTERN_LOAD, least_period
from stagewright.formulations.patterns.pattern_problems import pattern_problem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import PeriodicSchedule, Stage
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Device, Link, from_matrix, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.patterns.pattern import BACKENDS
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planning import Result, plan
from stagewright.solvers.proofs import check_with_proofs

ALONE = Choices(group_size=1)


def chain_of(
    seconds: list[float], saved: list[float], output: float = 1e6, parameters: float = 1e6
) -> Chain:
    """Forward a third of the time, backward the rest."""
    layers = tuple(
        Layer(f"l{i}", parameters, (LayerCost(8, t / 3, kept, output, 2 * t / 3),))
        for i, (t, kept) in enumerate(zip(seconds, saved, strict=True))
    )
    return Chain("chain", "test", 8, layers, optimizer_bytes_per_parameter_byte=0.0)


def problem_of(chain: Chain, devices: int, memory: float, microbatches: int = 8) -> PipelineProblem:
    cluster = uniform_servers(1, devices, Link(12e9), memory_bytes=memory)
    return PipelineProblem(chain, cluster, microbatches)


def with_hosts(problem: PipelineProblem, bytes_per_second: float) -> PipelineProblem:
    devices = (
        replace(one, host_bytes_per_second=bytes_per_second) for one in problem.cluster.devices
    )
    return replace(problem, cluster=replace(problem.cluster, devices=tuple(devices)))


def solved(problem: PipelineProblem, planner: str, choices: Choices = ALONE) -> Result:
    result = plan(problem, planner, Limits(30), choices=choices)
    if result.plan is not None:
        assert check(problem, result.plan) == ()
        assert isinstance(result.plan.schedule, PeriodicSchedule)
        assert result.cost == pytest.approx(
            problem.microbatches * result.plan.schedule.period_seconds
        )
        assert result.bound is not None
        assert result.bound <= result.cost
        proof = result.plan.certificate
        assert proof is not None
        # What the pattern's solver has proved is in the certificate.
        solved_for = [one.seconds for one in proof.bounds if "pattern" in one.proved_by]
        assert len(solved_for) == 1
        assert solved_for[0] <= proof.schedule_bound_seconds * (1 + 1e-9)
    return result


def test_equal_layers_without_limits_are_proved_optimal():
    problem = problem_of(chain_of([0.03] * 8, [1e6] * 8, output=1e3), 4, 16e9)
    result = solved(problem, "1f1b-star")
    assert result.status is Status.OPTIMAL
    assert result.cost == pytest.approx(8 * 0.06, rel=1e-6)


def test_a_special_device_beats_every_contiguous_partition():
    # Work 3, 2, 3 on two devices: 5 at best in a row, 4 with the halves of 2 apart is not to be
    # had; but the outer two layers against a longer inner one are: 2 + 2 and 4.
    problem = problem_of(chain_of([0.2, 0.4, 0.2], [1e6] * 3, output=1e3), 2, 16e9)
    contiguous, madpipe = solved(problem, "1f1b-star"), solved(problem, "madpipe")
    assert contiguous.cost == pytest.approx(8 * 0.6, rel=1e-4)
    assert madpipe.cost == pytest.approx(8 * 0.4, rel=1e-4)
    assert madpipe.plan is not None
    owners = [stage.devices for stage in madpipe.plan.stages]
    assert owners[0] == owners[2] != owners[1]


@st.composite
def cases(draw: st.DrawFn) -> PipelineProblem:
    count = draw(st.integers(2, 6))
    seconds = draw(st.lists(st.sampled_from((0.01, 0.02, 0.05)), min_size=count, max_size=count))
    saved = draw(st.lists(st.sampled_from((1e8, 3e8, 5e8)), min_size=count, max_size=count))
    memory = draw(st.sampled_from((1e9, 1.5e9, 4e9)))
    output = draw(st.sampled_from((1e6, 5e7)))
    chain = chain_of(seconds, saved, output)
    return problem_of(chain, draw(st.integers(1, 3)), memory, draw(st.integers(2, 6)))


@given(cases())
@examples(12)
def test_madpipe_is_never_worse_and_both_keep_their_bounds(problem: PipelineProblem):
    contiguous, madpipe = solved(problem, "1f1b-star"), solved(problem, "madpipe")
    if contiguous.cost is not None:
        assert madpipe.cost is not None
        assert madpipe.cost <= contiguous.cost * (1 + 1e-9)
        assert madpipe.plan is not None
        stages = madpipe.plan.stages
        if all(one.devices != other.devices for one, other in pairwise(stages)):
            # The joint search proves these small cases.
            assert madpipe.bound == pytest.approx(madpipe.cost, rel=1e-5)


def test_1f1b_star_is_the_best_of_all_contiguous_partitions():
    saved = [5e8, 3e8, 2e8, 1e8, 1e8, 1e8]
    problem = problem_of(chain_of([0.03, 0.02, 0.04, 0.05, 0.02, 0.03], saved, 2e7), 3, 1.3e9)
    names = [device.name for device in problem.cluster.devices]
    best = float("inf")
    for one in range(1, 7):
        for other in range(one, 7):
            cuts = sorted({0, one, other, 6})
            stages = [
                Stage((start, stop), (name,))
                for start, stop, name in zip(cuts, cuts[1:], names, strict=False)
            ]
            best = min(best, least_period(pattern_problem(problem, stages)))
    assert solved(problem, "1f1b-star").cost == pytest.approx(8 * best, rel=1e-9)


def test_more_memory_never_hurts():
    chain = chain_of([0.03, 0.02, 0.04, 0.05, 0.02, 0.03], [5e8, 3e8, 2e8, 1e8, 1e8, 1e8], 2e7)
    costs = [solved(problem_of(chain, 3, memory), "madpipe").cost for memory in (1.1e9, 1.6e9, 9e9)]
    found = [cost for cost in costs if cost is not None]
    assert len(found) >= 2
    assert found == sorted(found, reverse=True)


def test_groups_that_split_microbatches_are_found_when_memory_allows():
    problem = problem_of(chain_of([0.03] * 5, [1e8] * 5, output=4e8), 4, 16e9)
    result = solved(problem, "madpipe", Choices())
    assert result.plan is not None
    assert max(len(stage.devices) for stage in result.plan.stages) > 1
    assert result.cost is not None
    assert result.cost < (solved(problem, "madpipe").cost or 0)


def test_recomputation_and_offloading_make_room():
    problem = with_hosts(problem_of(chain_of([0.03] * 4, [6e8] * 4), 2, 2.0e9), 100e9)
    plain = solved(problem, "madpipe")
    again = solved(problem, "madpipe", replace(ALONE, recompute="full"))
    away = solved(problem, "madpipe", replace(ALONE, offload=True))
    assert plain.cost is not None
    assert again.cost is not None
    assert away.cost is not None
    assert again.cost < plain.cost
    assert away.cost <= plain.cost
    assert again.plan is not None
    assert any(stage.recompute == "full" for stage in again.plan.stages)


def test_stages_that_offload_are_bounded_by_their_loads(usual_searches):
    """Of four equal stages on two devices, one must offload; each device computes for 60 ms."""
    problem = with_hosts(problem_of(chain_of([0.03] * 4, [6e8] * 4), 2, 2.0e9), 100e9)
    result = plan(problem, "madpipe", Limits(30), choices=replace(ALONE, offload=True))
    assert result.plan is not None
    assert any(stage.offload for stage in result.plan.stages)
    assert check(problem, result.plan) == ()
    assert result.plan.certificate is not None
    bounds = [one for one in result.plan.certificate.bounds if one.scope == "schedule"]
    assert [(one.proved_by, one.plans.offload) for one in bounds] == [(PATTERN_LOAD, True)]
    assert result.plan.certificate.schedule_bound_seconds == pytest.approx(0.48)


def test_a_given_period_is_kept():
    problem = problem_of(chain_of([0.03] * 6, [1e8] * 6), 3, 4e9)
    result = solved(problem, "madpipe", replace(ALONE, period_seconds=0.1))
    assert result.cost == pytest.approx(0.8)


def test_a_period_below_the_load_is_refused_with_the_bound():
    problem = problem_of(chain_of([0.03] * 6, [1e8] * 6), 3, 4e9)
    with pytest.raises(InputError, match=r"period 0\.05 s is below the load bound of 0\.06 s"):
        plan(problem, "1f1b-star", choices=replace(ALONE, period_seconds=0.05))


def test_a_period_that_memory_forbids_is_no():
    problem = problem_of(chain_of([0.03] * 6, [4e8] * 6), 3, 1e9)
    result = plan(problem, "madpipe", choices=replace(ALONE, period_seconds=0.0601))
    assert result.plan is None
    assert "the best has" in result.reason


def test_infeasible_names_stage_device_and_bytes():
    problem = problem_of(chain_of([0.03] * 4, [9e8] * 4, output=1e6, parameters=1e6), 2, 1e9)
    for planner in ("1f1b-star", "madpipe"):
        result = plan(problem, planner, choices=ALONE)
        assert result.status is Status.INFEASIBLE
        # Two layers on a device: 1.8 GB, 6 MB of weights and gradients, 2 MB of buffers.
        assert "stage 0 (layers 0 to 1) needs 1.81 GB" in result.reason
        assert "device 's0g0' has 1 GB: 808000000 bytes short" in result.reason


def test_choices_are_for_periodic_planners_and_refused_when_they_make_no_sense():
    problem = small_problem()
    with pytest.raises(InputError, match="use 1f1b-star or madpipe"):
        plan(problem, "spp", choices=ALONE)
    with pytest.raises(InputError, match="group size 9"):
        plan(problem, "madpipe", choices=Choices(group_size=9))
    with pytest.raises(InputError, match="'g0' has none"):
        plan(problem, "madpipe", choices=Choices(offload=True))


def rows_of(*rows: tuple[float, float, float, float, float], samples: int = 2) -> Chain:
    """Forward, backward, parameters, saved and output bytes of every layer."""
    layers = tuple(
        Layer(f"l{i}", weights, (LayerCost(samples, forward, saved, output, backward),))
        for i, (forward, backward, weights, saved, output) in enumerate(rows)
    )
    return Chain("rows", "test", samples, layers, optimizer_bytes_per_parameter_byte=0.0)


def test_fewer_layers_than_moves_need():
    problem = problem_of(rows_of((1, 2, 0, 1e6, 1e6), (1, 2, 0, 1e6, 1e6)), 3, 1e9)
    assert solved(problem, "madpipe", Choices(group_size=2)).cost is not None


def test_layers_without_time_stand_between_the_others():
    chain = rows_of((3, 5, 0, 0, 883e6), (0, 5, 0, 0, 1), (3, 5, 0, 0, 1))
    assert solved(problem_of(chain, 3, 1e9, 2), "madpipe").cost is not None


@pytest.mark.parametrize("period", [1e-4, 1e-2])
def test_a_period_may_be_much_longer_than_the_least(period: float):
    problem = problem_of(chain_of([1e-6] * 4, [1e6] * 4, output=1e3), 2, 4e9)
    result = solved(problem, "madpipe", replace(ALONE, period_seconds=period))
    assert result.cost == pytest.approx(8 * period)


def test_a_period_out_of_all_proportion_is_refused():
    problem = problem_of(chain_of([1e-6] * 4, [1e6] * 4, output=1e3), 2, 4e9)
    with pytest.raises(InputError, match="is it in seconds"):
        plan(problem, "madpipe", choices=replace(ALONE, period_seconds=1e5))


def test_models_without_time_and_absurd_sizes_are_refused():
    with pytest.raises(InputError, match="take no time"):
        plan(problem_of(rows_of((0, 0, 1e6, 1e6, 1e6)), 2, 1e9), "madpipe", choices=ALONE)
    chain = rows_of((1, 1, 1e18, 1e18, 1e6))
    with pytest.raises(InputError, match="are the sizes in bytes"):
        plan(problem_of(chain, 2, 1e30), "madpipe", choices=ALONE)


@pytest.mark.parametrize(
    "wrong",
    [
        {"group_size": "1"}, {"group_size": 1.0}, {"group_size": 0}, {"recompute": "yes"},
        {"period_seconds": "1"}, {"period_seconds": float("nan")},
        {"period_seconds": float("inf")}, {"period_seconds": -1.0},
    ],
)  # fmt: skip
def test_choices_of_other_types_are_refused(wrong: dict[str, Any]):
    with pytest.raises(InputError):
        Choices(**wrong)


def test_nothing_is_called_infeasible_because_more_is_allowed():
    # Contiguous partitions do not fit; others do.
    weights = [2e9, 2e9, 2e9, 2e9, 4e9 / 3, 4e9 / 3, 4e9 / 3, 4e9 / 3]
    chain = rows_of(*((1.0, 1.0, size, 0, 1) for size in weights))
    problem = with_hosts(problem_of(chain, 4, 10.01e9), 1e9)
    assert solved(problem, "madpipe").cost is not None
    more = solved(problem, "madpipe", replace(ALONE, offload=True))
    assert more.status is not Status.INFEASIBLE


def test_groups_of_devices_that_differ_prove_nothing_of_other_groups():
    devices = (Device("d0", "b", 0.9e9), Device("d1", "b", 17e9), Device("d2", "b", 17e9))
    cluster = from_matrix(devices, [[1e9] * 3] * 3)
    problem = PipelineProblem(rows_of((2, 2, 1e8, 1e9, 1)), cluster, 4)
    result = plan(problem, "madpipe", Limits(3), choices=Choices(group_size=2))
    assert result.status is not Status.INFEASIBLE


def test_neighbouring_stages_on_a_device_are_named_in_the_proof():
    rows = ((0, 1, 0, 3e9, 1), (0, 6, 3e9, 1e9, 605e6), (0, 1, 0, 3e9, 1), (4, 2, 3e9, 8e9, 1))
    cluster = uniform_servers(1, 2, Link(5e8), memory_bytes=34e9)
    problem = PipelineProblem(rows_of(*rows), cluster, 1)
    result = solved(problem, "madpipe")
    assert result.plans is not None
    # Two stages next to each other on one device would do in 7 s; the proof says that it does not
    # speak of them.
    assert result.cost == pytest.approx(7.0) or result.plans.merged


def test_links_and_kinds_that_differ():
    problem = replace(small_problem(microbatches=6), memory_limit_bytes=1.5e9)
    contiguous = solved(problem, "1f1b-star", Choices())
    madpipe = solved(problem, "madpipe", Choices())
    assert contiguous.cost is not None
    assert madpipe.cost is not None
    assert madpipe.cost <= contiguous.cost


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    problem = problem_of(chain_of([0.03, 0.02, 0.05, 0.04], [5e8] * 4), 3, 16e9)
    paths = []
    for name, document in (("model", problem.chain), ("cluster", problem.cluster)):
        path = tmp_path / f"{name}.json"
        documents.write_file(path, documents.to_json(document))
        paths += [f"--{name}", str(path)]
    return paths


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_the_command_plans_checks_and_keeps_the_memory_limit(files: list[str], tmp_path: Path):
    target = str(tmp_path / "plan.json")
    asked = ["plan", *files, "--microbatches", "4", "--planner", "madpipe", "--group-size", "1"]
    code, out, _ = run(*asked, "--memory-limit", "1.2GB", "-o", target, "--json")
    assert code == 0
    told = json.loads(out)
    assert told["memory_limit_bytes"] == 1.2e9
    assert max(told["peak_memory_bytes_per_device"].values()) <= 1.2e9
    # The plan knows its limit: the files are the same.
    assert run("check", target, *files)[0] == 0


def test_the_command_solves_patterns_by_any_backend(files: list[str]):
    asked = ["plan", *files, "--microbatches", "4", "--planner", "1f1b-star", "--group-size", "1"]
    told = [json.loads(run(*asked, "--json", "--backend", name)[1]) for name in BACKENDS]
    costs = [one["cost_seconds"] for one in told]
    assert costs == pytest.approx([costs[0]] * len(BACKENDS))
    code, _, error = run(*asked, "--backend", "highs-ipm")
    assert (code, "'highs-ipm' solves no patterns; use auto or highs or" in error) == (2, True)
    code, _, error = run(*asked[:-2], "--planner", "spp", "--backend", "highs")
    assert (code, "'spp' does not support a backend: use" in error) == (2, True)


def test_the_chosen_backend_solves_the_patterns(monkeypatch: pytest.MonkeyPatch):
    """A problem whose list schedules leave a gap to the bounds."""
    asked: list[str] = []
    for name in BACKENDS:
        monkeypatch.setitem(BACKENDS, name, lambda _, name=name: asked.append(name))
    saved = [4e8, 9e8, 3e8, 9e8, 2e8, 6e8]
    problem = problem_of(chain_of([0.8, 1.6, 1.1, 2.9, 2.1, 1.0], saved), 3, 3e9)
    for name in ("pulp-cbc", "cp-sat"):
        plan(problem, "madpipe", choices=replace(ALONE, backend=name))
        assert set(asked) == {name}
        asked.clear()


def test_the_command_says_no_and_refuses(files: list[str]):
    asked = ["plan", *files, "--microbatches", "4", "--planner", "1f1b-star"]
    code, out, _ = run(*asked, "--memory-limit", "600MB", "--group-size", "1")
    assert code == 1
    assert "bytes short" in out
    code, _, error = run(*asked, "--period", "0.001")
    assert code == 2
    assert "below the load bound" in error
    code, _, error = run(*asked, "--memory-limit", "8B")
    assert code == 2
    assert "8GB" in error


def three_devices(slow_pair: bool, kinds: str) -> PipelineProblem:
    bandwidth = np.full((3, 3), 2e10)
    if slow_pair:
        bandwidth[0, 1] = bandwidth[1, 0] = 1e9
    devices = [Device(f"d{i}", kind, 4e9) for i, kind in enumerate(kinds)]
    chain = chain_of([0.03, 0.02, 0.05, 0.01], [1e8] * 4, output=1e6, parameters=5e7)
    return PipelineProblem(chain, from_matrix(devices, bandwidth.tolist()), 2)


@pytest.mark.parametrize("planner", ["madpipe", "1f1b-star"])
@pytest.mark.parametrize(
    ("slow_pair", "kinds"), [(False, "aaa"), (True, "aaa"), (False, "aab"), (False, "aba")]
)
def test_no_bound_is_refuted_where_groups_differ(planner: str, slow_pair: bool, kinds: str):
    """Of three devices two form one group: a bound for that group says nothing of the others."""
    problem = three_devices(slow_pair, kinds)
    result = solved(problem, planner, Choices())
    assert result.plan is not None
    broken, verdicts = check_with_proofs(problem, result.plan, Limits(20.0))
    assert broken == ()
    assert all(verdict.verdict != "refuted" for verdict in verdicts)
    assert result.plan.certificate is not None
    searched = [
        bound.plans.equal_groups
        for bound in result.plan.certificate.bounds
        if bound.proved_by == ALLOCATIONS
    ]
    if slow_pair or kinds != "aaa":
        assert all(sizes is not None and 2 not in sizes for sizes in searched)
