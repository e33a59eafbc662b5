"""The optimum by Metis' evaluator, with made-up costs; needs no checkout of it."""

from itertools import combinations, product
from types import SimpleNamespace

import pytest

from benchmarks.metis import DEGREES, LAYERS, SIZES, Case, MetisPlan, listed_plans
from benchmarks.profiled_metis import optimum, words

OUTPUT = """cost: 1
len(costs): 2
rank, cost, node_sequence, device_groups, strategies(dp_deg, tp_deg), batches(number of batch), \
layer_partition)
1, 20.5, (<DeviceType.A100: 'a100'>,), [2, 2], [(2, 1), [1, 2]], 4, [0, 4, 10]
2, 30.0, (<DeviceType.A100: 'a100'>,), [4], [(4, 1)], 2, [0, 10]
"""
COMPUTE = (3.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 5.0, 1.0, 1.0)


class Evaluator:
    """Costs that pull towards different plans."""

    def __init__(self, memory: float) -> None:
        self.model_volume = SimpleNamespace(
            get_activation_size=lambda stop, size, tensor: 0.3 * stop * size,
            get_parameter_size_by_stage=lambda tensor, first, stop: (stop - first) / tensor,
        )
        keys = [f"tp{tensor}_bs{size}" for tensor in DEGREES for size in SIZES]
        self.profile_data = {
            "DeviceType.A100": {key: {"memory": [memory] * LAYERS} for key in keys}
        }

    def _get_execution_cost(self, kinds, first, stop, ways, batch, batches):
        size = batch // ways[0] // batches
        return sum(COMPUTE[first:stop]) * (0.4 + 0.6 * size) / ways[1] ** 0.7

    def _get_pp_cost(self, size, bandwidth):
        return size

    def _get_dp_cost(self, held, bandwidth, data):
        return 2 * held[0] * (data - 1) / data

    def _get_parameter_update_cost(self, tensor, layers):
        return layers / tensor

    def _get_fb_sync_cost(self, kinds, tensor, size):
        return 0.2 / tensor

    def _get_batch_generate_cost(self, batches):
        return 0.1 * batches


def made(memory: float, batch: int) -> Case:
    case = Case(1, 1, batch)
    vars(case)["evaluator"] = Evaluator(memory)
    return case


def every(case: Case):
    """All plans of the class with their costs."""
    ways = [(d, t) for t in DEGREES for d in range(1, 5) if d * t <= 4]
    for number in range(1, 5):
        for inner in combinations(range(1, LAYERS), number - 1):
            cuts = (0, *inner, LAYERS)
            for chosen in product(ways, repeat=number):
                if sum(d * t for d, t in chosen) == case.gpus:
                    stages = tuple(
                        (a, b, *way) for a, b, way in zip(cuts, cuts[1:], chosen, strict=False)
                    )
                    yield from plans(case, stages)


def plans(case: Case, stages):
    for batches in range(1, case.batch + 1):
        sizes = {case.batch / (d * batches) for _, _, d, _ in stages}
        if case.batch % batches or not sizes <= set(SIZES):
            continue
        if all(case.fits(one, batches) for one in stages):
            parts = [case.parts(one, batches) for one in stages]
            compute, sent, update, summed = zip(*parts, strict=True)
            yield (
                sum(compute)
                + (batches - 1) * max(compute)
                + sum(sent)
                + max(update)
                + max(summed)
                + case.finish(stages[-1], batches)
            )


@pytest.mark.parametrize(("memory", "batch"), [(1.0, 8), (60.0, 8), (40.0, 4)])
def test_the_optimum_is_that_of_all_plans(memory, batch):
    case = made(memory, batch)
    best, plan = optimum(case)
    assert best == pytest.approx(min(every(case)))
    assert [first for first, *_ in plan.stages] == [0, *(stop for _, stop, *_ in plan.stages)][:-1]


def test_nothing_fits():
    assert optimum(made(1e6, 8)) == (float("inf"), None)


def test_the_plans_of_an_output():
    found = list(listed_plans(OUTPUT))
    assert found == [
        (20.5, MetisPlan(((0, 4, 2, 1), (4, 10, 1, 2)), 4)),
        (30.0, MetisPlan(((0, 10, 4, 1),), 2)),
    ]
    assert words(found[0][1]) == "4 d2 t1 | 6 d1 t2; 4"
