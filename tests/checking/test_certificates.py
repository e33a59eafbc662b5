"""What a certificate says is true of the plans that it names; what is forged is refuted."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from plans import made_up_certificate, make_stages, small_problem, valid_plan

import stagewright
from stagewright.formulations.checking.certificates import certificate, headlines
from stagewright.formulations.checking.check import check, predict
from stagewright.formulations.checking.proofs import verdicts
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.pipelines.bounds import every_plan
from stagewright.formulations.pipelines.bounds.server_relaxation import RELAXED_TREE, SERVERS
from stagewright.formulations.pipelines.grouped_stages import scheduling_of
from stagewright.formulations.pipelines.windows import WINDOWS
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Bound, PipelinePlan, load_plan
from stagewright.formulations.plans.plan_class import (
    DISJOINT_SPLIT,
    EVERY_FINITE,
    EVERY_PERIODIC,
    EVERY_PLAN,
    PATTERNS,
    SEARCHED_ALLOCATIONS,
    SHARDS,
    WHOLE_FINITE,
    WHOLE_PERIODIC,
    PlanClass,
    class_of,
)
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.machines.cluster import Link, load_cluster, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost, load_model
from stagewright.solvers.pipelines.scheduling import solve_schedule
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planning import plan
from stagewright.solvers.proofs import prove

PROOFS = Path(__file__).resolve().parents[3] / "shared" / "data" / "proofs"
MICROBATCHES = {
    "interleaved": 2, "roundrobin": 3, "iw": 2, "infeasible": 2, "crash2": 3, "crash128": 3,
    "theorem": 1,
}  # fmt: skip
LIMITS = Limits(seconds=3.0)
NAMED = (
    EVERY_PLAN, EVERY_FINITE, WHOLE_FINITE, DISJOINT_SPLIT, EVERY_PERIODIC, WHOLE_PERIODIC,
    SEARCHED_ALLOCATIONS, PATTERNS,
)  # fmt: skip
needs_cases = pytest.mark.skipif(not PROOFS.is_dir(), reason="no cases of proofs beside the code")


def case(name: str) -> PipelineProblem:
    chain = load_model(PROOFS / f"{name}.model.json")
    return PipelineProblem(chain, load_cluster(PROOFS / f"{name}.cluster.json"), MICROBATCHES[name])


class TestClasses:
    def test_the_default_contains_every_class(self):
        assert all(EVERY_PLAN.contains(one) for one in NAMED)
        assert not any(one.contains(EVERY_PLAN) for one in NAMED[1:])

    def test_inclusion_is_a_partial_order(self):
        for one in NAMED:
            assert one.contains(one)
            for other in NAMED:
                assert one == other or not (one.contains(other) and other.contains(one))
        assert EVERY_FINITE.contains(DISJOINT_SPLIT)
        assert not DISJOINT_SPLIT.contains(SEARCHED_ALLOCATIONS)

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"tensor": "any", "shards": SHARDS}, "every plan"),
            ({"schedules": ("finite",), "tensor": "any", "shards": SHARDS}, "every finite plan"),
            ({"tensor": "any"}, "every plan with no shards"),
            ({}, "every plan with tensor degree 1, no shards"),
            ({"tensor": (1, 2, 4)}, "every plan with tensor degree 1 or 2 or 4, no shards"),
            ({"sharing": "none"}, "every plan with disjoint devices, tensor degree 1, no shards"),
            (
                {"equal_groups": (1, 2)},
                "every plan with 1 or 2 devices in every stage, tensor degree 1, no shards",
            ),
            ({"replication": ()}, "every plan with no replicas, tensor degree 1, no shards"),
            ({"offload": False}, "every plan with no offloading, tensor degree 1, no shards"),
            ({"weights": ("flush",)}, "every plan with weights flush, tensor degree 1, no shards"),
        ],
    )
    def test_a_class_is_named_by_its_limits(self, changes, text):
        assert str(PlanClass(**changes)) == text

    def test_the_joint_search_is_described(self):
        assert DISJOINT_SPLIT.describe() == (
            "disjoint devices, split replicas, whole backwards, no recomputation or offloading, "
            "tensor degree 1, no shards"
        )

    def test_the_smallest_class_of_a_plan(self):
        stages = make_stages((2, 4, 6), (2, 1, 3), ("split", "split", "round-robin"))
        found = class_of(valid_plan(small_problem(), stages))
        assert (found.sharing, found.replication) == ("none", ("split", "round-robin"))
        assert (found.split_backward, found.recompute, found.offload) == (False, ("none",), False)
        assert (found.schedules, found.weights) == (("finite",), ("flush",))
        assert not DISJOINT_SPLIT.contains(found)
        assert WHOLE_FINITE.contains(found)

    def test_stages_on_common_devices(self):
        stages = make_stages((3, 6), (1, 1), ("split", "split"))
        shared = [stages[0], replace(stages[1], devices=stages[0].devices)]
        found = class_of(valid_plan(small_problem(), shared))
        assert (found.sharing, found.merged, found.equal_groups) == ("groups", False, (1,))

    @pytest.mark.parametrize(
        "changes",
        [
            {"schedules": ()},
            {"replication": ("round-robin", "split")},
            {"recompute": ("none", "none")},
            {"equal_groups": (2, 1)},
            {"equal_groups": (0,)},
            {"weights": ("flushed",)},
        ],
    )
    def test_a_class_that_is_none_is_refused(self, changes):
        with pytest.raises(InputError):
            PlanClass(**changes)


def certified(replication: str = "split") -> tuple[PipelineProblem, PipelinePlan]:
    problem = small_problem(4, 4, 2)
    drawn = valid_plan(problem, make_stages((1, 4), (2, 1), (replication, "split")))
    figures = predict(problem, drawn)
    made_up = made_up_certificate(problem, drawn, figures.iteration_seconds)
    return problem, replace(drawn, predicted=figures, certificate=made_up)


class TestCertificate:
    def test_a_bound_of_another_class_is_listed_but_enters_no_gap(self):
        bounds = (
            Bound(1.0, "a", "problem", EVERY_PLAN),
            Bound(9.0, "b", "problem", DISJOINT_SPLIT),
        )
        own = replace(DISJOINT_SPLIT, replication=("round-robin",), weights=("flush",))
        found = certificate(own, 4.0, bounds)
        assert (found.bound_seconds, found.gap, found.plans) == (1.0, 0.75, EVERY_PLAN)
        assert found.bounds == bounds

    def test_a_bound_of_its_class_above_the_cost_is_an_error(self):
        bounds = (
            Bound(1.0, "a", "problem", EVERY_PLAN),
            Bound(9.0, "b", "problem", DISJOINT_SPLIT),
        )
        with pytest.raises(InvalidPlan, match="a bound by b"):
            certificate(DISJOINT_SPLIT, 4.0, bounds)

    def test_without_a_bound_on_every_plan_there_is_no_certificate(self):
        degrees = replace(EVERY_PLAN, tensor=(1, 2))
        groups = replace(DISJOINT_SPLIT, weights=("flush",), tensor=(2,))
        for own, about in ((groups, degrees), (DISJOINT_SPLIT, DISJOINT_SPLIT)):
            with pytest.raises(
                InvalidPlan, match="is about every plan with tensor degree 1, no shards, "
            ):
                certificate(own, 4.0, [Bound(1.0, "a", "problem", about)])
        with pytest.raises(InvalidPlan, match=r"no bound is about a .* tensor degree 2"):
            certificate(groups, 4.0, [Bound(1.0, "a", "problem", EVERY_PLAN)])

    def test_of_equal_bounds_the_one_for_the_largest_class_counts(self):
        bounds = (
            Bound(4.0, "b", "problem", DISJOINT_SPLIT),
            Bound(4.0 * (1 - 1e-12), "a", "problem", EVERY_PLAN),
        )
        found = certificate(DISJOINT_SPLIT, 4.0, bounds)
        assert (found.proved_by, found.plans) == ("a", EVERY_PLAN)
        assert [one.plans for one in headlines(found)] == [
            "every plan with tensor degree 1, no shards", "every schedule of these stages",
        ]  # fmt: skip

    def test_a_certificate_is_read_back(self):
        _, one = certified()
        text = documents.to_json(one)
        assert documents.parse(PipelinePlan, text, "plan") == one


class TestVerdicts:
    def test_what_is_true_is_verified_or_claimed(self):
        problem, one = certified()
        assert check(problem, one) == ()
        found = [verdict.verdict for verdict in verdicts(problem, one)]
        assert found == ["verified", "verified", "claimed", "claimed"]

    @pytest.mark.parametrize("name", [every_plan.LOAD, every_plan.LAYER, every_plan.PATH, "nobody"])
    def test_a_bound_equal_to_the_cost_is_refuted(self, name):
        problem, one = certified("round-robin")
        assert one.certificate is not None
        cost, plans = one.certificate.cost_seconds, EVERY_FINITE
        forged = Bound(cost, name, "problem", plans, one.certificate.bounds[0].witness)
        bounds = (*one.certificate.bounds, forged)
        broken = replace(one, certificate=certificate(class_of(one), cost, bounds))
        (violation,) = check(problem, broken)
        assert violation.rule == "proof"
        assert name in violation.message

    def test_a_bound_for_more_plans_than_its_argument_is_refuted(self):
        problem, one = certified()
        assert one.certificate is not None
        wider = replace(one.certificate.bounds[2], plans=EVERY_FINITE)
        cost = one.certificate.cost_seconds
        bounds = (*one.certificate.bounds[:2], wider)
        broken = replace(one, certificate=certificate(class_of(one), cost, bounds))
        assert {violation.rule for violation in check(problem, broken)} == {"proof"}

    def test_prices_of_another_number_of_kinds_are_refuted(self):
        problem, one = certified()
        assert one.certificate is not None
        first = replace(one.certificate.bounds[0], witness=(1.0,))
        bounds = (first, *one.certificate.bounds[1:])
        broken = replace(one, certificate=replace(one.certificate, bounds=bounds))
        assert [violation.rule for violation in check(problem, broken)] == ["proof"]

    def test_a_halved_guarantee_and_an_altered_premise_are_refuted(self):
        layers = tuple(Layer(f"l{i}", 1e6, (LayerCost(4, 0.01, 1e6, 1e6, 0.02),)) for i in range(4))
        problem = PipelineProblem(
            Chain("m", "test", 4, layers), uniform_servers(1, 2, Link(1e9)), 4
        )
        result = plan(problem, "spp", LIMITS)
        assert result.plan is not None
        assert result.plan.certificate is not None
        given = result.plan.certificate
        assert check(problem, result.plan) == ()
        assert "use every device" in given.guarantees[1].premise
        for changes in ({"seconds": 0.9 * given.guarantees[1].seconds}, {"premise": "always"}):
            forged = (given.guarantees[0], replace(given.guarantees[1], **changes))
            broken = replace(result.plan, certificate=replace(given, guarantees=forged))
            assert check(problem, broken) != ()

    def test_searches_run_again(self):
        layers = tuple(Layer(f"l{i}", 1e8, (LayerCost(4, 0.01, 1e6, 1e6, 0.02),)) for i in range(3))
        problem = PipelineProblem(
            Chain("m", "test", 4, layers), uniform_servers(1, 2, Link(1e9)), 2
        )
        result = plan(problem, "exact", LIMITS)
        assert result.plan is not None
        found = prove(problem, result.plan, LIMITS)
        assert {one.verdict for one in found} == {"verified"}
        given = result.plan.certificate
        assert given is not None
        # On disjoint devices nothing is better; a plan of another class may claim more.
        i = next(i for i, one in enumerate(given.bounds) if "joint" in one.proved_by)
        bounds = list(given.bounds)
        bounds[i] = replace(bounds[i], seconds=2 * given.cost_seconds)
        forged = replace(result.plan, certificate=replace(given, bounds=tuple(bounds)))
        assert prove(problem, forged, LIMITS)[i].verdict == "refuted"

    @pytest.mark.parametrize("name", ["exact", "1f1b-star", "pipedream-async"])
    def test_no_bound_is_verified_that_its_argument_does_not_give(self, name):
        costs = [LayerCost(4, 1.0 + i, 1e6, 1e6, 3.0 - i, update_seconds=0.5) for i in range(3)]
        layers = tuple(Layer(f"l{i}", 1e6, (one,)) for i, one in enumerate(costs))
        problem = PipelineProblem(
            Chain("m", "test", 4, layers), uniform_servers(1, 2, Link(1e7)), 3
        )
        found = plan(
            problem, name, LIMITS, choices=Choices(group_size=None if name == "exact" else 1)
        )
        assert found.plan is not None
        given = found.plan.certificate
        assert given is not None

        def verdict_of(bound: Bound) -> str:
            stated = replace(given, bounds=(bound,), guarantees=())
            (one,) = prove(problem, replace(found.plan, certificate=stated), LIMITS)
            return one.verdict

        for bound in given.bounds:
            assert verdict_of(bound) == "verified"
            higher = replace(bound, seconds=1.01 * bound.seconds + 0.01)
            assert verdict_of(higher) != "verified", bound
            assert verdict_of(replace(bound, witness=(*bound.witness, 1.0))) == "refuted", bound

    def test_windows_of_stages_are_searched_again(self):
        layers = tuple(Layer(f"l{i}", 1e8, (LayerCost(4, 0.01, 1e6, 1e6, 0.02),)) for i in range(3))
        problem = PipelineProblem(
            Chain("m", "test", 4, layers), uniform_servers(1, 3, Link(1e9)), 4
        )
        result = plan(problem, "spp", LIMITS)
        assert result.plan is not None
        assert result.plan.certificate is not None
        scheduling = scheduling_of(problem, result.plan.stages)
        assert scheduling is not None
        optimum = solve_schedule(scheduling, "optimal", LIMITS).cost
        for factor, verdict in ((1.0, "verified"), (1.01, "refuted")):
            bound = Bound(factor * optimum, WINDOWS, "schedule", DISJOINT_SPLIT)
            stated = replace(result.plan.certificate, bounds=(bound,), guarantees=())
            found = prove(problem, replace(result.plan, certificate=stated), LIMITS)
            assert [one.verdict for one in found] == [verdict]

    def test_relaxed_plans_are_branched_on_again(self):
        """Here one search over labels proves 0.4996 s, and the tree the optimum."""
        draw = random.Random(32)
        layers = tuple(
            Layer(f"l{i}", 1e7, (LayerCost(
                4, draw.randint(5, 20) * 1e-3, 1e6, draw.randint(1, 9) * 1e6,
                draw.randint(10, 40) * 1e-3,
            ),))
            for i in range(12)
        )  # fmt: skip
        cluster = uniform_servers(4, 2, Link(1e10), Link(1e9))
        problem = PipelineProblem(Chain("m", "test", 4, layers), cluster, 8)
        result = plan(problem, "servers", LIMITS)
        assert result.plan is not None
        given = result.plan.certificate
        assert given is not None
        assert all(one.seconds < 0.5 for one in given.bounds if one.proved_by == SERVERS)
        (tree,) = (one for one in given.bounds if one.proved_by == RELAXED_TREE)
        assert tree.seconds == pytest.approx(given.cost_seconds, rel=1e-6)
        for factor, verdict in ((1.0, "verified"), (1.01, "claimed")):
            bound = replace(tree, seconds=factor * tree.seconds)
            stated = replace(given, bounds=(bound,), guarantees=())
            limits = Limits(seconds=5)
            found = prove(problem, replace(result.plan, certificate=stated), limits)
            assert [one.verdict for one in found] == [verdict]


@needs_cases
class TestCases:
    @pytest.mark.parametrize("name", MICROBATCHES)
    def test_no_bound_on_its_class_is_above_a_given_plan(self, name):
        problem = case(name)
        result = plan(problem, "auto", Limits(seconds=0.5))
        if result.plan is not None:
            assert check(problem, result.plan) == ()
        path = PROOFS / f"{name}.plan.json"
        if not path.exists():
            return
        given = replace(load_plan(path), digest=problem.digest, certificate=None, predicted=None)
        assert check(problem, given) == ()
        cost = predict(problem, given).iteration_seconds
        if result.plan is None:
            assert result.status is Status.INFEASIBLE
            assert result.plans is not None
            assert not result.plans.contains(class_of(given))
            assert "no finite plan with disjoint devices" in result.reason
            return
        assert result.plan.certificate is not None
        for bound in result.plan.certificate.bounds:
            if bound.scope == "problem" and bound.plans.contains(class_of(given)):
                assert bound.seconds <= cost * (1 + 1e-9), bound

    def test_spp_leaves_devices_idle_where_all_reduces_cost_more(self):
        problem = case("theorem")
        result, optimum = plan(problem, "spp", LIMITS), plan(problem, "exact", LIMITS)
        assert result.cost is not None
        assert optimum.cost is not None
        assert result.cost <= 2 * optimum.cost


@pytest.mark.parametrize(
    ("parameter_bytes", "saved_bytes", "reason"),
    [(3e9, 1.0, "of all layers need 36 GB"), (6e9, 1.0, "'l0'"), (1e9, 40e9, "'l0'")],
)
def test_no_plan_at_all_fits(parameter_bytes, saved_bytes, reason):
    cost = LayerCost(4, 1e-3, saved_bytes, 1.0, 1e-3)
    layers = tuple(Layer(f"l{i}", parameter_bytes, (cost,)) for i in range(3))
    cluster = uniform_servers(1, 2, Link(1e9), memory_bytes=16e9)
    result = stagewright.plan(Chain("m", "test", 4, layers), cluster, 2, time_limit=2)
    assert (result.status, result.plans) == (Status.INFEASIBLE, EVERY_PLAN)
    assert result.reason.startswith("no plan with tensor degree 1, no shards fits: ")
    assert reason in result.reason
