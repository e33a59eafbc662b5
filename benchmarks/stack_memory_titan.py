"""TorchTitan's own Llama 3 8B under torch's fake process group, with its memory tracker, on a CPU.

No tensor has data. The attention is torch's fused one, in place of the kernels that need a GPU, and
the step of the optimizer is left out: the peak is where the loss begins its backward. TorchTitan
(0.3.0) and what it imports must be installed; else there is no table.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from benchmarks.layout_runs import compiled
from benchmarks.report import Table
from benchmarks.stack_memory import model_named
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layout import Layout, parse_layout
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.stack_memory import TORCHTITAN_SLACK
from stagewright.service.layouts.problems import training_problem

MODEL, FLAVOR = "llama3-8b", "8B"
_CASES = (
    ("p1 t1 d8 b2 zero3 selective", 8192),
    ("p1 t1 d128 b2 zero3 selective", 8192),
    ("p1 t1 d8 b1 zero3 full", 32768),
    ("p1 t1 d8 b1 zero3", 8192),
)


def tables(quick: bool) -> Iterator[Table]:
    """What the tracker counts, and ours without the allocator's slack."""
    if find_spec("torchtitan") is None:
        return
    rows = tuple(_row(words, sequence) for words, sequence in _CASES[: 1 if quick else None])
    columns = (
        "layout", "tokens", "kept and the loss GB, tracked", "ours", "difference",
        "sharded parameters GB, tracked", "ours",
    )  # fmt: skip
    yield Table("stack_memory_titan", "TorchTitan's Llama 3 8B, tracked by torch", columns, rows)


def _row(words: str, sequence: int) -> tuple[object, ...]:
    layout = parse_layout(words)
    tracked = tracked_bytes(layout, sequence)
    problem = training_problem(
        model_named(MODEL), fabric_of_kind("h100", layout.ranks), sequence=sequence,
        batch=layout.data * layout.microbatch, framework="torchtitan",
    )  # fmt: skip
    (rank,) = evaluate(problem, layout, compiled).memory
    tokens = sequence * layout.microbatch
    of = problem.architecture
    loss = tokens * of.vocabulary * problem.memory.loss_gradient_bytes
    ours = rank.activations / (1 + TORCHTITAN_SLACK) + loss
    theirs = tracked["ACT"] + tracked["TEMP"]
    return (
        words, tokens, f"{theirs / 1e9:.1f}", f"{ours / 1e9:.1f}", f"{ours / theirs - 1:+.1%}",
        f"{tracked['SHARDED_PARAM'] / 1e9:.2f}", f"{rank.weights / 1e9:.2f}",
    )  # fmt: skip


def tracked_bytes(layout: Layout, sequence: int) -> dict[str, float]:
    """Bytes at the peak of a forward and a backward on a rank, by torch's kinds."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.functional import cross_entropy
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=layout.data, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (layout.data,), mesh_dim_names=("fsdp",))
        with FakeTensorMode():
            model = _sharded(layout, mesh)
            tokens = torch.randint(0, 1000, (layout.microbatch, sequence))
            tracker = FSDPMemTracker(model)
            tracker.track_inputs((tokens,))
            with tracker:
                scores = model(tokens)
                loss = cross_entropy(scores.flatten(0, 1).float(), tokens.flatten(0, 1))
                del scores
                loss.backward()
        (device,) = tracker.get_tracker_snapshot("peak").values()
    finally:
        dist.destroy_process_group()
    return {str(kind).rpartition(".")[2]: float(number) for kind, number in device.items()}


def _sharded(layout: Layout, mesh: Any) -> Any:
    """The model as torchtitan divides and checkpoints it."""
    import torch
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.models.llama3 import model_registry

    class Selective(SelectiveAC):  # type: ignore[misc]
        """Which keeps the outputs of the CPU's kernel of the attention too."""

        def get_save_ops(self) -> set[Any]:
            own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
            return set(super().get_save_ops()) | {own}

    model = model_registry(FLAVOR, attn_backend="varlen").model.build()
    for block in model.layers.values():
        block.attention.inner_attention = _attention()
    if layout.recompute == "selective":
        Selective(SelectiveAC.Config()).apply(model)
    elif layout.recompute == "full":
        FullAC(FullAC.Config()).apply(model)
    numbers = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    apply_fsdp_to_decoder(model, mesh, **numbers, pp_enabled=False)
    return model


def _attention() -> Any:
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention

    class Attention(nn.Module):
        """Causal attention of torch; keys and values are repeated for their queries."""

        def forward(self, queries: Any, keys: Any, values: Any, **given: Any) -> Any:
            q, k, v = (one.transpose(1, 2) for one in (queries, keys, values))
            times = q.shape[1] // k.shape[1]
            k, v = (one.repeat_interleave(times, 1) for one in (k, v))
            found = scaled_dot_product_attention(q, k, v, is_causal=True, scale=given["scale"])
            return found.transpose(1, 2)

    return Attention()
