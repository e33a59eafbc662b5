"""Models that were written elsewhere train by plans as in torch's plain loop."""

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

import training_plans as make  # noqa: E402
from library_kinds import KINDS  # noqa: E402
from ranks import Ranks, RanksFailed  # noqa: E402

from benchmarks.any_model import by_plan, layers_of  # noqa: E402
from benchmarks.any_models import MODELS, TRACKING, AnyModel  # noqa: E402
from benchmarks.plain_loop import difference, loop  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan, Stage  # noqa: E402

STEPS, MICROBATCHES, SAMPLES = 3, 4, 4
NO_SAMPLES = "has no samples in its first dimension"


def two_stages(layers: int) -> PipelinePlan:
    return make.one_f_one_b(straight(layers, 2), MICROBATCHES)


def four_stages(layers: int) -> PipelinePlan:
    return make.one_f_one_b(straight(layers, 4), MICROBATCHES)


def zero_bubble(layers: int) -> PipelinePlan:
    return make.zero_bubble_h1(straight(layers, 2), MICROBATCHES)


def replicas(layers: int) -> PipelinePlan:
    return make.one_f_one_b([Stage((0, layers), ("d0", "d1"))], MICROBATCHES)


def two_by_two(layers: int) -> PipelinePlan:
    return make.one_f_one_b(doubled(layers, "round-robin"), MICROBATCHES)


def divided(layers: int) -> PipelinePlan:
    return make.one_f_one_b(doubled(layers, "split"), MICROBATCHES)


def gathered(layers: int) -> PipelinePlan:
    stage = Stage((0, layers), ("d0", "d1"), shards="weights")
    return make.one_f_one_b([stage], MICROBATCHES)


def optimizer_parts(layers: int) -> PipelinePlan:
    stage = Stage((0, layers), ("d0", "d1"), "round-robin", shards="optimizer")
    return make.one_f_one_b([stage], MICROBATCHES)


def straight(layers: int, count: int) -> list[Stage]:
    return make.straight([layers * (s + 1) // count - layers * s // count for s in range(count)])


def doubled(layers: int, replication: Any) -> list[Stage]:
    """Two stages on two devices each."""
    first, last = straight(layers, 2)
    return [
        Stage(first.layers, ("a0", "a1"), replication),
        Stage(last.layers, ("b0", "b1"), replication),
    ]


LAYOUTS = {
    plan.__name__: plan
    for plan in (
        two_stages,
        four_stages,
        zero_bubble,
        replicas,
        two_by_two,
        divided,
        gathered,
        optimizer_parts,
    )
}
# Of a microbatch's samples those of each last device: halves, or a half of either half.
HALVES = ((0, 1), (2, 3))
SHARES = {"replicas": HALVES, "gathered": HALVES, "divided": ((0, 2), (1, 3))}
# A contrastive loss is of all samples at once; the routers' logits are of samples x tokens. Batch
# norms that track see whole microbatches in a pipeline alone.
REFUSED = {
    ("clip", "replicas"): "computes with the number of its samples",
    ("clip", "divided"): "computes with the number of its samples",
    ("clip", "gathered"): "computes with the number of its samples",
    ("mixtral", "divided"): NO_SAMPLES,
}
PIPELINES = ("two_stages", "four_stages", "zero_bubble")
QUICK = {("gpt2", "zero_bubble"), ("llama", "gathered")}
FURTHER = {
    *(("llama", "divided"), ("llama", "optimizer_parts")),
    *(("resnet18", "divided"), ("resnet18", "two_by_two")),
}


def runs() -> list[Any]:
    """Every model by every other layout, in turn; `benchmarks.any_model` has them all."""
    found = []
    for turn, one in enumerate(MODELS.values()):
        absent = find_spec(one.package) is None
        skip = pytest.mark.skipif(absent, reason=f"{one.package} is not installed")
        for number, layout in enumerate(PIPELINES if one.name == TRACKING else LAYOUTS):
            told = (one.name, layout) in QUICK | REFUSED.keys() | FURTHER
            if not told and (turn + number) % 2:
                continue
            marks = [skip, *([] if (one.name, layout) in QUICK else [pytest.mark.slow])]
            found.append(pytest.param(one, layout, id=f"{one.name}-{layout}", marks=marks))
    return found


def optimizer(one: AnyModel) -> Any:
    return partial(torch.optim.SGD, lr=one.lr, momentum=0.9)


def trained(_: Any, rank: int, name: str, plan: PipelinePlan) -> Any:
    """The state on rank 0, and the losses where the last stage is."""
    one = (MODELS | KINDS)[name]
    batches = [
        (batch, ()) if isinstance(batch, dict) else batch
        for batch in one.batches(SAMPLES * MICROBATCHES, STEPS)
    ]
    executor = Executor(
        plan, one.make(), None, optimizer(one), example=batches[0][0], dtype=torch.float64
    )
    losses = [executor.step(*batch) for batch in batches]
    return executor.parameters_on_first_rank(), losses


@pytest.mark.parametrize(("one", "layout"), runs())
def test_a_plan_trains_the_model(ranks: Ranks, one: AnyModel, layout: str) -> None:
    plan = LAYOUTS[layout](len(layers_of(one)))
    if refusal := REFUSED.get((one.name, layout)):
        with pytest.raises(RanksFailed, match=refusal):
            run(ranks, one, plan)
        return
    require_equal(one, run(ranks, one, plan), SHARES.get(layout, ()))


def run(ranks: Ranks, one: AnyModel, plan: PipelinePlan) -> Any:
    world = len({name for stage in plan.stages for name in stage.devices})
    return ranks.run(trained, world, one.name, plan, timeout_seconds=300.0)


def require_equal(one: AnyModel, results: Any, shares: Any = ()) -> None:
    """Refuse results of ranks that differ from those of the plain loop."""
    model = one.make()
    batches = list(one.batches(SAMPLES * MICROBATCHES, STEPS))
    expected = loop(model, batches, MICROBATCHES, optimizer(one), shares)
    states = [plainly_named(state) for state in (expected.state, one.make().state_dict())]
    assert difference(results[0][0], *states) <= one.rounding
    reported = [losses for _, losses in results if losses[0] is not None]
    assert reported
    for losses in reported:
        assert losses == pytest.approx(expected.losses, rel=1e-9)


def plainly_named(state: dict[str, Any]) -> dict[str, Any]:
    """The state under the names of modules that are not compiled."""
    return {name.replace("_orig_mod.", ""): one for name, one in state.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_trains_what_libraries_do(ranks: Ranks, kind: str) -> None:
    one = KINDS[kind]
    require_equal(one, run(ranks, one, zero_bubble(len(layers_of(one)))))


def test_constants_between_blocks_are_no_parameters() -> None:
    _, apart = by_plan(KINDS["checks"])
    assert apart <= KINDS["checks"].rounding


def in_the_encoder(replication: Any) -> PipelinePlan:
    """T5 cut after its first block, whose position bias all others use: (1, heads, q, k)."""
    stages = [
        Stage((0, 2), ("a0", "a1"), replication),
        Stage((2, len(layers_of(MODELS["t5"]))), ("b0", "b1"), replication),
    ]
    return make.one_f_one_b(stages, MICROBATCHES)


needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)


@pytest.mark.slow
@needs_transformers
def test_a_value_without_samples_passes_between_whole_microbatches(ranks: Ranks) -> None:
    require_equal(MODELS["t5"], run(ranks, MODELS["t5"], in_the_encoder("round-robin")))


@pytest.mark.slow
@needs_transformers
def test_a_value_without_samples_is_not_divided(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=NO_SAMPLES):
        run(ranks, MODELS["t5"], in_the_encoder("split"))
