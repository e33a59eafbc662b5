"""The best plan of a whole language of finite plans, on tiny instances, by brute force.

Independent of the product: nothing of stagewright is imported. Every structure (cuts, devices,
replication, then recomputation and offloading) is enumerated in the order of a lower bound; the
schedule of each one that may still win is solved exactly by CP-SAT in whole ticks.

Feasible sizes: up to 3 layers on 3 devices with 3 microbatches for the whole language: most take
well under a second, a few with tight memory take some seconds. Four layers on two devices with two
microbatches are fine too. Durations must be whole ticks of a nanosecond, or the optimum is wrong by
half a tick per action.

Weights: only ``flush``. A finite plan with ``double-buffer`` is the same plan with one more copy of
the parameters. A plan with ``stash`` (or vertical sync) gives every backward the ``u`` seconds of
the optimizer's step: cut them off, put one UPDATE where those of the last backward of the stage
were, and it is a ``flush`` plan that is no slower and holds no old versions. So ``flush`` is at
least as fast as the others, and fits wherever they fit.
"""

import heapq
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, count, pairwise, permutations, product
from math import gcd, inf

from language_check import evaluate
from language_prices import Instance, Stage
from ortools.sat.python import cp_model

__all__ = ["Language", "best", "evaluate", "least_memory_fits"]

TICK = 1e-9  # seconds
BYTE = 1000  # memory is counted in thousandths of a byte


@dataclass(frozen=True, slots=True)
class Language:
    """What the plans of a class may do; the default is every finite plan.

    With no ``replications`` every stage has one device.
    """

    device_sharing: bool = True
    replications: frozenset = frozenset({"split", "round-robin"})
    split_backward: bool = True
    recompute: frozenset = frozenset({"none", "full", "layer"})
    offload: bool = True


def best(model, cluster, microbatches, language=None, memory_limit=None):
    """The fastest plan of the language: (seconds, plan document), or None if nothing fits."""
    search = _Search(Instance(model, cluster, microbatches, memory_limit), language or Language())
    search.run()
    if search.schedule is None:
        return None
    return search.ticks * TICK, _document(search, model, cluster)


def least_memory_fits(model, cluster, microbatches, language=None, memory_limit=None):
    """Whether any plan of the language fits into memory."""
    search = _Search(Instance(model, cluster, microbatches, memory_limit), language or Language())
    return any(
        fits(search.instance, variant)
        for stages in search.structures()
        for variant in search.variants(stages)
    )


def _document(search, model, cluster):
    """The plan document of the best schedule."""
    instance = search.instance
    names = instance.names
    stages = [
        {
            "layers": [stage.start, stage.stop],
            "devices": [names[device] for device in stage.devices],
            "replication": stage.replication,
            "recompute": stage.recompute,
            "offload": stage.offload,
        }
        for stage in search.stages
    ]
    actions = [
        entry
        for key, (start, finish) in sorted(search.schedule.items(), key=lambda item: item[1])
        for entry in _entries(search, names, key, start, finish)
    ]
    return {
        "planner": "oracle",
        "model": model["name"],
        "cluster": cluster["name"],
        "microbatches": instance.microbatches,
        "stages": stages,
        "schedule": {"kind": "finite", "actions": actions},
        "weights": "flush",
        "format": "stagewright-plan",
        "version": 1,
        "kind": "pipeline",
    }


def _entries(search, names, key, start, finish):
    """The lines of one action: one per device, or one for a transfer or all-reduce."""
    action, index, microbatch = key
    text = f"{index}{action}{'' if microbatch is None else microbatch}"
    times = {"action": text, "start_seconds": start * TICK, "finish_seconds": finish * TICK}
    stages = search.stages
    if action in ("SEND_F", "SEND_B"):
        other = index + 1 if action == "SEND_F" else index - 1
        ends = {
            "sources": [names[device] for device in stages[index].runners(microbatch)],
            "targets": [names[device] for device in stages[other].runners(microbatch)],
            "bytes": search.instance.boundary_bytes(stages[min(index, other)].stop - 1),
        }
        return [{"device": ends["sources"][0], **times, **ends}]
    stage = stages[index]
    if action == "REDUCE_GRAD":
        group = [names[device] for device in stage.devices]
        ends = {"sources": group, "targets": group}
        size = search.instance.parameter_bytes(stage)
        return [{"device": group[0], **times, **ends, "bytes": size}]
    runners = stage.devices if action == "UPDATE" else stage.runners(microbatch)
    return [{"device": names[device], **times} for device in runners]


# Structures.


class _Search:
    """Best first over structures; ``ticks``, ``stages`` and ``schedule`` are the best so far."""

    def __init__(self, instance, language):
        self.instance = instance
        self.language = language
        self.ticks, self.stages, self.schedule = inf, None, None
        self.heap, self.ids = [], count()
        self.work = lru_cache(None)(self._work)

    def run(self):
        """Solve structures in the order of their bounds until no bound is below the best."""
        for stages in self.structures():
            self.push(self.quick_bound(stages), 0, stages)
        while self.heap:
            bound, _, level, stages = heapq.heappop(self.heap)
            if bound >= self.ticks:
                return
            if level == 0:
                tasks = build_tasks(self.instance, stages, self.language.split_backward)
                self.push(max(bound, machine_bound(tasks)), 1, stages)
            else:
                self.solve(stages)

    def push(self, bound, level, stages):
        if bound < self.ticks:
            heapq.heappush(self.heap, (bound, next(self.ids), level, stages))

    def solve(self, stages):
        """Solve the schedule; then let the variants of a plain structure follow.

        Recomputation and offloading only lengthen the actions or add constraints, so they can win
        only where memory may be short.
        """
        instance = self.instance
        if fits(instance, stages):
            tasks = build_tasks(instance, stages, self.language.split_backward)
            answer = best_schedule(instance, stages, tasks, self.ticks)
            if answer is not None:
                self.ticks, self.schedule = answer
                self.stages = stages
        if all(stage.recompute == "none" and not stage.offload for stage in stages):
            for variant in self.variants(stages):
                if variant != stages and fits(instance, variant):
                    self.push(self.quick_bound(variant), 0, variant)

    def structures(self):
        """Plain structures (no recomputation, no offloading), up to symmetry.

        Two structures are the same up to the names of the microbatches, and up to an automorphism
        of the cluster: a permutation of devices that keeps kinds, memories and links. Identical
        microbatches run on the same devices in every stage, whatever their numbers.
        """
        instance, seen = self.instance, set()
        symmetries = automorphisms(instance)
        count = len(instance.layers)
        for size in range(1, count + 1):
            for cuts in combinations(range(1, count), size - 1):
                bounds = [0, *cuts, count]
                options = [self.stage_options(start, stop) for start, stop in pairwise(bounds)]
                for stages in self.choices(options):
                    key = canonical(stages, symmetries, instance.microbatches)
                    if key not in seen:
                        seen.add(key)
                        yield stages

    def choices(self, options, used=(), static=None):
        """One option per stage, within the memory of what is always there."""
        instance = self.instance
        static = static or [0] * len(instance.kinds)
        if not options:
            yield ()
            return
        for stage in options[0]:
            if not self.language.device_sharing and set(stage.devices) & set(used):
                continue
            further = list(static)
            for device in stage.devices:
                further[device] += instance.static(stage)
            if all(have <= limit for have, limit in zip(further, instance.memory, strict=True)):
                for rest in self.choices(options[1:], (*used, *stage.devices), further):
                    if not rest or linked(instance, stage, rest[0]):
                        yield (stage, *rest)

    def stage_options(self, start, stop):
        """Device choices of a stage.

        Split: one order of the devices is enough, since only the equality of neighbours depends on
        it, and equality only removes transfers. Round-robin: every order, on at most as many
        devices as there are microbatches: an idle replica lengthens the all-reduce and holds
        memory for nothing.
        """
        instance, language = self.instance, self.language
        devices = range(len(instance.kinds))
        options = [Stage(start, stop, (device,)) for device in devices]
        for size in range(2, len(devices) + 1):
            if "split" in language.replications:
                options += [Stage(start, stop, group) for group in combinations(devices, size)]
            if "round-robin" in language.replications and size <= instance.microbatches:
                groups = permutations(devices, size)
                options += [Stage(start, stop, group, "round-robin") for group in groups]
        return [stage for stage in options if self.stage_allowed(stage)]

    def stage_allowed(self, stage):
        instance = self.instance
        if not instance.enough_samples(stage):
            return False
        return len(stage.devices) == 1 or instance.all_reduce_seconds(stage) < inf

    def variants(self, stages):
        """The structure with every recomputation and offloading that may help.

        A stage none of whose devices can run short of memory has no use for them. On a single
        layer the recomputation of layers is the recomputation of the stage.
        """
        short = short_devices(self.instance, stages)
        options = [
            self.stage_variants(stage) if short & set(stage.devices) else [stage]
            for stage in stages
        ]
        return product(*options)

    def stage_variants(self, stage):
        kinds = set(self.language.recompute) - {"none"}
        if stage.stop - stage.start == 1 and "full" in kinds:
            kinds -= {"layer"}
        variants = [stage, *(replace(stage, recompute=kind) for kind in sorted(kinds))]
        if self.language.offload and all(self.instance.host[device] for device in stage.devices):
            variants.append(replace(stage, offload=True))
        return variants

    def quick_bound(self, stages):
        """The longest path of a microbatch, the largest load of a device."""
        instance = self.instance
        load, path = [0] * len(instance.kinds), [0] * instance.microbatches
        for stage in stages:
            for microbatch in range(instance.microbatches):
                runners = stage.runners(microbatch)
                busy, through = self.work(stage, runners)
                path[microbatch] += through
                for device in runners:
                    load[device] += busy
            for device in stage.devices:
                load[device] += to_ticks(instance.update_seconds(stage))
        return max(*load, max(path))

    def _work(self, stage, runners):
        """Ticks of a microbatch on its runners: of all its actions, and until the next stage's."""
        instance = self.instance
        ticks = [to_ticks(instance.seconds(stage, runners, action)) for action in "FB"]
        if not parts(instance, stage, self.language.split_backward):
            return sum(ticks), sum(ticks)
        first, second = (to_ticks(instance.seconds(stage, runners, action)) for action in "IW")
        return ticks[0] + first + second, ticks[0] + first


def automorphisms(instance):
    """Permutations of the devices under which nothing changes."""
    count = range(len(instance.kinds))
    traits = list(zip(instance.kinds, instance.memory, instance.host, strict=True))

    def same(order):
        return all(traits[order[i]] == traits[i] for i in count) and all(
            table[order[i]][order[j]] == table[i][j]
            for table in (instance.bandwidth, instance.latency)
            for i, j in permutations(count, 2)
        )

    return [order for order in permutations(count) if same(order)]


def canonical(stages, symmetries, microbatches):
    """The same key for structures that differ by symmetries of devices and microbatches."""
    return min(
        (
            tuple(
                (s.stop, s.replication, tuple(sorted(order[d] for d in s.devices))) for s in stages
            ),
            tuple(
                sorted(
                    tuple(tuple(sorted(order[d] for d in s.runners(m))) for s in stages)
                    for m in range(microbatches)
                )
            ),
        )
        for order in symmetries
    )


def linked(instance, front, behind):
    """Whether every transfer between two neighbours has its links."""
    for microbatch in range(instance.microbatches):
        senders, receivers = front.runners(microbatch), behind.runners(microbatch)
        if senders != receivers:
            layer = front.stop - 1
            there = instance.transfer_seconds(layer, senders, receivers)
            back = instance.transfer_seconds(layer, receivers, senders)
            if inf in (there, back):
                return False
    return True


# Tasks of a structure.


@dataclass(frozen=True, slots=True)
class Task:
    """An action of a schedule: its ticks, what it occupies, and what comes before it."""

    ticks: int
    resources: tuple
    after: tuple


def to_ticks(seconds):
    return round(seconds / TICK)


def parts(instance, stage, allowed):
    """Whether backwards of the stage are split into I and W.

    Where it is allowed, I then W back to back does all that a whole B does, with the same memory,
    and lets the gradient leave earlier: no whole B is needed. Not so for the recomputation of
    layers, where a whole B needs less memory: there the schedule chooses.
    """
    return allowed and not stage.offload and instance.knows_parts(stage)


def build_tasks(instance, stages, split_backward):
    """Tasks by (action, stage, microbatch), in a topological order."""
    tasks = {}
    for microbatch in range(instance.microbatches):
        _forward(instance, stages, microbatch, tasks)
        _backward(instance, stages, microbatch, tasks, split_backward)
    for index, stage in enumerate(stages):
        _close(instance, index, stage, tasks)
    return tasks


def _forward(instance, stages, microbatch, tasks):
    before = ()
    for index, stage in enumerate(stages):
        if index:
            before = _transfer(instance, stages, index - 1, microbatch, tasks, "SEND_F", before)
        runners = stage.runners(microbatch)
        tasks["F", index, microbatch] = _compute(instance, stage, runners, "F", before)
        before = (("F", index, microbatch),)


def _backward(instance, stages, microbatch, tasks, split_backward):
    last = len(stages) - 1
    before = (("F", last, microbatch),)
    for index in range(last, -1, -1):
        stage = stages[index]
        if index < last:
            before = _transfer(instance, stages, index, microbatch, tasks, "SEND_B", before)
        before = (*before, ("F", index, microbatch))
        runners = stage.runners(microbatch)
        action = "I" if parts(instance, stage, split_backward) else "B"
        first = action, index, microbatch
        tasks[first] = _compute(instance, stage, runners, action, before)
        if action == "I":
            weights = _compute(instance, stage, runners, "W", (first,))
            tasks["W", index, microbatch] = weights
        before = (first,)


def _compute(instance, stage, runners, action, after):
    ticks = to_ticks(instance.seconds(stage, runners, action))
    return Task(ticks, tuple(("device", device) for device in runners), after)


def _transfer(instance, stages, boundary, microbatch, tasks, action, before):
    """Add the transfer over a boundary, if there is one; what the next action comes after."""
    front, behind = stages[boundary].runners(microbatch), stages[boundary + 1].runners(microbatch)
    if front == behind:
        return before
    ends = (front, behind) if action == "SEND_F" else (behind, front)
    ticks = to_ticks(instance.transfer_seconds(stages[boundary].stop - 1, *ends))
    key = action, boundary + (action == "SEND_B"), microbatch
    tasks[key] = Task(ticks, (("channel", boundary, front, behind),), before)
    return (key,)


def _close(instance, index, stage, tasks):
    """All-reduce and optimizer's step of a stage, after all its backwards."""
    before = tuple(key for key in tasks if key[1] == index and key[0] in ("B", "W"))
    if len(stage.devices) > 1:
        ticks = to_ticks(instance.all_reduce_seconds(stage))
        links = tuple(("network", device) for device in stage.devices)
        tasks["REDUCE_GRAD", index, None] = Task(ticks, links, before)
        before = (("REDUCE_GRAD", index, None),)
    ticks = to_ticks(instance.update_seconds(stage))
    if ticks:
        devices = tuple(("device", device) for device in stage.devices)
        tasks["UPDATE", index, None] = Task(ticks, devices, before)


def machine_bound(tasks):
    """The largest bound of one machine: Jackson's preemptive schedule with heads and tails."""
    heads, tails = {}, dict.fromkeys(tasks, 0)
    for key, task in tasks.items():
        heads[key] = max((heads[b] + tasks[b].ticks for b in task.after), default=0)
    machines = {}
    for key in reversed(tasks):
        for before in tasks[key].after:
            tails[before] = max(tails[before], tails[key] + tasks[key].ticks)
        for resource in tasks[key].resources:
            item = heads[key], tails[key], tasks[key].ticks
            machines.setdefault(resource, []).append(item)
    path = max(heads[key] + tasks[key].ticks for key in tasks)
    return max(path, *(jackson(items) for items in machines.values()))


def jackson(items):
    """Preemptive optimum of one machine: always the available task with the longest tail."""
    waiting, heap, now, end = sorted(items), [], 0, 0
    index = 0
    while index < len(waiting) or heap:
        if not heap:
            now = max(now, waiting[index][0])
        while index < len(waiting) and waiting[index][0] <= now:
            _, tail, ticks = waiting[index]
            heapq.heappush(heap, (-tail, ticks))
            index += 1
        tail, ticks = heapq.heappop(heap)
        until = waiting[index][0] if index < len(waiting) else inf
        step = min(ticks, until - now)
        now += step
        if step < ticks:
            heapq.heappush(heap, (tail, ticks - step))
        else:
            end = max(end, now - tail)
    return end


# Memory.


def static_bytes(instance, stages):
    """Bytes on each device at any time."""
    static = [0] * len(instance.kinds)
    for stage in stages:
        for device in stage.devices:
            static[device] += instance.static(stage)
    return static


def fits(instance, stages):
    """Whether any schedule fits: the one that runs microbatch after microbatch needs the least.

    When a microbatch starts the backward of a stage, the earlier stages hold its bytes already, as
    none of their backwards has ended; that much is needed, and this schedule needs no more.
    Offloaded bytes are there during F and B alone, if the schedule waits for the host. Splitting a
    backward does not lower the need.
    """
    static = static_bytes(instance, stages)
    for microbatch in range(instance.microbatches):
        need = list(static)
        for stage in stages:
            held, extra = instance.held(stage), instance.recomputed(stage, whole=True)
            for device in stage.runners(microbatch):
                if need[device] + held + extra > instance.memory[device]:
                    return False
                need[device] += 0 if stage.offload else held
    return True


def short_devices(instance, stages):
    """Devices that would overflow if they held all microbatches at once."""
    need = static_bytes(instance, stages)
    for stage, microbatch in product(stages, range(instance.microbatches)):
        extra = instance.recomputed(stage, whole=False)
        for device in stage.runners(microbatch):
            need[device] += instance.held(stage) * (1 + stage.offload) + extra
    return {d for d, limit in enumerate(instance.memory) if need[d] > limit}


# The exact schedule.


def best_schedule(instance, stages, tasks, cutoff):
    """The shortest schedule below ``cutoff`` ticks: (ticks, start and finish by task), or None."""
    unit = gcd(*(task.ticks for task in tasks.values()), *_host_ticks(instance, stages))
    schedule = _Schedule(instance, stages, tasks, unit)
    if cutoff < inf:
        schedule.model.add(schedule.makespan * unit <= cutoff - 1)
    schedule.order_microbatches()
    schedule.limit_memory()
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(schedule.model)
    if status == cp_model.INFEASIBLE:
        return None
    if status != cp_model.OPTIMAL:
        raise RuntimeError(solver.status_name(status))
    times = {
        key: (solver.value(start) * unit, solver.value(schedule.ends[key]) * unit)
        for key, start in schedule.starts.items()
    }
    times = _join_whole(times, {key for key, flag in schedule.whole.items() if solver.value(flag)})
    return max(finish for _, finish in times.values()), times


def _host_ticks(instance, stages):
    return [
        to_ticks(instance.host_seconds(stage, stage.runners(microbatch)))
        for stage, microbatch in product(stages, range(instance.microbatches))
        if stage.offload
    ]


def _join_whole(times, whole):
    """Each I and W that the schedule treats as a whole becomes a B."""
    for index, microbatch in whole:
        start, _ = times.pop(("I", index, microbatch))
        _, finish = times.pop(("W", index, microbatch))
        times["B", index, microbatch] = start, finish
    return times


@dataclass(frozen=True, slots=True, eq=False)
class Hold:
    """Bytes on a device for some time; where both are tasks, from a start to an end."""

    size: int
    start: object
    end: object
    first: tuple | None
    last: tuple | None
    flag: object


class _Schedule:
    """The model of CP-SAT for fixed stages, in units of ``unit`` ticks."""

    def __init__(self, instance, stages, tasks, unit):
        self.instance, self.stages, self.tasks, self.unit = instance, stages, tasks, unit
        self.model = cp_model.CpModel()
        # One task after the other, each with its visits to the host, is a schedule that long.
        total = sum(task.ticks for task in tasks.values()) // unit
        self.horizon = total + 2 * sum(_host_ticks(instance, stages)) // unit
        self.starts, self.ends, self.exclusive = {}, {}, {}
        self.whole, self.visits, self.orders = {}, {}, {}
        self.makespan = self.variable("makespan")
        for key, task in tasks.items():
            self.add_task(key, task)
        for index, stage in enumerate(stages):
            self.add_choices(index, stage)
        for _resource, intervals in self.exclusive.items():
            self.model.add_no_overlap(intervals)
        self.model.minimize(self.makespan)

    def variable(self, name):
        return self.model.new_int_var(0, self.horizon, str(name))

    def add_task(self, key, task):
        size = task.ticks // self.unit
        self.starts[key] = start = self.variable(key)
        self.ends[key] = start + size
        interval = self.model.new_fixed_size_interval_var(start, size, str(key))
        for resource in task.resources:
            self.exclusive.setdefault(resource, []).append(interval)
        for before in task.after:
            self.model.add(start >= self.ends[before])
        self.model.add(self.makespan >= self.ends[key])

    def add_choices(self, index, stage):
        """What each microbatch of a stage may do: count as a whole B, visit the host."""
        for microbatch in range(self.instance.microbatches):
            if stage.offload:
                self.visit_host(index, stage, microbatch)
            elif stage.recompute == "layer" and ("I", index, microbatch) in self.tasks:
                self.choose_whole(index, microbatch)

    def choose_whole(self, index, microbatch):
        """Where layers are recomputed, I and W back to back may count as a whole B.

        Then what follows I waits for the end of W, as it would for a B.
        """
        first, weights = ("I", index, microbatch), ("W", index, microbatch)
        self.whole[index, microbatch] = flag = self.model.new_bool_var("whole")
        self.model.add(self.starts[weights] == self.ends[first]).only_enforce_if(flag)
        for key, task in self.tasks.items():
            if first in task.after and key != weights:
                self.model.add(self.starts[key] >= self.ends[weights]).only_enforce_if(flag)

    def visit_host(self, index, stage, microbatch):
        """Bytes are written right after F and read right before B; one at a time on a device.

        Where the read starts before the end of the write, both copies count.
        """
        runners = stage.runners(microbatch)
        size = to_ticks(self.instance.host_seconds(stage, runners)) // self.unit
        written = self.ends["F", index, microbatch]
        read = self.starts["B", index, microbatch] - size
        for name, start in (("write", written), ("read", read)):
            interval = self.model.new_fixed_size_interval_var(start, size, "")
            for device in runners:
                self.exclusive.setdefault((name, device), []).append(interval)
        self.visits[index, microbatch] = written + size, read

    def order_microbatches(self):
        """Microbatches with the same runners everywhere are alike: their first F in order."""
        last = {}
        for microbatch in range(self.instance.microbatches):
            runners = tuple(stage.runners(microbatch) for stage in self.stages)
            if runners in last:
                before = self.ends["F", 0, last[runners]]
                self.model.add(self.starts["F", 0, microbatch] >= before)
            last[runners] = microbatch

    # Memory over time.

    def limit_memory(self):
        instance = self.instance
        static = static_bytes(instance, self.stages)
        for device in short_devices(instance, self.stages):
            self.limit_device(device, instance.memory[device] - static[device])

    def limit_device(self, device, capacity):
        """At the start of every hold, the bytes of all holds then present fit."""
        holds = [
            hold
            for index, stage in enumerate(self.stages)
            for microbatch in range(self.instance.microbatches)
            if device in stage.runners(microbatch)
            for hold in self.holds(index, microbatch)
        ]
        unit = gcd(*(hold.size for hold in holds)) or 1
        capacity = int(capacity * BYTE + 0.5) // unit
        for event in holds:
            others = [hold for hold in holds if hold is not event]
            used = sum(self.present(hold, event) * (hold.size // unit) for hold in others)
            limit = self.model.add(used + event.size // unit <= capacity)
            if event.flag is not None:
                limit.only_enforce_if(event.flag)

    def present(self, hold, event):
        """A literal that is true where ``hold`` is present at the start of ``event``."""
        present = self.model.new_bool_var("")
        reasons = [present, self.later(hold, event), self.gone(hold, event)]
        if hold.flag is not None:
            reasons.append(~hold.flag)
        self.model.add_bool_or(reasons)
        return present

    def later(self, hold, event):
        """A literal that implies: ``hold`` begins after the start of ``event``."""
        if hold.first and event.first:
            return hold.first != event.first and self.before(event.first, hold.first)
        literal = self.model.new_bool_var("")
        self.model.add(hold.start >= event.start + 1).only_enforce_if(literal)
        return literal

    def gone(self, hold, event):
        """A literal that implies: ``hold`` ends by the start of ``event``."""
        if hold.last and event.first:
            return hold.last != event.first and self.before(hold.last, event.first)
        literal = self.model.new_bool_var("")
        self.model.add(hold.end <= event.start).only_enforce_if(literal)
        return literal

    def before(self, one, other):
        """The literal of the order of two tasks on one device."""
        if (other, one) in self.orders:
            return ~self.orders[other, one]
        if (one, other) not in self.orders:
            self.orders[one, other] = literal = self.model.new_bool_var("")
            self.model.add(self.ends[one] <= self.starts[other]).only_enforce_if(literal)
            self.model.add(self.ends[other] <= self.starts[one]).only_enforce_if(~literal)
        return self.orders[one, other]

    def holds(self, index, microbatch):
        """What a microbatch holds on each of its devices in a stage."""
        stage, instance = self.stages[index], self.instance
        forward = "F", index, microbatch
        first, last = self.backward(index, microbatch)
        if stage.offload:
            written, read = self.visits[index, microbatch]
            yield self.hold(instance.held(stage), first=forward, end=written)
            yield self.hold(instance.held(stage), start=read, last=last)
            return
        yield self.hold(instance.held(stage), first=forward, last=last)
        if (index, microbatch) in self.whole:
            flag = self.whole[index, microbatch]
            yield self.hold(instance.recomputed(stage, True), first=first, last=last, flag=flag)
            yield self.hold(instance.recomputed(stage, False), first=first, last=last, flag=~flag)
        elif stage.recompute != "none":
            extra = instance.recomputed(stage, first[0] == "B")
            yield self.hold(extra, first=first, last=last)

    def hold(self, size, first=None, last=None, start=None, end=None, flag=None):
        """A hold from the start of task ``first`` to the end of task ``last``, or as stated."""
        start = self.starts[first] if first else start
        end = self.ends[last] if last else end
        return Hold(round(size * BYTE), start, end, first, last, flag)

    def backward(self, index, microbatch):
        """The first and last task of a backward."""
        if ("B", index, microbatch) in self.tasks:
            return ("B", index, microbatch), ("B", index, microbatch)
        return ("I", index, microbatch), ("W", index, microbatch)
