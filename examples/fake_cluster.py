"""A cluster that is not there: it "runs" the layout of a folder, and logs as Megatron-LM does.

    stagewright tune config.json ... -o tuning --launch "python fake_cluster.py {folder}"

Seconds are those of a CSV with columns layout, seconds where --table names one; else of the cost
model with hidden rates: kernels, links and memory other than the planner believes, and noise. What
does not fit in the memory of a GPU ends as it does in torch.
"""

import argparse
import csv
import random
import sys
from dataclasses import replace
from pathlib import Path

from stagewright.formulations.parallelism.document import LayoutPlan, load_layout
from stagewright.formulations.parallelism.estimate import evaluate

MATMUL, MEMORY, LINKS, PEAK, NOISE = 0.9, 0.75, 0.6, 1.03, 0.003


def hidden(plan: LayoutPlan) -> tuple[float, float]:
    """Seconds and peak bytes of a layout on the machines as they are."""
    problem = plan.problem
    reached = problem.rates.reached
    slower = replace(reached, matmul=MATMUL * reached.matmul, memory=MEMORY * reached.memory)
    levels = tuple(
        replace(one, bytes_per_second=LINKS * one.bytes_per_second) for one in problem.fabric.levels
    )
    machines = replace(
        problem,
        rates=replace(problem.rates, reached=slower),
        fabric=replace(problem.fabric, levels=levels),
    )
    found = evaluate(machines, plan.layout)
    return found.seconds, PEAK * found.peak_bytes


def main() -> int:
    """Print the log of a run; exit code 1 if it runs out of memory or its layout has no row."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("folder", type=Path, help="with the layout.json of a trial")
    options.add_argument("--table", type=Path, help="CSV with columns layout, seconds")
    given = options.parse_args()
    plan = load_layout(given.folder / "layout.json")
    seconds, peak = hidden(plan)
    if given.table is not None:
        with given.table.open(encoding="utf-8") as file:
            table = {row["layout"]: float(row["seconds"]) for row in csv.DictReader(file)}
        if str(plan.layout) not in table:
            print(f"RuntimeError: {plan.layout} is not in {given.table}")
            return 1
        seconds = table[str(plan.layout)]
    elif peak > plan.problem.fabric.memory_bytes:
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
        return 1
    draw = random.Random(str(plan.layout))
    print(f"[Rank 0] (after 1 iterations) memory (MB) | max reserved: {peak / 2**20:.1f}")
    for step in range(1, 21):
        taken = 1e3 * seconds * (3 if step == 1 else draw.gauss(1, NOISE))
        print(
            f" iteration {step:8}/      20 | consumed samples: {step * plan.problem.batch:12} | "
            f"elapsed time per iteration (ms): {taken:.1f} | "
            f"global batch size: {plan.problem.batch:5} | lm loss: 1.1E+01 |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
