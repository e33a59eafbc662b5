"""The oracles themselves, on cases worked by hand and against a second way of counting."""

import re
from math import inf, isclose
from pathlib import Path

import pytest
from hypothesis import given
from oracles import (
    bottleneck,
    brute_force_joint,
    brute_force_makespan,
    compositions,
    enumerate_makespan,
    lemma1_bound,
    makespan_problem,
    pe_reference,
    pipedream_optimum,
    prm_enumerate,
    prm_table,
    theorem1_factor,
)
from profiles import examples
from strategies import random_makespan, random_problem

from stagewright.formulations.pipelines.makespan import MakespanProblem
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.machines.cluster import Device, from_matrix
from stagewright.graphs.models.chain import Chain, Layer, LayerCost

DATA = Path(__file__).parents[3] / "shared" / "data"

quick = examples(40, derandomize=True)


def chain_problem(
    seconds, outputs, parameters, bandwidth, microbatches, *, saved=0.0, memory=1e12, optimizer=0.0
):
    """Layers of (forward, backward) seconds on devices of one kind, no latency."""
    layers = tuple(
        Layer(f"l{i}", weights, (LayerCost(840, forward, saved, output, backward),))
        for i, ((forward, backward), output, weights) in enumerate(
            zip(seconds, outputs, parameters, strict=True)
        )
    )
    chain = Chain("worked", "measured: by hand", 840, layers, optimizer)
    devices = [Device(f"g{v}", "v100", memory) for v in range(len(bandwidth))]
    return PipelineProblem(chain, from_matrix(devices, bandwidth), microbatches)


# Three layers of 1+2, 2+4, 1+2 s; 1e9 bytes between them; devices 0 and 1 are linked at 2e9 B/s,
# device 2 at 1e9 B/s with both. Parameters 1e9, 0, 4e9 bytes.
WORKED = {
    "seconds": [(1.0, 2.0), (2.0, 4.0), (1.0, 2.0)],
    "outputs": [1e9, 1e9, 0.0],
    "parameters": [1e9, 0.0, 4e9],
    "bandwidth": [[0, 2e9, 1e9], [2e9, 0, 1e9], [1e9, 1e9, 0]],
}


class TestPrmTable:
    def test_worked_case(self):
        problem = chain_problem(**WORKED, microbatches=2)
        # 1 stage on 3 devices: 2 * 12/3 + 2*(2/3) * 5e9/1e9 = 8 + 6.6667 s.
        # 2 stages, 2 + 1 devices in order 0, 1 | 2:
        #   layers 0-1 | 2: 2 * 9/2 + 2*(1/2) * 1e9/2e9 = 9.5; channel 2 * 2 * 1e9/(2e9) = 2;
        #   last: 2*3 = 6; so 9.5. Layers 0 | 1-2: last 2*9 = 18.
        #   1 + 2 devices, 0 | 1, 2: layers 0-1 first: 18. Layers 0 first: 6; channel to both
        #   2 * 2 * 1e9/(2 * 1e9) = 2; last 2 * 9/2 + 4e9/1e9 = 13. So 9.5 s it is.
        # 3 stages: middle 2 * 6 = 12; channels 2 * 2 * 0.5 = 2 and 2 * 2 * 1 = 4.
        assert prm_table(problem, [0, 1, 2]) == pytest.approx({1: 8 + 20 / 3, 2: 9.5, 3: 12.0})

    def test_order_matters(self):
        problem = chain_problem(**WORKED, microbatches=2)
        # Order 0, 2, 1: the first stage of layers 0-1 on 0 and 2 pays 1e9/1e9 = 1 s: 9 + 1 = 10.
        assert prm_table(problem, [0, 2, 1])[2] == pytest.approx(10.0)

    def test_more_stages_than_layers(self):
        problem = chain_problem([(1.0, 1.0)], [0.0], [0.0], [[0, 1e9], [1e9, 0]], microbatches=3)
        assert prm_table(problem, [0, 1]) == {1: pytest.approx(3.0), 2: inf}

    def test_memory_counts_stages_from_the_end(self):
        # Two equal layers that keep 4 MB per microbatch, on devices of 10 MB: two fit in flight.
        case = {
            "seconds": [(1.0, 1.0)] * 3, "outputs": [0.0] * 3, "parameters": [0.0] * 3,
            "bandwidth": [[0, 1e9, 1e9], [1e9, 0, 1e9], [1e9, 1e9, 0]],
            "saved": 4e6, "memory": 10e6,
        }  # fmt: skip
        # Three stages: the first needs min(M, 3) in flight, which 10 MB allow for M = 2 only.
        assert prm_table(chain_problem(**case, microbatches=2), [0, 1, 2])[3] == 4.0
        three = chain_problem(**case, microbatches=3)
        assert prm_table(three, [0, 1, 2])[3] == inf
        assert prm_table(three, [0, 1, 2], memory=False)[3] == 6.0
        # Two stages on 1 + 2 devices, layers 0 | 1-2: the first keeps 2 * 4 MB, the last
        # 2 * 4/2 MB: 6 s each. On 2 + 1 devices, 0-1 | 2: the same. 1 stage: 3 * 4/3 MB, 6 s.
        assert prm_table(three, [0, 1, 2])[2] == pytest.approx(6.0)
        assert prm_table(three, [0, 1, 2])[1] == pytest.approx(6.0)

    @quick
    @given(
        random_problem(
            latency=True, symmetric=False, tight_memory=True, kinds=("a", "b"), sizes=(3, 2, 1)
        )
    )
    def test_enumeration_agrees(self, problem):
        order = list(range(len(problem.cluster)))[::-1]
        for memory in (True, False):
            table = prm_table(problem, order, memory)
            assert table == pytest.approx(prm_enumerate(problem, order, memory))


def test_compositions():
    assert list(compositions(4, 2)) == [(1, 3), (2, 2), (3, 1)]
    assert list(compositions(3, 1)) == [(3,)]
    assert list(compositions(2, 3)) == []


def uniform(stages, microbatches, forward=1.0, backward=2.0, transfer=0.0, limit=None):
    return MakespanProblem(
        microbatches,
        (forward,) * stages,
        (backward,) * stages,
        (transfer,) * (stages - 1),
        (transfer,) * (stages - 1),
        (0.0,) * stages,
        (limit or microbatches,) * stages,
    )


class TestMakespan:
    @pytest.mark.parametrize("stages", [1, 2, 3])
    @pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
    def test_equal_stages_without_transfers(self, stages, microbatches):
        # (M + S - 1)(f + b): the last stage cannot start before (S-1) f, is busy for M (f + b),
        # and (S-1) b follow; 1F1B reaches it.
        expected = (microbatches + stages - 1) * 3.0
        assert brute_force_makespan(uniform(stages, microbatches)) == expected

    def test_one_in_flight_is_sequential(self):
        # Stage 0 takes a microbatch only when the one before is back: M (S (f + b) + 4 c).
        problem = uniform(3, 2, transfer=0.5, limit=1)
        assert brute_force_makespan(problem) == 2 * (9.0 + 4 * 0.5)

    def test_half_duplex_channel(self):
        # Two stages, M = 2, computations of 1, transfers of 10 s. The channel carries four of them
        # one after another between stage 0's first forward and its last backward: 1 + 40 + 1.
        # Were it full duplex, the second activation would travel while the first gradient does.
        problem = uniform(2, 2, 1.0, 1.0, transfer=10.0)
        assert brute_force_makespan(problem) == 42.0

    def test_reduce_runs_beside_later_work(self):
        # One microbatch on two stages: F0 F1 B1 B0 = 1 + 1 + 2 + 2; stage 1's all-reduce starts
        # at 4 and takes 5, stage 0's starts at 6 and takes 1: max(9, 7).
        problem = MakespanProblem(1, (1.0, 1.0), (2.0, 2.0), (0.0,), (0.0,), (1.0, 5.0), (1, 1))
        assert brute_force_makespan(problem) == 9.0

    def test_unequal_stages(self):
        # Stage 0: F 1, B 1; stage 1: F 3, B 5; M = 2. Stage 1 works 16 s from 1 s on; after its
        # last backward one B of stage 0 follows: 1 + 16 + 1.
        problem = MakespanProblem(2, (1.0, 3.0), (1.0, 5.0), (0.0,), (0.0,), (0.0, 0.0), (2, 2))
        assert brute_force_makespan(problem) == 18.0

    @quick
    @given(random_makespan(max_stages=2, max_microbatches=2))
    def test_listing_agrees(self, problem):
        assert brute_force_makespan(problem) == pytest.approx(enumerate_makespan(problem))

    @examples(5, parent=quick)
    @given(random_makespan(max_stages=3, max_microbatches=2))
    def test_listing_agrees_on_three_stages(self, problem):
        assert brute_force_makespan(problem) == pytest.approx(enumerate_makespan(problem))

    @quick
    @given(random_makespan())
    def test_microbatches_may_keep_their_order(self, problem):
        """The claim on which the makespan formulation rests."""
        free_order = brute_force_makespan(problem)
        assert brute_force_makespan(problem, fifo=True) == pytest.approx(free_order)


class TestJoint:
    def test_makespan_problem_of_stages(self):
        problem = chain_problem(**WORKED, microbatches=2)
        schedule = makespan_problem(problem, [(0, 2, (0, 1)), (2, 3, (2,))])
        # Half a microbatch each: forward (1 + 2)/2; the transfer 1e9/2 bytes at 1e9 B/s;
        # all-reduce 2*(1/2)*1e9 bytes at 2e9 B/s.
        assert schedule == MakespanProblem(
            2, (1.5, 1.0), (3.0, 2.0), (0.5,), (0.5,), (0.5, 0.0), (2, 2)
        )
        assert bottleneck(problem, [(0, 2, (0, 1)), (2, 3, (2,))]) == 9.5

    def test_worked_case(self):
        # Two equal layers, nothing to send or to reduce, two devices, M = 2. One stage on both
        # devices halves everything: 2 * 6/2 = 6 s. Two stages: (2 + 1) * 3 = 9 s.
        problem = chain_problem(
            [(1.0, 2.0)] * 2, [0.0] * 2, [0.0] * 2, [[0, 1e9], [1e9, 0]], microbatches=2
        )
        assert brute_force_joint(problem) == pytest.approx(6.0)

    def test_idle_device(self):
        # As above, but all-reduces take 2 * 1/2 * 100e9/1e9 = 100 s per layer, transfers 100 s
        # too: one device alone needs 2 * 6 = 12 s. With all devices two stages do
        # F 1, send 100, F 1, B 2, ... : the channel alone carries 4 * 100 s between the first
        # forward and the last backward: 1 + 400 + 2; data parallelism 6 + 200 s.
        problem = chain_problem(
            [(1.0, 2.0)] * 2, [100e9, 0.0], [100e9] * 2, [[0, 1e9], [1e9, 0]], microbatches=2
        )
        assert brute_force_joint(problem) == pytest.approx(12.0)
        assert brute_force_joint(problem, allow_idle=False) == pytest.approx(206.0)

    def test_memory_decides(self):
        # Two layers of 6 MB saved each on devices of 8 MB: neither device holds both, and each
        # stage holds one microbatch: two stages strictly in turn, M = 2: 2 * 6 = 12 s. Sharing one
        # stage halves what is saved: 6 MB each, 6 s.
        case = {
            "seconds": [(1.0, 2.0)] * 2, "outputs": [0.0] * 2,
            "bandwidth": [[0, 1e6], [1e6, 0]], "saved": 6e6, "memory": 8e6,
        }  # fmt: skip
        light = chain_problem(**case, parameters=[0.0, 0.0], microbatches=2)
        assert brute_force_joint(light) == pytest.approx(6.0)
        # 1 MB of parameters and as much of gradients per layer: sharing needs 4 + 6 > 8 MB.
        heavy = chain_problem(**case, parameters=[1e6, 1e6], microbatches=2)
        assert brute_force_joint(heavy) == pytest.approx(12.0)

    def test_nothing_fits(self):
        # Each of two layers fits alone (6 MB of 8), but there is one device.
        problem = chain_problem(
            [(1.0, 2.0)] * 2, [0.0] * 2, [0.0] * 2, [[0]], 1, saved=6e6, memory=8e6
        )
        assert brute_force_joint(problem) == inf


class TestPipelineExecution:
    def test_worked_case(self):
        # S = 2, M = 2, f = 1, b = 2, c = 1 throughout; blocks F0 SF FB1 SB B0.
        # Passes: {F0:1} {F0:2, SF:1} {SF:2, FB1:1} {FB1:2, SB:1} {SB:2, B0:1} {B0:2}:
        # stage 0 runs F1 F2 B1 B2, stage 1 runs FB1 FB2.
        # F1 0-1, F2 1-2; SF1 1-2, SF2 2-3; FB1 2-5, FB2 5-8; SB1 5-6, SB2 8-9; B1 6-8, B2 9-11.
        assert pe_reference(uniform(2, 2, transfer=1.0)) == 11.0

    def test_channel_is_first_come_first_served(self):
        # S = 2, M = 3, f = b = 1, c = 4. SF1 1-5, SF2 5-9; FB1 5-7; SF3 has waited since 3, so it
        # goes 9-13 before SB1 (asked at 7) 13-17; FB2 9-11, SB2 17-21; FB3 13-15, SB3 21-25; B3 26.
        assert pe_reference(uniform(2, 3, 1.0, 1.0, transfer=4.0)) == 26.0

    def test_last_stage_does_forward_and_backward_as_one(self):
        # One stage: F B F B ..., and the all-reduce behind them.
        problem = MakespanProblem(3, (1.0,), (2.0,), (), (), (4.0,), (3,))
        assert pe_reference(problem) == 13.0

    def test_lemma1_bound(self):
        # C = max(1 + 2, 2 * 4) = 8; (1 + 4/2) * 2 * 8 + 0.
        assert lemma1_bound(uniform(2, 2, transfer=4.0)) == 48.0

    @examples(300, parent=quick)
    @given(random_makespan(max_stages=4, max_microbatches=8, limited=False))
    def test_lemma1(self, problem):
        assert pe_reference(problem) <= lemma1_bound(problem) * (1 + 1e-9)

    @quick
    @given(random_makespan(limited=False))
    def test_never_better_than_the_optimum(self, problem):
        assert pe_reference(problem) >= brute_force_makespan(problem) * (1 - 1e-9)


class TestTheorem1Factor:
    def test_even_bandwidth(self):
        problem = chain_problem(**{**WORKED, "bandwidth": [[0, 1e9], [1e9, 0]]}, microbatches=4)
        assert theorem1_factor(problem) == 2 + 4 / 4

    def test_uneven_bandwidth(self):
        # p_max b_max = 6 * 2e9 = 12e9 > d_max = 2e9; Gamma = 12/3 = 4; 1/b_min - 1/b_max = 0.5e-9:
        # Phi = 12/4 * 0.5 = 1.5; (2 + 8/2) * 2.5.
        assert theorem1_factor(chain_problem(**WORKED, microbatches=2)) == pytest.approx(15.0)

    def test_one_device(self):
        problem = chain_problem(**{**WORKED, "bandwidth": [[0]]}, microbatches=4)
        assert theorem1_factor(problem) == 2.0


class TestPipeDream:
    def test_worked_case(self):
        # Layers of 2, 2 and 4 s on two workers, 1 B/s. Data parallel: max(8, 2 * 30)/2 = 30.
        # Cut behind layer 1: max(2, 2 * 1, 6) = 6; behind layer 2: max(4, 2 * 3, 4) = 6.
        # On three workers, cut behind layer 1, the last stage on two: max(6, 2 * 20)/2 = 20;
        # behind layer 2, the first stage on two: max(4, 2 * 20)/2 = 20; one each: max(.., 2*3) = 6.
        layers = [2.0, 2.0, 4.0], [1.0, 3.0, 0.0], [10.0, 10.0, 10.0]
        assert pipedream_optimum(*layers, workers=2, bandwidth=1.0) == 6.0
        assert pipedream_optimum(*layers, workers=3, bandwidth=1.0) == 6.0
        # Without weights data parallelism divides everything.
        free = layers[0], layers[1], [0.0] * 3
        assert pipedream_optimum(*free, workers=2, bandwidth=1.0) == 4.0

    @pytest.mark.skipif(not DATA.exists(), reason="the measured profiles are not at hand")
    def test_measured_profile(self):
        """VGG-16 on four GPUs at 1 GB/s: the slowest stage that PipeDream's own optimizer finds.

        There the transfer decides, on which the thesis and the published program agree; for an
        all-reduce the program adds 4(m-1)/m w/B to the computation where the thesis takes the
        larger of the two.
        """
        layers = measured_chain(DATA / "pipedream" / "vgg16.graph.txt")
        optimum = pipedream_optimum(*layers, workers=4, bandwidth=1e9)
        assert isclose(optimum, 0.205521, rel_tol=1e-5)


def measured_chain(path):
    """Seconds, activation bytes and weight bytes of a profile without branches or Input nodes."""
    text = path.read_text()
    pattern = (
        r"(node\d+) -- (.*) -- forward_compute_time=([\d.]+), backward_compute_time=([\d.]+), "
        r"activation_size=([\d.]+), parameter_size=([\d.]+)"
    )
    nodes = {
        name: ((float(f) + float(b)) / 1e3, float(activation), float(weights))
        for name, kind, f, b, activation, weights in re.findall(pattern, text)
        if not kind.startswith("Input")
    }
    edges = dict(re.findall(r"^\s+(node\d+) -- (node\d+)$", text, re.MULTILINE))
    following = {a: b for a, b in edges.items() if a in nodes and b in nodes}
    (first,) = set(nodes) - set(following.values())
    order = [first]
    while order[-1] in following:
        order.append(following[order[-1]])
    assert len(order) == len(nodes)
    return tuple(zip(*(nodes[name] for name in order), strict=True))
