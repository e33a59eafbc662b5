"""Exports to NeMo AutoModel and Hugging Face's trainers, read by the installed releases.

None but transformers is a dependency: ``pip install --no-deps nemo-automodel==0.7.0
accelerate==1.15.0 axolotl==0.19.0``.
"""

import json

import pytest
import yaml
from exported_plans import MICROBATCHES, gpt, make_plan, random_rows
from layout_problems import LLAMA, make_problem
from releases import alone, require_release
from yaml import safe_load

from stagewright.executor.export import export
from stagewright.executor.export.layouts import export_layout
from stagewright.executor.export.layouts.hugging_face import environment
from stagewright.formulations.parallelism.layout import parse_layout


@pytest.fixture(autouse=True, scope="module")
def _installed():
    require_release("nemo-automodel", "0.7")


def built(recipe, rank):
    """Per stage of a rank its number and modules, and the schedule."""
    import torch
    import transformers
    from nemo_automodel.components.distributed.pipelining import functional
    from nemo_automodel.recipes._dist_utils import parse_distributed_section
    from torch.distributed import init_device_mesh

    parsed = parse_distributed_section(recipe["distributed"])
    chosen, count = parsed["pipeline_config"], parsed["pp_size"]
    sizes = transformers.LlamaConfig(
        num_hidden_layers=8, hidden_size=8, intermediate_size=8, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=11,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(sizes)
    with alone(rank, count):
        stages, models = functional.split_model_into_stages(
            model,
            init_device_mesh("cpu", (count,), mesh_dim_names=("pp",)),
            "pp",
            chosen.pp_schedule,
            torch.device("cpu"),
            chosen.module_fqns_per_model_part,
        )
        schedule = functional.build_pipeline_schedule(
            chosen.pp_schedule_csv,
            chosen.pp_schedule,
            chosen.pp_microbatch_size,
            recipe["step_scheduler"]["local_batch_size"],
            stages,
            lambda *_: torch.zeros(()),
        )
    parts = {stage.stage_index: kept(one) for stage, one in zip(stages, models, strict=True)}
    return parts, schedule


def kept(model):
    """The blocks that are left of a model, and whether the embedding and the head are."""
    inner = model.model
    blocks = {int(index) for index, _ in inner.layers.named_children()}
    assert inner.rotary_emb is not None
    assert (inner.norm is None) == (getattr(model, "lm_head", None) is None)
    return blocks, inner.embed_tokens is not None, inner.norm is not None


@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0)])
def test_the_plans_stages_and_order_are_automodels(placement, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cuts = [(0, 3), (3, 5), (5, 6), (6, 10)]  # E t t | t t | t | t t t L
    rows = random_rows(placement, MICROBATCHES, 1)
    files = export(make_plan(placement, rows, cuts=cuts), "nemo", gpt(8))
    (tmp_path / "schedule.csv").write_text(files["schedule.csv"])
    recipe = safe_load(files["stagewright_nemo.yaml"])
    parts = {}
    for rank, row in enumerate(rows):
        own, schedule = built(recipe, rank)
        assert [placement[stage] for stage in own] == [rank] * len(own)
        assert schedule._n_microbatches == MICROBATCHES
        order = [str(action) for action in schedule.pipeline_order[rank] if action is not None]
        assert order == [str(action) for action in row]
        parts |= own
    assert parts == {
        0: ({0, 1}, True, False),
        1: ({2, 3}, False, False),
        2: ({4}, False, False),
        3: ({5, 6, 7}, False, True),
    }


WORDS = ["d8 b2 zero3 full", "t2 c2 d2 b1 zero2"]


def exported(words, to):
    layout = parse_layout(words)
    problem = make_problem(LLAMA, layout)
    return problem, layout, export_layout(problem, layout, to)


@pytest.mark.parametrize("words", WORDS)
def test_accelerate_launches_by_its_configuration(words, tmp_path):
    """What its launcher would set of the environment is what an export to TRL sets."""
    require_release("accelerate", "1.15")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    problem, layout, files = exported(words, "accelerate")
    (tmp_path / "accelerate.yaml").write_text(files["accelerate.yaml"])
    given = ["--config_file", str(tmp_path / "accelerate.yaml"), "train.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(given))
    assert args.num_processes == layout.ranks
    found = prepare_multi_gpu_env(args)
    wanted = environment(problem, layout)
    assert {name: found[name].lower() for name in wanted} == {
        name: value.lower() for name, value in wanted.items()
    }


@pytest.mark.parametrize("words", [WORDS[0], "t2 d4 b1 zero2"])
def test_axolotl_accepts_its_configuration(words):
    require_release("axolotl", "0.19")
    from axolotl.utils.schemas.config import AxolotlInputConfig

    _, layout, files = exported(words, "axolotl")
    added = {
        "base_model": "name", "learning_rate": 1e-5, "max_steps": 1,
        "datasets": [{"path": "name", "type": "completion"}],
    }  # fmt: skip
    fields = yaml.safe_load(files["axolotl.yaml"])
    found = AxolotlInputConfig(**fields, **added)
    assert (found.tensor_parallel_size, found.dp_shard_size) == (layout.tensor, layout.data)
    assert found.fsdp_config.reshard_after_forward == (layout.zero == 3)
    assert fields.keys() <= AxolotlInputConfig.model_fields.keys()


@pytest.mark.slow
def test_transformers_accepts_its_configuration():
    distributed = pytest.importorskip("transformers.distributed")
    _, layout, files = exported("t2 d4 b1 zero3", "transformers")
    fields = json.loads(files["distributed_config.json"])
    found = distributed.DistributedConfig(**fields)
    assert (found.tp_size, found.fsdp_size, found.pp_size) == (layout.tensor, layout.data, 1)


def test_trl_knows_its_arguments():
    require_release("trl", "1.16")
    trl = pytest.importorskip("trl")
    _, layout, files = exported("d8 b2 zero3 full", "trl")
    fields = yaml.safe_load(files["sft.yaml"])
    found = trl.SFTConfig(output_dir="out", use_cpu=True, **fields | {"bf16": False})
    assert found.per_device_train_batch_size == layout.microbatch
    assert found.gradient_checkpointing
