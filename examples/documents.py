"""Write the clusters, a kind of device and the analytic profiles in this folder.

    python examples/documents.py

The measured profiles come from ``stagewright profile`` and are not changed.
"""

from pathlib import Path

from stagewright.formulations.prices.analytic import analytic_model
from stagewright.graphs.documents import documents
from stagewright.graphs.machines.cluster import (
    Cluster,
    Device,
    Link,
    from_matrix,
    save_cluster,
    uniform_servers,
)
from stagewright.graphs.machines.devices import NVLINK, Accelerator
from stagewright.graphs.machines.topology import dgx1
from stagewright.graphs.models.chain import save_model

HERE = Path(__file__).parent
MODELS = {  # samples per microbatch, as in SPP table II
    "vgg19": 32,
    "resnet152": 4,
    "inception-v3": 32,
    "transformer": 32,
    "bert-large": 4,
    "xlnet-large": 4,
    "bert-48": 2,
}
L40 = Accelerator(
    "l40", 48e9, 864e9, 90.5e12, 181.05e12, has_bf16=True, fp8_flops=362e12,
    server_bytes_per_second=24e9, network_bytes_per_second=25e9, host_bytes_per_second=24e9,
    source="NVIDIA's datasheet; PCIe 4.0 x16 at twice NCCL's 12 GB/s of PCIe 3.0, 200 Gb/s network",
)  # fmt: skip
"""A kind of device that is not built in: dense peaks, no NVLink."""


def main() -> None:
    """Write every document."""
    for folder in ("clusters", "devices", "profiles"):
        (HERE / folder).mkdir(exist_ok=True)
    for cluster in clusters():
        save_cluster(cluster, HERE / "clusters" / f"{cluster.name}.json")
    documents.write(Accelerator, L40, HERE / "devices" / f"{L40.name}.json")
    for name, size in MODELS.items():
        save_model(analytic_model(name, size, "v100"), HERE / "profiles" / f"{name}.v100.json")


def clusters() -> list[Cluster]:
    """Two clusters of GPUs and two of CPU cores."""
    return [
        # SPP section VI-B: servers of four V100 on PCIe, RDMA between them.
        uniform_servers(8, 4, Link(14e9, 5e-6), Link(4.5e9, 10e-6), name="v100-8x4"),
        dgx1(brick=NVLINK, latency=5e-6),
        uniform_servers(
            2, 4, Link(8e9, 2e-6), Link(1.25e9, 50e-6),
            kind="cpu-core", memory_bytes=4e9, name="cpu-2x4",
        ),
        _ring(6, Link(1.25e9, 50e-6)),
    ]  # fmt: skip


def _ring(size: int, link: Link) -> Cluster:
    """CPU cores in a ring: each is linked to the next, the last to the first."""
    devices = [Device(f"c{i}", "cpu-core", 4e9) for i in range(size)]
    bandwidth = [
        [link.bandwidth_bytes_per_second if (i - j) % size in (1, size - 1) else None
         for j in range(size)]
        for i in range(size)
    ]  # fmt: skip
    return from_matrix(devices, bandwidth, link.latency_seconds, name=f"cpu-ring-{size}")


if __name__ == "__main__":
    main()
