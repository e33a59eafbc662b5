"""Plans with out-of-order backprop: valid, runnable, in the orders that were asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from stagewright.executor.programs.periodic import lower_backward_first
from stagewright.executor.programs.verification.verify import verify
from stagewright.executor.simulation.simulate import simulate
from stagewright.formulations.backprop.orders import OutOfOrder
from stagewright.formulations.checking.check import check
from stagewright.formulations.forms.answers import Limits, Status
from stagewright.formulations.plans.actions import parse_action
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planning import plan

MB = 1e6


def problem_of(times, microbatches=1, devices=2, parameters=MB, parts=True):
    """Layers of (F, I, W) seconds on devices with links of 1 MB/s."""
    weights = parameters if isinstance(parameters, tuple) else (parameters,) * len(times)
    layers = []
    for i, (forward, of_input, of_weights) in enumerate(times):
        cost = (
            LayerCost(devices, forward, 0.0, MB / 10, input_gradient_seconds=of_input,
                      weight_gradient_seconds=of_weights)
            if parts else LayerCost(devices, forward, 0.0, MB / 10, of_input + of_weights)
        )  # fmt: skip
        layers.append(Layer(f"l{i}", weights[i], (cost,)))
    cluster = uniform_servers(1, devices, Link(MB), memory_bytes=1e12)
    return PipelineProblem(Chain("m", "by hand", devices, tuple(layers)), cluster, microbatches)


def planned(problem, **options):
    return plan(problem, "ooo", Limits(5.0), choices=Choices(out_of_order=OutOfOrder(**options)))


def computed(found, device):
    rows = [entry for entry in found.plan.actions if entry.device == device]
    rows.sort(key=lambda entry: (entry.start_seconds, entry.finish_seconds))
    return [str(parse_action(entry.action)) for entry in rows if entry.action[-1].isdigit()]


@examples(25)
@given(st.data())
def test_plans_are_valid_and_run_as_planned(data):
    seconds = st.integers(0, 3).map(float)
    times = data.draw(st.lists(st.tuples(seconds, seconds, seconds), min_size=2, max_size=5))
    problem = problem_of(
        times, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)),
        data.draw(st.sampled_from([0.0, MB, 3 * MB])), data.draw(st.booleans()),
    )  # fmt: skip
    found = planned(problem, training=data.draw(st.sampled_from(["data", "pipeline"])))
    assert check(problem, found.plan) == ()
    verify(found.plan, lower_backward_first(found.plan))
    assert simulate(problem, found.plan).iteration_seconds == pytest.approx(found.cost)
    assert found.bound <= found.cost * (1 + 1e-9)


@pytest.mark.parametrize("k", range(5))
def test_the_first_k_weight_gradients_come_last_in_the_order_of_layers(k):
    found = planned(problem_of([(1.0, 1.0, 1.0)] * 4), reversed_layers=k)
    gradients = [one for one in computed(found, "s0g0") if one[1] in "IW"]
    late = [f"{layer}W0" for layer in range(k)]
    assert gradients[len(gradients) - k :] == late
    early = [one for one in gradients[: len(gradients) - k] if "W" in one]
    assert early == [f"{layer}W0" for layer in range(3, k - 1, -1)]


def test_reversing_hides_all_reduces_that_the_usual_order_waits_for():
    """Five layers of (1, 1, 1); the first one's all-reduce takes 4 s and must begin early."""
    problem = problem_of([(1.0, 1.0, 1.0)] * 5, parameters=(4 * MB, *[MB / 10] * 4))
    usual, best = planned(problem, reversed_layers=0), planned(problem)
    assert best.cost < usual.cost
    every = [planned(problem, reversed_layers=k).cost for k in range(6)]
    assert best.cost <= min(every) + 1e-9


def test_groups_of_layers_go_around_the_devices():
    problem = problem_of([(1.0, 1.0, 1.0)] * 8, microbatches=2)
    found = planned(problem, training="pipeline", group=2)
    assert [stage.layers for stage in found.plan.stages] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [stage.devices for stage in found.plan.stages] == [("s0g0",), ("s0g1",)] * 2
    assert planned(problem, training="pipeline").cost <= found.cost


@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_optimum_of_the_stages_is_optimal_among_their_orders(microbatches):
    """The first layer's weight gradient waits for its input gradient, in plans and in the bound."""
    problem = problem_of([(1.0, 1.0, 1.0)] * 2, microbatches, parameters=0.0)
    found = planned(problem, training="pipeline")
    # From loss to loss: I and a transfer, I, W and F of the first stage, a transfer, F.
    assert found.cost == pytest.approx({1: 5.2, 2: 8.2}[microbatches])
    assert found.status is Status.OPTIMAL
    assert found.gap > 0.2  # of plans with other stages
    assert found.optimal_among == (
        "every backward-first schedule of these stages with one stream on every device"
    )


def test_whole_backwards_are_named():
    found = planned(problem_of([(1.0, 1.0, 1.0)] * 2, parts=False))
    assert "2 of 2 stages have whole backwards, the first for layer 'l0'" in found.reason


def test_what_is_no_choice_is_refused():
    problem = problem_of([(1.0, 1.0, 1.0)] * 3)
    with pytest.raises(InputError, match="k must be from 0 to 3, the number of layers, got 4"):
        planned(problem, reversed_layers=4)
    with pytest.raises(InputError, match="k is for data parallelism"):
        OutOfOrder("pipeline", reversed_layers=1)
    with pytest.raises(InputError, match="groups of layers are for pipelines"):
        OutOfOrder("data", group=1)
    with pytest.raises(InputError, match="training must be one of data, pipeline, single"):
        OutOfOrder("tensor")
    with pytest.raises(InputError, match="does not support a method of out-of-order backprop"):
        plan(problem, "spp", choices=Choices(out_of_order=OutOfOrder()))
    few = PipelineProblem(problem.chain, uniform_servers(1, 3, Link(MB), memory_bytes=1e12), 1)
    with pytest.raises(InputError, match="on 3 devices needs as many samples"):
        planned(few)


def test_memory_that_is_short_is_named():
    problem = problem_of([(1.0, 1.0, 1.0)] * 3, parameters=1e9)
    cluster = uniform_servers(1, 2, Link(MB), memory_bytes=8e9)
    found = planned(PipelineProblem(problem.chain, cluster, 1))
    assert found.plan is None


def test_k_beyond_memory_names_the_largest_that_fits():
    """Every delayed layer keeps two more gradients of 1 GB: a boundary's buffer holds the third."""
    cost = LayerCost(1, 1.0, 0.0, 1e9, input_gradient_seconds=1.0, weight_gradient_seconds=1.0)
    chain = Chain("m", "by hand", 1, tuple(Layer(f"l{i}", 0.0, (cost,)) for i in range(3)))

    def given(memory):
        cluster = uniform_servers(1, 1, Link(MB), memory_bytes=memory)
        return PipelineProblem(chain, cluster, 3)

    def peak(k):
        found = planned(given(1e12), reversed_layers=k)
        return found.plan.predicted.peak_memory_bytes["s0g0"]

    peaks = [peak(k) for k in range(4)]
    assert peaks[1:3] == [peaks[0] - 1e9 + max(1e9, 2e9 * k) for k in range(1, 3)]
    for k in range(4):
        problem = given(peaks[k])
        for j in range(4):
            found = planned(problem, reversed_layers=j)
            if peaks[j] <= peaks[k]:
                assert check(problem, found.plan) == ()
            else:
                assert found.plan is None
                below = max(i for i in range(j) if peaks[i] <= peaks[k])
                assert found.reason.startswith(f"ooo has no plan: with k = {j}, device s0g0 needs")
                assert found.reason.endswith(f"; the largest k that fits is {below}")
        assert planned(problem).plan is not None
    assert "largest k" not in planned(given(peaks[0] - 1)).reason
