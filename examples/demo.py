"""Plan three models on two topologies each, print the plans, and keep the first one.

    python examples/demo.py

Writes ``demo-output/plan.json`` and ``demo-output/timeline.html``, BERT-large on eight servers.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

import stagewright
from stagewright.formulations.plan import Stage, save_plan

HERE = Path(__file__).parent
CASES = {
    "bert-large.v100": ("v100-8x4", "dgx1"),
    "gpt-12x512.cpu": ("cpu-2x4", "cpu-ring-6"),
    "resnet50.cpu": ("cpu-2x4", "cpu-ring-6"),
}


def main() -> None:
    """Plan all cases and write the first one's plan and timeline."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--time-limit", type=float, default=8.0, help="seconds for each plan")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("demo-output"))
    options = parser.parse_args()
