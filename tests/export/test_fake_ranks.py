"""Exported layouts start as ranks whose communication does nothing: layers, shards, microbatches.

TorchTitan is no dependency, see ``test_installed_torchtitan``; transformers runs where it is
installed.
"""

import importlib
import sys
from dataclasses import replace

import pytest
from layout_problems import LLAMA, make_problem
from releases import alone, require_release

from stagewright.executor.export.layouts import export_layout
from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.graphs.models.architecture import FeedForward, GroupedAttention

pytestmark = pytest.mark.slow

TITAN = replace(LLAMA, layers=6, hidden=256, vocabulary=2048)  # sizes of its debug model
SMALL = replace(
    LLAMA, layers=2, hidden=64, vocabulary=96, attention=GroupedAttention(4, 2, 16),
    feed_forward=FeedForward(128),
)  # fmt: skip


@pytest.fixture
def module_of(tmp_path, monkeypatch):
    """The module among the exported files of a layout."""

    def load(problem, layout, to):
        files = export_layout(problem, layout, to)
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("WORLD_SIZE", str(layout.ranks))
        (name,) = (name.removesuffix(".py") for name in files if name.endswith(".py"))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return load


def shares(parameters):
    """The part of every weight that a rank has, and of norms."""
    found = {"weights": set(), "norms": set()}
    for name, parameter in parameters:
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        kind = "norms" if "norm" in name else "weights"
        found[kind].add(parameter.numel() / local.numel())
    return found


@pytest.mark.parametrize("words", ["t2 d4 b1 zero3 full", "d8 b2 zero3", "t2 d1 b1"])
def test_transformers_divides_as_planned(words, tmp_path, module_of, monkeypatch):
    transformers = pytest.importorskip("transformers", minversion="5.24")
    sizes = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=96,
    )  # fmt: skip
    transformers.LlamaForCausalLM(sizes).save_pretrained(tmp_path / "model")
    layout = parse_layout(words)
    module = module_of(make_problem(SMALL, layout), layout, "transformers")
    rank = layout.ranks - 1
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    with alone(rank, layout.ranks):
        model = module.load(tmp_path / "model")
        found = shares(model.named_parameters())
    assert found == {"weights": {layout.ranks}, "norms": {layout.data}}
    assert model.is_gradient_checkpointing == (layout.recompute == "full")


@pytest.mark.parametrize(
    "words",
    [
        "t2 d4 b1 zero3 sp",
        "d8 b1 zero2 full",
        "p2 t2 d2 b1 zero1 sp",
        "p2 d2 b1 v2 zero1 first1 last1",
    ],
)
def test_torchtitan_divides_as_planned(words, module_of, monkeypatch):
    require_release("torchtitan", "0.3.0")
    import torch
    from torchtitan.distributed import ParallelDims, parallel_dims, utils

    monkeypatch.setattr(parallel_dims, "device_type", "cpu")
    monkeypatch.setenv("BASE", "torchtitan.models.llama3.config_registry.llama3_debugmodel")
    layout = parse_layout(words)
    problem = make_problem(TITAN, layout)
    config = module_of(problem, layout, "torchtitan").planned()
    spec, blocks = config.model_spec, layout.blocks_of_stages(TITAN.layers)
    config.parallelism.spmd_backend = "partial_dtensor"  # the others want devices
    utils.set_spmd_backend("partial_dtensor")
    spec.model.update_from_config(config=config)
    for rank in (0, layout.ranks - 1):
        with alone(rank, layout.ranks):
            dims = ParallelDims.from_config(config.parallelism, layout.ranks)
            dims.build_mesh()
            with torch.device("meta"):
                model = spec.model.build()
            given = {
                "parallel_dims": dims,
                "training": config.training,
                "parallelism": config.parallelism,
                "compile_config": config.compile,
                "ac_config": config.activation_checkpoint,
                "dump_folder": "",
            }
            if layout.pipeline > 1:
                schedule, parts, _, _ = spec.pipelining_fn(
                    model,
                    **given,
                    device=torch.device("cpu"),
                    model_config=spec.model,
                    parallelize_fn=spec.parallelize_fn,
                    loss_fn=lambda *_: None,
                )
                assert schedule._n_microbatches == layout.microbatches(problem.batch)
            else:
                parts = [spec.parallelize_fn(model, **given)]
            stage = rank // (layout.ranks // layout.pipeline)
            assert [len(part.layers) for part in parts] == list(blocks[stage :: layout.pipeline])
            for part in parts:
                divided = shares(part.layers.named_parameters())
                assert divided["weights"] == {layout.tensor * layout.data}
                assert divided["norms"] == {layout.data}
