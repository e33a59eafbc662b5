"""Times, bytes and schedules of plans with tensor degrees, in plain arithmetic.

Taken for granted are the documents (chain, cluster, stages) and what the decisions say of their
meaning (0007, 0018, 0031). No cost and no duration comes from the package.
"""

from collections.abc import Callable, Sequence
from itertools import product

from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.graphs.models.chain import LayerCost

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
SEND_F, SEND_B = ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD
REDUCE, UPDATE = ActionKind.REDUCE, ActionKind.UPDATE

Links = dict[tuple[str, str], tuple[float, float]]
"""Bandwidth and latency from a device to another."""


class TensorOracle:
    """What a plan of ``stages`` costs; whole weights' updates at the end (``flush``)."""

    def __init__(
        self, problem: PipelineProblem, stages: Sequence[Stage], links: Links, split: Sequence[bool]
    ) -> None:
        self.chain, self.stages, self.links = problem.chain, stages, links
        self.microbatches = range(problem.microbatches)
        self.split = split
        self.kinds = {one.name: one.kind for one in problem.cluster.devices}
        size = self.chain.microbatch_size
        # The whole samples of the largest share, as a part of the microbatch.
        self.part = [-(-size // self.sharing(s)) / size for s in range(len(stages))]

    def groups(self, s: int) -> list[tuple[str, ...]]:
        """The devices of stage ``s``, as many together as its degree."""
        devices, t = self.stages[s].devices, self.stages[s].tensor
        return [devices[i : i + t] for i in range(0, len(devices), t)]

    def sharing(self, s: int) -> int:
        """How many groups share a microbatch."""
        return 1 if self.stages[s].replication == "round-robin" else len(self.groups(s))

    def at_work(self, s: int, m: int | None) -> list[tuple[str, ...]]:
        """The groups that compute microbatch ``m``."""
        groups = self.groups(s)
        if m is None or self.stages[s].replication == "split":
            return groups
        return [groups[m % len(groups)]]

    def members(self, s: int, m: int | None) -> list[str]:
        """The devices that compute microbatch ``m``."""
        return [name for group in self.at_work(s, m) for name in group]

    def of(self, s: int, kind: str) -> list[LayerCost]:
        """The costs of the layers of stage ``s`` on devices of ``kind``."""
        start, stop = self.stages[s].layers
        return [
            next(
                one
                for one in layer.costs
                if (one.tensor or 1) == self.stages[s].tensor and one.device_kind in (kind, None)
            )
            for layer in self.chain.layers[start:stop]
        ]

    def slowest(self, s: int, m: int | None, seconds: Callable[[LayerCost], float]) -> float:
        """Of the groups at work, the time of the one on the slowest kind of device."""
        return max(
            sum(seconds(one) for one in self.of(s, self.kinds[group[0]]))
            for group in self.at_work(s, m)
        )

    def seconds(self, action: Action) -> float:
        """How long the action takes."""
        s, m, kind = action.stage, action.microbatch, action.kind
        if kind is REDUCE:
            return self.reduce_seconds(s)
        if kind is UPDATE:
            return self.slowest(s, None, lambda one: one.update_seconds or 0.0)
        if kind in (SEND_F, SEND_B):
            return self.send_seconds(s, s + (1 if kind is SEND_F else -1), m)
        again = self.stages[s].recompute != "none" and kind in (B, I)

        def computing(one: LayerCost) -> float:
            assert one.input_gradient_seconds is not None
            assert one.weight_gradient_seconds is not None
            forward, of_input = one.forward_seconds, one.input_gradient_seconds
            return {
                F: forward,
                B: one.backward_seconds or of_input + one.weight_gradient_seconds,
                I: of_input,
                W: one.weight_gradient_seconds,
            }[kind]

        repeated = self.slowest(s, m, lambda one: one.forward_seconds) if again else 0.0
        return self.part[s] * (self.slowest(s, m, computing) + repeated)

    def sent_from(self, s: int, to: int, m: int | None) -> list[tuple[str, str]]:
        """Who sends to whom: position i gets what position i modulo the sender's degree has."""
        return [
            (one[i % len(one)], other[i])
            for one, other in product(self.at_work(s, m), self.at_work(to, m))
            for i in range(len(other))
        ]

    def send_seconds(self, s: int, to: int, m: int | None) -> float:
        """Every group sends its share of every receiving group's to each of its devices."""
        ends = [self.links[pair] for pair in self.sent_from(s, to, m) if pair[0] != pair[1]]
        size, volume = self.chain.microbatch_size, self.boundary(min(s, to))
        shares = len(self.at_work(s, m)) * len(self.at_work(to, m))
        part = volume * -(-size // shares) / size
        return max((part / bandwidth + latency for bandwidth, latency in ends), default=0.0)

    def boundary(self, s: int) -> float:
        """Bytes of a microbatch after stage ``s``, on one device."""
        return self.chain.layers[self.stages[s].layers[1] - 1].costs[0].output_bytes

    def shard(self, s: int) -> float:
        """Bytes of the weights that a device of stage ``s`` has."""
        layers = self.chain.layers[slice(*self.stages[s].layers)]
        if self.stages[s].tensor == 1:
            return sum(one.parameter_bytes for one in layers)
        return sum(one.shard_parameter_bytes or 0.0 for one in self.of(s, self.kinds_of(s)[0]))

    def kinds_of(self, s: int) -> list[str]:
        """The kinds of the devices of stage ``s``."""
        return sorted({self.kinds[name] for name in self.stages[s].devices})

    def reduce_seconds(self, s: int) -> float:
        """A ring for every position, all at once; the slowest counts."""
        rings = list(zip(*self.groups(s), strict=True))
        return max(self.ring_seconds(ring, self.shard(s)) for ring in rings)

    def ring_seconds(self, ring: Sequence[str], volume: float) -> float:
        """2(k-1) steps that move 1/k of the bytes over the slowest link."""
        k = len(ring)
        ends = [self.links[one, other] for one in ring for other in ring if one != other]
        if not ends:
            return 0.0
        slowest, latest = min(b for b, _ in ends), max(late for _, late in ends)
        return 2 * (k - 1) * (volume / k / slowest + latest)

    def carried(self, action: Action) -> float | None:
        """Bytes of an exchange: every receiver's copy, or every position's shard."""
        s = action.stage
        if action.kind is REDUCE:
            return self.shard(s) * self.stages[s].tensor
        if action.kind in (SEND_F, SEND_B):
            to = s + (1 if action.kind is SEND_F else -1)
            return self.boundary(min(s, to)) * self.stages[to].tensor
        return None

    # --- Memory -----------------------------------------------------------------------------------

    def always(self, s: int) -> float:
        """Weights, gradients and optimizer's state of a shard; two buffers at each boundary."""
        states = self.shard(s) * (2 + self.chain.optimizer_bytes_per_parameter_byte)
        inner = [b for b in (s - 1, s) if 0 <= b < len(self.stages) - 1]
        return states + sum(2 * self.boundary(b) * self.part[s] for b in inner)

    def saved(self, s: int) -> list[float]:
        """What a device keeps for every layer, of its share."""
        every = zip(*(self.of(s, kind) for kind in sorted(set(self.kinds.values()))), strict=True)
        return [max(one.saved_bytes for one in costs) * self.part[s] for costs in every]

    def kept(self, s: int) -> tuple[float, float]:
        """Bytes from the start of the forward on, and in addition from the backward's.

        Both until it ends: in two parts, what one layer's W needs is there beside all others'.
        """
        start, stop = self.stages[s].layers
        inputs = [
            self.chain.layers[i - 1].costs[0].output_bytes * self.part[s] if i else 0.0
            for i in range(start, stop)
        ]
        saved = self.saved(s)
        return {
            "none": (sum(saved), 0.0),
            "full": (inputs[0], sum(saved)),
            "layer": (sum(inputs), sum(saved) if self.split[s] else max(saved)),
        }[self.stages[s].recompute]

    def peak(self, name: str, times: dict[Action, tuple[float, float]]) -> float:
        """The most bytes that device ``name`` holds at a time."""
        held = [0.0]
        for now, _ in times.values():
            total = 0.0
            for s, m in product(range(len(self.stages)), self.microbatches):
                if name in self.members(s, m):
                    first, last = (times[Action(s, self.backward(s)[i], m)] for i in (0, -1))
                    kept, again = self.kept(s)
                    total += kept * (times[Action(s, F, m)][0] <= now < last[1])
                    total += again * (first[0] <= now < last[1])
            held.append(total)
        return max(held) + sum(
            self.always(s) for s, one in enumerate(self.stages) if name in one.devices
        )

    # --- Schedules --------------------------------------------------------------------------------

    def crosses(self, s: int, m: int) -> bool:
        """Whether stage ``s`` sends microbatch ``m`` on: not if the same groups go on with it."""
        return self.at_work(s, m) != self.at_work(s + 1, m)

    def backward(self, s: int) -> tuple[ActionKind, ...]:
        return (I, W) if self.split[s] else (B,)

    def actions(self) -> dict[Action, list[Action]]:
        """Every action, with those that it waits for."""
        found: dict[Action, list[Action]] = {}
        last = len(self.stages) - 1
        for m in self.microbatches:
            for s in range(last + 1):
                found[Action(s, F, m)] = [self.source(s, m)] if s else []
                if s < last and self.crosses(s, m):
                    found[Action(s, SEND_F, m)] = [Action(s, F, m)]
                    found[Action(s + 1, SEND_B, m)] = [Action(s + 1, self.backward(s + 1)[0], m)]
                first, *rest = self.backward(s)
                found[Action(s, first, m)] = [self.gradient(s, m)]
                for kind in rest:
                    found[Action(s, kind, m)] = [Action(s, first, m)]
        for s in range(last + 1):
            self.add_end(s, found)
        return found

    def source(self, s: int, m: int) -> Action:
        return Action(s - 1, SEND_F if self.crosses(s - 1, m) else F, m)

    def gradient(self, s: int, m: int) -> Action:
        if s == len(self.stages) - 1:
            return Action(s, F, m)
        kind = SEND_B if self.crosses(s, m) else self.backward(s + 1)[0]
        return Action(s + 1, kind, m)

    def add_end(self, s: int, found: dict[Action, list[Action]]) -> None:
        """The all-reduce of several groups, and a step that takes time."""
        ends = [Action(s, self.backward(s)[-1], m) for m in self.microbatches]
        if len(self.groups(s)) > 1:
            found[Action(s, REDUCE)] = ends
            ends = [Action(s, REDUCE)]
        if self.seconds(Action(s, UPDATE)) > 0:
            found[Action(s, UPDATE)] = ends

    def resources(self, action: Action) -> list[object]:
        """What an action has for itself while it lasts."""
        s, m = action.stage, action.microbatch
        if action.kind is REDUCE:
            return [("all-reduce", name) for name in self.stages[s].devices]
        if action.kind in (SEND_F, SEND_B):
            left = s if action.kind is SEND_F else s - 1
            return [(left, tuple(self.members(left, m)), tuple(self.members(left + 1, m)))]
        return list(self.members(s, m))

    def schedule(
        self, choose: Callable[[list[Action]], Action]
    ) -> dict[Action, tuple[float, float]]:
        """Start and end of every action, each as early as those chosen before it allow."""
        needs = self.actions()
        times: dict[Action, tuple[float, float]] = {}
        free: dict[object, float] = {}
        while waiting := [a for a in needs if a not in times and all(n in times for n in needs[a])]:
            action = choose(waiting)
            taken = self.resources(action)
            start = max(
                [0.0, *(times[need][1] for need in needs[action]), *(free.get(r, 0) for r in taken)]
            )
            times[action] = start, start + self.seconds(action)
            free |= dict.fromkeys(taken, times[action][1])
        return times
