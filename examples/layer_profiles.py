"""Write ``layers/gpt-24x2048.json``: layer profiles of a GPT with 1.3e9 parameters.

    python examples/layer_profiles.py

Nothing here is measured: the times are those of ``train-plan``'s model of an A100's and a V100's
kernels and NVLink, rounded to four digits, by tensor degree and microbatch, in fp16. Measured
profiles are imported with ``stagewright import --from sailor`` or ``--from metis``.
"""

from dataclasses import replace
from pathlib import Path

from stagewright.formulations.parallelism.profiles.cluster import ServerPools, pool_of_kind
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.models.architecture import Architecture, FeedForward, GroupedAttention
from stagewright.graphs.models.layer_profiles import (
    LayerProfiles,
    LayerSizes,
    Measured,
    save_layer_profiles,
)
from stagewright.service.layouts.mixed import mixed_problem
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


def main() -> None:
    """Write the document."""
    save_layer_profiles(profiles(), HERE / "layers" / f"{GPT.name}.json")


def profiles() -> LayerProfiles:
    """All kinds, tensor degrees and microbatches, with the sizes of the layers."""
    problems = {
        kind: training_problem(
            GPT, fabric_of_kind(kind, 4, per_server=4), sequence=SEQUENCE, batch=4, precision="fp16"
        )
        for kind in KINDS
    }
    pools = ServerPools(tuple(pool_of_kind(kind, 1, 4) for kind in KINDS))
    found = mixed_problem(
        problems, pools, precision="fp16", tensor=DEGREES, microbatches=MICROBATCHES
    ).problem.profiles
    return replace(
        found,
        source="analytic: stagewright's model of kernels and links; examples/layer_profiles.py",
        measured=tuple(map(rounded_times, found.measured)),
        sizes=tuple(map(rounded_sizes, found.sizes)),
    )


def rounded_times(one: Measured) -> Measured:
    """Four digits of each time."""
    names = ("forward_seconds", "backward_seconds", "update_seconds")
    return replace(one, **{name: tuple(map(rounded, getattr(one, name))) for name in names})


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
