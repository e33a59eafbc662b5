"""Models with an encoder or a tower in front, and with further tokens: as modules count them."""

from dataclasses import replace

import pytest
from configurations import ROUTED, SMALL, sized

from stagewright.formulations.prices.analytic import architecture_model
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.hf_config import architecture_of
from stagewright.graphs.models.shards import LayerSplit, shares_of
from stagewright.graphs.models.towers import with_inputs
from stagewright.graphs.models.traits import every_trait, remarks_on, said_parameters
from stagewright.graphs.models.tuning import tuned_with

TEXT = sized("llama", 3, 32, 4, 2, 48, 90, head_dim=8)
SIDES = {"image_size": 56, "patch_size": 14, "hidden_size": 32, "intermediate_size": 48,
         "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip
DEEP = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48,
        "out_hidden_size": 32}  # fmt: skip


def wrapped(kind, text, vision, **others):
    """A model with a tower of images of 4 x 4 patches."""
    inner = TEXT | {"model_type": text}
    return {"model_type": kind, "text_config": inner, "vision_config": vision, **others}


# Parameters, and FLOPs of a forward of one sample of 16 tokens, as transformers' modules have them.
COUNTED = {
    "llava": (
        wrapped("llava", "llama", SIDES | {"model_type": "clip_vision_model"}), 65_664, 2_156_800,
    ),
    "gemma3": (
        wrapped(
            "gemma3", "gemma3_text",
            SIDES | {"model_type": "siglip_vision_model", "vision_use_head": False},
            mm_tokens_per_image=4,
        ), 61_872, 2_062_336,
    ),
    "mistral3": (
        wrapped("mistral3", "mistral", SIDES | {"model_type": "pixtral"},
                tie_word_embeddings=False), 71_584, 2_201_600,
    ),
    "llama4": (
        wrapped(
            "llama4", "llama4_text",
            SIDES | {
                "intermediate_size": 128, "vision_output_dim": 24, "projector_input_dim": 24,
                "projector_output_dim": 24,
            },
        ), 134_048, 4_256_512,
    ),
    "internvl": (
        wrapped("internvl", "qwen2", SIDES | {"image_size": [56, 56], "patch_size": [14, 14]},
                tie_word_embeddings=False), 69_024, 2_132_224,
    ),
    "idefics3": (wrapped("idefics3", "llama", SIDES), 67_552, 2_086_912),
    "qwen2_vl": (
        wrapped(
            "qwen2_vl", "qwen2_vl_text",
            {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2,
             "image_size": 56},
        ), 104_640, 2_885_632,
    ),
    "qwen2_5_vl": (
        wrapped(
            "qwen2_5_vl", "qwen2_5_vl_text",
            DEEP | {"window_size": 28, "fullatt_block_indexes": [1], "image_size": 56},
        ), 105_568, 2_893_824,
    ),
    "qwen3_vl": (
        wrapped(
            "qwen3_vl", "qwen3_vl_text",
            DEEP | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        ), 135_376, 3_352_576,
    ),
}  # fmt: skip
COUNTED["llama4"][0]["text_config"] |= ROUTED | {
    "intermediate_size_mlp": 40,
    "num_experts_per_tok": 4,
}


@pytest.mark.parametrize("kind", COUNTED)
def test_parameters_and_flops_of_towers_equal_those_of_modules(kind):
    fields, parameters, flops = COUNTED[kind]
    found = architecture_of(fields)
    assert sum(found.parameters().values()) == parameters
    assert sum(sum(one.values()) for one in found.flops(1, 16).values()) == flops
    assert (found.layers, found.tower.layers, found.name) == (5, 2, kind)
    assert said_parameters(found).startswith(f"{parameters / 1e9:.4g} B parameters")


@pytest.mark.parametrize(
    ("kind", "flops"),
    [("t5", 3_788_800), ("umt5", 4_280_320), ("bart", 3_690_496), ("whisper", 1_405_956_096)],
)
def test_flops_of_encoders_equal_those_of_modules(kind, flops):
    """Of two samples of 16 tokens each, those of Whisper with 30 seconds of sound."""
    found = architecture_of(SMALL[kind]).flops(2, 16)
    assert sum(sum(one.values()) for one in found.values()) == flops


def test_adapters_of_a_decoder_behind_a_tower():
    """The tower is left out, and said to be."""
    whole = architecture_of(COUNTED["llava"][0])
    text = architecture_of(COUNTED["llava"][0]["text_config"])
    found = tuned_with(whole, lora=4, frozen="blocks.0")
    assert found.left_out == "the tower for images"
    assert found.parameters() == tuned_with(text, lora=4, frozen="blocks.0").parameters()
    assert tuned_with(whole) == whole


LARGER = {"image_size": 112, "patch_size": 14}
KEPT = [
    (SMALL["bart"] | {"dropout": 0.0}, 1, 11.25, 64),
    (SMALL["bart"] | {"dropout": 0.0, "decoder_attention_heads": 4}, -2, 16.9375, 64),
    (COUNTED["gemma3"][0] | {"vision_config": SIDES | LARGER | {"vision_use_head": False}}, 1,
     11.25, 64),
    (COUNTED["internvl"][0] | {"vision_config": SIDES | LARGER}, 1, 13.25, 65),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "place", "counted", "tokens"), KEPT)
def test_kept_elements_are_near_those_of_saved_tensors(fields, place, counted, tokens):
    """Of a token of a block, in hidden states, as torch's hooks of saved tensors count them."""
    block = shares_of(architecture_of(fields), 64, LayerSplit()).every[place]
    assert block.saved_bytes(4, "none") / (4 * tokens * 32) == pytest.approx(counted, rel=0.03)


def test_what_stages_hand_on_and_keep_once():
    """Of T5: the tokens of both go along; every stage keeps scores, and the encoder's outputs."""
    of = with_inputs(architecture_of(SMALL["t5"]), encoder_tokens=24)
    shares = shares_of(of, 8, LayerSplit())
    assert shares.sent == 24 * 32 + 8 * 32
    assert {one.kept_once for one in shares.kinds} == {
        ("tower", 4 * 24**2), ("decoder", 4 * 8**2 + 24 * 32),
    }  # fmt: skip
    images = with_inputs(architecture_of(COUNTED["llava"][0]), images=2)
    shares = shares_of(images, 40, LayerSplit())
    assert (shares.sent, shares.widest) == (2 * 17 * 32 + 40 * 32, 40 * 32)
    assert remarks_on(images, 40) == (
        "2 images in a sample, each 17 tokens of the tower and 16 of the sequence",
    )


def test_further_tokens():
    """DeepSeek-V3's report counts 11.5 billion parameters of its own in the block."""
    of = architecture_of(DEEPSEEK_V3)
    own = sum(of.parameters().values()) - sum(replace(of, next_tokens=None).parameters().values())
    assert own / 1e9 == pytest.approx(11.5, rel=0.02)
    whole, plain = (
        shares_of(one, 64, LayerSplit(expert=64)).head
        for one in (of, replace(of, next_tokens=None))
    )
    block = shares_of(of, 64, LayerSplit(expert=64)).kinds[-1]
    table = 129_280 * 7168
    assert whole.expert_parameters == block.expert_parameters
    assert whole.parameters == plain.parameters + block.parameters + 2 * 7168**2 + 3 * 7168
    assert (plain.tied_parameters, whole.tied_parameters) == (0, table)
    assert whole.gradient_bytes == plain.gradient_bytes
    flops = [sum(one.flops for one in share.operators.values()) for share in (whole, plain, block)]
    assert flops[0] == 2 * flops[1] + flops[2] + 2 * 64 * 2 * 7168**2


DEEPSEEK_V3 = sized(
    "deepseek_v3", 61, 7168, 128, 128, 18432, 129280, moe_intermediate_size=2048,
    n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=3,
    q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, num_nextn_predict_layers=1,
)  # fmt: skip


def test_configurations_of_towers_that_are_not_counted():
    other = wrapped("llava", "llama", SIDES | {"model_type": "swin"})
    assert architecture_of(other).left_out == "the swin of llava"
    flat = {**other, **other["text_config"], "model_type": "qwen2_vl", "vision_config": {
        "depth": 2, "embed_dim": 32, "num_heads": 4,
    }}  # fmt: skip
    del flat["text_config"]
    assert architecture_of(flat).tower.outputs == 256
    for change, message in (
        ({"hidden_size": 30}, "vision_config: hidden_size 30 is no multiple of 4 heads"),
        ({"image_size": None}, "vision_config: image_size is missing"),
        (
            {"patch_size": [14, 7]},
            r"vision_config: patch_size must be a positive integer, got \[14",
        ),
        ({"vision_use_head": True}, "vision_config: vision_use_head must be false"),
    ):
        fields = COUNTED["gemma3"][0]
        with pytest.raises(InputError, match=message):
            architecture_of(fields | {"vision_config": fields["vision_config"] | change})


SIZES = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 3}
TEXTS = {"joint_attention_dim": 24, "pooled_projection_dim": 20}
JOINED = SIZES | TEXTS | {"caption_projection_dim": 32}
DIFFUSION = [  # class, fields, tokens of text, parameters, FLOPs, block, its kept bytes
    ("DiT", {"out_channels": 8}, None, 749_826_464, None, 0, None),
    ("DiT", SIZES | {"num_layers": 2, "num_embeds_ada_norm": 10}, None, 60_272, 8_818_688, 0,
     168_456),
    ("PixArt", {"caption_channels": 4096}, 120, 611_349_152, 6_509_523_566_592, 0, None),
    ("PixArt", {"caption_channels": 4096, "use_additional_conditions": False}, 300, 610_856_096,
     6_633_579_773_952, 0, None),
    ("PixArt", SIZES | {"num_layers": 2, "attention_head_dim": 9, "cross_attention_dim": 36,
                        "caption_channels": 20}, 10, 71_852, 12_859_776, 0, 220_512),
    ("SD3", {"num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536}, 154,
     2_028_328_000, 8_437_355_053_056, 0, None),
    ("SD3", {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432,
             "qk_norm": "rms_norm"}, 154, 8_056_627_520, 29_596_766_900_224, 0, None),
    ("SD3", JOINED, 10, 117_952, 16_010_752, 1, 203_712),
    ("SD3", JOINED, 10, 117_952, 16_010_752, 2, 186_096),
    ("SD3", JOINED | {"qk_norm": "rms_norm", "dual_attention_layers": [0]}, 10, 125_456,
     18_120_192, 0, None),
    ("Flux", {"guidance_embeds": True}, 512, 11_901_408_320, 74_384_653_418_496, 0, None),
    ("Flux", SIZES | TEXTS | {"num_layers": 2, "num_single_layers": 3, "in_channels": 16}, 10,
     137_888, 25_675_264, 0, 215_552),
    ("Flux", SIZES | TEXTS | {"num_layers": 2, "num_single_layers": 3, "in_channels": 16}, 10,
     137_888, 25_675_264, 3, 184_880),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "fields", "tokens", "weights", "flops", "place", "kept"), DIFFUSION
)
def test_diffusion_transformers_are_as_modules_of_diffusers(
    kind, fields, tokens, weights, flops, place, kept
):
    """Release 0.42.1; of one sample of 4096 patches, or two of 64, by torch's counter.

    Kept bytes are of one sample in fp32, those of the rotation, which blocks share, left out, and
    of norms of heads the second tensor that a CPU keeps.
    """
    of = architecture_of({"_class_name": f"{kind}Transformer2DModel", **fields})
    of = with_inputs(of, encoder_tokens=tokens)
    assert sum(of.parameters().values()) == weights
    if flops is not None:
        samples, patches = (1, 4096) if weights > 10**6 else (2, 64)
        assert sum(sum(one.values()) for one in of.flops(samples, patches).values()) == flops
    if kept is not None:
        block = shares_of(of, 64, LayerSplit()).every[1 + place]
        assert block.saved_bytes(4, "none") == pytest.approx(kept, rel=0.03)


def test_what_goes_along_with_patches():
    """Text that the blocks pass on is of their width; text attended to goes along beside it."""
    flux, pixart = (
        architecture_of({"_class_name": f"{kind}Transformer2DModel", "caption_channels": 4096})
        for kind in ("Flux", "PixArt")
    )
    every = shares_of(flux, 64, LayerSplit()).every
    assert [one.width + one.handed_on for one in every[:2]] == [(64 + 512 + 1) * 3072] * 2
    assert len({*map(id, every)}) == 4  # a block of each kind
    block = shares_of(pixart, 64, LayerSplit()).every[1]
    assert (block.handed_on, block.kept_once) == (307 * 1152, ("decoder", 300 * 1152))
    assert remarks_on(pixart, 64) == ("300 tokens of text in a sample",)
    divided = shares_of(flux, 64, LayerSplit(tensor=2, sequence_parallel=True)).every[1]
    assert divided.operators["attention"].flops == every[1].operators["attention"].flops / 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"_class_name": "UNet2DConditionModel"}, "'UNet2DConditionModel', and other diffusion tr"),
        ({"_class_name": "SD3Transformer2DModel", "qk_norm": "layer_norm"}, "qk_norm must be null"),
        ({"_class_name": "SD3Transformer2DModel", "num_attention_heads": 24},
         "caption_projection_dim must be the hidden size, 1536"),
        ({"_class_name": "DiTTransformer2DModel", "norm_type": "layer_norm"}, "norm_type must be"),
        ({"_class_name": "PixArtTransformer2DModel"}, "caption_channels is missing"),
        ({"_class_name": "DiTTransformer2DModel", "activation_fn": "geglu"}, "activation_fn must"),
        ({"_class_name": ["DiTTransformer2DModel"]}, "there is .'DiTTransformer2DModel'., and"),
    ],
)  # fmt: skip
def test_other_diffusion_transformers_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        architecture_of(fields)


SD35 = architecture_of(
    {"_class_name": "SD3Transformer2DModel", **JOINED, "dual_attention_layers": [0]}
)


def refused_by(kind, do):
    fields = COUNTED[kind][0] if kind in COUNTED else SMALL.get(kind)
    with pytest.raises(InputError) as error:
        do(SD35 if fields is None else architecture_of(fields))
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "do", "message"),
    [
        ("llama", lambda of: with_inputs(of, images=2), "llama has no tower for images"),
        ("whisper", lambda of: with_inputs(of, encoder_tokens=9), "whisper has no encoder of any"),
        ("llava", lambda of: with_inputs(of, images=0), "images must be at least 1, got 0"),
        ("llava", lambda of: of.flops(1, 15), "must have room for 1 x 16 tokens of images"),
        ("bart", lambda of: of.flops(1, 1025), "at most the 1024 learned positions, got 1025"),
        ("t5", lambda of: architecture_model(of, 8), "t5 has an encoder and a decoder: a chain of"),
        ("t5", lambda of: tuned_with(of, lora=4), "LoRA or frozen layers of t5: they are not"),
        (
            "llava", lambda of: shares_of(of, 16, LayerSplit(tensor=2, sequence_parallel=True)),
            "sequence parallelism 2 does not divide 17 tokens of an encoder or a tower",
        ),
        (
            "t5", lambda of: shares_of(of, 16, LayerSplit(context=2)),
            "context degree 2: the tokens of an encoder or a tower are not divided",
        ),
        (
            "t5", lambda of: shares_of(of, 16, LayerSplit(), by_operator=True),
            "recomputation by operator (torchtitan) is not priced of it",
        ),
        ("sd3", lambda of: shares_of(of, 64, LayerSplit(context=2)), "the tokens of the text are"),
        (
            "sd3", lambda of: shares_of(of, 64, LayerSplit(), "materialized"),
            "has blocks of two attentions: their matrices of scores are not priced",
        ),
        ("sd3", lambda of: tuned_with(of, lora=4), "not priced of models with an encoder or a"),
    ],
)  # fmt: skip
def test_what_towers_do_not_have_is_refused(kind, do, message):
    assert message in refused_by(kind, do)


def test_traits_of_towers():
    of = architecture_of(COUNTED["idefics3"][0])
    assert every_trait(of) == ("a tower for images",)
    assert "an encoder and a decoder" in every_trait(architecture_of(SMALL["bart"]))
    assert "multi-token prediction" in every_trait(architecture_of(DEEPSEEK_V3))
