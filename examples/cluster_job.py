"""Three training jobs share a cluster in rounds under max-min fairness.

    python examples/cluster_job.py FOLDER

Ray starts on this machine with two simulated accelerators, a v100 and a k80 at half its speed.
Stop the script at any time; restarted with the same folder, it continues. With --address, the
rounds run on a Ray cluster whose nodes have custom resources of these names.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from stagewright.executor.clusters.leases import Lease, LeaseIterator
from stagewright.executor.clusters.rates import ClusterJob
from stagewright.executor.clusters.runtime import run_cluster
from stagewright.formulations.clusters.allocation import Allocation, AllocationProblem
from stagewright.formulations.forms.answers import Limits
from stagewright.graphs.documents import documents
from stagewright.graphs.workloads.jobs import Job, Rate, Throughputs
from stagewright.graphs.workloads.pool import parse_pool
from stagewright.solvers.clusters.policies import max_min

STEPS_PER_SECOND = {"v100": 100.0, "k80": 50.0}


def train(lease: Lease) -> None:
    """Run one lease of a job: a loop over batches, with functions that load and save its state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def load(folder: Path) -> None:
        state = torch.load(folder / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def save(folder: Path) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, folder / "state.pt")

    batches = LeaseIterator(samples(), load, save, lease)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        time.sleep(1 / STEPS_PER_SECOND[lease.accelerator])  # simulates the accelerator's speed
    print(f"{lease.accelerator}: stopped after {batches.step} steps, loss {loss.item():.4f}")


def samples() -> list[tuple[Tensor, Tensor]]:
    """Mini-batches of one epoch: samples of a function to learn."""
    inputs = torch.randn(10, 32, 16, generator=torch.Generator().manual_seed(1))
    return [(batch, batch.sum(dim=1, keepdim=True).sin()) for batch in inputs]


def fairly(problem: AllocationProblem) -> Allocation:
    """Each job's share of each accelerator type, under max-min fairness."""
    found = max_min.solve(problem, Limits()).allocation
    if found is None:
        raise RuntimeError("max-min found no allocation")
    return found


def main() -> None:
    """Run the jobs and print the outcome of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for checkpoints and the job store")
    parser.add_argument("--address", help="of a Ray cluster; default: start Ray here")
    options = parser.parse_args()
    report = run_cluster(
        [ClusterJob(Job(name, "mlp", steps=200), train) for name in ("ada", "bob", "cyd")],
        Throughputs(tuple(Rate("mlp", 1, name, rate) for name, rate in STEPS_PER_SECOND.items())),
        parse_pool("v100=1,k80=1"),
        fairly,
        folder=options.folder,
        round_seconds=1.0,
        address=options.address,
    )
    for job in report.jobs:
        print(f"{job.name}: {job.state}, {job.steps} steps, {job.completion_seconds:.1f} s")
    for share in report.shares:
        print(
            f"{share.job} on {share.worker}: {share.measured:.2f} of the time, "
            f"planned {share.target:.2f}"
        )
    documents.write_file(options.folder / "report.json", documents.to_json(report))


if __name__ == "__main__":
    main()
