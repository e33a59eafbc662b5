"""Plans between two losses, from their documents alone: a checker and brute force.

Written from docs/decisions 2, 9, 18, 24 and 26; imports nothing of the product. A document is what
``json.load`` returns. Stages split their microbatches or are on one device; nothing recomputes.
"""

import re
from itertools import combinations, pairwise, permutations
from math import ceil, inf, isclose

EPS = 1e-7
SHARES = {"F": ["forward"], "I": ["input_gradient"], "W": ["weight_gradient"]}
SHARES["B"] = SHARES["I"] + SHARES["W"]


class WrongError(Exception):
    """A rule that the plan breaks."""


def need(holds, words):
    if not holds:
        raise WrongError(words)


class Costs:
    """Seconds, shares and bytes of the stages ``[(layers, devices), ...]``."""

    def __init__(self, model, cluster, stages, assumed=1.0):
        self.layers, self.size = model["layers"], model["microbatch_size"]
        self.state = 2 + model.get("optimizer_bytes_per_parameter_byte", 2)
        self.names = [one["name"] for one in cluster["devices"]]
        self.room = {one["name"]: one["memory_bytes"] for one in cluster["devices"]}
        self.bandwidth = cluster["links"]["bandwidth_bytes_per_second"]
        self.latency = cluster["links"].get("latency_seconds", 0)
        self.stages, self.assumed = stages, assumed

    def of(self, stage, field):
        """Sum over layers of one device's part of a microbatch (one measured size)."""
        (start, stop), devices = self.stages[stage]
        part = ceil(self.size / len(devices)) / self.size
        return sum(self.cost(layer).get(field, 0.0) for layer in range(start, stop)) * part

    def cost(self, layer):
        return self.layers[layer]["costs"][0]

    def seconds(self, kind, stage):
        if kind == "U":
            return sum(
                self.cost(layer).get("update_seconds", 0.0)
                for layer in range(*self.stages[stage][0])
            )
        if kind == "B":
            return sum(self.seconds(part, stage) for part in "IW")
        field = {"F": "forward", "I": "input_gradient", "W": "weight_gradient"}[kind]
        return self.of(stage, f"{field}_seconds")

    def share(self, kind, stage):
        if kind == "U":
            return 1.0
        return max(
            self.cost(layer).get(f"{part}_share", self.assumed)
            for layer in range(*self.stages[stage][0])
            for part in SHARES[kind]
        )

    def link(self, a, b):
        return self.bandwidth[self.names.index(a)][self.names.index(b)]

    def transfer(self, below):
        """Between stage ``below`` and the next: seconds, or None on the same devices."""
        (_, stop), sources = self.stages[below]
        targets = self.stages[below + 1][1]
        if sources == targets:
            return None
        pieces = len(sources) * len(targets)
        size = self.cost(stop - 1)["output_bytes"] * ceil(self.size / pieces) / self.size
        rates = [self.link(a, b) for a in sources for b in targets if a != b]
        return size / min(rates) + self.latency

    def reduce(self, stage):
        (start, stop), devices = self.stages[stage]
        r = len(devices)
        if r == 1:
            return 0.0
        size = sum(self.layers[layer]["parameter_bytes"] for layer in range(start, stop))
        rate = min(self.link(a, b) for a in devices for b in devices if a != b)
        return 2 * (r - 1) / r * size / rate + 2 * (r - 1) * self.latency


def costs_of(plan, model, cluster):
    stages = [(tuple(one["layers"]), tuple(one["devices"])) for one in plan["stages"]]
    return Costs(model, cluster, stages, plan.get("assumed_share") or 1.0)


def tasks_of(  # noqa: C901 - one case per kind
    costs, microbatches, whole=()
):
    """Tasks ``(kind, stage, microbatch)``: seconds, exclusive resources, predecessors."""
    tasks, last = {}, len(costs.stages) - 1
    backs = {s: ("B",) if s in whole else ("I", "W") for s in range(last + 1)}
    for s, (_, devices) in enumerate(costs.stages):
        mains = tuple(("main", d) for d in devices)
        every = [(kind, s, m) for m in range(microbatches) for kind in backs[s]]
        update, reduce = costs.seconds("U", s), costs.reduce(s)
        ready = every
        if reduce:
            tasks["R", s, 0] = (reduce, tuple(("reduce", d) for d in devices), every)
            ready = [*every, ("R", s, 0)]
        if update:
            tasks["U", s, 0] = (update, mains, ready)
            ready = [*ready, ("U", s, 0)]
        for m in range(microbatches):
            before, after = [], []
            if s < last:
                seconds = costs.transfer(s)
                after = [(backs[s + 1][0], s + 1, m)]
                if seconds is not None:
                    wire = (("wire", s),)
                    tasks["SB", s + 1, m] = (seconds, wire, after)
                    tasks["SF", s, m] = (seconds, wire, [("F", s, m)])
                    after = [("SB", s + 1, m)]
            if s:
                before = [("F" if costs.transfer(s - 1) is None else "SF", s - 1, m)]
            tasks["F", s, m] = (costs.seconds("F", s), mains, ready + before)
            tasks[backs[s][0], s, m] = (costs.seconds(backs[s][0], s), mains, after)
            if s not in whole:
                tasks["W", s, m] = (costs.seconds("W", s), mains, [("I", s, m)])
    return tasks


SPELLED = re.compile(r"(\d+)(F|B|I|W|SEND_F|SEND_B|REDUCE_GRAD|UPDATE)(\d*)")
SHORT = {"SEND_F": "SF", "SEND_B": "SB", "REDUCE_GRAD": "R", "UPDATE": "U"}


def read(plan):
    """Per task: the set of ``(device, start, end, stream)``."""
    found = {}
    for one in plan["schedule"]["actions"]:
        stage, kind, microbatch = SPELLED.fullmatch(one["action"]).groups()
        task = (SHORT.get(kind, kind), int(stage), int(microbatch or 0))
        row = (one["device"], one["start_seconds"], one["finish_seconds"], one.get("stream"))
        found.setdefault(task, []).append(row)
    return found


def verify(  # noqa: C901 - one line per rule
    plan, model, cluster
):
    """Raise :class:`WrongError` unless the plan keeps all rules; the iteration's seconds."""
    need(plan["schedule"].get("begins") == "backward", "begins")
    costs, found, m = costs_of(plan, model, cluster), read(plan), plan["microbatches"]
    need(plan["stages"][0]["layers"][0] == 0, "cover")
    need(plan["stages"][-1]["layers"][1] == len(costs.layers), "cover")
    need(all(a["layers"][1] == b["layers"][0] for a, b in pairwise(plan["stages"])), "cover")
    whole = {s for kind, s, _ in found if kind == "B"}
    tasks = tasks_of(costs, m, whole)
    need(found.keys() == tasks.keys(), f"actions {found.keys() ^ tasks.keys()}")
    spans = {}
    for task, rows in found.items():
        devices = costs.stages[task[1]][1]
        if task[0] in "FBIWU":
            need(sorted(row[0] for row in rows) == sorted(devices), f"devices of {task}")
        else:
            need(len(rows) == 1, f"{task} twice")
        need(len({row[1:] for row in rows}) == 1, f"{task} not at once")
        _, start, end, stream = rows[0]
        need(stream in (None, "main") or task[0] == "W", f"{task} in the sub-stream")
        need(start >= -EPS, f"{task} starts before 0")
        spans[task] = (start, end, stream == "sub")
    for task, (start, end, sub) in spans.items():
        seconds, _, before = tasks[task]
        need(all(spans[other][1] <= start + EPS for other in before), f"{task} too early")
        work = _work_beside(costs, spans, task) if sub else end - start
        need(isclose(work, seconds, rel_tol=1e-7, abs_tol=1e-7), f"{task} is {work}, not {seconds}")
    lanes = {}
    for task, (start, end, sub) in spans.items():
        for lane in tasks[task][1]:
            lane = ("sub", lane[1]) if sub else lane
            lanes.setdefault(lane, []).append((start, end))
    for lane, busy in lanes.items():
        for one, other in pairwise(sorted(busy)):
            need(one[1] <= other[0] + EPS, f"overlap on {lane}")
    total = max(end for _, end, _ in spans.values())
    stated = plan["predicted"]["iteration_seconds"]
    need(isclose(total, stated, rel_tol=1e-7), f"takes {total}, not {stated}")
    for device, peak in peaks(costs, spans, m, total).items():
        need(peak <= costs.room[device] * (1 + 1e-9), f"memory of {device}")
        need(isclose(peak, plan["predicted"]["peak_memory_bytes"][device]), f"peak of {device}")
    return total


def _work_beside(costs, spans, task):
    """Integral of the rate of a W in the sub-stream."""
    start, end, _ = spans[task]
    share, device = costs.share("W", task[1]), costs.stages[task[1]][1][0]
    work = end - start
    for other, (begin, stop, sub) in spans.items():
        if other[0] in "FBIWU" and not sub and device in costs.stages[other[1]][1]:
            beside = max(0.0, min(end, stop) - max(start, begin))
            work -= beside * (1 - min(1.0, (1 - costs.share(other[0], other[1])) / share))
    return work


def peaks(costs, spans, microbatches, total):
    """Peak bytes per device; at an instant, what ends is gone before what starts is there."""
    found, last = {}, len(costs.stages) - 1
    for device in {d for _, devices in costs.stages for d in devices}:
        static, changes = 0.0, []
        for s, ((start, stop), devices) in enumerate(costs.stages):
            if device not in devices:
                continue
            part = ceil(costs.size / len(devices)) / costs.size
            states = sum(costs.layers[layer]["parameter_bytes"] for layer in range(start, stop))
            static += costs.state * states
            outputs = [costs.cost(layer)["output_bytes"] * part for layer in range(start, stop)]
            static += 2 * outputs[-1] * (s < last)
            static += 2 * costs.cost(start - 1)["output_bytes"] * part if s else 0.0
            waiting = []
            for m in range(microbatches):
                saved = costs.of(s, "saved_bytes")
                back = spans[("W", s, m) if ("W", s, m) in spans else ("B", s, m)]
                changes += [(0.0, saved), (back[1], -saved), (spans["F", s, m][0], saved)]
                if ("I", s, m) in spans:
                    waiting += [(spans["I", s, m][0], 1), (back[1], -1)]
            held, buffered = 0, outputs[-1] if s < last else 0.0
            for at, step in sorted(waiting):
                before = max(0.0, held * sum(outputs) - buffered * (held > 0))
                held += step
                after = max(0.0, held * sum(outputs) - buffered * (held > 0))
                changes.append((at, after - before))
        level, top = static, static
        for _, change in sorted((round(at, 9), change) for at, change in changes):
            level += change
            top = max(top, level)
        found[device] = top
    return found


def best_order(  # noqa: C901 - one search
    costs, microbatches, limit=inf
):
    """The shortest window of one stream: every order, each task as early as it allows.

    Without memory. Depth-first over (done tasks, free times); pruned by chains and loads.
    """
    tasks = tasks_of(costs, microbatches)
    names = [t for t in tasks]
    index = {t: i for i, t in enumerate(names)}
    seconds = [tasks[t][0] for t in names]
    lanes = sorted({lane for t in names for lane in tasks[t][1]})
    uses = [tuple(lanes.index(lane) for lane in tasks[t][1]) for t in names]
    before = [tuple(index[p] for p in tasks[t][2]) for t in names]
    after = [[j for j in range(len(names)) if i in before[j]] for i in range(len(names))]
    tails = [0.0] * len(names)
    for _ in names:
        for i in range(len(names)):
            tails[i] = max((seconds[j] + tails[j] for j in after[i]), default=0.0)
    # Microbatches are equal: those of one kind and stage start in their order.
    twins = [next((index[k, s, m - 1],) if m else () for _ in (0,)) for k, s, m in names]
    best, seen = [limit], set()

    def visit(done, ends, free, top):  # noqa: C901 - one search
        if len(ends) == len(names):
            best[0] = min(best[0], top)
            return
        key = (
            done,
            tuple(free),
            tuple(
                sorted((i, e) for i, e in ends.items() if any(not done >> j & 1 for j in after[i]))
            ),
        )
        if key in seen:
            return
        seen.add(key)
        left = [0.0] * len(lanes)
        for i in range(len(names)):
            if not done >> i & 1:
                for lane in uses[i]:
                    left[lane] += seconds[i]
        if any(f + w >= best[0] - EPS for f, w in zip(free, left, strict=True) if w):
            return
        moves = []
        for i in range(len(names)):
            if done >> i & 1 or any(not done >> p & 1 for p in (*before[i], *twins[i])):
                continue
            start = max([0.0, *(ends[p] for p in before[i]), *(free[lane] for lane in uses[i])])
            if start + seconds[i] + tails[i] >= best[0] - EPS:
                return
            moves.append((start, i))
        # An active schedule starts no task after another one could have ended on its lane.
        earliest = min(start + seconds[i] for start, i in moves)
        for start, i in sorted(moves):
            if start >= earliest + EPS and seconds[i] > 0:
                continue
            now = list(free)
            for lane in uses[i]:
                now[lane] = start + seconds[i]
            end = start + seconds[i]
            visit(done | 1 << i, {**ends, i: end}, now, max(top, end))

    visit(0, {}, [0.0] * len(lanes), 0.0)
    return best[0]


def run_streams(  # noqa: C901 - one loop over events
    costs, tasks, main, sub, waits=None
):
    """End of the window if both streams of the only device start as early as their orders allow.

    ``waits`` holds seconds that a main task idles before it starts. None: a deadlock.
    """
    ends, now, head, tail = {}, 0.0, 0, 0
    waits = dict(waits or {})
    running = beside = None  # (task, what is left)
    while len(ends) < len(main) + len(sub):
        if running is None and head < len(main) and all(p in ends for p in tasks[main[head]][2]):
            task = main[head]
            if waits.get(task):
                running = (None, waits.pop(task))
            else:
                running, head = (task, tasks[task][0]), head + 1
        if beside is None and tail < len(sub) and all(p in ends for p in tasks[sub[tail]][2]):
            beside, tail = (sub[tail], tasks[sub[tail]][0]), tail + 1
        if running is None and beside is None:
            return None
        rate = 1.0
        if running is not None and running[0] is not None and beside is not None:
            kind, stage, _ = running[0]
            rate = min(1.0, (1 - costs.share(kind, stage)) / costs.share("W", beside[0][1]))
        step = min(
            running[1] if running else inf, beside[1] / rate if beside and rate > 1e-12 else inf
        )
        now += step
        if running:
            running = (running[0], running[1] - step)
        if beside:
            beside = (beside[0], beside[1] - step * rate)
        if running and running[1] <= 1e-11:
            if running[0] is not None:
                ends[running[0]] = now
            running = None
        if beside and beside[1] <= 1e-11:
            ends[beside[0]] = now
            beside = None
    return now


def linear_orders(tasks, before):
    """All orders of ``tasks`` in which what is in ``before`` comes first; twins in their order."""
    if not tasks:
        yield ()
        return
    for task in sorted(tasks):
        if before[task] & tasks:
            continue
        for rest in linear_orders(tasks - {task}, before):
            yield (task, *rest)


def best_of_two_streams(  # noqa: C901 - one loop per choice
    costs, microbatches, waits=()
):
    """The shortest window of one device over all orders of both streams, each W in either.

    ``waits`` are tried before each single main task, too.
    """
    tasks = tasks_of(costs, microbatches)
    reach = {t: set(tasks[t][2]) for t in tasks}
    for _ in tasks:
        for t in tasks:
            reach[t] |= {q for p in reach[t] for q in reach[p]}
    for kind, s, m in tasks:
        if m and kind in "FI":  # microbatches are equal
            reach[kind, s, m] |= {(kind, s, m - 1)}
    moving = [t for t in tasks if t[0] == "W"]
    best = inf
    for count in range(len(moving) + 1):
        for chosen in combinations(moving, count):
            for main in linear_orders(frozenset(tasks) - set(chosen), reach):
                for sub in permutations(chosen):
                    for wait in ({}, *({t: w} for t in main for w in waits)):
                        found = run_streams(costs, tasks, main, sub, wait)
                        best = min(best, inf if found is None else found)
    return best
