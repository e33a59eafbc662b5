"""Random rules for the dispatcher of rows, and random changes of them."""

from dataclasses import dataclass, replace

import numpy as np

from stagewright.graphs.documents.arrays import Floats
from stagewright.solvers.pipelines.rows.kernels import RowRule


@dataclass(frozen=True, slots=True, eq=False)
class RandomRule:
    """Parameters of a ``RowRule``; its urgency is ``base`` (K, S) plus ``slope`` per microbatch."""

    base: Floats
    slope: float
    depth: Floats
    pending: Floats
    eagerness: float

    def form(self, microbatches: int) -> RowRule:
        """The rule for the kernel."""
        most = float(microbatches * self.base.shape[1])
        return RowRule(
            urgency=self.base.reshape(-1, 1) + self.slope * np.arange(microbatches),
            depth=np.clip(np.round(self.depth), 1, most).astype(np.int64),
            pending=np.clip(self.pending, 0, most).astype(np.int64),
            eagerness=self.eagerness,
            clears=True,
        )

    def changed(self, microbatches: int, random: np.random.Generator) -> "RandomRule":
        """One to three random changes."""
        rule = self
        for _ in range(random.integers(1, 4)):
            changes = (
                rule._with_base, rule._with_noise, rule._with_pending, rule._with_slope,
                lambda random, rule=rule: rule._with_depth(microbatches, random),
            )  # fmt: skip
            rule = changes[random.integers(len(changes))](random)
        return rule

    def _with_base(self, random: np.random.Generator) -> "RandomRule":
        base = self.base.copy()
        scale = random.choice([0.3, 1.0, 3.0, 10.0])
        base[random.integers(len(base))] += scale * _ramp(base.shape[1], random)
        return replace(self, base=base)

    def _with_noise(self, random: np.random.Generator) -> "RandomRule":
        base = self.base.copy()
        some = random.random(base.shape) < 0.2
        base[some] += random.choice([0.3, 1.0, 3.0]) * random.normal(size=int(some.sum()))
        return replace(self, base=base)

    def _with_depth(self, microbatches: int, random: np.random.Generator) -> "RandomRule":
        stages = len(self.depth)
        depth = np.minimum(self.depth, min(2 * stages, microbatches))
        if random.random() < 0.5:
            depth = depth + random.choice([1.0, 2.0, 4.0]) * _ramp(stages, random)
        else:
            depth = depth + random.integers(-1, 2, stages) * (random.random(stages) < 0.2)
        return replace(self, depth=np.clip(depth, 1, microbatches))

    def _with_pending(self, random: np.random.Generator) -> "RandomRule":
        devices = len(self.pending)
        if random.random() < 0.2:
            return replace(self, pending=np.full(devices, np.inf))
        ramp = random.choice([1.0, 2.0, 4.0]) * _ramp(devices, random)
        return replace(self, pending=np.maximum(np.minimum(self.pending, 4 * devices) + ramp, 0))

    def _with_slope(self, random: np.random.Generator) -> "RandomRule":
        if random.random() < 0.5:
            eagerness = float(np.clip(self.eagerness + 0.2 * random.normal(), 0, 1))
            return replace(self, eagerness=eagerness)
        slope = abs(self.slope * np.exp(random.normal()) + 0.1 * random.normal())
        return replace(self, slope=float(slope))


def plain_rule(kinds: int, stages: int, devices: int) -> RandomRule:
    """Backwards, then forwards, later stages first; weight gradients last."""
    urgency = np.array((2, 1, 3)[:kinds]) * stages
    return RandomRule(
        base=np.subtract.outer(urgency, np.arange(stages)).astype(np.float64),
        slope=0.0,
        depth=np.full(stages, np.inf),
        pending=np.full(devices, np.inf),
        eagerness=0.0,
    )


def drawn_rule(kinds: int, stages: int, devices: int, random: np.random.Generator) -> RandomRule:
    """Random kinds first, warm-ups in multiples of 1F1B's, weight gradients put off or not."""
    rule, stage = plain_rule(kinds, stages, devices), np.arange(stages)
    rule.base[0] = -stage * random.choice([0, 1, 1, -1])
    rule.base[1] = stages * random.choice([1, -1, -1]) - stage * random.choice([0, 1, 1, -1])
    rule.base[2:] = stages * random.choice([0, 3, 3, 3])
    if random.random() < 0.7:
        rule.depth[:] = (stages - stage) * random.uniform(0.3, 2.0) + random.integers(3)
    if random.random() < 0.5:
        rule.pending[:] = random.uniform(0.0, 2.0 * devices)
    return replace(
        rule,
        slope=float(random.choice([0.0, 0.0, 0.1, 1.0, 3.0])),
        eagerness=float(random.choice([0.0, 0.25, 0.5, 1.0])),
    )


def _ramp(size: int, random: np.random.Generator) -> Floats:
    """A random line over stages or devices, or over one half of them."""
    place = np.arange(size) / size
    line = random.normal() + 2 * random.normal() * place
    if random.random() < 0.5:
        line = np.where((place < 0.5) == (random.random() < 0.5), line, 0.0)
    return np.asarray(line, dtype=np.float64)
