"""``train-plan`` and ``memory``: how to divide the training of a transformer among GPUs."""

from pathlib import Path
from typing import Annotated

import typer

from stagewright.cli.console import (
    JsonFlag,
    OutputFile,
    ask,
    print_answer,
    print_lines,
    progress,
)
from stagewright.cli.interrupts import interruptible
from stagewright.cli.layout_inputs import (
    Arithmetic,
    Attention,
    read_fabric,
    read_problem,
    read_space,
)
from stagewright.cli.layout_printing import print_layouts, print_memory, print_shortages
from stagewright.cli.outputs import Writes
from stagewright.graphs.documents.errors import InputError

Config = Annotated[
    Path,
    typer.Argument(
        help="A Hugging Face config.json, or its folder, or the name of its model (OWNER/NAME), or "
        "layer profiles that import wrote.",
        metavar="CONFIG_OR_PROFILES",
        show_default=False,
    ),
]
Sequence_ = Annotated[
    int | None,
    typer.Option("--sequence", help="Tokens in a sample; for a config.json.", metavar="S"),
]
Batch = Annotated[
    int, typer.Option("--global-batch", help="Samples between two updates.", metavar="N")
]
Kind = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="Kind of GPU, for example h100, or the JSON file of your own.",
        metavar="KIND",
    ),
]
Gpus = Annotated[int | None, typer.Option("--gpus", help="Number of GPUs.", metavar="N")]
PerServer = Annotated[
    int | None,
    typer.Option("--per-server", help="GPUs in a server; default: 8.", metavar="N", min=1),
]
Servers = Annotated[
    str | None,
    typer.Option(
        help="For layer profiles: servers x GPUs by kind, for example a100:2x4,v100:3x8; memory "
        "and bandwidths may then be given by kind, for example a100=40GB,v100=16GB.",
        metavar="KIND:NxM,...",
    ),
]
SearchTime = Annotated[
    float, typer.Option(help="For layer profiles: time limit of the search in seconds.")
]
ServerBandwidth = Annotated[
    str | None,
    typer.Option(
        help="From a GPU to the others of its server, as reached; default: 81 % of the kind's."
    ),
]
NetworkBandwidth = Annotated[
    str | None,
    typer.Option(
        help="From a GPU out of its server while all send, as reached; default: 84 % of the kind's."
    ),
]
PerRack = Annotated[
    int | None, typer.Option(help="GPUs in a rack or pod, with --rack-bandwidth.", metavar="N")
]
RackBandwidth = Annotated[
    str | None, typer.Option(help="From a GPU out of its rack while all send.")
]
HostBandwidth = Annotated[
    str | None, typer.Option(help="From a GPU to its host's memory, for --offload-optimizer.")
]
Memory = Annotated[
    str | None, typer.Option(help="Memory of a GPU; default: that of the kind.", metavar="SIZE")
]
ClusterOption = Annotated[
    Path | None,
    typer.Option(
        "--cluster",
        help="Cluster file, in place of --device, --gpus and bandwidths.",
        metavar="FILE",
    ),
]
PrecisionOption = Annotated[
    Arithmetic, typer.Option(help="Type of weights and activations; fp8: of products.")
]
AttentionOption = Annotated[
    Attention, typer.Option(help="fused: scores are not stored; materialized: they are.")
]
NoOverlap = Annotated[
    bool,
    typer.Option("--no-overlap", help="Exchanges of gradients and ZeRO wait for computations."),
]
Reserve = Annotated[
    str, typer.Option(help="Memory of a GPU that is not for the plan.", metavar="SIZE")
]
Picture = Annotated[
    Path | None,
    typer.Option(
        "--png",
        help="Where to draw: the front, the stages of layer profiles, or the ranks' memory.",
        metavar="FILE",
    ),
    Writes(".png"),
]


def train_plan(
    command_line: typer.Context,
    config: Config,
    global_batch: Batch,
    sequence: Sequence_ = None,
    servers: Servers = None,
    device: Kind = None,
    gpus: Gpus = None,
    per_server: PerServer = None,
    server_bandwidth: ServerBandwidth = None,
    network_bandwidth: NetworkBandwidth = None,
    per_rack: PerRack = None,
    rack_bandwidth: RackBandwidth = None,
    host_bandwidth: HostBandwidth = None,
    memory: Memory = None,
    cluster: ClusterOption = None,
    precision: PrecisionOption = Arithmetic.BF16,
    attention: AttentionOption = Attention.FUSED,
    no_overlap: NoOverlap = False,
    reserve: Reserve = "2GB",
    pipeline: Annotated[str | None, typer.Option(help="Pipeline degrees to consider.")] = None,
    tensor: Annotated[str | None, typer.Option(help="Tensor degrees to consider: 1,2,4.")] = None,
    context: Annotated[str | None, typer.Option(help="Context degrees to consider.")] = None,
    replicas: Annotated[
        str | None, typer.Option(help="Data degrees to consider: copies of the model.")
    ] = None,
    expert: Annotated[str | None, typer.Option(help="Expert degrees to consider.")] = None,
    microbatch_sizes: Annotated[
        str | None, typer.Option(help="Samples of a microbatch to consider.", metavar="B,B,...")
    ] = None,
    chunks: Annotated[
        int, typer.Option(help="The most stages on a pipeline rank (virtual stages).", metavar="V")
    ] = 16,
    zero: Annotated[str, typer.Option(help="Stages of ZeRO to consider; 3 is FSDP.")] = "0,1,2,3",
    recompute: Annotated[
        str, typer.Option(help="none, selective, full: which to consider.")
    ] = "none,selective,full",
    offload_optimizer: Annotated[
        bool, typer.Option("--offload-optimizer", help="Consider the optimizer in host memory too.")
    ] = False,
    top: Annotated[int, typer.Option(help="Layouts in the table.", min=1, max=1000)] = 10,
    explain: Annotated[
        str | None,
        typer.Option(help='Why not this layout, for example "p8 t8 d2 b1 v3 full sp zero1".'),
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            "--for",
            help="Only layouts that can be exported to it: megatron, megatron-bridge, nemo, "
            "torchtitan, deepspeed, accelerate; plan: a plan of stages, for `stagewright run`.",
            metavar="FRAMEWORK",
        ),
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="Schedules to consider.", metavar="NAME,NAME")
    ] = "1f1b,zero-bubble",
    alike: Annotated[
        bool, typer.Option("--alike", help="Only layouts whose stages are alike but for the ends.")
    ] = False,
    front: Annotated[
        bool, typer.Option("--front", help="The fastest layouts with less and with more memory.")
    ] = False,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="What more memory and faster links would buy.")
    ] = False,
    time_limit: SearchTime = 60.0,
    unfolded: Annotated[
        bool,
        typer.Option(
            "--unfolded",
            help="List layouts, too, that differ from a faster one only in placement, or in "
            "whether ranks divide samples or their tokens.",
        ),
    ] = False,
    tokens: Annotated[
        float | None,
        typer.Option(help="Tokens of the whole training, such as 15e12: how many days it takes."),
    ] = None,
    png: Picture = None,
    output: OutputFile = None,
    as_json: JsonFlag = False,
) -> int:
    """Find how to divide a transformer's training among GPUs; exit code 1 if nothing fits.

    Pipeline, tensor, context, expert and data degrees, microbatch, virtual stages, recomputation,
    ZeRO and placement.

    With measured layer profiles, on servers of several kinds: stages, replicas, tensor degrees and
    kinds of GPU.
    """
    from stagewright.cli.profiled import is_profiles, plan_profiles, require_options
    from stagewright.formulations.parallelism.document import save_layout
    from stagewright.formulations.parallelism.layout import parse_layout

    are_profiles = is_profiles(config)
    given = require_options(command_line, config, are_profiles)
    if are_profiles:
        rates = {
            "memory": memory,
            "server_bandwidth": server_bandwidth,
            "network_bandwidth": network_bandwidth,
        }
        return plan_profiles(
            config, global_batch, servers, cluster, rates, reserve if "reserve" in given else None,
            time_limit, png, output, as_json,
        )  # fmt: skip
    if sequence is None:
        raise InputError(f"{config} needs --sequence, the tokens in a sample, for example 4096")
    fabric = read_fabric(
        device, gpus, per_server, server_bandwidth, network_bandwidth, per_rack, rack_bandwidth,
        host_bandwidth, memory, cluster,
    )  # fmt: skip
    problem = read_problem(
        config, sequence, global_batch, fabric, precision, attention, no_overlap, reserve
    )
    if offload_optimizer and fabric.host_bytes_per_second is None:
        raise InputError("--offload-optimizer needs --host-bandwidth, for example 25GB/s")
    degrees = {
        "pipeline": pipeline,
        "tensor": tensor,
        "context": context,
        "replicas": replicas,
        "expert": expert,
        "microbatch-sizes": microbatch_sizes,
    }
    space = read_space(degrees, chunks, zero, recompute, schedule, offload_optimizer)
    from stagewright.service.layouts import LayoutRequest, find_layouts

    request = ask(
        LayoutRequest,
        {"framework": "--for"},
        problem=problem,
        space=space,
        top=top,
        framework=runtime,
        explain=None if explain is None else parse_layout(explain),
        by_stage=not alike,
        front=front or png is not None,
        what_if=what_if,
        unfolded=unfolded,
        tokens=tokens,
    )
    with interruptible() as stop, progress(f"planning {config.name}", stop):
        answer = find_layouts(request, stop)
    if png is not None:
        from stagewright.executor.drawing.memory_bars import front_png
        from stagewright.graphs.documents.documents import write_bytes

        write_bytes(
            png,
            front_png(
                answer.front,
                problem.fabric.memory_bytes,
                f"{config.name} on {fabric.devices} {fabric.device}, batch {global_batch}",
            ),
        )
    if output is not None and answer.plan is not None:
        save_layout(answer.plan, output)
    if as_json:
        print_answer(answer)
    else:
        print_layouts(config.name, problem, answer, front)
        written = [one for one in (png, output) if one is not None]
        if answer.plan is not None:
            print_lines(*(f"{one} is written" for one in written))
    return 1 if answer.plan is None else 0


def memory(
    file: Annotated[
        Path,
        typer.Argument(
            help="A Hugging Face config.json, or OWNER/NAME, with --layout; or what train-plan "
            "wrote.",
            metavar="CONFIG_OR_LAYOUT",
            show_default=False,
        ),
    ],
    layout: Annotated[
        str | None, typer.Option(help='For example "p8 t8 d2 b1 v3 full sp zero1".')
    ] = None,
    sequence: Annotated[
        int | None, typer.Option("--sequence", help="Tokens in a sample.", metavar="S")
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(
            help="Samples between two updates; default: two microbatches for every pipeline rank.",
            metavar="N",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Kind of GPU, or the JSON file of your own; default: h100.", metavar="KIND"
        ),
    ] = None,
    memory: Memory = None,
    precision: Annotated[
        Arithmetic | None, typer.Option(help="Type of weights and activations; default: bf16.")
    ] = None,
    attention: Annotated[
        Attention | None, typer.Option(help="Whether scores are stored; default: fused.")
    ] = None,
    reserve: Annotated[
        str | None,
        typer.Option(
            help="Memory of a GPU that is not for the plan; default: 2GB.", metavar="SIZE"
        ),
    ] = None,
    png: Picture = None,
    as_json: JsonFlag = False,
) -> int:
    """Break down the peak memory of a layout by pipeline rank; exit code 1 if one is too full."""
    from stagewright.cli.profiled import is_profiled_plan
    from stagewright.formulations.parallelism.document import load_layout
    from stagewright.formulations.parallelism.layout import parse_layout
    from stagewright.graphs.documents.documents import write_bytes
    from stagewright.graphs.importers.hf_hub import is_model
    from stagewright.service.layout_memory import MemoryRequest, layout_memory

    if not is_model(file) and is_profiled_plan(file):
        raise InputError(f"{file} is a plan by layer profiles: check computes its memory again")
    if is_layout(file):
        options = (layout, sequence, global_batch, device, memory, precision, attention, reserve)
        if any(one is not None for one in options):
            raise InputError(
                f"{file} has its layout, batch and machines: of the options only --png and --json "
                "apply"
            )
        plan = load_layout(file)
        request = ask(MemoryRequest, problem=plan.problem, layout=plan.layout)
    else:
        if layout is None or sequence is None:
            raise InputError("a configuration needs --layout and --sequence")
        chosen = parse_layout(layout)
        batch = global_batch or chosen.data * chosen.microbatch * 2 * chosen.pipeline
        fabric = read_fabric(
            device or "h100", chosen.ranks, chosen.ranks, None, None, None, None, None, memory, None
        )
        problem = read_problem(
            file, sequence, batch, fabric, precision or Arithmetic.BF16,
            attention or Attention.FUSED, False, reserve or "2GB",
        )  # fmt: skip
        request = ask(MemoryRequest, problem=problem, layout=chosen)
    answer = layout_memory(request)
    if png is not None:
        from stagewright.executor.drawing.memory_bars import memory_png

        write_bytes(png, memory_png(answer.ranks, answer.memory_bytes, answer.layout))
    if as_json:
        print_answer(answer)
    else:
        print_memory(answer.ranks, answer.memory_bytes)
        print_shortages(answer.shortages)
        print_lines(*([f"{png} is written"] if png is not None else []))
    return 1 if answer.shortages else 0


def is_layout(path: Path) -> bool:
    """Whether a file is a layout; a folder with a config.json, or a model by name, is not."""
    from stagewright.formulations.parallelism.document import FORMAT
    from stagewright.graphs.documents.documents import format_of
    from stagewright.graphs.importers.hf_hub import is_model

    return not is_model(path) and format_of(path) == FORMAT


def check_layout(path: Path, as_json: bool) -> int:
    """Compute a layout's time and memory again, and print what differs; exit code 1 if any."""
    from stagewright.formulations.parallelism.document import load_layout, violations
    from stagewright.graphs.documents.units import format_seconds
    from stagewright.service.layouts import CheckLayoutAnswer

    plan = load_layout(path)
    found = violations(plan)
    if as_json:
        print_answer(CheckLayoutAnswer(status="invalid" if found else "valid", violations=found))
    elif found:
        print_lines(*(f"{path}: {one}" for one in found))
    else:
        print_lines(
            f"{path}: valid, {format_seconds(plan.iteration_seconds)} per iteration; the search "
            "behind its bound is not run again: train-plan does"
        )
    return 1 if found else 0
