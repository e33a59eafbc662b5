"""An independent search for the shortest window of out-of-order backprop, in unit time steps.

It states section 2 of the paper anew. In each step every stream and link runs one operation or
waits; streams finish what they start. It walks over all states, so only tiny integers will do.
"""

from functools import cache
from itertools import product
from math import inf


def shortest(  # noqa: C901 - one search, its rules are the functions inside
    forward,
    output,
    weight,
    sync,
    device,
    send,
    preemptible=False,
    memory=None,
    saved=(),
    microbatches=1,
):
    """The least window; layer i of the paper is index i - 1; ``memory`` is one device's."""
    count = len(forward)
    work, waits, place = {}, {}, {}

    def add(name, seconds, after, where):
        work[name], waits[name], place[name] = seconds, after, where

    for m in range(microbatches):
        arrived = []
        for i in range(count, 0, -1):
            add(f"O{i}.{m}", output[i - 1], arrived, ("gpu", device[i - 1]))
            add(f"W{i}.{m}", weight[i - 1], arrived, ("gpu", device[i - 1]))
            arrived = [f"O{i}.{m}"]
            if i > 1 and device[i - 1] != device[i - 2]:
                where = ("link", device[i - 1], device[i - 2])
                add(f"SO{i}.{m}", send[i - 2], [f"O{i}.{m}"], where)
                arrived = [f"SO{i}.{m}"]
    for i in range(count, 0, -1):
        every = [f"W{i}.{m}" for m in range(microbatches)]
        add(f"SW{i}", sync[i - 1], every, ("sync", device[i - 1]))
    for m in range(microbatches):
        ready = []
        for i in range(1, count + 1):
            if i > 1 and device[i - 1] != device[i - 2]:
                add(f"SF{i}.{m}", send[i - 2], ready, ("link", device[i - 2], device[i - 1]))
                ready = [f"SF{i}.{m}"]
            add(f"F{i}.{m}", forward[i - 1], [*ready, f"SW{i}"], ("gpu", device[i - 1]))
            ready = [f"F{i}.{m}"]
    names = list(work)
    index = {name: k for k, name in enumerate(names)}
    places = sorted({place[name] for name in names if work[name] > 0})

    def done(left, name):
        return left[index[name]] == 0 and all(done(left, other) for other in waits[name])

    def begun(left, name):
        return left[index[name]] < work[name]

    def fits(before, after):
        """Inputs from time 0, or from the start of the forward before, to the last gradient."""
        if memory is None:
            return True
        used = 0
        for i, m in product(range(1, count + 1), range(microbatches)):
            old = not (done(before, f"O{i}.{m}") and done(before, f"W{i}.{m}"))
            source = f"F{max(1, i - 1)}.{m}"
            used += saved[i - 1] * (old + begun(after, source))
        return used <= memory

    @cache
    def steps(left):
        if not any(left):
            return 0
        choices = []
        for where in places:
            own = [n for n in names if place[n] == where and left[index[n]] > 0]
            running = [n for n in own if begun(left, n)]
            if running and not (preemptible and where[0] == "sync"):
                choices.append(running)
                continue
            open_ = [n for n in own if all(done(left, other) for other in waits[n])]
            choices.append([*open_, None])
        best = inf
        for chosen in product(*choices):
            if not any(chosen):
                continue
            after = list(left)
            for name in filter(None, chosen):
                after[index[name]] -= 1
            if fits(left, tuple(after)):
                best = min(best, 1 + steps(tuple(after)))
        return best

    return steps(tuple(work[name] for name in names))
