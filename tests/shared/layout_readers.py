"""Strict readers of exported layouts: what the files say, for their frameworks."""

import json
import re
import shlex
import subprocess
from types import SimpleNamespace

import yaml
from framework_names import (
    BATCH,
    DDP,
    MODEL,
    OPTIMIZER,
    REMADE,
    ROPE,
    TITAN,
    megatron_parser,
    record,
    run_module,
)

from stagewright.graphs.models.architecture import (
    Architecture,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
)
from stagewright.graphs.models.stated import RotaryScaling, Routing, Stated
from stagewright.graphs.models.traits import (
    ADDED_ONE,
    ADJACENT,
    CLAMPED,
    PARTLY_ROTATED,
    SQUARED_RELU,
)

STRATEGIES = {"no_shard": 1, "optim_grads": 2, "optim_grads_params": 3}

TORCH_SCHEDULES = {
    "InterleavedZeroBubble": "zero-bubble", "ZBVZeroBubble": "zbv", "DualPipeV": "dualpipev",
}  # fmt: skip


def words_in_bash(text):
    """Ranks, connections and arguments of a file, as bash reads them."""
    words = 'printf "%s\\n" "$MEGATRON_RANKS" "${CUDA_DEVICE_MAX_CONNECTIONS-}"'
    show = words + ' "${MEGATRON_ARGUMENTS[@]}"'
    done = subprocess.run(
        ["bash", "-euc", f"{text}\n{show}"], capture_output=True, text=True, check=True, env={}
    )
    return done.stdout.splitlines()


def words_of(text):
    """The same without a process."""
    words = shlex.split(text, comments=True)
    given = dict(word.split("=", 1) for word in words if re.match("[A-Z_]+=", word))
    found = words[words.index("MEGATRON_ARGUMENTS=(") + 1 : words.index(")")]
    return [given["MEGATRON_RANKS"], given.get("CUDA_DEVICE_MAX_CONNECTIONS", ""), *found]


def run_megatron(text):
    """The parsed arguments of a file, each once; ranks and connections."""
    ranks, connections, *found = words_of(text)
    names = [word for word in found if word.startswith("--")]
    assert len(names) == len(set(names))
    return megatron_parser().parse_args(found), int(ranks), connections


def architecture_from(args):
    """The architecture that Megatron-LM's arguments describe."""
    every = not args.disable_bias_linear
    rotary = args.position_embedding_type in ("rope", "yarn")
    traits = {
        CLAMPED: args.quick_geglu,
        SQUARED_RELU: args.squared_relu,
        ADDED_ONE: args.apply_layernorm_1p,
        ADJACENT: args.rotary_interleaved,
        PARTLY_ROTATED: args.rotary_percent is not None,
    }
    sparse = args.num_experts is not None and args.moe_layer_freq is None
    return Architecture(
        "", args.num_layers, args.hidden_size, args.vocab_size, attention_from(args),
        FeedForward(args.ffn_hidden_size, args.swiglu or args.quick_geglu, every and not sparse),
        experts_from(args),
        {"LayerNorm": "layer", "RMSNorm": "rms"}[args.normalization],
        positions=None if rotary else args.max_position_embeddings,
        tied=not args.untie_embeddings_and_output_weights,
        window=None if args.window_size is None else int(args.window_size.split(",")[0]) + 1,
        full_layers=frozenset(zeros(args.window_attn_skip_freq)),
        dropout=args.hidden_dropout is None and args.attention_dropout is None,
        rotary_base=args.rotary_base, norm_epsilon=args.norm_epsilon,
        traits=tuple(sorted(what for what, has in traits.items() if has)),
        stated=Stated(args.rotary_percent, scaling_from(args), routing_from(args)),
    )  # fmt: skip


def scaling_from(args):
    if args.use_rope_scaling:
        return RotaryScaling("llama3", args.rope_scaling_factor, 8192, 1, 4)
    if args.rotary_seq_len_interpolation_factor is not None:
        return RotaryScaling("linear", args.rotary_seq_len_interpolation_factor)
    if args.rotary_scaling_factor is None:
        assert args.rope_type == ("rope" if args.multi_latent_attention else None)
        return None
    latent = args.multi_latent_attention
    return RotaryScaling(
        "yarn", args.rotary_scaling_factor,
        4096 if latent else args.yarn_original_max_position_embeddings, None, None,
        32 if latent else args.yarn_beta_fast, 1 if latent else args.yarn_beta_slow,
        args.mscale, args.mscale_all_dim, not args.no_yarn_correction_range_round_to_int,
    )  # fmt: skip


def routing_from(args):
    if args.moe_router_score_function is None:
        return None
    assert (args.moe_router_load_balancing_type == "none") == (args.moe_aux_loss_coeff is None)
    return Routing(
        args.moe_router_score_function, not args.moe_router_pre_softmax, args.moe_router_num_groups,
        args.moe_router_group_topk, args.moe_router_topk_scaling_factor or 1.0,
        args.moe_router_enable_expert_bias, args.moe_aux_loss_coeff,
    )  # fmt: skip


def zeros(pattern):
    """Where a pattern has 0."""
    return [] if pattern is None else [i for i, one in enumerate(eval(pattern)) if one == 0]


def attention_from(args):
    every = not args.disable_bias_linear
    heads, size = args.num_attention_heads, args.kv_channels
    if args.multi_latent_attention:
        return LatentAttention(
            heads, args.kv_lora_rank, args.qk_head_dim, args.qk_pos_emb_head_dim, args.v_head_dim,
            args.q_lora_rank,
        )  # fmt: skip
    assert args.group_query_attention == (args.num_query_groups is not None)
    return GroupedAttention(
        heads, args.num_query_groups or heads, size, every or args.add_qkv_bias, every,
        args.qk_layernorm, sinks=args.softmax_type == "learnable",
    )  # fmt: skip


def experts_from(args):
    if args.num_experts is None:
        return None
    return Experts(
        args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size,
        args.moe_shared_expert_intermediate_size, args.moe_shared_expert_gate,
        frozenset(zeros(args.moe_layer_freq)), not args.disable_bias_linear,
        not args.disable_bias_linear,
    )  # fmt: skip


def blocks_of(text, stages):
    """Blocks per stage of ``Et*3|t*4|L``."""
    parts = text.split("|")
    assert len(parts) == stages
    assert parts[0][0] == "E"
    assert parts[-1][-1] == "L"
    parts[0], parts[-1] = parts[0][1:], parts[-1][:-1] if stages > 1 else parts[0][1:-1]
    counts = [re.fullmatch(r"|t|t\*(\d+)", part) for part in parts]
    return tuple(int(one[1] or len(part)) for one, part in zip(counts, parts, strict=True))


def read_megatron(files):
    args, ranks, connections = run_megatron(files["megatron.sh"])
    pipeline, tensor = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    stages, blocks = pipeline, None
    if args.hybrid_layer_pattern is not None:
        assert args.spec[-1] == "hybrid_stack_spec"
        assert args.num_layers is args.num_layers_per_virtual_pipeline_stage is None
        assert args.pipeline_model_parallel_layout is None
        blocks = tuple(map(len, args.hybrid_layer_pattern.split("|")))
        assert len(blocks) % pipeline == 0
    elif args.pipeline_model_parallel_layout is not None:
        stages = args.pipeline_model_parallel_layout.count("|") + 1
        blocks = blocks_of(args.pipeline_model_parallel_layout, stages)
        assert args.num_layers_per_virtual_pipeline_stage is None
    elif args.num_layers_per_virtual_pipeline_stage is not None:
        stages = args.num_layers // args.num_layers_per_virtual_pipeline_stage
    data = ranks // (pipeline * tensor * args.context_parallel_size)
    fsdp = args.use_megatron_fsdp
    assert fsdp == (args.data_parallel_sharding_strategy is not None)
    assert fsdp == (args.ckpt_format == "fsdp_dtensor")
    ordered = tensor > 1 or args.context_parallel_size > 1
    assert connections == ("1" if ordered and not fsdp else "")
    assert (args.num_experts is not None) == (args.expert_tensor_parallel_size == 1)
    return {
        "ranks": ranks,
        "pipeline": pipeline,
        "tensor": tensor,
        "context": args.context_parallel_size,
        "data": data,
        "expert": args.expert_model_parallel_size or 1,
        "microbatch": args.micro_batch_size,
        "batch": args.global_batch_size,
        "accumulation": args.global_batch_size / (args.micro_batch_size * data),
        "blocks": blocks or (args.num_layers // stages,) * stages,
        **_recompute(args),
        "offload_blocks": args.cpu_offloading_num_layers or 0,
        "sequence_parallel": args.sequence_parallel,
        "zero": _zero(args),
        "offload": args.optimizer_cpu_offload,
        "inside": args.use_tp_pp_dp_mapping,
    }


def _recompute(fields):
    kind, method = fields.recompute_granularity, fields.recompute_method
    layers = fields.recompute_num_layers
    found = {"schedule": "1f1b", "recompute": kind or "none", "recompute_blocks": None}
    assert fields.recompute_modules == (["core_attn"] if kind == "selective" else None)
    if kind != "full":
        assert (method, layers) == (None, None)
    elif method == "uniform":
        assert layers == 1
    else:
        assert method == "block"
        found["recompute_blocks"] = layers
    return found


def _offloaded(fields):
    layers = fields.cpu_offloading_num_layers
    assert (fields.cpu_offloading, fields.cpu_offloading_weights) == (layers > 0, False)
    return {"offload_blocks": layers}


def _zero(fields):
    if not fields.use_distributed_optimizer:
        return 0
    return STRATEGIES[fields.data_parallel_sharding_strategy or "no_shard"]


def bridge_config(layers, **sizes):
    """A recipe's ConfigContainer."""
    return record(
        "mixed_precision", "comm_overlap",
        model=record(*MODEL.split(), *REMADE.split(), num_layers=layers, **sizes),
        ddp=record(*DDP.split()),
        optimizer=record(*OPTIMIZER.split()),
        dist=record("use_tp_pp_dp_mapping", "use_megatron_fsdp"),
        train=record(*BATCH[:2]), dataset=record("seq_length"), checkpoint=record("ckpt_format"),
    )  # fmt: skip


def nemo_recipe(layers, **sizes):
    """A pre-training recipe."""
    more = ("pipeline_dtype", "use_tp_pp_dp_mapping", "fsdp", "save_ckpt_format")
    strategy = record(*MODEL.split(), *more, ddp=record(*DDP.split()))
    return record(
        trainer=record("num_nodes", "devices", "plugins", strategy=strategy), data=record(*BATCH),
        model=record(config=record(*REMADE.split(), num_layers=layers, **sizes)),
        optim=record(config=record(*OPTIMIZER.split())),
    )  # fmt: skip


def read_bridge(files, layers):
    module = run_module(files["stagewright_megatron_bridge.py"])
    config = module["configure"](bridge_config(layers))
    assert config.dist.use_megatron_fsdp == config.ddp.use_megatron_fsdp
    assert config.mixed_precision.grad_reduce_in_fp32 == config.ddp.grad_reduce_in_fp32
    found = _core(module["RANKS"], layers, config.model, config.ddp, config.optimizer, config.train)
    found |= _recompute(config.model) | _offloaded(config.model)
    return {**found, "inside": config.dist.use_tp_pp_dp_mapping}


def read_nemo(files, layers):
    module = run_module(files["stagewright_nemo.py"])
    recipe = module["configure"](nemo_recipe(layers))
    strategy = recipe.trainer.strategy
    ranks = recipe.trainer.num_nodes * recipe.trainer.devices
    assert ranks == module["RANKS"]
    assert (strategy.fsdp == "megatron") == strategy.ddp.use_megatron_fsdp
    found = _core(ranks, layers, strategy, strategy.ddp, recipe.optim.config, recipe.data)
    found |= _recompute(recipe.model.config) | _offloaded(recipe.model.config)
    return {**found, "inside": strategy.use_tp_pp_dp_mapping}


def _core(ranks, layers, model, ddp, optimizer, train):
    assert ddp.use_distributed_optimizer == optimizer.use_distributed_optimizer
    pipeline, tensor = model.pipeline_model_parallel_size, model.tensor_model_parallel_size
    stages = pipeline * (model.virtual_pipeline_model_parallel_size or 1)
    data = ranks // (pipeline * tensor * model.context_parallel_size)
    text = model.pipeline_model_parallel_layout
    return {
        "ranks": ranks,
        "pipeline": pipeline,
        "tensor": tensor,
        "context": model.context_parallel_size,
        "data": data,
        "expert": model.expert_model_parallel_size,
        "microbatch": train.micro_batch_size,
        "batch": train.global_batch_size,
        "accumulation": train.global_batch_size / (train.micro_batch_size * data),
        "blocks": blocks_of(text, stages) if text else (layers // stages,) * stages,
        "sequence_parallel": model.sequence_parallel,
        "zero": _zero(ddp),
        "offload": optimizer.optimizer_cpu_offload,
    }


def titan_config(layers):
    """A Trainer.Config."""
    attention = SimpleNamespace(rope=record(*ROPE.split()), qk_norm=None, q_norm=record("eps"))
    blocks = [
        SimpleNamespace(
            attention=attention, **{n: record("eps") for n in ("attention_norm", "ffn_norm")}
        )
        for _ in range(layers)
    ]
    model = SimpleNamespace(layers=blocks, norm=record("eps"))
    sections = {name: record(*fields.split()) for name, fields in TITAN.items()}
    return record("activation_checkpoint", model_spec=SimpleNamespace(model=model), **sections)


def said_of_model(to, files, layers):
    """The bases of rotary positions and the epsilons of norms that files set."""
    if to == "megatron":
        args, _, _ = run_megatron(files["megatron.sh"])
        return {args.rotary_base}, {args.norm_epsilon}
    (text,) = files.values()
    config = CONFIGS[to](layers)
    run_module(text)["configure"](config)
    if to == "torchtitan":
        model = config.model_spec.model
        blocks = [(one.attention_norm, one.ffn_norm, one.attention.q_norm) for one in model.layers]
        norms = (model.norm, *(norm for block in blocks for norm in block))
        ropes = (one.attention.rope for one in model.layers)
        return {value(one, "theta") for one in ropes}, {value(one, "eps") for one in norms}
    model = config.model if to == "megatron-bridge" else config.model.config
    return {value(model, "rotary_base")}, {value(model, "layernorm_epsilon")}


def value(one, name):
    return getattr(one, name, None)


def read_titan(files, layers):
    module = run_module(files["stagewright_torchtitan.py"])
    config = module["configure"](titan_config(layers))
    training, degrees = config.training, config.parallelism
    replicas, shards = degrees.data_parallel_replicate_degree, degrees.data_parallel_shard_degree
    pipeline, data = degrees.pipeline_parallel_degree, replicas * shards
    parts, microbatch = degrees.module_fqns_per_model_part, training.local_batch_size
    name = "1F1B"
    if pipeline > 1:
        microbatch = degrees.pipeline_parallel_microbatch_size
        name = degrees.pipeline_parallel_schedule
        looped = name == "Interleaved1F1B"
        assert name in TORCH_SCHEDULES or looped == (len(parts) > pipeline)
        assert training.local_batch_size * data == training.global_batch_size
    assert not training.enable_cpu_offload
    together = pipeline > 1 or degrees.expert_parallel_degree > 1
    assert getattr(training, "disable_cuda_graphs", False) == together
    kept = degrees.fsdp_reshard_after_forward == "never"
    sharded = shards * degrees.context_parallel_degree > 1
    return {
        "ranks": module["RANKS"],
        "pipeline": pipeline,
        "tensor": degrees.tensor_parallel_degree,
        "context": degrees.context_parallel_degree,
        "data": data,
        "expert": degrees.expert_parallel_degree,
        "microbatch": microbatch,
        "batch": training.global_batch_size,
        "accumulation": training.global_batch_size / (microbatch * data),
        "blocks": (layers,) if parts is None else titan_blocks(parts, layers),
        "schedule": TORCH_SCHEDULES.get(name, "1f1b"),
        "recompute": config.activation_checkpoint or "none",
        "recompute_blocks": None,
        "offload_blocks": 0,
        "sequence_parallel": degrees.enable_sequence_parallel,
        "zero": (1 if pipeline > 1 else 2 if kept else 3) if sharded else 0,
        "offload": False,
        "inside": False,
    }


def titan_blocks(parts, layers):
    """Blocks per stage; all modules are there once and in order."""
    flat = [name for part in parts for name in part]
    blocks = [f"layers.{index}" for index in range(layers)]
    assert flat == ["tok_embeddings", *blocks, "norm", "lm_head"]
    return tuple(sum(name.startswith("layers.") for name in part) for part in parts)


class HfModel:
    """A model of transformers."""

    def __init__(self, layers):
        self.config = SimpleNamespace(num_hidden_layers=layers)
        self.recompute = "none"

    def gradient_checkpointing_enable(self):
        self.recompute = "full"


PLAIN = {
    "pipeline": 1,
    "context": 1,
    "sequence_parallel": False,
    "inside": False,
    "schedule": "1f1b",
    "recompute_blocks": None,
    "offload_blocks": 0,
}


def read_deepspeed(files, layers):
    module, model = run_module(files["stagewright_deepspeed.py"]), HfModel(layers)
    given = module["initialize"](model, optimizer="adam")
    assert given["optimizer"] == "adam"
    assert given["config"] == "exported/ds_config.json"
    config = json.loads(files["ds_config.json"])
    zero = config.pop("zero_optimization")
    tensor = config.pop("tensor_parallel", {"autotp_size": 1})["autotp_size"]
    experts = config.pop("expert_parallel", {"enabled": True, "autoep_size": 1})
    microbatch = config.pop("train_micro_batch_size_per_gpu")
    steps = config.pop("gradient_accumulation_steps")
    data = module["RANKS"] // tensor
    if tensor == 1:
        assert config.pop("train_batch_size") == microbatch * steps * data
    assert set(config) <= {"bf16", "fp16", "data_types"}
    offload = zero.get("offload_optimizer")
    assert offload in (None, {"device": "cpu", "pin_memory": True})
    return PLAIN | {
        "ranks": module["RANKS"],
        "tensor": tensor,
        "data": data,
        "expert": experts["autoep_size"],
        "microbatch": microbatch,
        "batch": microbatch * steps * data,
        "accumulation": steps,
        "blocks": (layers,),
        "recompute": model.recompute,
        "zero": zero["stage"],
        "offload": offload is not None,
    }


def read_accelerate(files, layers):
    module, model = run_module(files["stagewright_accelerate.py"]), HfModel(layers)
    assert module["configure"](model) is model
    built = module["build"]()
    degrees, plugin = built.parallelism_config, built.fsdp_plugin
    data = degrees.dp_replicate_size * degrees.dp_shard_size
    assert module["RANKS"] == data * degrees.cp_size * degrees.tp_size
    steps = built.gradient_accumulation_plugin
    assert steps.sync_each_batch == (plugin is not None)
    return PLAIN | {
        "ranks": module["RANKS"],
        "tensor": degrees.tp_size,
        "context": degrees.cp_size,
        "data": data,
        "expert": 1,
        "microbatch": module["BATCH"],
        "batch": module["BATCH"] * data * steps.num_steps,
        "accumulation": steps.num_steps,
        "blocks": (layers,),
        "recompute": model.recompute,
        "zero": 0 if plugin is None else 3 if plugin.reshard_after_forward else 2,
        "offload": False,
    }


def read_yaml(text):
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _trained(files, layers, degrees, others):
    """What a trainer's fields say; ``others``: tensor, context, ZeRO, microbatch, steps."""
    ranks = int(re.search(r"mpirun -np (\d+) ", files["mpirun.sh"])[1])
    tensor, context, zero, microbatch, steps = degrees
    data = ranks // (tensor * context)
    return PLAIN | {
        "ranks": ranks,
        "tensor": tensor,
        "context": context,
        "data": data,
        "expert": 1,
        "microbatch": microbatch,
        "batch": microbatch * data * steps,
        "accumulation": steps,
        "blocks": (layers,),
        "zero": zero,
        "offload": False,
        **others,
    }


def read_axolotl(files, layers):
    config = read_yaml(files["axolotl.yaml"])
    plugin = config.get("fsdp_config")
    assert (plugin is None) == ("dp_shard_size" not in config)
    degrees = (
        config.get("tensor_parallel_size", 1), config.get("context_parallel_size", 1),
        0 if plugin is None else 3 if plugin["reshard_after_forward"] else 2,
        config["micro_batch_size"], config["gradient_accumulation_steps"],
    )  # fmt: skip
    again = "full" if config["gradient_checkpointing"] else "none"
    found = _trained(files, layers, degrees, {"recompute": again})
    assert config.get("dp_shard_size", found["data"]) == found["data"]
    return found


def read_trl(files, layers):
    config = read_yaml(files["sft.yaml"])
    lines = (line.removeprefix("export ") for line in files["accelerate.env"].splitlines())
    given = dict(line.split("=") for line in lines)
    kept = given.get("FSDP_RESHARD_AFTER_FORWARD")
    degrees = (
        int(given.get("PARALLELISM_CONFIG_TP_SIZE", 1)),
        int(given.get("PARALLELISM_CONFIG_CP_SIZE", 1)),
        {None: 0, "true": 3, "false": 2}[kept],
        config["per_device_train_batch_size"], config["gradient_accumulation_steps"],
    )  # fmt: skip
    again = "full" if config["gradient_checkpointing"] else "none"
    return _trained(files, layers, degrees, {"recompute": again})


def read_transformers(files, layers):
    config = json.loads(files["distributed_config.json"])
    module, model = run_module(files["stagewright_transformers.py"]), HfModel(layers)
    model.config.distributed = config
    module["json"] = SimpleNamespace(loads=lambda _: config)
    module["Path"] = lambda _: SimpleNamespace(
        with_name=lambda name: SimpleNamespace(read_text=lambda: name)
    )
    module["AutoModelForCausalLM"] = SimpleNamespace(from_pretrained=lambda *_, **__: model)
    assert module["load"]("name") is model
    zero = 3 if config["fsdp_size"] > 1 else 0
    degrees = (config["tp_size"], 1, zero, module["BATCH"], module["ACCUMULATION"])
    others = {"recompute": model.recompute, "expert": config["ep_size"]}
    found = _trained(files, layers, degrees, others)
    assert module["RANKS"] == found["ranks"]
    assert config["fsdp_size"] * config["dp_replicate_size"] == found["data"]
    return found


def read_nnscaler(files, layers):
    config = read_yaml(files["nnscaler.yaml"])
    compute = config["compute_config"]
    policy = compute["pas_config"]
    tensor, pipeline = policy["max_partition_degree"], policy["pipeline_nstages"]
    assert compute["plan_ngpus"] == tensor * pipeline
    degrees = (
        tensor, 1, int(compute["use_zero"]), config["micro_batch_size"], policy["update_freq"]
    )  # fmt: skip
    again = "full" if "recompute_modules" in policy else "none"
    found = _trained(files, layers, degrees, {"recompute": again, "pipeline": pipeline})
    found["data"] //= pipeline
    found["batch"] //= pipeline
    assert (compute["runtime_ngpus"], config["global_batch_size"]) == (
        found["ranks"], found["batch"],
    )  # fmt: skip
    return found | {"blocks": (layers // pipeline,) * pipeline}


CONFIGS = {"megatron-bridge": bridge_config, "nemo": nemo_recipe, "torchtitan": titan_config}
READERS = {
    "megatron": lambda files, layers: read_megatron(files),
    "megatron-bridge": read_bridge,
    "nemo": read_nemo,
    "torchtitan": read_titan,
    "deepspeed": read_deepspeed,
    "accelerate": read_accelerate,
    "axolotl": read_axolotl,
    "trl": read_trl,
    "transformers": read_transformers,
    "nnscaler": read_nnscaler,
}
