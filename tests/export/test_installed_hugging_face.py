"""Exports to trainers of Hugging Face's stack, read by the installed releases.

None but transformers is a dependency: ``pip install --no-deps accelerate==1.15.0 axolotl==0.19.0``.
"""

import json

import pytest
import yaml
from layout_problems import LLAMA, make_problem
from releases import require_release

from stagewright.executor.export.layouts import export_layout
from stagewright.executor.export.layouts.hugging_face import environment
from stagewright.formulations.parallelism.layout import parse_layout

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
