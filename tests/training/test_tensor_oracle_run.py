"""Groups of devices against a plain torch loop, and what would train another model unseen."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from profiles import slow_after  # noqa: E402
from ranks import Ranks, RanksFailed  # noqa: E402
from tensor_runs import (  # noqa: E402
    ENTROPY,
    SEQUENCE,
    VOCABULARY,
    batches,
    evaluated,
    gpt,
    interrupted,
    llama,
    refusal,
    run,
)
from torch import nn  # noqa: E402
from training_plans import fill_and_drain, of_order  # noqa: E402

from examples.models import Transformer  # noqa: E402
from stagewright.formulations.plans.plan import Stage  # noqa: E402
from stagewright.formulations.schedules.published.one_f_one_b import (  # noqa: E402
    interleaved,
    zb_h1,
)
from stagewright.formulations.schedules.published.zbv import zbv  # noqa: E402

ADAMW = partial(torch.optim.AdamW, lr=0.01, eps=1e-3, weight_decay=0.3)
ALONE = Stage((0, 4), ("a",))
GROUP = [Stage((0, 4), ("a", "b"), tensor=2)]


class Loop:
    """The unsplit model in float64 with autograd, the optimizer and torch's own clipping."""

    def __init__(self, model: Any, optimizer: Any = ADAMW, clip_norm: float | None = None) -> None:
        self.model = deepcopy(model).double()
        self.optimizer = optimizer(self.model.parameters())
        self.clip_norm = clip_norm

    def step(self, inputs: Any, targets: Any) -> float:
        self.optimizer.zero_grad()
        loss = ENTROPY(self.model(inputs), targets)
        loss.backward()
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        return float(loss.detach())


def same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-10, atol=1e-12, msg=name)


def odd() -> Any:
    """A table and a head of 13 tokens, whole on all devices."""
    return Transformer(2, 16, 4, SEQUENCE, 13)


def tied() -> Any:
    model = gpt()
    model.head[1].weight = model.embedding.token.weight
    return model


@pytest.mark.parametrize(
    ("model", "stages"),
    [
        (gpt, GROUP),
        (odd, GROUP),
        (tied, GROUP),
        (llama, [Stage((0, 4), ("a", "b", "c", "d"), tensor=2)]),
        (llama, [Stage((0, 4), ("a", "b", "c", "d"), "round-robin", tensor=2)]),
        (gpt, [Stage((0, 2), ("a", "b"), tensor=2), Stage((2, 4), tuple("bacd"), tensor=2)]),
    ],
)
def test_a_plain_loop_trains_the_same(ranks: Ranks, model: Any, stages: list[Stage]) -> None:
    torch.manual_seed(0)
    whole, data = model().double(), batches(8)
    loop = Loop(whole, clip_norm=0.05)
    losses = [loop.step(*batch) for batch in data]
    world = len({name for stage in stages for name in stage.devices})
    options = {"loss": ENTROPY, "optimizer": ADAMW, "clip_norm": 0.05}
    found = ranks.run(run, world, fill_and_drain(stages, 2), whole, data, options)
    same(found[0][0], loop.model.state_dict())
    assert found[0][1] == pytest.approx(losses, rel=1e-12)


LOOP, LINE, V = interleaved(2, 2, 4), zb_h1(2, 4), zbv(2, 4)
PUBLISHED = {
    "V, weights": (V, 2, {"shards": "weights", "recompute": "full"}),
    "V, tensor": (V, 2, {"tensor": 2}),
    "line, gradients": (LINE, 2, {"shards": "gradients"}),
    "optimizer and tensor": (zb_h1(1, 4), 4, {"tensor": 2, "shards": "optimizer"}),
    "line, tensor": (LINE, 2, {"tensor": 2, "recompute": "layer"}),
    "weights and tensor": (zb_h1(1, 4), 4, {"tensor": 2, "shards": "weights"}),
    "gradients and tensor": (zb_h1(1, 4), 4, {"tensor": 2, "shards": "gradients"}),
    "line, weights": (LINE, 2, {"shards": "weights", "recompute": "layer"}),
    "V, gradients": (V, 2, {"shards": "gradients", "recompute": "full"}),
    "V, optimizer": (V, 2, {"shards": "optimizer"}),
    "loop, optimizer": (LOOP, 2, {"shards": "optimizer"}),
    "loop, gradients": (LOOP, 2, {"shards": "gradients"}),
    "loop, weights": (LOOP, 2, {"shards": "weights"}),
    "loop, tensor": (LOOP, 2, {"tensor": 2}),
}
"""Published orders, devices of a stage, and what they divide."""


@pytest.mark.parametrize("name", slow_after(4, PUBLISHED))
def test_chunks_and_backwards_in_two_parts(ranks: Ranks, name: str) -> None:
    """Every step with its evaluation; a run with other stages writes or reads the checkpoint."""
    torch.manual_seed(0)
    order, width, options = PUBLISHED[name]
    whole, data = (gpt if order is LINE else llama)().double(), batches(16)
    stops = {1: [4], 2: [2, 4], 4: [1, 2, 3, 4]}[len(order.device)]
    plan, other = of_order(order, stops, width, **options), fill_and_drain([ALONE], 4)
    loop, expected = Loop(whole, clip_norm=0.05), []
    for batch in data:
        loss = loop.step(*batch)
        with torch.no_grad():
            expected.append((loss, float(ENTROPY(loop.model(batch[0]), batch[1]))))
    state: Any = None
    given = {"optimizer": ADAMW, "clip_norm": 0.05}
    for batch, used, wanted in zip(data, (plan, other, plan), expected, strict=True):
        world = len({one for stage in used.stages for one in stage.devices})
        found = ranks.run(evaluated, world, used, whole, [batch], state, given)
        for losses, measured, _ in found:
            if losses != [None]:
                assert (losses[0], measured[0]) == pytest.approx(wanted, rel=1e-12)
        state = {key: one for *_, share in found for key, one in share.items()}
    trained = {key[6:]: one for key, one in state.items() if key.startswith("model.")}
    same(trained, loop.model.state_dict())


@pytest.mark.parametrize(("writer", "reader"), [(2, 1), (1, 2)])
def test_a_run_goes_on_at_another_degree(ranks: Ranks, writer: int, reader: int) -> None:
    """As one loop that was never interrupted."""
    torch.manual_seed(0)
    whole, data = llama().double(), batches(8)
    plans = {t: fill_and_drain([Stage((0, 4), tuple("ab"[:t]), tensor=t)], 2) for t in (1, 2)}
    adam = partial(torch.optim.Adam, lr=0.01, eps=1e-3)  # of `interrupted`
    loop = Loop(whole, adam)
    for batch in data:
        loop.step(*batch)

    def after(t: int, steps: Any, state: Any) -> dict[str, Any]:
        shares = ranks.run(interrupted, t, plans[t], whole, steps, state)
        return {key: one for share in shares for key, one in share.items()}

    found = after(reader, data[1:], after(writer, data[:1], None))
    same(
        {key[6:]: one for key, one in found.items() if key.startswith("model.")},
        loop.model.state_dict(),
    )


# --- What would train another model ---------------------------------------------------------------


def planned(**rules: Any) -> Any:
    """A GPT whose blocks have another ``tp_plan``."""
    model = gpt()
    for block in model.blocks:
        block.tp_plan = {**block.tp_plan, **rules}
    return model


def whole_keys() -> Any:
    """Every device has all keys and values, but queries of its own."""
    model = llama()
    for block in model.blocks:
        block.tp_plan = {
            name: style for name, style in block.tp_plan.items() if name not in ("key", "value")
        }
    return model


def normed_queries() -> Any:
    """A norm of each head, whole on all devices: each has the gradient of its own heads."""
    model = llama()
    for block in model.blocks:
        parts = nn.Unflatten(-1, (-1, 4)), nn.RMSNorm(4), nn.Flatten(-2)
        block.query = nn.Sequential(block.query, *parts)
        block.tp_plan = {**block.tp_plan, "query.0": block.tp_plan["query"]}
        del block.tp_plan["query"]
    return model


def between() -> Any:
    """A parameter between the two layers of a divided pair."""
    model = gpt()
    for block in model.blocks:
        block.feed_forward[2] = nn.PReLU()
    return model


class Outer(nn.Module):
    """Its plan divides what that of its part has divided."""

    tp_plan = {"inner.heads": "divide"}  # noqa: RUF012

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def nested() -> Any:
    model = gpt()
    model.blocks = nn.ModuleList(Outer(block) for block in model.blocks)
    return model


def computed_weight() -> Any:
    model = llama()
    for block in model.blocks:
        one = block.gate
        one.weight_of_it = one.weight
        del one.weight
        one.weight = one.weight_of_it.detach()
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: planned(attention_in="colwise/three"), "'colwise/three' is not a style"),
        (lambda: planned(attention_in="colwise/"), "'colwise/' is not a style"),
        (lambda: planned(attention_in="colwise/0"), "'colwise/0' is not a style"),
        (lambda: planned(attention_in=None), "must map names to styles, got None among them"),
        (nested, "names a number that is divided already"),
        (computed_weight, "'gate': its weight is not a parameter, but computed from others"),
        (whole_keys, "is whole on each of 2 devices, but its gradients there differ (norms "),
        (normed_queries, "parameter 'blocks.0.query.2.weight' of stage 0 is whole on each of 2"),
        (between, "parameter 'blocks.0.feed_forward.2.weight' of stage 0 is whole on each of 2"),
    ],
)
def test_what_would_train_another_model(
    ranks: Ranks, model: Callable[[], Any], message: str
) -> None:
    torch.manual_seed(0)
    assert message in refusal(ranks, model(), GROUP)


def test_an_optimizer_of_whole_tensors_is_refused(ranks: Ranks) -> None:
    """Adafactor keeps means of rows and columns, which those of a shard are not."""
    options = {"loss": ENTROPY, "optimizer": partial(torch.optim.Adafactor, lr=0.01)}
    data = batches(4, 1)
    for t in (1, 2):
        plan = fill_and_drain([Stage((0, 4), tuple("ab"[:t]), tensor=t)], 2)
        if t == 1:
            ranks.run(run, t, plan, gpt(), data, options)
            continue
        message = "InputError: the optimizer Adafactor steps otherwise on a part of a parameter"
        with pytest.raises(RanksFailed, match=message):
            ranks.run(run, t, plan, gpt(), data, options)


@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_a_divided_table_has_no_more_rows_than_a_whole_one(ranks: Ranks, token: int) -> None:
    ((tokens, targets),) = batches(4, 1)
    tokens[0, 0] = token
    options = {"loss": ENTROPY, "optimizer": ADAMW}
    with pytest.raises(RanksFailed, match="IndexError: index out of range"):
        ranks.run(run, 2, fill_and_drain(GROUP, 2), llama(), [(tokens, targets)], options)
