"""Exports to torchtitan, read by the installed release: configuration, stages and schedules.

It is no dependency: ``pip install torchtitan==0.3.0 triton`` next to torch 2.13.
"""

import sys
from dataclasses import replace

import pytest
from exported_plans import MICROBATCHES, gpt, make_plan, random_rows
from layout_problems import DEEPSEEK, LLAMA, make_problem
from releases import alone, require_release

from stagewright.executor.export import export
from stagewright.executor.export.layouts import LAYOUT_FORMATS, export_layout
from stagewright.formulations.parallelism.layout import Layout
from stagewright.graphs.models.architecture import GroupedAttention
from stagewright.graphs.models.stated import RotaryScaling, Routing, Stated

BLOCKS = 6  # of its Llama 3 for debugging
DEBUG = {"hidden": 256, "vocabulary": 2048}
STATED = Stated(
    rotary_scaling=RotaryScaling("yarn", 40, 4096, mscale=1.0, mscale_all_dim=1.0),
    routing=Routing(scale=2.5),
)
SMALL = replace(LLAMA, layers=BLOCKS, **DEBUG)


@pytest.fixture(autouse=True, scope="module")
def _installed():
    require_release("torchtitan", "0.3.0")


@pytest.fixture
def parsed(tmp_path, monkeypatch):
    """The configuration that torchtitan's own parser makes of files and its debug model."""

    def parse(files, model="llama3"):
        from torchtitan.config import ConfigManager

        for name, text in files.items():
            (tmp_path / name).write_text(text)
        (module,) = (name.removesuffix(".py") for name in files if name.endswith(".py"))
        (tmp_path / "planned_registry.py").write_text(
            f"from torchtitan.models.{model}.config_registry import {model}_debugmodel\n"
            f"from {module} import configure\n\n\n"
            f"def planned():\n    return configure({model}_debugmodel())\n"
        )
        for name in ("planned_registry", module):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.chdir(tmp_path)
        arguments = ["--module", "planned_registry", "--config", "planned"]
        return ConfigManager().parse_args(arguments)

    return parse


def built(config, rank):
    """Per stage of a rank its number and modules, and the schedule's order of all ranks."""
    import torch
    from torch.distributed import init_device_mesh
    from torchtitan.distributed import pipeline_parallel as titan

    chosen = config.parallelism
    with torch.device("meta"):
        model = config.model_spec.model.build()
    count = chosen.pipeline_parallel_degree
    with alone(rank, count):
        mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("pp",))
        stages, models = titan._pipeline_module_split(
            model,
            mesh,
            chosen.pipeline_parallel_schedule,
            torch.device("cpu"),
            chosen.module_fqns_per_model_part,
        )
        schedule = titan._build_pipeline_schedule(
            parallelism=chosen,
            local_batch_size=config.training.local_batch_size,
            stages=stages,
            loss_fn=lambda *_: (torch.zeros(()), None),
        )
    parts = {stage.stage_index: kept(one) for stage, one in zip(stages, models, strict=True)}
    return parts, schedule


def kept(model):
    """The modules that are left of a model."""
    blocks = {f"layers.{index}" for index, _ in model.layers.named_children()}
    others = ("tok_embeddings", "norm", "lm_head")
    return blocks | {name for name in others if getattr(model, name) is not None}


@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0)])
def test_the_plans_stages_and_order_are_torchtitans(parsed, placement):
    cuts = [(0, 2), (2, 4), (4, 5), (5, 8)]  # E t | t t | t | t t L
    rows = random_rows(placement, MICROBATCHES, 1)
    plan = make_plan(placement, rows, replicas=2, cuts=cuts)
    config = parsed(export(plan, "torchtitan", gpt(BLOCKS)))
    assert config.training.local_batch_size == 4 * MICROBATCHES
    assert config.parallelism.data_parallel_replicate_degree == 2
    parts = {}
    for rank, row in enumerate(rows):
        own, schedule = built(config, rank)
        assert [placement[stage] for stage in own] == [rank] * len(own)
        assert schedule._n_microbatches == MICROBATCHES
        order = [str(action) for action in schedule.pipeline_order[rank] if action is not None]
        assert order == [str(action) for action in row]
        parts |= own
    assert parts == {
        0: {"tok_embeddings", "layers.0"},
        1: {"layers.1", "layers.2"},
        2: {"layers.3"},
        3: {"layers.4", "layers.5", "norm", "lm_head"},
    }


def test_only_the_stages(parsed):
    """Its own schedule then, even if the configuration had a file."""
    options = replace(gpt(BLOCKS), partition_only=True)
    plan = make_plan((0, 1), cuts=[(0, 4), (4, 8)])
    config = parsed(export(plan, "torchtitan", options))
    from torch.distributed.pipelining.schedules import Schedule1F1B

    assert isinstance(built(config, 0)[1], Schedule1F1B)


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        (Layout(pipeline=2, data=2, zero=1, microbatch=2), "Schedule1F1B"),
        (Layout(pipeline=2, chunks=3), "ScheduleInterleaved1F1B"),
        (Layout(pipeline=2, schedule="zero-bubble"), "ScheduleInterleavedZeroBubble"),
        (Layout(pipeline=2, chunks=2, schedule="zbv"), "ScheduleZBVZeroBubble"),
        (Layout(tensor=2, sequence_parallel=True, data=2, zero=3), None),
        (Layout(context=2, data=2, zero=2), None),
        (Layout(data=4, recompute="full"), None),
    ],
    ids=str,
)
def test_layouts_are_torchtitans_configurations(parsed, layout, schedule):
    from torchtitan.distributed import ParallelDims

    problem = make_problem(SMALL, layout)
    config = parsed(export_layout(problem, layout, "torchtitan"))
    chosen = config.parallelism
    dims = ParallelDims.from_config(chosen, layout.ranks)
    found = (dims.pp, dims.tp, dims.cp, dims.dp_replicate * dims.dp_shard)
    assert found == (layout.pipeline, layout.tensor, layout.context, layout.data)
    assert dims.world_size == layout.ranks
    assert config.training.global_batch_size == problem.batch
    if schedule is not None:
        parts, made = built(config, 1)
        assert type(made).__name__ == schedule
        assert len(parts) == layout.chunks
        assert made._n_microbatches == layout.microbatches(problem.batch)


@pytest.mark.parametrize("heads", [1, 2, 4, 16])
@pytest.mark.parametrize("tensor", [2, 4])
def test_key_value_heads_are_divided_as_it_does(parsed, heads, tensor):
    """Its debug model has 16 heads; one that has fewer of keys and values is refused alike."""
    layout = Layout(tensor=tensor, sequence_parallel=True, data=2, zero=3)
    config = parsed(export_layout(make_problem(SMALL, layout), layout, "torchtitan"))
    model = config.model_spec.model
    for layer in model.layers:
        layer.attention.n_kv_heads = heads
    attention = GroupedAttention(16, heads, 64)
    problem = make_problem(replace(SMALL, attention=attention), layout)
    wrong = [text for _, text in LAYOUT_FORMATS["torchtitan"].broken(problem, layout)]
    assert bool(wrong) == bool(heads % tensor)
    if wrong:
        with pytest.raises(ValueError, match=rf"must divide n_kv_heads \({heads}\)"):
            model.update_from_config(config=config)
    else:
        model.update_from_config(config=config)


def test_a_tied_head_is_in_no_pipeline(parsed):
    layout = Layout(pipeline=2)
    config = parsed(export_layout(make_problem(SMALL, layout), layout, "torchtitan"))
    config.model_spec.model.enable_weight_tying = True
    with pytest.raises(NotImplementedError, match="Weight tying is not supported with Pipeline"):
        config.model_spec.model.update_from_config(config=config)


def test_the_models_that_it_has():
    """The rule of models names what is there; with others it is to be stated anew."""
    from importlib.util import find_spec

    for name in LAYOUT_FORMATS["torchtitan"].models:
        assert find_spec(f"torchtitan.models.{name}")
    for name in ("llama", "qwen2", "mixtral", "gemma", "gpt2"):
        assert not find_spec(f"torchtitan.models.{name}")


@pytest.mark.parametrize("model", ["llama3", "qwen3", "deepseek_v3"])
def test_rotary_base_and_epsilon_are_set_in_the_built_model(parsed, model):
    import torch

    layers = {"llama3": BLOCKS, "qwen3": 8, "deepseek_v3": 6}[model]
    base = {
        "llama3": LLAMA,
        "qwen3": replace(LLAMA, attention=GroupedAttention(16, 8, 16, head_norms=True)),
        "deepseek_v3": replace(DEEPSEEK, stated=STATED),
    }[model]
    layout = Layout(data=2, zero=2)
    problem = make_problem(
        replace(base, **DEBUG, layers=layers, rotary_base=7e5, norm_epsilon=3e-6), layout
    )
    config = parsed(export_layout(problem, layout, "torchtitan"), model).model_spec.model
    assert {layer.attention.rope.theta for layer in config.layers} == {7e5}
    with torch.device("meta"):
        built = config.build()
    norms = [one.eps for one in built.modules() if isinstance(one, torch.nn.RMSNorm)]
    assert len(norms) > 2 * layers
    assert set(norms) == {3e-6}
    if model == "deepseek_v3":
        routers = [one.moe.router for one in built.layers.values() if getattr(one, "moe", None)]
        assert {(one.score_func, one.route_scale, one.route_norm) for one in routers} == {
            ("softmax", 2.5, True)
        }
        assert {layer.attention.rope.scaling for layer in config.layers} == {"yarn"}


def test_experts_on_several_ranks(parsed):
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

    layout = Layout(data=4, expert=4, zero=2)
    layers = len(deepseek_v3_debugmodel().model_spec.model.layers)
    problem = make_problem(replace(DEEPSEEK, layers=layers, **DEBUG), layout)
    config = parsed(export_layout(problem, layout, "torchtitan"), "deepseek_v3")
    assert config.parallelism.expert_parallel_degree == 4
