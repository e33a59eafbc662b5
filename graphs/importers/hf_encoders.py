"""The encoder-decoders of transformers that are read: which fields of a ``config.json`` mean what.

An entry is as in ``hf_types``, of the decoder, with the fields of the encoder beside it.
"""

from dataclasses import replace

from stagewright.graphs.importers.config_fields import Field
from stagewright.graphs.importers.hf_fields import EncoderFields, ModelType

_TIED: Field = ("tie_word_embeddings", True)

_T5 = ModelType(
    layers="num_decoder_layers|num_layers", hidden="d_model", heads="num_heads", groups=None,
    head_size=("d_kv", 64), bias=False, width="d_ff", gated=("feed_forward_proj", "relu"),
    epsilon=("layer_norm_epsilon", 1e-6), base=None, rotary=False, tied=_TIED,
    dropout=("dropout_rate", 0.1),
    encoder_blocks=EncoderFields(
        layers="num_layers", heads="num_heads", width="d_ff",
        scores=("relative_attention_num_buckets", 32),
    ),
)  # fmt: skip
_MT5 = replace(_T5, gated=("feed_forward_proj", "gated-gelu"))
_BART = ModelType(
    layers="decoder_layers", hidden="d_model", heads="decoder_attention_heads", groups=None,
    head_size=None, bias=True, width="decoder_ffn_dim", gated=("activation_function", "gelu"),
    mlp_bias=True, norm="layer", epsilon=None, base=None, embedding_norm=True, final_norm=False,
    positions=("max_position_embeddings", 1024), offset=2, tied=_TIED, dropout=("dropout", 0.1),
    encoder_blocks=EncoderFields(output_norm=False),
)  # fmt: skip
_MARIAN = replace(_BART, offset=0, embedding_norm=False)

ENCODER_DECODERS: dict[str, ModelType] = {
    "t5": _T5,
    "mt5": _MT5,
    "umt5": replace(
        _MT5, encoder_blocks=EncoderFields(
            layers="num_layers", heads="num_heads", width="d_ff", every=True,
            scores=("relative_attention_num_buckets", 32),
        ),
    ),
    "bart": _BART,
    "marian": _MARIAN,
    "pegasus": replace(_MARIAN, final_norm=True, encoder_blocks=EncoderFields()),
    "mbart": replace(_BART, final_norm=True, encoder_blocks=EncoderFields()),
    "m2m_100": replace(
        _MARIAN, positions=None, rotary=False, final_norm=True, encoder_blocks=EncoderFields()
    ),
    "whisper": replace(
        _MARIAN, key_bias=False, positions=("max_target_positions", 448), final_norm=True,
        dropout=("dropout", 0.0),
        encoder_blocks=EncoderFields(
            tokens=("max_source_positions", 1500), channels=("num_mel_bins", 80)
        ),
    ),
}  # fmt: skip
