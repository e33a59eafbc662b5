"""Exports to DeepSpeed, read by the installed release; no dependency: ``pip install deepspeed``."""

from dataclasses import replace

import pytest
from exported_plans import MICROBATCHES, make_model, make_plan
from layout_problems import LLAMA, MIXTRAL, make_problem
from releases import alone, require_release

from stagewright.executor.export import export
from stagewright.executor.export.layouts import LAYOUT_FORMATS, export_layout
from stagewright.executor.export.layouts.rules import require_whole_heads
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.prices.computing import Precision


@pytest.fixture(autouse=True, scope="module")
def _installed():
    require_release("deepspeed", "0.19")


@pytest.fixture
def parsed(monkeypatch, tmp_path):
    """DeepSpeed's configuration of ``ds_config.json`` on so many ranks."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "0")

    def parse(files, ranks):
        from deepspeed import comm
        from deepspeed.runtime.config import DeepSpeedConfig

        path = tmp_path / "ds_config.json"
        path.write_text(files["ds_config.json"])
        with alone(0, ranks):
            comm.init_distributed(dist_backend="fake", auto_mpi_discovery=False)
            try:
                return DeepSpeedConfig(str(path))
            finally:
                comm.comm.cdb = None

    return parse


def test_the_plans_stages_are_deepspeeds(parsed):
    import torch
    from deepspeed import comm
    from deepspeed.runtime.pipe import schedule

    cuts = [(0, 3), (3, 4), (4, 5)]
    options = make_model(*"abcde", microbatch_size=4)
    plan = make_plan((0, 1, 2), replicas=2, cuts=cuts)
    files = export(plan, "deepspeed", options)
    config = parsed(files, 2)
    assert config.train_batch_size == 4 * MICROBATCHES
    assert config.gradient_accumulation_steps == MICROBATCHES
    space = {}
    exec(files["stagewright_pipeline.py"], space)
    for rank in range(6):
        with alone(rank, 6):
            comm.init_distributed(dist_backend="fake", auto_mpi_discovery=False)
            try:
                module = space["build"]([torch.nn.Linear(2, 2) for _ in "abcde"])
            finally:
                comm.comm.cdb = None
            stage = module.stage_id
            assert (module._local_start, module._local_stop) == cuts[stage]
            assert len(module.forward_funcs) == cuts[stage][1] - cuts[stage][0]
            steps = [
                f"{stage}{one[:1]}{m}"
                for one, m in computed(schedule.TrainSchedule(MICROBATCHES, 3, stage))
            ]
            device = plan.stages[stage].devices[0]
            assert steps == [entry.action for entry in plan.actions if entry.device == device]


def computed(steps):
    """Forwards and backwards of DeepSpeed's schedule, each kind counted."""
    seen = {"ForwardPass": 0, "BackwardPass": 0}
    for step in steps:
        for command in step:
            if command.name in seen:
                yield command.name, seen[command.name]
                seen[command.name] += 1


@pytest.mark.parametrize("heads", [1, 2, 4, 6, 16])
@pytest.mark.parametrize("tensor", [2, 4])
def test_key_value_heads_of_equal_ranks_alone(heads, tensor):
    """AutoTP gives ranks whole heads: where these are not equally many, the layout is refused."""
    from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list

    layout = Layout(tensor=tensor, data=2, zero=1)
    attention = replace(LLAMA.attention, heads=48, key_value_heads=heads)
    problem = make_problem(replace(LLAMA, attention=attention), layout)
    rules = {one.require for one, _ in LAYOUT_FORMATS["deepspeed"].broken(problem, layout)}
    sizes = get_shard_size_list(64 * heads, tensor, AutoTPMeta(num_kv_heads=heads), "k_proj")
    assert (require_whole_heads in rules) == (len(set(sizes)) > 1)


@pytest.mark.parametrize(
    ("architecture", "layout", "others"),
    [
        (LLAMA, Layout(data=4, zero=2, microbatch=2), {}),
        (LLAMA, Layout(data=4, zero=3, recompute="full"), {}),
        (LLAMA, Layout(data=2, zero=1, offload_optimizer=True), {}),
        (LLAMA, Layout(data=4), {"precision": Precision(4, 4, 4, 8)}),
        (MIXTRAL, Layout(data=4, expert=4, zero=1), {}),
    ],
    ids=["zero2", "zero3", "offload", "fp32", "experts"],
)
def test_layouts_are_deepspeeds_configurations(parsed, architecture, layout, others):
    problem = make_problem(architecture, layout, **others)
    config = parsed(export_layout(problem, layout, "deepspeed"), layout.data)
    assert config.train_batch_size == problem.batch
    assert config.train_micro_batch_size_per_gpu == layout.microbatch
    assert config.gradient_accumulation_steps == layout.microbatches(problem.batch)
    assert config.zero_config.stage == layout.zero
    assert (config.zero_config.offload_optimizer is not None) == layout.offload_optimizer
    assert config.bfloat16_config.enabled == ("precision" not in others)
    assert config.grad_accum_dtype in (None, "fp32")
