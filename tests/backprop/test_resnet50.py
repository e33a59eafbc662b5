"""Section 8.3's ResNet-50 on 16 GPUs, from the profile that PipeDream's authors measured."""

from pathlib import Path

import pytest

from benchmarks.backprop_systems import SyncLink, in_chunks
from stagewright.formulations.backprop.of_stages import window_bounds
from stagewright.formulations.backprop.orders import conventional, reverse_first_k
from stagewright.formulations.backprop.training import Layers, data_parallel
from stagewright.graphs.importers.pipedream import read_pipedream
from stagewright.solvers.backprop.list_scheduling import list_schedule

PROFILE = Path(__file__).parents[3] / "shared/data/pipedream/resnet50.graph.txt"
COMPUTED = 0.380  # seconds, as printed
QUEUED = 0.350  # the first layer's synchronisation

pytestmark = pytest.mark.skipif(not PROFILE.exists(), reason="the public profiles are not here")


def resnet50(others):
    """54 layers, each a convolution or the last product with what follows it, and their bytes.

    Half of the backward of a convolution is its weight gradient, and ``others`` of the other
    operators' (the profile has sums only).
    """
    rows = []
    for layer in read_pipedream(PROFILE, microbatch_size=128).layers:
        heavy = "Conv2d" in layer.name or "Linear" in layer.name
        if heavy or not rows:
            rows.append([0.0] * 4)
        cost, share = layer.costs[0], 0.5 if heavy else others
        backward = cost.total_backward_seconds
        parts = cost.forward_seconds, backward * (1 - share), backward * share
        rows[-1] = [a + b for a, b in zip(rows[-1], (*parts, layer.parameter_bytes), strict=True)]
    scale = COMPUTED / sum(sum(row[:3]) for row in rows)
    forward, output, weight = (tuple(row[i] * scale for row in rows) for i in range(3))
    return Layers(forward, (0.0, *output[1:]), weight), [row[3] for row in rows]


def exposed(layers, sync, k):
    """Seconds by which a window is longer than its computations."""
    problem = data_parallel(layers, sync)
    work = sum(problem.seconds) - sum(sync)
    return problem.evaluate(list_schedule(problem, reverse_first_k(problem, k))) - work


def test_overlap_of_the_first_synchronisation():
    """85 ms printed: between 66 and 93 ms, by what of a normalisation's backward is movable."""
    overlaps = []
    for others in (0.0, 0.5):
        layers, _ = resnet50(others)
        assert layers.count == 54
        sync = (QUEUED, *(0.0,) * 53)
        assert exposed(layers, sync, 0) == pytest.approx(QUEUED)
        overlaps.append(QUEUED - exposed(layers, sync, 45))
        assert overlaps[-1] == pytest.approx(sum(layers.weight_gradient[1:45]))
    low, high = overlaps
    assert 0.06 < low < 0.085 < high < 0.1


def test_one_busy_link_leaves_nothing_to_reverse():
    """With all messages on one link that first layers may preempt, priority alone is optimal."""
    layers, amounts = resnet50(0.5)
    problem = in_chunks(layers, amounts, SyncLink(0.14e9), 1e5)
    end = list_schedule(problem, conventional(problem)).end
    assert end > COMPUTED + 0.3
    assert max(bound for _, bound in window_bounds(problem)) == pytest.approx(end)
