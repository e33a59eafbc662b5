"""The least time of a schedule of given actions: every order of their starts, one by one.

Plain Python, no import of stagewright. Actions are appended in the order of their starts, each as
early as its predecessors, its resources, memory and the start before it allow. Some order gives an
optimal schedule: of the order of any schedule's starts no action starts later than there, as all
before it end no later. Feasible up to some 16 actions.
"""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Action:
    """Whole seconds, resources taken, predecessors, and bytes held.

    ``holds`` are (device, bytes, last): from the start of this action to the end of ``last``.
    """

    seconds: int
    resources: frozenset
    before: tuple
    holds: tuple = ()


def least_time(actions, memory):
    """The least time of all ``actions``, by name; ``memory`` is in bytes per device."""
    best, seen = inf, set()
    waiting = [({}, 0)]  # ends of the actions started so far, the last start
    while waiting:
        ends, now = waiting.pop()
        latest = max(ends.values(), default=0)
        state = frozenset((name, max(end, now)) for name, end in ends.items()), now, latest
        if latest >= best or state in seen:
            continue
        seen.add(state)
        if len(ends) == len(actions):
            best = latest
        for name, one in actions.items():
            if name not in ends and all(before in ends for before in one.before):
                start = _start(actions, memory, ends, name, now)
                if start is not None:
                    waiting.append(({**ends, name: start + one.seconds}, start))
    return best


def _start(actions, memory, ends, name, now):
    """The earliest start of an action; None if it does not fit before another one starts."""
    one = actions[name]
    waits = [end for other, end in ends.items() if actions[other].resources & one.resources]
    ready = max([now, *waits, *(ends[before] for before in one.before)])
    for moment in sorted({ready, *(end for end in ends.values() if end > ready)}):
        if _fits(actions, memory, ends, name, moment):
            return moment
    return None


def _fits(actions, memory, ends, name, moment):
    held = dict.fromkeys(memory, 0)
    for other in [*ends, name]:
        for device, size, last in actions[other].holds:
            if ends.get(last, inf) > moment:
                held[device] += size
    return all(held[device] <= memory[device] for device in memory)
