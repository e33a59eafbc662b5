"""What a software stack keeps in the memory of a device beyond weights and their states.

Every value is read from the stack's own code; only a slack of the allocator is fitted, to the ten
figures of memory that torchtitan's benchmarks print.
"""

from dataclasses import replace

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount


@documents.record
class StackMemory:
    """Which tensors a stack keeps, and in which types.

    ``gradient_bytes`` are of a gradient of mixed precision (None: as the precision says). With
    ``fused_gate`` a gated feed-forward keeps gate and up, and not the activation of the gate too;
    with ``weighted_gate`` experts' outputs are weighted inside their activation, so that combining
    them keeps nothing. With ``fp8_inputs`` products in 8 bits keep their inputs in 8 bits.

    Recomputation may be of ``modules`` (``models/modules.py``). Those ``always`` recomputed are so
    in every layout; the seconds of that are in the runs to which the stack's rates are fitted.

    With ``offloads_activations`` those of some blocks may be in host memory between their forward
    and backward.

    Of every logit ``loss_bytes`` are kept, and ``loss_gradient_bytes`` added by the backward of the
    loss. With ``float_masters`` ranks that divide weights (ZeRO 3) keep their parts in fp32 alone,
    which are the optimizer's too. With ``whole_in_pipelines`` weights and gradients of a pipeline
    are divided at the end of an iteration only, whatever ZeRO's stage. ``bucket_parameters`` of
    gradients are flattened in each of two buckets. With ``layer_gradients`` the backward holds a
    gradient of a layer's weights, or a dummy where the product adds to the sum itself. With
    ``by_operator`` selective recomputation repeats every second product and all that is cheap, not
    the attention alone. The allocator reserves ``slack`` more than activations and buffers take.

    ``reserve_bytes`` of a device are for all that is not torch's. They are 0.65 GB of the driver's
    context (torch's errors list idle processes with 612 to 618 MiB on H200 and B300), and 0.7 GB
    for every communicator: 544 to 688 MiB with NVLink (NVIDIA/nccl #964), 0.65 GiB on MI250
    (Lumi-supercomputer/LUMI-AI-Guide #111). Megatron has communicators of tensor, pipeline and data
    ranks, FSDP of data ranks.
    """

    name: str
    source: str
    gradient_bytes: int | None = None
    fused_gate: bool = False
    weighted_gate: bool = False
    fp8_inputs: bool = False
    modules: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    offloads_activations: bool = False
    loss_bytes: float = 4.0
    loss_gradient_bytes: float = 4.0
    float_masters: bool = False
    whole_in_pipelines: bool = False
    bucket_parameters: float = 0.0
    layer_gradients: bool = False
    by_operator: bool = False
    slack: float = 0.0
    reserve_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.gradient_bytes not in (None, 2, 4):
            raise InputError(f"gradient_bytes must be 2 or 4, got {self.gradient_bytes}")
        for name in ("loss_bytes", "loss_gradient_bytes", "bucket_parameters", "reserve_bytes"):
            require_amount(getattr(self, name), name)
        if not 0.0 <= self.slack < 1.0:
            raise InputError(f"slack must be in [0, 1), got {self.slack:g}")


PLAIN = StackMemory(
    "plain",
    "no stack in particular: the tensors that the formulas of the operators need",
    reserve_bytes=2e9,
)
"""What is kept where no stack is named; the reserve is for two communicators, rounded."""

_ONE, _TWO, _THREE = 1.35e9, 2.05e9, 2.75e9  # reserves with so many communicators

_MEGATRON = StackMemory(
    "megatron",
    "Megatron-LM core/fusions (fused_bias_swiglu.py, fused_cross_entropy.py: softmax in fp32, "
    "gradient in bf16), core/transformer/moe/experts.py (weighted activation); Megatron-Bridge "
    "perf_recipes/_common.py (grad_reduce_in_fp32 = False), perf_recipes/deepseek (mla_up_proj); "
    "core/tensor_parallel/layers.py (dummy gradients); Transformer Engine's linear layers, which "
    "keep their quantized inputs; core/transformer/transformer_config.py (recompute_modules, "
    "cpu_offloading)",
    gradient_bytes=2,
    fused_gate=True,
    weighted_gate=True,
    fp8_inputs=True,
    modules=("core_attn", "mla_up_proj", "moe_act", "layernorm", "mlp", "moe"),
    always=("mla_up_proj",),
    offloads_activations=True,
    loss_gradient_bytes=2.0,
    layer_gradients=True,
    reserve_bytes=_THREE,
)

_COMPOSER = StackMemory(
    "fsdp",
    "Composer distributed/mosaic_parallelism.py (mixed precision DEFAULT: fp32 parts, reduced in "
    "fp32); llm-foundry models/mpt/modeling_mpt.py (fused_crossentropy of FlashAttention: logits "
    "and their gradient in bf16)",
    loss_bytes=2.0,
    loss_gradient_bytes=2.0,
    float_masters=True,
    reserve_bytes=_ONE,
)

_TRANSFORMERS = StackMemory(
    "accelerate",
    "transformers loss/loss_utils.py (logits in bf16, and in fp32 for the loss); torch "
    "distributed/fsdp (fp32 parts)",
    loss_bytes=6.0,
    loss_gradient_bytes=8.0,
    float_masters=True,
    reserve_bytes=_ONE,
)

TORCHTITAN_SLACK = 0.09
"""By how much torchtitan's maximum of reserved bytes is above what tensors take: fitted to ten runs
of its benchmarks of December 2024, from 0.04 to 0.15."""

STACK_MEMORY: dict[str, StackMemory] = {
    "plan": replace(
        PLAIN,
        name="plan",
        source="executor/training/stages: gradients, and their sums, in the type of the weights",
        gradient_bytes=2,
    ),
    "megatron": _MEGATRON,
    "megatron-bridge": _MEGATRON,
    "nemo": _MEGATRON,
    "megatron-2021": StackMemory(
        "megatron-2021",
        "Megatron-LM 2.5 of 2021 (fp16 gradients; the loss in fp32)",
        gradient_bytes=2,
        reserve_bytes=_THREE,
    ),
    "torchtitan": StackMemory(
        "torchtitan",
        "torchtitan train.py, parallelisms/parallelize_llama.py and metrics.py at 9dec370 (fp32 "
        "parts; in pipelines nothing is divided until the end; the loss in fp32, not compiled; "
        "every second product is repeated)",
        loss_gradient_bytes=8.0,
        float_masters=True,
        whole_in_pipelines=True,
        by_operator=True,
        slack=TORCHTITAN_SLACK,
        reserve_bytes=_TWO,
    ),
    "fsdp": _COMPOSER,
    **dict.fromkeys(("accelerate", "axolotl", "trl", "transformers", "nnscaler"), _TRANSFORMERS),
    "deepspeed": replace(
        _TRANSFORMERS,
        name="deepspeed",
        source="DeepSpeed 0.19 runtime/zero/config.py (buckets of 5e8 numbers); transformers "
        "loss/loss_utils.py (logits in bf16, and in fp32 for the loss)",
        float_masters=False,
        bucket_parameters=5e8,
    ),
    "automodel": replace(
        _TRANSFORMERS,
        name="automodel",
        source="Automodel components/loss/masked_ce.py (the loss in fp32), torch distributed/fsdp",
        loss_bytes=4.0,
        reserve_bytes=_TWO,
    ),
}
"""What stacks keep, by the names of the formats that layouts are exported to, and of others whose
runs are published."""


def stack_memory(name: str) -> StackMemory:
    """What a stack keeps. Raises InputError if the name is not known."""
    try:
        return STACK_MEMORY[name]
    except KeyError:
        known = ", ".join(sorted(STACK_MEMORY))
        raise InputError(f"stack {name!r} is not known; known are {known}") from None
