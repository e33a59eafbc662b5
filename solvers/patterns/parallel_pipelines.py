"""The best configuration of parallel pipelines, by ascending lower bound until proved.

The thesis sweeps all (d, p) and takes for each the largest microbatch that fits (section 3.3.2,
Algorithm 1); here the microbatch size is searched as well, which is never worse.
"""

import math
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

import numpy as np

from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.patterns.parallel_pipelines import Configuration, Family, Line
from stagewright.graphs.documents.arrays import Floats


class IterationCosts(Protocol):
    """The seconds of an iteration."""

    def floors(self, line: Line) -> Floats:
        """Lower bounds on :meth:`seconds` by depth, shape (most,); inf: does not fit in memory."""

    def seconds(self, one: Configuration) -> float:
        """Seconds of a configuration, inf if the configuration does not fit in memory."""


@dataclass(frozen=True, slots=True)
class BestConfiguration:
    """The best configuration and its seconds, None and inf if none fits.

    No configuration takes less than ``bound_seconds``, which is less than ``seconds`` only if the
    time was over. Of ``configurations`` the costs of ``priced`` were computed, the floors of the
    others are no less than the best.
    """

    best: Configuration | None
    seconds: float
    bound_seconds: float
    configurations: int
    priced: int


def best_configuration(family: Family, costs: IterationCosts, limits: Limits) -> BestConfiguration:
    """The configuration of ``family`` with the least seconds per iteration, thus the most samples.

    Of equal ones the first in the order of floors, widths and depths.
    """
    began = monotonic()
    lines = list(family.lines())
    floors = [costs.floors(line) for line in lines]
    every = np.concatenate([np.zeros(0), *floors])
    ends = np.cumsum([0, *map(len, floors)])
    best, least, priced, bound = None, math.inf, 0, math.inf
    for i in np.argsort(every, kind="stable").tolist():
        bound = float(every[i])
        if bound >= least or math.isinf(bound) or limits.left(monotonic() - began) <= 0:
            break
        row = int(np.searchsorted(ends, i, side="right")) - 1
        one = lines[row].at(i - int(ends[row]) + 1)
        seconds, priced = costs.seconds(one), priced + 1
        if seconds < least:
            best, least = one, seconds
    else:
        bound = least
    return BestConfiguration(best, least, min(bound, least), len(every), priced)
