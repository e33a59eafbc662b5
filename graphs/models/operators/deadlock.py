"""Why no order obeys the precedences: nodes that wait for each other."""

from collections.abc import Sequence


def waiting_cycle(followers: Sequence[Sequence[int]], awaited: Sequence[int]) -> list[int]:
    """Nodes that wait for each other in a circle, each for the next; the first is repeated last.

    ``followers``: the nodes that wait for each node. ``awaited``: how many nodes each node still
    waits for once no node is ready; at least one is positive.

    Examples
    --------
    >>> waiting_cycle([[1], [2], [1]], [0, 1, 1])
    [1, 2, 1]
    """
    waits_for = {
        after: before
        for before, later in enumerate(followers)
        for after in later
        if awaited[before] > 0
    }
    path = [next(i for i, count in enumerate(awaited) if count > 0)]
    seen: dict[int, int] = {}
    while path[-1] not in seen:
        seen[path[-1]] = len(path) - 1
        path.append(waits_for[path[-1]])
    return path[seen[path[-1]] :]
