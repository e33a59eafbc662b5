"""In which order a stage processes forwards and backwards: GPipe, 1F1B and SPP's PE.

An order is a string of ``F`` and ``B`` per stage; the k-th ``F`` (``B``) is the forward (backward)
of microbatch k, since microbatches are alike (see :mod:`makespan`).
"""

from stagewright.formulations.pipelines.makespan import MakespanProblem

Orders = tuple[str, ...]


def gpipe_orders(problem: MakespanProblem) -> Orders | None:
    """All forwards, then all backwards (thesis 4.2.2); None if a limit is below M in flight."""
    if min(problem.in_flight) < problem.microbatches:
        return None
    return ("F" * problem.microbatches + "B" * problem.microbatches,) * problem.stages


def one_f_one_b_orders(problem: MakespanProblem) -> Orders:
    """PipeDream-Flush (thesis 4.2.2): stage s warms up with S - s forwards, then alternates.

    A lower in-flight limit shortens the warm-up, of that stage and of all behind it: a stage that
    waits for more forwards than its predecessor may send would wait for ever.
    """
    orders, depth = [], problem.microbatches
    for s in range(problem.stages):
        depth = min(depth, problem.stages - s, problem.in_flight[s])
        steady = problem.microbatches - depth
        orders.append("F" * depth + "BF" * steady + "B" * depth)
    return tuple(orders)


def pe_orders(problem: MakespanProblem) -> Orders:
    """SPP's execution ordering (Algorithm 1, lines 1-8).

    In every round each block that has a microbatch available at the round's start takes one. The
    last stage's forward and backward are one block. A forward that would exceed its stage's
    in-flight limit waits for a later round.
    """
    stages, total = problem.stages, problem.microbatches
    # Blocks in order of dependence: F0, send, F1, ..., F+B of the last stage, send, ..., B0.
    blocks = [(s, "F") for s in range(stages - 1)] + [(stages - 1, "FB")]
    blocks += [(s, "B") for s in reversed(range(stages - 1))]
    available = [0] * (2 * len(blocks))  # even places: blocks; odd: the transfers behind them
    available[0] = total
    orders = [""] * stages
    finished = 0
    while finished < total:
        for place in [j for j, count in enumerate(available) if count]:
            if place % 2 == 0:
                stage, work = blocks[place // 2]
                flying = orders[stage].count("F") - orders[stage].count("B")
                if work == "F" and flying >= problem.in_flight[stage]:
                    continue
                orders[stage] += work
            available[place] -= 1
            if place == len(available) - 2:
                finished += 1
            else:
                available[place + 1] += 1
    return tuple(orders)
