"""Replicas that divide the state of their weights train as the model on one device does."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import UNSHRUNK, examples, slow_after

torch = pytest.importorskip("torch", reason="the executor needs torch")

import tensor_runs  # noqa: E402
from ranks import Ranks  # noqa: E402
from shard_runs import ADAMW, Clipping, Scale, held_bytes, refused, traced  # noqa: E402
from tensor_runs import ENTROPY, SGD, batches, gpt, interrupted, llama, refusal, run, summed  # noqa: E402
from training_plans import fill_and_drain  # noqa: E402

from stagewright.executor.training.stages.learning_rates import RateSchedule  # noqa: E402
from stagewright.formulations.plans.plan import Stage  # noqa: E402
from stagewright.formulations.plans.shards import part_bytes  # noqa: E402

trained = partial(tensor_runs.trained, tolerance=1e-12)

TWO = ("a", "b")
FOUR = [Stage((0, 2), TWO), Stage((2, 4), ("c", "d"))]
KINDS = ["optimizer", "gradients", "weights"]


def with_shards(stages: list[Stage], shards: Any) -> list[Stage]:
    return [replace(stage, shards=shards) for stage in stages]


@pytest.mark.parametrize("shards", KINDS)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW])
def test_two_replicas(ranks: Ranks, shards: str, optimizer: Any) -> None:
    found = trained(ranks, gpt, with_shards([Stage((0, 4), TWO)], shards), optimizer=optimizer)
    numbers = sum(one.numel() for one in gpt().parameters())
    assert sum(own for *_, own in found) == numbers
    assert max(own for *_, own in found) <= numbers / 2 + 4 * 2


@pytest.mark.parametrize("shards", KINDS)
def test_two_stages_of_two_replicas(ranks: Ranks, shards: str) -> None:
    """With a norm far above ``clip_norm``, and losses whose counts are summed up over ranks."""
    trained(ranks, llama, with_shards(FOUR, shards), optimizer=ADAMW, clip_norm=0.05, loss=summed)


@pytest.mark.parametrize("recompute", ["full", "layer"])
def test_layers_are_recomputed(ranks: Ranks, recompute: Any) -> None:
    trained(ranks, gpt, [Stage((0, 4), TWO, recompute=recompute, shards="weights")])


def test_replicas_in_turn(ranks: Ranks) -> None:
    """Three microbatches on two replicas, next to a stage of three; the last one has one device."""
    stages = [
        Stage((0, 2), ("a", "b"), "round-robin", shards="optimizer"),
        Stage((2, 3), ("b", "a", "c"), "round-robin", "full", shards="optimizer"),
        Stage((3, 4), ("c",)),
    ]
    trained(ranks, llama, stages, microbatches=3, optimizer=ADAMW)


def test_a_replica_without_numbers(ranks: Ranks) -> None:
    """Weights of 16 bytes are one replica's alone; the other one has nothing to step."""
    stage = Stage((0, 1), TWO, shards="optimizer")
    for shards in KINDS:
        plan = fill_and_drain([replace(stage, shards=shards)], 1)
        data = [(torch.ones(4, 1).double(), torch.ones(4, 1).double())] * 2
        found = ranks.run(run, 2, plan, [torch.nn.Linear(1, 1)], data, {"loss": torch.nn.MSELoss()})
        assert sorted(own for *_, own in found) == [0, 2]


@st.composite
def mixed_stages(draw: st.DrawFn) -> list[Stage]:
    """Stages of one to three devices in any order, of which some divide their state."""
    stops = [*sorted(draw(st.sets(st.integers(1, 3), max_size=2))), 4]
    found = []
    for layers in pairwise([0, *stops]):
        devices = tuple(draw(st.permutations("abc"))[: draw(st.sampled_from([1, 2, 2, 3]))])
        way = draw(st.sampled_from(["split", "round-robin"]))
        again = draw(st.sampled_from(["none", "full", "layer"]))
        kinds = ["none", *KINDS] if way == "split" else ["none", "optimizer"]
        shards = draw(st.sampled_from(kinds)) if len(devices) > 1 else "none"
        found.append(Stage(layers, devices, way, again, shards=shards))
    return found


@examples(30, quick=4, phases=UNSHRUNK)
@given(stages=mixed_stages(), clips=st.booleans())
def test_any_mixture_of_shards(ranks: Ranks, stages: list[Stage], clips: bool) -> None:
    trained(ranks, llama, stages, samples=36, clip_norm=0.1 if clips else None)


@pytest.mark.covering
@pytest.mark.parametrize("shards", KINDS)
@pytest.mark.parametrize("devices", ["abcd", "adcb"])
def test_replicas_of_groups(ranks: Ranks, shards: Any, devices: str) -> None:
    """Tensor groups of two; the second order has the devices of a position in another order."""
    stage = Stage((0, 4), tuple(devices), tensor=2, shards=shards)
    trained(ranks, gpt, [stage], optimizer=ADAMW, clip_norm=0.05)
    trained(ranks, llama, [replace(stage, recompute="full")], optimizer=SGD)


def test_groups_schedules_and_accumulation(ranks: Ranks) -> None:
    """As replicas that keep all of their state."""
    options = {
        "optimizer": ADAMW,
        "groups": {"norm|bias": {"weight_decay": 0.0}, "head": {"lr": 0.05}},
        "schedule": RateSchedule("cosine", total=4, warmup=1),
        "accumulate": 2,
        "clip_norm": 0.2,
    }
    model, data = gpt().double(), batches(8, 4)
    whole, *found = (
        ranks.run(
            run,
            2,
            fill_and_drain(with_shards([Stage((0, 4), TWO)], shards), 2),
            model,
            data,
            {"loss": ENTROPY, **options},
        )
        for shards in ("none", *KINDS)
    )
    for one in found:
        for name, values in whole[0][0].items():
            torch.testing.assert_close(one[0][0][name], values, rtol=1e-11, atol=1e-12, msg=name)


READ_BY_OTHERS = [
    # Of the first list each writes, and each reads.
    [
        ("optimizer", "weights"),
        ("weights", "gradients"),
        ("gradients", "groups"),
        ("groups", "optimizer"),
    ],
    [("weights", "optimizer"), ("none", "weights"), ("optimizer", "none"), ("none", "gradients")],
]


@pytest.mark.parametrize("pairs", slow_after(1, READ_BY_OTHERS))
def test_checkpoints_hold_whole_tensors(ranks: Ranks, pairs: list[tuple[str, str]]) -> None:
    """Written with any shards, read with any; the optimizer's state too."""
    torch.manual_seed(0)
    model, data = tied().double(), batches(8)
    stages = {
        "none": [Stage((0, 4), ("a",))],
        "optimizer": with_shards([Stage((0, 4), ("b", "a"))], "optimizer"),
        "gradients": with_shards([Stage((0, 4), ("a", "b", "c"))], "gradients"),
        "weights": with_shards([Stage((0, 4), ("a", "c", "b"))], "weights"),
        "groups": with_shards([Stage((0, 4), ("d", "c", "a", "b"), tensor=2)], "weights"),
    }

    def after(kind: str, steps: Any, state: Any) -> dict[str, Any]:
        plan = fill_and_drain(stages[kind], 2)
        world = len({name for stage in stages[kind] for name in stage.devices})
        shares = ranks.run(interrupted, world, plan, model, steps, state, ADAMW)
        keys = [key for share in shares for key in share]
        assert len(keys) == len(set(keys))
        return {key: one for share in shares for key, one in share.items()}

    first = {kind: after(kind, data[:1], None) for kind in stages}
    whole = after("none", data[1:], first["none"])
    assert any(key.startswith("optimizer.") and one.dim() == 2 for key, one in whole.items())
    for kind in (*KINDS, "groups"):
        require_equal(first[kind], first["none"])
    for writer, reader in pairs:
        require_equal(after(reader, data[1:], first[writer]), whole)


def test_a_parameter_that_is_a_number(ranks: Ranks) -> None:
    """Its state has no dimension, as a number of steps has none."""
    torch.manual_seed(0)
    model = [torch.nn.Linear(4, 8).double(), Scale().double(), torch.nn.Linear(8, 5).double()]
    data = [(torch.randn(8, 4).double(), torch.randint(5, (8,))) for _ in range(3)]

    def after(shards: str, world: int, steps: Any, state: Any) -> dict[str, Any]:
        devices = ("a", "b", "c")[:world]
        plan = fill_and_drain([Stage((0, 3), devices, shards=shards)], 2)  # type: ignore[arg-type]
        shares = ranks.run(interrupted, world, plan, model, steps, state, ADAMW)
        return {key: one for share in shares for key, one in share.items()}

    first, whole = after("none", 1, data[:1], None), after("none", 1, data, None)
    assert first["optimizer.1.factor.exp_avg"].shape == ()
    for shards in KINDS:
        require_equal(after(shards, 2, data[:1], None), first)
        require_equal(after(shards, 3, data[1:], first), whole)


def require_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, one in expected.items():
        torch.testing.assert_close(found[key], one, rtol=1e-10, atol=1e-12, msg=key)


def test_held_memory_is_as_predicted(ranks: Ranks) -> None:
    """Between steps; parts are those of the cost model, to the byte."""
    model = gpt()
    sizes = [
        8 * sum(one.numel() for one in part.parameters())
        for part in (model.embedding, *model.blocks, model.head)
    ]
    whole, own = sum(sizes), sum(part_bytes(one, 2) for one in sizes)
    padded = 2 * part_bytes(whole, 2)
    expected = {
        "none": 4 * whole,
        "optimizer": 2 * padded + 2 * part_bytes(whole, 2),
        "gradients": 5 * own,  # of which the weights of both parts
        "weights": 4 * own,
    }
    for shards, size in expected.items():
        plan = fill_and_drain(with_shards([Stage((0, 4), TWO)], shards), 2)
        found = ranks.run(held_bytes, 2, plan, model, batches(8, 2))
        assert max(found) == size


def test_runs_are_traced(ranks: Ranks) -> None:
    """Mixed precision, and the all-reduces of the one stage that has them, with their bytes."""
    stages = [replace(FOUR[0], shards="weights"), replace(FOUR[1], shards="optimizer")]
    trace = ranks.run(traced, 4, fill_and_drain(stages, 2), gpt(), batches(8, 2))[0]
    found = {one.action: one for step in trace.steps for one in step.actions}
    assert "0REDUCE_GRAD" not in found
    model = gpt()
    last = [*model.blocks[1].parameters(), *model.head.parameters()]
    assert found["1REDUCE_GRAD"].bytes == 4 * sum(one.numel() for one in last)
    assert {"0UPDATE", "1UPDATE", "0F0", "0B1"} <= found.keys()


def test_one_stage_may_use_a_parameter_twice(ranks: Ranks) -> None:
    for shards in KINDS:
        trained(ranks, tied, with_shards([Stage((0, 4), TWO)], shards))


def test_frozen_parameters_stay_whole(ranks: Ranks) -> None:
    for shards in KINDS:
        trained(ranks, frozen, with_shards([Stage((0, 4), TWO)], shards), clip_norm=0.1)


# --- What is refused ------------------------------------------------------------------------------


def tied() -> Any:
    model = gpt()
    model.head[1].weight = model.embedding.token.weight
    return model


def frozen() -> Any:
    model = gpt()
    for one in (*model.embedding.parameters(), *model.blocks[0].attention_in.parameters()):
        one.requires_grad_(False)
    return model


PAIR = Stage((0, 4), TWO, shards="weights")


@pytest.mark.parametrize(
    ("stage", "change", "message"),
    [
        (replace(PAIR, offload=True), None, "stage 0 has shards 'weights' and offloads"),
        (replace(PAIR, shards="optimizer"), lambda plan: replace(plan, weights="stash"),
         "stage 0 has shards 'optimizer', which is run only by finite plans that begin with the "
         "forwards and have 'flush' weights; this one has 'stash'"),
    ],
)  # fmt: skip
def test_plans_that_are_not_run(ranks: Ranks, stage: Stage, change: Any, message: str) -> None:
    assert message in refusal(ranks, gpt(), [stage], change)


@pytest.mark.parametrize("shards", KINDS)
def test_tied_stages_are_refused(ranks: Ranks, shards: Any) -> None:
    stages = [Stage((0, 2), ("a",)), Stage((2, 4), ("b", "c"), shards=shards)]
    found = refusal(ranks, tied(), stages)
    message = f"is shared by stages 0 and 1, of which 1 has shards {shards!r}; put its layers into"
    assert message in found


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.Adafactor, "the optimizer Adafactor steps otherwise on a part of a parameter"),
        (
            torch.optim.Muon,
            "which sees parts of parameters as rows of numbers: Muon only supports 2D",
        ),
        (partial(Clipping, lr=0.1), "the optimizer Clipping clips by the norm of one device's"),
    ],
)
def test_optimizers_of_whole_parameters(ranks: Ranks, optimizer: Any, message: str) -> None:
    plan = fill_and_drain([replace(PAIR, shards="optimizer")], 2)
    model = [torch.nn.Linear(4, 4, bias=False) for _ in range(4)]
    assert message in ranks.run(refused, 2, plan, model, {"optimizer": optimizer})[0]


def test_compiled_layers_are_not_gathered(ranks: Ranks) -> None:
    plan = fill_and_drain([PAIR], 2)
    found = ranks.run(refused, 2, plan, gpt(), {"compile": True})[0]
    assert "stage 0 has shards 'weights', whose layers are not compiled" in found
