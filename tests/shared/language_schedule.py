"""The exact schedule of fixed stages: its tasks, bounds, memory over time, and CP-SAT."""

import heapq
from dataclasses import dataclass, replace
from itertools import product
from math import gcd, inf

from ortools.sat.python import cp_model

TICK = 1e-9  # seconds
BYTE = 1000  # memory is counted in thousandths of a byte


# Tasks of a structure.


@dataclass(frozen=True, slots=True)
class Task:
    """An action of a schedule: its ticks, what it occupies, and what comes before it.

    A W takes ``more`` ticks unless it and its I count as a whole B: of a stage on unlike devices,
    one may be the slowest at I and another at W, and a B ends with the slowest sum.
    """

    ticks: int
    resources: tuple
    after: tuple
    more: int = 0


def to_ticks(seconds):
    return round(seconds / TICK)


def parts(instance, stage, allowed):
    """Whether backwards of the stage are split into I and W.

    Where it is allowed, I then W back to back does all that a whole B does, with the same memory,
    and lets the gradient leave earlier: no whole B is needed. Not so for the recomputation of
    layers, where a whole B needs less memory, and on unlike devices, where it may take less time:
    there the schedule chooses.
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
    for index in range(len(stages)):
        if index:
            before = _transfer(instance, stages, index - 1, microbatch, tasks, "SEND_F", before)
        tasks["F", index, microbatch] = _compute(instance, stages, index, microbatch, "F", before)
        before = (("F", index, microbatch),)


def _backward(instance, stages, microbatch, tasks, split_backward):
    last = len(stages) - 1
    before = (("F", last, microbatch),)
    for index in range(last, -1, -1):
        stage = stages[index]
        if index < last:
            before = _transfer(instance, stages, index, microbatch, tasks, "SEND_B", before)
        before = (*before, ("F", index, microbatch))
        place = instance, stages, index, microbatch
        action = "I" if parts(instance, stage, split_backward) else "B"
        first = action, index, microbatch
        tasks[first] = _compute(*place, action, before)
        if action == "I":
            alone = _compute(*place, "W", (first,))
            whole = _compute(*place, "B", ())
            ticks = min(alone.ticks, whole.ticks - tasks[first].ticks)
            weights = replace(alone, ticks=ticks, more=alone.ticks - ticks)
            tasks["W", index, microbatch] = weights
        before = (first,)


def _compute(instance, stages, index, microbatch, action, after):
    runners = stages[index].runners(microbatch)
    own = instance.own_seconds(stages, index, microbatch, action)
    ticks = to_ticks(instance.seconds(stages[index], runners, action) + own)
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
    sizes = [size for task in tasks.values() for size in (task.ticks, task.more)]
    unit = gcd(*sizes, *_host_ticks(instance, stages))
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
        total = sum(task.ticks + task.more for task in tasks.values()) // unit
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
        if task.more:
            self.whole[key[1:]] = whole = self.model.new_bool_var("whole")
            size += task.more // self.unit * ~whole
            self.ends[key] = self.variable(key)
        interval = self.model.new_interval_var(start, size, self.ends[key], str(key))
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
            elif ("I", index, microbatch) in self.tasks:
                if stage.recompute == "layer":
                    self.whole.setdefault((index, microbatch), self.model.new_bool_var("whole"))
                if (index, microbatch) in self.whole:
                    self.choose_whole(index, microbatch)

    def choose_whole(self, index, microbatch):
        """I and W back to back may count as a whole B.

        Then what follows I waits for the end of W, as it would for a B.
        """
        first, weights = ("I", index, microbatch), ("W", index, microbatch)
        flag = self.whole[index, microbatch]
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
        if stage.recompute != "none" and (index, microbatch) in self.whole:
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
