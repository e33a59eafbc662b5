"""A plain checker of finite plan documents: every rule of the language by nested loops.

Independent of the product, and of the search for the best plan. Weights: ``flush`` and
``double-buffer`` (one more copy of the parameters).
"""

import re
from collections import Counter
from itertools import combinations, pairwise
from math import inf

from language_prices import Instance, Stage

TOLERANCE = 1e-9  # of the cost, for times; of the limit, for memory
ACTION = re.compile(r"(\d+)(SEND_F|SEND_B|REDUCE_GRAD|UPDATE|F|B|I|W)(\d*)$")


def evaluate(model, cluster, microbatches, plan, memory_limit=None):
    """The cost of a plan document, and the rules that it breaks (one line each)."""
    checker = _Checker(model, cluster, microbatches, plan, memory_limit)
    checker.broken += _stage_rules(checker.instance, checker.stages)
    if not checker.broken:
        checker.run()
    return checker.cost, checker.broken


def _read_stages(plan, names):
    return [
        Stage(
            *stage["layers"],
            tuple(names.index(name) for name in stage["devices"]),
            stage["replication"],
            stage["recompute"],
            stage["offload"],
        )
        for stage in plan["stages"]
    ]


def _stage_rules(instance, stages):
    broken = []
    ends = [0, *(stage.stop for stage in stages)]
    starts = [*(stage.start for stage in stages), len(instance.layers)]
    if ends != starts or any(stage.start >= stage.stop for stage in stages):
        broken.append("the stages do not tile the layers")
    for index, stage in enumerate(stages):
        if len(set(stage.devices)) < len(stage.devices):
            broken.append(f"stage {index}: a device appears twice")
        if not instance.enough_samples(stage):
            broken.append(f"stage {index}: too few samples in a share")
        if stage.offload and stage.recompute != "none":
            broken.append(f"stage {index}: recomputes and offloads")
        if stage.offload and not all(instance.host[device] for device in stage.devices):
            broken.append(f"stage {index}: offloads without a host link")
    return broken


def peak_bytes(model, cluster, microbatches, plan):
    """The most bytes that a plan that keeps the rules uses on each device."""
    checker = _Checker(model, cluster, microbatches, plan, None)
    checker.read_actions()
    return [max(used for _, used in checker.memory(d)) for d in range(len(cluster["devices"]))]


class _Checker:
    """``times``: start and finish by (action, stage, microbatch or None)."""

    def __init__(self, model, cluster, microbatches, plan, memory_limit):
        self.instance = Instance(model, cluster, microbatches, memory_limit)
        self.microbatches = range(microbatches)
        self.stages = _read_stages(plan, self.instance.names)
        self.extra_copies = {"flush": 0, "double-buffer": 1}[plan["weights"]]
        self.broken, self.times = [], {}
        entries = plan["schedule"]["actions"]
        self.between_losses = plan["schedule"].get("begins") == "backward"
        self.cost = max(entry["finish_seconds"] for entry in entries)
        self.slack = TOLERANCE * self.cost
        self.entries = entries

    def run(self):
        self.read_actions()
        if not self.broken:
            self.check_durations()
            self.check_dependencies()
            self.check_overlaps()
            self.check_memory()

    # Which actions there are, and where.

    def read_actions(self):
        """Each action appears once on each of its devices, at the same time, and nothing else."""
        seen = Counter()
        for entry in self.entries:
            stage, action, microbatch = ACTION.match(entry["action"]).groups()
            key = action, int(stage), int(microbatch) if microbatch else None
            seen[key, self.place(entry)] += 1
            times = entry["start_seconds"], entry["finish_seconds"]
            first = self.times.setdefault(key, times)
            if max(abs(a - b) for a, b in zip(first, times, strict=True)) > self.slack:
                self.broken.append(f"{entry['action']}: not at one time on all its devices")
            if times[0] < -self.slack:
                self.broken.append(f"{entry['action']}: starts before 0")
        expected = Counter(self.expected())
        for key, place in (seen - expected).keys() | (expected - seen).keys():
            problem = "missing" if seen[key, place] < expected[key, place] else "too many"
            self.broken.append(f"{problem}: {key} on {place}")

    def place(self, entry):
        """A device, or the ends of a transfer."""
        names = self.instance.names
        if "sources" not in entry:
            return names.index(entry["device"])
        ends = entry["sources"], entry["targets"]
        return tuple(tuple(sorted(names.index(name) for name in end)) for end in ends)

    def expected(self):
        """Every action with each of its places."""
        for index, stage in enumerate(self.stages):
            for microbatch in self.microbatches:
                yield from self.expected_of_microbatch(index, microbatch)
            group = tuple(sorted(stage.devices))
            if len(group) > 1:
                yield ("REDUCE_GRAD", index, None), (group, group)
            if self.instance.update_seconds(stage) > 0:
                for device in stage.devices:
                    yield ("UPDATE", index, None), device

    def expected_of_microbatch(self, index, microbatch):
        runners = self.stages[index].runners(microbatch)
        whole = ("B", index, microbatch) in self.times
        for device in runners:
            for action in ("F", "B") if whole else ("F", "I", "W"):
                yield (action, index, microbatch), device
        for neighbour, action in ((index + 1, "SEND_F"), (index - 1, "SEND_B")):
            if self.transferred(index, neighbour, microbatch):
                others = self.stages[neighbour].runners(microbatch)
                ends = tuple(sorted(runners)), tuple(sorted(others))
                yield (action, index, microbatch), ends

    def transferred(self, index, neighbour, microbatch):
        """Whether there is a transfer from a stage to its neighbour."""
        if not 0 <= neighbour < len(self.stages):
            return False
        own = self.stages[index].runners(microbatch)
        return own != self.stages[neighbour].runners(microbatch)

    # How long they take.

    def check_durations(self):
        for key, (start, finish) in self.times.items():
            action, index, microbatch = key
            stage = self.stages[index]
            if action in ("I", "W") and not self.instance.knows_parts(stage):
                self.broken.append(f"{key}: the backward has no known parts")
            elif action in ("I", "W") and stage.offload:
                self.broken.append(f"{key}: offloading needs a whole backward")
            elif abs(finish - start - self.seconds(action, index, microbatch)) > self.slack:
                self.broken.append(f"{key}: wrong duration")

    def seconds(self, action, index, microbatch):
        instance, stage = self.instance, self.stages[index]
        if action == "REDUCE_GRAD":
            return instance.all_reduce_seconds(stage)
        if action == "UPDATE":
            return instance.update_seconds(stage)
        runners = stage.runners(microbatch)
        if action == "SEND_F":
            others = self.stages[index + 1].runners(microbatch)
            return instance.transfer_seconds(stage.stop - 1, runners, others)
        if action == "SEND_B":
            others = self.stages[index - 1].runners(microbatch)
            return instance.transfer_seconds(stage.start - 1, runners, others)
        own = instance.own_seconds(self.stages, index, microbatch, action)
        return instance.seconds(stage, runners, action) + own

    # What comes after what.

    def check_dependencies(self):
        for before, after in self.dependencies():
            if self.times[before][1] > self.times[after][0] + self.slack:
                self.broken.append(f"{after} starts before {before} ends")

    def dependencies(self):
        last = len(self.stages) - 1
        for microbatch in self.microbatches:
            for index in range(last):
                yield from self.along("F", index, "SEND_F", index + 1, microbatch)
                yield from self.along("B", index + 1, "SEND_B", index, microbatch)
            for index in range(last + 1):
                first = self.first_of_backward(index, microbatch)
                if not self.between_losses:
                    yield ("F", index, microbatch), first
                if first[0] == "I":
                    yield first, ("W", index, microbatch)
        for index in range(last + 1):
            yield from self.at_the_end(index)

    def first_of_backward(self, index, microbatch):
        whole = ("B", index, microbatch)
        return whole if whole in self.times else ("I", index, microbatch)

    def along(self, action, front, transfer, behind, microbatch):
        """An action of a stage, the transfer if there is one, and the next stage's action."""
        keys = [(action, front, microbatch), (action, behind, microbatch)]
        if action == "B":
            keys = [self.first_of_backward(index, microbatch) for index in (front, behind)]
        if (transfer, front, microbatch) in self.times:
            keys.insert(1, (transfer, front, microbatch))
        yield from pairwise(keys)

    def at_the_end(self, index):
        """Backwards, then the all-reduce, then the optimizer's step."""
        reduce, update = ("REDUCE_GRAD", index, None), ("UPDATE", index, None)
        for key in self.times:
            if key[1] == index and key[0] in ("B", "W"):
                for after in (reduce, update):
                    if after in self.times:
                        yield key, after
        if reduce in self.times and update in self.times:
            yield reduce, update
        if self.between_losses:
            yield from self.before_the_next_forwards(index)

    def before_the_next_forwards(self, index):
        """All that changes the weights of a stage, then its forwards of the next iteration."""
        changes = [key for key in self.times if key[1] == index and "SEND" not in key[0]]
        for key in changes:
            for microbatch in self.microbatches if key[0] != "F" else ():
                yield key, ("F", index, microbatch)

    # What must not run at one time.

    def check_overlaps(self):
        by_resource = {}
        for key, times in self.times.items():
            for resource in self.resources(*key):
                by_resource.setdefault(resource, []).append((key, *times))
        for resource, start, finish, key in self.host_visits():
            by_resource.setdefault(resource, []).append((key, start, finish))
        for resource, users in by_resource.items():
            for (one, start, finish), (other, begin, end) in combinations(users, 2):
                if min(finish, end) - max(start, begin) > self.slack:
                    self.broken.append(f"{one} and {other} overlap on {resource}")

    def resources(self, action, index, microbatch):
        stage = self.stages[index]
        if action == "REDUCE_GRAD":
            return [("network", device) for device in stage.devices]
        if action == "UPDATE":
            return [("device", device) for device in stage.devices]
        if action in ("SEND_F", "SEND_B"):
            front = index if action == "SEND_F" else index - 1
            ends = (self.stages[front + side].runners(microbatch) for side in (0, 1))
            return [("channel", front, *ends)]
        return [("device", device) for device in stage.runners(microbatch)]

    def host_visits(self):
        for index, stage in enumerate(self.stages):
            for microbatch in self.microbatches if stage.offload else ():
                if ("B", index, microbatch) not in self.times:
                    continue  # already reported
                runners = stage.runners(microbatch)
                seconds = self.instance.host_seconds(stage, runners)
                written = self.times["F", index, microbatch][1]
                read = self.times["B", index, microbatch][0]
                for device in runners:
                    yield ("write", device), written, written + seconds, (index, microbatch)
                    yield ("read", device), read - seconds, read, (index, microbatch)

    # Memory.

    def check_memory(self):
        for device, limit in enumerate(self.instance.memory):
            for now, used in self.memory(device):
                if used > limit * (1 + TOLERANCE):
                    self.broken.append(f"device {device}: {used} bytes at {now}, limit {limit}")

    def memory(self, device):
        """The bytes on a device at every instant at which some of them appear."""
        holds = list(self.holds(device))
        static = sum(
            self.instance.static(stage, self.extra_copies)
            for stage in self.stages
            if device in stage.devices
        )
        waits = list(self.waits(device)) if self.between_losses else []
        instants = {0.0, *(start for start, _, _ in holds)}
        for now in instants | {start for _, spans in waits for start, _ in spans}:
            used = static + sum(
                size
                for start, end, size in holds
                if start <= now + self.slack and end > now + self.slack
            )
            for stage, spans in waits:
                waiting = sum(
                    start <= now + self.slack and end > now + self.slack for start, end in spans
                )
                used += self.instance.waiting(stage, waiting)
            yield now, used

    def waits(self, device):
        """Per stage on the device the times of every microbatch from its I to its W."""
        for index, stage in enumerate(self.stages):
            yield (
                stage,
                [
                    (self.times["I", index, m][0], self.times["W", index, m][1])
                    for m in self.microbatches
                    if device in stage.runners(m) and ("I", index, m) in self.times
                ],
            )

    def holds(self, device):
        """(start, end, bytes) of every microbatch on the device."""
        for index, stage in enumerate(self.stages):
            for microbatch in self.microbatches:
                if device in stage.runners(microbatch):
                    yield from self.holds_of_microbatch(index, stage, microbatch)

    def holds_of_microbatch(self, index, stage, microbatch):
        start, computed = self.times["F", index, microbatch]
        first = self.first_of_backward(index, microbatch)
        last = first if first[0] == "B" else ("W", index, microbatch)
        begin, end = self.times[first][0], self.times[last][1]
        held = self.instance.held(stage)
        if stage.offload:
            seconds = self.instance.host_seconds(stage, stage.runners(microbatch))
            yield start, computed + seconds, held
            start = begin - seconds
        if self.between_losses:
            yield 0.0, end, held
            end = inf
        yield start, end, held
        if stage.recompute != "none":
            yield begin, self.times[last][1], self.instance.recomputed(stage, first[0] == "B")
