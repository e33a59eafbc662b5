"""The time of a layout from its definitions: ranks by number, groups as lists of ranks.

Of the package only a layer's operators on one rank are taken, which have tests of their own.
"""

import math
from collections import Counter
from itertools import pairwise, product

import numpy as np
from pipeline_oracle import by_events, order_of

from stagewright.formulations.parallelism.schedules import FORMS
from stagewright.graphs.models.modules import CORE
from stagewright.graphs.models.shards import shares_of

IN_V = ("zbv", "dualpipe", "dualpipev")
WITH_WEIGHTS = ("matmul", "convolution")


class Plain:
    """``seconds`` and what they are made of."""

    def __init__(self, problem, layout):
        self.problem, self.layout = problem, layout
        self.fabric, self.precision = problem.fabric, problem.precision
        split, blocks = layout.split, layout.blocks_of_stages(problem.architecture.layers)
        of = shares_of(
            problem.architecture, problem.sequence, split, problem.attention,
            by_operator=problem.memory.by_operator,
        )  # fmt: skip
        ends = np.cumsum((0, *blocks))
        alike = [layout.offload_blocks or layout.recompute_blocks or len(of.blocks)]
        again = layout.recomputed_by_stage or alike * layout.stages
        # (layer, whether it is computed again, or offloaded) of every stage
        self.stages = [
            [(of.kinds[of.blocks[i]], i - a < most) for i in range(a, b)]
            for (a, b), most in zip(pairwise(ends), again, strict=True)
        ]
        self.stages[0] = [(of.embedding, False), *self.stages[0]]
        self.stages[-1] = [*self.stages[-1], (of.head, False)]
        self.put_off, self.in_v = layout.schedule != "1f1b", layout.schedule in IN_V
        self.is_double = layout.schedule == "dualpipe"
        self.microbatches = problem.batch // (layout.data * layout.microbatch)
        self.hop = self.hop_seconds(of)
        self.order = order_of(layout.schedule, layout.pipeline, layout.chunks, self.microbatches)
        every = [self.stage_seconds(stage) for stage in self.stages]
        self.forward, self.backward, self.weight = np.array(every).T
        self.finish = by_events(
            self.order, np.array(self.order.paths[0]), self.forward, self.backward, self.weight,
            self.paired(), self.hop, FORMS[layout.schedule],
        )  # fmt: skip
        self.finish = np.maximum(self.finish, self.sending_seconds(of))
        self.after = [self.after_pipeline(rank, of.head) for rank in range(layout.pipeline)]
        self.update = max(self.update_seconds(rank) for rank in range(layout.pipeline))
        self.seconds = float((self.finish + self.after).max()) + self.update

    def paired(self):
        """Per rank of one copy: a forward with the other stage's backward, exchanges beside."""
        if not self.in_v:
            return None
        hidden = [sum(self.routed(*one) for one in stage) for stage in self.stages]
        rows = []
        for first in range(len(self.stages) // 2):
            last, moved = len(self.stages) - 1 - first, hidden[first] + hidden[-1 - first]
            pairs = ((first, last), (last, first))
            work = [self.forward[a] + self.backward[b] - moved for a, b in pairs]
            rows.append([self.beside(one, moved) for one in work])
        return np.array(rows)

    # Ranks and groups

    def rank(self, tensor, context, data, stage):
        """The rank's number: tensor ranks are nearest, then context ranks, then by placement."""
        of = self.layout
        if of.placement == "data-inside":
            outer = data + of.data * stage
        else:
            outer = stage + of.pipeline * data
        return tensor + of.tensor * (context + of.context * outer)

    def groups(self, *inside):
        """The groups of ranks that differ in the dimensions ``inside`` alone."""
        of, names = self.layout, ("tensor", "context", "data", "pipeline")
        ranges = [range(getattr(of, name)) for name in names]
        found = {}
        for place in product(*ranges):
            key = tuple(x for x, name in zip(place, names, strict=True) if name not in inside)
            found.setdefault(key, []).append(self.rank(*place))
        return [sorted(one) for one in found.values()]

    def expert_groups(self):
        """Per set of ranks that hold equal layers: ranks that share experts, or hold the same.

        Those that share experts are next to each other.
        """
        size = self.layout.expert
        equal = self.groups("tensor", "context", "data")
        sharing = [one[i : i + size] for one in equal for i in range(0, len(one), size)]
        return sharing, [one[i::size] for one in equal for i in range(size)]

    # Exchanges

    def path(self, group):
        """Bytes/s and latency of a ring: a unit's members in the group share its way out."""
        slowest, latency, inner = math.inf, 0.0, 1
        for level in self.fabric.levels:
            units = {}
            for rank in group:
                units.setdefault(rank // level.devices, {}).setdefault(rank // inner, []).append(1)
            crossed = [unit for unit in units.values() if len(unit) > 1]
            for unit in crossed:
                way_out = min(len(members) for members in unit.values())
                slowest = min(slowest, way_out * level.bytes_per_second)
                latency = max(latency, level.latency_seconds)
            inner = level.devices
        return slowest, latency

    def level(self, a, b):
        """The innermost level of which one unit holds both ranks."""
        return next(x for x in self.fabric.levels if a // x.devices == b // x.devices)

    def gather(self, groups, moved):
        """The slowest group's reduce-scatter or all-gather of ``moved`` bytes, in a ring.

        The last of its k parts passes k - 1 hops, from each rank to the next by number.
        """
        k = len(groups[0])
        if k == 1 or moved == 0:
            return 0.0
        return max(
            (k - 1) / k * moved / self.path(group)[0]
            + sum(self.level(a, b).latency_seconds for a, b in pairwise(group))
            for group in groups
        )

    def all_to_all(self, groups, moved, copies):
        """The slowest rank's part over the slowest level, each level's with its own links."""
        k, found = len(groups[0]), 0.0
        for group in groups if k > 1 and moved else []:
            latency = self.path(group)[1]
            if copies and len({self.level(a, b).name for a in group for b in group if a != b}) > 1:
                found = max(found, self.once_per_unit(group, moved, copies) + latency)
                continue
            for own in group:
                inner = 1
                for level in self.fabric.levels:
                    near = [r for r in group if r // level.devices == own // level.devices]
                    far = [r for r in near if r // inner != own // inner]
                    seconds = len(far) / k * moved / level.bytes_per_second
                    found, inner = max(found, seconds + latency), level.devices
        return found

    def once_per_unit(self, group, moved, copies):
        """A token goes once to a unit that has one of its receivers; all its copies go inside.

        The units of a level are taken to be alike, as many members over as many units.
        """
        k, found, inner = len(group), 0.0, 1
        for level in self.fabric.levels:
            here, lower = (Counter(r // n for r in group) for n in (level.devices, inner))
            far = max(here[r // level.devices] - lower[r // inner] for r in group)
            if far and len(lower) == k:  # the innermost
                most = max(here.values())
                found = max(found, (most - 1) / most * moved / level.bytes_per_second)
            elif far:
                others = (len(lower) - len(here)) / len(here)
                sent = others * (1 - (1 - far / others / k) ** copies) / copies
                found = max(found, sent * moved / level.bytes_per_second)
            inner = level.devices
        return found

    def hop_seconds(self, of, latencies=1):
        """A stage's output to the next, on the slowest link of any pair of neighbours."""
        size = self.precision.activation_bytes
        moved = self.layout.microbatch * self.handed / self.layout.tensor * size
        return self.next_seconds("pipeline", moved, latencies)

    @property
    def handed(self):
        """Elements of a sample: hidden states, and beside them those of a tower's tokens."""
        of, sequence = self.problem.architecture, self.problem.sequence
        found, tower = sequence // self.layout.context * of.hidden, of.tower
        if tower is None:
            return found
        return found + tower.images * (tower.tokens or sequence) * tower.hidden

    def next_seconds(self, dimension, moved, latencies=1):
        """From a rank to the next of its group, and from the last to the first; the slowest."""
        found = 0.0
        for group in self.groups(dimension):
            if len(group) == 1 or not moved:
                return 0.0
            for a, b in zip(group, [*group[1:], group[0]], strict=True):
                seconds = moved / self.level(a, b).bytes_per_second
                found = max(found, seconds + latencies * self.path(group)[1])
        return found

    def sending_seconds(self, of):
        """How long the links of the busiest rank are at work with all that it sends."""
        p = self.layout.pipeline
        sent = [0] * p
        for path in self.order.paths:
            for a, b in pairwise(path):
                for rank in (a, b):
                    sent[rank] += (a != b) / len(self.order.paths)
        return self.microbatches * max(sent) * self.hop_seconds(of, 0)

    # Layers

    def in_8_bits(self, share):
        """Whether the layer's products are."""
        return self.precision.fp8_products and (share.is_block or self.problem.reached.fp8_head)

    @property
    def memory_rate(self):
        return self.problem.card.memory_bytes_per_second * self.problem.reached.memory

    def operator_seconds(self, share, name, one):
        """The longer of FLOPs and traffic, and the launch; nothing is made 8 bits wide."""
        samples, reached = self.layout.microbatch, self.problem.reached
        weights = (one.parameters + one.tied_parameters) * (one.kind in WITH_WEIGHTS)
        moved = (weights + samples * (one.moved - weights)) * self.precision.activation_bytes
        if name == "loss" and reached.logit_bytes is not None:
            moved = samples * one.saved_bytes / 4 * reached.logit_bytes  # of 4-byte logits
        products = 0.0
        if one.kind == "attention" and reached.attention is not None:
            products = self.attention_seconds(one.unmasked, samples * one.flops)
        elif one.kind == "convolution":
            products = samples * one.flops / (self.peak_16_bits * reached.convolution)
        elif one.flops:
            kernels = share.experts if name.startswith("experts") else 1
            products = kernels * self.product_seconds(share, samples * one.flops / kernels)
        return max(products, moved / self.memory_rate) + reached.launch_seconds

    def product_seconds(self, share, flops):
        """A product of so many FLOPs."""
        reached, peak = self.problem.reached, self.peak_16_bits
        part = reached.matmul
        if self.in_8_bits(share):
            peak = self.problem.card.fp8_flops
            part = part if reached.fp8_matmul is None else reached.fp8_matmul
        return flops / (peak * part * flops / (flops + reached.half_flops))

    @property
    def peak_16_bits(self):
        card = self.problem.card
        return card.fp32_flops if self.precision.activation_bytes == 4 else card.fp16_flops

    def attention_seconds(self, seen, flops):
        """The last context rank's, which attends to all if the tokens are not balanced.

        There is a kernel for the keys of every context rank.
        """
        reached, ranks = self.problem.reached, self.layout.context
        if ranks > 1 and not reached.context_balanced:
            seen = min(1.0, seen * (2 * ranks - 1) / ranks)
        each = seen * flops / ranks
        part = reached.attention * each / (each + reached.attention_half_flops)
        return ranks * each / (self.peak_16_bits * part)

    def cast_seconds(self, share, one):
        """A product's inputs, or its outputs' gradients, are made 8 bits wide."""
        weights = one.parameters + one.tied_parameters
        if not self.in_8_bits(share) or one.kind != "matmul" or not weights:
            return 0.0
        elements = (one.moved - weights) / 2
        moved = self.layout.microbatch * elements * self.problem.reached.cast_bytes
        return moved / self.memory_rate

    def layer_seconds(self, share, repeats):
        """Forward, backward and its part for weights, with the exchanges that nothing hides."""
        layout, size, reached = self.layout, self.precision.activation_bytes, self.problem.reached
        plain = {n: self.operator_seconds(share, n, one) for n, one in share.operators.items()}
        cast = {n: self.cast_seconds(share, one) for n, one in share.operators.items()}
        each = {n: plain[n] + cast[n] for n in plain}
        back = {n: plain[n] * one.input_gradients for n, one in share.operators.items()}
        for name, one in share.operators.items():
            if reached.attention and reached.attention_backward and one.kind == "attention":
                back[name] *= reached.attention / reached.attention_backward
        back = {n: back[n] + cast[n] for n in back}
        host = 0.0
        if share.experts:
            host = reached.expert_seconds + share.experts * reached.each_expert_seconds
        forward, inputs = sum(each.values()) + host, sum(back.values()) + host
        moved = layout.microbatch * share.width * size
        reduced = 2 * self.gather(self.groups("tensor"), moved)
        routed = self.routed(share)
        weights = self.weight_seconds(share, plain)
        sent = share.reductions[0] * reduced + routed + self.circulated(share, 1, each)
        returned = share.reductions[1] * self.returned_each(share, weights, back, moved)
        returned += routed + self.circulated(share, 2, back)
        again, repeated = 0.0, ()
        if repeats and layout.recompute == "full":
            again, repeated = sum(each.values()) + host + sent, tuple(each)
        elif repeats and layout.recompute == "selective":
            repeated = self.repeated_selectively(share)
            again = sum(each[name] for name in repeated)
        dispatch = reached.dispatch_seconds
        kernels = sum(one.input_gradients > 0 for one in share.operators.values()) + len(repeated)
        rest = max(inputs + returned + again, dispatch * kernels)
        weights += self.added_seconds(share)
        forward = max(forward + sent, dispatch * len(each))
        if not share.differentiable:  # tokens have no gradient: all of the backward is of weights
            rest, weights = 0.0, rest + weights
        return forward, rest + weights, weights if self.put_off else 0.0

    def routed(self, share, *_):
        """The way to the experts and back."""
        copies = self.problem.architecture.experts.per_token if share.experts else None
        reached, moved = self.problem.reached, self.layout.microbatch * share.dispatched
        there = self.all_to_all(
            self.expert_groups()[0], moved * self.precision.activation_bytes,
            copies if reached.once_per_unit else None,
        )  # fmt: skip
        return 2 * there * (1 - reached.expert_overlap)

    def repeated_selectively(self, share):
        """The attention's core; by operator, all but the attention and every first product."""
        if not share.is_block:
            return ()
        if not self.problem.memory.by_operator:
            return tuple(name for name in share.operators if name in CORE)
        kept = {"query, key, value", "latent", "attention", "scores", "weighted values"}
        kept |= {"feed-forward in", "shared in", "shared score", "recurrent in"}
        return tuple(
            name
            for name, one in share.operators.items()
            if name not in kept or one.kind == "memory"
        )

    def weight_seconds(self, share, each):
        """The weights' gradients, which the host starts one after the other.

        A fused product reads and writes its weight's sum too.
        """
        reached, total, kernels = self.problem.reached, 0.0, 0
        for name, one in share.operators.items():
            summed = 0.0
            if self.problem.fused_gradients and one.kind in WITH_WEIGHTS:
                moved = 2 * (one.parameters + one.tied_parameters) * self.precision.gradient_bytes
                summed = moved / self.memory_rate + reached.launch_seconds
            if one.weight_gradients:
                total += max(each[name] * one.weight_gradients, summed)
                kernels += 1
        total += share.experts * reached.each_expert_seconds
        return max(total, reached.dispatch_seconds * kernels)

    def returned_each(self, share, weights, back, moved):
        """What is seen of one of the backward's reductions of the hidden states.

        Without sequence parallelism an all-reduce, beside the weights' gradients. With it the
        output's gradient is gathered, which is seen; the input is gathered once more beside its
        gradient, and its gradient scattered beside the weights'.
        """
        one = self.gather(self.groups("tensor"), moved)
        number = max(1, share.reductions[1])
        hiding, parallel = weights, self.layout.sequence_parallel
        if parallel:
            products = (name for name, x in share.operators.items() if x.kind == "matmul")
            hiding += sum(back[x] for x in products if share.operators[x].weight_gradients)
        hiding *= self.problem.overlap_tensor and not self.put_off
        return (one if parallel else 0.0) + max(0.0, 2 * one - hiding / number)

    def added_seconds(self, share):
        """The sum of gradients by a kernel of its own: reads both, writes the sum."""
        if self.problem.fused_gradients:
            return 0.0
        of = self.precision
        number = share.parameters + share.expert_parameters + share.tied_parameters
        moved = of.weight_bytes + 2 * of.gradient_bytes
        return number * moved / self.memory_rate

    def circulated(self, share, times, each):
        """Keys and values in a ring of context ranks, as far as the attention does not hide it.

        In the backward their gradients go round with them.
        """
        c = self.layout.context
        if c == 1:
            return 0.0
        moved = self.layout.microbatch * share.circulated * self.precision.activation_bytes
        ring = times * (c - 1) * self.next_seconds("context", moved)
        core = ("attention", "scores", "weighted values")
        return max(0.0, ring - sum(each.get(name, 0.0) for name in core))

    def stage_seconds(self, stage):
        """Forward and backward of a microbatch, with ZeRO's exchanges of every microbatch."""
        times = [self.layer_seconds(*one) for one in stage]
        forward, backward, weight = (
            (sum(one) for one in zip(*times, strict=True)) if times else (0,) * 3
        )
        zero, gradients, weights = self.layout.zero, *self.state_exchanges(stage)
        moved = (weights if zero == 3 else 0.0, gradients * (zero >= 2) + weights * (zero == 3))
        forward = self.beside(forward, moved[0])
        backward, copied = self.beside(backward - weight, moved[1]) + weight, self.copied(stage)
        if not copied:
            return forward, backward, weight
        there, back = (copied + one * (len(self.fabric.levels) > 1) for one in moved)
        return max(forward, there), max(backward, back), weight

    def copied(self, stage):
        """What the first blocks keep goes to the host beside all of a forward, and comes back."""
        size, memory = self.precision.activation_bytes, self.problem.memory
        fp8, samples = self.precision.fp8_products, self.layout.microbatch
        away = [one for one, first in stage if first and self.layout.offload_blocks]
        kept = sum(samples * one.saved_bytes(size, "none", memory, fp8=fp8) for one in away)
        return kept / self.fabric.host_bytes_per_second

    def beside(self, work, moved):
        """Both, one after the other or at once, when they slow each other down."""
        if not self.problem.overlap:
            return work + moved
        both = min(work, moved)
        return max(work, moved) + self.problem.reached.contention * both

    # States

    def parameters(self, layers):
        """Those of all t-th parts of the layers, and experts'; a tied table also with the head."""
        tied = self.layout.pipeline > 1 and not self.in_v
        shared = sum(one.parameters + one.tied_parameters * tied for one, _ in layers)
        return shared, sum(one.expert_parameters for one, _ in layers)

    def state_exchanges(self, layers):
        """A reduce-scatter of the gradients, an all-gather of the weights."""
        shared, experts = self.parameters(layers)
        groups = self.doubled(self.groups("context", "data"))
        copies = self.doubled(self.expert_groups()[1])
        return tuple(
            self.gather(groups, shared * size) + self.gather(copies, experts * size)
            for size in (self.precision.gradient_bytes, self.precision.weight_bytes)
        )

    def doubled(self, groups):
        """With the ranks of the second copies, which are half the pipeline away on average."""
        away = self.rank(0, 0, 0, self.layout.pipeline // 2) * self.is_double
        if not away:
            return groups
        inside = self.layout.pipeline * self.rank(0, 0, 0, 1)
        firsts = [one for one in groups if one[0] % inside < away]
        return [sorted([*one, *(rank + away for rank in one)]) for one in firsts]

    def layers_of(self, rank):
        stages = {one.stage for one in self.order.rows[rank]}
        return [one for stage in sorted(stages) for one in self.stages[stage]]

    def after_pipeline(self, rank, head):
        """What the exchange of gradients and updated weights adds to the end of a rank."""
        layers, zero = self.layers_of(rank), self.layout.zero
        gradients, weights = self.state_exchanges(layers)
        moved = {0: (2 * gradients, 0.0), 1: (gradients, weights), 2: (0.0, weights), 3: (0.0, 0.0)}
        times = [self.layer_seconds(*one) for one in layers]
        alone, layer = 0.0, len(layers)
        if self.problem.overlap and zero >= 2:
            alone = min(gradients / layer, sum(one[1] for one in times))
            alone += min(weights / layer, sum(one[0] for one in times)) * (zero == 3)
        gradients, weights = moved[zero]
        if self.problem.overlap:  # beside the last backward, the first forward: but for one layer
            forward, backward, _ = (sum(one) for one in zip(*times, strict=True))
            gradients = max(gradients - backward, gradients / len(layers))
            weights = max(weights - forward, weights / len(layers))
        return alone + gradients + weights + self.tied_seconds(rank, head)

    def tied_seconds(self, rank, head):
        last = self.layout.pipeline - 1
        if last == 0 or self.in_v or rank not in (0, last):
            return 0.0
        ends = [[group[0], group[-1]] for group in self.groups("pipeline")]
        return (
            2
            * self.gather(ends, head.tied_parameters * self.precision.gradient_bytes)
            * (head.tied_parameters > 0)
        )

    def update_seconds(self, rank):
        """The step reads gradients and state, and writes state and weights; or passes the host.

        Without fp32 masters of the weights it reads these too.
        """
        layout, of = self.layout, self.precision
        shared, experts = self.parameters(self.layers_of(rank))
        if layout.zero:
            ranks = layout.context * layout.data * (1 + self.is_double)
            shared, experts = shared / ranks, experts / (layout.tensor * ranks / layout.expert)
        if layout.offload_optimizer:
            most = max(of.gradient_bytes, of.weight_bytes)
            return (shared + experts) * most / self.fabric.host_bytes_per_second
        moved = of.gradient_bytes + 2 * of.optimizer_bytes + of.weight_bytes
        moved += of.weight_bytes * (of.weight_bytes == 4)
        return (shared + experts) * moved / self.memory_rate
