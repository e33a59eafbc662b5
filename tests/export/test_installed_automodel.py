"""Exports to NeMo AutoModel, read by the installed release: its sections, stages and schedules.

It is no dependency: ``pip install --no-deps nemo-automodel==0.7.0``, and transformers.
"""

import pytest
from exported_plans import MICROBATCHES, gpt, make_plan, random_rows
from releases import alone, require_release
from yaml import safe_load

from stagewright.executor.export import export


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
