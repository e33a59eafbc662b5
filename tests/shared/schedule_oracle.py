"""The least time of a schedule of given stages: every order of all actions, tried one by one.

Plain Python, no import of stagewright. Actions are appended in the order of their starts, each as
early as its predecessors, its resources, memory and the start before it allow. Some order gives an
optimal schedule: started that way, no action starts later than in a given schedule. Feasible up to
some 16 actions.
"""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Action:
    """Seconds, resources taken, predecessors, and bytes held on devices.

    ``holds`` are (device, bytes, last): from the start of this action to the end of action
    ``last``.
    """

    seconds: float
    resources: tuple
    before: tuple
    holds: tuple = ()


def least_time(actions, room):
    """The least time of all ``actions`` (by name); ``room`` is in bytes per device."""
    best, seen = [inf], set()
    names = sorted(actions, key=str)
    twins = [name for name in names if actions[name].seconds > 0]

    def extend(starts, now):
        ends = {name: start + actions[name].seconds for name, start in starts.items()}
        latest = max(ends.values(), default=0)
        if len(starts) == len(names):
            best[0] = min(best[0], latest)
            return
        state = (
            tuple((name, max(ends[name] - now, 0)) for name in names if name in starts),
            now,
            latest,
        )
        if latest >= best[0] or state in seen:
            return
        seen.add(state)
        for name in names:
            if name not in starts and all(before in starts for before in actions[name].before):
                start = _start(actions, room, starts, ends, name, now)
                if start is not None:
                    extend({**starts, name: start}, start)

    assert twins or not names
    extend({}, 0)
    return best[0]


def _start(actions, room, starts, ends, name, now):
    """The earliest start of an action after ``now``; None if memory is full for good."""
    one = actions[name]
    ready = max([now, *(ends[before] for before in one.before)])
    for other in starts:
        if set(actions[other].resources) & set(one.resources):
            ready = max(ready, ends[other])
    for moment in sorted({ready, *(end for end in ends.values() if end > ready)}):
        if _fits(actions, room, starts, ends, name, moment):
            return moment
    return None


def _fits(actions, room, starts, ends, name, moment):
    held = dict.fromkeys(room, 0)
    for other in [*starts, name]:
        for device, size, last in actions[other].holds:
            if ends.get(last, inf) > moment:
                held[device] += size
    return all(held[device] <= room[device] for device in room)
