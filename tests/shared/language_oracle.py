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
from math import inf

from language_check import evaluate
from language_prices import Instance, Stage
from language_schedule import (
    TICK,
    best_schedule,
    build_tasks,
    fits,
    machine_bound,
    parts,
    short_devices,
    to_ticks,
)

__all__ = ["Language", "Search", "best", "evaluate", "least_memory_fits"]


@dataclass(frozen=True, slots=True)
class Language:
    """What the plans of a class may do; the default is every finite plan.

    With no ``replications`` every stage has one device. With ``groups`` two stages have the same
    devices or none in common.
    """

    device_sharing: bool = True
    replications: frozenset = frozenset({"split", "round-robin"})
    split_backward: bool = True
    recompute: frozenset = frozenset({"none", "full", "layer"})
    offload: bool = True
    groups: bool = False


def best(model, cluster, microbatches, language=None, memory_limit=None, below=inf):
    """The fastest plan of the language: (seconds, plan document), or None if nothing fits.

    Also None if no plan takes less than ``below`` seconds.
    """
    search = Search(Instance(model, cluster, microbatches, memory_limit), language or Language())
    search.ticks = below if below == inf else to_ticks(below)
    search.run()
    if search.schedule is None:
        return None
    return search.ticks * TICK, document(search.instance, search.stages, search.schedule)


def least_memory_fits(model, cluster, microbatches, language=None, memory_limit=None):
    """Whether any plan of the language fits into memory."""
    search = Search(Instance(model, cluster, microbatches, memory_limit), language or Language())
    return any(
        fits(search.instance, variant)
        for stages in search.structures()
        for variant in search.variants(stages)
    )


def document(instance, stages, schedule):
    """The plan document of a schedule: start and finish in ticks by action."""
    names = instance.names
    described = [
        {
            "layers": [stage.start, stage.stop],
            "devices": [names[device] for device in stage.devices],
            "replication": stage.replication,
            "recompute": stage.recompute,
            "offload": stage.offload,
        }
        for stage in stages
    ]
    actions = [
        entry
        for key, (start, finish) in sorted(schedule.items(), key=lambda item: item[1])
        for entry in _entries(instance, stages, key, start, finish)
    ]
    return {
        "planner": "oracle",
        "model": "m",
        "cluster": "c",
        "microbatches": instance.microbatches,
        "stages": described,
        "schedule": {"kind": "finite", "actions": actions},
        "weights": "flush",
        **({"message_seconds": instance.message} if instance.message else {}),
        "format": "stagewright-plan",
        "version": 1,
        "kind": "pipeline",
    }


def _entries(instance, stages, key, start, finish):
    """The lines of one action: one per device, or one for a transfer or all-reduce."""
    action, index, microbatch = key
    text = f"{index}{action}{'' if microbatch is None else microbatch}"
    times = {"action": text, "start_seconds": start * TICK, "finish_seconds": finish * TICK}
    names = instance.names
    if action in ("SEND_F", "SEND_B"):
        other = index + 1 if action == "SEND_F" else index - 1
        ends = {
            "sources": [names[device] for device in stages[index].runners(microbatch)],
            "targets": [names[device] for device in stages[other].runners(microbatch)],
            "bytes": instance.boundary_bytes(stages[min(index, other)].stop - 1),
        }
        return [{"device": ends["sources"][0], **times, **ends}]
    stage = stages[index]
    if action == "REDUCE_GRAD":
        group = [names[device] for device in stage.devices]
        ends = {"sources": group, "targets": group}
        size = instance.parameter_bytes(stage)
        return [{"device": group[0], **times, **ends, "bytes": size}]
    runners = stage.devices if action == "UPDATE" else stage.runners(microbatch)
    return [{"device": names[device], **times} for device in runners]


# Structures.


class Search:
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
            if not self.may_join(stage, used):
                continue
            further = list(static)
            for device in stage.devices:
                further[device] += instance.static(stage)
            if all(have <= limit for have, limit in zip(further, instance.memory, strict=True)):
                for rest in self.choices(options[1:], (*used, stage.devices), further):
                    if not rest or linked(instance, stage, rest[0]):
                        yield (stage, *rest)

    def may_join(self, stage, used):
        """Whether a stage may have its devices beside the stages on ``used`` ones."""
        common = [set(one) for one in used if set(one) & set(stage.devices)]
        if self.language.groups:
            return all(one == set(stage.devices) for one in common)
        return self.language.device_sharing or not common

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
        forward, whole = (to_ticks(instance.seconds(stage, runners, action)) for action in "FB")
        if not parts(instance, stage, self.language.split_backward):
            return forward + whole, forward + whole
        first, second = (to_ticks(instance.seconds(stage, runners, action)) for action in "IW")
        return forward + min(whole, first + second), forward + first


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
