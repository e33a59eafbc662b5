"""What it costs to start a command or a run: CPU seconds beside those of an import of torch.

``python -m benchmarks launching [--quick]``. A run is one step of a model that computes next to
nothing, or three of a small Llama of transformers. The layouts are of 64 GPUs and are all found and
proved; kernels are compiled before. All take turns.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.report import Table
from stagewright.formulations.plans.plan import (
    PipelinePlan,
    Schedule,
    ScheduledAction,
    Stage,
    save_plan,
)

RANKS, TURNS, QUICK_TURNS = (1, 2, 4), 9, 1
ROOT = Path(__file__).parents[1]
LLAMA = ["--module", "examples.hugging_face:llama", "--data", "examples.hugging_face:batches"]
LLAMA_LAYERS = 7  # its four blocks, the embedding, the norm and the head
IMPORTS = {
    "import torch": "import torch",
    "import torch, torch._dynamo (as an optimizer of torch does)": "import torch, torch._dynamo",
}
COMMANDS = {
    "stagewright --help": ["--help"],
    "stagewright models": ["models"],
    "stagewright train-plan, a type of the table": ["train-plan", "llama.json"],
    "stagewright train-plan, a type read from its module": ["train-plan", "hunyuan_v1_dense.json"],
}
LAYOUTS = ["--device", "h100", "--gpus", "64", "--global-batch", "512", "--sequence", "2048"]
CONFIG = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128_256,
}  # fmt: skip
MODEL = """
import torch

def model():
    return [torch.nn.Linear(4, 4) for _ in range({stages})]

def batches():
    yield torch.ones(4, 4), torch.zeros(4, dtype=torch.int64)
"""


def plan_on(ranks: int, layers: int) -> PipelinePlan:
    """A stage on each rank, one microbatch."""
    cuts = [s * layers // ranks for s in range(ranks + 1)]
    stages = tuple(Stage(one, (f"rank{s}",)) for s, one in enumerate(pairwise(cuts)))
    forth = [(s, f"{s}F0", s) for s in range(ranks)]
    back = [(s, f"{s}B0", 2 * ranks - s) for s in reversed(range(ranks))]
    entries = tuple(ScheduledAction(f"rank{s}", name, at, at + 1) for s, name, at in forth + back)
    return PipelinePlan("", "given", "model", "ranks", 1, stages, Schedule(entries))


def cpu_seconds(command: Sequence[str], folder: Path) -> float:
    """User and system time of a command and of all processes that it starts."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    paths = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def tables(quick: bool) -> Iterator[Table]:
    """Imports of torch, commands, and runs of one step on several ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commands = {label: ["-c", text] for label, text in IMPORTS.items()}
        for kind in ("llama", "hunyuan_v1_dense"):
            (folder / f"{kind}.json").write_text(json.dumps({"model_type": kind, **CONFIG}))
        for label, words in COMMANDS.items():
            layouts = LAYOUTS if "train-plan" in words else []
            commands[label] = ["-m", "stagewright", *words, *layouts]
        for ranks in RANKS:
            save_plan(plan_on(ranks, ranks), folder / f"{ranks}.json")
            (folder / f"model{ranks}.py").write_text(MODEL.format(stages=ranks))
            given = ["--module", f"model{ranks}:model", "--data", f"model{ranks}:batches"]
            run = ["-m", "stagewright", "run", f"{ranks}.json", *given, "--steps", "1"]
            commands[f"stagewright run, one step, ranks: {ranks}"] = run
            save_plan(plan_on(ranks, LLAMA_LAYERS), folder / f"llama{ranks}.json")
            run = ["-m", "stagewright", "run", f"llama{ranks}.json", *LLAMA, "--steps", "3"]
            commands[f"stagewright run, three steps of a Llama, ranks: {ranks}"] = run
        taken: dict[str, list[float]] = {label: [] for label in commands}
        for _ in range(QUICK_TURNS if quick else TURNS):
            for label, command in commands.items():
                taken[label].append(cpu_seconds(command, folder))
    seconds = {label: median(found) for label, found in taken.items()}
    one = seconds["import torch"]
    yield Table(
        "launching",
        f"To start a command or a run: CPU seconds, median of {QUICK_TURNS if quick else TURNS}",
        ("command", "CPU s", "imports of torch"),
        tuple((label, found, found / one) for label, found in seconds.items()),
    )
