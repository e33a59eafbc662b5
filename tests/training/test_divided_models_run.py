"""Models of transformers, divided by the library's own plans, train as in torch's plain loop."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from profiles import slow_after

torch = pytest.importorskip("torch", reason="the executor needs torch")
pytest.importorskip("benchmarks.torchvision_operators")
if find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)

import divided_models as divided  # noqa: E402
from divided_models import MICROBATCHES, MODELS, SGD, data_of, planned, refused, stages_of, trained  # noqa: E402
from ranks import Ranks  # noqa: E402

from benchmarks.plain_loop import difference, loop  # noqa: E402
from stagewright.executor.capture.layers import PLANS  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan, Stage  # noqa: E402

TIED = {"gpt2", "llama-tied"}
ALONE = ("one group", "replicas of groups", "groups in turn")
IN_STAGES = ("two groups", "a device, then a group", "a group, then replicas")
# Of a microbatch's samples those of each replica.
SHARES = {name: ((0, 1), (2, 3)) for name in ("replicas of groups", "a group, then replicas")}
QUICK = {("gpt2", "one group")}  # two groups of a llama: test_stored_weights_are_divided


def layers_of(name: str) -> int:
    return 8 if name.startswith("gpt2") else 7


def plan_of(name: str, layout: str) -> PipelinePlan:
    return planned(stages_of(layout, layers_of(name)))


def run(ranks: Ranks, name: str, layout: str, change: Any = None, **options: Any) -> Any:
    plan = plan_of(name, layout)
    world = len({device for stage in plan.stages for device in stage.devices})
    return ranks.run(trained, world, name, plan, change, options, timeout_seconds=300.0)


def require_equal(name: str, results: Any, shares: Any = ()) -> None:
    """Refuse results of ranks that differ from those of the plain loop on the whole model."""
    one = MODELS[name]
    expected = loop(one.make(), data_of(one), MICROBATCHES, SGD, shares)
    assert difference(results[0][0], expected.state, one.make().state_dict()) <= 1e-10
    for key, tensor in expected.state.items():
        torch.testing.assert_close(results[0][0][key], tensor, rtol=1e-12, atol=1e-15, msg=key)
    reported = [losses for _, losses, *_ in results if losses[0] is not None]
    assert reported
    for losses in reported:
        assert losses == pytest.approx(expected.losses, rel=1e-12)


def layouts_of(name: str) -> tuple[str, ...]:
    """All for one model of each kind; those with the same modules have two."""
    if name in TIED:
        return ALONE
    if name in ("llama", "qwen3", "gpt2-untied"):
        return (*ALONE, *IN_STAGES)
    return "one group", "two groups"


def runs() -> list[Any]:
    found = []
    for name in MODELS:
        for layout in layouts_of(name):
            marks = [] if (name, layout) in QUICK else [pytest.mark.slow]
            found.append(pytest.param(name, layout, id=f"{name}-{layout}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "layout"), runs())
def test_a_group_trains_the_model(ranks: Ranks, name: str, layout: str) -> None:
    results = run(ranks, name, layout)
    require_equal(name, results, SHARES.get(layout, ()))
    if layout == "one group" and name not in TIED | {"gpt2-untied"}:  # all but the norms
        whole = sum(one.numel() for one in MODELS[name].make().parameters())
        assert [own for *_, own in results] == [pytest.approx(whole / 2, rel=0.02)] * 2


@pytest.mark.slow
def test_clipping_counts_each_parameter_once(ranks: Ranks) -> None:
    """As torch's own clipping of the whole model; norms of heads are whole on both devices."""
    (found, losses, *_), _ = run(ranks, "qwen3", "one group", clip_norm=0.05)
    one = MODELS["qwen3"]
    model = one.make()
    optimizer = SGD(model.parameters())
    for batch, loss in zip(data_of(one), losses, strict=True):
        optimizer.zero_grad()
        result = model(**batch).loss
        result.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        assert loss == pytest.approx(result.item(), rel=1e-12)
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-11, atol=1e-14, msg=key)


# --- What is refused ------------------------------------------------------------------------------


def with_rules(model: Any, **rules: str | None) -> None:
    """Another plan of the whole model; None for a pattern leaves it out."""
    plan = dict(model.tp_plan)
    for ending, style in rules.items():
        pattern = next((one for one in plan if one.endswith(ending)), f"model.layers.*.{ending}")
        plan[pattern] = style
    model.tp_plan = {pattern: style for pattern, style in plan.items() if style is not None}


def with_blocks(model: Any, **rules: str | None) -> None:
    """Another plan of GPT-2's blocks."""
    (known,) = PLANS.values()
    plan = {**known, **{key.replace("__", "."): style for key, style in rules.items()}}
    for block in model.transformer.h:
        block.tp_plan = {pattern: style for pattern, style in plan.items() if style is not None}


def with_dropout(model: Any) -> None:
    for block in model.transformer.h:
        block.mlp.dropout.p = 0.5


PAIR = "does the tp_plan name every layer of a pair"
LIBRARY = {
    "queries stay whole": ({"q_proj": None}, PAIR),
    "keys and values stay whole": ({"k_proj": None, "v_proj": None}, PAIR),
    "the output stays whole": ({"o_proj": None}, PAIR),
    "one of the pair of gates": ({"gate_proj": None}, PAIR),
    "the first of a pair": ({"gate_proj": None, "up_proj": None}, PAIR),
    "the last of a pair": ({"down_proj": None}, PAIR),
    "queries are joined": ({"q_proj": "colwise_rep"}, PAIR),
    "experts": ({"q_proj": "moe_tp_experts"},
        "tp_plan of LlamaForCausalLM: 'model.layers.*.self_attn.q_proj': 'moe_tp_experts', "
        "which divides experts, is not run"),
    "the sequence": ({"down_proj": "sequence_parallel"},
        "'model.layers.*.mlp.down_proj': 'sequence_parallel', which divides the sequence, is not"),
    "a table by columns": ({"embed_tokens": "colwise"},
        "'model.embed_tokens' is a Embedding; colwise divides a plain Linear or Conv1D"),
}  # fmt: skip
NORMS = {
    "norms of heads": ({"q_norm": None}, "is whole on each of 2 devices, but its gradients there"),
    "sums of whole gradients": ({"input_layernorm": "replicated_with_grad_allreduce"},
        "the gradients of parameter 'model.layers.3.input_layernorm.weight' are equal on the 2 "),
    "no sums for them": ({"k_norm": "replicate"}, "is whole on each of 2 devices, but its"),
}  # fmt: skip
BLOCKS = {
    "the number is not divided": ({"attn__split_size": None}, PAIR),
    "the last of a pair": ({"mlp__c_proj": None}, PAIR),
    "a number of parts": ({"mlp__c_fc": "colwise/3"},
        "tp_plan of GPT2Block 'transformer.h.0': 'mlp.c_fc': 128 features in 3 parts do not"),
}  # fmt: skip


def wrong_plans() -> list[Any]:
    found = []
    for name, change, plans in (
        ("llama", with_rules, LIBRARY),
        ("qwen3", with_rules, NORMS),
        ("gpt2", with_blocks, BLOCKS),
    ):
        for number, (title, (rules, message)) in enumerate(plans.items()):
            marks = [pytest.mark.slow] if number else []
            changed = partial(change, **rules)
            found.append(pytest.param(name, changed, message, id=f"{name}-{title}", marks=marks))
    return found


def refusal(ranks: Ranks, name: str, change: Any, layout: str = "one group") -> str:
    plan = plan_of(name, layout)
    world = len({device for stage in plan.stages for device in stage.devices})
    told = ranks.run(refused, world, name, plan, change, {}, timeout_seconds=300.0)
    return next(text for text in told if text)


@pytest.mark.parametrize(("name", "change", "message"), wrong_plans())
def test_a_wrong_plan_is_refused(ranks: Ranks, name: str, change: Any, message: str) -> None:
    assert message in refusal(ranks, name, change)


def test_dropout_in_divided_layers_is_refused(ranks: Ranks) -> None:
    told = refusal(ranks, "gpt2", with_dropout)
    assert "layer 'transformer.h.0' draws random numbers and is divided among" in told


@pytest.mark.parametrize("name", slow_after(1, sorted(TIED)))
def test_a_table_that_stages_share_is_refused(ranks: Ranks, name: str) -> None:
    told = refusal(ranks, name, None, "two groups")
    assert "is shared by stages 0 and 1, of which 0 has tensor degree 2; put its layers" in told


def few_heads(_: Any, rank: int, name: str, **options: Any) -> str:
    """Why a model of other sizes is not divided."""
    one = divided.of_transformers(*divided.CLASSES[name], **{**divided.OPTIONS[name], **options})
    MODELS["few"] = one
    return refused(None, rank, "few", plan_of(name, "one group"), None, {})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    slow_after(1, [
        ("llama", {"num_key_value_heads": 1},
         "'model.layers.0.self_attn.k_proj': 1 heads of 8 features do not divide among 2 devices"),
        ("gpt2", {"n_embd": 24, "n_head": 3},
         "'attn.c_attn': 3 heads of 8 features do not divide among 2 devices"),
        ("llama", {"vocab_size": 67}, "67 features do not divide among 2 devices"),
    ]),
)  # fmt: skip
def test_what_does_not_divide(
    ranks: Ranks, name: str, options: dict[str, Any], message: str
) -> None:
    told = ranks.run(partial(few_heads, **options), 2, name, timeout_seconds=300.0)
    assert all(message in text for text in told)


def parallelized(_: Any, rank: int, plan: PipelinePlan) -> str:
    """The refusal of a model that torch has divided."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2,))

    def change(model: Any) -> None:
        parallelize_module(model.model.layers[0].mlp, mesh, {"up_proj": ColwiseParallel()})

    return refused(None, rank, "llama", plan, change, {})


def test_a_model_that_is_divided_already_is_refused(ranks: Ranks) -> None:
    told = ranks.run(parallelized, 2, plan_of("llama", "one group"))
    message = "parameter 'model.layers.0.mlp.up_proj.weight' is a DTensor, as parallelize_module"
    assert all(message in text for text in told)


# --- Checkpoints and stored weights ---------------------------------------------------------------


def shares(
    _: Any, rank: int, name: str, plan: PipelinePlan, steps: Any, state: Any
) -> dict[str, Any]:
    """This rank's share of the state after ``steps`` mini-batches from ``state`` on."""
    executor = divided.executor_of(name, plan, MODELS[name].make())
    if state is not None:
        executor.load_state({key: state[key] for key in executor.wanted(state)}, 1)
    for batch in steps:
        executor.step(batch)
    return {key: one.clone() for key, one in executor.state().items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(("writer", "reader"), [(2, 1), (1, 2), (2, 2)])
def test_a_run_goes_on_at_another_degree(ranks: Ranks, name: str, writer: int, reader: int) -> None:
    batches, layers = data_of(MODELS[name]), layers_of(name)
    plans = {t: planned([Stage((0, layers), tuple("ab"[:t]), tensor=t)]) for t in (1, 2)}

    def after(t: int, steps: Any, state: Any) -> dict[str, Any]:
        found = ranks.run(shares, t, name, plans[t], steps, state, timeout_seconds=300.0)
        return {key: one for share in found for key, one in share.items()}

    found = after(reader, batches[1:], after(writer, batches[:1], None))
    model = MODELS[name].make()
    loop(model, batches, MICROBATCHES, SGD)
    for key, tensor in model.named_parameters():  # a tied one under its first name alone
        kept = found[f"model.{key}"]
        torch.testing.assert_close(kept, tensor.detach(), rtol=1e-12, atol=1e-15, msg=key)


def from_file(_: Any, rank: int, name: str, plan: PipelinePlan, path: Path) -> Any:
    """The state of a model whose weights are stored, and what is in memory before it is divided."""
    with divided.numbers_before_division() as found:
        executor = divided.executor_of(name, plan, MODELS[name].make, weights=path)
    losses = [executor.step(batch) for batch in data_of(MODELS[name])]
    return executor.parameters_on_first_rank(), losses, found[0]


@pytest.mark.skipif(find_spec("safetensors") is None, reason="safetensors is not installed")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", "two groups"),
        pytest.param("gpt2", "one group", marks=pytest.mark.slow),
        pytest.param("llama-tied", "one group", marks=pytest.mark.slow),
    ],
)
def test_stored_weights_are_divided(ranks: Ranks, tmp_path: Path, name: str, layout: str) -> None:
    """A rank makes and reads its own stage alone, whole, and divides it then."""
    from safetensors.torch import save_model

    model = MODELS[name].make()
    for one in model.parameters():
        torch.nn.init.uniform_(one, -0.1, 0.1)
    path = tmp_path / "model.safetensors"
    save_model(model, str(path))
    plan = plan_of(name, layout)
    world = len({device for stage in plan.stages for device in stage.devices})
    results = ranks.run(from_file, world, name, plan, path, timeout_seconds=300.0)
    sizes = {key: one.numel() for key, one in model.named_parameters()}
    first = ("model.embed_tokens", "model.layers.0.", "model.layers.1.")  # of three layers
    here = sum(size for key, size in sizes.items() if key.startswith(first))
    whole = sum(sizes.values())
    own = [whole] * 2 if layout == "one group" else [here, here, whole - here, whole - here]
    assert [held for *_, held in results] == own
    expected = loop(model, data_of(MODELS[name]), MICROBATCHES, SGD)
    for key, tensor in expected.state.items():
        torch.testing.assert_close(results[0][0][key], tensor, rtol=1e-12, atol=1e-15, msg=key)
