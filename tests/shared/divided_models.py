"""Models of transformers that groups of devices train, small, in float64 throughout."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from training_plans import fill_and_drain

from benchmarks.any_models import GROUPED, LENGTH, AnyModel, hugging_face, text
from stagewright.executor.training.runtime import Executor
from stagewright.executor.training.stages.staged_model import StagedModel
from stagewright.formulations.plans.plan import PipelinePlan, Stage
from stagewright.graphs.documents.errors import InputError

STEPS, MICROBATCHES, SAMPLES = 3, 2, 4
EVEN = {**GROUPED, "vocab_size": 68}
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class ExactNorm(nn.Module):
    """A norm of transformers without its detour by float32."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """As the model's own."""
        mean = hidden_states.square().mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(mean + self.variance_epsilon))


def exact_loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """Cross-entropy of the next token, as the model's own, which casts logits to float32."""
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )


def exact(build: Callable[[], nn.Module]) -> nn.Module:
    """The model without casts to float32, by which a rounding of the last bit may become 1e-8."""
    model: Any = build()
    model.loss_function = exact_loss
    for one in model.modules():
        if type(one).__name__.endswith("RMSNorm"):
            one.__class__ = ExactNorm
    return model


def _biased(build: Callable[[], nn.Module]) -> nn.Module:
    """With biases and norms that are not 0 and 1, so that a forgotten one shows."""
    model = build()
    for name, one in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            nn.init.uniform_(one, 0.5, 1.5)
    return model


def of_transformers(name: str, config: str, **options: Any) -> AnyModel:
    """A model for mini-batches of text with labels."""
    build = hugging_face(name, config, **options)
    return AnyModel(name, "transformers", partial(exact, partial(_biased, build)), text)


GPT2 = {
    **{"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 68, "n_positions": LENGTH},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
CLASSES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig"),
    "llama-biased": ("LlamaForCausalLM", "LlamaConfig"),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config"),
    "mistral": ("MistralForCausalLM", "MistralConfig"),
    "phi3": ("Phi3ForCausalLM", "Phi3Config"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config"),
    "gpt2-untied": ("GPT2LMHeadModel", "GPT2Config"),
}
OPTIONS = {
    "llama": EVEN,
    "llama-biased": {**EVEN, "attention_bias": True, "mlp_bias": True, "pad_token_id": 40},
    "llama-tied": {**EVEN, "tie_word_embeddings": True},
    "qwen2": EVEN,
    "qwen3": {**EVEN, "head_dim": 8},
    "mistral": EVEN,
    "phi3": {**EVEN, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "gpt2": GPT2,
    "gpt2-untied": {**GPT2, "tie_word_embeddings": False},
}
MODELS = {name: of_transformers(*CLASSES[name], **OPTIONS[name]) for name in CLASSES}


def stages_of(name: str, layers: int) -> list[Stage]:
    """A layout of groups of two devices."""
    half = layers // 2
    return {
        "one group": [Stage((0, layers), ("a", "b"), tensor=2)],
        "two groups": [
            Stage((0, half), ("a", "b"), tensor=2),
            Stage((half, layers), ("c", "d"), tensor=2),
        ],
        "replicas of groups": [Stage((0, layers), ("a", "b", "c", "d"), tensor=2)],
        "groups in turn": [
            Stage((0, layers), ("a", "b", "c", "d"), "round-robin", "layer", tensor=2)
        ],
        "a device, then a group": [
            Stage((0, half), ("a",)),
            Stage((half, layers), ("c", "b"), tensor=2),
        ],
        "a group, then replicas": [
            Stage((0, half), ("a", "b"), recompute="full", tensor=2),
            Stage((half, layers), ("c", "d")),
        ],
    }[name]


def planned(stages: list[Stage]) -> PipelinePlan:
    """The plan of stages."""
    return fill_and_drain(stages, MICROBATCHES)


def data_of(one: AnyModel) -> list[Any]:
    """The mini-batches of a run."""
    return list(one.batches(SAMPLES * MICROBATCHES, STEPS))


def executor_of(name: str, plan: PipelinePlan, model: Any, **options: Any) -> Executor:
    """An executor for the model, or what makes it."""
    example = data_of(MODELS[name])[0]
    return Executor(plan, model, None, SGD, example=example, dtype=torch.float64, **options)


@contextmanager
def numbers_before_division() -> Iterator[list[int]]:
    """How many numbers of parameters a rank has in memory when it divides its layers."""
    found: list[int] = []
    divide = StagedModel.shard

    def counted(self: StagedModel, *args: Any) -> None:
        every = {id(one): one for layer in self.layers for one in layer.module.parameters()}
        found.append(sum(one.numel() for one in every.values() if not one.is_meta))
        divide(self, *args)

    StagedModel.shard = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        StagedModel.shard = divide  # type: ignore[method-assign]


def trained(
    _: Any, rank: int, name: str, plan: PipelinePlan, change: Any, options: dict[str, Any]
) -> Any:
    """The state on rank 0, the losses, the warnings, and the numbers of this rank's parameters."""
    model = MODELS[name].make()
    if change is not None:
        change(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        executor = executor_of(name, plan, model, **options)
        losses = [executor.step(batch) for batch in data_of(MODELS[name])]
    groups = [group for of in executor.optimizers for group in of.param_groups]
    own = sum(parameter.numel() for group in groups for parameter in group["params"])
    told = [str(one.message) for one in caught]
    return executor.parameters_on_first_rank(), losses, told, own


def refused(
    group: Any, rank: int, name: str, plan: PipelinePlan, change: Any, options: dict[str, Any]
) -> str:
    """Why a run does not begin, or does not go on; empty if it does."""
    try:
        trained(group, rank, name, plan, change, options)
    except InputError as error:
        return str(error)
    return ""
