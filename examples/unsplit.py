"""Train a model in a single process and compare its parameters with those of a run.

    python examples/unsplit.py --module examples.models:transformer \
        --data examples.models:batches --steps 20 parameters.pt

Both use float64, SGD with momentum and seed 0. The exit code is 1 if a parameter differs.
"""

import argparse
import sys
from pathlib import Path

import torch

from stagewright.cli.factories import load_factory
from stagewright.executor.training.data.batches import mini_batches

LEARNING_RATE, MOMENTUM = 0.1, 0.9
TOLERANCE = 1e-6  # relative to a parameter's norm


def main() -> int:
    """Train, compare, and print the largest relative difference."""
    options = _options()
    expected = train(options)
    found = torch.load(options.parameters)
    if found.keys() != expected.keys():
        print(f"parameters in one model only: {sorted(found.keys() ^ expected.keys())}")
        return 1
    worst, name = max(
        (float((found[name] - one).norm() / one.norm()), name) for name, one in expected.items()
    )
    verdict = "equal" if worst <= TOLERANCE else "DIFFERENT"
    print(
        f"{len(expected)} parameters after {options.steps} steps are {verdict}: "
        f"largest relative difference from the unsplit model {worst:.1e}, in {name}"
    )
    return 0 if worst <= TOLERANCE else 1


def train(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Return the state dict of the unsplit model after training."""
    torch.manual_seed(0)
    model = load_factory(options.module, "--module")().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    batches = mini_batches(load_factory(options.data, "--data"), seed=0)
    for _ in range(options.steps):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model.state_dict()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parameters", type=Path, help="file from `run --save-parameters`")
    parser.add_argument("--module", required=True, metavar="PACKAGE:FACTORY")
    parser.add_argument("--data", required=True, metavar="PACKAGE:FACTORY")
    parser.add_argument("--steps", required=True, type=int)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
