"""Random changes of the starts of a schedule, which then are the urgencies of the dispatcher."""

import numpy as np

from stagewright.graphs.documents.arrays import Floats, Ints

SIZES = (0.1, 0.3, 1.0, 3.0, 10.0)  # of a shift, in units of the longest computation
SHARES = (0.01, 0.1, 0.5)  # of the computations that noise changes
WIDTHS = (3.0, 10.0, 30.0)  # of a window of time, in the same units


def shifted(starts: Floats, device: Ints, unit: float, random: np.random.Generator) -> Floats:
    """``starts`` (K x S, M) after one to three random shifts; ``device`` (S,) of each stage."""
    changed, kinds = starts.copy(), len(starts) // len(device)
    for _ in range(random.integers(1, 4)):
        size, draw = unit * random.choice(SIZES), random.random()
        if draw < 0.4:
            _shift_kind(changed, device, kinds, size, random)
        elif draw < 0.8:
            near = np.abs(starts - random.uniform(0.0, starts.max())) < unit * random.choice(WIDTHS)
            near &= (np.tile(device, kinds) == random.choice(device))[:, None]
            changed[near] += size * random.normal(size=int(near.sum()))
        else:
            some = random.random(starts.shape) < random.choice(SHARES)
            changed[some] += size * random.normal(size=int(some.sum()))
    return changed


def _shift_kind(
    changed: Floats, device: Ints, kinds: int, size: float, random: np.random.Generator
) -> None:
    """Shift one kind of computation on neighbouring devices, for microbatches in sequence."""
    count = changed.shape[1]
    first = random.integers(1 + device.max())
    last = first + (random.integers(1 + device.max()) if random.random() < 0.5 else 0)
    stages = np.flatnonzero((device >= first) & (device <= last))
    if random.random() < 0.5:
        stages = random.choice(stages, 1)
    begin, end = 0, count
    if random.random() < 0.7:
        begin = int(random.integers(count))
        end = begin + 1 + int(random.exponential(count / 4))
    rows = random.integers(kinds) * len(device) + stages
    changed[rows, begin:end] += size * random.normal()
