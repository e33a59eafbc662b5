"""A lower bound on the time of all divisions of a plain pipeline, by a recurrence over its stages.

No stage computes before the stages before it have passed on the first microbatch, and the last one
comes back through them: with a stage's forward f and backward b (without the weights' part, where
that is put off) and a hop h, an iteration takes at least the sum of f + b + 2 h over the stages
before any one stage, and m (f + b) of that one. To its own last computation it takes at least the
sum of f + h over the stages before, and all its work. The least of both over all divisions is
V(s, i) = min over n of max(work(s, i, n), way(s, i, n) + V(s + 1, i + n)), for the stages from s on
with the blocks from i on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from stagewright.solvers.parallelism.stage_options import Option, StageOptions

Ends = tuple[float, float]
"""Until the first stage's last backward, and until the last computation of any stage (s)."""

NEVER: Ends = (inf, inf)


@dataclass(frozen=True, slots=True)
class LeastDivision:
    """No division takes less than ``seconds``, without the update; ``blocks`` is a good one."""

    seconds: float
    blocks: tuple[int, ...]


def least_division(
    options: StageOptions, low: Sequence[int], high: Sequence[int], starts: Sequence[range]
) -> LeastDivision | None:
    """The bound for stages with ``low`` to ``high`` blocks that begin in ``starts``.

    None if no division fits.
    """
    after: dict[int, Ends] = {options.blocks: (0.0, 0.0)}
    taken: list[dict[int, int]] = []
    for stage in reversed(range(options.stages)):
        found, choice = {}, {}
        for start in starts[stage]:
            best, count = _best(options, stage, start, range(low[stage], high[stage] + 1), after)
            if best != NEVER:
                found[start], choice[start] = best, count
        after = found
        taken.append(choice)
    if 0 not in after:
        return None
    blocks, start = [], 0
    for choice in reversed(taken):
        blocks.append(choice[start])
        start += choice[start]
    return LeastDivision(max(after[0]), tuple(blocks))


def _best(
    options: StageOptions, stage: int, start: int, counts: range, after: dict[int, Ends]
) -> tuple[Ends, int]:
    """The least of both ends over a stage's possible blocks, and the blocks of the first end."""
    back, here, blocks = inf, inf, counts.start
    for count in counts:
        then = after.get(start + count)
        if then is None:
            continue
        one = options.option(stage, start, count)
        if one is None:
            break  # more do not fit either
        ends = _ends(options, stage, one, then)
        if ends[0] < back:
            back, blocks = ends[0], count
        here = min(here, ends[1])
    return (back, here), blocks


def _ends(options: StageOptions, stage: int, one: Option, then: Ends) -> Ends:
    """Both ends of the pipeline from this stage on, from the later stages' ends ``then``."""
    m, hop = options.microbatches, options.hop
    each = one.forward + one.returned
    is_last = stage == options.stages - 1
    back = m * each if is_last else max(m * each, each + 2 * hop + then[0])
    own = m * (each + one.weight) + one.reduction
    here = own if is_last else max(own, one.forward + hop + then[1])
    return back + (one.reduction if stage == 0 else 0.0), here
