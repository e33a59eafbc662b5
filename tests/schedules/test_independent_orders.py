"""Optimal schedules against every order of two devices, by an enumeration of its own."""

import random
from itertools import pairwise, product
from math import inf

import pytest

import stagewright

CASES = 10


def linear(operations, before):
    """All sequences that respect ``before(a, b)``."""
    if not operations:
        yield ()
        return
    for one in operations:
        others = [other for other in operations if other != one]
        if not any(before(other, one) for other in others):
            for rest in linear(others, before):
                yield (one, *rest)


def rows_of(operations, saved, before):
    """All sequences of a device with their peaks of memory."""
    for row in linear(operations, before):
        held = peak = 0.0
        for kind, stage, _ in row:
            taken, early, late = saved[stage]
            given = {"F": -taken, "I": early, "W": late, "B": early + late}
            held -= given[kind]
            peak = max(peak, held)
        yield row, peak


def schedules(times, device, count, saved):
    """(makespan, span of each device, peaks) of all pairs of rows, without transfers."""
    kinds = "FIW" if len(times[0]) == 3 else "FB"
    back, stages = kinds[1], len(times)
    seconds = {
        (kind, s, m): times[s][k]
        for k, kind in enumerate(kinds)
        for s in range(stages)
        for m in range(count)
    }

    def needs(operation):
        kind, s, m = operation
        if kind == "F":
            return (kind, s - 1, m) if s else None
        if kind == "W":
            return (back, s, m)
        return (back, s + 1, m) if s < stages - 1 else ("F", s, m)

    def before(one, other):
        while other is not None and other != one:
            other = needs(other)
        return other is not None

    rows = [list(rows_of([o for o in seconds if device[o[1]] == d], saved, before)) for d in (0, 1)]
    for chosen in product(*rows):
        ends = timed([row for row, _ in chosen], seconds, needs)
        if ends is not None:
            spans = [ends[row[-1]] - ends[row[0]] + seconds[row[0]] for row, _ in chosen]
            yield max(ends.values()), max(spans), max(peak for _, peak in chosen)


def timed(rows, seconds, needs):
    """The earliest ends; None if the rows deadlock."""
    ends, ahead = {}, {b: a for row in rows for a, b in pairwise(row)}
    left = {operation for row in rows for operation in row}
    while left:
        ready = {
            one
            for one in left
            if all(other is None or other in ends for other in (needs(one), ahead.get(one)))
        }
        if not ready:
            return None
        for one in ready:
            known = [ends[other] for other in (needs(one), ahead.get(one)) if other is not None]
            ends[one] = max(known, default=0.0) + seconds[one]
        left -= ready
    return ends


@pytest.mark.parametrize("seed", range(CASES))
def test_optimal_schedules_are_the_best_of_all_orders(seed):
    """Makespan with and without a limit of memory, and the least memory within a makespan."""
    rng = random.Random(seed)
    split = seed % 2 == 0
    device, count = ((0, 1), 2 if split else 3) if seed % 3 else ((0, 1, 1, 0), 1)
    times = [tuple(float(rng.randint(1, 5)) for _ in range(3 if split else 2)) for _ in device]
    parts = [(float(rng.randint(0, 2)), float(rng.randint(0, 2))) for _ in device]
    saved = [(a + b, a, b) for a, b in parts]
    columns = list(zip(*times, strict=True))
    given = {
        "microbatches": count, "forward": columns[0], "backward": columns[1], "device": device,
        "weight_gradient": columns[2] if split else (), "saved": [one[0] for one in saved],
        "freed": [one[1] for one in saved], "time_limit": 30.0,
    }  # fmt: skip
    every = list(schedules(times, device, count, saved))
    makespan = min(one[0] for one in every)
    found = stagewright.schedule(**given)
    assert (found.status, found.makespan) == ("optimal", pytest.approx(makespan))
    least = max(sum(saved[s][0] for s in range(len(device)) if device[s] == d) for d in (0, 1))
    for limit in {least, least + 1.0}:
        within = min(one[0] for one in every if one[2] <= limit)
        found = stagewright.schedule(**given, memory=[limit])
        assert (found.status, found.makespan) == ("optimal", pytest.approx(within))
        assert found.peak_memory <= limit
    for slack in (0.0, 3.0):
        memory = min((one[2] for one in every if one[0] <= makespan + slack), default=inf)
        found = stagewright.schedule(
            **given, objective="memory", makespan_limit=makespan + slack
        )  # fmt: skip
        assert found.makespan <= makespan + slack
        assert (found.status, found.peak_memory) == ("optimal", pytest.approx(memory))


@pytest.mark.parametrize("seed", range(4))
def test_the_best_placement_is_the_best_of_all_placements(seed):
    """Four chunks on two devices, with every order of each placement that uses both."""
    rng = random.Random(seed)
    times = [tuple(float(2 * rng.randint(1, 5)) for _ in range(3)) for _ in (0, 1)]
    halves = [tuple(one / 2 for one in times[stage]) for stage in (0, 0, 1, 1)]
    columns = list(zip(*times, strict=True))
    placements = [(0, *rest) for rest in product((0, 1), repeat=3) if any(rest)]
    every = (schedules(halves, device, 1, [(0.0,) * 3] * 4) for device in placements)
    best = min(one[0] for of_placement in every for one in of_placement)
    found = stagewright.schedule(
        microbatches=1, forward=columns[0], backward=columns[1], weight_gradient=columns[2],
        chunks=2, placement="free", time_limit=30.0,
    )  # fmt: skip
    assert (found.status, found.makespan) == ("optimal", pytest.approx(best))
