"""Stages that groups of devices compute together train as the model on one device does."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import UNSHRUNK, examples

torch = pytest.importorskip("torch", reason="the executor needs torch")

from ranks import Ranks  # noqa: E402
from tensor_runs import (  # noqa: E402
    ADAM,
    SEQUENCE,
    VOCABULARY,
    batches,
    constructed,
    gpt,
    interrupted,
    llama,
    refusal,
    summed,
    trained,
)
from training_plans import fill_and_drain  # noqa: E402

from examples.models import Transformer  # noqa: E402
from stagewright.formulations.plans.plan import Stage  # noqa: E402


@pytest.mark.parametrize("model", [gpt, llama])
def test_a_group_trains_as_one_device(ranks: Ranks, model: Any) -> None:
    found = trained(ranks, model, [Stage((0, 4), ("a", "b"), tensor=2)])
    whole = sum(one.numel() for one in model().parameters())
    assert [own for *_, own in found] == [found[0][2]] * 2
    assert whole / 2 < found[0][2] < (0.8 if model is gpt else 0.55) * whole


TWO = {
    "a group, then a group": [((0, 2), "ab", 2), ((2, 4), "cd", 2)],
    "a device, then a group": [((0, 2), "a", 1), ((2, 4), "bc", 2)],
    "a group, then a device": [((0, 2), "ab", 2), ((2, 4), "c", 1)],
    "two groups of the same devices": [((0, 2), "ab", 2), ((2, 4), "ba", 2)],
    "replicas, then a group of them": [((0, 2), "ab", 1), ((2, 4), "ab", 2)],
    "a group, then replicas": [((0, 2), "ab", 2), ((2, 4), "bc", 1)],
    "two replicas of groups": [((0, 4), "abcd", 2)],
    "two replicas, in an order of their own": [((0, 1), "abcd", 1), ((1, 4), "dbca", 2)],
    "a group of four": [((0, 1), "a", 1), ((1, 3), "badc", 4), ((3, 4), "b", 1)],
}


@pytest.mark.covering
@pytest.mark.parametrize("name", TWO)
def test_stages_of_groups(ranks: Ranks, name: str) -> None:
    model = gpt if name == "a group of four" else llama
    stages = [Stage(layers, tuple(devices), tensor=t) for layers, devices, t in TWO[name]]
    trained(ranks, model, stages)


@st.composite
def mixed_stages(draw: st.DrawFn) -> list[Stage]:
    """Stages of one to four devices in any order, of which some are groups."""
    stops = [*sorted(draw(st.sets(st.integers(1, 3), max_size=2))), 4]
    found = []
    for layers in pairwise([0, *stops]):
        count = draw(st.sampled_from([1, 2, 2, 4]))
        devices = tuple(draw(st.permutations("abcd"))[:count])
        way = draw(st.sampled_from(["split", "round-robin"]))
        again = draw(st.sampled_from(["none", "full"]))
        tensor = draw(st.sampled_from([1, 2])) if count > 1 else 1
        found.append(Stage(layers, devices, way, again, tensor=tensor))
    return found


@examples(30, quick=4, phases=UNSHRUNK)
@given(stages=mixed_stages(), clips=st.booleans())
def test_any_mixture_of_groups(ranks: Ranks, stages: list[Stage], clips: bool) -> None:
    trained(ranks, llama, stages, samples=16, clip_norm=0.1 if clips else None)


def test_groups_in_turn_recompute(ranks: Ranks) -> None:
    stages = [Stage((0, 4), ("a", "b", "c", "d"), "round-robin", "layer", tensor=2)]
    trained(ranks, llama, stages, microbatches=3)
    trained(ranks, gpt, [Stage((0, 4), ("a", "b"), recompute="full", tensor=2)])


@pytest.mark.covering
@pytest.mark.parametrize(
    "stages",
    [
        [Stage((0, 4), ("a", "b"), tensor=2)],
        [Stage((0, 2), ("a",)), Stage((2, 4), ("b", "c"), tensor=2)],
        [Stage((0, 4), ("a", "b", "c", "d"), tensor=2)],
    ],
    ids=["one group", "a device and a group", "two groups"],
)
@pytest.mark.parametrize("model", [gpt, llama])
def test_the_norm_counts_each_parameter_once(ranks: Ranks, model: Any, stages: list[Stage]) -> None:
    """A norm far above ``clip_norm``, with losses whose counts are summed up over ranks."""
    trained(ranks, model, stages, clip_norm=0.05)
    trained(ranks, model, stages, clip_norm=0.05, loss=summed, optimizer=ADAM)


def test_checkpoints_hold_whole_tensors(ranks: Ranks) -> None:
    """Written by any degree, read by any degree; the optimizer's state too."""
    torch.manual_seed(0)
    model, data = llama().double(), batches(8)
    plans = {
        1: fill_and_drain([Stage((0, 4), ("a",))], 2),
        2: fill_and_drain([Stage((0, 2), ("a", "b"), tensor=2), Stage((2, 4), ("b",))], 2),
        4: fill_and_drain([Stage((0, 4), ("a", "b", "c", "d"), tensor=2)], 2),
    }

    def after(world: int, steps: Any, state: Any) -> dict[str, Any]:
        shares = ranks.run(interrupted, world, plans[world], model, steps, state)
        keys = [key for share in shares for key in share]
        assert len(keys) == len(set(keys))
        return {key: one for share in shares for key, one in share.items()}

    first = {world: after(world, data[:1], None) for world in plans}
    whole = after(1, data[1:], first[1])
    for world in (2, 4):
        for key, one in first[1].items():
            torch.testing.assert_close(first[world][key], one, rtol=1e-11, atol=1e-13, msg=key)
    for writer, reader in ((2, 4), (4, 2), (2, 1), (1, 2)):
        found = after(reader, data[1:], first[writer])
        assert found.keys() == whole.keys()
        for key, one in whole.items():
            torch.testing.assert_close(found[key], one, rtol=1e-10, atol=1e-12, msg=key)


# --- What is refused ------------------------------------------------------------------------------


def group(layers: int = 4, **changes: Any) -> list[Stage]:
    return [Stage((0, layers), ("a", "b"), tensor=2, **changes)]


def planned(**rules: Any) -> Any:
    """A GPT whose blocks have another ``tp_plan``."""
    model = gpt()
    for block in model.blocks:
        block.tp_plan = {**block.tp_plan, **rules}
    return model


def with_dropout() -> Any:
    model = gpt()
    model.blocks[1].feed_forward.insert(3, torch.nn.Dropout(0.5))
    model.blocks[1].tp_plan = {"feed_forward.1": "colwise", "feed_forward.4": "rowwise"}
    return model


def tied_llama() -> Any:
    model = llama()
    model.head.logits.weight = model.embedding.token.weight
    return model


def half_tied_llama() -> Any:
    """One table in two modules, of which a plan divides one."""
    model = tied_llama()
    model.head.tp_plan = {}
    return model


def twice_tied_llama() -> Any:
    """One table, divided by rows and by columns."""
    model = tied_llama()
    model.head.tp_plan = {"logits": "rowwise_rep"}
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: planned(attention_inn="colwise"), "'attention_inn' names no module in it"),
        (lambda: planned(attention_in="column"), "'column' is not a style; there are colwise, "),
        (lambda: planned(attention_norm="colwise"),
         "'attention_norm' is a LayerNorm; colwise divides a plain Linear"),
        (lambda: planned(attention_in="colwise/7"),
         "'attention_in': 48 features in 7 parts do not divide among 2 devices"),
        (lambda: planned(head="divide"), "'head' is not a whole number of a module in it"),
        (lambda: planned(**{"*.1": "rowwise"}), "'feed_forward.1' is a ColumnLinear"),
        (lambda: Transformer(2, 18, 3, SEQUENCE, VOCABULARY),
         "'heads' is 3, which does not divide among 2 devices"),
        (half_tied_llama, "parameter 'embedding.token.weight' is used in several modules, of"),
        (twice_tied_llama, "'logits': its parameter is used in several modules, which are divided"),
        (with_dropout, "layer 'blocks.1' draws random numbers and is divided among the devices"),
        (lambda: [torch.nn.Linear(1, 1)] * 4,
         "none of its layers (0, 1, 2, 3) says how it is divided: give a module in them a tp_plan"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_divided(ranks: Ranks, model: Any, message: str) -> None:
    assert message in refusal(ranks, model(), group())


def tied() -> Any:
    model = gpt()
    model.head[1].weight = model.embedding.token.weight
    return model


@pytest.mark.parametrize(
    ("stages", "change", "message"),
    [
        (group(offload=True), None, "stage 0 has tensor degree 2 and offloads"),
        (group(), lambda plan: replace(plan, weights="stash"),
         "stage 0 has tensor degree 2, which is run only by finite plans that begin with the "
         "forwards and have 'flush' weights; this one has 'stash'"),
    ],
)  # fmt: skip
def test_plans_that_are_not_run(
    ranks: Ranks, stages: list[Stage], change: Any, message: str
) -> None:
    assert message in refusal(ranks, gpt(), stages, change)


def test_a_divided_stage_shares_no_parameter(ranks: Ranks) -> None:
    stages = [Stage((0, 2), ("a",)), Stage((2, 4), ("b", "c"), tensor=2)]
    found = refusal(ranks, tied(), stages)
    assert "parameter 'embedding.token.weight' is shared by stages 0 and 1, of which 1 has" in found
    trained(ranks, tied, group())  # within one stage it is whole, as no style divides it
    trained(ranks, tied_llama, group())  # or divided in all of its modules


def test_whole_layers_are_named(ranks: Ranks) -> None:
    plan = fill_and_drain(group(), 2)
    told = ranks.run(constructed, 2, plan, gpt(), batches(4, 1)[0])
    whole = "stage 0: each of 2 devices computes all of the layers embedding, head, which no tp"
    assert whole in told[0]
    assert "computes all" not in told[1]
