"""Small models of torchvision, in training: their batch norms track statistics of microbatches."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.any_models import CLASSES, IMAGE, AnyModel, Batch, images, segmented
from benchmarks.any_zoo_transformers import silent

RATE = 0.001  # of networks with batch norms of few values


def named(name: str, **options: Any) -> Callable[[], nn.Module]:
    """The model of torchvision's function; a classifier of 4096 hidden values becomes small."""

    def build() -> nn.Module:
        from torchvision import models

        where = models
        for part in name.split(".")[:-1]:
            where = getattr(where, part)
        made = getattr(where, name.rpartition(".")[2])(num_classes=CLASSES, **options)
        head = getattr(made, "classifier", None)
        if isinstance(head, nn.Sequential) and any(
            isinstance(one, nn.Linear) and one.in_features > 4000 for one in head
        ):
            first = next(one for one in head if isinstance(one, nn.Linear))
            small = (nn.Linear(first.in_features, 32), nn.ReLU(), nn.Linear(32, CLASSES))
            made.classifier = nn.Sequential(*small)
        return silent(made)

    return build


def parts(module: str, kind: str, **options: Any) -> Callable[[], nn.Module]:
    """A class of a module of ``torchvision.models``; functions among the options are called."""

    def build() -> nn.Module:
        from importlib import import_module

        made = {key: one() if callable(one) else one for key, one in options.items()}
        of = import_module(f"torchvision.models.{module}")
        return silent(getattr(of, kind)(**made, num_classes=CLASSES))

    return build


def _convnext() -> list[Any]:
    from torchvision.models.convnext import CNBlockConfig

    return [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)]


def _video_blocks() -> dict[str, Any]:
    from torchvision.models.video import mvit

    kernels = {"kernel_q": [3, 3, 3], "kernel_kv": [3, 3, 3], "stride_kv": [1, 2, 2]}
    sizes = ((16, 16, 1, [1, 1, 1]), (16, 32, 2, [1, 2, 2]), (32, 32, 2, [1, 1, 1]))
    return {
        "block_setting": [
            mvit.MSBlockConfig(
                num_heads=heads,
                input_channels=before,
                output_channels=after,
                stride_q=stride,
                **kernels,
            )
            for before, after, heads, stride in sizes
        ]
    }


def _s3d() -> nn.Module:
    made: Any = named("video.s3d")()
    made.avgpool = nn.AdaptiveAvgPool3d(1)
    return made


def _mvit() -> nn.Module:
    from torchvision.models.video.mvit import MViT

    return silent(
        MViT(
            (IMAGE, IMAGE),
            8,
            num_classes=CLASSES,
            residual_pool=True,
            residual_with_cls_embed=False,
            rel_pos_embed=True,
            proj_after_attn=True,
            **_video_blocks(),
        )
    )


def _swin() -> Any:
    from torchvision.models import swin_transformer

    return swin_transformer


# --- Mini-batches and losses ---------------------------------------------------------------------


def shaped(*shape: int) -> Callable[[int, torch.Generator], Batch]:
    """Images, or videos, of a shape."""

    def draw(n: int, generator: torch.Generator) -> Batch:
        pixels = torch.randn(n, 3, *shape, generator=generator)
        return pixels, torch.randint(CLASSES, (n,), generator=generator)

    return draw


def frames(n: int, generator: torch.Generator) -> Batch:
    """Two images one after the other, and how far each point moves."""
    pair = torch.randn(n, 2, 3, 128, 128, generator=generator)
    return pair, torch.randn(n, 2, 128, 128, generator=generator)


class Flow(nn.Module):
    """Optical flow of a pair of images; the mean over its iterations is what is trained."""

    def __init__(self) -> None:
        from torchvision.models.optical_flow import raft_small

        super().__init__()
        self.raft = silent(raft_small())

    def forward(self, pair: Tensor) -> Tensor:
        """The last flow."""
        found: Tensor = self.raft(pair[:, 0], pair[:, 1], num_flow_updates=2)[-1]
        return found


def auxiliary(output: Any, targets: Tensor) -> Tensor:
    """The loss of Inception networks: of the scores, and of those from inner layers."""
    main, *others = (one for one in output if one is not None)
    of = nn.functional.cross_entropy
    return of(main, targets) + sum(0.3 * of(one, targets) for one in others)


def of_scene(output: dict[str, Tensor] | Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every pixel; torch's pipelines give the only value without its key."""
    scores = output if isinstance(output, Tensor) else output["out"]
    return nn.functional.cross_entropy(scores, targets)


def of_flow(output: Tensor, targets: Tensor) -> Tensor:
    """The mean distance."""
    return (output - targets).abs().mean()


SCENE: dict[str, Any] = {"weights_backbone": None}
Row = tuple[Callable[[], nn.Module], Callable[[int, torch.Generator], Batch]]
ROWS: dict[str, Row] = {
    "alexnet": (named("alexnet"), shaped(64, 64)),
    "convnext": (parts("convnext", "ConvNeXt", block_setting=_convnext), images),
    "efficientnet-v2": (named("efficientnet_v2_s"), images),
    "mc3-18": (named("video.mc3_18"), shaped(4, 16, 16)),
    "s3d": (_s3d, shaped(16, IMAGE, IMAGE)),
    "mobilenet-v2": (named("mobilenet_v2"), images),
    "mvit": (_mvit, shaped(8, IMAGE, IMAGE)),
    "regnet-y": (named("regnet_y_400mf"), images),
    "inception-v3": (named("inception_v3", init_weights=False, aux_logits=False), shaped(80, 80)),
    "shufflenet-v2": (named("shufflenet_v2_x0_5"), images),
    "squeezenet": (named("squeezenet1_1"), shaped(64, 64)),
    "swin-v2": (
        parts(
            "swin_transformer",
            "SwinTransformer",
            patch_size=[2, 2],
            embed_dim=24,
            depths=[2, 2, 2],
            num_heads=[3, 6, 12],
            window_size=[4, 4],
            block=lambda: _swin().SwinTransformerBlockV2,
            downsample_layer=lambda: _swin().PatchMergingV2,
        ),
        images,
    ),
    "swin3d": (
        parts(
            "video.swin_transformer",
            "SwinTransformer3d",
            patch_size=[2, 4, 4],
            embed_dim=24,
            depths=[2, 2],
            num_heads=[3, 6],
            window_size=[2, 4, 4],
        ),
        shaped(4, IMAGE, IMAGE),
    ),
    "maxvit": (
        parts(
            "maxvit",
            "MaxVit",
            input_size=(64, 64),
            stem_channels=16,
            partition_size=2,
            block_channels=[16, 32],
            block_layers=[1, 2],
            head_dim=8,
            stochastic_depth_prob=0.0,
        ),
        shaped(64, 64),
    ),
    "vgg11": (named("vgg11"), images),
}
LOSSES: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "googlenet": (named("googlenet", init_weights=True), shaped(64, 64), auxiliary),
    "deeplab-v3": (
        named("segmentation.deeplabv3_mobilenet_v3_large", **SCENE),
        segmented,
        of_scene,
    ),
    "fcn": (named("segmentation.fcn_resnet50", **SCENE), segmented, of_scene),
    "raft": (Flow, frames, of_flow),
}
TORCHVISION = (
    *(AnyModel(name, "torchvision", build, draw, RATE) for name, (build, draw) in ROWS.items()),
    *(
        AnyModel(name, "torchvision", build, draw, RATE, loss=loss)
        for name, (build, draw, loss) in LOSSES.items()
    ),
)
