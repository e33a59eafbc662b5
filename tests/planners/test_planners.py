"""Every planner: valid plans, how their cost moves with the problem, and figures by hand."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles import balanced_partitions
from plans import AtFirstPlan, scaled, small_problem
from profiles import examples, slow_after
from strategies import PROBLEMS, hard_problem, paper_problem

from stagewright.formulations.checking import check as checking
from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, Status, silent
from stagewright.formulations.pipelines.bppm import lemma1_seconds
from stagewright.formulations.pipelines.grouped_stages import scheduling_of
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Device, Link, from_matrix, uniform_servers
from stagewright.graphs.machines.ordering import recursive_device_order
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planners import spp
from stagewright.solvers.planners.baselines.pipedream import plan_gpipe
from stagewright.solvers.planners.spp import plan_spp
from stagewright.solvers.planners.steps.proposal import Proposal
from stagewright.solvers.planners.structures.refine import refine
from stagewright.solvers.planning import PLANNERS, plan

LIMITS = Limits(seconds=10.0)
ROUNDING = 1 + 1e-9  # sums of floats
TICKS = 1e-6  # relative: exact planners count in integer ticks
BASELINES = ("dp", "gpipe", "pipedream", "hetpipe")
HEURISTICS = ("spp", *BASELINES)
GB = 1e9
FEW = (LayerCost(840, 1.0, 0.0, 0.0, 2.0),)

slow = examples(10, derandomize=True)


def chain(layers, forward=1.0, backward=2.0, parameters=0.0, output=0.0, saved=0.0):
    """Equal layers, plain SGD."""
    costs = (LayerCost(840, forward, saved, output, backward),)
    named = tuple(Layer(f"l{i}", parameters, costs) for i in range(layers))
    return Chain("equal", "by hand", 840, named, 0.0)


def servers(count, devices, intra=10 * GB, inter=GB, memory=1e12):
    return uniform_servers(count, devices, Link(intra), Link(inter), memory_bytes=memory)


def scheduled(result, action):
    """(start, finish) per device of ``action`` in the plan."""
    return {
        entry.device: (pytest.approx(entry.start_seconds), pytest.approx(entry.finish_seconds))
        for entry in result.plan.actions
        if entry.action == action
    }


class TestEveryPlanner:
    @pytest.mark.covering
    @pytest.mark.parametrize("planner", PLANNERS)
    @pytest.mark.parametrize("problems", PROBLEMS)
    @slow
    @given(st.data())
    def test_the_plan_is_valid(self, problems, planner, data):
        problem = data.draw(PROBLEMS[problems](3, 3, 3))
        result = plan(problem, planner, LIMITS)
        if result.plan is None:
            assert result.status in (Status.INFEASIBLE, Status.NO_ANSWER)
            assert result.reason
            assert (result.cost, result.gap) == (None, None)
            return
        assert check(problem, result.plan) == ()
        assert result.plan.planner == planner == result.planner
        assert result.plan.digest == problem.digest
        assert result.cost == result.plan.predicted.iteration_seconds
        assert 0 <= result.gap <= 1
        assert result.bound <= result.cost
        options = PLANNERS[planner].options
        orders = options.order or options.out_of_order  # optimal among those of their stages
        gap = result.plan.certificate.schedule_gap if orders else result.gap
        assert (result.status is Status.OPTIMAL) == (gap <= TICKS)

    @pytest.mark.parametrize("planner", PLANNERS)
    def test_what_may_be_the_answer_is_checked_once_and_the_answer_once(self, planner, monkeypatch):
        checked = []
        once = checking.read_times

        def counted(problem, drawn):
            if drawn.planner != "reordered":  # a candidate of a search, not yet an attempt
                checked.append(drawn)
            return once(problem, drawn)

        monkeypatch.setattr(checking, "read_times", counted)
        watch = AtFirstPlan()
        limits = Limits(1.0) if planner == "auto" else replace(LIMITS, stop=watch.stop)
        result = plan(small_problem(), planner, limits, watch)
        attempts = [one for one in result.attempts if one.cost_seconds is not None]
        assert result.plan is not None
        if planner == "auto":  # of the answers of its turns, those that may be the best
            seconds = [one.predicted.iteration_seconds for one in checked]
            assert len(seconds) >= 2
            assert all(b <= a * (1 + 1e-9) for a, b in pairwise(seconds))
        else:
            assert len(checked) == len(attempts) + 1
        assert checked[-1] == result.plan

    @pytest.mark.covering
    @pytest.mark.parametrize("planner", PLANNERS)
    @pytest.mark.parametrize("factor", [2.0, 0.5])
    @examples(5, parent=slow)
    @given(st.data())
    def test_twice_the_times_is_twice_the_cost(self, planner, factor, data):
        """Computations, transfers and all-reduces alike."""
        problem = data.draw(hard_problem(3, 3, 3))
        once, other = (plan(p, planner, LIMITS) for p in (problem, scaled(problem, factor)))
        assert (once.plan is None) == (other.plan is None)
        if once.plan is not None:
            assert other.cost == pytest.approx(factor * once.cost, rel=TICKS)

    @pytest.mark.parametrize("planner", PLANNERS)
    def test_one_layer_on_one_device(self, planner):
        problem = PipelineProblem(chain(1), servers(1, 1), 3)
        result = plan(problem, planner, LIMITS)
        assert result.status is Status.OPTIMAL
        assert result.cost == pytest.approx(9.0)
        assert result.gap == 0

    @pytest.mark.parametrize("planner", HEURISTICS)
    def test_the_same_plan_every_time(self, planner):
        problem = small_problem(layers=4, devices=3, microbatches=3)
        assert plan(problem, planner, LIMITS).plan == plan(problem, planner, LIMITS).plan

    def test_an_unknown_planner_is_refused(self):
        with pytest.raises(InputError, match="unknown planner 'magic'; there are spp, exact, dp"):
            plan(small_problem(), "magic")

    def test_planners_say_what_they_are(self):
        assert set(PLANNERS) == {
            "spp",
            "exact",
            *BASELINES,
            "1f1b-star",
            "2bw",
            "2bw-flush",
            "madpipe",
            "pipedream-async",
            "general",
            "launchable",
            "ooo",
            "order",
            "servers",
            "auto",
        }
        for name, info in PLANNERS.items():
            assert info.name == name
            assert info.summary
            assert info.source


class TestInfeasible:
    @pytest.mark.parametrize(
        ("planner", "devices", "shortage"),
        [
            # 4 layers of 2 GB of states and 1 GB per microbatch in flight; 2 microbatches.
            ("dp", 2, (0, 0, 3, 1, 8 * GB + 2 * GB)),  # half of every microbatch
            ("gpipe", 2, (0, 0, 1, 2, 4 * GB + 4 * GB)),
            ("pipedream", 2, (0, 0, 1, 1, 4 * GB + 2 * GB)),
            ("hetpipe", 2, (0, 0, 1, 1, 4 * GB + 2 * GB)),
        ],
    )
    def test_which_stage_and_how_many_bytes(self, planner, devices, shortage):
        memory = 4.5 * GB
        problem = PipelineProblem(
            chain(4, parameters=GB, saved=GB), servers(1, devices, memory=memory), 2
        )
        result = plan(problem, planner, LIMITS)
        stage, first, last, held, need = shortage
        assert result.status is Status.INFEASIBLE
        assert result.plan is None
        assert result.cost is None
        match = re.fullmatch(
            planner + r" has no plan: stage (\d+) \(layers (\d+) to (\d+)\) "
            r"with (\d+) microbatches in flight needs .*, "
            r"device '(\w+)' has 4.5 GB: (\d+) bytes short",
            result.reason,
        )
        assert match, result.reason
        *place, device, short = match.groups()
        assert [int(number) for number in place] == [stage, first, last, held]
        assert device == "s0g0"
        assert int(short) == need - memory

    @pytest.mark.parametrize("planner", ["spp", "exact", "auto"])
    def test_no_partition_at_all(self, planner):
        problem = PipelineProblem(chain(4, parameters=GB), servers(1, 2, memory=3 * GB), 2)
        result = plan(problem, planner, LIMITS)
        assert result.status is Status.INFEASIBLE
        assert result.plan is None
        assert result.reason

    def test_spp_names_the_partition_that_comes_nearest(self):
        """3 layers of 2 GB of states on two devices of 3.5 GB: two layers lack half a GB."""
        problem = PipelineProblem(chain(3, parameters=GB), servers(1, 2, memory=3.5 * GB), 2)
        reason = plan(problem, "spp", LIMITS).reason
        assert "with 1 microbatches in flight needs 4 GB" in reason
        assert "has 3.5 GB: 500000000 bytes short" in reason

    def test_auto_tells_of_every_planner(self):
        problem = PipelineProblem(
            chain(3, parameters=GB, saved=2 * GB), servers(1, 2, memory=5.5 * GB), 2
        )
        result = plan(problem, "auto", LIMITS)
        assert {attempt.planner for attempt in result.attempts} == {
            "balanced", "published", "grouped",
            "spp", "general", "exact",
        }  # fmt: skip
        assert all(attempt.reason for attempt in result.attempts)
        assert "bytes short" in result.reason

    def test_what_no_memory_holds_needs_no_planner(self):
        problem = PipelineProblem(chain(4, parameters=GB), servers(1, 2, memory=3 * GB), 2)
        result = plan(problem, "auto", LIMITS)
        assert (result.status, result.attempts) == (Status.INFEASIBLE, ())
        assert result.reason.startswith("no plan with tensor degree 1, no shards fits")

    def test_hetpipe_needs_equal_servers(self):
        devices = [Device(f"g{v}", "v100", 1e12) for v in range(3)]
        bandwidth = [[GB] * 3] * 3
        cluster = from_matrix(devices, bandwidth, servers=[["g0", "g1"], ["g2"]])
        result = plan(PipelineProblem(chain(2), cluster, 2), "hetpipe", LIMITS)
        assert result.status is Status.INFEASIBLE
        assert (
            result.reason
            == "hetpipe has no plan: servers must have equal numbers of devices, got [1, 2]"
        )


class TestDataParallel:
    @pytest.mark.parametrize("microbatches", [1, 4])
    @pytest.mark.parametrize("devices", [1, 2, 5])
    def test_by_formula(self, devices, microbatches):
        """M P / V + A, A = 2 (V - 1) / V x bytes / bandwidth."""
        problem = PipelineProblem(
            chain(3, 1.0, 2.0, parameters=2 * GB), servers(1, devices), microbatches
        )
        result = plan(problem, "dp", LIMITS)
        reduce = 2 * (devices - 1) / devices * 6 * GB / (10 * GB)
        assert result.cost == pytest.approx(microbatches * 9.0 / devices + reduce)
        (stage,) = result.plan.stages
        assert (stage.layers, stage.replication) == ((0, 3), "split")
        assert stage.devices == tuple(f"s0g{g}" for g in range(devices))


class TestGPipe:
    @pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (2, 2), (4, 8), (6, 3)])
    def test_bubble(self, stages, microbatches):
        """(p - 1) / m of a stage's work, for equal stages and free transfers (thesis 4.2.2)."""
        problem = PipelineProblem(chain(2 * stages), servers(1, stages), microbatches)
        result = plan(problem, "gpipe", LIMITS)
        ideal = microbatches * 2 * 3.0
        assert result.cost == pytest.approx(ideal * (1 + (stages - 1) / microbatches))
        assert result.plan.predicted.bubble == pytest.approx(1 - ideal / result.cost)
        assert [stage.devices for stage in result.plan.stages] == [
            (f"s0g{s}",) for s in range(stages)
        ]

    def test_equal_numbers_of_layers(self):
        result = plan(PipelineProblem(chain(8), servers(1, 3), 2), "gpipe", LIMITS)
        assert [stage.layers for stage in result.plan.stages] == [(0, 3), (3, 6), (6, 8)]

    def test_all_forwards_first(self):
        result = plan(PipelineProblem(chain(2), servers(1, 2), 3), "gpipe", LIMITS)
        on_first = [a.action for a in result.plan.actions if a.device == "s0g0"]
        computed = [name for name in on_first if "SEND" not in name]
        assert [name[1] for name in computed] == ["F"] * 3 + ["B"] * 3


class TestPipeDream:
    @pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 8), (3, 5)])
    def test_bubble(self, stages, microbatches):
        """1F1B's is GPipe's (thesis 4.2.2), here where sharing a layer costs too much."""
        problem = PipelineProblem(
            chain(stages, parameters=1000 * GB), servers(1, stages, memory=1e14), microbatches
        )
        result = plan(problem, "pipedream", LIMITS)
        assert len(result.plan.stages) == stages
        assert result.cost == pytest.approx((microbatches + stages - 1) * 3.0)

    def test_one_forward_one_backward(self):
        problem = PipelineProblem(chain(2, parameters=1000 * GB), servers(1, 2, memory=1e14), 3)
        actions = plan(problem, "pipedream", LIMITS).plan.actions
        last = [a.action for a in actions if a.device == "s0g1" and "SEND" not in a.action]
        assert last == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]


class TestHetPipe:
    """Two servers of two devices; a layer per stage, 1 s forward, 2 s backward, 1 GB of weights."""

    def problem(self, microbatches):
        return PipelineProblem(chain(2, parameters=GB), servers(2, 2), microbatches)

    def test_by_hand(self):
        """Every server runs 2 of 4 microbatches by 1F1B in 9 s; then 1 GB at 1 GB/s."""
        problem = self.problem(4)
        result = plan(problem, "hetpipe", LIMITS)
        assert [(s.layers, s.devices, s.replication) for s in result.plan.stages] == [
            ((0, 1), ("s0g0", "s1g0"), "round-robin"),
            ((1, 2), ("s0g1", "s1g1"), "round-robin"),
        ]
        for m in range(4):
            server = f"s{m % 2}"
            forward = 1.0 * (m // 2)
            assert scheduled(result, f"0F{m}") == {f"{server}g0": (forward, forward + 1)}
            backward = 3.0 * (m // 2)
            assert scheduled(result, f"1F{m}") == {f"{server}g1": (1 + backward, 2 + backward)}
            assert scheduled(result, f"1B{m}") == {f"{server}g1": (2 + backward, 4 + backward)}
            assert scheduled(result, f"0B{m}") == {f"{server}g0": (4 + backward, 6 + backward)}
        assert scheduled(result, "1REDUCE_GRAD") == {"s0g1": (7.0, 8.0)}
        assert scheduled(result, "0REDUCE_GRAD") == {"s0g0": (9.0, 10.0)}
        assert result.cost == pytest.approx(10.0)
        assert check(problem, result.plan) == ()

    def test_the_all_reduce_waits_for_the_longer_pipeline(self):
        """Three microbatches: two on the first server, one (6 s) on the second."""
        result = plan(self.problem(3), "hetpipe", LIMITS)
        assert scheduled(result, "0B1") == {"s1g0": (4.0, 6.0)}
        assert scheduled(result, "0REDUCE_GRAD") == {"s0g0": (9.0, 10.0)}

    def test_a_server_without_microbatches_is_left_out(self):
        result = plan(self.problem(1), "hetpipe", LIMITS)
        assert [s.devices for s in result.plan.stages] == [("s0g0",), ("s0g1",)]
        assert result.cost == pytest.approx(6.0)


class TestSpp:
    @slow
    @given(paper_problem(4, 4, 6))
    def test_the_theorems_are_attached_when_memory_is_ample(self, problem):
        result = plan(problem, "spp", LIMITS)
        lemma, theorem = result.plan.certificate.guarantees
        assert "Lemma 1" in lemma.theorem
        assert "Theorem 1" in theorem.theorem
        assert lemma.holds
        assert theorem.holds
        assert theorem.cost_seconds == pytest.approx(result.cost)
        table = balanced_partitions(problem, recursive_device_order(problem.cluster))
        least = min(seconds for seconds, _ in table.values())
        share = (4 * len(problem.cluster) - 4) / problem.microbatches
        assert theorem.seconds >= (2 + share) * least / ROUNDING
        assert lemma.cost_seconds >= result.cost / ROUNDING
        scheduling = scheduling_of(problem, lemma.stages)
        assert lemma.seconds == pytest.approx(lemma1_seconds(scheduling))

    @examples(60, quick=3, parent=slow)
    @given(hard_problem(4, 8, 4), st.integers(1, 3))
    def test_many_devices_are_taken_in_units(self, problem, most):
        """With more devices than MOST_UNITS, in units of 2 or 4: a valid plan, nothing promised."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spp, "MOST_UNITS", most)
            result = plan(problem, "spp", LIMITS)
        assume(result.plan is not None)
        assert not check(problem, result.plan)
        if len(problem.cluster) > most:
            assert result.plan.certificate.guarantees == ()

    def test_units_are_powers_of_two_that_every_layer_can_be_split_among(self):
        """2,048 devices are 1,024 units of 2; a layer for at most 3 devices forbids units of 4."""
        assert spp._units(PipelineProblem(chain(9), servers(256, 8), 4), None) == (2, 2048)
        assert spp._units(PipelineProblem(chain(9), servers(160, 8), 4), None) == (1, 1280)
        assert spp._units(PipelineProblem(chain(9), servers(256, 8), 4), 512) == (1, 512)
        few = replace(chain(9), layers=(*chain(8).layers, Layer("few", 0.0, FEW, min_samples=280)))
        assert spp._units(PipelineProblem(few, servers(512, 8), 4), None) == (2, 2560)

    def test_they_are_absent_when_memory_binds(self):
        """Two stages with 2 GB of states; the first holds 2 of 8 microbatches of 1 GB."""
        problem = PipelineProblem(
            chain(2, parameters=GB, saved=GB), servers(1, 2, memory=4.5 * GB), 8
        )
        result = plan(problem, "spp", LIMITS)
        assert len(result.plan.stages) == 2
        assert result.plan.certificate.guarantees == ()

    @examples(60, parent=slow)
    @given(hard_problem(5, 4, 5))
    def test_what_is_attached_holds(self, problem):
        proposal = plan_spp(problem, LIMITS, silent)
        assume(isinstance(proposal, Proposal))
        assert all(guarantee.holds for guarantee in proposal.guarantees)


class TestRefine:
    def test_moves_a_border(self):
        """GPipe halves the layers of 1, 1, 1, 3 s; three and one are even."""
        layers = tuple(
            Layer(f"l{i}", 1000 * GB, (LayerCost(840, time / 3, 0.0, 0.0, 2 * time / 3),))
            for i, time in enumerate([1.0, 1.0, 1.0, 3.0])
        )
        cluster = servers(1, 2, memory=1e14)
        problem = PipelineProblem(Chain("uneven", "by hand", 840, layers, 0.0), cluster, 4)
        refined = refine(problem, plan_gpipe(problem, LIMITS, silent), LIMITS, silent)
        assert [stage.layers for stage in refined.stages] == [(0, 3), (3, 4)]
        assert "stages refined in 1 steps" in refined.notes


class TestAuto:
    @pytest.mark.parametrize(
        "problem",
        slow_after(
            1,
            [
                PipelineProblem(chain(3, parameters=GB / 2, output=GB), servers(1, 3), 2),
                PipelineProblem(chain(3, parameters=GB), servers(2, 2), 4),
                small_problem(layers=4, devices=3, microbatches=3),
            ],
            ["large boundaries", "two servers", "two kinds"],
        ),
    )
    def test_never_worse_than_another_planner(self, problem):
        best = plan(problem, "auto", LIMITS)
        # The general search alone has twice the time that it has here, and may find more in it.
        rivals = {one.name for one in PLANNERS.values() if not one.options.period_seconds} - {
            "auto",
            "general",
            "order",
            "pipedream-async",  # its iterations overlap
        }
        for name in sorted(rivals):
            other = plan(problem, name, LIMITS)
            assert other.cost is None or best.cost <= other.cost * (1 + TICKS), name

    @pytest.mark.parametrize("planner", ["auto", "spp", "exact"])
    def test_a_limit_that_is_too_short(self, planner):
        result = plan(small_problem(), planner, Limits(seconds=1e-9))
        assert result.status is Status.NO_ANSWER
        assert result.plan is None
        assert "time limit" in result.reason


@pytest.mark.parametrize("planner", ["spp", "auto"])
def test_work_that_takes_no_time(planner):
    """Only the all-reduce and the transfers last: brackets of W begin at zero."""
    cost = LayerCost(4, 0.0, 1e6, 8.4e6, backward_seconds=0.0)
    chain = Chain("idle", "test", 4, tuple(Layer(name, 5e7, (cost,)) for name in "abcd"))
    cluster = uniform_servers(2, 2, Link(1e11), Link(1.25e10))
    problem = PipelineProblem(chain, cluster, 2)
    result = plan(problem, planner, Limits(2.0))
    assert result.plan is not None
    assert check(problem, result.plan) == ()
