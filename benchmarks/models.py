"""Models as the papers of the benchmarks ran them.

The shapes of the large ones are those of their
configurations: Llama 2 and 3, Qwen 3, DeepSeek-V3 and Nemotron on the hub, GPT-3 of NeMo's recipes
(NeMo-Framework-Launcher, conf/training/gpt3), MPT of llm-foundry (yamls/pretrain), and Megatron's
GPT of the thesis.
"""

from dataclasses import replace

from benchmarks.layout_runs import gpt
from stagewright.formulations.prices.analytic import analytic_model
from stagewright.graphs.models.architecture import (
    Architecture,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
)
from stagewright.graphs.models.chain import Chain


def paper_model(name: str, samples: int, device: str = "v100", **sizes: int) -> Chain:
    """A named model as in 2019 to 2022.

    Attention keeps its matrices, a tied table counts once, and the optimizer's step takes no time.
    """
    chain = analytic_model(
        name, samples, device, attention="materialized", tied_copies=False, **sizes
    )
    layers = tuple(
        replace(layer, costs=tuple(replace(cost, update_seconds=None) for cost in layer.costs))
        for layer in chain.layers
    )
    return replace(chain, layers=layers)


V3 = Architecture(
    "deepseek-v3", 61, 7168, 129280,
    LatentAttention(128, 512, 128, 64, 128, query_rank=1536),
    FeedForward(18432),
    experts=Experts(256, 8, 2048, 2048, dense_layers=frozenset({0, 1, 2})),
)  # fmt: skip


def _qwen(
    billions: int, layers: int, hidden: int, heads: int, width: int, expert: int
) -> Architecture:
    return Architecture(
        f"qwen3-{billions}b",
        layers,
        hidden,
        151936,
        GroupedAttention(heads, 4, 128, head_norms=True),
        FeedForward(width),
        experts=Experts(128, 8, expert),
    )


QWEN_30B, QWEN_235B = _qwen(30, 48, 2048, 32, 6144, 768), _qwen(235, 94, 4096, 64, 12288, 1536)


def _llama(name: str, layers: int, hidden: int, heads: int, keys: int, width: int, vocabulary: int
           ) -> Architecture:  # fmt: skip
    attention = GroupedAttention(heads, keys, hidden // heads)
    return Architecture(name, layers, hidden, vocabulary, attention, FeedForward(width))


def _mpt(name: str, layers: int, hidden: int, heads: int) -> Architecture:
    attention = GroupedAttention(heads, heads, hidden // heads)
    wide = FeedForward(4 * hidden, gated=False)
    return Architecture(
        name, layers, hidden, 50368, attention, wide, norm="layer", positions=65536, tied=True
    )


def _nemotron(name: str, layers: int, hidden: int, heads: int, keys: int) -> Architecture:
    attention = GroupedAttention(heads, keys, hidden // heads)
    wide = FeedForward(4 * hidden, gated=False)
    return Architecture(name, layers, hidden, 256000, attention, wide, norm="layer")


ARCHITECTURES = {
    one.name: one
    for one in (
        _llama("llama2-7b", 32, 4096, 32, 32, 11008, 32000),
        _llama("llama2-13b", 40, 5120, 40, 40, 13824, 32000),
        _llama("llama2-70b", 80, 8192, 64, 8, 28672, 32000),
        _llama("llama3-8b", 32, 4096, 32, 8, 14336, 128256),
        _llama("llama3-70b", 80, 8192, 64, 8, 28672, 128256),
        _llama("llama3-405b", 126, 16384, 128, 8, 53248, 128256),
        QWEN_30B,
        QWEN_235B,
        V3,
        _mpt("125m", 12, 768, 12),
        _mpt("760m", 24, 1536, 12),
        _mpt("3b", 32, 2560, 20),
        _mpt("13b", 40, 5120, 40),
        _mpt("70b", 80, 8192, 64),
        _nemotron("nemotron-8b", 32, 4096, 32, 32),
        _nemotron("nemotron-22b", 40, 6144, 48, 48),
        _nemotron("nemotron4-340b", 96, 18432, 96, 8),
        replace(gpt(24, 4096, 32), name="gpt3-5b"),
        replace(gpt(44, 6144, 48), name="gpt3-20b"),
        replace(gpt(40, 6144, 48), name="40x6144"),
        replace(gpt(48, 8192, 64), name="48x8192"),
    )
}  # fmt: skip
