import csv
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from exported_plans import MICROBATCHES, gpt, make_model, make_plan, random_rows
from plans import small_problem
from ranks import Ranks

from stagewright.cli.pipelines import exporting
from stagewright.executor.export import FORMATS, export, pipelines, remarks
from stagewright.executor.export.layouts import EVERY_FORMAT
from stagewright.executor.export.options import FormatOptions, to_yaml
from stagewright.executor.programs.lower import lower
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.plans.actions import parse_action
from stagewright.formulations.plans.plan import PlannedLayer, Schedule, save_plan
from stagewright.formulations.schedules.published.kinds import KINDS, ScheduleChoice
from stagewright.formulations.schedules.published.one_f_one_b import interleaved
from stagewright.graphs.documents.errors import InputError, InvalidPlan
from stagewright.graphs.machines.cluster import (
    Cluster,
    Device,
    Link,
    ServerLinks,
    from_matrix,
    save_cluster,
)
from stagewright.graphs.models.chain import save_model
from stagewright.solvers.planners.steps.proposal import Choices
from stagewright.solvers.planning import plan

NASTY = "g\"0\n- x: $(reboot)'; true"
LAUNCH = FormatOptions(command="stagewright run plan.json --data 'my net:b'")


GPT_CUTS = [(0, 3), (3, 5), (5, 6), (6, 10)]  # E t t | t t | t | t t t L


def refuses(message, plan, to, options=None):
    with pytest.raises(InputError, match=message) as error:
        export(plan, to, options)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- torch


def read_csv(text):
    return [[parse_action(cell) for cell in row] for row in csv.reader(text.splitlines())]


@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 2), (0,)])
def test_csv_holds_the_computations_in_the_plans_order(placement):
    for seed in range(5):
        rows = random_rows(placement, MICROBATCHES, seed)
        files = export(make_plan(placement, rows), "torch-csv")
        assert read_csv(files["schedule.csv"]) == rows


def test_replicas_share_one_file():
    once, twice = make_plan((0, 1)), make_plan((0, 1), replicas=2)
    assert export(once, "torch-csv") == export(twice, "torch-csv")
    told = remarks(twice, "torch-csv")
    assert "ranks: 0 'g0', 1 'g1', 2 'g2', 3 'g3'" in told
    assert any("runs 2 times" in line for line in told)
    assert not any("runs" in line for line in remarks(once, "torch-csv"))
    split = make_plan((0,), [["0F0", "0I0", "0W0"]], microbatches=1, replicas=2)
    assert any("DistributedDataParallel" in line for line in remarks(split, "torch-csv"))


def test_torch_loads_every_file_and_finds_the_ranks(tmp_path):
    pytest.importorskip("torch")
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    for placement in [(0, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 0, 1)]:
        for seed in range(3):
            plan = make_plan(placement, random_rows(placement, MICROBATCHES, seed))
            path = tmp_path / "schedule.csv"
            path.write_text(export(plan, "torch-csv")["schedule.csv"])
            stage = SimpleNamespace(num_stages=len(placement), group_size=2, group_rank=0)
            schedule = _PipelineScheduleRuntime([stage], MICROBATCHES)
            schedule._load_csv(str(path))
            assert schedule.stage_index_to_group_rank == dict(enumerate(placement))


def run_the_files(_: Any, rank: int, folder: Path, cases: dict[str, tuple[int, ...]]) -> list[str]:
    """Run every file in torch's own runtime; the gradients are those of the whole model."""
    import torch
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    loss = torch.nn.functional.mse_loss
    for name, placement in cases.items():
        torch.manual_seed(0)
        layers = [
            torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh()).double() for _ in placement
        ]
        x, y = torch.randn(2, 4 * MICROBATCHES, 5).double()
        whole = torch.nn.Sequential(*layers)
        loss(whole(x), y).backward()
        wanted = [[p.grad.clone() for p in layer.parameters()] for layer in layers]
        whole.zero_grad()
        own = [s for s, place in enumerate(placement) if place == rank]
        stages = [PipelineStage(layers[s], s, len(placement), torch.device("cpu")) for s in own]
        schedule = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=loss)
        schedule._load_csv(str(folder / f"{name}.csv"))
        schedule.step(*([x] if 0 in own else []), target=y if len(placement) - 1 in own else None)
        for s in own:
            for parameter, gradient in zip(layers[s].parameters(), wanted[s], strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-6)
    return list(cases)


def test_torch_runs_the_files_and_gets_the_gradients(ranks: Ranks, tmp_path: Path) -> None:
    cases = {}
    for placement in [(0, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 0, 1)]:
        orders = [random_rows(placement, MICROBATCHES, seed) for seed in range(2)]
        if len(placement) % 2 == 0 and placement[1:3] != (1, 1):
            orders.append(None)  # 1F1B
        for rows in orders:
            name = f"case{len(cases)}"
            text = export(make_plan(placement, rows), "torch-csv")["schedule.csv"]
            (tmp_path / f"{name}.csv").write_text(text)
            cases[name] = placement
    assert any("I" in path.read_text() for path in tmp_path.glob("*.csv"))
    assert ranks.run(run_the_files, 2, tmp_path, cases) == [list(cases)] * 2


EVERY = tuple(
    kind
    for kind, one in KINDS.items()
    if one.weights == "flush" and one.placement != "both directions"
)
FEW = ("1f1b", "interleaved-zb", "zbv")


def test_the_quick_schedules_are_some_of_all() -> None:
    assert len(EVERY) == 15
    assert {*FEW} < {*EVERY}


@pytest.mark.parametrize("kinds", [FEW, pytest.param(EVERY, marks=pytest.mark.slow)])
def test_torch_runs_published_schedules(
    ranks: Ranks, tmp_path: Path, kinds: tuple[str, ...]
) -> None:
    """A plan of every kind with one copy of each stage and one version of its weights."""
    cases = {}
    for kind in kinds:
        choice = ScheduleChoice(kind)
        layers = small_problem(2 * choice.count, 2, MICROBATCHES, parts=True)
        found = plan(layers, "order", Limits(1.0), choices=Choices(order=choice)).plan
        assert found is not None
        (tmp_path / f"{kind}.csv").write_text(export(found, "torch-csv")["schedule.csv"])
        cases[kind] = tuple(int(stage.devices[0][1:]) for stage in found.stages)
    assert ranks.run(run_the_files, 2, tmp_path, cases) == [list(cases)] * 2


def test_torch_refusals():
    plan = make_plan((0, 1))
    first, second = plan.stages
    unequal = replace(plan, stages=(first, replace(second, devices=("g1", "g2"))))
    refuses("stage 1 is on 2 devices, stage 0 on 1", unequal, "torch-csv")
    twice = make_plan((0, 1), replicas=2)
    turns = tuple(replace(stage, replication="round-robin") for stage in twice.stages)
    refuses("stage 0: its 2 devices .*round-robin", replace(twice, stages=turns), "torch-csv")
    half = (twice.stages[0], replace(twice.stages[1], devices=("g1", "g2")))
    refuses("stages 0 and 1 share device 'g1'", replace(twice, stages=half), "torch-csv")
    refuses("weights 'stash'", replace(plan, weights="stash"), "torch-csv")
    again = (first, replace(second, recompute="full"))
    refuses(r"stage 1 recomputes \('full'\)", replace(plan, stages=again), "torch-csv")
    late = make_plan((0, 1), [
        ["0F1", "0F0", "0B1", "0B0"], ["1F1", "1F0", "1B1", "1B0"],
    ], microbatches=2)  # fmt: skip
    refuses("rank 1: the last stage does 1F1 where torch.* takes it for 1F0", late, "torch-csv")
    refuses(
        "--partition-only does not apply to torch-csv",
        plan,
        "torch-csv",
        FormatOptions(partition_only=True),
    )
    refuses("--to 'tensorflow' is not known", plan, "tensorflow")


def test_replicas_in_different_orders_are_refused():
    plan = make_plan((0,), [["0F0", "0F1", "0B0", "0B1"]], microbatches=2, replicas=2)
    swapped = {"0B0": 3.0, "0B1": 2.0}
    actions = tuple(
        replace(one, start_seconds=swapped[one.action], finish_seconds=swapped[one.action] + 1)
        if one.device == "g1" and one.action in swapped
        else one
        for one in plan.actions
    )
    other = replace(plan, schedule=Schedule(actions))
    refuses("position 2: the plan does 0B1, its replica 'g0' 0B0", other, "torch-csv")


def test_plans_that_nobody_can_run_are_invalid():
    plan = make_plan((0, 1))
    missing = replace(plan, schedule=Schedule(plan.actions[1:]))
    backwards = Schedule(
        tuple(replace(one, start_seconds=-one.start_seconds) for one in plan.actions)
    )
    for broken in (missing, replace(plan, schedule=backwards)):
        with pytest.raises(InvalidPlan):
            export(broken, "torch-csv")


# ---------------------------------------------------------------- torchtitan and NeMo


def titan_config(files, layers=8):
    """What the module makes of torchtitan's configuration for a model of so many layers."""
    return vars(configured(files, layers).parallelism)


def configured(files, layers=8, batch=2 * MICROBATCHES):
    space = {}
    exec(files["stagewright_parallelism.py"], space)
    config = SimpleNamespace(
        parallelism=SimpleNamespace(
            pipeline_parallel_microbatch_size=1, pipeline_parallel_schedule_csv="other.csv"
        ),
        training=SimpleNamespace(local_batch_size=batch),
        activation_checkpoint="selective",  # as in torchtitan's recipes
        model_spec=SimpleNamespace(model=SimpleNamespace(layers=[None] * layers)),
    )
    return space["configure"](config)


def kept_by_torchtitan(names, layers):
    """The modules of a decoder that a stage keeps, as torchtitan cuts it (0.3.0).

    Names that the decoder does not have are ignored, and modules without a name are dropped.
    """
    has = ["tok_embeddings", *(f"layers.{i}" for i in range(layers)), "norm", "lm_head"]
    return [module for module in has if module in names]


MODULES = [["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "layers.3"],
           ["layers.4"], ["layers.5", "layers.6", "layers.7", "norm", "lm_head"]]  # fmt: skip


@pytest.mark.parametrize(
    ("placement", "name", "alone"),
    [
        ((0, 1, 2, 3), "PipelineScheduleMulti", "1F1B"),
        ((0, 1, 0, 1), "PipelineScheduleMulti", "Interleaved1F1B"),
        ((0, 1, 1, 0), "ZBVZeroBubble", "ZBVZeroBubble"),
    ],
)
def test_torchtitan_gets_stages_and_schedule(placement, name, alone):
    rows = random_rows(placement, MICROBATCHES, 1)
    plan = make_plan(placement, rows, replicas=2, cuts=GPT_CUTS)
    files = export(plan, "torchtitan", gpt(8))
    assert titan_config(files) == {
        "pipeline_parallel_degree": len(set(placement)),
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": 1,
        "pipeline_parallel_microbatch_size": 4,
        "pipeline_parallel_schedule": name,
        "pipeline_parallel_schedule_csv": "schedule.csv",
        "module_fqns_per_model_part": MODULES,
    }
    assert read_csv(files["schedule.csv"]) == rows
    assert configured(files).training.disable_cuda_graphs  # it refuses a pipeline with them
    assert configured(files).training.global_batch_size == 2 * 4 * MICROBATCHES
    assert configured(files).activation_checkpoint is None  # the plan recomputes nothing
    files = export(plan, "torchtitan", replace(gpt(8), partition_only=True))
    assert list(files) == ["stagewright_parallelism.py"]
    assert titan_config(files)["pipeline_parallel_schedule"] == alone
    assert titan_config(files)["pipeline_parallel_schedule_csv"] == ""
    assert configured(files).activation_checkpoint == "selective"  # left to torchtitan


def test_layers_that_the_plan_names_need_no_model():
    plan = make_plan((0, 1))
    refuses("does not name its layers: give the model file", plan, "torchtitan")
    named = replace(plan, layers=(PlannedLayer("wte", 1.0), PlannedLayer("logits", 1.0)))
    files = export(named, "torchtitan")
    parts = titan_config(files, 0)["module_fqns_per_model_part"]
    assert parts == [["tok_embeddings"], ["norm", "lm_head"]]
    # Then the configuration's batch decides on the samples of a microbatch.
    made = configured(files, 0, 3 * MICROBATCHES)
    assert made.parallelism.pipeline_parallel_microbatch_size == 3
    with pytest.raises(
        ValueError, match=f"local_batch_size must be a multiple, not {MICROBATCHES + 1}"
    ):
        configured(files, 0, MICROBATCHES + 1)
    refuses("'net' with 3 layers, the plan is for 'net' with 2", named, "torchtitan",
            make_model("embedding", "h.0", "head"))  # fmt: skip


@pytest.mark.parametrize(
    "names",
    [
        ("tok_embeddings", "layers.0", "layers.1", "layers.2", "norm", "output"),
        ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "model.norm",
         "lm_head"),
        ("wte", "wpe", "drop", "h.0", "h.1", "h.2", "ln_f", "lm_head", "loss"),
        ("embedding", "layer1", "layer2", "layer3", "logits"),
        ("embedding", "blocks.0", "blocks.1", "blocks.2", "head"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("to", ["torchtitan", "nemo", "megatron"])
def test_every_module_is_on_one_stage(names, to):
    first_block = next(i for i, name in enumerate(names) if name[-1].isdigit())
    middle = first_block + 2  # the second stage begins with the last block
    plan = make_plan((0, 1), cuts=[(0, middle), (middle, len(names))])
    files = export(plan, to, make_model(*names))
    if to == "megatron":
        assert megatron_arguments(files)["--pipeline-model-parallel-layout"] == "Et*2|tL"
        assert megatron_arguments(files)["--num-layers"] == "3"
        return
    if to == "torchtitan":
        parts = titan_config(files, 3)["module_fqns_per_model_part"]
        assert [kept_by_torchtitan(part, 3) for part in parts] == parts
    else:
        section = read_yaml(files["stagewright_nemo.yaml"])[0]["distributed"]["pipeline"]
        parts = section["module_fqns_per_model_part"]
        assert all(part.pop() == "model.rotary_emb" for part in parts)
        assert "for a decoder of 3 layers (num_hidden_layers)" in files["stagewright_nemo.yaml"]
        parts = [
            [name.removeprefix("model.").replace("embed_tokens", "tok_embeddings") for name in part]
            for part in parts
        ]
    assert parts == [["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "norm", "lm_head"]]


def test_a_norm_and_a_head_may_be_on_two_stages():
    plan = make_plan((0, 1), cuts=[(0, 3), (3, 4)])
    files = export(plan, "torchtitan", make_model("embedding", "layers.0", "norm", "lm_head"))
    parts = titan_config(files, 1)["module_fqns_per_model_part"]
    assert parts == [["tok_embeddings", "layers.0", "norm"], ["lm_head"]]


def test_torchtitans_model_must_have_as_many_layers():
    files = export(make_plan((0, 1, 2, 3), cuts=GPT_CUTS), "torchtitan", gpt(8))
    for layers in (7, 9):
        with pytest.raises(ValueError, match=f"the plan is for 8 layers, the model has {layers}"):
            titan_config(files, layers)


def test_torchtitans_configuration_must_be_of_the_known_release():
    space = {}
    files = export(make_plan((0, 1, 2, 3), cuts=GPT_CUTS), "torchtitan", gpt(8))
    exec(files["stagewright_parallelism.py"], space)
    later = SimpleNamespace(num_pp_microbatches=1, pipeline_parallel_schedule_csv="")
    for config in (
        SimpleNamespace(model_spec=None, parallelism=later),
        SimpleNamespace(
            parallelism=SimpleNamespace(
                pipeline_parallel_microbatch_size=1, pipeline_parallel_schedule_csv=""
            )
        ),
    ):
        with pytest.raises(ValueError, match=r"no configuration of torchtitan 0\.3\.0"):
            space["configure"](config)


def test_torchtitan_refusals():
    options = make_model("embedding", "layers.0", "head")
    refuses("all stages are on one rank", make_plan((0,), cuts=[(0, 3)]), "torchtitan", options)
    refuses("on ranks 0, 0, 1: torchtitan knows", make_plan((0, 0, 1), random_rows((0, 0, 1), 2, 0),
            microbatches=2), "torchtitan", options)  # fmt: skip


@pytest.mark.parametrize("to", ["torchtitan", "nemo"])
def test_layers_without_a_module_there_are_refused_by_name(to):
    plan = make_plan((0, 1), cuts=[(0, 2), (2, 4)])
    for names, message in {
        (
            "embedding",
            "layers.0",
            "conv 2",
            "head",
        ): "layer 'conv 2' is not recognised: .*torch-csv",
        ("embedding", "layers.0.mlp", "layers.1", "head"): "layer 'layers.0.mlp' is not recognised",
        ("embedding", "layers.0", "layers.2", "head"): "layer 'layers.2' should be number 1",
        ("embedding", "layers.3", "layers.4", "head"): "layer 'layers.3' should be number 1",
        ("embedding", "layers.0", "pooler", "head"): "layer 'pooler' has no module in",
        ("embedding", "layers.0", "head", "norm"): "layer 'norm' is out of order",
        ("wte", "layers.0", "layers.1", "norm"): "'wte' to 'norm'.*neither end can be missing",
        ("layers.0", "layers.1", "norm", "head"): "'layers.0' to 'head'.*neither end",
        ("wte", "embedding", "wpe", "head"): "stage 1 begins with layer 'wpe'.*whole embedding on",
    }.items():
        refuses(message, plan, to, make_model(*names))
    alone = make_plan((0, 1), cuts=[(0, 3), (3, 4)])
    options = make_model("embedding", "layers.0", "head", "loss")
    refuses("stage 1 has no module of .*, only 'loss'", alone, to, options)


NEMO_MODULES = [
    ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.rotary_emb"],
    ["model.layers.2", "model.layers.3", "model.rotary_emb"],
    ["model.layers.4", "model.rotary_emb"],
    ["model.layers.5", "model.layers.6", "model.layers.7", "model.norm", "lm_head",
     "model.rotary_emb"],
]  # fmt: skip


def test_nemo_gets_stages_and_schedule():
    rows = random_rows((0, 1, 0, 1), MICROBATCHES, 2)
    plan = make_plan((0, 1, 0, 1), rows, cuts=GPT_CUTS)
    files = export(plan, "nemo", gpt(8))
    assert read_yaml(files["stagewright_nemo.yaml"]) == [
        {
            "step_scheduler": {"global_batch_size": 32, "local_batch_size": 32},
            "distributed": {
                "strategy": "fsdp2",
                "pp_size": 2,
                "dp_size": 1,
                "pipeline": {
                    "pp_schedule": "PipelineScheduleMulti",
                    "pp_microbatch_size": 8,
                    "module_fqns_per_model_part": NEMO_MODULES,
                    "pp_schedule_csv": "schedule.csv",
                },
            },
        }
    ]
    assert read_csv(files["schedule.csv"]) == rows


def test_nemo_refusals():
    twice, options = make_plan((0, 1), replicas=2), make_model("embedding", "head")
    refuses("stage 0 is on 2 devices .* --partition-only", twice, "nemo", options)
    alone = export(twice, "nemo", replace(options, partition_only=True))
    section = read_yaml(alone["stagewright_nemo.yaml"])[0]
    assert section["step_scheduler"] == {"global_batch_size": 32, "local_batch_size": 16}
    assert (section["distributed"]["dp_size"], list(alone)) == (2, ["stagewright_nemo.yaml"])
    few = make_plan((0, 1), microbatches=1)
    refuses("1 microbatches on 2 ranks", few, "nemo", options)


# ---------------------------------------------------------------- Megatron-LM


def megatron_arguments(files):
    script = files["megatron.sh"] + 'printf "%s\\n" "${MEGATRON_ARGUMENTS[@]}"'
    said = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    words = said.splitlines()
    return dict(zip(words[::2], words[1::2], strict=True))


def read_layout(text):
    """As megatron/core/transformer/pipeline_parallel_layer_layout.py reads it."""
    text = re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), text.replace(",", ""))
    return text.split("|")


@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 1, 0, 1)])
def test_megatron_gets_the_layout(placement):
    plan = make_plan(placement, replicas=2, cuts=GPT_CUTS)
    found = megatron_arguments(export(plan, "megatron", gpt(8)))
    assert read_layout(found.pop("--pipeline-model-parallel-layout")) == [
        "Ett", "tt", "t", "tttL",
    ]  # fmt: skip
    group = found.pop("--microbatch-group-size-per-virtual-pipeline-stage", None)
    assert group == (None if len(set(placement)) == 4 else "2")
    assert found == {
        "--pipeline-model-parallel-size": str(len(set(placement))),
        "--num-layers": "8",
        "--micro-batch-size": "4",
        "--global-batch-size": "32",
    }


def test_megatron_merges_what_it_has_as_one_piece():
    names = ("transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1",
             "transformer.ln_f", "lm_head")  # fmt: skip
    plan = make_plan((0, 1), cuts=[(0, 3), (3, 6)])
    found = megatron_arguments(export(plan, "megatron", make_model(*names)))
    assert found["--pipeline-model-parallel-layout"] == "Et|tL"


def test_megatron_refuses_layers_by_name():
    plan = make_plan((0, 1), cuts=[(0, 2), (2, 4)])
    for names, message in {
        ("embedding", "layers.0", "conv", "head"): "layer 'conv' is not recognised",
        ("embedding", "layers.0", "wte", "head"): "layer 'wte' is out of order",
        ("wte", "wpe", "embed", "head"): "stage 1 begins with layer 'embed'.*whole embedding on",
        ("embedding", "norm", "ln_f", "head"): "stage 1 begins with layer 'ln_f'.*whole norm on",
        ("embedding", "layers.0", "layers.2", "head"): "layer 'layers.2' should be number 1",
        ("layers.0", "layers.1", "layers.2", "head"): "layers 'layers.0' to 'head'.*neither end",
        ("embedding", "layers.1", "layers.2", "layers.3"): "neither end",
    }.items():
        refuses(message, plan, "megatron", make_model(*names))


def test_megatron_refuses_what_is_not_its_schedule():
    gpipe = make_plan((0, 1), [
        ["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"],
    ], microbatches=2)  # fmt: skip
    options = make_model("embedding", "head")
    refuses("rank 1, position 1: the plan does 1F1, Megatron-LM's schedule 1B0", gpipe, "megatron",
            options)  # fmt: skip
    assert export(gpipe, "megatron", replace(options, partition_only=True))
    split = make_plan((0,), [["0F0", "0I0", "0W0"]], microbatches=1, cuts=[(0, 2)])
    refuses("position 1: the plan does 0I0, Megatron-LM's schedule 0B0", split, "megatron", options)
    refuses("microbatch of 8 samples cannot be split evenly among 3", make_plan((0, 1), replicas=3),
            "megatron", options)  # fmt: skip


def test_megatron_refuses_other_placements():
    four = make_model("embedding", "layers.0", "layers.1", "head")
    v = make_plan((0, 1, 1, 0), random_rows((0, 1, 1, 0), 4, 0))
    refuses("stage 2 is on rank 1, where Megatron-LM has it on rank 0", v, "megatron", four)
    odd = make_plan((0, 1, 0), random_rows((0, 1, 0), 2, 0), microbatches=2)
    refuses("3 stages on 2 ranks", odd, "megatron", make_model("embedding", "layers.0", "head"))
    few = make_plan((0, 1, 0, 1), random_rows((0, 1, 0, 1), 3, 0), microbatches=3)
    refuses("with 3 microbatches", few, "megatron", four)


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (4, 1), (2, 2), (2, 3), (3, 2), (4, 2)])
def test_1f1b_and_interleaving_are_torchs(ranks, chunks):
    pytest.importorskip("torch")
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, _Action

    for rounds in (1, 2, 3):
        microbatches = rounds * ranks
        found = interleaved(ranks, chunks, microbatches).rows
        if chunks == 1:  # the rule: rank p runs ranks - p - 1 forwards ahead
            for p, row in enumerate(found):
                kinds = "".join(str(action.kind) for action in row)
                ahead = min(ranks - p - 1, microbatches)
                assert kinds == "F" * ahead + "FB" * (microbatches - ahead) + "B" * ahead
            continue
        stages = [
            SimpleNamespace(num_stages=ranks * chunks, group_size=ranks, group_rank=0)
            for _ in range(chunks)
        ]
        order = ScheduleInterleaved1F1B(stages, microbatches).pipeline_order
        for p, row in enumerate(found):
            assert list(map(str, row)) == [str(a) for a in order[p] if isinstance(a, _Action)]


# ---------------------------------------------------------------- DeepSpeed


class FakePipelineModule:
    """The part of DeepSpeed's PipelineModule that partitions."""

    def __init__(self, layers, num_stages, activation_checkpoint_interval=0, stage=0):
        self._layer_specs, self.global_rank = list(layers), stage
        self.num_stages, self.interval = num_stages, activation_checkpoint_interval
        self._topo = SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=rank))
        self._partition_layers(method="parameters")

    def _set_bounds(self, start, stop):
        self.own = self._layer_specs[start:stop]


@pytest.fixture
def deepspeed(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace())
    fake = SimpleNamespace(PipelineModule=FakePipelineModule)
    monkeypatch.setitem(sys.modules, "deepspeed.pipe", fake)

    def run(files):
        space = {}
        exec(files["stagewright_pipeline.py"], space)
        return space

    return run


def test_deepspeed_gets_the_cuts(deepspeed):
    plan, options = make_plan((0, 1, 2, 3), replicas=2, cuts=GPT_CUTS), gpt(8)
    files = export(plan, "deepspeed", options)
    module = deepspeed(files)
    assert module["LAYERS"] == [layer.name for layer in options.model.layers]
    built = [module["build"](range(10), stage=s) for s in range(4)]
    assert [one.own for one in built] == [list(range(*cut)) for cut in GPT_CUTS]
    assert built[0].parts == [0, 3, 5, 6, 10]
    assert (built[0].num_stages, built[0].interval) == (4, 0)
    with pytest.raises(ValueError, match="10 layers, got 9"):
        module["build"](range(9))
    assert json.loads(files["ds_config.json"]) == {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
    }


def test_deepspeed_recomputes(deepspeed):
    plan, options = make_plan((0, 1, 2, 3), cuts=GPT_CUTS), gpt(8)
    for recompute, interval in {"layer": 1, "full": 4}.items():
        stages = tuple(replace(stage, recompute=recompute) for stage in plan.stages)
        module = deepspeed(export(replace(plan, stages=stages), "deepspeed", options))
        assert module["build"](range(10)).interval == interval
    mixed = replace(plan, stages=(plan.stages[0], *stages[1:]))
    refuses("stage 1 recomputes 'full', stage 0 'none'", mixed, "deepspeed", options)
    free = export(mixed, "deepspeed", replace(options, partition_only=True))
    assert deepspeed(free)["build"](range(10)).interval == 0


def test_deepspeed_names_of_layers_are_text(deepspeed):
    names = ['"]\nimport os', "'{x}\\", "é😀"]
    files = export(make_plan((0,), cuts=[(0, 3)]), "deepspeed", make_model(*names))
    assert deepspeed(files)["LAYERS"] == names


def test_deepspeed_refusals():
    options = make_model("a", "b", "c", "d")
    refuses("4 stages on 2 ranks", make_plan((0, 1, 0, 1)), "deepspeed", options)
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    gpipe = make_plan((0, 1), rows, microbatches=2)
    refuses("rank 1, position 1: .*DeepSpeed's schedule 1B0; --partition-only", gpipe, "deepspeed",
            make_model("a", "b"))  # fmt: skip
    named = replace(make_plan((0,)), layers=(PlannedLayer("a", 1.0),))
    refuses("how many samples a microbatch has", named, "deepspeed")


# ---------------------------------------------------------------- launch scripts


def read_yaml(text):
    """The documents; every string that is no key is in double quotes."""
    for document in yaml.compose_all(text):
        for scalar in scalars(document):
            plain = re.fullmatch(r"\d+|true|false", scalar.value)
            assert scalar.style == '"' or (plain and scalar.style is None)
    return list(yaml.safe_load_all(text))


def scalars(node):
    if isinstance(node, yaml.ScalarNode):
        return [node]
    pairs = isinstance(node, yaml.MappingNode)
    inner = [value for _, value in node.value] if pairs else node.value
    return [scalar for child in inner for scalar in scalars(child)]


def test_yaml_comes_back():
    value = {"a": [NASTY, "", "é😀\x7f\u2028", "- no", "#", "yes", "1"], "b": {"c": True, "d": 7},
             "e": [[1, 2], [{"f": "x: y"}, 3]]}  # fmt: skip
    text = to_yaml(value)
    assert text.isascii()
    assert read_yaml(text) == [value]


def machines(*sizes):
    names = [[f"s{n}g{i}" for i in range(size)] for n, size in enumerate(sizes)]
    devices = tuple(Device(name, "v100", 16e9) for server in names for name in server)
    links = ServerLinks(tuple(map(tuple, names)), Link(1e9), Link(1e8))
    return Cluster("machines", devices, links)


def on_devices(*names):
    """A plan with a stage on each device."""
    plan = make_plan(tuple(range(len(names))))
    new = {f"g{i}": name for i, name in enumerate(names)}
    return replace(
        plan,
        stages=tuple(replace(s, devices=(new[s.devices[0]],)) for s in plan.stages),
        schedule=Schedule(tuple(replace(a, device=new[a.device]) for a in plan.actions)),
    )


STUBS = """
torchrun() { printf 'torchrun'; printf ' <%s>' "$CUDA_VISIBLE_DEVICES" "$@"; echo; }
exec() { "$@"; }
srun() { for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done; }
scontrol() { printf 'first\\nsecond\\n'; }
export -f torchrun exec
export SLURM_JOB_NODELIST=list SLURM_JOB_ID=7 CUDA_VISIBLE_DEVICES=
"""


def run_bash(script, **variables):
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    settings = "".join(f"export {name}={value}\n" for name, value in variables.items())
    ran = subprocess.run(["bash", "-c", settings + STUBS + script], text=True, capture_output=True)
    return ran.stdout.splitlines(), ran.stderr


COMMAND = "<--no-python> <stagewright> <run> <plan.json> <--data> <my net:b>"


def node_line(node, gpus="", port=29500, address="first", each=2):
    return (
        f"torchrun <{gpus}> <--nnodes=2> <--nproc-per-node={each}> <--node-rank={node}> "
        f"<--master-addr={address}> <--master-port={port}> {COMMAND}"
    )


def test_torchrun_on_one_node():
    script = export(make_plan((0, 1)), "torchrun", LAUNCH)["run.sh"]
    said, _ = run_bash(script)
    assert said == [f"torchrun <> <--standalone> <--nproc-per-node=2> {COMMAND}"]


def test_torchrun_on_two_nodes():
    plan = make_plan((0, 1, 2, 3))
    script = export(plan, "torchrun", replace(LAUNCH, per_server=2))["run.sh"]
    assert run_bash(script, NODE_RANK=1, MASTER_ADDR="first")[0] == [node_line(1)]
    said, complaint = run_bash(script, MASTER_ADDR="first")
    assert not said
    assert "NODE_RANK: set it to the number of this node, 0 to 1" in complaint


def test_servers_say_nodes_and_gpus():
    plan = on_devices("s1g3", "s1g0", "s0g0", "s0g1")
    options = replace(LAUNCH, cluster=machines(4, 4))
    script = export(plan, "torchrun", options)["run.sh"]
    assert '# node 0: "s1g3", "s1g0"\n' in script
    for node, gpus in enumerate(("3,0", "0,1")):
        said, _ = run_bash(script, NODE_RANK=node, MASTER_ADDR="first")
        assert said == [node_line(node, gpus)]
    job = export(plan, "slurm", options)["job.sbatch"]
    assert "#SBATCH --nodes=2\n" in job
    assert "#SBATCH --gpus-per-node=4\n" in job
    assert run_bash(job)[0] == [node_line(0, "3,0", 20007), node_line(1, "0,1", 20007)]


def test_a_batch_job_has_cpus_and_a_time():
    plan = make_plan((0, 1, 2, 3))
    job = export(plan, "slurm", replace(LAUNCH, per_server=2, cpus=8, time="1-12:00:00"))
    (script,) = job.values()
    assert "#SBATCH --cpus-per-task=16\n#SBATCH --time=1-12:00:00\n" in script
    assert "\nsrun --cpus-per-task=16 " in script  # 8 of each of the node's 2 processes
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    plain = export(plan, "slurm", replace(LAUNCH, per_server=2))["job.sbatch"]
    assert "cpus-per-task" not in plain
    assert "--time" not in plain


@pytest.mark.parametrize("time", ["", "4h", "0", "0:00:00", "1:2", "4:00:00:00", "-1", "1-2-3"])
def test_a_time_is_one_of_slurm(time):
    refuses("--time .* is no time of Slurm", make_plan((0, 1)), "slurm", replace(LAUNCH, time=time))


def test_kubernetes_job():
    options = replace(LAUNCH, per_server=2, image="repo/image:1", command="run '$(HOME) $$x'")
    service, job = read_yaml(export(make_plan((0, 1, 2, 3)), "kubernetes", options)["job.yaml"])
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (2, 2)
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    assert container["image"] == "repo/image:1"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    name = job["metadata"]["name"]
    assert container["env"] == [{"name": "MASTER_ADDR", "value": f"{name}-0.{name}"}]
    # Kubernetes expands $(NAME) and halves $$.
    words = container["command"]
    assert not any(re.search(r"(?<!\$)(\$\$)*\$\(", word) for word in words)
    bash, flag, script, *rest = (word.replace("$$", "$") for word in words)
    assert (bash, flag, rest) == ("bash", "-c", ["bash", "run", "$(HOME) $$x"])
    said = run_bash(
        f"set -- run data\n{script}", JOB_COMPLETION_INDEX=1, MASTER_ADDR="stagewright-0"
    )[0]
    assert said == [node_line(1, address="stagewright-0").replace(COMMAND, "<--no-python> "
                    "<run> <data>")]  # fmt: skip


@pytest.mark.parametrize(
    "model", ["bert-large", "My_Model (1.3B)", "x" * 300, "7b", "ŝĉ", "a" * 34]
)
def test_kubernetes_names_are_labels_that_no_other_export_has(model):
    plan = replace(on_devices(*map(str, range(12))), model=model)
    options = replace(LAUNCH, per_server=1, image="image")
    names = set()
    for _ in range(3):
        documents = read_yaml(export(plan, "kubernetes", options)["job.yaml"])
        (name,) = {one["metadata"]["name"] for one in documents}
        # A Service's (RFC 1035) begins with a letter; the last pod's ends with its index.
        assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name)
        assert len(f"{name}-11") <= 63
        names.add(name)
    assert len(names) == 3
    assert ("bert-large" in name) == (model == "bert-large")


@pytest.mark.parametrize("to", ["torchrun", "slurm", "kubernetes"])
def test_names_of_devices_inject_nothing(to):
    image = "image" if to == "kubernetes" else None
    options = replace(LAUNCH, image=image, per_server=1)
    text, plain = (
        re.sub("stagewright(-[a-z]+)*-[0-9a-f]{10}", "JOB", *export(plan, to, options).values())
        for plan in (on_devices(NASTY, "b"), on_devices("a", "b"))
    )
    differ = [
        (one, other)
        for one, other in zip(text.splitlines(), plain.splitlines(), strict=True)
        if one != other
    ]
    assert [other for _, other in differ] == ['# node 0: "a"']
    assert differ[0][0].startswith("# node 0: ")


def test_launch_refusals():
    plan = on_devices("s0g0", "s1g0", "s0g1")
    refuses("a launch script needs --command", plan, "torchrun")
    refuses(
        '--command "a \'b": No closing quotation', plan, "torchrun", FormatOptions(command="a 'b")
    )
    refuses("3 devices do not fill nodes of 2", plan, "slurm", replace(LAUNCH, per_server=2))
    refuses("--per-server 0", plan, "slurm", replace(LAUNCH, per_server=0))
    refuses("--cpus must be at least 1, got 0", plan, "slurm", replace(LAUNCH, cpus=0))
    refuses("--cpus does not apply to torchrun", plan, "torchrun", replace(LAUNCH, cpus=1))
    refuses("--time does not apply to kubernetes", plan, "kubernetes",
            replace(LAUNCH, image="x", time="30"))  # fmt: skip
    refuses("--to kubernetes needs --image", plan, "kubernetes", LAUNCH)
    refuses("--image does not apply to slurm", plan, "slurm", replace(LAUNCH, image="x"))
    two = replace(LAUNCH, cluster=machines(4, 4))
    refuses(r"rank 2 \('s0g1'\) is on the server of 's0g0'", plan, "torchrun", two)
    refuses("1 devices of the server of 's1g0' and 2", on_devices("s0g0", "s0g1", "s1g0"),
            "torchrun", two)  # fmt: skip
    refuses("has no device 's1g0' of the plan", plan, "torchrun",
            replace(LAUNCH, cluster=machines(4)))  # fmt: skip
    refuses("--per-server: the servers follow", plan, "torchrun", replace(two, per_server=1))
    flat = from_matrix([Device("s0g0", "v100", 16e9)], [[1e9]], name="flat")
    refuses("'flat' names no servers", plan, "torchrun", replace(LAUNCH, cluster=flat))


# ---------------------------------------------------------------- the command


def run_command(tmp_path, plan, to, output, **options):
    save_plan(plan, tmp_path / "plan.json")
    given = exporting.ExportOptions(
        plan=tmp_path / "plan.json", to=to, output=tmp_path / output, **options
    )
    return exporting.export(given)


def test_command_writes_one_file_or_a_folder(tmp_path, capsys):
    plan, options = make_plan((0, 1)), make_model("embedding", "head")
    save_model(options.model, tmp_path / "model.json")
    assert run_command(tmp_path, plan, "torch-csv", "my.csv") == 0
    assert read_csv((tmp_path / "my.csv").read_text())
    said = capsys.readouterr().out
    assert "my.csv is written" in said
    assert "stage 1: layers 1 to 1, row 1" in said
    assert run_command(tmp_path, plan, "torch-csv", ".") == 0
    assert (tmp_path / "schedule.csv").is_file()
    model = tmp_path / "model.json"
    for _ in range(2):  # the folder may be there
        assert run_command(tmp_path, plan, "torchtitan", "titan", model=model) == 0
    found = {path.name for path in (tmp_path / "titan").iterdir()}
    assert found == {"schedule.csv", "stagewright_parallelism.py"}
    capsys.readouterr()
    assert run_command(tmp_path, plan, "megatron", "m.sh", model=model, as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    files, remarks = [str(tmp_path / "m.sh")], ["ranks: 0 'g0', 1 'g1'"]
    assert said == {"status": "written", "reason": None, "files": files, "remarks": remarks}
    with pytest.raises(InputError, match=r"my.csv is a file; 2 files need a folder"):
        run_command(tmp_path, plan, "torchtitan", "my.csv", model=model)
    with pytest.raises(InputError, match="No such file"):
        run_command(tmp_path, plan, "torch-csv", "no/my.csv")


def test_command_reads_the_cluster(tmp_path):
    save_cluster(machines(2), tmp_path / "cluster.json")
    plan = on_devices("s0g1", "s0g0")
    options = {"command": "true", "cluster": tmp_path / "cluster.json"}
    assert run_command(tmp_path, plan, "torchrun", "run.sh", **options) == 0
    assert "gpus=(1,0)" in (tmp_path / "run.sh").read_text()


def test_command_says_that_a_plan_cannot_run(tmp_path, capsys):
    plan = make_plan((0, 1))
    broken = replace(plan, schedule=Schedule(plan.actions[1:]))
    assert run_command(tmp_path, broken, "torch-csv", "x.csv") == 1
    assert "cannot run: " in capsys.readouterr().out
    assert run_command(tmp_path, broken, "torch-csv", "x.csv", as_json=True) == 1
    said = json.loads(capsys.readouterr().out)
    assert (said["status"], said["files"], said["remarks"]) == ("invalid", None, None)
    assert said["reason"]
    assert not (tmp_path / "x.csv").exists()


def test_help_names_every_format():
    hint = " ".join(exporting.ExportOptions.model_fields["to"].description.split())
    plans, layouts = hint.rstrip(".").split("; of a layout: ")
    assert plans.split(", ") == list(FORMATS)
    assert re.sub(r" \(.*?\)", "", layouts).split(", ") == list(EVERY_FORMAT)


def test_a_plan_is_lowered_once_for_all_formats(monkeypatch):
    """Figures do not matter, other actions do."""
    lowered = []
    monkeypatch.setattr(pipelines, "lower", lambda one: lowered.append(one) or lower(one))
    pipelines._verified.cache_clear()
    one, other = (make_plan((0, 1), microbatches=count) for count in (4, 8))
    for made in (one, replace(one, certificate=None, predicted=None), other):
        assert len(export(made, "torch-csv")["schedule.csv"]) > 0
    assert [made.microbatches for made in lowered] == [4, 8]


def test_exports_need_no_torch():
    code = "import stagewright.executor.export, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
