"""The least time of placed and ordered operators, by trying everything; whole numbers, tiny cases.

It states the rules anew (a device runs one operator at a time; a tensor goes once to each other
device that reads it; memory is held from first to last use) and shares no code with the product.
"""

from itertools import permutations, product
from math import inf


class Case:
    """Plain numbers: ``tensors`` are (maker, bytes sent, bytes held, readers)."""

    def __init__(
        self,
        seconds,
        tensors,
        latency,
        rate,
        contention="none",
        state=None,
        memory=None,
        group=None,
    ):
        self.seconds, self.tensors, self.latency, self.rate = seconds, tensors, latency, rate
        self.contention, self.memory = contention, memory
        self.n, self.m = len(seconds), len(latency)
        self.state = state or [0] * self.n
        self.group = group or list(range(self.n))

    def placements(self):
        for place in product(range(self.m), repeat=self.n):
            pairs = product(range(self.n), repeat=2)
            if all(place[i] == place[j] for i, j in pairs if self.group[i] == self.group[j]):
                yield place

    def travel(self, t, source, target):
        if source == target:
            return 0
        return self.latency[source][target] + self.tensors[t][1] * self.rate[source][target]


def shortest(case):
    """The least end of the last operator; infinity if nothing fits in memory."""
    if case.memory is None and case.contention == "none":
        return min(_by_orders(case, place) for place in case.placements())
    best = inf
    for place in case.placements():
        best = min(best, _by_times(case, place, best))
    return best


def _by_orders(case, place):
    """Operators in every order, each as early as the order allows."""
    best = inf
    needs = [[] for _ in range(case.n)]
    for t, (maker, _, _, readers) in enumerate(case.tensors):
        for j in readers:
            needs[j].append((maker, case.travel(t, place[maker], place[j])))
    for order in permutations(range(case.n)):
        free, end = [0] * case.m, {}
        for j in order:
            if any(i not in end for i, _ in needs[j]):
                break
            d, takes = place[j], case.seconds[j][place[j]]
            start = max([end[i] + wait for i, wait in needs[j]], default=0)
            if takes:
                start = max(start, free[d])
                free[d] = start + takes
            end[j] = start + takes
        else:
            best = min(best, max(end.values()))
    return best


def _by_times(case, place, best):  # noqa: C901 - one search, its rules are the functions inside
    """Every start of every operator and transfer that ends before ``best``."""
    items = []  # (operator or None, tensor, target, resource, duration)
    for i in range(case.n):
        items.append((i, None, None, ("device", place[i]), case.seconds[i][place[i]]))
        for t, (maker, _, _, readers) in enumerate(case.tensors):
            for e in sorted({place[j] for j in readers} - {place[i]} if maker == i else ()):
                resource = ("link", place[i], e) if case.contention == "exclusive" else None
                items.append((None, t, e, resource, case.travel(t, place[i], e)))
    longest = sum(max(row) for row in case.seconds) + sum(item[4] for item in items)
    found = min(best, longest + 1)
    begin = {}

    def ready(item):
        i, t, _, _, _ = item
        if i is None:
            maker = case.tensors[t][0]
            return begin[maker] + case.seconds[maker][place[maker]]
        least = 0
        for t, (maker, _, _, readers) in enumerate(case.tensors):
            if i in readers:
                key = maker if place[maker] == place[i] else (t, place[i])
                span = case.travel(t, place[maker], place[i]) if key != maker else (
                    case.seconds[maker][place[maker]]
                )  # fmt: skip
                least = max(least, begin[key] + span)
        return least

    def fits():
        if case.memory is None:
            return True
        held = []  # (device, amount, first, last)
        for t, (maker, sent, own, readers) in enumerate(case.tensors):
            for e in {place[j] for j in readers} | {place[maker]}:
                last = max(
                    [begin[j] + case.seconds[j][e] for j in readers if place[j] == e], default=0
                )
                if e == place[maker]:
                    ends = [begin[maker] + case.seconds[maker][e]]
                    ends += [
                        begin[t, x] + case.travel(t, e, x)
                        for x in {place[j] for j in readers} - {e}
                    ]
                    held.append((e, own, begin[maker], max([last, *ends])))
                else:
                    held.append((e, sent, begin[t, e], last))
        for d in range(case.m):
            state = sum(case.state[i] for i in range(case.n) if place[i] == d)
            for x in range(longest + 1):
                now = sum(amount for e, amount, a, b in held if e == d and a <= x < b)
                if state + now > case.memory[d]:
                    return False
        return True

    def walk(k, busy, end):
        nonlocal found
        if k == len(items):
            if fits():
                found = min(found, end)
            return
        i, t, e, resource, takes = items[k]
        key = i if i is not None else (t, e)
        for s in range(ready(items[k]), found - takes):
            clash = takes and any(r == resource and s < b and a < s + takes for r, a, b in busy)
            if not clash:
                begin[key] = s
                more = [(resource, s, s + takes)] if takes and resource else []
                walk(k + 1, busy + more, max(end, s + takes) if i is not None else end)

    walk(0, [], 0)
    return found if found < min(best, longest + 1) else inf
