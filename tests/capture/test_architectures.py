"""Architectures read from modules of transformers: those of the table, and of other types."""

import json
from dataclasses import replace

import pytest
from configurations import ENCODERS, SMALL, sized
from kept_by_torch import MORE, counted_elements, kept_elements, with_kernels
from kept_by_torch import TOKENS as KEPT_TOKENS

from stagewright.executor.capture import architectures
from stagewright.executor.capture.architectures import TRAIT, architecture_of_module
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.hf_config import architecture_of
from stagewright.graphs.models.stated import NOTHING
from stagewright.service.architectures import read_architecture

pytest.importorskip("transformers", reason="transformers is not installed")

TOKENS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))  # small vocabularies


def limits(found):
    """The windows of all blocks."""
    return [None if i in found.full_layers else found.window for i in range(found.layers)]


# The mixers of kimi_linear are read from its fields alone, its module is not.
DECODERS = SMALL.keys() - ENCODERS - {"bert", "kimi_k2", "kimi_linear"}


@pytest.mark.parametrize("kind", sorted(DECODERS))
def test_the_module_and_the_table_agree(kind, monkeypatch):
    """Parameters and FLOPs of the module are compared as it is read."""
    model = architectures._built(kind, SMALL[kind] | TOKENS)
    monkeypatch.setattr(architectures, "_built", lambda *_: model)
    known = architecture_of(SMALL[kind])
    if kind != "llama4_text":  # norms without weights
        found = architecture_of_module(SMALL[kind] | TOKENS)
        assert limits(found) == limits(known)
        assert found == replace(
            known, traits=(TRAIT,), rotary_base=None, norm_epsilon=None, stated=NOTHING,
            window=found.window, full_layers=found.full_layers,
        )  # fmt: skip
    blocks = architectures._blocks(model, kind, known.layers)
    with_kernels(model, blocks, monkeypatch)
    plain, more = replace(known, dropout=False), MORE.get(kind, 0.0) * known.hidden * KEPT_TOKENS
    for index, elements in kept_elements(model, blocks, plain).items():
        assert counted_elements(plain, index) == pytest.approx(elements - more, rel=0.03)


UNKNOWN = sized("hunyuan_v1_moe", 3, 32, 4, 2, 48, 90, head_dim=8, num_experts=4, moe_topk=2)


def test_a_type_that_the_table_lacks(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(UNKNOWN | TOKENS))
    found = read_architecture(path)
    assert (found.experts.number, found.experts.per_token, found.attention.head_norms) == (
        4, 2, True,
    )  # fmt: skip
    path.write_text(json.dumps({"model_type": "tower", "text_config": UNKNOWN | TOKENS}))
    assert read_architecture(path) == replace(
        found, left_out="what tower has beside its text model"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (sized("unheard", 3, 32, 4, 2, 48, 90), "fields of llama.*transformers cannot build it"),
        (sized("diffllama", 3, 32, 4, 2, 48, 90), "block 0 has 7776 parameters, and attention and"),
        ({"model_type": "clvp_decoder"}, "'clvp_decoder'; transformers cannot build it"),
    ],
)
def test_what_the_module_does_not_tell_is_refused(fields, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields | TOKENS))
    with pytest.raises(InputError, match=message):
        read_architecture(path)


def test_flops_that_differ_are_refused(monkeypatch):
    monkeypatch.setattr(architectures, "_flops", lambda *_: 1e6)
    with pytest.raises(InputError, match=r"takes 1e\+06 FLOPs, by its architecture"):
        architecture_of_module(SMALL["llama"] | TOKENS)


def test_without_transformers_the_message_says_so(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(UNKNOWN))
    monkeypatch.setattr("stagewright.service.architectures.find_spec", lambda name: None)
    with pytest.raises(InputError, match="with transformers installed its module tells"):
        read_architecture(path)
