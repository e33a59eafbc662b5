"""Models that were written elsewhere, small and without dropout, and batches for them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import torchvision_operators  # noqa: F401 - before torchvision is imported

TOKENS, LENGTH, CLASSES, IMAGE = 67, 12, 5, 32
IGNORED = -100
Batch = dict[str, Any] | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class AnyModel:
    """``build()`` makes the module, ``draw(n, generator)`` a mini-batch of n samples.

    ``package`` is the one that the module needs, ``lr`` a rate at which SGD's loss stays finite,
    ``rounding`` the most that orders of a sum change in float64, relative to what is learnt, and
    ``loss(output, targets)`` is that of pairs, if not cross-entropy.
    """

    name: str
    package: str
    build: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Batch]
    lr: float = 0.05
    rounding: float = 1e-8
    loss: Callable[..., Tensor] | None = None

    def make(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The module with the parameters of seed 0."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build().to(dtype)

    def batches(
        self, samples: int, count: int, dtype: torch.dtype = torch.float64
    ) -> Iterator[Batch]:
        """``count`` mini-batches of ``samples``."""
        generator = torch.Generator().manual_seed(1)
        for _ in range(count):
            yield _typed(self.draw(samples, generator), dtype)


def _typed(batch: Batch, dtype: torch.dtype) -> Batch:
    def typed(one: Any) -> Any:
        return one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one

    if isinstance(batch, dict):
        return {key: typed(one) for key, one in batch.items()}
    return typed(batch[0]), batch[1]


# --- Mini-batches --------------------------------------------------------------------------------


def tokens(n: int, generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, TOKENS, (n, length), generator=generator)


def text(n: int, generator: torch.Generator) -> Batch:
    """Tokens, of which each is to be found from those before it."""
    found = tokens(n, generator)
    return {"input_ids": found, "labels": found.clone()}


def _padded(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens of various lengths, and their mask."""
    ends = torch.randint(LENGTH // 2, LENGTH + 1, (n, 1), generator=generator)
    mask = (torch.arange(LENGTH) < ends).long()
    return tokens(n, generator) * mask, mask


def masked_text(n: int, generator: torch.Generator) -> Batch:
    """A third of the tokens is to be found; every microbatch has another number of them."""
    words, mask = _padded(n, generator)
    hidden = (torch.rand(words.shape, generator=generator) < 1 / 3) & (mask > 0)
    hidden[:, 0] = True
    labels = words.masked_fill(~hidden, IGNORED)
    return {"input_ids": words.masked_fill(hidden, 1), "attention_mask": mask, "labels": labels}


def translation(n: int, generator: torch.Generator) -> Batch:
    words, mask = _padded(n, generator)
    labels = tokens(n, generator, LENGTH // 2)
    return {"input_ids": words, "attention_mask": mask, "labels": labels}


def speech(n: int, generator: torch.Generator) -> Batch:
    sounds = torch.randn(n, 8, 40, generator=generator)
    return {"input_features": sounds, "labels": tokens(n, generator, LENGTH // 2)}


def images(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    pixels = torch.randn(n, 3, IMAGE, IMAGE, generator=generator)
    return pixels, torch.randint(CLASSES, (n,), generator=generator)


def labelled(n: int, generator: torch.Generator) -> Batch:
    pixels, labels = images(n, generator)
    return {"pixel_values": pixels, "labels": labels}


def captioned(n: int, generator: torch.Generator) -> Batch:
    pixels, _ = images(n, generator)
    return {"input_ids": tokens(n, generator), "pixel_values": pixels, "return_loss": True}


def segmented(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    pixels, _ = images(n, generator)
    return pixels, torch.randint(CLASSES, (n, IMAGE, IMAGE), generator=generator)


def classified(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return tokens(n, generator), torch.randint(CLASSES, (n,), generator=generator)


# --- transformers --------------------------------------------------------------------------------

NARROW = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": TOKENS,
}
GROUPED = {**NARROW, "num_key_value_heads": 2}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": IMAGE,
    "patch_size": 8,
}


def hugging_face(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A class of transformers by the name of its configuration's."""

    def build() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return made

    return build


def _mixtral() -> nn.Module:
    """With the loss of its routers; grouped products of matrices have no float64."""
    import transformers

    config = transformers.MixtralConfig(**GROUPED, num_local_experts=4, output_router_logits=True)
    config._experts_implementation = "eager"
    return transformers.MixtralForCausalLM(config)


def _clip() -> nn.Module:
    import transformers

    text = {**NARROW, "max_position_embeddings": 32, "eos_token_id": TOKENS - 1}
    tokens = {"bos_token_id": 1, "pad_token_id": 0}
    config = transformers.CLIPConfig(
        text_config={**text, **tokens}, vision_config=VISION, projection_dim=16
    )
    return transformers.CLIPModel(config)


TRANSFORMERS = (
    AnyModel(
        "gpt2",
        "transformers",
        hugging_face(
            *("GPT2LMHeadModel", "GPT2Config"),
            **{"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": TOKENS, "n_positions": 32},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
            **{"bos_token_id": 1, "eos_token_id": 2},
        ),
        text,
    ),
    *(
        AnyModel(
            name.lower(),
            "transformers",
            hugging_face(f"{name}ForCausalLM", f"{config}Config", **GROUPED, **options),
            text,
            rounding=rounding,
        )
        for name, config, options, rounding in (
            ("Llama", "Llama", {}, 1e-8),
            ("Qwen2", "Qwen2", {}, 1e-8),
            ("Qwen3", "Qwen3", {"head_dim": 8}, 1e-8),
            ("Gemma2", "Gemma2", {"head_dim": 8}, 1e-6),  # weights of its norms act in float32
            ("Gemma3", "Gemma3Text", {"head_dim": 8}, 1e-6),
            ("Mistral", "Mistral", {}, 1e-8),
        )
    ),
    AnyModel("mixtral", "transformers", _mixtral, text),
    AnyModel(
        "bert",
        "transformers",
        hugging_face(
            *("BertForMaskedLM", "BertConfig"),
            **{**NARROW, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        ),
        masked_text,
    ),
    AnyModel(
        "t5",
        "transformers",
        hugging_face(
            *("T5ForConditionalGeneration", "T5Config"),
            **{"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "vocab_size": TOKENS},
            **{"num_layers": 3, "num_decoder_layers": 3, "dropout_rate": 0.0},
            decoder_start_token_id=0,
        ),
        translation,
    ),
    AnyModel(
        "whisper",
        "transformers",
        hugging_face(
            *("WhisperForConditionalGeneration", "WhisperConfig"),
            **{"d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "vocab_size": TOKENS},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
            **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8, "dropout": 0.0},
            **{"max_source_positions": 20, "max_target_positions": 32, "pad_token_id": 0},
            **{"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        ),
        speech,
    ),
    AnyModel(
        "vit",
        "transformers",
        hugging_face("ViTForImageClassification", "ViTConfig", **VISION, num_labels=CLASSES),
        labelled,
    ),
    AnyModel("clip", "transformers", _clip, captioned),
)

# --- torchvision ---------------------------------------------------------------------------------


def settled(model: nn.Module) -> nn.Module:
    """``model`` with its batch norms by the statistics of one batch, which training keeps."""
    norms = [one for one in model.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model(torch.randn(16, 3, 2 * IMAGE, 2 * IMAGE))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
    return model


def vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from torchvision import models

        return settled(getattr(models, name)(num_classes=CLASSES, **options))

    return build


def _tracking() -> nn.Module:
    """ResNet-18 whose batch norms use and track the statistics of every microbatch."""
    return vision("resnet18")().train()


def _efficient() -> nn.Module:
    return vision("efficientnet_b0", dropout=0.0, stochastic_depth_prob=0.0)()


def _swin() -> nn.Module:
    """Swin-T's depths, narrower."""
    from torchvision.models import SwinTransformer

    return SwinTransformer(
        patch_size=[2, 2],
        embed_dim=24,
        depths=[2, 2, 6, 2],
        num_heads=[3, 6, 12, 24],
        window_size=[4, 4],
        stochastic_depth_prob=0.0,
        num_classes=CLASSES,
    )


def _vit_b() -> nn.Module:
    """ViT-B/16's parts, smaller."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(IMAGE, 8, 4, 4, 32, 64, num_classes=CLASSES)


TRACKING = "resnet18-tracking"

TORCHVISION = tuple(
    AnyModel(name, "torchvision", build, images, lr)
    for name, build, lr in (
        ("resnet18", vision("resnet18"), 0.01),
        (TRACKING, _tracking, 0.01),
        ("resnet50", vision("resnet50"), 0.0003),
        ("densenet121", vision("densenet121"), 0.01),
        ("mobilenet-v3-small", vision("mobilenet_v3_small", dropout=0.0), 0.01),
        ("efficientnet-b0", _efficient, 0.0003),
        ("vit-b-16", _vit_b, 0.01),
        ("swin-t", _swin, 0.01),
    )
)

# --- torch ---------------------------------------------------------------------------------------


class Encoding(nn.Module):
    """A classifier of sentences around torch's own encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the classes."""
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


class Twice(nn.Sequential):
    """Two convolutions."""

    def __init__(self, before: int, after: int) -> None:
        first = nn.Conv2d(before, after, 3, padding=1)
        super().__init__(first, nn.ReLU(), nn.Conv2d(after, after, 3, padding=1), nn.ReLU())


class UNet(nn.Module):
    """Every depth's values skip the depths below it and are joined on the way up."""

    def __init__(self, widths: tuple[int, ...] = (4, 8, 12, 16)) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.first = Twice(3, widths[0])
        self.down = nn.ModuleList(Twice(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.join = nn.ModuleList(Twice(2 * a, a) for a, _ in reversed(pairs))
        self.last = nn.Conv2d(widths[0], CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes for every pixel."""
        x = self.first(x)
        skipped = []
        for down in self.down:
            skipped.append(x)
            x = down(nn.functional.max_pool2d(x, 2))
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skipped.pop(), up(x)], dim=1))
        return self.last(x)


TORCH = (
    AnyModel("transformer-encoder", "torch", Encoding, classified),
    AnyModel("u-net", "torch", UNet, segmented),
)

MODELS = {one.name: one for one in (*TRANSFORMERS, *TORCHVISION, *TORCH)}
