"""Tiny schedules of several stages on a device, split backwards and limits against brute force.

The brute force shares no code with the solver and does not assume that microbatches keep their
order: it appends computations and transfers in every order to their device or channel.
"""

import json
import random
from itertools import product

import pytest
from commands import run
from profiles import slow_after


def optimum(stages, microbatches, times, device, transfers, in_flight):
    """The least makespan over all sequences of operations, each started as early as it can.

    Every active schedule is such a sequence (sort by start), the objective is regular. On one
    device an operation starts after all earlier ones of the sequence, so limits in flight only
    count. A microbatch is (steps done of its chain, its weight gradients done).
    """
    split = len(times[0]) == 3
    chain = chain_of(stages, device, transfers)
    ranks = 1 + max(device)

    def extended(clocks, m, order, kind, s):
        """The clocks after one more operation: when devices and channels are free, chains ready."""
        place = ranks + s if kind == "T" else device[s]
        seconds = transfers[s] if kind == "T" else times[s]["FBW".index(kind)]
        for clock in clocks:
            free, ready = list(clock[: ranks + stages]), list(clock[ranks + stages :])
            free[place] = max(free[place], 0 if kind == "W" else ready[m]) + seconds
            if kind != "W":
                ready[m] = free[place]
            yield (*free, *(ready[one] for one in order))

    layer = {((0, frozenset()),) * microbatches: {(0,) * (ranks + stages + microbatches)}}
    for _ in range(microbatches * (len(chain) + split * stages)):
        following = {}
        for jobs, clocks in layer.items():
            for m, job, kind, s in options(chain, in_flight, split, jobs):
                moved = [*jobs[:m], job, *jobs[m + 1 :]]
                order = sorted(
                    range(microbatches), key=lambda n: (moved[n][0], sorted(moved[n][1]))
                )
                state = tuple(moved[n] for n in order)
                following.setdefault(state, set()).update(extended(clocks, m, order, kind, s))
        layer = {state: undominated(front) for state, front in following.items()}
    (clocks,) = layer.values()
    return min(max(clock) for clock in clocks)


def chain_of(stages, device, transfers):
    """The operations of a microbatch in their order, without weight gradients."""
    sent = [s for s in range(stages - 1) if device[s] != device[s + 1] and transfers[s]]
    chain = []
    for s in range(stages):
        chain += [("F", s), *([("T", s)] if s in sent else [])]
    for s in reversed(range(stages)):
        chain += [("B", s), *([("T", s - 1)] if s - 1 in sent else [])]
    return chain


def options(chain, in_flight, split, jobs):
    """(microbatch, its next state, kind, stage) of every operation that may come next."""
    for m, (step, done) in enumerate(jobs):
        if step < len(chain):
            kind, s = chain[step]
            if kind != "F" or held(chain, split, jobs, s) < in_flight[s]:
                yield m, (step + 1, done), kind, s
        for kind, s in chain[:step] if split else ():
            if kind == "B" and s not in done:
                yield m, (step, done | {s}), "W", s


def held(chain, split, jobs, s):
    """Microbatches in flight on stage ``s``."""
    begun = sum(("F", s) in chain[:step] for step, _ in jobs)
    ended = sum(s in done if split else ("B", s) in chain[:step] for step, done in jobs)
    return begun - ended


def undominated(front):
    kept = []
    for clock in sorted(front):
        if not any(all(a <= b for a, b in zip(one, clock, strict=True)) for one in kept):
            kept.append(clock)
    return set(kept)


PLACES = {1: [(0,)], 2: [(0, 0), (0, 1)], 3: [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]}


def instance(seed):
    draw = random.Random(seed)
    stages = draw.choice([1, 2, 2, 3, 3])
    split = draw.random() < 0.5
    microbatches = draw.randint(1, 2 if split and stages == 3 else 3)
    return {
        "stages": stages,
        "microbatches": microbatches,
        "times": [tuple(draw.randint(1, 5) for _ in range(2 + split)) for _ in range(stages)],
        "device": draw.choice(PLACES[stages]),
        "transfers": [draw.randint(0, 3) for _ in range(stages - 1)],
        "in_flight": [draw.randint(1, microbatches) for _ in range(stages)],
    }


def arguments(one):
    options = {
        "stages": one["stages"],
        "microbatches": one["microbatches"],
        "times": ";".join(",".join(map(str, row)) for row in one["times"]),
        "stage-devices": ",".join(map(str, one["device"])),
        "in-flight": ",".join(map(str, one["in_flight"])),
        "threads": 1,
        "time-limit": 60,
    }
    if one["transfers"]:
        options["transfer"] = ",".join(map(str, one["transfers"]))
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]


def answered(one, kind):
    result = run("schedule", *arguments(one), "--kind", kind, "--json")
    return result.exit_code, json.loads(result.stdout)


def require_right(one, code, found, best):
    assert code == 0
    assert found["status"] == "optimal", found
    assert found["makespan"] == pytest.approx(best), one
    assert found["bound"] == pytest.approx(best), one
    require_feasible(one, found)


def require_feasible(one, found):
    """Devices do one thing at a time, chains keep their order, limits hold."""
    split = len(one["times"][0]) == 3
    spans = {}
    for order, starts in zip(found["order"], found["starts"], strict=True):
        before = 0
        for action, start in zip(order, starts, strict=True):
            kind = next(letter for letter in action if letter.isalpha())
            s, m = map(int, action.split(kind))
            assert start >= before - 1e-9
            before = start
            for part in "IW" if split and kind == "B" else kind:  # a whole backward is both parts
                length = one["times"][s][("FIW" if split else "FB").index(part)]
                spans[part, s, m] = (before, before + length)
                before += length
    assert len(spans) == one["stages"] * one["microbatches"] * (3 if split else 2)
    back, last = ("I", "W") if split else ("B", "B")
    for m, s in product(range(one["microbatches"]), range(one["stages"])):
        if split:
            assert spans["W", s, m][0] >= spans["I", s, m][1] - 1e-9
        if s + 1 < one["stages"]:
            wait = one["transfers"][s] * (one["device"][s] != one["device"][s + 1])
            assert spans["F", s + 1, m][0] >= spans["F", s, m][1] + wait - 1e-9
            assert spans[back, s, m][0] >= spans[back, s + 1, m][1] + wait - 1e-9
        else:
            assert spans[back, s, m][0] >= spans["F", s, m][1] - 1e-9
        start = spans["F", s, m][0]
        held = sum(
            spans["F", s, n][0] <= start + 1e-9 < spans[last, s, n][1] - 1e-9
            for n in range(one["microbatches"])
        )
        assert held <= one["in_flight"][s]
    assert found["makespan"] == pytest.approx(max(end for _, end in spans.values()))


def test_brute_force_on_known_optima():
    """GPipe's and 1F1B's flush take (M + S - 1)(F + B); one device takes all work."""
    assert optimum(2, 3, [(1, 2)] * 2, (0, 1), [0], [3, 3]) == 12
    assert optimum(2, 3, [(1, 2)] * 2, (0, 0), [5], [3, 3]) == 18
    assert optimum(2, 2, [(1, 1)] * 2, (0, 1), [1], [1, 1]) == 12


@pytest.mark.parametrize("seed", slow_after(12, range(60)))
def test_optimal_schedules_equal_brute_force(seed):
    one = instance(seed)
    code, found = answered(one, "optimal")
    require_right(one, code, found, optimum(**one))


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "pe"])
@pytest.mark.parametrize("seed", range(3))
def test_bounds_of_rules_never_exceed_the_optimum(seed, kind):
    one = instance(seed)
    code, found = answered(one, kind)
    if code == 0:
        best = optimum(**one)
        assert found["makespan"] >= best - 1e-9
        assert found["bound"] is None or found["bound"] <= best * (1 + 1e-9)
        require_feasible(one, found)
