"""A model of ``transformers`` as it comes, and mini-batches of its keywords with labels.

    stagewright profile --module examples.hugging_face:gpt2 --data examples.hugging_face:batches \
        -o gpt2.json

The models are small and untrained; ``GPT2LMHeadModel.from_pretrained("gpt2")`` goes in their place.
The loss is the one that the model returns. Needs ``pip install transformers``.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

TOKENS, LENGTH, SAMPLES = 256, 64, 16


def gpt2() -> GPT2LMHeadModel:
    """GPT-2 with four blocks."""
    sizes = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 128, "n_layer": 4, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def llama() -> LlamaForCausalLM:
    """A Llama with four blocks, which two devices can divide by heads: it has no dropout."""
    sizes = {"vocab_size": TOKENS, "hidden_size": 128, "intermediate_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=4))


def batches() -> Iterator[dict[str, Tensor]]:
    """Text in which every character is the one before it, or the next."""
    random = torch.Generator().manual_seed(0)
    for _ in range(64):
        steps = torch.randint(2, (SAMPLES, LENGTH), generator=random)
        tokens = (steps.cumsum(1) + torch.randint(TOKENS, (SAMPLES, 1), generator=random)) % TOKENS
        yield {"input_ids": tokens, "labels": tokens}
