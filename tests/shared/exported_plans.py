"""Plans of any placement and order, for exports."""

import random

from stagewright.executor.export.options import FormatOptions
from stagewright.formulations.plans.actions import Action, ActionKind, parse_action
from stagewright.formulations.plans.plan import PipelinePlan, Schedule, ScheduledAction, Stage
from stagewright.formulations.schedules.published.one_f_one_b import interleaved
from stagewright.graphs.models.chain import Chain, Layer, LayerCost

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
I, W = ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT
MICROBATCHES = 4


def needs(action, last):
    """What must be done before ``action``, any one of each group."""
    s, m = action.stage, action.microbatch
    if action.kind is F:
        return [{Action(s - 1, F, m)}] if s else []
    if action.kind is W:
        return [{Action(s, I, m)}]
    behind = [{Action(s + 1, B, m), Action(s + 1, I, m)}] if s < last else []
    return [{Action(s, F, m)}, *behind]


def random_rows(placement, microbatches, seed, split=True):
    """A random order that can run, where the last stage's forwards go by microbatch."""
    draw, last = random.Random(seed), len(placement) - 1
    waiting = []
    for s in range(last + 1):
        for m in range(microbatches):
            kinds = (I, W) if split and draw.random() < 0.5 else (B,)
            waiting += [Action(s, kind, m) for kind in (F, *kinds)]
    rows, done = [[] for _ in set(placement)], set()

    def may_run(action):
        in_turn = action.stage < last or action.kind is not F or not action.microbatch
        return all(done & group for group in needs(action, last)) and (
            in_turn or Action(last, F, action.microbatch - 1) in done
        )

    while waiting:
        action = draw.choice([action for action in waiting if may_run(action)])
        waiting.remove(action)
        done.add(action)
        rows[placement[action.stage]].append(action)
    return rows


def make_plan(placement, rows=None, microbatches=MICROBATCHES, replicas=1, cuts=None):
    """A plan with the computations of ``rows``, each a second long; default order 1F1B."""
    ranks, stages = len(set(placement)), len(placement)
    if rows is None:
        rows = interleaved(ranks, stages // ranks, microbatches).rows
    rows = [[parse_action(one) if isinstance(one, str) else one for one in row] for row in rows]
    groups = [tuple(f"g{p * replicas + j}" for j in range(replicas)) for p in range(ranks)]
    finish, entries, waiting = {}, [], [list(row) for row in rows]
    free = [0.0] * ranks
    while any(waiting):
        for p, row in enumerate(waiting):
            if not row:
                continue
            wanted = needs(row[0], stages - 1)
            if all(group & finish.keys() for group in wanted):
                start = max(
                    [free[p], *(finish[one] for group in wanted for one in group & finish.keys())]
                )
                finish[row[0]] = free[p] = start + 1.0
                entries += [
                    ScheduledAction(name, str(row[0]), start, start + 1.0) for name in groups[p]
                ]
                row.pop(0)
    cuts = cuts or [(s, s + 1) for s in range(stages)]
    return PipelinePlan(
        "digest", "test", "net", "machines", microbatches,
        tuple(Stage(cut, groups[p]) for cut, p in zip(cuts, placement, strict=True)),
        Schedule(tuple(entries)),
    )  # fmt: skip


def make_model(*names, microbatch_size=8):
    cost = LayerCost(microbatch_size, 1.0, 1.0, 1.0, backward_seconds=2.0)
    layers = tuple(Layer(name, 1.0, (cost,)) for name in names)
    return FormatOptions(model=Chain("net", "test", microbatch_size, layers))


def gpt(blocks, **options):
    return make_model("embedding", *(f"layers.{i}" for i in range(blocks)), "head", **options)
