"""Configurations of transformers: parameters as published, and as ``transformers`` counts them."""

import json
import re
from dataclasses import replace

import pytest
from configurations import FEW, LATENT, SMALL, sized
from model_sizes import active_parameters, total_parameters

from stagewright.formulations.parallelism.document import (
    LayoutPlan,
    layout_plan,
    violations,
)
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.prices.analytic import architecture_model
from stagewright.graphs.documents.documents import parse, to_json
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.config_fields import Fields
from stagewright.graphs.importers.hf_config import (
    _architecture,
    _variant,
    architecture_of,
    read_hf_config,
)
from stagewright.graphs.importers.hf_types import TYPES
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.service.layouts.problems import training_problem

GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
BERT = {
    "model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "vocab_size": 30522,
}  # fmt: skip


DEEPSEEK_V3 = sized(
    "deepseek_v3", 61, 7168, 128, 128, 18432, 129280, moe_intermediate_size=2048,
    n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3,
    moe_layer_freq=1, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, num_nextn_predict_layers=1,
)  # fmt: skip
MIXTRAL = sized(
    "mixtral", 32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2
)
QWEN2_MOE = sized(
    "qwen2_moe", 24, 2048, 16, 16, 5632, 151936, num_experts=60, num_experts_per_tok=4,
    moe_intermediate_size=1408, shared_expert_intermediate_size=5632, decoder_sparse_step=1,
)  # fmt: skip

QWEN3_NEXT = sized(
    "qwen3_next", 48, 2048, 16, 2, 5120, 151936, num_experts=512, num_experts_per_tok=10,
    moe_intermediate_size=512, shared_expert_intermediate_size=512,
)  # fmt: skip
NEMOTRON_H = sized(
    "nemotron_h", 52, 4096, 32, 8, 21504, 131072,
    hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
)  # fmt: skip

KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]
KIMI_LINEAR = sized(  # moonshotai/Kimi-Linear-48B-A3B-Base
    "kimi_linear", 27, 2304, 32, 32, 9216, 163840, num_experts=256, num_experts_per_token=8,
    moe_intermediate_size=1024, num_shared_experts=1, kv_lora_rank=512, qk_nope_head_dim=128,
    qk_rope_head_dim=64, v_head_dim=128, linear_attn_config={
        "full_attn_layers": KIMI_FULL, "num_heads": 32, "head_dim": 128,
        "kda_layers": [one for one in range(1, 28) if one not in KIMI_FULL],
    },
)  # fmt: skip

# Fields as in the published config.json of each model; all counts are those of ``transformers``.
PUBLISHED = {
    "GPT-2": (GPT2, 124_439_808),
    "GPT-2 XL": (GPT2 | {"n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200),
    "GPT-NeoX-20B": (
        sized("gpt_neox", 44, 6144, 64, None, 24576, 50432), 20_554_567_680,
    ),
    "Llama-2-7B": (sized("llama", 32, 4096, 32, 32, 11008, 32000), 6_738_415_616),
    "Llama-3-8B": (sized("llama", 32, 4096, 32, 8, 14336, 128256), 8_030_261_248),
    "Llama-3-70B": (sized("llama", 80, 8192, 64, 8, 28672, 128256), 70_553_706_496),
    "Mistral-7B": (sized("mistral", 32, 4096, 32, 8, 14336, 32000), 7_241_732_096),
    "Mixtral-8x7B": (MIXTRAL, 46_702_792_704),
    "Qwen2-7B": (sized("qwen2", 28, 3584, 28, 4, 18944, 152064), 7_615_616_512),
    "Qwen3-8B": (sized("qwen3", 36, 4096, 32, 8, 12288, 151936, head_dim=128), 8_190_735_360),
    "Qwen1.5-MoE-A2.7B": (QWEN2_MOE, 14_315_784_192),
    "Gemma-7B": (
        sized("gemma", 28, 3072, 16, 16, 24576, 256000, head_dim=256), 8_537_680_896,
    ),
    "Gemma-2-9B": (
        sized("gemma2", 42, 3584, 16, 8, 14336, 256000, head_dim=256), 9_241_705_984,
    ),
    "DeepSeek-V3": (DEEPSEEK_V3 | {"num_nextn_predict_layers": 0}, 671_026_404_352),
    "T5-base": (
        {
            "model_type": "t5", "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12,
            "num_heads": 12, "vocab_size": 32128,
        },
        222_903_552,
    ),
    "BERT-base": (BERT, 109_514_298),
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT, 79_674_391_296),
    "Nemotron-H-8B": (NEMOTRON_H, 8_100_852_736),
    "Kimi-Linear-48B-A3B": (KIMI_LINEAR, 49_122_675_072),
    "Jamba-v0.1": (sized("jamba", 32, 4096, 32, 8, 14336, 65536), 51_570_323_328),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name):
    fields, expected = PUBLISHED[name]
    architecture = architecture_of(fields)
    assert total_parameters(architecture) == expected
    assert sum(architecture.parameters().values()) == expected


def test_the_encoder_of_bert():
    layers = architecture_of(BERT).parameters()
    pooler = 768 * 768 + 768
    assert sum(layers.values()) - layers["head"] + pooler == 109_482_240
    assert list(layers)[:2] == ["embedding", "block0"]


@pytest.mark.parametrize(
    ("fields", "billions"), [(MIXTRAL, 12.9), (PUBLISHED["DeepSeek-V3"][0], 37.0), (QWEN2_MOE, 2.7)]
)
def test_active_parameters_of_published_models(fields, billions):
    """Published with two or three digits."""
    active = active_parameters(architecture_of(fields))
    assert active / 1e9 == pytest.approx(billions, rel=0.02)


BLOCKS = (
    "gpt2", "t5", "bert", "qwen2_moe", "gpt_oss", "llama4_text", "deepseek_v3", "olmo2", "falcon",
    "opt", "nemotron_h", "qwen3_next", "jamba", "falcon_h1", "minimax", "lfm2",
)  # fmt: skip
"""Types that have between them all that blocks have."""

# One change at a time from small configurations that ``transformers`` builds too.
CHANGES = [
    *((kind, {}) for kind in SMALL),
    *((kind, {"tie_word_embeddings": False}) for kind in ("gpt2", "gemma", "gemma2")),
    *((kind, {"tie_word_embeddings": True}) for kind in ("llama", "deepseek_v3", "gpt_neox")),
    ("gpt2", {"n_inner": 50, "n_positions": 70}),
    ("bert", {"max_position_embeddings": 70, "type_vocab_size": 3}),
    ("llama", {"num_key_value_heads": None}),
    ("llama", {"head_dim": 10, "mlp_bias": True}),
    *((kind, {"attention_bias": True}) for kind in ("llama", "qwen3", "gemma", "gemma2")),
    *((kind, {"attention_bias": True}) for kind in ("deepseek_v2", "deepseek_v3")),
    ("gpt_neox", {"attention_bias": False}),
    ("deepseek_v2", {"q_lora_rank": None}),
    ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True, "n_shared_experts": 3}),
    ("deepseek_v3", {"first_k_dense_replace": 0}),
    ("qwen2_moe", {"decoder_sparse_step": 2}),
    ("qwen2_moe", {"mlp_only_layers": [1], "qkv_bias": False}),
    ("mistral", {"head_dim": None}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1}),
    ("falcon", {"parallel_attn": False, "alibi": True, "bias": True, "multi_query": False}),
    ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True}),
    ("cohere", {"use_qk_norm": True}),
    ("phi", {"qk_layernorm": True, "num_key_value_heads": 4}),
    ("glm4_moe", {"use_qk_norm": True, "attention_bias": True}),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "dense"]}),
    ("llama4_text", {"moe_layers": [0]}),
    ("kimi_linear", {"first_k_dense_replace": 3, "q_lora_rank": 8, "n_shared_experts": 2}),
    (
        "kimi_linear",
        {
            "linear_attn_config": {
                "full_attn_layers": [2, 6],
                "kda_layers": [1, 3, 4, 5],
                "num_heads": 2,
                "head_dim": 8,
                "short_conv_kernel_size": 3,
            }
        },
    ),
    ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_end_index": 1}),
    ("gpt_oss", {"attention_bias": False}),
    ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
]


def fields_read(values):
    """The names of all fields that are looked for in a configuration."""
    fields = Fields(values)
    kind = values["model_type"]
    _architecture(kind, _variant(TYPES[kind], fields), fields)
    return sorted(fields.sought)


def architectures(kind):
    """Those of a small model with one field null, or absent, if it may be; by the field."""
    values = SMALL[kind] | {"use_sliding_window": True}
    found, refused = {"": architecture_of(values)}, {}
    for name in fields_read(values):
        for how, changed in (("null", {name: None}), ("absent", {})):
            others = {one: value for one, value in values.items() if one != name}
            try:
                found[f"{name} {how}"] = architecture_of(others | changed)
            except InputError as error:
                refused[name] = str(error)
    assert all(name in told for name, told in refused.items())
    return found


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_layout_of_every_model_is_read_as_it_is_written(kind):
    """With every field null, and absent."""
    found = architectures(kind)
    for one in dict.fromkeys(found.values()):
        problem = training_problem(one, fabric_of_kind("h100", 1), sequence=8, batch=1)
        plan = layout_plan(problem, evaluate(problem, Layout(1, 1, 1, 1)))
        text = to_json(plan)
        read = parse(LayoutPlan, text, "layout")
        assert (read.problem.architecture, read.layout, read.memory) == (
            one, plan.layout, plan.memory,
        )  # fmt: skip
        assert to_json(read) == text
        assert violations(read) == ()
    if kind.startswith("deepseek"):
        assert found["q_lora_rank null"].attention.query_rank is None
    assert len(found) > 3  # some fields are optional


def built(fields, **options):
    """The model that ``transformers`` makes of a configuration, on the current device."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    given = {name: value for name, value in fields.items() if name != "model_type"}
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))  # small vocabularies
    kind = {"kimi_k2": "deepseek_v3"}.get(fields["model_type"], fields["model_type"])
    config = transformers.AutoConfig.for_model(kind, **given, **tokens, **options)
    masked = fields["model_type"] == "bert"
    family = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    if TYPES[fields["model_type"]].encoder_blocks is not None:
        speech = fields["model_type"] == "whisper"
        family = (
            transformers.AutoModelForSpeechSeq2Seq if speech else transformers.AutoModelForSeq2SeqLM
        )
    model = family.from_config(config)
    model.tie_weights()
    return model


EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")


def require_config(config, found):
    """What is read without being counted is that of the type's class."""
    rotary = getattr(config, "rope_parameters", None) or {"rope_theta": None}
    assert found.rotary_base == rotary.get("full_attention", rotary)["rope_theta"]
    epsilons = [getattr(config, name) for name in EPSILONS if hasattr(config, name)]
    assert [found.norm_epsilon] == (epsilons or [None])
    kinds = getattr(config, "layer_types", None) or []
    full = {index for index, kind in enumerate(kinds) if kind == "full_attention"}
    assert found.full_layers == full or found.window is None or not kinds


@pytest.mark.parametrize(("kind", "change"), CHANGES)
def test_parameters_equal_those_of_transformers(kind, change):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    fields = SMALL[kind] | change
    with torch.device("meta"):
        model = built(fields)
    found = architecture_of(fields)
    assert total_parameters(found) == sum(p.numel() for p in model.parameters())
    require_config(model.config, found)


@pytest.mark.parametrize("kind", ["qwen2_moe", "gpt_oss"])
def test_flops_equal_those_that_torch_counts(kind):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    counter = pytest.importorskip("torch.utils.flop_counter", reason="torch counts no FLOPs")
    # Its counter knows plain products only.
    model = built(SMALL[kind], attn_implementation="eager", experts_implementation="eager")
    with counter.FlopCounterMode(display=False) as counted, torch.no_grad():
        model(input_ids=torch.zeros(2, 16, dtype=torch.int64))
    found = architecture_of(SMALL[kind]).flops(2, 16)
    assert counted.get_total_flops() == sum(sum(one.values()) for one in found.values())


def test_sliding_windows():
    def windows(kind, **change):
        found = architecture_of(SMALL[kind] | change)
        every = found.flops(1, 8)
        return [every[f"block{i}"]["attention"] for i in range(found.layers)]

    full, part = windows("llama")[0], windows("mistral", sliding_window=4)[0]
    assert part == full / 2
    assert windows("mistral") == windows("mistral", sliding_window=None) == 3 * [full]
    assert windows("qwen2", sliding_window=4) == 3 * [full]  # use_sliding_window is false
    used = {"sliding_window": 4, "use_sliding_window": True}
    assert windows("qwen2", max_window_layers=2, **used) == [full, full, part]
    assert windows("qwen2_moe", max_window_layers=1, **used) == [part, full, full]
    wide = windows("gemma2")[0]
    assert windows("gemma2", sliding_window=4) == [wide / 2, wide, wide / 2]
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert windows("gemma2", sliding_window=4, layer_types=kinds) == [wide, wide / 2, wide]


def test_a_file_is_read_as_it_is_published(tmp_path):
    path = tmp_path / "config.json"
    extra = {"architectures": ["MistralForCausalLM"], "rope_theta": 1e6, "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(SMALL["mistral"] | extra))
    assert read_hf_config(path) == replace(architecture_of(SMALL["mistral"]), rotary_base=1e6)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("qwen2", {"rope_theta": 1e6, "rms_norm_eps": 1e-5}),
        ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000}}),
        ("llama", {"rope_theta": None, "rope_parameters": None, "rms_norm_eps": 1e-3}),
        ("gpt2", {"layer_norm_epsilon": 1e-6}),
        ("bert", {"layer_norm_eps": 1e-6}),
        ("gpt_neox", {"rotary_emb_base": 25_000, "layer_norm_eps": 1e-6}),
        ("gemma3_text", {"sliding_window_pattern": 2}),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 4, "no_rope_layers": [0, 1, 1]}),
        ("llama4_text", {"attention_chunk_size": 4, "no_rope_layers": [1, 1, 0]}),
    ],
)
def test_rotary_base_and_epsilon_equal_those_of_transformers(kind, change):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    fields = SMALL[kind] | change
    given = {n: value for n, value in fields.items() if n != "model_type" and value is not None}
    require_config(transformers.AutoConfig.for_model(kind, **given), architecture_of(fields))


@pytest.mark.parametrize("value", [0, -1.0, "1e6", True, float("inf")])
def test_a_rotary_base_is_a_number_above_0(value):
    with pytest.raises(InputError, match="rope_theta must be a number above 0, got"):
        architecture_of(SMALL["llama"] | {"rope_theta": value})


def test_the_source_states_what_is_assumed():
    chain = architecture_model(architecture_of(DEEPSEEK_V3), 128, 1, "h100", precision="bf16")
    assert "blocks of multi-token prediction beside the head, not recomputed" in chain.source
    assert "all experts on the device" in chain.source
    assert len(chain) == 63


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "t5gemma"},
            "model_type must be one of .*'t5gemma', and an encoder and a decoder cannot be priced",
        ),
        ({"model_type": ["llama"]}, r"model_type must be one of .*\['llama'\]"),
        ({"model_type": None}, "model_type must be one of .* there is None"),
        ({"hidden_size": ...}, "hidden_size is missing; it must be a positive integer"),
        ({"hidden_size": None}, "hidden_size is null"),
        (
            {"num_key_value_heads": ..., "num_key_value_head": 2},
            "num_key_value_head is not a field that is read; is num_key_value_heads meant",
        ),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer, got '32'"),
        ({"hidden_size": 33}, r"hidden_size \(33\) must be a multiple of num_attention_heads"),
        ({"vocab_size": True}, "vocab_size must be a positive integer, got True"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"vocab_size": 10**10}, "vocab_size must be at most"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be at most"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple of num_key"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        (
            {"mlp_only_layers": [0, 99]},
            r"mlp_only_layers must be a list of layers from 0 to \d+, got",
        ),
        ({"rope_parameters": "x"}, "rope_parameters must be an object, got 'x'"),
        ({"max_window_layers": -1, "use_sliding_window": True}, "max_window_layers must be an"),
        ({"layer_types": [], "use_sliding_window": True}, "layer_types must be a list of 3 kinds"),
        (
            {"layer_types": ["full_attention", "wide", 3], "use_sliding_window": True},
            r"layer_types\[1\] must be full_attention or sliding_attention, got 'wide'",
        ),
        ({"num_experts_per_tok": 6}, "6 experts per token, but there are 5"),
    ],
)
def test_bad_fields_are_refused(change, message, tmp_path):
    fields = {k: v for k, v in (SMALL["qwen2_moe"] | change).items() if v is not ...}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(InputError, match=re.escape(f"{path}: ") + message):
        read_hf_config(path)


EXPERTS = FEW | {"decoder_sparse_step": 1, "mlp_only_layers": []}


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("yi", {"rms_norm_eps": 1e-6}, "'yi', with the fields of llama: set model_type to it if"),
        ("other", EXPERTS, "'other', with the fields of qwen3_moe"),
        ("deepseek_v32", LATENT | {"first_k_dense_replace": 1}, "with the fields of deepseek_v3:"),
        ("zamba2", {}, "mixers of no known kind, cannot be priced; the nearest is"),
        ("mine", {"is_encoder_decoder": True}, "an encoder and a decoder cannot be priced"),
        ("qwen3_9_text", {}, "with the fields of qwen3:"),
        ("longcat_flash", {"hidden_size": ...}, "there is 'longcat_flash'$"),
        ("lama", {"hidden_size": ...}, "'lama'; is llama meant"),
        ("llava", {"text_config": {"model_type": "rwkv"}}, "text_config: model_type .*'rwkv', and"),
    ],
)
def test_other_types_are_told_the_nearest(kind, change, message):
    fields = sized(kind, 3, 32, 4, 2, 48, 90) | change
    with pytest.raises(InputError, match=message):
        architecture_of({name: value for name, value in fields.items() if value is not ...})


def test_the_text_model_of_a_model_with_other_towers():
    text = {"model_type": "gemma3_text", "hidden_size": 32, "num_hidden_layers": 6}
    found = architecture_of({"model_type": "gemma3", "text_config": text})
    assert found == replace(architecture_of(text), left_out="what gemma3 has beside its text model")
    assert (found.attention.heads, found.vocabulary, found.full_layers) == (8, 262_208, {5})


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before must be true"),
        ("bert", {"is_decoder": True}, "is_decoder must be false: such models are not supported"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention must be false"),
        ("gpt2", {"resid_pdrop": "none"}, "resid_pdrop must be from 0 to 1, got 'none'"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias must be false"),
        ("nemotron_h", {"moe_latent_size": 8}, "moe_latent_size must be false"),
        ("nemotron_h", {"hybrid_override_pattern": "M*-X"}, r"pattern\[3\] must be .* got 'X'"),
        ("nemotron_h", {"hybrid_override_pattern": "----"}, "needs a block that mixes tokens"),
        ("kimi_linear", {"linear_attn_config": 3}, "linear_attn_config must be an object, got 3"),
        (
            "kimi_linear",
            {"linear_attn_config": {"full_attn_layers": [7]}},
            r"full_attn_layers must be a list of layers from 0 to 6, got \[7\]",
        ),
        ("qwen3_next", {"layer_types": []}, "layer_types must be a list of 3 kinds"),
        ("qwen3_next", {"layer_types": ["mlp"] * 3}, r"layer_types\[0\] must be .* got 'mlp'"),
        ("bamba", {"mamba_n_heads": 7, "mamba_d_head": "auto"}, "must be a multiple of mamba_n_he"),
    ],
)
def test_models_that_are_not_counted_are_refused(kind, change, message):
    with pytest.raises(InputError, match=message):
        architecture_of(SMALL[kind] | change)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a complete JSON document"),
        ("[]", "a configuration is an object with the field 'model_type'"),
        ("{}", "model_type must be one of .* there is no such field"),
    ],
)
def test_other_files_are_refused(text, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_hf_config(path)
    with pytest.raises(InputError, match=r"none\.json: No such file"):
        read_hf_config(tmp_path / "none.json")
