"""Arguments of Megatron-LM (core 0.16 to 0.20): ``--pipeline-model-parallel-layout`` and others.

The layout is read by megatron/core/transformer/pipeline_parallel_layer_layout.py: ``E`` is the
embedding, ``t`` a transformer layer, ``L`` the output layer with the loss; ``|`` separates stages.
Stage s is chunk s // P of rank s mod P. The order of the computations is Megatron-LM's.

Layers are the modules of a decoder: embedding, numbered blocks, norm, head. A layer is recognised
by the last part of its name, with any prefix: ``wte`` or ``embedding``, ``layers.0``, ``h.0`` or
``block0``, ``norm`` or ``ln_f``, ``head``, ``lm_head``, ``logits`` or ``output``. Blocks count up
by one from 0 or 1. Frameworks that cut by names silently drop modules that no stage names, so
layers that are not recognised are refused.
"""

import re
import shlex
from collections.abc import Mapping, Sequence

from stagewright.executor.export.options import FormatOptions, samples_per_replica, stage_layers
from stagewright.executor.export.pipelines import (
    Pipeline,
    orders,
    pipeline,
    require_order,
    require_plain,
)
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.formulations.schedules.published.one_f_one_b import interleaved
from stagewright.graphs.documents.errors import InputError

Stages = Sequence[Sequence[str]]

_MEANING = "an embedding ('embedding'), numbered blocks ('layers.0'), and an output ('head')"
CURE = "use such names for the model's layers, or export to torch-csv or deepspeed"
_ROLES = {  # in the order in which they follow one another
    "embedding": re.compile(r"(.*[._])?(embed\w*|\w*embeddings?|wte|wpe|drop)"),
    "block": re.compile(r"(.*[._])?(blocks?|layers?|h)[._]?(?P<number>\d+)"),
    "norm": re.compile(r"(.*[._])?(\w*norm(_f)?|ln_f)"),
    "pooler": re.compile(r"(.*[._])?pooler"),
    "head": re.compile(r"(.*[._])?(\w*head|logits|output)"),
    "loss": re.compile(r"(.*[._])?loss"),
}
_ORDER = list(_ROLES)


def modules(stages: Stages, names: Mapping[str, str], framework: str) -> list[list[str]]:
    """Per stage the framework's modules, of which ``names`` gives one by role.

    ``{}`` in a name is the block's number, from 0. Layers with one name are one module, which must
    be on one stage; a role without a name is refused, an empty name is left out. Raises InputError
    with the layer that is not recognised, has no module, is out of order, or cuts a module.
    """
    roles = _roles([layer for layers in stages for layer in layers], names, framework)
    found: list[list[str]] = []
    module, blocks = "", 0
    for s, layers in enumerate(stages):
        found.append([])
        for layer in layers:
            role = roles[layer]
            last, module = module, names[role].format(blocks)
            blocks += role == "block"
            if not module or module in found[-1]:
                continue
            if module == last:
                raise InputError(
                    f"stage {s} begins with layer {layer!r}: {framework} has the whole {role} on "
                    "one stage"
                )
            found[-1].append(module)
    _require_ends(found, stages, names, framework)
    return found


def _roles(layers: Sequence[str], names: Mapping[str, str], framework: str) -> dict[str, str]:
    """The role of each layer; roles must be in their order, and blocks count up."""
    found: dict[str, str] = {}
    before, block = _ORDER[0], None
    for layer in layers:
        role, number = _told(layer, framework)
        if role not in names:
            raise InputError(
                f"layer {layer!r} has no module in {framework}, which has {_MEANING}; {CURE}"
            )
        if _ORDER.index(role) < _ORDER.index(before):
            raise InputError(f"layer {layer!r} is out of order: {framework} has {_MEANING}")
        if number is not None:
            wanted = min(number, 1) if block is None else block + 1
            if number != wanted:
                raise InputError(
                    f"layer {layer!r} should be number {wanted}: blocks count up by one from 0 or "
                    f"1, and {framework} would lose those between"
                )
            block = number
        found[layer], before = role, role
    return found


def _told(layer: str, framework: str) -> tuple[str, int | None]:
    """The role of a layer, and the number of a block."""
    for role, pattern in _ROLES.items():
        match = pattern.fullmatch(layer)
        if match is not None:
            return role, int(match["number"]) if role == "block" else None
    raise InputError(f"layer {layer!r} is not recognised: {framework} has {_MEANING}; {CURE}")


def _require_ends(
    found: list[list[str]], stages: Stages, names: Mapping[str, str], framework: str
) -> None:
    for s, modules_ in enumerate(found):
        if not modules_:
            layers = ", ".join(map(repr, stages[s]))
            raise InputError(f"stage {s} has no module of {framework}, only {layers}")
    if names["embedding"] not in found[0] or names["head"] not in found[-1]:
        raise InputError(
            f"layers {stages[0][0]!r} to {stages[-1][-1]!r}: {framework} has {_MEANING}, and "
            "neither end can be missing"
        )


NAME = "Megatron-LM"

_OUTPUT = ("norm", "pooler", "head", "loss")
SYMBOLS = {"embedding": "E", "block": "t{}", **dict.fromkeys(_OUTPUT, "L")}


def arguments(plan: PipelinePlan, options: FormatOptions) -> dict[str, str]:
    """A file for bash that sets the array ``MEGATRON_ARGUMENTS``."""
    ranks = pipeline(plan, NAME, "optimizer")
    count, stages = len(ranks.devices), len(plan.stages)
    _require_loop(plan, ranks)
    parts = modules(stage_layers(plan, options), SYMBOLS, NAME)
    layout = ["".join(part[0] for part in stage) for stage in parts]
    if not options.partition_only:
        require_plain(plan, NAME)
        known = interleaved(count, stages // count, plan.microbatches).rows
        require_order(orders(plan, ranks), known, f"{NAME}'s schedule")
    samples = samples_per_replica(plan, options, ranks.replicas)
    words = [
        *("--pipeline-model-parallel-size", count),
        *("--pipeline-model-parallel-layout", "|".join(map(_shortened, layout))),
        *("--num-layers", sum(stage.count("t") for stage in layout)),
        *("--micro-batch-size", samples),
        *("--global-batch-size", samples * ranks.replicas * plan.microbatches),
    ]
    if stages > count:
        words += ["--microbatch-group-size-per-virtual-pipeline-stage", count]
    lines = "".join(
        f"  {name} {shlex.quote(str(value))}\n"
        for name, value in zip(words[::2], words[1::2], strict=True)
    )
    lines += "  --use-distributed-optimizer\n" * (ranks.shards == "optimizer")
    head = (
        "# The pipeline that Stagewright planned, for Megatron-LM: source this file, then on\n"
        f"# {count * ranks.replicas} ranks\n"
        '#   torchrun ... pretrain_gpt.py "${MEGATRON_ARGUMENTS[@]}" ...\n'
        "# with what is not in the plan: the model (--hidden-size, --num-attention-heads, ...),\n"
        "# --seq-length, the precision (--bf16), data, tokenizer and learning rate.\n"
    )
    return {"megatron.sh": f"{head}MEGATRON_ARGUMENTS=(\n{lines})\n"}


def _require_loop(plan: PipelinePlan, ranks: Pipeline) -> None:
    count, stages = len(ranks.devices), len(plan.stages)
    for s, rank in enumerate(ranks.rank_of_stage):
        if rank != s % count:
            raise InputError(
                f"stage {s} is on rank {rank}, where {NAME} has it on rank {s % count}: it assigns "
                "stages to ranks round-robin"
            )
    if stages % count:
        raise InputError(f"{stages} stages on {count} ranks: {NAME} has equally many on each")
    if stages > count and (count == 1 or plan.microbatches % count):
        raise InputError(
            f"{stages} stages on {count} ranks with {plan.microbatches} microbatches: {NAME} "
            "interleaves on at least 2 ranks, with a multiple of their number of microbatches"
        )


def _shortened(symbols: str) -> str:
    """Write runs of ``t`` as products: ``Ettt`` as ``Et*3``."""
    return re.sub("tt+", lambda run: f"t*{len(run[0])}", symbols)
