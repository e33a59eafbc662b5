"""Names of the frameworks' own options, and stand-ins for their modules that know no others.

Compared with the sources: Megatron-LM core 0.20 (megatron/training/arguments.py, d98e8a6),
Megatron-Bridge 0.7 (067f987), NeMo 2.6 (8cfedd7), TorchTitan 0.3.0, DeepSpeed 0.19.8, Accelerate
1.15.0.
"""

import argparse
import contextlib
import sys
from functools import cache
from types import ModuleType, SimpleNamespace

FLAGS = """
accumulate-allreduce-grads-in-fp32 add-qkv-bias bf16 disable-bias-linear fp16 fp8-param-gather
grad-reduce-in-bf16 group-query-attention moe-grouped-gemm moe-shared-expert-gate
apply-layernorm-1p attention-output-gate moe-router-enable-expert-bias moe-router-pre-softmax
quick-geglu squared-relu
rotary-interleaved use-rope-scaling no-yarn-correction-range-round-to-int
multi-latent-attention optimizer-cpu-offload overlap-cpu-optimizer-d2h-h2d overlap-grad-reduce
overlap-param-gather qk-layernorm sequence-parallel swiglu untie-embeddings-and-output-weights
use-distributed-optimizer use-megatron-fsdp use-precision-aware-optimizer use-tp-pp-dp-mapping
"""
NUMBERS = """
context-parallel-size expert-model-parallel-size expert-tensor-parallel-size ffn-hidden-size
global-batch-size hidden-size kv-channels kv-lora-rank max-position-embeddings micro-batch-size
moe-ffn-hidden-size moe-router-topk moe-shared-expert-intermediate-size num-attention-heads
num-experts num-layers num-layers-per-virtual-pipeline-stage num-query-groups
pipeline-model-parallel-size q-lora-rank qk-head-dim qk-pos-emb-head-dim recompute-num-layers
linear-conv-kernel-dim linear-key-head-dim linear-value-head-dim linear-num-key-heads
linear-num-value-heads cpu-offloading-num-layers mamba-state-dim mamba-head-dim mamba-num-groups
mamba-num-heads
moe-router-num-groups moe-router-group-topk rotary-seq-len-interpolation-factor
yarn-original-max-position-embeddings
rotary-base seq-length tensor-model-parallel-size v-head-dim vocab-size
"""
RATES = (
    "attention-dropout", "hidden-dropout", "norm-epsilon", "optimizer-offload-fraction",
    "rotary-percent", "rotary-scaling-factor", "rope-scaling-factor", "mscale", "mscale-all-dim",
    "yarn-beta-fast", "yarn-beta-slow", "moe-router-topk-scaling-factor", "moe-aux-loss-coeff",
    "activation-func-clamp-value", "glu-linear-offset",
)  # fmt: skip
TEXTS = (
    "moe-layer-freq", "pipeline-model-parallel-layout", "window-attn-skip-freq", "window-size",
    "hybrid-layer-pattern", "linear-attention-freq", "experimental-attention-variant",
)  # fmt: skip
CHOICES = {
    "attention-backend": ("flash", "fused", "unfused", "local", "auto"),
    "ckpt-format": ("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
    "data-parallel-sharding-strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "exp-avg-dtype": ("fp32", "fp16", "bf16", "fp8"),
    "exp-avg-sq-dtype": ("fp32", "fp16", "bf16", "fp8"),
    "fp8-format": ("e4m3", "hybrid"),
    "moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
    "moe-router-score-function": ("softmax", "sigmoid", "sqrtsoftplus"),
    "moe-router-load-balancing-type": ("aux_loss", "seq_aux_loss", "sinkhorn", "none"),
    "rope-type": ("rope", "yarn"),
    "softmax-type": ("vanilla", "off-by-one", "learnable"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "position-embedding-type": ("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
}


@cache
def megatron_parser():
    """Megatron-LM's parser, as far as its names are used here."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for name in FLAGS.split():
        parser.add_argument(f"--{name}", action="store_true")
    for names, kind in ((NUMBERS.split(), int), (RATES, float), (TEXTS, str)):
        for name in names:
            parser.add_argument(f"--{name}", type=kind)
    for name, choices in CHOICES.items():
        parser.add_argument(f"--{name}", choices=choices)
    parser.add_argument("--recompute-modules", nargs="+", choices=("core_attn",))
    parser.add_argument("--spec", nargs="*")
    return parser


MODEL = """
tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
pipeline_model_parallel_layout num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split context_parallel_size
sequence_parallel expert_model_parallel_size expert_tensor_parallel_size
"""
REMADE = """
recompute_granularity recompute_method recompute_num_layers recompute_modules seq_length
cpu_offloading cpu_offloading_num_layers cpu_offloading_weights
attention_backend rotary_base layernorm_epsilon rotary_percent rotary_scaling_factor mscale
mscale_all_dim beta_fast beta_slow original_max_position_embeddings moe_router_score_function
moe_router_pre_softmax moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor
moe_router_enable_expert_bias moe_router_load_balancing_type moe_aux_loss_coeff
seq_len_interpolation_factor position_embedding_type attn_logit_softcapping final_logit_softcapping
rope_scaling rope_scaling_factor yarn_rotary_scaling_factor yarn_original_max_position_embeddings
yarn_beta_fast yarn_beta_slow yarn_mscale yarn_mscale_all_dim yarn_correction_range_round_to_int
scale_factor low_freq_factor high_freq_factor old_context_len mtp_num_layers
"""
DDP = """
use_distributed_optimizer use_megatron_fsdp data_parallel_sharding_strategy overlap_grad_reduce
overlap_param_gather grad_reduce_in_fp32
"""
OPTIMIZER = """
use_distributed_optimizer overlap_param_gather use_precision_aware_optimizer exp_avg_dtype
exp_avg_sq_dtype optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d
"""
MIXED = """
fp32 fp16 bf16 params_dtype pipeline_dtype grad_reduce_in_fp32 fp8 fp8_param_gather precision
autocast_enabled
"""
BATCH = ("micro_batch_size", "global_batch_size", "seq_length")
ROPE = """
theta scaling scaling_factor low_freq_factor high_freq_factor original_max_position_embeddings
rope_factor beta_fast beta_slow original_seq_len truncate
"""
TITAN = {
    "training": """
        seq_len local_batch_size global_batch_size dtype mixed_precision_param enable_cpu_offload
        disable_cuda_graphs
        """,
    "parallelism": """
        data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward
        tensor_parallel_degree enable_sequence_parallel context_parallel_degree
        expert_parallel_degree pipeline_parallel_degree pipeline_parallel_schedule
        pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size module_fqns_per_model_part
        """,
}


def record(*names, **values):
    """An object that has these attributes alone."""
    made = type("Record", (), {"__slots__": (*names, *values)})()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def accepts(*names):
    """A function of these keywords alone."""

    def call(*positional, **given):
        assert set(given) <= set(names), given
        return SimpleNamespace(positional=positional, **given)

    return call


MODULES = {
    "torch": SimpleNamespace(bfloat16="bf16", float16="fp16", float32="fp32"),
    "torch.distributed.fsdp": SimpleNamespace(
        MixedPrecisionPolicy=accepts("param_dtype", "reduce_dtype")
    ),
    "megatron.bridge.training.mixed_precision": SimpleNamespace(
        MixedPrecisionConfig=accepts(*MIXED.split())
    ),
    "megatron.core.transformer.enums": SimpleNamespace(
        AttnBackend=SimpleNamespace(auto="auto", unfused="unfused")
    ),
    "nemo_run": SimpleNamespace(Config=accepts(*MIXED.split())),
    "nemo.lightning.pytorch.plugins": SimpleNamespace(MegatronMixedPrecision="plugin"),
    "torchtitan.distributed.activation_checkpoint": SimpleNamespace(
        FullAC=SimpleNamespace(Config=lambda: "full"),
        SelectiveAC=SimpleNamespace(Config=lambda: "selective"),
    ),
    "transformers": SimpleNamespace(AutoModelForCausalLM=None),
    "transformers.distributed": SimpleNamespace(
        DistributedConfig=SimpleNamespace(from_dict=lambda fields: fields)
    ),
    "deepspeed": SimpleNamespace(initialize=lambda **given: given),
    "accelerate": SimpleNamespace(
        Accelerator=accepts(
            "mixed_precision", "gradient_accumulation_plugin", "parallelism_config", "fsdp_plugin"
        )
    ),
    "accelerate.parallelism_config": SimpleNamespace(
        ParallelismConfig=accepts("dp_replicate_size", "dp_shard_size", "cp_size", "tp_size")
    ),
    "accelerate.utils": SimpleNamespace(
        GradientAccumulationPlugin=accepts("num_steps", "sync_each_batch"),
        FullyShardedDataParallelPlugin=accepts(
            "fsdp_version", "reshard_after_forward", "auto_wrap_policy", "mixed_precision_policy"
        ),
    ),
}


@contextlib.contextmanager
def stand_ins():
    """The frameworks' modules with the names that were found in them, and no others."""
    parents = {name.rsplit(".", i)[0] for name in MODULES for i in range(1, name.count(".") + 1)}
    names = {*MODULES, *parents}
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    for name in names:
        module = ModuleType(name)
        module.__path__ = []
        module.__dict__.update(vars(MODULES.get(name, SimpleNamespace())))
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)


def run_module(text):
    """What an exported module defines."""
    space = {"__file__": "exported/module.py"}
    with stand_ins():
        exec(compile(text, "exported", "exec"), space)
    return space
