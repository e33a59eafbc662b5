"""Exports in Megatron Core's terms, read by the installed release.

It is no dependency: ``pip install megatron-core==0.16.1``. Its classes refuse an optimizer that is
offloaded unless Transformer Engine, which needs a GPU, is installed too: that is not tested here.
"""

from dataclasses import replace

import pytest
from exported_plans import gpt, make_plan
from layout_problems import GPT2, LLAMA, MIXTRAL, make_problem
from layout_readers import run_megatron
from releases import require_release

from stagewright.executor.export import export
from stagewright.executor.export.layouts import export_layout
from stagewright.executor.export.layouts.core import core_of, router_fields
from stagewright.formulations.parallelism.layout import Layout
from stagewright.graphs.models.architecture import GroupedAttention
from stagewright.graphs.models.stated import Routing, Stated

MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
TYPES = {"fp32": "float32", "bf16": "bfloat16"}
ROUTED = replace(
    MIXTRAL, stated=Stated(routing=Routing("sigmoid", True, 4, 2, 2.5, choice_bias=True))
)
KV2 = replace(LLAMA, attention=GroupedAttention(16, 2, 64))
TP = {"tensor": 2, "sequence_parallel": True}


@pytest.fixture(autouse=True, scope="module")
def _installed():
    require_release("megatron-core", "0.16")


def stages_of(text, ranks):
    """What every stage has, in the words of Megatron Core's own parser."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout = PipelineParallelLayerLayout.from_str(text, ranks)
    chunks = layout.virtual_pipeline_model_parallel_size
    return [
        [kind.name for kind in layout.layout[rank][chunk]]
        for chunk in range(chunks)
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 1, 0, 1)])
def test_the_plans_stages_are_megatrons(placement):
    cuts = [(0, 3), (3, 5), (5, 6), (6, 10)]  # E t t | t t | t | t t t L
    files = export(make_plan(placement, cuts=cuts), "megatron", gpt(8))
    words = files["megatron.sh"].split()
    text = words[words.index("--pipeline-model-parallel-layout") + 1].strip("'")
    assert stages_of(text, len(set(placement))) == [
        ["embedding", "decoder", "decoder"],
        ["decoder", "decoder"],
        ["decoder"],
        ["decoder", "decoder", "decoder", "loss"],
    ]


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [
        (LLAMA, Layout(pipeline=4, data=2, zero=1, microbatch=2, **TP)),
        (LLAMA, Layout(pipeline=2, chunks=2, recompute="full", recompute_blocks=2)),
        (LLAMA, Layout(pipeline=2, first_blocks=7, last_blocks=9, recompute="selective")),
        (LLAMA, Layout(data=4, zero=3)),
        (KV2, Layout(tensor=4, data=2)),
        (GPT2, Layout(context=2, data=2, zero=1)),
        (MIXTRAL, Layout(data=4, expert=4, zero=1)),
        (ROUTED, Layout(data=4, expert=4, zero=1)),
    ],
    ids=lambda one: str(one) if isinstance(one, Layout) else one.name,
)
def test_layouts_are_megatrons_configurations(architecture, layout):
    """They are checked when they are made."""
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    kernel = "materialized" if layout.recompute == "selective" else "fused"
    problem = make_problem(architecture, layout, attention=kernel)
    core = core_of(problem, layout)
    experts = architecture.experts
    sizes = (
        {} if experts is None else {"num_moe_experts": experts.number, "moe_grouped_gemm": False}
    )
    made = TransformerConfig(
        num_layers=architecture.layers,
        hidden_size=architecture.hidden,
        num_attention_heads=architecture.attention.heads,
        num_query_groups=architecture.attention.key_value_heads,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        layernorm_epsilon=architecture.norm_epsilon or 1e-5,
        **router_fields(architecture),
        **core.model,
        **sizes,
    )
    assert made.pipeline_model_parallel_size == layout.pipeline
    DistributedDataParallelConfig(**core.ddp)
    dtypes = {name: getattr(torch, TYPES[core.optimizer[name]]) for name in MOMENTS}
    OptimizerConfig(bf16=True, params_dtype=torch.bfloat16, **core.optimizer | dtypes)
    text = core.model["pipeline_model_parallel_layout"]
    if text is not None:
        args, _, _ = run_megatron(export_layout(problem, layout, "megatron")["megatron.sh"])
        assert args.pipeline_model_parallel_layout == text
        blocks = [stage.count("decoder") for stage in stages_of(text, layout.pipeline)]
        assert blocks == list(layout.blocks_of_stages(architecture.layers))
