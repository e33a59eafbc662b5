"""Write ``layers/gpt-24x2048.json``: layer profiles of a GPT with 1.3e9 parameters.

    python examples/layer_profiles.py

Nothing here is measured: the times are those of ``train-plan``'s model of an A100's and a V100's
kernels and NVLink, rounded to four digits, by tensor degree and microbatch, in fp16. Measured
profiles are imported with ``stagewright import --from sailor`` or ``--from metis``.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stagewright.formulations.parallelism.layer_times import LayerTime, layer_time
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.models.analytic_sizes import with_sizes
from stagewright.graphs.models.architecture import Architecture, FeedForward, GroupedAttention
from stagewright.graphs.models.layer_profiles import (
    LayerProfiles,
    LayerSizes,
    Measured,
    save_layer_profiles,
)
from stagewright.graphs.models.shards import LayerSplit, shares_of
from stagewright.service.layouts.problems import training_problem

HERE = Path(__file__).parent
KINDS, DEGREES, MICROBATCHES, SEQUENCE = ("a100", "v100"), (1, 2, 4), (1, 2, 4), 1024
GPT = Architecture(
    name="gpt-24x2048",
    layers=24,
    hidden=2048,
    vocabulary=50304,
    attention=GroupedAttention(16, 16, 128, bias=True, output_bias=True),
    feed_forward=FeedForward(8192, gated=False, bias=True),
    norm="layer",
    positions=SEQUENCE,
)
UPDATE_BYTES = 32
"""Read and written per parameter by Adam: gradient, master weight, two moments, weight in fp16."""


def main() -> None:
    """Write the document."""
    save_layer_profiles(profiles(), HERE / "layers" / f"{GPT.name}.json")


def profiles() -> LayerProfiles:
    """All kinds, tensor degrees and microbatches, with the sizes of the layers."""
    measured = tuple(
        layers(kind, size, tensor) for kind in KINDS for size in MICROBATCHES for tensor in DEGREES
    )
    source = "analytic: stagewright's model of kernels and links; examples/layer_profiles.py"
    whole = LayerProfiles(GPT.name, source, measured)
    sized = with_sizes(whole, GPT, sequence=SEQUENCE, precision="fp16")
    return replace(sized, sizes=tuple(map(rounded_sizes, sized.sizes)))


def layers(kind: str, samples: int, tensor: int) -> Measured:
    """The times of every layer on a group of ``tensor`` devices."""
    fabric = fabric_of_kind(kind, 4, per_server=4)
    problem = training_problem(GPT, fabric, sequence=SEQUENCE, batch=samples, precision="fp16")
    split = LayerSplit(tensor=tensor)
    shares = shares_of(GPT, SEQUENCE, split).every
    times = [layer_time(problem, one, split, samples, "none", False) for one in shares]
    rate = problem.card.memory_bytes_per_second * problem.reached.memory

    def each(of: Callable[[LayerTime], float]) -> tuple[float, ...]:
        return tuple(rounded(of(one)) for one in times)

    return Measured(
        kind,
        samples,
        tensor,
        forward_seconds=each(lambda one: one.forward),
        backward_seconds=each(lambda one: one.backward),
        update_seconds=tuple(rounded(UPDATE_BYTES * one.parameters / rate) for one in shares),
    )


def rounded(value: float) -> float:
    """Four digits."""
    return float(f"{value:.4g}")


def rounded_sizes(one: LayerSizes) -> LayerSizes:
    """Whole elements and bytes."""
    return LayerSizes(
        one.tensor,
        *(tuple(float(round(each)) for each in values)
          for values in (one.parameters, one.saved_bytes, one.output_bytes)),
    )  # fmt: skip


if __name__ == "__main__":
    main()
