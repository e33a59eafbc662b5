"""Plans whose replicas divide their state, in the formats that can say so."""

import json
from dataclasses import replace

import pytest
from exported_plans import gpt, make_plan

from stagewright.executor.export import export
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.errors import InputError

GPT_CUTS = [(0, 3), (3, 5), (5, 6), (6, 10)]  # E t t | t t | t | t t t L


def with_shards(*shards: str) -> PipelinePlan:
    plan = make_plan((0, 1, 2, 3), replicas=2, cuts=GPT_CUTS)
    stages = zip(plan.stages, shards * (4 // len(shards)), strict=True)
    return replace(plan, stages=tuple(replace(one, shards=kind) for one, kind in stages))


def test_deepspeed_and_megatron_divide_the_optimizer() -> None:
    plan = with_shards("optimizer")
    config = json.loads(export(plan, "deepspeed", gpt(8))["ds_config.json"])
    assert config["zero_optimization"] == {"stage": 1}
    lines = export(plan, "megatron", gpt(8))["megatron.sh"].splitlines()
    assert lines[-2:] == ["  --use-distributed-optimizer", ")"]
    whole = with_shards("none")
    assert "zero" not in export(whole, "deepspeed", gpt(8))["ds_config.json"]
    assert "distributed" not in export(whole, "megatron", gpt(8))["megatron.sh"]


def test_torchtitan_divides_the_weights() -> None:
    text = export(with_shards("weights"), "torchtitan", gpt(8))["stagewright_parallelism.py"]
    fields = dict(line.split(" = ") for line in text.splitlines() if ".parallelism" not in line
                  and line.startswith("    parallelism.") and line.count(" = ") == 1)  # fmt: skip
    assert fields["    parallelism.data_parallel_shard_degree"] == "2"
    assert fields["    parallelism.data_parallel_replicate_degree"] == "1"
    assert fields["    parallelism.fsdp_reshard_after_forward"] == "'always'"


@pytest.mark.parametrize(
    ("to", "shards", "message"),
    [
        ("torch-csv", ("optimizer",), "stage 0 shards its optimizer state: the files for torch do"),
        ("nemo", ("weights",), "stage 0 shards its weights: the files for NeMo AutoModel do not"),
        ("deepspeed", ("weights",),
         "stage 0 shards its weights: the files for DeepSpeed divide nothing, or optimizer in all"),
        ("megatron", ("none", "optimizer"), "stage 1 shards its optimizer state: the files for M"),
        ("torchtitan", ("optimizer", "weights"), "plan shards 'none' or 'weights' for all stages"),
    ],
)  # fmt: skip
def test_others_are_refused(to: str, shards: tuple[str, ...], message: str) -> None:
    options = None if to == "torch-csv" else gpt(8)
    with pytest.raises(InputError, match=message):
        export(with_shards(*shards), to, options)
