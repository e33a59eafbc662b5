"""Balanced partitions: the MILP as a second opinion, and the kernel beyond what the oracle can."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles import balanced_partitions, bottleneck, prm_table
from profiles import examples
from strategies import PROBLEMS, hard_problem

from stagewright.formulations.forms.answers import Status
from stagewright.formulations.pipelines.bppm import BalancedPartition, StageChoice
from stagewright.formulations.pipelines.bppm_milp import ByAssignment
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Device, Link, from_matrix, uniform_servers
from stagewright.graphs.models.chain import Chain, Layer, LayerCost
from stagewright.solvers.backends.backend import solve
from stagewright.solvers.pipelines.partition.passes import PartitionSearch

MILP_BACKENDS = ("highs", "pulp-cbc")
ROUNDING = 1e-9  # relative, of sums of floats
MILP = 1e-5  # relative: the solvers' tolerances
GB = 1e9


slow = examples(12, derandomize=True)


def chain(seconds, outputs=0.0, parameters=0.0, saved=0.0):
    """Layers whose forward takes 1/3 and whose backward 2/3 of ``seconds``; plain SGD."""
    layers = tuple(
        Layer(f"l{i}", parameters, (LayerCost(840, time / 3, saved, outputs, 2 * time / 3),))
        for i, time in enumerate(seconds)
    )
    return Chain("test", "measured: by hand", 840, layers, 0.0)


def server(devices, bandwidth=GB, memory=1e12):
    return uniform_servers(1, devices, Link(bandwidth), memory_bytes=memory)


def question(problem):
    return BalancedPartition(problem, tuple(range(len(problem.cluster))))


def covers(problem, stages):
    """Every layer and every device once, in order."""
    assert [s.start for s in stages] == [0, *(s.stop for s in stages[:-1])]
    assert stages[-1].stop == len(problem.chain)
    assert [v for s in stages for v in s.devices] == list(range(len(problem.cluster)))


class TestAssignment:
    @pytest.mark.parametrize("backend", MILP_BACKENDS)
    @pytest.mark.parametrize("problems", PROBLEMS)
    @slow
    @given(st.data())
    def test_equals_the_recurrence(self, problems, backend, data):
        problem = data.draw(PROBLEMS[problems](4, 4, 4))
        order = tuple(data.draw(st.permutations(range(len(problem.cluster)))))
        ask = BalancedPartition(problem, order)
        search = PartitionSearch(ask)
        for count, expected in prm_table(problem, order).items():
            form = ByAssignment(count).apply(ask)
            answer = solve(form, backend)
            balanced = search.solve(count) if count in search.bound else None
            if expected == math.inf:
                assert answer.status is Status.INFEASIBLE
                assert balanced is None
                continue
            assert answer.status is Status.OPTIMAL
            assert answer.objective == pytest.approx(expected, rel=MILP)
            stages = ByAssignment(count).invert(ask, answer.values)
            assert len(stages) == count
            assert ask.evaluate(stages) == pytest.approx(expected, rel=MILP)
            assert balanced.bottleneck_seconds == pytest.approx(expected)

    @pytest.mark.parametrize("unit", [2, 3])
    @slow
    @given(st.data())
    def test_units_of_several_devices(self, unit, data):
        """Every stage has a multiple of ``unit`` devices."""
        problem = data.draw(hard_problem(4, 3 * unit, 3))
        size = len(problem.cluster) // unit * unit
        assume(size and problem.replicas_per_layer.max() >= unit)
        order = data.draw(st.permutations(range(len(problem.cluster))))[:size]
        ask = BalancedPartition(problem, tuple(order), unit=unit)
        search = PartitionSearch(ask)
        for count in search.bound:
            answer, balanced = solve(ByAssignment(count).apply(ask)), search.solve(count)
            if balanced is None:
                assert answer.status is Status.INFEASIBLE
                continue
            assert all(len(stage.devices) % unit == 0 for stage in balanced.stages)
            assert answer.objective == pytest.approx(balanced.bottleneck_seconds, rel=MILP)
            assert ask.evaluate(balanced.stages) == pytest.approx(balanced.bottleneck_seconds)

    @examples(40, parent=slow)
    @given(hard_problem(4, 4, 4), st.integers(1, 4))
    def test_fewer_microbatches_in_flight(self, problem, held):
        """Holding min(held, n) microbatches leaves more partitions than holding min(M, n)."""
        order = question(problem).order
        ask = BalancedPartition(problem, order, min(held, problem.microbatches))
        few, many = PartitionSearch(ask), PartitionSearch(question(problem))
        for count in few.bound:
            balanced, other = few.solve(count), many.solve(count)
            answer = solve(ByAssignment(count).apply(ask))
            if balanced is None:
                assert answer.status is Status.INFEASIBLE
                assert other is None
                continue
            assert answer.objective == pytest.approx(balanced.bottleneck_seconds, rel=MILP)
            if other is not None:
                assert balanced.bottleneck_seconds <= other.bottleneck_seconds * (1 + ROUNDING)

    @pytest.mark.parametrize("backend", MILP_BACKENDS)
    def test_known_optimum(self, backend):
        """Layers of 4, 2, 3, 3 s on three devices, 5 microbatches, nothing to send.

        One stage: 5 x 12 / 3. Two: 4 s on one device, the other 8 s on two. Three: 5 x (2 + 3).
        """
        problem = PipelineProblem(chain([4.0, 2.0, 3.0, 3.0]), server(3), 5)
        ask = question(problem)
        for count, cuts, expected in [
            (1, ((0, 4, (0, 1, 2)),), 20.0),
            (2, ((0, 1, (0,)), (1, 4, (1, 2))), 20.0),
            (3, None, 25.0),
        ]:
            answer = solve(ByAssignment(count).apply(ask), backend)
            assert answer.objective == pytest.approx(expected)
            stages = ByAssignment(count).invert(ask, answer.values)
            covers(problem, stages)
            assert ask.evaluate(stages) == pytest.approx(expected)
            if cuts is not None:
                assert stages == tuple(StageChoice(*cut) for cut in cuts)

    def test_a_channel_may_decide(self):
        """2 s of work per layer, 4 microbatches; a whole boundary takes 3 + 3 s there and back."""
        problem = PipelineProblem(chain([2.0, 2.0], outputs=3 * GB), server(2), 4)
        answer = solve(ByAssignment(2).apply(question(problem)))
        assert answer.objective == pytest.approx(24.0)

    @pytest.mark.parametrize("backend", MILP_BACKENDS)
    def test_more_stages_than_layers_or_devices(self, backend):
        for problem in (
            PipelineProblem(chain([1.0]), server(2), 2),
            PipelineProblem(chain([1.0, 1.0]), server(1), 2),
        ):
            answer = solve(ByAssignment(2).apply(question(problem)), backend)
            assert answer.status is Status.INFEASIBLE

    def test_no_stages_are_refused(self):
        with pytest.raises(InputError, match="stages must be at least 1, got 0"):
            ByAssignment(0)


class TestQuestion:
    @examples(40, parent=slow)
    @given(hard_problem(6, 5, 6))
    def test_evaluate_is_the_bottleneck(self, problem):
        ask = question(problem)
        for seconds, stages in balanced_partitions(problem, ask.order).values():
            assert ask.evaluate(stages) == pytest.approx(seconds, rel=ROUNDING)
            plain = [(s.start, s.stop, s.devices) for s in stages]
            assert ask.evaluate(stages) == pytest.approx(bottleneck(problem, plain), rel=ROUNDING)

    @pytest.mark.parametrize("order", [(), (0, 0), (0, 1, 2), (1, 2)])
    def test_an_order_lists_devices_of_the_cluster_once(self, order):
        problem = PipelineProblem(chain([1.0]), server(2), 1)
        with pytest.raises(InputError, match="order must list"):
            BalancedPartition(problem, order)


class TestManyStages:
    """More than 64 numbers of stages take two words of the kernel's bitsets."""

    def test_equal_layers(self):
        """70 layers of 1 s, 70 devices, 3 microbatches, no bytes.

        xi stages with l layers on r devices each take 3 l / r, so W is 3 s where layers and
        devices can be dealt alike, which they always can: l = r in every stage.
        """
        problem = PipelineProblem(chain([1.0] * 70), server(70), 3)
        search = PartitionSearch(question(problem))
        for count in range(1, 71):
            balanced = search.solve(count)
            assert balanced.bottleneck_seconds == pytest.approx(3.0)
            assert len(balanced.stages) == count
            covers(problem, balanced.stages)

    def test_one_heavy_layer(self):
        """69 layers of 1 s and the last of 10 s, 70 devices, one microbatch.

        With xi stages, 71 - xi devices are the most the heavy layer can have to itself; while
        that is less than 10 it takes 10 / (71 - xi), or more with company.
        """
        problem = PipelineProblem(chain([1.0] * 69 + [10.0]), server(70), 1)
        search = PartitionSearch(question(problem))
        for count in (64, 65, 66, 69, 70):
            singles = count - 1  # stages in front of the heavy layer's
            devices = 70 - singles
            # 69 unit layers on so many single devices: some stage has ceil(69 / singles) of them,
            # unless the heavy stage takes the rest along.
            expected = min(
                max(math.ceil((69 - along) / singles), (10 + along) / devices)
                for along in range(69 - singles + 1)
            )
            balanced = search.solve(count)
            assert balanced.bottleneck_seconds == pytest.approx(expected)
            covers(problem, balanced.stages)

    def test_every_device_a_stage_of_growing_layers(self):
        """As many stages as layers and devices: the largest layer decides; nothing else fits."""
        seconds = [1.0 + i for i in range(70)]
        problem = PipelineProblem(chain(seconds), server(70), 2)
        balanced = PartitionSearch(question(problem)).solve(70)
        assert balanced.bottleneck_seconds == pytest.approx(140.0)
        assert [(s.start, s.stop) for s in balanced.stages] == [(i, i + 1) for i in range(70)]

    def test_memory_binds_beyond_the_first_word(self):
        """The n-th of 70 stages from the end holds n microbatches of 1 GB, up to 68 in 68 GB."""
        layers = chain([1.0] * 70, saved=GB)
        fits, short = (
            PartitionSearch(question(PipelineProblem(layers, server(70, memory=memory * GB), 100)))
            for memory in (70, 68)
        )
        assert fits.solve(70).bottleneck_seconds == pytest.approx(100.0)
        short.test(1e4)  # longer than all layers take on one device
        assert max(short.found) == 69

    def test_narrow_channels_beyond_the_first_word(self):
        """A boundary of 1 GB takes 2 + 2 s between single devices: more than a layer's 1 s."""
        problem = PipelineProblem(chain([1.0] * 66, outputs=GB), server(66, bandwidth=GB / 2), 2)
        balanced = PartitionSearch(question(problem)).solve(66)
        assert balanced.bottleneck_seconds == pytest.approx(8.0)


class TestCases:
    def test_two_kinds(self):
        """Layers of 1 s on the fast kind, 3 s on the slow; fast, slow in this order.

        Two stages, one microbatch: three layers and one are 3 and 3 s.
        """
        costs = (
            LayerCost(840, 0.5, 0.0, 0.0, 0.5, device_kind="fast"),
            LayerCost(840, 1.5, 0.0, 0.0, 1.5, device_kind="slow"),
        )
        layers = tuple(Layer(f"l{i}", 0.0, costs) for i in range(4))
        devices = [Device("a", "fast", 1e12), Device("b", "slow", 1e12)]
        cluster = from_matrix(devices, [[0, GB], [GB, 0]])
        problem = PipelineProblem(Chain("two", "by hand", 840, layers), cluster, 1)
        search = PartitionSearch(BalancedPartition(problem, (0, 1)))
        assert search.solve(2).bottleneck_seconds == pytest.approx(3.0)
        assert [s.stop for s in search.solve(2).stages] == [3, 4]
        # Shared by both, the slow one decides: 4 x 3 / 2.
        assert search.solve(1).bottleneck_seconds == pytest.approx(6.0)

    def test_memory_moves_a_border(self):
        """Four layers of 2 GB of states on two devices; the first holds 6 GB, the second 2 GB."""
        work = chain([1.0] * 4, parameters=GB)
        devices = [Device("a", "v100", 6.5 * GB), Device("b", "v100", 2.5 * GB)]
        cluster = from_matrix(devices, [[0, GB], [GB, 0]])
        problem = PipelineProblem(work, cluster, 1)
        found = balanced_partitions(problem, (0, 1))
        assert list(found) == [2]
        seconds, stages = found[2]
        assert [s.stop for s in stages] == [3, 4]
        assert seconds == pytest.approx(3.0)

    def test_a_narrow_channel_moves_a_border(self):
        """1 + 1 | 1 + 1 would send 10 GB both ways; the cut behind the first layer is free."""
        layers = tuple(
            Layer(f"l{i}", 0.0, (LayerCost(840, 0.5, 0.0, output, 0.5),))
            for i, output in enumerate([0.0, 10 * GB, 10 * GB, 0.0])
        )
        problem = PipelineProblem(Chain("narrow", "by hand", 840, layers), server(2), 1)
        balanced = PartitionSearch(question(problem)).solve(2)
        assert balanced.bottleneck_seconds == pytest.approx(3.0)
        assert [s.stop for s in balanced.stages] == [1, 4]

    def test_nothing_fits(self):
        """Three layers of 2 GB of states each on two devices of 3 GB."""
        problem = PipelineProblem(chain([1.0] * 3, parameters=GB), server(2, memory=3 * GB), 2)
        assert balanced_partitions(problem, (0, 1)) == {}
        assert PartitionSearch(question(problem)).solve(2) is None


class TestSearch:
    @examples(40, parent=slow)
    @given(hard_problem(6, 5, 6))
    def test_bounds_are_equal_when_exact_and_close_when_not(self, problem):
        ask = question(problem)
        exact, coarse = PartitionSearch(ask), PartitionSearch(ask)
        table = prm_table(problem, ask.order)
        for count in exact.bound:
            one, other = exact.solve(count), coarse.solve(count, ratio=0.02)
            if table[count] == math.inf:
                assert one is None
                assert other is None
                continue
            assert one.bound_seconds == one.bottleneck_seconds
            assert other.bound_seconds <= table[count] * (1 + ROUNDING)
            assert other.bottleneck_seconds <= 1.02 * other.bound_seconds * (1 + ROUNDING)
            assert other.bottleneck_seconds >= table[count] * (1 - ROUNDING)

    @examples(20, parent=slow)
    @given(hard_problem(6, 5, 4), st.lists(st.floats(0.5, 4.0), min_size=1, max_size=5))
    def test_a_pass_narrows_every_bracket(self, problem, factors):
        """Bounds only rise, placements only get better, and W stays between them."""
        search = PartitionSearch(question(problem))
        table = prm_table(problem, search.question.order)
        start = max(search.bound.values())
        for factor in factors:
            bound, found = dict(search.bound), dict(search.found)
            search.test(start * factor)
            for count in search.bound:
                assert search.bound[count] >= bound[count]
                assert search.bound[count] <= table[count] * (1 + ROUNDING)
                assert count not in found or search.found[count][0] <= found[count][0]
                if count in search.found:
                    assert search.found[count][0] >= table[count] * (1 - ROUNDING)
                    assert search.found[count][0] <= start * max(factors)
                    assert search.bound[count] <= search.found[count][0]
                else:
                    assert search.bound[count] > start * factor
        assert search.passes == len(factors)

    def test_how_much_memory_would_do(self):
        """Three layers of 2 GB of states on two devices of 3 GB: two on one device need 4 GB."""
        problem = PipelineProblem(chain([1.0] * 3, parameters=GB), server(2, memory=3 * GB), 2)
        search = PartitionSearch(question(problem))
        assert search.with_memory(1.3) is None
        stages = search.with_memory(1.34)
        covers(problem, stages)
        assert len(stages) == 2

    def test_a_ceiling_ends_the_search(self):
        problem = PipelineProblem(chain([4.0, 2.0, 3.0, 3.0]), server(3), 5)
        search = PartitionSearch(question(problem))
        best = search.solve(3).bottleneck_seconds
        assert best == pytest.approx(25.0)
        assert PartitionSearch(question(problem)).solve(3, ceiling=best) is None
        just_above = PartitionSearch(question(problem)).solve(3, ceiling=best * (1 + 1e-6))
        assert just_above.bottleneck_seconds == best
