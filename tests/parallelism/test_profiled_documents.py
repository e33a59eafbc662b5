"""``train-plan`` of layer profiles, from its files alone: every plan, by formulas of its own."""

import json
import math
import random
from itertools import combinations, pairwise, product

import pytest
from commands import run
from profiles import slow_after

MB = 1e6


def finish(ahead, back, sent, microbatches):
    """When each stage is done: DeepSpeed's turns, of which each begins with its exchanges.

    Stage s computes forward i in turn s + 2 i and backward i in turn 2 p - 1 - s + 2 i.
    """
    p, clock = len(ahead), [0.0] * len(ahead)

    def is_due(turn, first):
        return turn >= first and (turn - first) // 2 < microbatches

    for turn in range(2 * (microbatches + p)):
        for s in range(p - 1):
            if (turn - s) % 2:  # its backward, and the forward of the next stage
                count = is_due(turn, 2 * p - 1 - s) + is_due(turn, s + 1)
                if count:
                    clock[s] = clock[s + 1] = max(clock[s], clock[s + 1]) + count * sent[s]
        for s in range(p):
            if (turn - s) % 2:
                clock[s] += back[s] * is_due(turn, 2 * p - 1 - s)
            else:
                clock[s] += ahead[s] * is_due(turn, s)
    return clock


class Files:
    """Random profiles of two layers or so, and servers of equal numbers of devices."""

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        self.layers, kinds = draw.randint(1, 3), draw.choice([["a"], ["a", "b"]])
        self.degrees = draw.choice([[1], [1, 2], [2]])
        self.measured = [
            {"device_kind": kind, "microbatch_size": samples, "tensor": tensor,
             "forward_seconds": self.seconds(0), "backward_seconds": self.seconds(0.15),
             "update_seconds": self.seconds(0.5)}
            for kind in kinds
            for samples in draw.choice([[1], [1, 2], [2], [3]])
            for tensor in self.degrees
        ]  # fmt: skip
        self.sizes = {t: self.sizes_of(t) for t in self.degrees}
        self.devices = draw.choice([1, 2, 2])
        self.servers = [kinds[i % len(kinds)] for i in range(draw.randint(len(kinds), 2))]
        self.intra, self.inter = draw.choice([2, 8]) * MB, draw.choice([1, 2]) * MB
        self.memory = draw.choice([1e12, draw.randint(20, 160) * MB])
        self.batch = draw.choice([1, 2, 3, 4, 6])

    def seconds(self, zeros):
        draw = self.draw
        return [0.0 if draw.random() < zeros else draw.uniform(0.1, 9) for _ in range(self.layers)]

    def sizes_of(self, tensor):
        draw = self.draw
        return {
            "parameters": [draw.randint(0, 3) * MB / tensor for _ in range(self.layers)],
            "saved_bytes": [draw.randint(0, 4) * MB for _ in range(self.layers)],
            "output_bytes": [draw.choice([0, 1, 5]) * MB for _ in range(self.layers)],
        }

    def write(self, folder):
        names = [[f"{i}.{d}" for d in range(self.devices)] for i in range(len(self.servers))]
        links = {"intra": self.intra, "inter": self.inter}
        profiles = {
            "format": "stagewright-layer-profiles", "version": 1, "name": "m", "source": "by hand",
            "measured": self.measured,
            "sizes": [{"tensor": t, **sizes} for t, sizes in self.sizes.items()],
        }  # fmt: skip
        cluster = {
            "format": "stagewright-cluster", "version": 1, "name": "c",
            "devices": [{"name": name, "kind": kind, "memory_bytes": self.memory}
                        for kind, own in zip(self.servers, names, strict=True) for name in own],
            "links": {"servers": names} | {
                name: {"bandwidth_bytes_per_second": rate, "latency_seconds": 0}
                for name, rate in links.items()
            },
        }  # fmt: skip
        (folder / "profiles.json").write_text(json.dumps(profiles))
        (folder / "cluster.json").write_text(json.dumps(cluster))

    def times(self, kind, samples, tensor, name):
        """Of each layer the least that it took with so many samples or more."""
        rows = [one for one in self.measured
                if (one["device_kind"], one["tensor"]) == (kind, tensor)
                and one["microbatch_size"] >= samples]  # fmt: skip
        if all(one["microbatch_size"] > samples for one in rows):
            return None
        exact = [one[name] for one in rows if one["microbatch_size"] == samples]
        return exact[0] if name == "update_seconds" else list(
            map(min, zip(*(one[name] for one in rows), strict=True))
        )  # fmt: skip

    def least(self):
        """The seconds of the fastest plan that fits; infinite if there is none."""
        least = math.inf
        for samples in {one["microbatch_size"] for one in self.measured}:
            count, rest = divmod(self.batch, samples)
            total = len(self.servers) * self.devices
            for data in range(1, min(count, total) + 1 if not rest else 0):
                for p in range(1, min(self.layers, total // data) + 1):
                    for cuts in combinations(range(1, self.layers), p - 1):
                        spans = [*pairwise((0, *cuts, self.layers))]
                        for stages in product(self.groups(samples, data), repeat=p):
                            counts = [count // data + (j < count % data) for j in range(data)]
                            least = min(least, self.plan(samples, counts, spans, stages))
        return least

    def groups(self, samples, data):
        """Kind, tensor degree, and the server of each replica of a stage."""
        return [
            (kind, tensor, where)
            for kind in set(self.servers)
            for tensor in self.degrees
            if self.times(kind, samples, tensor, "update_seconds") is not None
            for where in product(
                [i for i, one in enumerate(self.servers) if one == kind], repeat=data
            )
        ]

    def plan(self, samples, counts, spans, stages):
        used = [sum(t * where.count(i) for _, t, where in stages) for i in range(len(self.servers))]
        if max(used) > self.devices:
            return math.inf
        p, rows = len(stages), []
        for s, ((kind, tensor, where), (a, b)) in enumerate(zip(stages, spans, strict=True)):
            sizes, in_flight = self.sizes[tensor], min(p - s, max(counts))
            kept = [samples * one for one in sizes["saved_bytes"][a:b]]
            parameters = sum(sizes["parameters"][a:b])
            if 16 * parameters + in_flight * sum(kept) + 2.25 * max(kept) > self.memory:
                return math.inf
            ring = [self.rate(*pair) for pair in zip(where, where[1:] + where[:1], strict=True)]
            summed = 2 * (len(where) - 1) / len(where) * 4 * parameters / min(ring)
            names = ("forward_seconds", "backward_seconds", "update_seconds")
            ahead, back, update = (
                sum(self.times(kind, samples, tensor, name)[a:b]) for name in names
            )
            rows.append((ahead, back, summed + update))
        ahead, back, end = zip(*rows, strict=True)
        longest = 0.0
        for j, count in enumerate(counts):
            sent = []
            for (_, t, one), (_, u, other), (_, b) in zip(stages, stages[1:], spans, strict=False):
                moved = samples * self.sizes[min(t, u)]["output_bytes"][b - 1]
                sent.append(moved / min(t, u) / self.rate(one[j], other[j]))
            done = finish(ahead, back, sent, count)
            longest = max(longest, *map(sum, zip(done, end, strict=True)))
        return longest

    def rate(self, one, other):
        return self.intra if one == other else self.inter


@pytest.mark.parametrize("seed", slow_after(12, range(300)))
def test_the_answer_is_that_of_every_plan(seed, tmp_path):
    files = Files(seed)
    files.write(tmp_path)
    asked = ("train-plan", tmp_path / "profiles.json", "--cluster", tmp_path / "cluster.json")
    options = ("--global-batch", files.batch, "--time-limit", 20, "--reserve", "0B")
    answer, least = run(*asked, *options, "--json"), files.least()
    if least == math.inf:
        assert answer.exit_code in (1, 2), answer.output
        return
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert found["iteration_seconds"] >= least * (1 - 1e-9)
    assert found["bound_seconds"] <= least * (1 + 1e-9)
    if found["status"] == "optimal":
        assert found["iteration_seconds"] == pytest.approx(least)
