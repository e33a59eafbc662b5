"""Runs of Megatron-LM (core 0.16 to 0.20) by the arguments of its training scripts.

Defaults are those of megatron/training/arguments.py.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any

from stagewright.executor.export.layouts.core import STRATEGIES
from stagewright.executor.export.layouts.megatron import NORMS
from stagewright.executor.export.runs.arguments import (
    Arguments,
    LaunchScript,
    TrainingRun,
    by_name,
    data_degree,
    division,
    read_script,
)
from stagewright.executor.export.runs.megatron_hybrid import (
    POSITIONS,
    delta_variants,
    flags,
    hybrid_fields,
    read_pattern,
    read_stated,
    read_traits,
)
from stagewright.formulations.parallelism.layout import Layout
from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.machines.stack_memory import STACK_MEMORY
from stagewright.graphs.models.architecture import (
    Architecture,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
)
from stagewright.graphs.models.modules import joined

ARRAY, RANKS = "MEGATRON_ARGUMENTS", "MEGATRON_RANKS"

_VOCABULARIES = {"GPT2BPETokenizer": 50_257, "Llama2Tokenizer": 32_000}


def read_megatron(text: str, place: str, gpus: int | None = None) -> TrainingRun:
    """The run of a launch script, or of a file of arguments, on ``gpus`` devices.

    Raises InputError in one line that begins with ``place``: an argument that is not understood, a
    value that the script does not set, or no number of devices.
    """
    script = read_script(text, place, ARRAY)
    with naming(place):
        arguments = Arguments(by_name(script.arguments))
        architecture = _architecture(arguments, PurePath(place).stem)
        layout = _layout(arguments, architecture, gpus or _gpus(script))
        precision, gradients = _precision(arguments)
        backend = arguments.choice("--attention-backend", ("auto", "flash", "fused", "unfused"))
        arguments.flag("--overlap-param-gather")
        arguments.choice("--optimizer", ("adam",))
        if layout.recompute == "selective" and backend != "unfused":
            layout = replace(layout, recompute="none")
            arguments.notes.append("selective recomputation of a fused attention is priced as none")
        run = TrainingRun(
            "megatron",
            layout,
            architecture,
            batch=arguments.number("--global-batch-size"),
            sequence=arguments.number("--seq-length", "--encoder-seq-length"),
            precision=precision,
            gradients=gradients,
            attention="materialized" if backend == "unfused" else "fused",
            overlap=arguments.flag("--overlap-grad-reduce") or layout.data * layout.context == 1,
            notes=tuple(f"{place}: {one}" for one in arguments.notes),
        )
        arguments.require_all_read()
    return run


def _gpus(script: LaunchScript) -> int | None:
    """The devices of torchrun's arguments, or of the usual variables."""
    launcher = " ".join(script.launcher).replace("_", "-").replace("=", " ")
    found = [re.search(rf"--{name} +(\d+)", launcher) for name in ("nnodes", "nproc-per-node")]
    if found[1] is not None:
        return int(found[1][1]) * int(found[0][1] if found[0] else 1)
    variables = script.variables
    for name in (RANKS, "WORLD_SIZE"):
        if variables.get(name, "").isdecimal():
            return int(variables[name])
    nodes = next((variables[one] for one in ("NNODES", "NUM_NODES") if one in variables), "1")
    each = variables.get("GPUS_PER_NODE", "")
    return int(each) * int(nodes) if each.isdecimal() and nodes.isdecimal() else None


def _architecture(arguments: Arguments, name: str) -> Architecture:
    hidden = arguments.required("--hidden-size")
    usual = ["rope"] if arguments.flag("--use-rotary-position-embeddings") else []
    kind = arguments.choice("--position-embedding-type", (*usual, *POSITIONS))
    positions = arguments.number("--max-position-embeddings")
    bias = not arguments.flag("--disable-bias-linear")
    parts = _parts(arguments, hidden, bias)
    experts, learned = parts["experts"], kind == "learned_absolute"
    if bias and experts is not None and experts.shared_width is not None:
        raise InputError("shared experts with biases: --disable-bias-linear is missing")
    norms = {text: name for name, text in NORMS.items()}
    dropout = arguments.real("--hidden-dropout")
    window, full = _window(arguments, parts["layers"])
    if learned and positions is None:
        raise InputError("--max-position-embeddings is missing: the size of the table of positions")
    latent = isinstance(parts["attention"], LatentAttention)
    return Architecture(
        name=name,
        hidden=hidden,
        vocabulary=_vocabulary(arguments),
        **parts,
        rotary=kind != "none",
        norm=norms[arguments.choice("--normalization", ("LayerNorm", "RMSNorm"))],  # type: ignore[arg-type]
        positions=positions if learned else None,
        tied=not arguments.flag("--untie-embeddings-and-output-weights"),
        window=window,
        full_layers=full,
        dropout=dropout is None or dropout > 0,
        rotary_base=arguments.real("--rotary-base"),
        norm_epsilon=arguments.real("--norm-epsilon"),
        traits=read_traits(arguments),
        stated=read_stated(arguments, kind, latent=latent, experts=experts is not None),
    )


def _parts(arguments: Arguments, hidden: int, bias: bool) -> dict[str, Any]:
    """The number of blocks, and what they have."""
    stages, fed = read_pattern(arguments), _feed_forward(arguments, hidden, bias)
    layers = arguments.number("--num-layers")
    if stages is not None:
        layers = sum(map(len, stages))
        experts = _experts(arguments, layers, bias)
        attention = partial(_attention, arguments, hidden, bias)
        return hybrid_fields(arguments, stages, hidden, attention, fed, experts)
    layers = layers or arguments.required("--num-layers")
    return {
        "layers": layers,
        "attention": _attention(arguments, hidden, bias),
        "feed_forward": fed,
        "experts": _experts(arguments, layers, bias),
        "variants": delta_variants(arguments, layers),
    }


def _vocabulary(arguments: Arguments) -> int:
    """The size that is said, or that of a tokenizer that has one; its padding is not counted."""
    size = arguments.number("--vocab-size", "--padded-vocab-size")
    usual = "GPT2BPETokenizer" if "--merge-file" in arguments.values else ""
    kind = arguments.text("--tokenizer-type") or usual
    if size is None and kind not in _VOCABULARIES:
        raise InputError("the size of the vocabulary is not said; add --vocab-size, e.g. 50257")
    return size or _VOCABULARIES[kind]


def _attention(arguments: Arguments, hidden: int, bias: bool) -> GroupedAttention | LatentAttention:
    heads = arguments.required("--num-attention-heads")
    norms, size = arguments.flag("--qk-layernorm"), arguments.number("--kv-channels")
    if arguments.flag("--multi-latent-attention"):
        return LatentAttention(
            heads,
            arguments.required("--kv-lora-rank"),
            arguments.required("--qk-head-dim"),
            arguments.required("--qk-pos-emb-head-dim"),
            arguments.required("--v-head-dim"),
            arguments.number("--q-lora-rank"),
            bias,
        )
    if size is None and hidden % heads:
        raise InputError(f"--hidden-size {hidden} is no multiple of --num-attention-heads {heads}")
    groups = arguments.number("--num-query-groups")
    grouped = arguments.flag("--group-query-attention")
    return GroupedAttention(
        heads,
        groups if grouped and groups is not None else heads,
        size or hidden // heads,
        bias=bias or arguments.flag("--add-qkv-bias"),
        output_bias=bias,
        head_norms=norms,
        gate=arguments.flag("--attention-output-gate"),
        sinks=arguments.choice("--softmax-type", ("vanilla", "learnable")) == "learnable",
    )


def _feed_forward(arguments: Arguments, hidden: int, bias: bool) -> FeedForward:
    gated = _is_gated(arguments)
    usual = int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden
    return FeedForward(arguments.number("--ffn-hidden-size") or usual, gated=gated, bias=bias)


def _is_gated(arguments: Arguments) -> bool:
    return arguments.flag("--swiglu", "--quick-geglu")


def _window(arguments: Arguments, layers: int) -> tuple[int | None, frozenset[int]]:
    text = arguments.text("--window-size")
    skipped = arguments.text("--window-attn-skip-freq")
    if text is None:
        return None, frozenset()
    left, _, right = text.strip("()").partition(",")
    if not left.isdecimal() or right.strip() != "0":
        raise InputError(f"--window-size {text}: write the tokens to the left and 0: 4095,0")
    limited = [1] * layers if skipped is None else flags(skipped, layers, "--window-attn-skip-freq")
    return int(left) + 1, frozenset(i for i, one in enumerate(limited) if not one)


def _experts(arguments: Arguments, layers: int, bias: bool) -> Experts | None:
    number = arguments.number("--num-experts")
    pattern = arguments.text("--moe-layer-freq")
    names = ("--moe-router-topk", "--moe-ffn-hidden-size", "--moe-shared-expert-intermediate-size")
    per_token, width, shared = map(arguments.number, names)
    gate = arguments.flag("--moe-shared-expert-gate")
    arguments.flag("--moe-shared-expert-overlap")
    if number is None:
        return None
    sparse = flags(pattern or "1", layers, "--moe-layer-freq")
    return Experts(
        number,
        per_token or 2,
        width or arguments.required("--ffn-hidden-size"),
        shared,
        gate,
        frozenset(i for i, one in enumerate(sparse) if not one),
        bias=bias,
        router_bias=bias,
        gated=_is_gated(arguments),
    )


def _layout(arguments: Arguments, architecture: Architecture, gpus: int | None) -> Layout:
    tensor = arguments.number("--tensor-model-parallel-size") or 1
    pipeline = arguments.number("--pipeline-model-parallel-size") or 1
    context = arguments.number("--context-parallel-size") or 1
    degrees: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline, "context": context}
    data = data_degree(gpus, degrees)
    inside = arguments.flag("--use-tp-pp-dp-mapping") and pipeline > 1 and data > 1
    return Layout(
        **degrees,
        data=data,
        expert=_expert(arguments, architecture, tensor),
        microbatch=arguments.number("--micro-batch-size") or 1,
        **_stages(arguments, architecture.layers, pipeline),
        **_recomputation(arguments, architecture),
        sequence_parallel=arguments.flag("--sequence-parallel") and tensor > 1,
        zero=_zero(arguments),
        offload_optimizer=_offloads(arguments),
        placement="pipeline-inside" if inside else "data-inside",
        offload_blocks=arguments.number("--cpu-offloading-num-layers") or 0,
    )


def _expert(arguments: Arguments, architecture: Architecture, tensor: int) -> int:
    degree = arguments.number("--expert-model-parallel-size") or 1
    inside = arguments.number("--expert-tensor-parallel-size")
    if architecture.experts is not None and (tensor if inside is None else inside) > 1:
        raise InputError(
            "experts divided over tensor ranks: layouts keep experts whole; add "
            "--expert-tensor-parallel-size 1"
        )
    return degree


def _stages(arguments: Arguments, layers: int, pipeline: int) -> dict[str, Any]:
    """Chunks, and the blocks of the ends or of every stage where they differ."""
    text = arguments.text("--pipeline-model-parallel-layout")
    stages = read_pattern(arguments)
    if stages is not None and len(stages) > 1:
        return division(tuple(map(len, stages)), pipeline)
    ends = {
        "first_blocks": arguments.number("--decoder-first-pipeline-num-layers"),
        "last_blocks": arguments.number("--decoder-last-pipeline-num-layers"),
    }
    each = arguments.number("--num-layers-per-virtual-pipeline-stage")
    chunks = arguments.number("--num-virtual-stages-per-pipeline-rank")
    if text is not None:
        return division(tuple(_blocks(text)), pipeline)
    chunks = chunks or (layers // (pipeline * each) if each else 1)
    return {"chunks": chunks, **{name: one for name, one in ends.items() if one is not None}}


def _blocks(text: str) -> Iterable[int]:
    """The transformer layers of every stage of ``Ettt|t*4|tL``; ``(t|)*3`` repeats."""
    text = re.sub(r"\(([^()]*)\)\*(\d+)", lambda one: one[1] * int(one[2]), text)
    for stage in text.split("|"):
        if re.fullmatch(r"(E|L|t|t\*\d+|,)*", stage) is None:
            raise InputError(f"--pipeline-model-parallel-layout: {stage!r} is not of E, t and L")
        yield sum(int(n or 1) for n in re.findall(r"t(?:\*(\d+))?", stage))


def _recomputation(arguments: Arguments, architecture: Architecture) -> dict[str, Any]:
    granularity = arguments.text("--recompute-granularity")
    method = arguments.text("--recompute-method")
    number = arguments.number("--recompute-num-layers")
    arguments.read.add("--recompute-modules")
    modules = {*arguments.values.get("--recompute-modules", ["core_attn"])}
    if arguments.flag("--recompute-activations"):
        granularity = "selective"
    if granularity == "full":
        paired = any(len(one) > 1 for stage in read_pattern(arguments) or () for one in stage)
        if method != "block" and (number or 1) > (2 if paired else 1):
            raise InputError(
                f"--recompute-num-layers {number} with the method uniform: layouts keep the input "
                "of every layer; write 1"
            )
        return {"recompute": "full", "recompute_blocks": number if method == "block" else None}
    if granularity is None:
        return {}
    if isinstance(architecture.attention, LatentAttention):
        modules -= {*STACK_MEMORY["megatron"].always}
    whole = {frozenset(): "none", frozenset({"core_attn"}): "selective"}
    return {"recompute": whole.get(frozenset(modules)) or joined(modules)}


def _zero(arguments: Arguments) -> int:
    strategy = arguments.choice(
        "--data-parallel-sharding-strategy", ("no_shard", "optim", *list(STRATEGIES.values())[2:])
    )
    fsdp = arguments.flag("--use-megatron-fsdp", "--use-custom-fsdp")
    distributed = arguments.flag("--use-distributed-optimizer")
    if arguments.flag("--use-torch-fsdp2"):
        return 3
    divided = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}[strategy]
    return divided if fsdp else int(distributed)


def _offloads(arguments: Arguments) -> bool:
    offloads = arguments.flag("--optimizer-cpu-offload")
    fraction = arguments.real("--optimizer-offload-fraction")
    if offloads and fraction not in (None, 1.0):
        raise InputError(f"--optimizer-offload-fraction {fraction}: layouts offload all, 1.0")
    return offloads


def _precision(arguments: Arguments) -> tuple[str, str]:
    """The types of products and of sums of gradients."""
    half = {name: arguments.flag(f"--{name}") for name in ("bf16", "fp16")}
    number = next((name for name, given in half.items() if given), "fp32")
    wide = arguments.flag("--accumulate-allreduce-grads-in-fp32")
    narrow = arguments.flag("--grad-reduce-in-bf16") or (number == "fp16" and not wide)
    recipes = [arguments.text(one) for one in ("--fp8-format", "--fp8-recipe")]
    for name in ("--exp-avg-dtype", "--exp-avg-sq-dtype"):
        arguments.choice(name, ("fp32",))
    if arguments.flag("--fp8-param-gather", "--fp8-param"):
        arguments.notes.append("weights in fp8 (--fp8-param-gather) are priced in two bytes")
    arguments.flag("--use-precision-aware-optimizer")
    return "fp8" if recipes[0] else number, "bf16" if narrow else "fp32"
