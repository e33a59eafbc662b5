"""Handcrafted zero-bubble schedules: weight gradients fill the bubbles (Qi et al. 2024)."""

from collections.abc import Sequence
from functools import lru_cache

from stagewright.formulations.plans.actions import Action
from stagewright.formulations.schedules.order import F, I, Order, Row, W
from stagewright.formulations.schedules.published.one_f_one_b import groups_of, passes_of


@lru_cache(maxsize=8)
def zb_h1(devices: int, microbatches: int) -> Order:
    """ZB-H1: 1F1B whose stage s puts off its weight gradients by s microbatches (section 2.3).

    Every stage keeps at most p microbatches in flight, as many as the first stage of 1F1B. If no
    weight gradient takes longer than an input gradient or a forward, the bubble is
    (p - 1) (tF + tI - tW).
    """
    return _put_off(devices, 1, (microbatches,), 1)


@lru_cache(maxsize=8)
def zb_h2(devices: int, microbatches: int) -> Order:
    """ZB-H2: up to 2 p - 1 microbatches in flight; stage s puts off W by 2 s (section 2.3).

    With equal times and m >= 2 p - 1 no device is idle from its first to its last computation; the
    makespan is 3 m + p - 1.
    """
    return _put_off(devices, 1, (microbatches,), 2)


@lru_cache(maxsize=8)
def interleaved_zero_bubble(devices: int, chunks: int, microbatches: int) -> Order:
    """ZB-H1 with several stages per device, microbatches in the groups of interleaved 1F1B.

    Stage s is on device s mod p. Groups are those of `ragged_interleaved`.
    """
    return _put_off(devices, chunks, groups_of(devices, microbatches), 1)


def _put_off(devices: int, chunks: int, groups: Sequence[int], depth: int) -> Order:
    passes = passes_of(chunks, groups)
    turned = [(chunks - 1 - chunk, m) for chunk, m in passes]
    warm_up = (chunks - 1) * groups[0]
    rows = []
    for d in range(devices):
        forwards = [Action(chunk * devices + d, F, m) for chunk, m in passes]
        inputs = [Action(chunk * devices + d, I, m) for chunk, m in turned]
        weights = [Action(chunk * devices + d, W, m) for chunk, m in turned]
        ahead = warm_up + depth * (devices - 1 - d)
        rows.append(_row(forwards, inputs, weights, ahead, depth * d))
    return Order(tuple(rows))


def _row(
    forwards: list[Action], inputs: list[Action], weights: list[Action], ahead: int, behind: int
) -> Row:
    """Forwards run ``ahead`` of input gradients, weight gradients ``behind`` them."""
    row = forwards[:ahead]
    for k, one in enumerate(inputs):
        row += forwards[ahead + k : ahead + k + 1]
        row.append(one)
        row += weights[k - behind : k - behind + 1] if k >= behind else []
    return (*row, *weights[max(0, len(weights) - behind) :])
